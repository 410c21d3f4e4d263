"""The values of an array: a slice with statistics and a histogram, or a file to take away (.npy or .safetensors).

Only the bytes of the slice, or of the region, are read, by their ranges in the shards.
"""

from __future__ import annotations

import io
import math
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from treeckpt._core.format.records import AliasRecord, Index, Leaf, PerRankArrays
from treeckpt._core.sharding.dtypes import dtype_of, numpy_dtype
from treeckpt._core.sharding.int_runs import decode_runs
from treeckpt._core.sharding.region import Region
from treeckpt._core.text import bytes_text, number_text, region_text
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._foreign.safetensors_read import tag_of
from treeckpt._inspect.numbers import element_stats, element_texts, number_image
from treeckpt._io.storage.store import Store
from treeckpt._loading.peek import MAX_NBYTES, Peek, peek

from ..pages.checkpoints import OpenTree
from ..pages.load_code import SnippetPage, WantedLeaf, regions_code, selecting_code
from ..store.library import NotFound
from .chunks import leaf_of, parse_region, positions

DEFAULT_NBYTES = 1 << 20
"""Bytes of a slice whose size the request does not give."""
ROWS, COLUMNS = 12, 12
"""Size of the table of values."""
FileForm = Literal["npy", "safetensors"]


class Window(NamedTuple):
    """The requested part of an array: a part of the plane of dimensions `y` and `x`, or all of it."""

    y: int | None = None
    x: int | None = None
    at: tuple[int, ...] = ()
    """Positions in the other dimensions."""
    top: int = 0
    left: int = 0
    rows: int | None = None
    columns: int | None = None
    whole: bool = False


class StatisticsPart(msgspec.Struct, frozen=True):
    """Statistics of the elements of a slice; for complex elements, of their magnitudes."""

    nan: int
    infinite: int
    zero: int
    minimum: str | None
    maximum: str | None
    mean: str | None
    deviation: str | None
    norm: str | None
    edges: list[float]
    bins: list[int]


class ImagePart(msgspec.Struct, frozen=True):
    """A picture of the plane of the slice; of each cell the element with the largest absolute value."""

    rows: int
    columns: int
    limit: float
    """The absolute value that 127 stands for."""
    cells: bytes
    """int8[rows, columns], in JSON as base64; -128 for a cell with an element that is NaN or infinite."""


class PeekPage(msgspec.Struct, frozen=True):
    """A slice of an array."""

    region: str
    rank: int | None
    """The rank of a per-rank array, else None."""
    dtype: str
    y: int | None
    x: int | None
    top: int
    left: int
    rows: int
    columns: int
    elements: int
    nbytes: int
    read: int
    """Bytes that were read from the shards."""
    verified: bool
    statistics: StatisticsPart | None
    """None if the elements are no numbers."""
    values: list[list[str]]
    """The first rows and columns, as text."""
    limit: int
    """Bytes of the largest slice."""
    image: ImagePart | None
    """None if the elements are no numbers."""


def peek_page(
    tree: OpenTree,
    number: int,
    y: int | None = None,
    x: int | None = None,
    at: str = "",
    top: int = 0,
    left: int = 0,
    rows: int | None = None,
    columns: int | None = None,
    whole: bool = False,
    region: str = "",
) -> PeekPage:
    """A slice of the values of an array: `rows` x `columns` of the plane of dimensions `y` and `x`, a region, or all.

    Raises:
        NotFound: the leaf is no array, or has no elements.
        TreeckptError: the slice is too large, or its bytes are damaged.
    """
    asked = Window(y, x, at=tuple(positions(at)), top=top, left=left, rows=rows, columns=columns, whole=whole)

    def read(store: Store, index: Index) -> PeekPage:
        leaf, spec = array_of(index, number)
        if not math.prod(spec.shape):
            raise NotFound("This leaf has no elements to look at.")
        rank, window = _pick_rank(leaf, asked)
        box, y, x = _region(spec.shape, dtype_of(spec.dtype).itemsize, window)
        box = asked_region(region, spec.shape) or box
        return _page(peek(store, index, leaf, box, rank=rank), spec.dtype, rank, y, x)

    return tree.read(read)


