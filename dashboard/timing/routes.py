"""The addresses of the timing of a save and of the trends of a run."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response

from ..pages.answers import JsonRouter
from ..pages.parameters import Start, library_of
from ..pages.render import render
from .charts import HeatData, WaterfallData, heat_data, trace_of, waterfall_data
from .model import TimingPage, timing_page
from .trends import TrendsPage, trends_page

__all__ = ["api", "pages"]

By = Annotated[str, Query(max_length=200, description="rows of the heat map: rank, host, or a mesh dimension's name")]

api = JsonRouter()
pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@api.json("/checkpoints/{checkpoint_id}/timing")
def get_timing(request: Request, checkpoint_id: str, start: Start = 0, by: By = "rank") -> TimingPage:
    """The spans of a save and their summary."""
    return timing_page(library_of(request), checkpoint_id, start, by)


@api.json("/checkpoints/{checkpoint_id}/timing/waterfall")
def get_waterfall(request: Request, checkpoint_id: str) -> WaterfallData:
    """Every span of a save, in columns."""
    return waterfall_data(library_of(request), checkpoint_id)


@api.json("/checkpoints/{checkpoint_id}/timing/heat")
def get_heat(request: Request, checkpoint_id: str, by: By = "rank") -> HeatData:
    """The time of every rank, or group of ranks, in every phase, in columns."""
    return heat_data(library_of(request), checkpoint_id, by)


@api.json("/checkpoints/{checkpoint_id}/trace.json", dict[str, Any])
def get_trace(request: Request, checkpoint_id: str) -> Response:
    """The save in the Trace Event Format, for Perfetto."""
    name, data = trace_of(library_of(request), checkpoint_id)
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(data, media_type="application/json", headers=headers)


@api.json("/runs/{run_id}/trends")
def get_trends(request: Request, run_id: str, start: Start = 0) -> TrendsPage:
    """The saves of a run by step, in columns."""
    return trends_page(library_of(request), run_id, start)


@pages.get("/checkpoints/{checkpoint_id}/timing")
def show_timing(request: Request, checkpoint_id: str, start: Start = 0, by: By = "rank") -> HTMLResponse:
    return render(request, "timing.html", get_timing(request, checkpoint_id, start, by))


@pages.get("/runs/{run_id}/trends")
def show_trends(request: Request, run_id: str, start: Start = 0) -> HTMLResponse:
    return render(request, "trends.html", get_trends(request, run_id, start))
