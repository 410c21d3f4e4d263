"""Encodes and decodes index.json, which describes all that a checkpoint holds and where every byte of it lies.

It is published last; its presence is the commit. A seal and a version come first, so that both can be checked before
the rest is decoded. `rebuild` restores a lost index from the headers of the shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from ...errors import CorruptError, FormatError, MismatchError, TreeckptError
from ..planning.save_plan import BoxOwners, ChunkOffsets
from ..sharding.int_runs import decode_runs, encode_runs
from ..sharding.region import Region
from ..text import count_text
from ..tree.structure import MAX_DEPTH, check_stack
from .check_index import check_index
from .chunks import NoChunks, encode_chunks
from .packed_index import pack, unpack
from .records import ArrayRecord, FileTable, Index, Leaf, LeafRecord, PerRankArrays, file_table
from .seals import check_seal, sealed
from .shard_header import ShardHeader

VERSION = 1
INDEX_NAME = "index.json"
MAX_INDEX = 1 << 30
MAX_PLAIN_NBYTES = 256 << 10
"""Bytes up to which an index is never packed: msgspec decodes records several times as fast as columns."""
_ZEROS = "0" * 16


class _IndexDocument(msgspec.Struct, forbid_unknown_fields=True):
    """The file: the seal and the version first, so that they can be checked before the rest is decoded."""

    seal: str
    format: str
    version: int
    index: msgspec.Raw


_DOCUMENT = msgspec.json.Decoder(_IndexDocument)


def encode_index(index: Index) -> bytes:
    """Encodes index.json."""
    body = msgspec.json.encode(index)
    packed = pack(index) if len(body) > MAX_PLAIN_NBYTES else None
    if packed is not None and len(packed) < len(body):
        body = packed
    return sealed(msgspec.json.encode(_IndexDocument(_ZEROS, "treeckpt", VERSION, msgspec.Raw(body))))


def decode_index(data: bytes, name: str = INDEX_NAME) -> Index:
    """Decodes index.json.

    Raises:
        CorruptError: the seal is broken or missing.
        FormatError: another format or version, unknown fields, or records that contradict each other.
    """
    if len(data) > MAX_INDEX:
        raise FormatError(name, expected=f"at most {MAX_INDEX} bytes", found=f"{len(data)}")
    check_seal(data, name, hint="The file was changed after it was written; try treeckpt verify --repair")
    try:
        document = _DOCUMENT.decode(data)
    except RecursionError as error:
        raise _too_deep(name) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(name, expected="a treeckpt index", found=f"{error}"[:200]) from error
    if document.format != "treeckpt" or document.version != VERSION:
        raise FormatError(
            name,
            expected=f"treeckpt index version {VERSION}",
            found=f"{document.format} version {document.version}"[:80],
            hint="Load it with the version of treeckpt that wrote it, or a newer one",
        )
    return _decode_body(bytes(document.index), name)


def _decode_body(body: bytes, name: str, *, manifest: bool = False) -> Index:
    try:
        index = unpack(body, name)
        check_index(index, name, manifest=manifest)
        return index
    except MismatchError as error:  # of a spec
        raise FormatError(name, expected=error.expected, found=error.found) from error
    except TreeckptError:
        raise
    except RecursionError as error:
        raise _too_deep(name) from error
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise FormatError(name, expected="an index as treeckpt writes it", found=f"{error}"[:200]) from error


def _too_deep(name: str) -> FormatError:
    """Returns the error for a document that nests deeper than Python's calls; raises TreeError if the stack is full."""
    check_stack(name)
    expected = f"a tree at most {MAX_DEPTH} levels deep"
    return FormatError(name, expected=expected, found="one beyond Python's recursion limit")


def encode_manifest(index: Index) -> str:
    """Encodes the manifest, which the coordinator's shard holds: the index without chunks and files."""
    bare = tuple([_without_chunks(record) for record in index.leaves])
    return msgspec.json.encode(msgspec.structs.replace(index, leaves=bare, files=FileTable())).decode()