def array_of(index: Index, number: int) -> tuple[Leaf, ArraySpec]:
    """Returns the leaf whose bytes are those of leaf `number`, which is an array.

    Raises:
        NotFound: it is none, or a view of another leaf.
    """
    leaf = leaf_of(index, number)
    if isinstance(leaf.record, AliasRecord) and leaf.record.view is None:
        leaf = index.entries[leaf.record.of]
    if leaf.spec is None:
        raise NotFound("This leaf is no array: it has no elements.")
    if isinstance(leaf.record, AliasRecord):
        raise NotFound(f"This is a view of {index.entries[leaf.record.of].path}; look at that one.")
    return leaf, leaf.spec


def asked_region(text: str, shape: tuple[int, ...]) -> Region | None:
    """Does what `parse_region` does; raises NotFound for a text that is no region."""
    try:
        return parse_region(text, shape)
    except ValueError as error:
        raise NotFound(f"{error}") from error


def leaf_snippet(tree: OpenTree, number: int, region: str = "", which: int = 0) -> SnippetPage:
    """The Python code that loads a leaf, or a region of it, of the rank at position `which` where each has its own.

    Raises:
        NotFound: there is no such leaf or region.
    """
    leaf = leaf_of(tree.index, number)
    box = asked_region(region, leaf.spec.shape) if leaf.spec is not None else None
    if box is None and leaf.ranks is None:
        return SnippetPage(leaf.path, selecting_code(tree.checkpoint.info, [leaf.path]))
    ranks = decode_runs(leaf.ranks or ()).tolist() or [0]
    wanted = WantedLeaf(leaf.path, leaf.spec, None if box is None else (box,))
    code = regions_code(tree.checkpoint.info, [wanted], rank=ranks[min(which, len(ranks) - 1)])
    return SnippetPage(leaf.path, code)


def rank_at(leaf: Leaf, which: int) -> int | None:
    """Returns the rank whose array comes at a position, the last one beyond the end; None if ranks have no own ones."""
    if not isinstance(leaf.record, PerRankArrays):
        return None
    ranks = decode_runs(leaf.ranks or ()).tolist()
    return ranks[min(max(which, 0), len(ranks) - 1)]


def _pick_rank(leaf: Leaf, window: Window) -> tuple[int | None, Window]:
    """Returns the rank of a per-rank array, else None, and the window without the dimension of ranks."""
    if (rank := rank_at(leaf, window.at[0] if window.at else 0)) is None:
        return None, window
    y, x = (d - 1 if d else None for d in (window.y, window.x))
    return rank, window._replace(y=y, x=x, at=window.at[1:])


