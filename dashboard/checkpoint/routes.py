"""The addresses of one checkpoint: its page, its leaves, its shards, and the data that their scripts fetch."""

from __future__ import annotations

from typing import Literal

from fastapi import Query, Request
from fastapi.responses import RedirectResponse, Response

from ..pages.answers import PageRouter, check_same_site, file_response
from ..pages.checkpoints import OpenTree, OwnTree
from . import chunks, contents, files, leaf, leaf_numbers, tree, values
from .verify import VerifyJobs, VerifyPage

POSITION = Query(ge=0, le=1 << 53)
SIZE = Query(ge=1, le=1 << 53)
DIM = Query(ge=0, le=64)
BYTES = "application/octet-stream"

router = PageRouter(
    node=Query(max_length=1000, description="positions of a node from the root, as `0.3.12`"),
    at=Query(max_length=2000, pattern=r"^[0-9,]*$", description="a position for each dimension, as `0,3,7`"),
    region=Query(max_length=500, description="a part of an array, as `100:200, :, 7`"),
    id=Query(max_length=40, description="an id of a keyed table, as a text: 64 bits, signed or unsigned"),
    path=Query(max_length=20_000),
    count=Query(ge=10, le=100_000, description="boxes, at most"),
    dtype=Query(max_length=64),
    larger=Query(ge=0, le=1 << 62, description="bytes, at least"),
    then=Query(description="the page that follows"),
    action=Query(description="start or cancel a verification"),
    which=Query(ge=0, le=1 << 53, description="of arrays of ranks, whose: a position among these ranks"),
    form=Query(description="the format of the file"),
    y=DIM,
    x=DIM,
    top=POSITION,
    left=POSITION,
    rows=SIZE,
    columns=SIZE,
)
CHECKPOINT = "/checkpoints/{checkpoint_id}"
LEAF = f"{CHECKPOINT}/leaves/{{number}}"
FILE = f"{CHECKPOINT}/files/{{number}}"
SIDECAR = f"{CHECKPOINT}/sidecars/{{number}}"


def get_leaf_file(
    tree: OpenTree, number: int, form: values.FileForm = "safetensors", region: str = "", which: int = 0
) -> Response:
    """An array, or a region of it, as a file of 64 MiB at most. `X-Checksums` says whether all of it was verified."""
    file = values.leaf_file(tree, number, form, region, which)
    response = file_response(file.data, file.name)
    response.headers["X-Checksums"] = "match" if file.verified else "not compared"
    return response


def get_sidecar_content(tree: OwnTree, number: int) -> Response:
    """The bytes of a file that was saved with the checkpoint; they match its checksum."""
    sidecar, data = files.sidecar_file(tree, number)
    return file_response(data, sidecar.name)


def get_verify(
    request: Request,
    jobs: VerifyJobs,
    checkpoint_id: str,
    action: Literal["", "start", "cancel"] = "",
    then: Literal["verify", "contents"] = "verify",
    start: int = 0,
) -> VerifyPage | Response:
    """What is known of the bytes, all that is damaged, and the verification that runs: `action` starts, cancels it."""
    check_same_site(request, action)
    if action == "cancel":
        jobs.cancel(checkpoint_id)
    page = jobs.page(checkpoint_id, start, start=action == "start")
    if action and not request.scope["path"].startswith("/api/"):  # so that a reload does not repeat it
        return RedirectResponse(then, 303)
    return page


router.get(CHECKPOINT, tree.checkpoint_page, "checkpoint.html")
router.get(f"{CHECKPOINT}/tree", tree.tree_page)
router.get(f"{CHECKPOINT}/search", tree.search_page)
router.get(f"{CHECKPOINT}/leaves", tree.leaves_page, table="rows", start=POSITION)
router.get(f"{CHECKPOINT}/folds", tree.folds_page)
router.get(f"{CHECKPOINT}/treemap", tree.treemap_page)
router.get(f"{CHECKPOINT}/snippet", tree.snippet_page, start=POSITION, stop=POSITION)
router.get(f"{CHECKPOINT}/found/snippet", tree.found_snippet)
router.get(LEAF, leaf.leaf_page, "leaf.html", table="chunks.rows")
router.get(f"{LEAF}/chunks", chunks.chunks_page)
router.get(f"{LEAF}/map", chunks.map_page)
router.get(f"{LEAF}/peek", values.peek_page)
router.get(f"{LEAF}/file", get_leaf_file, media_type=BYTES)
router.get(f"{LEAF}/snippet", values.leaf_snippet)
router.get(f"{LEAF}/steps", leaf_numbers.leaf_steps)
router.get(SIDECAR, files.sidecar_page, "sidecar.html")
router.get(f"{SIDECAR}/content", get_sidecar_content, media_type=BYTES)
router.get(f"{CHECKPOINT}/files", files.files_page, "files.html", table="rows")
router.get(FILE, files.file_page, "file.html", table="rows")
router.get(f"{FILE}/strip", files.strip_page)
router.get(f"{FILE}/checksums", files.checksums_page, start=POSITION)
router.get(f"{CHECKPOINT}/verify", get_verify, "verify.html", result_type=VerifyPage, table="rows")
router.get(f"{CHECKPOINT}/contents", contents.contents_page, "contents.html", table="rows")
router.get(f"{CHECKPOINT}/balance", files.balance_page)
