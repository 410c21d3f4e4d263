"""The addresses of runs, saves in progress, disk usage and metrics.

These pages change while they are open. Answers about runs have an ETag: a client that requests again gets a 304, for
which no page is built.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import Query, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response

from treeckpt._runs.failures import SHOWN_DAYS

from ..pages.answers import PageRouter, check_version, is_polled
from ..store.library import Library, Run
from . import live, model, overlay
from .failures import FIRST, FailureLists, FailuresPage, failures_page, failures_tag
from .finder import find_page
from .first_nan import NanPage, get_first_nan
from .metrics import metrics_text
from .model import RUN_SORTS, SORTS, ListQuery, RunPage, RunsPage, StatusFilter
from .run_table import TableQuery
from .usage import CleanUpPlans, UsagePage, usage_page

router = PageRouter(
    cursor=Query(max_length=2000, description="`cursor` of the previous page; it overrides `start`"),
    sort=Query(
        pattern=f"^({SORTS})$",
        description="newest, oldest, bytes, time, step, status or metric:NAME, with a minus before it to reverse it",
    ),
    action=Query(description="start or cancel a scan"),
    best=Query(
        max_length=500, description="the metric by which a checkpoint is the best, as `loss:min` or `accuracy:max`"
    ),
    keep=Query(max_length=1000, description="policies, as `last:3 every:1000 best:loss:min:2`"),
)
NAME = Query(max_length=500, description="words of the name, the path or the state of a run")
WORDS = Query(max_length=500, description="words to find, and conditions as `loss<2.5`")
COLUMNS = {
    "metric": Query(max_length=100, description="the metrics that have columns"),
    "best": Query(max_length=100, description="which way a metric is better, as `loss:min` or `accuracy:max`"),
    "run": Query(max_length=1000, description="the ids of runs: those that are ticked, or drawn"),
}
"""The limits of what the table of runs and the overlay are asked for."""
NONE: list[str] = []
"""The values of a parameter that may be given several times, where it is not."""
DAYS = Query(ge=0, le=1e6, allow_inf_nan=False, description="only those of the last so many days")
PLACE = Query(max_length=64, description="the id of a run or a checkpoint, whose leaves come first")


def _check_tag(request: Request, library: Library, runs: Sequence[Run], more: str = "") -> None:
    """Sets the ETag of an answer about these runs.

    Raises:
        NotModified: the client has it.
    """
    version = model.run_tag(library, runs, wait=1.0 if is_polled(request) else 0.0)
    check_version(request, f"{version} {more}")


def get_live(request: Request, library: Library, rates: live.SaveRates, start: int = 0) -> live.LivePage:
    """Saves of every run that have not ended: those in progress, then the stalled ones, then those that were killed."""
    library.start_scans(library.runs)
    saving = any(info.saving for run in library.runs for _, info in library.checkpoints(run, wait=1.0))
    # What a save waits for is said with seconds.
    _check_tag(request, library, library.runs, f"{time.time() // live.SPELL:.0f}" if saving else "")
    return live.live_page(library, rates, start)


def get_runs(
    request: Request,
    library: Library,
    q: str = "",
    metric: list[str] = NONE,
    best: list[str] = NONE,
    sort: str = "",
    run: list[str] = NONE,
) -> RunsPage | Response:
    """The runs, each with its newest checkpoints. The page of a single run is shown at once."""
    runs = library.runs
    if len(runs) == 1 and not library.has_folders and not request.scope["path"].startswith("/api/"):
        query = request.url.query
        return RedirectResponse(f"runs/{runs[0].id}{'?' * bool(query)}{query}", 307)
    _check_tag(request, library, runs)
    return model.runs_page(library, TableQuery(q, metric, best, sort, run))


def get_run(
    request: Request,
    library: Library,
    lists: FailureLists,
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
    failures = failures_page(library, lists, run_id, count=FIRST)
    _check_tag(request, library, [library.run(run_id)], failures_tag(failures))
    return model.run_page(library, failures, ListQuery(start, cursor, sort, status, q, best=best, keep=keep))


def get_failures(
    request: Request, library: Library, lists: FailureLists, run_id: str, days: float = SHOWN_DAYS, start: int = 0
) -> FailuresPage:
    """Saves of a run that failed or were killed, also once their files are gone; the last one first."""
    page = failures_page(library, lists, run_id, days, start)
    check_version(request, failures_tag(page))
    return page


def get_overlay(
    library: Library, run: list[str] = NONE, metric: list[str] = NONE, best: list[str] = NONE, start: int = 0
) -> overlay.OverlayPage:
    """Metrics of several runs: the last and the best value of each run, and every save by step."""
    return overlay.overlay_page(library, TableQuery(metric=metric, best=best, run=run), start)


def get_overlay_lines(
    library: Library,
    run: list[str] = NONE,
    metric: list[str] = NONE,
    low: int = -overlay.MAX_STEP,
    high: int = overlay.MAX_STEP,
) -> overlay.OverlayLines:
    """Metrics of several runs between two steps, as lines of few enough points to be drawn."""
    return overlay.overlay_lines(library, TableQuery(metric=metric, run=run), low=low, high=high)


def get_usage(
    request: Request, library: Library, plans: CleanUpPlans, keep: str | None = None, start: int = 0
) -> UsagePage:
    """Bytes by run and by policy, what each run will take, and what a clean-up would free. Nothing is deleted."""
    page = usage_page(library, plans, keep, start)
    shown = {row.run for row in page.runs}
    versions = [library.watch(run).version for run in library.runs if run.id in shown]
    plans_made = [row.plan and (row.plan.freed, row.plan.removals) for row in page.runs]
    live = [(row.scan, row.live) for row in page.runs]
    # what changes with the clock alone, as the free bytes, is no reason to draw the page again
    check_version(request, f"{versions} {plans_made} {live}")
    return page


def show_metrics(library: Library) -> PlainTextResponse:
    """The figures of all runs for Prometheus."""
    return PlainTextResponse(metrics_text(library), media_type="text/plain; version=0.0.4")


router.get(
    "/runs",
    get_runs,
    "runs.html",
    page="/",
    table="runs",
    result_type=RunsPage,
    q=NAME,
    sort=Query(
        pattern=f"^({RUN_SORTS})?$",
        description="name, good, age, status, bytes, checkpoints, time, last:METRIC or best:METRIC; - reverses",
    ),
    **COLUMNS,
)
router.get("/find", find_page, at=PLACE)
router.get("/runs/{run_id}", get_run, "run.html", table="run.checkpoints", q=WORDS)
router.get("/runs/{run_id}/first-nan", get_first_nan, "first_nan.html", result_type=NanPage)
router.get("/runs/{run_id}/failures", get_failures, "failures.html", table="rows", days=DAYS)
router.get("/overlay", get_overlay, "overlay.html", table="rows", **COLUMNS)
router.get(
    "/overlay/lines",
    get_overlay_lines,
    **COLUMNS,
    low=Query(ge=-overlay.MAX_STEP, le=overlay.MAX_STEP, description="the first step"),
    high=Query(ge=-overlay.MAX_STEP, le=overlay.MAX_STEP, description="the last step"),
)
router.get("/live", get_live, "live.html")
router.get("/usage", get_usage, "usage.html", table="runs")
router.show("/metrics", show_metrics)
