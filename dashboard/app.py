"""The application: routes, static files, errors as pages, and the guard around it all."""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from treeckpt.core.analysis.retention_policy import Policy
from treeckpt.errors import TreeckptError
from treeckpt.io.storage.bucket import check_path

from . import routes, routes_contents, routes_reshard, routes_time, run_routes
from .answers import describe, encoded
from .cache import Cache, default_directory
from .comparing import Comparisons
from .keeping import KeepError
from .library import Library, Missing
from .ops import Speeds
from .queries import loading_page
from .reading import StillReading
from .render import render, templates
from .run_routes import Unchanged
from .runs import CursorError
from .security import LOOPBACK_HOSTS, Guard

__all__ = ["create_app"]


def create_app(
    runs: Sequence[str | Path],
    *,
    token: str | None = None,
    root_path: str = "",
    allowed_hosts: Collection[str] = LOOPBACK_HOSTS,
    cache: str | Path | None = None,
    policies: Sequence[Policy] = (),
) -> FastAPI:
    """The dashboard of these runs, as an ASGI application.

    Args:
        runs: directories of checkpoints, or single checkpoints; URLs of runs too.
        token: what clients must show; None lets everyone in who reaches it.
        root_path: the path under which a proxy serves it.
        allowed_hosts: Host headers that are answered, with or without a port, compared exactly.
        cache: the directory of the dashboard's own files; None takes the user's.
        policies: what the runs are kept by, if that is known.

    Raises:
        ValueError: the cache would be inside a run.
    """
    _check_cache(cache, runs)
    root = "/" + root_path.strip("/") if root_path.strip("/") else ""
    app = FastAPI(
        title="treeckpt", docs_url=None, redoc_url=None, openapi_url="/api/v1/openapi.json", lifespan=_lifespan
    )
    app.state.library = Library(runs, cache=Cache(cache), policies=policies)
    app.state.comparisons = Comparisons(app.state.library)
    app.state.boot = secrets.token_hex(8)
    app.state.speeds = Speeds()
    app.state.templates = templates()
    for part in _PARTS:
        app.include_router(part.api)
        app.include_router(part.pages)
    describe(app, [part.api for part in _PARTS])
    app.mount("/static", StaticFiles(packages=[("treeckpt_dashboard", "static")]), name="static")
    app.add_exception_handler(Missing, _missing)
    app.add_exception_handler(StillReading, _still_reading)
    app.add_exception_handler(Unchanged, _unchanged)
    app.add_exception_handler(KeepError, _senseless)
    app.add_exception_handler(CursorError, _senseless)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(TreeckptError, _unreadable)
    for kind in (
        OSError,
        ArithmeticError,
        RecursionError,
        sqlite3.Error,
    ):  # hostile numbers, hostile depth, a full disk
        app.add_exception_handler(kind, _unreadable)
    app.add_middleware(Guard, hosts=allowed_hosts, token=token, root_path=root)
    return app


_PARTS = (run_routes, routes, routes_contents, routes_reshard, routes_time)


def _answer(request: Request, status: int, text: str) -> Response:
    if request.scope["path"].startswith("/api/"):
        return encoded({"error": text}, status)
    return render(request, "error.html", {"status": status, "text": text}, status)


def _check_cache(cache: str | Path | None, runs: Sequence[str | Path]) -> None:
    """A run is never written to."""
    directory = Path(cache) if cache is not None else default_directory()
    for run in runs:
        check_path(str(run))
        if "://" not in str(run) and directory.resolve().is_relative_to(Path(run).resolve()):
            raise ValueError(f"the cache {directory} would be inside the run {run}; give another one with --cache")


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.library.close()


def _still_reading(request: Request, error: Exception) -> Response:
    """A large index that nobody has looked at before: the answer comes at once and says how far it is."""
    assert isinstance(error, StillReading), "it is registered for these"
    library: Library = request.app.state.library
    found = loading_page(library, error.url, error.progress)
    if request.scope["path"].startswith("/api/"):
        return encoded({"loading": found.progress}, 202, {"Retry-After": "1"})
    return render(request, "loading.html", found)


def _missing(request: Request, error: Exception) -> Response:
    return _answer(request, 404, str(error))


def _unchanged(request: Request, error: Exception) -> Response:
    assert isinstance(error, Unchanged), "it is registered for these"
    return Response(status_code=304, headers={"ETag": error.tag})


def _senseless(request: Request, error: Exception) -> Response:
    return _answer(request, 422, str(error))


def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return _answer(request, status, "There is no such page." if status == 404 else "This cannot be answered.")


def _invalid(request: Request, error: Exception) -> Response:
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    text = "; ".join(f"{p['loc'][-1]}: {p['msg']}" for p in problems)
    return _answer(request, 422, text)


def _unreadable(request: Request, error: Exception) -> Response:
    """A checkpoint that changed, or turned out bad, after it was listed."""
    return _answer(request, 404, f"This cannot be read: {error}")
