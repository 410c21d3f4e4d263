"""The addresses of the difference of two checkpoints and of the reshard preview."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from ..pages.answers import PageRouter, Start, Words, check_same_site, library_of
from ..pages.checkpoints import checkpoint_row, open_checkpoint
from ..pages.render import render
from ..store.library import Library, NotFound
from .changes import ChangeJobs, ChangesBy, ChangesPage, changes_page
from .diff import DeltaRow, DiffPage, OpenPair, Show, diff_page, open_pair, previous_of
from .reshard import ReshardPage, reshard_page

Id = Annotated[str, Query(max_length=100, description="id of a checkpoint")]
Pair = Annotated[int | None, Query(ge=0, le=1 << 53, description="arrays to compare element by element")]
Read = Annotated[bool, Query(description="read contents that checksums cannot compare")]
By = Annotated[ChangesBy, Query(description="arrays, or layers with all their arrays as one vector")]
Action = Annotated[Literal["", "start", "cancel"], Query(description="start or cancel reading both checkpoints")]
MeshText = Annotated[str, Query(max_length=100, description="sizes of the target mesh, as `2x4`")]
Names = Annotated[str, Query(max_length=200, description="names of its dimensions, as `dp,tp`")]
Place = Annotated[
    str,
    Query(max_length=4000, description="rules, as `*.bias: Replicate; *: Shard(0)`; the first that matches applies"),
]
CHOICES = 200
"""Checkpoints of each run that a form offers."""

router = PageRouter()


@router.get("/diff", table="rows")
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
    """The differences of two checkpoints."""
    both = _pair(request, a, b)
    return diff_page(request.app.state.comparisons, both, show=show, q=q, start=start, number=pair, read=read)


def _pair(request: Request, a: str, b: str) -> OpenPair:
    library = library_of(request)
    return open_pair(library.checkpoint(a), library.checkpoint(b))


@router.get("/diff/values")
def get_delta(request: Request, a: Id, b: Id, pair: Pair = 0) -> DeltaRow:
    """How the elements of two arrays differ; reads up to 64 MiB of them."""
    page = get_diff(request, a, b=b, show="structure", q="", start=1 << 53, pair=pair)
    if page.delta is None:
        raise NotFound(page.problem or "There is no such pair of arrays.")
    return page.delta


@router.get("/diff/changes", table="rows")
def get_changes(
    request: Request, a: Id, b: Id, by: By = "array", q: Words = "", start: Start = 0, action: Action = ""
) -> ChangesPage:
    """What changed most between two checkpoints; `action` starts or cancels reading them."""
    changes: ChangeJobs = request.app.state.changes
    check_same_site(request, action)
    both = _pair(request, a, b)
    if action == "start":
        changes.start(both)
    elif action == "cancel":
        changes.cancel(f"{a} {b}")
    return changes_page(changes, both, by=by, q=q, start=start)


@router.pages.get("/diff/changes")
def show_changes(
    request: Request, a: Id = "", b: Id = "", by: By = "array", q: Words = "", start: Start = 0, action: Action = ""
) -> Response:
    """What changed most between two checkpoints, by default the newest one and the one before it."""
    a, b = _newest_two(library_of(request), a, b)
    if not (a and b):
        return RedirectResponse("../diff", 303)
    found = get_changes(request, a, b=b, by=by, q=q, start=start, action=action)
    if action:  # so that a reload does not repeat it
        return RedirectResponse(f"changes?{urlencode({'a': a, 'b': b})}", 303)
    request.state.links, request.state.chosen = router.links["/diff/changes"], {"a": a, "b": b}
    return render(request, "changes.html", found)


@router.pages.get("/diff")
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
    """The comparison of two checkpoints, by default of the newest one and the one before it."""
    library = library_of(request)
    a = a or _previous(library, b)
    found = get_diff(request, a, b=b, show=show, q=q, start=start, pair=pair, read=read) if a and b else None
    if found is not None:
        request.state.links, request.state.chosen = router.links["/diff"], {"a": a, "b": b}
    if not (a or b):  # the form offers these
        a, b = _newest_two(library, a, b)
    return render(request, "diff.html", {"diff": found, "a": a, "b": b, "choices": _choices(library, {a, b})})


def _newest_two(library: Library, a: str, b: str) -> tuple[str, str]:
    """Returns both ids; for what is missing, the newest checkpoint and the one before the second one."""
    newest = (i for run in library.runs for i, info in library.checkpoints(run) if info.status == "complete")
    b = b or next(newest, "")
    return a or _previous(library, b), b


def _previous(library: Library, b: str) -> str:
    """Returns the id of the checkpoint before one; empty if there is none."""
    listed = (library.listed(i, run, c) for run in library.runs for i, c in library.checkpoints(run) if i == b)
    found = next(listed, None) or (library.checkpoint(b) if b else None)
    return (previous_of(library, found) or "") if found is not None else ""


def _choices(library: Library, chosen: set[str]) -> list[dict[str, Any]]:
    """Returns every run with its newest readable checkpoints, and with the chosen ones."""
    runs: list[dict[str, Any]] = []
    for run in library.runs:
        found = [(i, c) for i, c in library.checkpoints(run) if c.leaves is not None]
        shown = found[:CHOICES] + [pair for pair in found[CHOICES:] if pair[0] in chosen]
        runs.append({"name": run.name, "checkpoints": [checkpoint_row(i, run, c) for i, c in shown]})
    return runs


@router.get("/checkpoints/{checkpoint_id}/reshard", "reshard.html", table="rows")
def get_reshard(
    request: Request, checkpoint_id: str, mesh: MeshText = "", names: Names = "", place: Place = "", start: Start = 0
) -> ReshardPage:
    """What each rank of another mesh would read from which file."""
    opened = open_checkpoint(library_of(request), checkpoint_id)
    return reshard_page(opened.row, opened.outline, mesh, names, place, start)
