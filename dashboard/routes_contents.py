"""The addresses of what one checkpoint's pages fetch on demand: values, pictures of bytes, checksums."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from . import queries
from .peeks import PeekPage, Window, peek_page
from .snippets import SnippetPage, snippet_page

__all__ = ["api", "pages"]

api = APIRouter(prefix="/api/v1")
pages = APIRouter(include_in_schema=False)

Dim = Annotated[int | None, Query(ge=0, le=64)]
At = Annotated[str, Query(max_length=2000, pattern=r"^[0-9,]*$", description="a position for each dimension")]
Position = Annotated[int, Query(ge=0, le=1 << 53)]
Size = Annotated[int | None, Query(ge=1, le=1 << 53)]


@api.get("/checkpoints/{checkpoint_id}/leaves/{number}/peek")
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
    library = request.app.state.library
    _, outline = queries.opened(library, checkpoint_id)
    where = tuple(int(n[:18]) if n else 0 for n in at.split(",")) if at else ()
    window = Window(y, x, where, top, left, rows, columns, whole)
    return peek_page(library.checkpoint(checkpoint_id)[1].path, outline, number, window)


@api.get("/checkpoints/{checkpoint_id}/snippet")
def get_snippet(
    request: Request, checkpoint_id: str, path: Annotated[str, Query(max_length=20_000)] = ""
) -> SnippetPage:
    """The line of Python that loads a leaf, or what is below a node."""
    _, info = request.app.state.library.checkpoint(checkpoint_id)
    return snippet_page(info.path, path)
