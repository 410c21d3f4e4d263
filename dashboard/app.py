"""The application: routes, static files, errors as pages, and the guard around it all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from treeckpt.core.errors import TreeckptError

from . import routes_time
from .comparing import Comparisons
from .library import Library, Missing
from .render import render, templates
from .routes import api, pages
from .security import LOOPBACK_HOSTS, Guard

__all__ = ["create_app"]


def create_app(
    runs: Sequence[str | Path],
    *,
    token: str | None = None,
    root_path: str = "",
    allowed_hosts: Collection[str] = LOOPBACK_HOSTS,
) -> FastAPI:
    """The dashboard of these runs, as an ASGI application.

    Args:
        runs: directories of checkpoints, or single checkpoints.
        token: what clients must show; None lets everyone in who reaches it.
        root_path: the path under which a proxy serves it.
        allowed_hosts: Host headers that are answered, with or without a port, compared exactly.
    """
    root = "/" + root_path.strip("/") if root_path.strip("/") else ""
    app = FastAPI(title="treeckpt", docs_url=None, redoc_url=None, openapi_url="/api/v1/openapi.json")
    app.state.library = Library(runs)
    app.state.comparisons = Comparisons(app.state.library)
    app.state.templates = templates()
    app.include_router(api)
    app.include_router(pages)
    app.include_router(routes_time.api)
    app.include_router(routes_time.pages)
    app.mount("/static", StaticFiles(packages=[("treeckpt_dashboard", "static")]), name="static")
    app.add_exception_handler(Missing, _missing)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(TreeckptError, _unreadable)
    app.add_exception_handler(OSError, _unreadable)
    app.add_middleware(Guard, hosts=allowed_hosts, token=token, root_path=root)
    return app


def _answer(request: Request, status: int, text: str) -> Response:
    if request.scope["path"].startswith("/api/"):
        return JSONResponse({"error": text}, status)
    return render(request, "error.html", {"status": status, "text": text}, status)


def _missing(request: Request, error: Exception) -> Response:
    return _answer(request, 404, str(error))


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
