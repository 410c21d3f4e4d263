"""What a save's files hold, and how they are published and removed.

`SaveInfo` and the plan describe a save completely but for the bytes of its arrays: header, manifest and index follow
from them, so a process that has no tree and no torch can write the shards and publish the index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

import msgspec

from ..core.format.build_index import build_index
from ..core.format.file_names import parse_file_name
from ..core.format.index import INDEX_NAME, MAX_INDEX, decode_index, encode_manifest
from ..core.format.lineage import Lineage
from ..core.format.records import FileTable, Index, file_table
from ..core.format.shard_header import ShardEntry, ShardHeader, block_count, shard_name
from ..core.format.sidecars import Sidecar, stored_name
from ..core.format.timings import Host, Timings, encode_timings, timings_name
from ..core.planning.save_plan import ChunkOffsets, FilePlan, SingleChunkOffset, assign_offsets
from ..core.sharding.int_runs import encode_runs
from ..core.tree.value_codec import Value
from ..errors import CheckpointError, CheckpointNotFound, StoreError
from ..io.storage.index_lock import take_back_index
from ..io.storage.leftovers import delete_files
from ..io.storage.metadata_files import read_index
from ..io.storage.store import Store
from ..io.timing import Recorder
from .messages import WriteReport
from .options import CommonOptions
from .plan_cache import GlobalPlan

PUBLISHED_HINT = "The new index is in place, but may not survive a power loss; save again"
"""The hint of an error where publishing failed after its effect."""
UNANSWERED_HINT = "The new index may be in place all the same: look at the checkpoint, or save again"
"""The hint where an object store has not said whether it has published, or will."""


class IndexContent(msgspec.Struct, frozen=True, array_like=True):
    """What the index holds beside the plan; gathered on rank 0."""

    metadata: dict[str, Value] = {}
    values: dict[str, Value] = {}
    """Of the leaves that ranks share."""
    own_values: tuple[tuple[str, int, Value], ...] = ()
    """Of the leaves under `PerRank`, as (path, rank, value)."""
    replaced: str = ""
    """The id of the save that is overwritten."""
    lineage: Lineage | None = None
    """Of a manager's checkpoint."""
    sidecars: tuple[Sidecar, ...] = ()


class SaveInfo(msgspec.Struct, frozen=True, array_like=True):
    """One save as the ranks agreed on it; with the plan, everything but the bytes of arrays."""

    rank: int
    world: int
    save_id: str
    created_ns: int
    options: CommonOptions
    content: IndexContent | None = None
    """None on ranks other than 0."""

    @property
    def replaces(self) -> bool:
        """Whether a checkpoint is overwritten, as far as rank 0 knows."""
        return self.content is not None and self.content.replaced != ""

    def replacing(self, save_id: str) -> SaveInfo:
        """Returns the info of a save that overwrites another one; "" for none. On rank 0."""
        assert self.content is not None, "rank 0 has it"
        return msgspec.structs.replace(self, content=msgspec.structs.replace(self.content, replaced=save_id))


def shard_names(info: SaveInfo, plan: GlobalPlan | None) -> list[str]:
    """Returns the names of the files that this rank writes; a rank without a plan writes none."""
    files = plan.own.files if plan is not None else ()
    return [shard_name(info.save_id, info.rank, info.world, file.part) for file in files]


def written_names(info: SaveInfo, plan: GlobalPlan | None) -> list[str]:
    """Returns the names of all files that this rank writes before the commit: shards, and on rank 0 sidecar files."""
    sidecars = info.content.sidecars if info.content is not None else ()
    return [*shard_names(info, plan), *(stored_name(info.save_id, sidecar.name) for sidecar in sidecars)]


def manifest_of(info: SaveInfo, plan: GlobalPlan) -> str | None:
    """Returns what the coordinator's first shard keeps of the tree, to rebuild a lost index; None on other ranks."""
    return encode_manifest(_index(info, plan, None, FileTable())) if info.rank == 0 else None


def shard_header(info: SaveInfo, plan: GlobalPlan, file: FilePlan, manifest: str | None) -> ShardHeader:
    """Returns the header of a shard, with zeros in the place of the checksums."""
    entries: list[ShardEntry] = []
    for write in file.writes:
        leaf = plan.leaf(write.leaf)
        assert leaf.spec is not None, "arrays only are written"
        path = leaf.path.replace("~rank*", f"~rank{info.rank}")
        entries.append(ShardEntry(path, leaf.spec.dtype, leaf.spec.shape, write.region, write.start, write.nbytes))
    return ShardHeader(
        info.save_id,
        info.rank,
        info.world,
        file.part,
        file.stream,
        tuple(entries),
        (0,) * block_count(file.nbytes),
        manifest=manifest,
    )


def complete_index(info: SaveInfo, plan: GlobalPlan, reports: Mapping[int, WriteReport]) -> Index:
    """Returns the index of a save that all ranks have written."""
    rows = [row for report in reports.values() for row in report.files]
    placed, totals = assign_offsets([leaf for _, leaf in plan.arrays], plan.shares, info.world)
    for rank, report in reports.items():
        written = sum(row[3] for row in report.files)
        if written != int(totals[rank]):
            raise AssertionError(f"rank {rank} wrote {written} bytes, the plan says {int(totals[rank])}")
    numbers = (number for number, _ in plan.arrays)
    return _index(info, plan, dict(zip(numbers, placed, strict=True)), file_table(rows))


def _index(
    info: SaveInfo, plan: GlobalPlan, placed: Mapping[int, ChunkOffsets | SingleChunkOffset] | None, files: FileTable
) -> Index:
    content = info.content or IndexContent()
    index = build_index(
        plan.global_tree,
        placed,
        files,
        values=content.values,
        own_values={(path, rank): value for path, rank, value in content.own_values},
        save_id=info.save_id,
        step=info.options.step,
        created_ns=info.created_ns,
        metadata=content.metadata,
        lineage=content.lineage,
    )
    return msgspec.structs.replace(index, sidecars=content.sidecars)


