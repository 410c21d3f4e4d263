"""The addresses of the difference of two checkpoints and of the reshard preview."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlencode

from fastapi import Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from ..pages.answers import PageRouter, check_same_site
from ..pages.checkpoints import checkpoint_row
from ..pages.render import render
from ..store.library import Library, NotFound
from .changes import ChangeJobs, ChangesBy, ChangesPage, ChangesPart, changes_page
from .diff import Comparisons, DeltaRow, DiffPage, Show, diff_page, open_pair, previous_of
from .reshard import reshard_page

Action = Literal["", "start", "cancel"]
CHOICES = 200
"""Checkpoints of each run that a form offers."""

ID = Query(max_length=100, description="id of a checkpoint")

router = PageRouter(
    a=ID,
    b=ID,
    pair=Query(ge=0, le=1 << 53, description="arrays to compare element by element"),
    read=Query(description="read contents that checksums cannot compare"),
    by=Query(description="arrays, or layers with all their arrays as one vector"),
    part=Query(description="parameters, the state of the optimizer, or both together"),
    action=Query(description="start or cancel reading both checkpoints"),
    mesh=Query(max_length=100, description="sizes of the target mesh, as `2x4`"),
    names=Query(max_length=200, description="names of its dimensions, as `dp,tp`"),
    place=Query(
        max_length=4000, description="rules, as `*.bias: Replicate; *: Shard(0)`; the first that matches applies"
    ),
)


def get_diff(
    comparisons: Comparisons,
    a: str,
    b: str,
    show: Show = "different",
    q: str = "",
    start: int = 0,
    pair: int | None = None,
    read: bool = False,
) -> DiffPage:
    """The differences of two checkpoints."""
    both = open_pair(comparisons.library.checkpoint(a), comparisons.library.checkpoint(b))
    return diff_page(comparisons, both, show=show, q=q, start=start, number=pair, read=read)


def get_delta(comparisons: Comparisons, a: str, b: str, pair: int | None = 0) -> DeltaRow:
    """How the elements of two arrays differ; reads up to 64 MiB of them."""
    # From a row beyond all others: nothing but the pair is compared.
    page = get_diff(comparisons, a, b, show="structure", start=1 << 53, pair=pair)
    if page.delta is None:
        raise NotFound(page.problem or "There is no such pair of arrays.")
    return page.delta


def get_changes(
    request: Request,
    changes: ChangeJobs,
    a: str,
    b: str,
    by: ChangesBy = "array",
    part: ChangesPart = "parameters",
    q: str = "",
    start: int = 0,
    action: Action = "",
) -> ChangesPage:
    """What changed most between two checkpoints; `action` starts or cancels reading them."""
    check_same_site(request, action)
    both = open_pair(changes.library.checkpoint(a), changes.library.checkpoint(b))
    if action == "start":
        changes.start(both)
    elif action == "cancel":
        changes.cancel(f"{a} {b}")
    return changes_page(changes, both, by=by, part=part, q=q, start=start)


def show_changes(
    request: Request,
    changes: ChangeJobs,
    a: str = "",
    b: str = "",
    by: ChangesBy = "array",
    part: ChangesPart = "parameters",
    q: str = "",
    start: int = 0,
    action: Action = "",
) -> Response:
    """What changed most between two checkpoints, by default the newest one and the one before it."""
    a, b = _newest_two(changes.library, a, b)
    if not (a and b):
        return RedirectResponse("../diff", 303)
    page = get_changes(request, changes, a, b, by=by, part=part, q=q, start=start, action=action)
    if action:  # so that a reload does not repeat it
        return RedirectResponse(f"changes?{urlencode({'a': a, 'b': b})}", 303)
    request.state.links, request.state.chosen = router.links["/diff/changes"], {"a": a, "b": b}
    return render(request, "changes.html", page)


def show_diff(
    request: Request,
    comparisons: Comparisons,
    a: str = "",
    b: str = "",
    show: Show = "different",
    q: str = "",
    start: int = 0,
    pair: int | None = None,
    read: bool = False,
) -> HTMLResponse:
    """The comparison of two checkpoints, by default of the newest one and the one before it."""
    library = comparisons.library
    a = a or _previous(library, b)
    page = get_diff(comparisons, a, b, show, q=q, start=start, pair=pair, read=read) if a and b else None
    if page is not None:
        request.state.links, request.state.chosen = router.links["/diff"], {"a": a, "b": b}
    if not (a or b):  # the form offers these
        a, b = _newest_two(library, a, b)
    return render(request, "diff.html", {"diff": page, "a": a, "b": b, "choices": _choices(library, {a, b})})


def _newest_two(library: Library, a: str, b: str) -> tuple[str, str]:
    """Returns both ids; for what is missing, the newest checkpoint and the one before the second one."""
    newest = (i for run in library.runs for i, info in library.checkpoints(run) if info.status == "complete")
    b = b or next(newest, "")
    return a or _previous(library, b), b


def _previous(library: Library, b: str) -> str:
    """Returns the id of the checkpoint before one; empty if there is none."""
    listed = (library.listed(i, run, c) for run in library.runs for i, c in library.checkpoints(run) if i == b)
    checkpoint = next(listed, None) or (library.checkpoint(b) if b else None)
    return (previous_of(library, checkpoint) or "") if checkpoint is not None else ""


def _choices(library: Library, chosen: set[str]) -> list[dict[str, Any]]:
    """Returns every run with its newest readable checkpoints, and with the chosen ones."""
    runs: list[dict[str, Any]] = []
    for run in library.runs:
        readable = [(i, c) for i, c in library.checkpoints(run) if c.leaves is not None]
        shown = readable[:CHOICES] + [pair for pair in readable[CHOICES:] if pair[0] in chosen]
        runs.append({"name": run.name, "checkpoints": [checkpoint_row(i, run, c) for i, c in shown]})
    return runs


router.get("/diff", get_diff, table="rows")
router.show("/diff", show_diff)
router.get("/diff/values", get_delta)
router.get("/diff/changes", get_changes, table="rows")
router.show("/diff/changes", show_changes)
router.get("/checkpoints/{checkpoint_id}/reshard", reshard_page, "reshard.html", table="rows")
