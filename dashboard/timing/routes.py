"""The addresses of the timing of a save and of the trends of a run."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response

from treeckpt._inspect.perfetto import encode_trace
from treeckpt._inspect.timing_report import TimingReport

from ..pages.answers import PageRouter, Start, library_of
from ..store.library import NotFound, OpenCheckpoint
from .model import HeatData, Sort, TimingPage, WaterfallData, groupings, heat_data, timing_page, waterfall_data
from .trends import TrendBins, TrendsPage

By = Annotated[str, Query(max_length=200, description="rows of the heat map: rank, host, or a mesh dimension's name")]
MAX_STEP = 1 << 62
LowStep = Annotated[int, Query(ge=-MAX_STEP, le=MAX_STEP, description="the first step")]
HighStep = Annotated[int, Query(ge=-MAX_STEP, le=MAX_STEP, description="the last step")]

router = PageRouter()


def _timings_of(request: Request, checkpoint_id: str) -> tuple[OpenCheckpoint, TimingReport]:
    """Returns a checkpoint and its timings.

    Raises:
        NotFound: there is no such checkpoint.
        CheckpointError: it has no timings.
    """
    found = library_of(request).checkpoint(checkpoint_id)
    if found.info.status == "foreign":
        raise NotFound("This is no checkpoint.")
    return found, library_of(request).study(found)


@router.get("/checkpoints/{checkpoint_id}/timing", "timing.html", table="ranks")
def get_timing(
    request: Request, checkpoint_id: str, start: Start = 0, by: By = "rank", sort: Sort = "slow"
) -> TimingPage:
    """The spans of a save and their summary."""
    return timing_page(library_of(request), checkpoint_id, start, by, sort)


@router.get("/checkpoints/{checkpoint_id}/timing/waterfall")
def get_waterfall(request: Request, checkpoint_id: str) -> WaterfallData:
    """Every span of a save, in columns."""
    return waterfall_data(_timings_of(request, checkpoint_id)[1])


@router.get("/checkpoints/{checkpoint_id}/timing/heat")
def get_heat(request: Request, checkpoint_id: str, by: By = "rank") -> HeatData:
    """The time of every rank, or group of ranks, in every phase, in columns."""
    found, study = _timings_of(request, checkpoint_id)
    return heat_data(study, groupings(library_of(request), found, study), by)


@router.get("/checkpoints/{checkpoint_id}/trace.json", result_type=dict[str, Any])
def get_trace(request: Request, checkpoint_id: str) -> Response:
    """The save in the Trace Event Format, for Perfetto."""
    timings = _timings_of(request, checkpoint_id)[1].timings
    headers = {"Content-Disposition": f'attachment; filename="trace.{timings.save_id}.json"'}
    return Response(encode_trace(timings), media_type="application/json", headers=headers)


@router.get("/runs/{run_id}/trends", "trends.html", table="step")
def get_trends(request: Request, run_id: str, start: Start = 0) -> TrendsPage:
    """The saves of a run by step, in columns, and the ranks that were slow again and again."""
    return request.app.state.trends.page(run_id, start)


@router.get("/runs/{run_id}/trends/bins")
def get_bins(request: Request, run_id: str, low: LowStep = -MAX_STEP, high: HighStep = MAX_STEP) -> TrendBins:
    """The time of phases and ranks over the saves of a run between two steps, in bins of consecutive saves."""
    return request.app.state.trends.bins(run_id, low, high)
