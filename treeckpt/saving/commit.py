"""How is an agreed save written, judged and published? As functions of plain data, the same wherever they run.

`SaveInfo` and the plans say all there is to say of a save but the bytes themselves, so a process that has no tree and
no
torch can write its shards and publish its index. What is written follows from them alone: header, manifest and index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ..arrays.base import Piece
from ..core.format.build_index import build_index
from ..core.format.index import INDEX_NAME, MAX_INDEX, decode_index, encode_index, encode_manifest
from ..core.format.lineage import Lineage
from ..core.format.records import FileTable, Index, file_table
from ..core.format.save_progress import parse_progress_name
from ..core.format.shard_header import ShardHeader, block_count, parse_shard_name, shard_name
from ..core.format.timings import Host, Timings, encode_timings, timings_name
from ..core.planning.save_plan import FilePlan
from ..core.planning.stream_order import assign_offsets
from ..core.sharding.int_runs import encode_runs
from ..core.tree.value_codec import Value
from ..errors import CheckpointError, CheckpointExists, CheckpointNotFound
from ..io.comm.failures import silent_faults, to_fault, wrap_os_error
from ..io.storage.metadata_files import read_index
from ..io.storage.store import MemoryStore, Store, Swapping
from ..io.timing import Recorder
from .messages import CommitResult, FileRow, WriteReport
from .plan_cache import Plans
from .shard_stream import SaveFile, entries_of, run_save

__all__ = [
    "IN_PLACE",
    "SaveInfo",
    "Stream",
    "as_in_place",
    "judge",
    "may_be_in_place",
    "remove",
    "shard_names",
    "write_shards",
]

IN_PLACE = "The new index is in place, but may not survive a power loss; save again"
"""What to say where publishing failed after its effect."""
Stream = tuple[Sequence[FilePlan], Callable[[int], Sequence[Piece]]]
"""What files are made of: for each a plan of its bytes, and the pieces by number of leaf."""


class SaveInfo(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks agreed on, as one of them needs it to write; with the plans, all but the bytes."""

    rank: int
    world: int
    save_id: str
    created_ns: int
    step: int | None
    overwrite: bool
    key: str
    """Of the plans."""
    max_shard_bytes: int
    previous: str = ""
    """On rank 0: the save that is to be replaced."""
    metadata: dict[str, Value] = {}
    values: dict[str, Value] = {}
    """On rank 0: of the leaves that ranks share."""
    own_values: tuple[tuple[str, int, Value], ...] = ()
    """On rank 0: of the leaves under `PerRank`, with the rank."""
    lineage: Lineage | None = None
    """On rank 0: of a manager's checkpoint."""


def shard_names(facts: SaveInfo, plans: Plans) -> list[str]:
    """The files that this rank writes."""
    return [shard_name(facts.save_id, facts.rank, facts.world, file.part) for file in plans.own.files]


def write_shards(
    store: Store,
    facts: SaveInfo,
    plans: Plans,
    stream: Stream,
    recorder: Recorder,
) -> tuple[FileRow, ...]:
    """Writes this rank's shards, durably.

    Args:
        stream: for each file of the plan one of the same bytes.
    """
    manifest = encode_manifest(_index(facts, plans, None, FileTable())) if facts.rank == 0 else None
    planned = plans.own.files
    files = [
        SaveFile(plan, name, _header(facts, plans, file, manifest if file.part == 0 else None))
        for plan, name, file in zip(stream[0], shard_names(facts, plans), planned, strict=True)
    ]
    sizes = run_save(store, files, stream[1], recorder)
    return tuple(
        (facts.rank, file.part, file.stream, nbytes, header)
        for file, (header, nbytes) in zip(planned, sizes, strict=True)
    )


def _header(facts: SaveInfo, plans: Plans, file: FilePlan, manifest: str | None) -> ShardHeader:
    def describe(number: int) -> tuple[str, str, tuple[int, ...]]:
        leaf = plans.leaf(number)
        assert leaf.spec is not None, "arrays only are written"
        return leaf.path.replace("~rank*", f"~rank{facts.rank}"), leaf.spec.dtype, leaf.spec.shape

    return ShardHeader(
        facts.save_id,
        facts.rank,
        facts.world,
        file.part,
        file.stream,
        entries_of(file, describe),
        (0,) * block_count(file.nbytes),
        manifest=manifest,
    )


def _index(facts: SaveInfo, plans: Plans, placed: Any, files: FileTable) -> Index:
    return build_index(
        plans.plenum,
        placed,
        files,
        values=facts.values,
        own_values={(path, rank): value for path, rank, value in facts.own_values},
        save_id=facts.save_id,
        step=facts.step,
        created_ns=facts.created_ns,
        metadata=facts.metadata,
        lineage=facts.lineage,
    )


