"""The addresses of time and of differences: the timing of a save, trends of a run, two checkpoints side by side."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response

from . import comparing, timing, trends
from .answers import Answers
from .comparing import Show
from .library import Library, Missing
from .pages_time import DeltaRow, DiffPage, HeatData, TimingPage, TrendsPage, WaterfallData
from .queries import checkpoint_row
from .render import render

__all__ = ["api", "pages"]

Start = Annotated[int, Query(ge=0, le=1 << 53, description="number of the first row")]
By = Annotated[str, Query(max_length=200, description="rows of the heat map: rank, host, or a mesh dimension's name")]
Words = Annotated[str, Query(max_length=500, description="words that a path must hold")]
Pair = Annotated[int | None, Query(ge=0, le=1 << 53, description="arrays to compare number by number")]
Read = Annotated[bool, Query(description="read contents where checksums cannot tell")]
Id = Annotated[str, Query(max_length=100, description="id of a checkpoint")]
CHOICES = 200
"""Checkpoints of each run that a form offers."""

api = Answers()
pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


def _library(request: Request) -> Library:
    return request.app.state.library


@api.gives("/checkpoints/{checkpoint_id}/timing")
def get_timing(request: Request, checkpoint_id: str, start: Start = 0, by: By = "rank") -> TimingPage:
    """The spans of a save and their summary."""
    return timing.timing_page(_library(request), checkpoint_id, start, by)


@api.gives("/checkpoints/{checkpoint_id}/timing/waterfall")
def get_waterfall(request: Request, checkpoint_id: str) -> WaterfallData:
    """Every span of a save, in columns."""
    return timing.waterfall_data(_library(request), checkpoint_id)


@api.gives("/checkpoints/{checkpoint_id}/timing/heat")
def get_heat(request: Request, checkpoint_id: str, by: By = "rank") -> HeatData:
    """The time of every rank, or group of ranks, in every phase, in columns."""
    return timing.heat_data(_library(request), checkpoint_id, by)


@api.gives("/checkpoints/{checkpoint_id}/trace.json", dict[str, Any])
def get_trace(request: Request, checkpoint_id: str) -> Response:
    """The save in the Trace Event Format, for Perfetto."""
    name, data = timing.trace_of(_library(request), checkpoint_id)
    return Response(
        data, media_type="application/json", headers={"Content-Disposition": f'attachment; filename="{name}"'}
    )


@api.gives("/runs/{run_id}/trends")
def get_trends(request: Request, run_id: str, start: Start = 0) -> TrendsPage:
    """The saves of a run by step, in columns."""
    return trends.trends_page(_library(request), run_id, start)


@api.gives("/diff")
def get_diff(
    request: Request,
    a: Id,
    b: Id,
    show: Show = "different",
    q: Words = "",
    start: Start = 0,
    pair: Pair = None,
    read: Read = False,
) -> DiffPage:
    """In what two checkpoints differ."""
    return comparing.diff_page(
        _library(request), request.app.state.comparisons, a, b, show=show, q=q, start=start, pair=pair, read=read
    )


@api.gives("/diff/values")
def get_delta(request: Request, a: Id, b: Id, pair: Pair = 0) -> DeltaRow:
    """How two arrays differ, by reading up to 64 MiB of them."""
    delta = get_diff(request, a, b, "structure", "", 1 << 53, pair)
    if delta.delta is None:
        raise Missing(delta.problem or "There is no such pair of arrays.")
    return delta.delta


@pages.get("/checkpoints/{checkpoint_id}/timing")
def show_timing(request: Request, checkpoint_id: str, start: Start = 0, by: By = "rank") -> HTMLResponse:
    return render(request, "timing.html", get_timing(request, checkpoint_id, start, by))


@pages.get("/runs/{run_id}/trends")
def show_trends(request: Request, run_id: str, start: Start = 0) -> HTMLResponse:
    return render(request, "trends.html", get_trends(request, run_id, start))


@pages.get("/diff")
def show_diff(
    request: Request,
    a: Id = "",
    b: Id = "",
    show: Show = "different",
    q: Words = "",
    start: Start = 0,
    pair: Pair = None,
    read: Read = False,
) -> HTMLResponse:
    library = _library(request)
    a = a or (comparing.previous_of(library, b) or "" if b else "")
    found = get_diff(request, a, b, show, q, start, pair, read) if a and b else None
    if not (a or b):  # offers the newest one and the one before it
        b = next((i for run in library.runs for i, info in library.checkpoints(run) if info.status == "complete"), "")
        a = comparing.previous_of(library, b) or "" if b else ""
    return render(request, "diff.html", {"diff": found, "a": a, "b": b, "choices": _choices(library, {a, b})})


def _choices(library: Library, chosen: set[str]) -> list[dict[str, Any]]:
    """Every run with its newest checkpoints that can be browsed, and those that were chosen."""
    runs: list[dict[str, Any]] = []
    for run in library.runs:
        found = [(i, c) for i, c in library.checkpoints(run) if c.leaves is not None]
        shown = found[:CHOICES] + [pair for pair in found[CHOICES:] if pair[0] in chosen]
        runs.append({"name": run.name, "checkpoints": [checkpoint_row(i, run, c) for i, c in shown]})
    return runs
