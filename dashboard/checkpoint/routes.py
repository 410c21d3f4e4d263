"""The addresses of one checkpoint: its page, its leaves, its shards, and the data that their scripts fetch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from operator import attrgetter
from typing import Annotated, Literal, TypeVar

import msgspec
from fastapi import Query, Request
from fastapi.responses import RedirectResponse, Response

from treeckpt._inspect.outline import Outline
from treeckpt._inspect.treemap import TreemapKey
from treeckpt._io.storage.store import Store
from treeckpt.errors import CheckpointError

from ..pages.answers import PageRouter, Start, Words, check_same_site, file_response, library_of
from ..pages.checkpoints import OpenTree, open_checkpoint, open_tree
from ..store.library import Library
from . import files, tree
from .chunks import ChunksPage, MapPage, chunks_page, leaf_of, map_page, stored_leaf
from .contents import ContentsOrder, ContentsPage, contents_page
from .leaf import LeafPage, blob_facts, leaf_page
from .leaf_numbers import LeafSteps, leaf_steps, statistics_of
from .tree import TreemapPage, treemap_page
from .values import FileForm, PeekPage, Window, leaf_file, peek_page
from .verify import VerifyJobs, VerifyPage, keep_damage

T = TypeVar("T")
TRIES = 5
"""Versions of a checkpoint that are read, if saves replace it while it is read."""

Node = Annotated[str, Query(max_length=1000, description="positions of a node from the root, as `0.3.12`")]
Dim = Annotated[int | None, Query(ge=0, le=64)]
At = Annotated[str, Query(max_length=2000, pattern=r"^[0-9,]*$", description="a position for each dimension")]
RegionText = Annotated[str, Query(max_length=500, description="a part of an array, as `100:200, :, 7`")]
Position = Annotated[int, Query(ge=0, le=1 << 53)]
Size = Annotated[int | None, Query(ge=1, le=1 << 53)]
PathText = Annotated[str, Query(max_length=20_000)]
Count = Annotated[int, Query(ge=10, le=100_000, description="boxes, at most")]
Dtype = Annotated[str, Query(max_length=64)]
Then = Annotated[Literal["verify", "contents"], Query(description="the page that follows")]
Action = Annotated[Literal["", "start", "cancel"], Query(description="start or cancel a verification")]
Which = Annotated[int, Query(ge=0, le=1 << 53, description="of arrays of ranks, whose: a position among these ranks")]
Form = Annotated[FileForm, Query(description="the format of the file")]
Nbytes = Annotated[int, Query(ge=0, le=1 << 62, description="bytes, at least")]

router = PageRouter()


def _outline(request: Request, checkpoint_id: str) -> Outline:
    """Returns the tree of a checkpoint, also of one that another program wrote."""
    return open_tree(library_of(request), checkpoint_id).outline


def _jobs(request: Request) -> VerifyJobs:
    return request.app.state.verify_jobs


def _positions(at: str) -> list[int]:
    return [int(n[:18]) if n else 0 for n in at.split(",")] if at else []


# the tree -------------------------------------------------------------------------------------------------------------


@router.get("/checkpoints/{checkpoint_id}", "checkpoint.html")
def get_checkpoint(
    request: Request, checkpoint_id: str, node: Node = "", q: Words = "", start: Start = 0
) -> tree.CheckpointPage:
    """One checkpoint of any status."""
    return tree.checkpoint_page(library_of(request), checkpoint_id, node, q, start)


@router.get("/checkpoints/{checkpoint_id}/tree")
def get_tree(request: Request, checkpoint_id: str, node: Node = "", start: Start = 0) -> tree.TreePage:
    """A page of the children of a node."""
    return tree.tree_page(_outline(request, checkpoint_id), node, start)


@router.get("/checkpoints/{checkpoint_id}/search")
def get_search(request: Request, checkpoint_id: str, q: Words, start: Start = 0) -> tree.SearchPage:
    """Leaves by the words of their path; `start` is the number of a leaf."""
    return tree.search_page(_outline(request, checkpoint_id), q, start)


@router.get("/checkpoints/{checkpoint_id}/leaves", table="rows")
def get_leaves(
    request: Request, checkpoint_id: str, q: Words = "", dtype: Dtype = "", larger: Nbytes = 0, start: Position = 0
) -> tree.SearchPage:
    """Leaves by the words of their path, their dtype and their size; `start` is the number of a leaf."""
    return tree.search_page(_outline(request, checkpoint_id), q, start, dtype, larger)


@router.get("/checkpoints/{checkpoint_id}/folds")
def get_folds(request: Request, checkpoint_id: str, node: Node = "") -> tree.FoldsPage:
    """Repeated blocks among the children of a node, equal except for their number."""
    return tree.folds_page(_outline(request, checkpoint_id), node)


@router.get("/checkpoints/{checkpoint_id}/treemap")
def get_treemap(
    request: Request, checkpoint_id: str, by: TreemapKey = "tree", node: Node = "", count: Count = 20_000
) -> TreemapPage:
    """Bytes as nested boxes."""
    return treemap_page(_outline(request, checkpoint_id), by, node, count)


@router.get("/checkpoints/{checkpoint_id}/snippet")
def get_snippet(request: Request, checkpoint_id: str, path: PathText = "") -> tree.SnippetPage:
    """The Python code that loads a leaf, or all leaves below a node."""
    return tree.snippet_page(library_of(request).checkpoint(checkpoint_id).info, path)


# one leaf -------------------------------------------------------------------------------------------------------------


@router.get("/checkpoints/{checkpoint_id}/leaves/{number}", "leaf.html", table="chunks.rows")
def get_leaf(request: Request, checkpoint_id: str, number: int, start: Start = 0, region: RegionText = "") -> LeafPage:
    """One leaf, with a page of its chunks, or of those with elements of a region."""
    library = library_of(request)
    opened = open_tree(library, checkpoint_id)
    statistics = statistics_of(library, opened.checkpoint.info)
    page = leaf_page(opened.row, opened.outline, number, start, region, statistics)
    if (leaf := leaf_of(opened.outline.index, number)).spec is None and leaf.stored is not None:
        values = _read_one_version(library, opened, partial(blob_facts, number=number))
        page = msgspec.structs.replace(page, values=values)
    return page


@router.get("/checkpoints/{checkpoint_id}/leaves/{number}/chunks")
def get_chunks(request: Request, checkpoint_id: str, number: int, start: Start = 0) -> ChunksPage:
    """A page of the chunks of an array."""
    index = _outline(request, checkpoint_id).index
    return chunks_page(index, leaf_of(index, number), start)


@router.get("/checkpoints/{checkpoint_id}/leaves/{number}/map")
def get_map(request: Request, checkpoint_id: str, number: int, y: Dim = None, x: Dim = None, at: At = "") -> MapPage:
    """The regions of an array on the plane of two of its dimensions."""
    index = _outline(request, checkpoint_id).index
    return map_page(index, leaf_of(index, number), y, x, _positions(at))


@router.get("/checkpoints/{checkpoint_id}/leaves/{number}/peek")
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
    """A slice of the values of an array: `rows` x `columns` of the plane of dimensions `y` and `x`, or all of it."""
    window = Window(y, x, at=tuple(_positions(at)), top=top, left=left, rows=rows, columns=columns, whole=whole)
    library, read = library_of(request), partial(peek_page, number=number, window=window)
    return _read_one_version(library, open_tree(library, checkpoint_id), read)


@router.get("/checkpoints/{checkpoint_id}/leaves/{number}/file", media_type="application/octet-stream")
def get_leaf_file(
    request: Request,
    checkpoint_id: str,
    number: int,
    form: Form = "safetensors",
    region: RegionText = "",
    which: Which = 0,
) -> Response:
    """An array, or a region of it, as a file of 64 MiB at most. `X-Checksums` says whether all of it was verified."""
    library, read = library_of(request), partial(leaf_file, number=number, form=form, region=region, which=which)
    found = _read_one_version(library, open_tree(library, checkpoint_id), read)
    response = file_response(found.data, found.name)
    response.headers["X-Checksums"] = "match" if found.verified else "not compared"
    return response


# sidecar files --------------------------------------------------------------------------------------------------------


@router.get("/checkpoints/{checkpoint_id}/sidecars/{number}", "sidecar.html")
def get_sidecar(request: Request, checkpoint_id: str, number: int) -> files.SidecarPage:
    """A file that was saved with the checkpoint: its name, its checksum, and its text, if it is one."""
    library = library_of(request)
    opened = open_checkpoint(library, checkpoint_id)
    return _read_one_version(library, opened, partial(files.sidecar_page, row=opened.row, number=number))


@router.get("/checkpoints/{checkpoint_id}/sidecars/{number}/content", media_type="application/octet-stream")
def get_sidecar_content(request: Request, checkpoint_id: str, number: int) -> Response:
    """The bytes of a file that was saved with the checkpoint; they match its checksum."""
    library, read = library_of(request), partial(files.sidecar_file, number=number)
    sidecar, data = _read_one_version(library, open_checkpoint(library, checkpoint_id), read)
    return file_response(data, sidecar.name)


# shards ---------------------------------------------------------------------------------------------------------------


@router.get("/checkpoints/{checkpoint_id}/files", "files.html", table="rows")
def get_files(request: Request, checkpoint_id: str, start: Start = 0) -> files.FilesPage:
    """The shards."""
    opened = open_checkpoint(library_of(request), checkpoint_id)
    return files.files_page(opened.row, opened.outline, start)


@router.get("/checkpoints/{checkpoint_id}/files/{number}", "file.html", table="rows")
def get_file(request: Request, checkpoint_id: str, number: int, start: Start = 0) -> files.FilePage:
    """One shard, with a page of its extents."""
    opened = open_checkpoint(library_of(request), checkpoint_id)
    return files.file_page(opened.row, opened.outline, number, start)


@router.get("/checkpoints/{checkpoint_id}/files/{number}/strip")
def get_strip(request: Request, checkpoint_id: str, number: int) -> files.StripPage:
    """The extents of a shard as few segments, to be drawn."""
    return files.strip_page(open_checkpoint(library_of(request), checkpoint_id).outline, number)


@router.get("/checkpoints/{checkpoint_id}/files/{number}/checksums")
def get_checksums(request: Request, checkpoint_id: str, number: int, start: Position = 0) -> files.ChecksumsPage:
    """Compares a part of a shard with its checksums; `next` is the start of the next part."""
    library, compare = library_of(request), partial(files.checksums_page, number=number, start=start)
    opened = open_checkpoint(library, checkpoint_id)
    found = _read_one_version(library, opened, compare, problem_of=attrgetter("problem"))
    if found.problem:
        keep_damage(library, opened.checkpoint, found.name, found.problem)
    return found


@router.get("/checkpoints/{checkpoint_id}/verify", "verify.html", result_type=VerifyPage)
def get_verify(
    request: Request, checkpoint_id: str, action: Action = "", then: Then = "verify"
) -> VerifyPage | Response:
    """What is known of the bytes, and the verification that runs; `action` starts or cancels it."""
    jobs = _jobs(request)
    check_same_site(request, action)
    if action == "cancel":
        jobs.cancel(checkpoint_id)
    page = jobs.page(checkpoint_id, start=action == "start")
    if action and not request.scope["path"].startswith("/api/"):  # so that a reload does not repeat it
        return RedirectResponse(then, 303)
    return page


@router.get("/checkpoints/{checkpoint_id}/contents", "contents.html", table="rows")
def get_contents(
    request: Request, checkpoint_id: str, sort: ContentsOrder = "unusual", q: Words = "", start: Start = 0
) -> ContentsPage:
    """The statistics of all arrays, the most unusual first; a verification computes them."""
    library, job = library_of(request), _jobs(request).shown(checkpoint_id)
    return contents_page(library, open_checkpoint(library, checkpoint_id), job, sort, q, start)


@router.get("/checkpoints/{checkpoint_id}/leaves/{number}/steps")
def get_leaf_steps(request: Request, checkpoint_id: str, number: int) -> LeafSteps:
    """The statistics of the array at the same path in all checkpoints of the run, as far as they are known."""
    library = library_of(request)
    opened = open_tree(library, checkpoint_id)
    index = opened.outline.index
    return leaf_steps(library, opened.checkpoint.run, stored_leaf(index, leaf_of(index, number)).path)


@router.get("/checkpoints/{checkpoint_id}/balance")
def get_balance(request: Request, checkpoint_id: str) -> files.BalancePage:
    """The bytes that each rank wrote."""
    return files.balance_page(open_checkpoint(library_of(request), checkpoint_id).outline)


def _read_one_version(
    library: Library,
    opened: OpenTree,
    read: Callable[[Store, Outline], T],
    *,
    problem_of: Callable[[T], object] = lambda _: None,
) -> T:
    """Returns the result of `read`; reads again after a problem if a save has replaced the checkpoint meanwhile."""
    for tries_left in reversed(range(TRIES)):
        with closing(library.store(opened.checkpoint)) as store:
            try:
                result = read(store, opened.outline)
            except (CheckpointError, OSError):
                newer = open_tree(library, opened.checkpoint.id) if tries_left else opened
                if newer.outline.index.save_id == opened.outline.index.save_id:
                    raise
            else:
                newer = open_tree(library, opened.checkpoint.id) if tries_left and problem_of(result) else opened
                if newer.outline.index.save_id == opened.outline.index.save_id:
                    return result
        opened = newer
    raise AssertionError("the last try returns or raises")
