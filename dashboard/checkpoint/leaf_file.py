"""An array as a file to take away: .npy or .safetensors. Only its own bytes are read, by their ranges in the shards."""

from __future__ import annotations

import io
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from treeckpt._core.format.records import Index
from treeckpt._core.sharding.dtypes import dtype_of, numpy_dtype
from treeckpt._core.sharding.region import Region
from treeckpt._core.text import bytes_text, region_text
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._foreign.safetensors_read import TAGS
from treeckpt._inspect.outline import Outline
from treeckpt._io.storage.store import Store
from treeckpt._loading.peek import MAX_NBYTES, peek

from ..store.library import NotFound
from .chunks import parse_region
from .peek import array_of, rank_at

FileForm = Literal["npy", "safetensors"]


class LeafFile(NamedTuple):
    """A file of one array, or of a region of it."""

    data: bytes
    name: str
    verified: bool
    """Whether all bytes were compared with their checksums."""


def leaf_file(store: Store, outline: Outline, number: int, form: FileForm, region: str, which: int) -> LeafFile:
    """Returns leaf `number` of the checkpoint in a store as a file.

    Args:
        region: the part of it, as `100:200, :`; empty for all of it.
        which: of a leaf with an array for each rank, the position of the rank among them.

    Raises:
        NotFound: the leaf is no array, is larger than MAX_NBYTES, or has a dtype that the form lacks.
        TreeckptError: its bytes are damaged.
    """
    leaf, spec = array_of(outline.index, number)
    if form not in (forms := file_forms(outline.index, number)):
        others = f"; take .{forms[0]}" if forms else "; load it with treeckpt.load"
        raise NotFound(f"A .{form} file cannot hold {spec.dtype}{others}.")
    try:
        box = parse_region(region, spec.shape) or Region.whole(spec.shape)
    except ValueError as error:
        raise NotFound(f"{error}") from error
    if (nbytes := box.size * dtype_of(spec.dtype).itemsize) > MAX_NBYTES:
        raise NotFound(
            f"{region_text(box)} of {outline.index.entries[number].path} has {bytes_text(nbytes)}, and at most "
            f"{bytes_text(MAX_NBYTES)} are sent. Name a smaller region (region=0:100), or load it with treeckpt.load."
        )
    rank = rank_at(leaf, which)
    found = peek(store, outline.index, leaf, box, rank=rank)
    path = outline.index.entries[number].path.replace("~rank*", f"~rank{rank}")
    spec = msgspec.structs.replace(spec, shape=box.shape)
    data = _npy(found.data, spec) if form == "npy" else _safetensors(found.data, spec, path, region_text(box))
    return LeafFile(data, f"{path.replace('/', '.')}.{form}", found.verified or not nbytes)


def file_forms(index: Index, number: int) -> list[FileForm]:
    """Returns the formats that a leaf can be downloaded in: those that have its dtype; none if it is no array."""
    try:
        _, spec = array_of(index, number)
    except NotFound:
        return []
    npy: list[FileForm] = ["npy"] if dtype_of(spec.dtype).numpy is not None else []
    return [*npy, "safetensors"] if spec.dtype in TAGS.values() else npy


def _npy(data: np.ndarray, spec: ArraySpec) -> bytes:
    file = io.BytesIO()
    np.save(file, data.reshape(-1).view(numpy_dtype(spec.dtype)).reshape(spec.shape), allow_pickle=False)
    return file.getvalue()


def _safetensors(data: np.ndarray, spec: ArraySpec, path: str, region: str) -> bytes:
    from treeckpt.convert._safetensors_write import encode_safetensors_header  # not for the start of the server

    head, _ = encode_safetensors_header([(path, spec)], {"format": "pt", "region": region})
    return head + data.tobytes()
