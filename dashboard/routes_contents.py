"""The addresses of what one checkpoint's pages fetch on demand: values, pictures of bytes, checksums."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query, Request

from treeckpt.core.analysis.outline import Outline
from treeckpt.core.analysis.treemap import TreemapKey
from treeckpt.errors import CheckpointError
from treeckpt.io.storage.store import Store

from . import queries
from .answers import Answers
from .bytemap import TreemapPage, treemap_page
from .checksums import BalancePage, ChecksumsPage, balance_page, checksums_page
from .folds import FoldsPage, folds_page, leaves_page
from .library import Library
from .pages import SearchPage
from .peeks import PeekPage, Window, peek_page
from .snippets import SnippetPage, snippet_page

__all__ = ["api", "pages"]

api = Answers()
pages = APIRouter(include_in_schema=False)
T = TypeVar("T")

TRIES = 5
"""Versions of a checkpoint that are tried, where saves replace it while it is read."""

Dim = Annotated[int | None, Query(ge=0, le=64)]
At = Annotated[str, Query(max_length=2000, pattern=r"^[0-9,]*$", description="a position for each dimension")]
Position = Annotated[int, Query(ge=0, le=1 << 53)]
Size = Annotated[int | None, Query(ge=1, le=1 << 53)]


def _store(library: Library, checkpoint_id: str) -> Store:
    run, info = library.checkpoint(checkpoint_id)
    return run.store.folder(info.name).store


def _of_one_version(
    library: Library,
    checkpoint_id: str,
    act: Callable[[Store, Outline], T],
    *,
    doubt: Callable[[T], object] = lambda _: None,
    tries: int = TRIES,
) -> T:
    """What `act` gives; again where it failed, or is in doubt, and another save has replaced the checkpoint since."""
    _, outline = queries.opened(library, checkpoint_id)

    def is_last() -> bool:
        return tries <= 1 or queries.opened(library, checkpoint_id)[1].index.save_id == outline.index.save_id

    with closing(_store(library, checkpoint_id)) as store:
        try:
            found = act(store, outline)
        except (CheckpointError, OSError):
            if is_last():
                raise
        else:
            if not doubt(found) or is_last():
                return found
    return _of_one_version(library, checkpoint_id, act, doubt=doubt, tries=tries - 1)


@api.gives("/checkpoints/{checkpoint_id}/leaves/{number}/peek")
def get_peek(
    request: Request,
    checkpoint_id: str,
    number: int,
    y: Dim = None,
    x: Dim = None,
    at: At = "",
    top: Position = 0,
    left: Position = 0,
    rows: Size = None,
    columns: Size = None,
    whole: bool = False,
) -> PeekPage:
    """A slice of an array's values: of `rows` x `columns` on the plane of dimensions `y` and `x`, or all of it."""
    where = tuple(int(n[:18]) if n else 0 for n in at.split(",")) if at else ()
    window = Window(y, x, where, top, left, rows, columns, whole)
    return _of_one_version(
        request.app.state.library, checkpoint_id, lambda store, outline: peek_page(store, outline, number, window)
    )


@api.gives("/checkpoints/{checkpoint_id}/snippet")
def get_snippet(
    request: Request, checkpoint_id: str, path: Annotated[str, Query(max_length=20_000)] = ""
) -> SnippetPage:
    """The line of Python that loads a leaf, or what is below a node."""
    _, info = request.app.state.library.checkpoint(checkpoint_id)
    return snippet_page(info.path, path)


@api.gives("/checkpoints/{checkpoint_id}/treemap")
def get_treemap(
    request: Request,
    checkpoint_id: str,
    by: TreemapKey = "tree",
    node: Annotated[str, Query(max_length=1000)] = "",
    count: Annotated[int, Query(ge=10, le=100_000, description="boxes, at most")] = 20_000,
) -> TreemapPage:
    """Where the bytes are, as nested boxes."""
    _, outline = queries.opened(request.app.state.library, checkpoint_id)
    return treemap_page(outline, by, node, count)


@api.gives("/checkpoints/{checkpoint_id}/folds")
def get_folds(request: Request, checkpoint_id: str, node: Annotated[str, Query(max_length=1000)] = "") -> FoldsPage:
    """Blocks of a node's children that are the same but for their number."""
    _, outline = queries.opened(request.app.state.library, checkpoint_id)
    return folds_page(outline, node)


@api.gives("/checkpoints/{checkpoint_id}/leaves")
def get_leaves(
    request: Request,
    checkpoint_id: str,
    q: Annotated[str, Query(max_length=500, description="words that a path must hold")] = "",
    dtype: Annotated[str, Query(max_length=64)] = "",
    larger: Annotated[int, Query(ge=0, le=1 << 62, description="bytes, at least")] = 0,
    start: Position = 0,
) -> SearchPage:
    """Leaves by the words of their path, their dtype and their size; `start` is a leaf's number."""
    _, outline = queries.opened(request.app.state.library, checkpoint_id)
    return leaves_page(outline, q, start, dtype, larger)


@api.gives("/checkpoints/{checkpoint_id}/balance")
def get_balance(request: Request, checkpoint_id: str) -> BalancePage:
    """What each rank wrote."""
    _, outline = queries.opened(request.app.state.library, checkpoint_id)
    return balance_page(outline)


@api.gives("/checkpoints/{checkpoint_id}/files/{number}/checksums")
def get_checksums(request: Request, checkpoint_id: str, number: int, start: Position = 0) -> ChecksumsPage:
    """Compares a part of a shard with its checksums; `next` says where to go on."""
    return _of_one_version(
        request.app.state.library,
        checkpoint_id,
        lambda store, outline: checksums_page(store, outline, number, start),
        doubt=lambda page: page.problem,
    )
