"""The addresses of runs, saves in progress, disk usage and metrics.

These pages change while they are open. Answers about runs have an ETag: a client that requests again gets a 304, for
which no page is built.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, Query, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response

from ..pages.answers import PageRouter, Start, Words, library_of
from ..store.library import Run
from . import live, model, usage
from .finder import FindPage, find_page
from .metrics import metrics_text
from .model import SORTS, ListQuery, RunPage, RunsPage, StatusFilter

Cursor = Annotated[str, Query(max_length=2000, description="`cursor` of the previous page; it overrides `start`")]
RunWords = Annotated[str, Query(max_length=500, description="words to find, and conditions as `loss<2.5`")]
SortText = Annotated[
    str,
    Query(pattern=f"^({SORTS})$", description="newest, oldest, bytes, time, step, status or metric:NAME; - reverses"),
]
RunName = Annotated[str, Query(max_length=500, description="words of the name, the path or the state of a run")]
Place = Annotated[str, Query(max_length=64, description="the id of a run or a checkpoint, whose leaves come first")]
Keep = Annotated[str | None, Query(max_length=1000, description="policies, as `last:3 every:1000 best:loss:min:2`")]


def _list_query(
    start: Start = 0,
    cursor: Cursor = "",
    sort: SortText = "newest",
    status: StatusFilter = "",
    q: RunWords = "",
    keep: Keep = None,
) -> ListQuery:
    return ListQuery(start, cursor, sort, status, q, keep)


RunQuery = Annotated[ListQuery, Depends(_list_query)]

router = PageRouter()


class NotModified(Exception):
    """The client has the current version of a page."""

    def __init__(self, tag: str) -> None:
        self.tag = tag


def _check_tag(request: Request, runs: Sequence[Run]) -> None:
    """Sets the ETag of an answer about these runs.

    Raises:
        NotModified: the client has it.
    """
    given = request.headers.get("if-none-match", "")
    # a client that polls waits for what is new; one that opens a page wants to see it
    version = model.run_tag(library_of(request), runs, wait=1.0 if given else 0.0)
    text = f"{request.app.state.boot} {version} {request.scope['path']} {request.scope['query_string']!r}"
    tag = f'W/"{hashlib.blake2s(text.encode(), digest_size=8).hexdigest()}"'
    if tag in given:
        raise NotModified(tag)
    request.state.etag = tag


@router.get("/runs", "runs.html", page="/", table="runs", result_type=RunsPage)
def get_runs(request: Request, q: RunName = "") -> RunsPage | Response:
    """The runs, each with its newest checkpoints. The page of a single run is shown at once."""
    runs = library_of(request).runs
    if len(runs) == 1 and not request.scope["path"].startswith("/api/"):
        query = request.url.query
        return RedirectResponse(f"runs/{runs[0].id}{'?' * bool(query)}{query}", 307)
    _check_tag(request, runs)
    return model.runs_page(library_of(request), q)


@router.get("/find")
def get_found(request: Request, q: Words = "", at: Place = "") -> FindPage:
    """Runs, steps and leaves whose names have all words of `q`."""
    return find_page(library_of(request), q, at)


@router.get("/runs/{run_id}", "run.html", table="run.checkpoints")
def get_run(request: Request, run_id: str, query: RunQuery) -> RunPage:
    """The checkpoints of one run, by default newest first."""
    _check_tag(request, [library_of(request).run(run_id)])
    return model.run_page(library_of(request), run_id, query)


@router.get("/live", "live.html")
def get_live(request: Request, start: Start = 0) -> live.LivePage:
    """Saves in progress of every run."""
    return live.live_page(library_of(request), request.app.state.save_rates, start, now_ns=time.time_ns())


@router.get("/usage", "usage.html", table="runs")
def get_usage(request: Request, keep: Keep = None, start: Start = 0) -> usage.UsagePage:
    """Bytes by run and by policy, and what a clean-up would free. Nothing is deleted."""
    return usage.usage_page(library_of(request), keep, start)


@router.pages.get("/metrics")
def show_metrics(request: Request) -> PlainTextResponse:
    """The figures of all runs for Prometheus."""
    return PlainTextResponse(metrics_text(library_of(request)), media_type="text/plain; version=0.0.4")
