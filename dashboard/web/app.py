"""The ASGI application: the routes of all rooms, static files, errors as answers, and the checks around them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Collection, Sequence
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from treeckpt._io.storage.local_store import check_path
from treeckpt._runs.verification import cache_directory
from treeckpt.errors import StoreError, TreeckptError
from treeckpt.policy import KeepError, Policy

from ..checkpoint import routes as checkpoint_routes
from ..checkpoint.verify import VerifyJobs
from ..compare import routes as compare_routes
from ..compare.changes import ChangeJobs
from ..compare.diff import Comparisons
from ..pages.answers import NotModified, TableTooLong, describe_responses, is_api, json_response, library_of
from ..pages.checkpoints import loading_page
from ..pages.render import render, templates
from ..runs import routes as runs_routes
from ..runs.failures import FailureLists
from ..runs.first_nan import NanJobs
from ..runs.live import SaveRates
from ..runs.model import CursorError
from ..runs.usage import CleanUpPlans
from ..store.cache import Cache
from ..store.index_reader import StillReading
from ..store.library import Library, NotFound
from ..timing import routes as timing_routes
from ..timing.model import UnknownGroupingError
from ..timing.trends import TrendTables
from . import api_page
from .security import LOOPBACK_HOSTS, RequestGuard

ROOMS = tuple(room.router for room in (runs_routes, checkpoint_routes, compare_routes, timing_routes, api_page))
"""The addresses of all rooms."""
_TITLES = {404: "Not found", 502: "The store cannot be read", 422: "The address of this page is not valid"}
"""What the pages of errors are called."""


def create_app(
    runs: Sequence[str | Path],
    *,
    token: str | None = None,
    root_path: str = "",
    allowed_hosts: Collection[str] = LOOPBACK_HOSTS,
    cache: str | Path | None = None,
    policies: Sequence[Policy] = (),
) -> FastAPI:
    """Creates the dashboard of these runs as an ASGI application.

    Args:
        runs: directories of runs, of folders of runs or of single checkpoints, or URLs of runs or of folders of runs.
        token: the token that clients must send; None requires none.
        root_path: the path under which a proxy serves the dashboard.
        allowed_hosts: Host headers that are answered, with or without a port, compared exactly.
        cache: the cache directory; None takes the user's own.
        policies: the retention policies of the runs, if they are known.

    Raises:
        ValueError: the cache would be inside a run.
    """
    _check_cache(cache, runs)
    root = "/" + root_path.strip("/") if root_path.strip("/") else ""
    app = FastAPI(
        title="treeckpt", docs_url=None, redoc_url=None, openapi_url="/api/v1/openapi.json", lifespan=_lifespan
    )
    library = app.state.library = Library(runs, cache=Cache(cache), policies=policies)
    jobs = app.state.verify_jobs = VerifyJobs(library)
    queues = jobs, NanJobs(library), ChangeJobs(library)
    lists = Comparisons(library), TrendTables(library), CleanUpPlans(library), FailureLists(library)
    services = (library, *queues, *lists, SaveRates())
    app.state.services = {type(one): one for one in services}
    app.state.boot = secrets.token_hex(8)
    app.state.templates = templates()
    for room in ROOMS:
        app.router.routes += [*room.api, *room.pages]
    # a browser asks for it beside JSON, which names no icon
    app.add_route("/favicon.ico", lambda _: RedirectResponse("static/mark.svg"), include_in_schema=False)
    describe_responses(app, ROOMS)
    app.mount("/static", StaticFiles(packages=[("treeckpt_dashboard", "static")]), name="static")
    app.add_exception_handler(StillReading, _on_still_reading)
    app.add_exception_handler(NotModified, _on_not_modified)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_parameters)
    app.add_exception_handler(KeepError, _on_bad_policies)
    for kind, status in ((NotFound, 404), (CursorError, 422), (TableTooLong, 422), (UnknownGroupingError, 422)):
        app.add_exception_handler(kind, partial(_on_error, status=status))
    # a checkpoint was replaced, or found to be damaged, after it was listed; hostile numbers raise ArithmeticError,
    # hostile depth RecursionError, a full disk OSError
    for kind in (TreeckptError, OSError, ArithmeticError, RecursionError):
        app.add_exception_handler(kind, partial(_on_error, status=404, prefix="This cannot be read: "))
    # of what cannot be reached nothing is known, so it is not said to be missing
    app.add_exception_handler(StoreError, partial(_on_error, status=502, prefix="This cannot be read now: "))
    app.add_middleware(RequestGuard, hosts=allowed_hosts, token=token, root_path=root)
    return app


def _check_cache(cache: str | Path | None, runs: Sequence[str | Path]) -> None:
    """Raises ValueError if the cache would be inside a run: a run is never written to."""
    directory = Path(cache) if cache is not None else cache_directory()
    for run in runs:
        check_path(str(run))
        if directory is not None and "://" not in str(run) and directory.resolve().is_relative_to(Path(run).resolve()):
            raise ValueError(f"the cache {directory} would be inside the run {run}; give another one with --cache")


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    for kind in (VerifyJobs, NanJobs, ChangeJobs, CleanUpPlans, FailureLists, Library):
        app.state.services[kind].close()


# errors as answers ----------------------------------------------------------------------------------------------------


def _error_answer(request: Request, status: int, text: str) -> Response:
    if is_api(request.scope["path"]):
        return json_response({"error": text}, status)
    request.state.links = {}
    page = {"status": status, "title": _TITLES.get(status, "This cannot be answered"), "text": text, "keep": None}
    return render(request, "error.html", page, status)


def _on_still_reading(request: Request, error: Exception) -> Response:
    """Answers at once with the progress, for a large index that is read for the first time."""
    assert isinstance(error, StillReading), "the handler is registered for this class"
    page = loading_page(library_of(request), error.url, error.progress)
    if is_api(request.scope["path"]):
        return json_response({"loading": page.progress}, 202, {"Retry-After": "1"})
    return render(request, "loading.html", page)


def _on_error(request: Request, error: Exception, *, status: int, prefix: str = "") -> Response:
    return _error_answer(request, status, f"{prefix}{error}")


def _on_bad_policies(request: Request, error: Exception) -> Response:
    """Answers with a form in which the policies of the request can be mended."""
    if is_api(request.scope["path"]):
        return json_response({"error": f"keep: {error}"}, 422)
    request.state.links = {}
    keep = request.query_params.get("keep", "")
    return render(
        request,
        "error.html",
        {"status": 422, "title": "These policies cannot be read", "text": f"{error}", "keep": keep},
        422,
    )


def _on_not_modified(request: Request, error: Exception) -> Response:
    assert isinstance(error, NotModified), "the handler is registered for this class"
    return Response(status_code=304, headers={"ETag": error.tag})


def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = "This cannot be answered."
    if status == 404:
        in_api = is_api(request.scope["path"])
        text = "There is no such address: the page /api lists all." if in_api else "There is no such page."
    return _error_answer(request, status, text)


def _on_invalid_parameters(request: Request, error: Exception) -> Response:
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    meanings = {one.name: one.field_info.description for one in request.scope["route"].dependant.query_params}
    texts = [
        f"expected {meanings[p['loc'][-1]]}, got {p['input']!r}" if p["type"] == "string_pattern_mismatch" else p["msg"]
        for p in problems
    ]
    return _error_answer(request, 422, "; ".join(f"{p['loc'][-1]}: {t}" for p, t in zip(problems, texts, strict=True)))
