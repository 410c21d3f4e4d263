"""The addresses of runs, saves under way, usage and metrics; see `routes`.

What a page of these shows changes while it is open, so every answer has an ETag and a client that asks again gets a
304, made without the page.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from . import ops, runs
from .answers import Answers, encoded
from .library import Library, Run
from .render import render
from .routes import Start
from .run_pages import LivePage, RunPage, RunsPage, UsagePage
from .runs import Question, Sort, Status

__all__ = ["Unchanged", "api", "pages"]

Cursor = Annotated[str, Query(max_length=2000, description="where the page before ended; goes before `start`")]
Words = Annotated[str, Query(max_length=500, description="words that the name, the step or the error must hold")]
Keep = Annotated[str | None, Query(max_length=1000, description="policies, as `last:3 every:1000 best:loss:min:2`")]


def _question(
    start: Start = 0,
    cursor: Cursor = "",
    sort: Sort = "newest",
    status: Status = "",
    q: Words = "",
    keep: Keep = None,
) -> Question:
    return Question(start, cursor, sort, status, q, keep)


Asked = Annotated[Question, Depends(_question)]

api = Answers()
pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


class Unchanged(Exception):
    """The client has this already."""

    def __init__(self, tag: str) -> None:
        self.tag = tag


def _library(request: Request) -> Library:
    return request.app.state.library


def _tag(request: Request, given: Sequence[Run]) -> str:
    """The ETag of an answer about these runs.

    Raises:
        Unchanged: the client has it.
    """
    asks = request.headers.get("if-none-match", "")
    # somebody who asks again waits for what is new; somebody who opens a page wants to see one
    version = runs.run_tag(_library(request), given, wait=1.0 if asks else 0.0)
    text = f"{request.app.state.boot} {version} {request.scope['path']} {request.scope['query_string']!r}"
    tag = f'W/"{hashlib.blake2s(text.encode(), digest_size=8).hexdigest()}"'
    if tag in asks:
        raise Unchanged(tag)
    return tag


@api.gives("/runs", RunsPage)
def get_runs(request: Request) -> Response:
    """Every run with its newest checkpoints."""
    tag = _tag(request, _library(request).runs)
    return _tagged(encoded(runs.runs_page(_library(request))), tag)


@api.gives("/runs/{run_id}", RunPage)
def get_run(request: Request, run_id: str, question: Asked) -> Response:
    """One run's checkpoints, newest first unless asked otherwise."""
    tag = _tag(request, [_library(request).run(run_id)])
    return _tagged(encoded(runs.run_page(_library(request), run_id, question)), tag)


@api.gives("/live")
def get_live(request: Request, start: Start = 0) -> LivePage:
    """Saves under way, in every run."""
    return ops.live_page(_library(request), request.app.state.speeds, start, now_ns=time.time_ns())


@api.gives("/usage")
def get_usage(request: Request, keep: Keep = None, start: Start = 0) -> UsagePage:
    """Bytes by run and by policy, and what a clean-up would free: nothing is deleted."""
    return ops.usage_page(_library(request), keep, start)


@pages.get("/")
def show_runs(request: Request) -> Response:
    tag = _tag(request, _library(request).runs)
    return _tagged(render(request, "runs.html", runs.runs_page(_library(request))), tag)


@pages.get("/runs/{run_id}")
def show_run(request: Request, run_id: str, question: Asked) -> Response:
    tag = _tag(request, [_library(request).run(run_id)])
    page = runs.run_page(_library(request), run_id, question)
    return _tagged(render(request, "run.html", page), tag)


@pages.get("/live")
def show_live(request: Request, start: Start = 0) -> HTMLResponse:
    return render(request, "live.html", get_live(request, start))


@pages.get("/usage")
def show_usage(request: Request, keep: Keep = None, start: Start = 0) -> HTMLResponse:
    return render(request, "usage.html", get_usage(request, keep, start))


@pages.get("/metrics")
def show_metrics(request: Request) -> PlainTextResponse:
    return PlainTextResponse(ops.metrics_text(_library(request)), media_type="text/plain; version=0.0.4")


def _tagged(response: Response, tag: str) -> Response:
    response.headers["ETag"] = tag
    return response