def _region(shape: tuple[int, ...], itemsize: int, window: Window) -> tuple[Region, int | None, int | None]:
    """Returns the region of a window, and the dimensions of the table's rows and columns."""
    dims = len(shape)
    x = window.x if window.x is not None and window.x < dims else dims - 1 if dims else None
    y = window.y if window.y is not None and window.y < dims else None
    if (y is None or y == x) and dims > 1:
        y = next(d for d in reversed(range(dims)) if d != x)
    if window.whole or x is None:
        return Region.whole(shape), y, x
    offset = [window.at[d] if d < len(window.at) and 0 <= window.at[d] < n else 0 for d, n in enumerate(shape)]
    sizes = [1] * dims
    left = min(window.left, shape[x] - 1)
    columns = window.columns or max(1, DEFAULT_NBYTES // itemsize)
    offset[x], sizes[x] = left, min(columns, shape[x] - left)
    if y is not None:
        top = min(window.top, shape[y] - 1)
        rows = window.rows or max(1, DEFAULT_NBYTES // (itemsize * sizes[x]))
        offset[y], sizes[y] = top, min(rows, shape[y] - top)
    return Region(tuple(offset), tuple(sizes)), y, x


def _page(found: Peek, dtype: str, rank: int | None, y: int | None, x: int | None) -> PeekPage:
    region, plane = found.region, _plane(found, y, x)
    return PeekPage(
        region=region_text(region),
        rank=rank,
        dtype=dtype,
        y=y,
        x=x,
        top=region.offset[y] if y is not None else 0,
        left=region.offset[x] if x is not None else 0,
        rows=region.shape[y] if y is not None else 1,
        columns=region.shape[x] if x is not None else 1,
        elements=region.size,
        nbytes=found.data.nbytes,
        read=found.read,
        verified=found.verified,
        statistics=_statistics(found.data, dtype),
        values=[element_texts(row, dtype) for row in plane[:ROWS, :COLUMNS]],
        limit=MAX_NBYTES,
        image=_image(plane, dtype),
    )


def _statistics(data: np.ndarray, dtype: str) -> StatisticsPart | None:
    stats = element_stats(data, dtype)
    if stats is None:
        return None
    # JSON has no infinity: where the edges of bins overflow, there is no histogram
    finite = all(map(math.isfinite, stats.edges))
    edges, bins = (list(stats.edges), list(stats.bins)) if finite else ([], [])
    return StatisticsPart(
        nan=stats.nan,
        infinite=stats.infinite,
        zero=stats.zero,
        minimum=_number(stats.minimum),
        maximum=_number(stats.maximum),
        mean=_number(stats.mean),
        deviation=_number(stats.deviation),
        norm=_number(stats.norm),
        edges=edges,
        bins=bins,
    )


def _number(number: float | None) -> str | None:
    return None if number is None else number_text(number)


def _plane(found: Peek, y: int | None, x: int | None) -> np.ndarray:
    """Returns uint8[rows, columns, itemsize]; of a whole array with more dimensions, the first plane."""
    grid = found.data.reshape(*found.region.shape, -1)
    plane = grid[tuple(slice(None) if d in (y, x) else 0 for d in range(grid.ndim - 1))]
    if y is not None and x is not None and y > x:
        plane = plane.swapaxes(0, 1)
    return plane.reshape(-1 if y is not None else 1, plane.shape[-2] if x is not None else 1, plane.shape[-1])


def _image(plane: np.ndarray, dtype: str) -> ImagePart | None:
    image = number_image(plane, dtype)
    if image is None or not math.isfinite(image.limit):
        return None
    return ImagePart(image.rows, image.columns, image.limit, image.cells)


class LeafFile(NamedTuple):
    """A file of one array, or of a region of it."""

    data: bytes
    name: str
    verified: bool
    """Whether all bytes were compared with their checksums."""


def leaf_file(tree: OpenTree, number: int, form: FileForm, region: str, which: int) -> LeafFile:
    """Returns leaf `number` of a checkpoint as a file.

    Args:
        region: the part of it, as `100:200, :`; empty for all of it.
        which: of a leaf with an array for each rank, the position of the rank among them.

    Raises:
        NotFound: the leaf is no array, is larger than MAX_NBYTES, or has a dtype that the form lacks.
        TreeckptError: its bytes are damaged.
    """

    def read(store: Store, index: Index) -> LeafFile:
        leaf, spec = array_of(index, number)
        if form not in (forms := file_forms(index, number)):
            others = f"; take .{forms[0]}" if forms else "; load it with treeckpt.load"
            raise NotFound(f"A .{form} file cannot hold {spec.dtype}{others}.")
        box = asked_region(region, spec.shape) or Region.whole(spec.shape)
        if (nbytes := box.size * dtype_of(spec.dtype).itemsize) > MAX_NBYTES:
            what = f"{region_text(box)} of {index.entries[number].path} has {bytes_text(nbytes)}"
            hint = "Name a smaller region (region=0:100), or load it with treeckpt.load."
            raise NotFound(f"{what}, and at most {bytes_text(MAX_NBYTES)} are sent. {hint}")
        rank = rank_at(leaf, which)
        peeked = peek(store, index, leaf, box, rank=rank)
        path = index.entries[number].path.replace("~rank*", f"~rank{rank}")
        spec = msgspec.structs.replace(spec, shape=box.shape)
        data = _npy(peeked.data, spec) if form == "npy" else _safetensors(peeked.data, spec, path, region_text(box))
        # Where there are no bytes, none could be compared, and none can differ.
        return LeafFile(data, f"{path.replace('/', '.')}.{form}", peeked.verified or not nbytes)

    return tree.read(read)


def file_forms(index: Index, number: int) -> list[FileForm]:
    """Returns the formats that a leaf can be downloaded in: those that have its dtype; none if it is no array."""
    try:
        _, spec = array_of(index, number)
    except NotFound:
        return []
    npy: list[FileForm] = ["npy"] if dtype_of(spec.dtype).numpy is not None else []
    return [*npy, "safetensors"] if tag_of(spec) is not None else npy


def _npy(data: np.ndarray, spec: ArraySpec) -> bytes:
    file = io.BytesIO()
    np.save(file, data.reshape(-1).view(numpy_dtype(spec.dtype)).reshape(spec.shape), allow_pickle=False)
    return file.getvalue()


def _safetensors(data: np.ndarray, spec: ArraySpec, path: str, region: str) -> bytes:
    from treeckpt.convert._safetensors_write import encode_safetensors_header  # not for the start of the server

    head, _ = encode_safetensors_header([(path, spec)], {"format": "pt", "region": region})
    return head + data.tobytes()
