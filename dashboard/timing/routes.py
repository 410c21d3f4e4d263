"""The addresses of the timing of a save and of the trends of a run."""

from __future__ import annotations

from typing import Any

from fastapi import Query, Request
from fastapi.responses import Response

from treeckpt._inspect.perfetto import encode_trace
from treeckpt._inspect.timing_report import TimingReport

from ..pages.answers import PageRouter, check_version, is_polled
from ..store.library import Library, NotFound, OpenCheckpoint
from .model import HeatData, WaterfallData, groupings, heat_data, timing_page, waterfall_data
from .trends import MAX_STEP, TrendBins, TrendsPage, TrendTables

router = PageRouter(
    by=Query(max_length=200, description="rows of the heat map: rank, host, or a mesh dimension's name"),
    low=Query(ge=-MAX_STEP, le=MAX_STEP, description="the first step"),
    high=Query(ge=-MAX_STEP, le=MAX_STEP, description="the last step"),
)
TIMING = "/checkpoints/{checkpoint_id}/timing"


def _timings_of(library: Library, checkpoint_id: str) -> tuple[OpenCheckpoint, TimingReport]:
    """Returns a checkpoint and its timings.

    Raises:
        NotFound: there is no such checkpoint.
        CheckpointError: it has no timings.
    """
    checkpoint = library.checkpoint(checkpoint_id)
    if checkpoint.info.status == "foreign":
        raise NotFound("This is no checkpoint.")
    return checkpoint, library.study(checkpoint)


def get_waterfall(library: Library, checkpoint_id: str) -> WaterfallData:
    """Every span of a save, in columns."""
    return waterfall_data(_timings_of(library, checkpoint_id)[1])


def get_heat(library: Library, checkpoint_id: str, by: str = "rank") -> HeatData:
    """The time of every rank, or group of ranks, in every phase, in columns."""
    checkpoint, study = _timings_of(library, checkpoint_id)
    return heat_data(study, groupings(library, checkpoint, study), by)


def get_trace(library: Library, checkpoint_id: str) -> Response:
    """The save in the Trace Event Format, for Perfetto."""
    timings = _timings_of(library, checkpoint_id)[1].timings
    headers = {"Content-Disposition": f'attachment; filename="trace.{timings.save_id}.json"'}
    return Response(encode_trace(timings), media_type="application/json", headers=headers)


def get_trends(
    request: Request,
    library: Library,
    tables: TrendTables,
    run_id: str,
    start: int = 0,
    low: int = -MAX_STEP,
    high: int = MAX_STEP,
) -> TrendsPage:
    """The saves of a run between two steps, in columns, and the ranks that were slow again and again."""
    run = library.run(run_id)
    library.checkpoints(run, wait=1.0 if is_polled(request) else 0.0)
    watch = library.watch(run)
    check_version(request, f"{watch.version}.{'' if watch.progress.complete else watch.progress.seen}")
    return tables.page(run_id, start, low, high)


def get_bins(tables: TrendTables, run_id: str, low: int = -MAX_STEP, high: int = MAX_STEP) -> TrendBins:
    """The time of phases and ranks over the saves of a run between two steps, in bins of consecutive saves."""
    return tables.bins(run_id, low, high)


router.get(TIMING, timing_page, "timing.html", table="ranks")
router.get(f"{TIMING}/waterfall", get_waterfall)
router.get(f"{TIMING}/heat", get_heat)
router.get("/checkpoints/{checkpoint_id}/trace.json", get_trace, result_type=dict[str, Any])
router.get("/runs/{run_id}/trends", get_trends, "trends.html", table="step")
router.get("/runs/{run_id}/trends/bins", get_bins)
