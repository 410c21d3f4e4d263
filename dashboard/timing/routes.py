"""The addresses of the timing of a save and of the trends of a run."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response

from ..pages.answers import PageRouter, Start, library_of
from .charts import HeatData, WaterfallData, heat_data, trace_of, waterfall_data
from .model import TimingPage, timing_page
from .trends import TrendsPage, trends_page

__all__ = ["router"]

By = Annotated[str, Query(max_length=200, description="rows of the heat map: rank, host, or a mesh dimension's name")]

router = PageRouter()


@router.get("/checkpoints/{checkpoint_id}/timing", "timing.html")
def get_timing(request: Request, checkpoint_id: str, start: Start = 0, by: By = "rank") -> TimingPage:
    """The spans of a save and their summary."""
    return timing_page(library_of(request), checkpoint_id, start, by)


@router.get("/checkpoints/{checkpoint_id}/timing/waterfall")
def get_waterfall(request: Request, checkpoint_id: str) -> WaterfallData:
    """Every span of a save, in columns."""
    return waterfall_data(library_of(request), checkpoint_id)


@router.get("/checkpoints/{checkpoint_id}/timing/heat")
def get_heat(request: Request, checkpoint_id: str, by: By = "rank") -> HeatData:
    """The time of every rank, or group of ranks, in every phase, in columns."""
    return heat_data(library_of(request), checkpoint_id, by)


@router.get("/checkpoints/{checkpoint_id}/trace.json", result_type=dict[str, Any])
def get_trace(request: Request, checkpoint_id: str) -> Response:
    """The save in the Trace Event Format, for Perfetto."""
    name, data = trace_of(library_of(request), checkpoint_id)
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(data, media_type="application/json", headers=headers)


@router.get("/runs/{run_id}/trends", "trends.html")
def get_trends(request: Request, run_id: str, start: Start = 0) -> TrendsPage:
    """The saves of a run by step, in columns."""
    return trends_page(library_of(request), run_id, start)