def judge(
    store: Store,
    facts: SaveInfo,
    plans: Plans | None,
    reports: Mapping[int, WriteReport],
    lost: Mapping[int, str],
    recorder: Recorder,
) -> tuple[CommitResult, Exception | None]:
    """What the coordinator makes of all ranks' reports: it publishes if all did well.

    Returns:
        how the save ended, and the error that publishing met.
    """
    faults = [report.fault for report in reports.values() if report.fault is not None] + silent_faults(lost)
    error: Exception | None = None
    publishing = in_place = False
    if not faults:
        try:
            assert plans is not None, "a rank without plans reports a fault"
            with recorder.span("publish"):
                index = _placed(facts, plans, reports)
                data = encode_index(index)
                _put_timings(store, facts, reports, None, recorder)
                _check_there(store, index)
                publishing = True
                _publish(store, data, facts)
        except Exception as met:
            error = wrap_os_error(met, store.url)
            if in_place := publishing and may_be_in_place(store, facts.save_id):
                error = as_in_place(error)
            faults.append(to_fault(error, 0, common=isinstance(error, CheckpointExists)))
    if not faults:
        # it is committed: the rest may fail without harm
        with contextlib.suppress(Exception):
            _put_timings(store, facts, reports, None, recorder)
        with contextlib.suppress(Exception):
            _remove_previous(store, facts.previous)
        return CommitResult((), True), None
    with contextlib.suppress(Exception):  # the error that is being reported matters more
        _put_timings(store, facts, reports, "; ".join(f"rank {f.rank}: {f.text}" for f in faults)[:4000], recorder)
    return CommitResult(tuple(faults), in_place), error


def _check_there(store: Store, index: Index) -> None:
    """Whether all shards are there still: other programs, and people, delete files too.

    An object store is not asked: it has acknowledged each, and a listing is a request that costs.
    """
    in_memory = isinstance(store, MemoryStore)
    if isinstance(store, Swapping) and not in_memory:
        return
    sizes = store.sizes()
    for file in index.file_list:
        if in_memory and file.name not in sizes:
            raise CheckpointError(
                store.url,
                expected="the shards of all ranks in the memory of one process",
                found=f"no {file.name} in that of rank 0",
                hint='Ranks in processes of their own save to a directory or URL, or each alone with comm="alone"',
            )
        if sizes.get(file.name) != file.header + file.nbytes:
            raise CheckpointError(
                f"{store.url}/{file.name}",
                expected=f"{file.header + file.nbytes} bytes, as written a moment ago",
                found="no such file" if file.name not in sizes else f"{sizes[file.name]}",
                hint="Something else deletes or changes files there; find out what, and save again",
            )


def _publish(store: Store, data: bytes, facts: SaveInfo) -> None:
    """Puts the index up; where the store can tell, only over that of the save which this one is to replace."""
    if facts.previous and isinstance(store, Swapping):

        def is_previous(found: bytes) -> bool:
            return decode_index(found, store.url).save_id == facts.previous

        store.swap(INDEX_NAME, data, holds=is_previous, limit=MAX_INDEX)
    else:
        store.publish(INDEX_NAME, data, replace=facts.overwrite)


def _placed(facts: SaveInfo, plans: Plans, reports: Mapping[int, WriteReport]) -> Index:
    rows = [row for report in reports.values() for row in report.files]
    placed, totals = assign_offsets([leaf for _, leaf in plans.arrays], plans.shares, facts.world)
    for rank, report in reports.items():
        written = sum(row[3] for row in report.files)
        if written != int(totals[rank]):
            raise AssertionError(f"rank {rank} wrote {written} bytes, the plan says {int(totals[rank])}")
    numbers = (number for number, _ in plans.arrays)
    return _index(facts, plans, dict(zip(numbers, placed, strict=True)), file_table(rows))


def may_be_in_place(store: Store, save_id: str) -> bool:
    """After publishing failed: whether the index of this save is there, or might be.

    Publishing can fail behind the rename, when the directory is synced.
    """
    try:
        return read_index(store).save_id == save_id
    except CheckpointNotFound:
        return False
    except Exception:
        return True


def as_in_place(error: Exception) -> Exception:
    """The same error, which says that the index is in place all the same."""
    if type(error) is not CheckpointError:
        return error
    told = CheckpointError(error.path, expected=error.expected, found=error.found, hint=IN_PLACE)
    told.__cause__ = error.__cause__
    return told


def _put_timings(
    store: Store, facts: SaveInfo, reports: Mapping[int, WriteReport], error: str | None, recorder: Recorder
) -> None:
    told = (span for rank, report in reports.items() if rank for span in report.timings)
    names = sorted({report.host for report in reports.values()} - {""})
    hosts = tuple(Host(name, encode_runs(sorted(r for r, d in reports.items() if d.host == name))) for name in names)
    timings = Timings(facts.save_id, facts.step, facts.world, (*recorder.spans, *told), error, hosts)
    store.publish(timings_name(facts.save_id), encode_timings(timings), replace=True)


def remove(store: Store, names: Sequence[str]) -> None:
    """Deletes what can be deleted."""
    for name in names:
        with contextlib.suppress(Exception):
            store.delete(name)


def _remove_previous(store: Store, save_id: str) -> None:
    if not save_id:
        return
    remove(store, [*(name for name in store.sizes() if _save_of(name) == save_id), timings_name(save_id)])


def _save_of(name: str) -> str:
    """The save that a shard, or a record of progress, belongs to."""
    shard, progress = parse_shard_name(name), parse_progress_name(name)
    return shard[0] if shard is not None else progress[1] if progress is not None else ""
