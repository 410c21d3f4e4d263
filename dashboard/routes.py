"""Which address shows what: every page twice, as HTML and under /api/v1 as JSON, from one query."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from . import arrays, queries, saves
from .answers import Answers
from .library import Library
from .pages import CheckpointPage, ChunksPage, FilePage, FilesPage, LeafPage, MapPage, SearchPage, StripPage, TreePage
from .render import render

__all__ = ["Start", "api", "pages"]

Start = Annotated[int, Query(ge=0, le=1 << 53, description="number of the first row")]
Node = Annotated[str, Query(max_length=1000, description="positions of a node from the root, as `0.3.12`")]
Words = Annotated[str, Query(max_length=500, description="words that a path must hold")]
Dim = Annotated[int | None, Query(ge=0, le=64)]
At = Annotated[str, Query(max_length=2000, pattern=r"^[0-9,]*$", description="a position for each dimension")]
RegionText = Annotated[str, Query(max_length=500, description="a part of an array, as `100:200, :, 7`")]
Number = int

api = Answers()
pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


def _library(request: Request) -> Library:
    return request.app.state.library


@api.gives("/checkpoints/{checkpoint_id}")
def get_checkpoint(
    request: Request, checkpoint_id: str, node: Node = "", q: Words = "", start: Start = 0
) -> CheckpointPage:
    """One checkpoint, whatever its state."""
    return queries.checkpoint_page(_library(request), checkpoint_id, node, q, start)


@api.gives("/checkpoints/{checkpoint_id}/tree")
def get_tree(request: Request, checkpoint_id: str, node: Node = "", start: Start = 0) -> TreePage:
    """A page of a node's children."""
    _, outline = queries.opened(_library(request), checkpoint_id)
    return queries.tree_page(outline, node, start)


@api.gives("/checkpoints/{checkpoint_id}/search")
def get_search(request: Request, checkpoint_id: str, q: Words, start: Start = 0) -> SearchPage:
    """Leaves by the words of their path; `start` is a leaf's number."""
    _, outline = queries.opened(_library(request), checkpoint_id)
    return queries.search_page(outline, q, start)


@api.gives("/checkpoints/{checkpoint_id}/leaves/{number}")
def get_leaf(
    request: Request, checkpoint_id: str, number: Number, start: Start = 0, region: RegionText = ""
) -> LeafPage:
    """One leaf, with a page of its chunks, or of those with elements of a region."""
    row, outline = queries.opened(_library(request), checkpoint_id)
    return arrays.leaf_page(row, outline, number, start, region)


@api.gives("/checkpoints/{checkpoint_id}/leaves/{number}/chunks")
def get_chunks(request: Request, checkpoint_id: str, number: Number, start: Start = 0) -> ChunksPage:
    """A page of an array's chunks."""
    _, outline = queries.opened(_library(request), checkpoint_id)
    return arrays.chunks_page(outline.index, arrays.leaf_of(outline.index, number), start)


@api.gives("/checkpoints/{checkpoint_id}/leaves/{number}/map")
def get_map(request: Request, checkpoint_id: str, number: Number, y: Dim = None, x: Dim = None, at: At = "") -> MapPage:
    """The regions of an array on a plane of two of its dimensions."""
    _, outline = queries.opened(_library(request), checkpoint_id)
    where = [int(n[:18]) if n else 0 for n in at.split(",")] if at else []
    return arrays.map_page(outline.index, arrays.leaf_of(outline.index, number), y, x, where)


@api.gives("/checkpoints/{checkpoint_id}/files")
def get_files(request: Request, checkpoint_id: str, start: Start = 0) -> FilesPage:
    """The shards."""
    return saves.files_page(*queries.opened(_library(request), checkpoint_id), start)


@api.gives("/checkpoints/{checkpoint_id}/files/{number}")
def get_file(request: Request, checkpoint_id: str, number: Number, start: Start = 0) -> FilePage:
    """One shard, with a page of its extents."""
    return saves.file_page(*queries.opened(_library(request), checkpoint_id), number, start)


@api.gives("/checkpoints/{checkpoint_id}/files/{number}/strip")
def get_strip(request: Request, checkpoint_id: str, number: Number) -> StripPage:
    """A shard's extents as few stretches, to be drawn."""
    _, outline = queries.opened(_library(request), checkpoint_id)
    return saves.strip_page(outline, number)


@pages.get("/checkpoints/{checkpoint_id}")
def show_checkpoint(
    request: Request, checkpoint_id: str, node: Node = "", q: Words = "", start: Start = 0
) -> HTMLResponse:
    return render(request, "checkpoint.html", get_checkpoint(request, checkpoint_id, node, q, start))


@pages.get("/checkpoints/{checkpoint_id}/leaves/{number}")
def show_leaf(
    request: Request, checkpoint_id: str, number: Number, start: Start = 0, region: RegionText = ""
) -> HTMLResponse:
    return render(request, "leaf.html", get_leaf(request, checkpoint_id, number, start, region))


@pages.get("/checkpoints/{checkpoint_id}/files")
def show_files(request: Request, checkpoint_id: str, start: Start = 0) -> HTMLResponse:
    return render(request, "files.html", get_files(request, checkpoint_id, start))


@pages.get("/checkpoints/{checkpoint_id}/files/{number}")
def show_file(request: Request, checkpoint_id: str, number: Number, start: Start = 0) -> HTMLResponse:
    return render(request, "file.html", get_file(request, checkpoint_id, number, start))