def check_files_exist(store: Store, index: Index, sizes: Mapping[str, int]) -> None:
    """Checks that no other program has deleted shards or sidecar files, before the index is published.

    An object store is not checked: it has acknowledged each file, and was listed before that.

    Raises:
        CheckpointError: naming the file.
    """
    if store.traits.conditional:
        return
    for file in index.file_list:
        if store.traits.in_process and file.name not in sizes:
            raise CheckpointError(
                store.url,
                expected="the shards of all ranks in the memory of one process",
                found=f"no {file.name} in that of rank 0",
                hint='Ranks in processes of their own save to a directory or URL, or each alone with comm="alone"',
            )
    written = [(file.name, file.header + file.nbytes) for file in index.file_list]
    written += [(stored_name(index.save_id, sidecar.name), sidecar.nbytes) for sidecar in index.sidecars]
    for name, nbytes in written:
        if sizes.get(name) != nbytes:
            raise CheckpointError(
                f"{store.url}/{name}",
                expected=f"{nbytes} bytes, as written a moment ago",
                found="no such file" if name not in sizes else f"{sizes[name]}",
                hint="Something else deletes or changes files there; find out what, and save again",
            )


def check_still_there(store: Store, index: Index) -> None:
    """Checks, after this process was stopped for minutes, that nobody took the committed save for a dead one.

    Raises:
        CheckpointError: its files were removed; the index is taken back.
    """
    if missing := sorted({file.name for file in index.file_list} - store.sizes().keys()):
        take_back_index(store, index.save_id)
        raise CheckpointError(
            f"{store.url}/{missing[0]}",
            expected="the shards of this save",
            found=f"{len(missing)} of {len(index.file_list)} are gone: a clean-up took the save for a dead one",
            hint="This process was stopped for minutes, or could not reach the store; save again",
        )


def publish_index(store: Store, data: bytes, info: SaveInfo, check: Callable[[], object]) -> None:
    """Publishes the index, which is the commit; where the store can, only over what was there before the save.

    Args:
        check: raises if files of the save are gone; see `Store.publish`.

    Raises:
        CheckpointExists: there is another checkpoint.
    """
    if info.options.overwrite and store.traits.conditional:
        check()
        replaced = info.content.replaced if info.content is not None else ""

        def is_replaced(found: bytes) -> bool:
            try:
                return decode_index(found, store.url).save_id == replaced
            except CheckpointError:  # nor could it be read before the save
                return not replaced

        store.compare_and_swap(INDEX_NAME, data, holds=is_replaced, limit=MAX_INDEX)
        return
    try:
        store.publish(INDEX_NAME, data, replace=info.options.overwrite, check=check)
    except FileNotFoundError as error:
        if not store.traits.renames:
            raise
        raise CheckpointError(
            f"{store.url}/{INDEX_NAME}",
            expected="the temporary file that is to be renamed so",
            found="none: a clean-up took this process for an ended one",
            hint="It was stopped for minutes, or something else deletes files there; save again",
        ) from error


def index_may_be_published(store: Store, save_id: str, error: BaseException | None = None) -> bool:
    """Whether the index is there, or may be, after publishing failed with an error.

    It can fail after the rename, at the sync. A store can carry a request out after the client has given it up.
    """
    if isinstance(error, StoreError) and error.unanswered:
        return True
    try:
        return read_index(store).save_id == save_id
    except CheckpointNotFound:
        return False
    except Exception:
        return True


def with_published_hint(error: Exception) -> Exception:
    """Returns the same error with the hint that the index is in place all the same, or in an object store may be."""
    if isinstance(error, StoreError):
        error.add_hint(UNANSWERED_HINT)
    if type(error) is not CheckpointError:
        return error
    hinted = CheckpointError(error.path, expected=error.expected, found=error.found, hint=PUBLISHED_HINT)
    hinted.__cause__ = error.__cause__
    return hinted


def write_timings(
    store: Store,
    info: SaveInfo,
    reports: Mapping[int, WriteReport],
    error: str | None,
    recorder: Recorder,
    *,
    again: bool = False,
) -> None:
    """Writes the spans of all ranks, and the error of a save that failed; replaces earlier timings of this save.

    Args:
        again: they were written before. In a store that is far, where the caller of the save may go on meanwhile and
            delete the checkpoint, they are then not created anew.
    """
    reported = (span for rank, report in reports.items() if rank for span in report.timings)
    names = sorted({report.host for report in reports.values()} - {""})
    hosts = tuple(Host(name, encode_runs(sorted(r for r, d in reports.items() if d.host == name))) for name in names)
    spans = (*recorder.spans, *reported)
    timings = Timings(info.save_id, info.options.step, info.world, spans, error, hosts)
    name, data = timings_name(info.save_id), encode_timings(timings)
    present = store.read_version(name, limit=len(data))[1] if again and store.traits.conditional else True
    store.publish(name, data, replace=present)


def remove_files(store: Store, names: Iterable[str]) -> None:
    """Deletes files, as `delete_files`; errors are ignored."""
    with contextlib.suppress(Exception):
        delete_files(store, names)


def remove_replaced(store: Store, save_id: str) -> None:
    """Deletes the files of a save that was overwritten."""
    found = [(name, owned) for name in store.sizes() if (owned := parse_file_name(name)) is not None]
    kinds = ("shard", "sidecar", "progress", "verdict")
    names = [name for name, owned in found if owned.save_id == save_id and owned.kind in kinds]
    remove_files(store, [*names, timings_name(save_id)])