def _without_chunks(record: LeafRecord) -> LeafRecord:
    if isinstance(record, ArrayRecord) and not isinstance(record.chunks, NoChunks):
        return msgspec.structs.replace(record, chunks=NoChunks())
    return msgspec.structs.replace(record, start=()) if isinstance(record, PerRankArrays) else record


def rebuild(headers: Sequence[tuple[int, ShardHeader]], name: str = INDEX_NAME) -> Index:
    """Rebuilds the index that the save of these shards published, or would have published.

    Args:
        headers: (bytes of the header, the decoded header) of every shard.

    Raises:
        CorruptError: a shard is missing, such as the one with the manifest, or belongs to another save.
    """
    manifest = next((h.manifest for _, h in headers if h.manifest is not None), None)
    if manifest is None:
        raise CorruptError(
            name,
            expected="the shard of rank 0, which carries the tree",
            found=f"{count_text(len(headers), 'shard')} without it",
            hint="The index cannot be rebuilt",
        )
    index = _decode_body(manifest.encode(), name, manifest=True)
    if index.world > len(headers):
        raise CorruptError(
            name,
            expected=f"shards of all {index.world} ranks",
            found=count_text(len(headers), "shard"),
            hint="The save never finished, or shards were lost",
        )
    entries: dict[str, list[_RebuiltChunk]] = {}
    known: set[tuple[int, int]] = set()
    for _, header in headers:
        if (header.save_id, header.world) != (index.save_id, index.world) or (header.rank, header.part) in known:
            raise CorruptError(
                name,
                expected=f"one shard of save {index.save_id} for each rank and part, of {index.world} ranks",
                found=f"one of save {header.save_id}, rank {header.rank} of {header.world}, part {header.part}",
                hint="Move shards of other saves out of the directory",
            )
        known.add((header.rank, header.part))
        for entry in header.entries:
            at = _RebuiltChunk(entry.region, header.rank, header.stream + entry.start, entry.shape, entry.dtype)
            entries.setdefault(entry.path, []).append(at)
    leaves = tuple(_rebuild_record(leaf, entries) for leaf in index.entries)
    files = file_table((h.rank, h.part, h.stream, h.nbytes, size) for size, h in headers)
    rebuilt = msgspec.structs.replace(index, leaves=leaves, files=files)
    check_index(rebuilt, name)
    return rebuilt


class _RebuiltChunk(msgspec.Struct, frozen=True, order=True, gc=False):
    """An entry of a shard's header, with its rank and its start in the rank's stream."""

    region: Region
    rank: int
    start: int
    shape: tuple[int, ...]
    dtype: str


def _rebuild_record(leaf: Leaf, entries: dict[str, list[_RebuiltChunk]]) -> LeafRecord:
    record, spec = leaf.record, leaf.stored
    if isinstance(record, PerRankArrays) and leaf.ranks is not None:
        starts: list[int] = []
        for rank in decode_runs(leaf.ranks).tolist():
            found = entries.get(leaf.path.replace("~rank*", f"~rank{rank}"), [])
            if len(found) != 1 or spec is None or (found[0].shape, found[0].dtype) != (spec.shape, spec.dtype):
                raise _shard_missing(leaf.path, f"rank {rank}'s own array")
            starts.append(found[0].start)
        return msgspec.structs.replace(record, start=encode_runs(starts))
    if not isinstance(record, ArrayRecord) or spec is None:
        return record
    chunks = sorted(entries.get(leaf.path, []))
    if any((c.shape, c.dtype) != (spec.shape, spec.dtype) for c in chunks):
        raise FormatError(leaf.path, expected=f"entries of {spec.dtype} {spec.shape}", found="others")
    if not chunks or sum(c.region.size for c in chunks) != math.prod(spec.shape):
        raise _shard_missing(leaf.path, f"all of shape {spec.shape}")
    owners = BoxOwners(tuple((c.rank, c.region) for c in chunks))
    placed = ChunkOffsets(owners, np.array([c.start for c in chunks], np.int64))
    return msgspec.structs.replace(record, chunks=encode_chunks(spec.shape, placed))


def _shard_missing(path: str, expected: str) -> CorruptError:
    return CorruptError(path, expected=expected, found="a part of it in no shard", hint="A shard is missing")
