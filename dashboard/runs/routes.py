"""The addresses of runs, saves in progress, disk usage and metrics.

These pages change while they are open. Answers about runs have an ETag: a client that requests again gets a 304, for
which no page is built.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from fastapi import Query, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response

from ..pages.answers import PageRouter
from ..store.library import Library, Run
from . import live, model, usage
from .finder import find_page
from .first_nan import NanPage, get_first_nan
from .metrics import metrics_text
from .model import SORTS, ListQuery, RunPage, RunsPage, StatusFilter

router = PageRouter(
    cursor=Query(max_length=2000, description="`cursor` of the previous page; it overrides `start`"),
    sort=Query(
        pattern=f"^({SORTS})$", description="newest, oldest, bytes, time, step, status or metric:NAME; - reverses"
    ),
    action=Query(description="start or cancel a scan"),
    best=Query(
        max_length=500, description="the metric by which a checkpoint is the best, as `loss:min` or `accuracy:max`"
    ),
    keep=Query(max_length=1000, description="policies, as `last:3 every:1000 best:loss:min:2`"),
)
NAME = Query(max_length=500, description="words of the name, the path or the state of a run")
WORDS = Query(max_length=500, description="words to find, and conditions as `loss<2.5`")
PLACE = Query(max_length=64, description="the id of a run or a checkpoint, whose leaves come first")


class NotModified(Exception):
    """The client has the current version of a page."""

    def __init__(self, tag: str) -> None:
        self.tag = tag


def _check_tag(request: Request, library: Library, runs: Sequence[Run], more: str = "") -> None:
    """Sets the ETag of an answer about these runs.

    Raises:
        NotModified: the client has it.
    """
    given = request.headers.get("if-none-match", "")
    # a client that polls waits for what is new; one that opens a page wants to see it
    version = model.run_tag(library, runs, wait=1.0 if given else 0.0)
    text = f"{request.app.state.boot} {version} {request.scope['path']} {request.scope['query_string']!r} {more}"
    tag = f'W/"{hashlib.blake2s(text.encode(), digest_size=8).hexdigest()}"'
    if tag in given:
        raise NotModified(tag)
    request.state.etag = tag


def get_live(request: Request, library: Library, rates: live.SaveRates, start: int = 0) -> live.LivePage:
    """Saves of every run that have not ended: those in progress, then the stalled ones, then those that were killed."""
    library.start_scans(library.runs)
    saving = any(info.saving for run in library.runs for _, info in library.checkpoints(run, wait=1.0))
    # What a save waits for is said with seconds.
    _check_tag(request, library, library.runs, f"{time.time() // live.SPELL:.0f}" if saving else "")
    return live.live_page(library, rates, start)


def get_runs(request: Request, library: Library, q: str = "") -> RunsPage | Response:
    """The runs, each with its newest checkpoints. The page of a single run is shown at once."""
    runs = library.runs
    if len(runs) == 1 and not library.has_folders and not request.scope["path"].startswith("/api/"):
        query = request.url.query
        return RedirectResponse(f"runs/{runs[0].id}{'?' * bool(query)}{query}", 307)
    _check_tag(request, library, runs)
    return model.runs_page(library, q)


def get_run(
    request: Request,
    library: Library,
    run_id: str,
    start: int = 0,
    cursor: str = "",
    sort: str = "newest",
    status: StatusFilter = "",
    q: str = "",
    keep: str | None = None,
    best: str = "",
) -> RunPage:
    """The checkpoints of one run, by default newest first."""
    _check_tag(request, library, [library.run(run_id)])
    return model.run_page(library, run_id, ListQuery(start, cursor, sort, status, q, best=best, keep=keep))


def show_metrics(library: Library) -> PlainTextResponse:
    """The figures of all runs for Prometheus."""
    return PlainTextResponse(metrics_text(library), media_type="text/plain; version=0.0.4")


router.get("/runs", get_runs, "runs.html", page="/", table="runs", result_type=RunsPage, q=NAME)
router.get("/find", find_page, at=PLACE)
router.get("/runs/{run_id}", get_run, "run.html", table="run.checkpoints", q=WORDS)
router.get("/runs/{run_id}/first-nan", get_first_nan, "first_nan.html", result_type=NanPage)
router.get("/live", get_live, "live.html")
router.get("/usage", usage.usage_page, "usage.html", table="runs")
router.show("/metrics", show_metrics)
