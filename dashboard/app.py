"""The application: routes, static files, errors as pages, and the guard around it all."""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from treeckpt.core.errors import TreeckptError
from treeckpt.core.policy import Policy

from . import routes, routes_contents, routes_reshard, routes_time, run_routes
from .cache import Cache, default_directory
from .comparing import Comparisons
from .keeping import KeepError
from .library import Library, Missing
from .ops import Speeds
from .queries import loading_page
from .reading import StillReading
from .render import render, templates
from .routing import Address, Senseless, encoded
from .run_routes import Unchanged
from .runs import CursorError
from .security import LOOPBACK_HOSTS, Guard

__all__ = ["api_addresses", "create_app"]


def create_app(
    runs: Sequence[str | Path],
    *,
    token: str | None = None,
    root_path: str = "",
    allowed_hosts: Collection[str] = LOOPBACK_HOSTS,
    cache: str | Path | None = None,
    policies: Sequence[Policy] = (),
) -> Starlette:
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
    app = Starlette(
        routes=_routes(),
        middleware=[Middleware(Guard, hosts=allowed_hosts, token=token, root_path=root)],
        exception_handlers=_HANDLERS,
        lifespan=_lifespan,
    )
    app.state.library = Library(runs, cache=Cache(cache), policies=policies)
    app.state.comparisons = Comparisons(app.state.library)
    app.state.boot = secrets.token_hex(8)
    app.state.speeds = Speeds()
    app.state.templates = templates()
    return app


_PARTS = (run_routes, routes, routes_reshard, routes_time)


def api_addresses() -> list[Address]:
    """What is answered as JSON."""
    return [address for part in (*_PARTS, routes_contents) for address in part.api.addresses]


def _routes() -> list[Route | Mount]:
    return [
        *(route for part in (*_PARTS, routes_contents) for route in part.api.routes),
        *(route for part in _PARTS for route in part.pages.routes),
        Route("/api/v1/openapi.json", _schema),
        Mount("/static", StaticFiles(packages=[("treeckpt_dashboard", "static")])),
    ]


def _schema(request: Request) -> Response:
    from .schema import schema_of  # few ask for it

    return encoded(schema_of(api_addresses(), title="treeckpt dashboard", version="1"))


def _answer(request: Request, status: int, text: str) -> Response:
    if request.scope["path"].startswith("/api/"):
        return JSONResponse({"error": text}, status)
    return render(request, "error.html", {"status": status, "text": text}, status)


def _check_cache(cache: str | Path | None, runs: Sequence[str | Path]) -> None:
    """A run is never written to."""
    directory = Path(cache) if cache is not None else default_directory()
    for run in runs:
        if "://" not in str(run) and directory.resolve().is_relative_to(Path(run).resolve()):
            raise ValueError(f"the cache {directory} would be inside the run {run}; give another one with --cache")


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
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


def _unreadable(request: Request, error: Exception) -> Response:
    """A checkpoint that changed, or turned out bad, after it was listed."""
    return _answer(request, 404, f"This cannot be read: {error}")


_HANDLERS = {
    Missing: _missing,
    StillReading: _still_reading,
    Unchanged: _unchanged,
    Senseless: _senseless,
    KeepError: _senseless,
    CursorError: _senseless,
    HTTPException: _http_error,
    TreeckptError: _unreadable,
    # hostile numbers, hostile depth, a full disk
    OSError: _unreadable,
    ArithmeticError: _unreadable,
    RecursionError: _unreadable,
    sqlite3.Error: _unreadable,
}
