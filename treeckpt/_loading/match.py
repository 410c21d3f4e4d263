"""Matches the saved leaves of a checkpoint with the wanted ones.

Finds leaves by path and rank, decodes values, and adds arrays to what is read; compares keys, shapes and dtypes before
any memory is touched.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import msgspec
import numpy as np

from .._arrays.base import ArrayTarget
from .._arrays.registry import Blob, abstract_of, blob_value, check_cast, check_library, decode, like_of, target_of
from .._core.format.byte_map import BadBytes, DamagedLeaf, damaged_leaves
from .._core.format.check_index import FREE_CHUNKS, FREE_VIEW_NBYTES, VIEW_TIMES, check_claims
from .._core.format.records import (
    AliasRecord,
    ArrayRecord,
    Index,
    Leaf,
    PerRankValues,
    ValueRecord,
    WholeChunk,
    count_chunks,
)
from .._core.sharding.dtypes import cast_hint, dtype_of
from .._core.sharding.int_runs import decode_runs
from .._core.sharding.region import Region, is_c_order
from .._core.tree.keyed_table import ChosenIds, chosen_ids
from .._core.tree.leaf_differences import SequenceReplacement, Strict, check_same, compare_leaves
from .._core.tree.paths import as_path, check_used, compile_globs, path_text, with_field_names
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import Structure, empty_container_paths
from .._io.comm.comm import Comm, global_rank, other_world_error, ranks_of_host
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.memory import SlabAllocator, available_memory
from .._io.timing import Recorder
from ..errors import CorruptError, MismatchError, TreeError
from ..reports import LoadReport
from ..rules._rules import Rule, check_scaled
from ..rules._view import ComposedLeaf, View, unscaled_sources, view_of
from .options import Device, Fallback, ReadOptions
from .partial_ranks import PartialRanks
from .plan import LeafPlaceholder
from .read_batch import BatchOptions, ReadBatch, default_memory

_log = logging.getLogger("treeckpt")


class LoadOptions(msgspec.Struct, frozen=True):
    """The options of a load; see `treeckpt.load`."""

    select: tuple[str, ...] | None = None
    strict: Strict = True
    cast: bool = False
    device: Device = None
    read: ReadOptions = ReadOptions()
    fallback: Fallback = Fallback()
    allow_pickle: bool = False
    namespace: str = ""
    exclude: tuple[str, ...] | None = None
    rules: tuple[Rule, ...] = ()
    only: frozenset[str] | None = None
    """Paths to load, of those that are selected."""
    specs_only: bool = False
    """Gives the specs of arrays in their place, without like."""
    below: str = ""
    """The path of a container: only what is in it is loaded, of what is selected."""
    bad: tuple[BadBytes, ...] | None = None
    """What is damaged: leaves with such bytes are not loaded, nor is a shard refused for them; None refuses."""
    lenient: bool = False
    """Gives `...`, without like, in the place of what cannot be made here, as of a class that this program lacks."""
    ids: Any = None
    """The rows of keyed tables to load, as `treeckpt.load` takes them, then `ChosenIds`; None for all owned ones."""
    joined: Mapping[str, Load] = {}
    """Columns of tables that another checkpoint gives, by path, and the load that sees it: with `like` slots of tables
    whose ids come from here, without it the ids of tables that get slots from here."""
    rows: Mapping[str, Any] = {}
    """The checkpoints that give rows of a table, where several do, as `RowGivers`, by the path of its ids."""
    partial: PartialRanks | None = None
    """The ranks that are strict together; None where each is for itself."""

    def __post_init__(self) -> None:
        if self.ids is not None:
            given = self.ids
            if isinstance(given, Mapping):
                given = {as_path(path, "ids"): ids for path, ids in given.items()}
            msgspec.structs.force_setattr(self, "ids", chosen_ids(given))
        if self.strict not in (True, False, "missing"):
            raise MismatchError("strict", expected="True or False or 'missing'", found=f"{self.strict!r:.60}")

    @property
    def own_strict(self) -> Strict:
        """How strict this rank is by itself."""
        return self.strict if self.partial is None else self.partial.own_strict(self.strict)

    def not_asked_for(self, unexpected: Sequence[str]) -> list[str]:
        """Returns the saved leaves that are not asked for: by this rank, or with `partial` by none; raises by `strict`.

        Args:
            unexpected: those that this rank does not ask for.
        """
        return [*unexpected] if self.partial is None else self.partial.check(unexpected, self.strict)

    @property
    def is_part(self) -> bool:
        """Whether some of a checkpoint may be left out."""
        return self.select is not None or self.exclude is not None or self.only is not None or bool(self.below)

    @property
    def given_apart(self) -> bool:
        """Whether other checkpoints give columns or rows of tables too."""
        return bool(self.joined or self.rows)

    def for_structure(self, structure: Structure) -> LoadOptions:
        """Returns the options with the globs, and paths of tables, that those of optree have become in a structure."""
        if self.select is None and self.exclude is None and not self.below and self.ids is None:
            return self
        ours = with_field_names(structure)
        select, exclude = (None if globs is None else tuple(map(ours, globs)) for globs in (self.select, self.exclude))
        ids: ChosenIds | None = self.ids
        if ids is not None:
            ids = msgspec.structs.replace(ids, of_table={ours(path): own for path, own in ids.of_table.items()})
        return msgspec.structs.replace(self, select=select, exclude=exclude, below=ours(self.below), ids=ids)

    def selects(self, path: str) -> bool:
        """Whether a path is wanted: `select` names it or a path above it, and `exclude` does not."""
        if self.select is not None and not compile_globs(self.select).match(path):
            return False
        if (self.only is not None and path not in self.only) or (
            self.below and path != self.below and not path.startswith(f"{self.below}/")
        ):
            return False
        return self.exclude is None or not compile_globs(self.exclude).match(path)

    def check_used(self, saved: Callable[[], Iterable[str]], others: Callable[[], Iterable[str]] = tuple) -> None:
        """Refuses globs that match nothing, under `strict`.

        Args:
            saved: returns the names that `select` may match.
            others: returns further names that `exclude` may match.

        Raises:
            MismatchError: naming one.
        """
        if self.strict and (self.select or self.exclude):
            names = list(saved())
            for what, globs, known in (("select", self.select, names), ("exclude", self.exclude, [*names, *others()])):
                try:
                    check_used(what, globs, known)
                except MismatchError as error:
                    keys = tuple(globs or ())
                    if len(keys) > 1 and any(f"{name}/".startswith(f"{path_text(keys)}/") for name in known):
                        error.add_hint(f"A path as its keys is {what}=[{keys}]: a tuple of texts is several globs")
                    raise


class Load:
    """One load on one rank."""

    def __init__(self, checkpoint: Checkpoint, comm: Comm, options: LoadOptions) -> None:
        self.rank, self.here = comm.rank, global_rank(comm)
        self.recorder = Recorder(comm.rank)
        self.checkpoint, self.index = checkpoint, checkpoint.index
        default = default_memory(checkpoint.store.traits)
        self.memory = default if options.read.memory is None else options.read.memory
        """Bytes of buffers, at most."""
        self.source_rank = comm.rank % self.index.world
        self.refuse_own = options.fallback.per_rank != "take" and comm.size != self.index.world
        self._comm = comm
        self.ruled: View | None = None
        """The leaves after the rules; None where there are none."""
        if options.rules:
            strict = bool(options.strict)
            self.ruled = view_of(self.index, options.rules, source_rank=self.source_rank, rank=comm.rank, strict=strict)
        self.view: Index | View = self.ruled or self.index
        """The leaves that can be matched."""
        self.options = options.for_structure(self.view.structure)
        self.take = None if options.read.copy else SlabAllocator().take
        """Memory for new arrays; with `copy` each has its own."""
        self.damaged = self._damaged()
        # ranks that send each other what they read do not also take turns through the page cache
        readers = ranks_of_host(comm) if not options.read.once else (self.here,)
        self.batch = ReadBatch(
            checkpoint, self.source_rank, self.recorder, whole=options.bad is None, here=(self.here, readers)
        )
        self.claims = Claims(checkpoint, whole=options.bad is None)
        self.chosen_rows: dict[tuple[int, str], Any] = {}
        """Where the rows of chosen ids are, by the number and path of the ids of a table."""
        self.table_rows: dict[tuple[Any, ...], Any] = {}
        """The rows that count of a table with deltas, by the number of its ids and what is wanted of it."""
        self._checked: set[tuple[str, str]] = set()
        """Kinds and dtypes of new arrays whose library is there."""
        self.loaded = 0
        self._blobs: dict[int, Blob] = {}
        """The values that were read from shards, by leaf number."""
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.in_parts: list[tuple[str, str]] = []
        """(path, class) of tensors of which a dict of their parts was returned."""
        self.unmade: list[str] = []
        """The paths of what cannot be made here, and is `...` by `lenient`."""

    @property
    def names(self) -> frozenset[str]:
        """The names of all leaves and empty containers of the checkpoint, selected or not, after the rules."""
        return frozenset((*self.view.by_path, *empty_container_paths(self.view.structure)))

    def selected(self, path: str) -> bool:
        """Whether a path is wanted, is not damaged, and no rule leaves it as it is."""
        return self.options.selects(path) and path not in self.damaged and not self.is_kept(path)

    def is_kept(self, path: str) -> bool:
        """Whether a `Keep` rule leaves the target's value at a path unchanged."""
        return self.ruled is not None and self.ruled.is_kept(path)

    def filled(self, path: str, wanted: ArraySpec | None) -> Leaf | None:
        """Returns the array that a `Fill` rule puts where one is wanted and none was saved; None if no rule does."""
        return None if self.ruled is None else self.ruled.filled(path, wanted)

    def _damaged(self) -> dict[str, tuple[DamagedLeaf, ...]]:
        """Returns the damaged parts of each leaf by path, for the rank whose state is loaded."""
        if not self.options.bad:
            return {}
        damaged = damaged_leaves(self.index, self.options.bad, rank=self.source_rank)
        by_path: dict[str, tuple[DamagedLeaf, ...]] = {}
        for leaf in self.view.entries:
            saved = [s.number for s in leaf.sources.values()] if isinstance(leaf, ComposedLeaf) else [leaf.number]
            parts = [part for number in saved for part in damaged.get(number, ())]
            if parts:
                by_path[leaf.path] = tuple(msgspec.structs.replace(part, path=leaf.path) for part in parts)
        return by_path

    def find(self, path: str) -> Leaf | None:
        """Returns the saved leaf at a path; under `PerRank` the one of the source rank."""
        saved = self.view.by_path.get(path)
        if saved is None:
            return None
        if saved[0].ranks is None:
            return saved[0]
        if self.refuse_own and self.selected(path):
            others = "; or leave this leaf out with `...` in like"
            take = "fallback=Fallback(per_rank='take')"
            raise other_world_error(path, self._comm, self.index.world, take=take, others=others)
        for leaf in saved:
            if self.source_rank in decode_runs(leaf.ranks or ()):
                return leaf
        raise MismatchError(
            path,
            expected=f"state of rank {self.source_rank}",
            found="state of other ranks only",
            hint="Leave this leaf out with `...` in like",
        )

    def owns(self, leaf: Leaf) -> bool:
        """Whether a leaf under `PerRank` is that of the source rank; refuses what `find` does."""
        return self.source_rank in decode_runs(leaf.ranks or ()) and self.find(leaf.path) is leaf

    def is_of_others(self, path: str) -> bool:
        """Whether only other ranks than the source rank have a leaf of their own at a path."""
        leaves = self.view.by_path[path]
        if leaves[0].ranks is None:
            return False
        return not any(self.source_rank in decode_runs(leaf.ranks or ()) for leaf in leaves)

    def value(self, leaf: Leaf, path: str) -> object:
        """Returns a saved value."""
        record = leaf.record
        if isinstance(record, PerRankValues):
            stored = record.values[int(np.flatnonzero(decode_runs(leaf.ranks or ()) == self.source_rank)[0])]
        elif leaf.stored is not None:
            if leaf.number not in self._blobs:
                self.read_blobs([leaf])
            self.loaded += 1
            return self._blobs.pop(leaf.number)
        else:
            assert isinstance(record, ValueRecord), "arrays are read, not decoded"
            stored = record.value
        try:
            value = decode(stored, path, allow_pickle=self.options.allow_pickle)
        except (MismatchError, TreeError):
            if not self.options.lenient:
                raise
            self.unmade.append(path)
            return ...
        self.loaded += 1
        return value

    def read_blobs(self, leaves: Iterable[Leaf | None]) -> None:
        """Reads the values among saved leaves whose bytes are in shards, so that `value` has them."""
        blobs = [leaf for leaf in leaves if leaf is not None and leaf.spec is None and leaf.stored is not None]
        if not blobs:
            return
        batch, wanted = self.new_batch(), dict[int, tuple[Leaf, np.ndarray]]()
        for leaf in blobs:
            if leaf.number in wanted or leaf.stored is None:
                continue
            self.claims.take(leaf.path, leaf)
            wanted[leaf.number] = leaf, batch.add_region(leaf.as_array, Region.whole(leaf.stored.shape))
        self.run_now(batch)
        # a batch holds all that it has filled: without it each blob's bytes are freed before the next one is copied
        del batch
        while wanted:
            number, (leaf, memory) = wanted.popitem()
            assert leaf.stored is not None, "blobs are stored"
            self._blobs[number] = blob_value(memory.data, leaf.stored.kind, leaf.path)

    def fill(self, path: str, leaf: Leaf, wanted: object) -> LeafPlaceholder:
        """Adds an array to what is read, which fills another one."""
        self.claims.take(path, leaf)
        return self._add(path, leaf, target_of(wanted, path, self.here))

    def array(self, path: str, leaf: Leaf, wanted: object) -> LeafPlaceholder:
        """Adds a new array to what is read: as a view of what is read if possible, else it is filled.

        Args:
            wanted: what describes the array.
        """
        self.claims.take(path, leaf)
        spec, device = abstract_of(wanted, path, self.here), self.options.device
        device = self._device_for(leaf.spec) if callable(device) else device
        on_host = device == "cpu" or (spec is not None and spec.device is None and device in (None, "original"))
        if spec is not None and on_host and not self.options.read.copy and spec.regions is None:
            # where nothing else is asked for there is nothing to compare
            if spec is not leaf.spec:
                self.check(path, leaf, spec)
            if leaf.spec is not None and spec.dtype == leaf.spec.dtype:
                if self.options.read.mmap and not is_c_order(spec.shape, spec.order):
                    spec = msgspec.structs.replace(spec, order=None)  # what is mapped lies as in the file
                # a library that is missing is an error before anything is read
                if (spec.kind, spec.dtype) not in self._checked:
                    check_library(spec, path)
                    self._checked.add((spec.kind, spec.dtype))
                slot = self.batch.add_new_array(path, leaf, spec)
                if slot is not None:
                    self.loaded += 1
                    return slot
        return self._add(path, leaf, like_of(wanted, path, self.here, device, allocate=self.take))

    def _add(self, path: str, leaf: Leaf, target: ArrayTarget | None) -> LeafPlaceholder:
        """Adds an array to what is read, with the target that it is read into; None where a value is wanted."""
        if target is None:
            raise MismatchError(
                path,
                expected="a value",
                found=f"an array in the checkpoint, {leaf.spec and leaf.spec.dtype} of shape "
                f"{leaf.spec and leaf.spec.shape}{self._chain(path)}",
                hint="Put an array, a tc.ArraySpec or `...` there in like",
            )
        self.check(path, leaf, target.spec)
        self.loaded += 1
        self.batch.add_target(path, leaf, target)
        return LeafPlaceholder(target.leaf)

    def _device_for(self, saved: ArraySpec | None) -> str | None:
        """Returns where a new array goes; None for where its spec says."""
        device = self.options.device
        return device((saved.device if saved is not None else None) or "cpu") if callable(device) else device

    def new(self, spec: ArraySpec, path: str, page_offset: int = 0) -> ArrayTarget:
        """Returns a new array, on the device of the options, or else of the spec.

        Args:
            page_offset: where in a page its bytes begin in their file. In memory they begin there too, if it is large:
                they can be read past the page cache without a copy then.
        """
        take = partial(self.take, page_offset=page_offset) if self.take is not None else None
        target = like_of(spec, path, self.here, self._device_for(spec), allocate=take)
        assert target is not None, "a spec describes an array"
        return target

    def new_batch(self) -> ReadBatch:
        """Returns another batch of reads from the same checkpoint."""
        return ReadBatch(self.checkpoint, self.source_rank, self.recorder, whole=self.batch.whole)

    def run_now(self, batch: ReadBatch) -> None:
        """Reads another batch at once, and counts its bytes among those of the load."""
        batch.run(BatchOptions(self.memory, self.options.read.verify, ahead=True))
        self.batch.nbytes += batch.nbytes
        self.batch.read_nbytes += batch.read_nbytes

    def check(self, path: str, leaf: Leaf, wanted: ArraySpec) -> None:
        """Refuses a wanted shape or dtype that is not the saved one, by a MismatchError."""
        saved = leaf.spec
        assert saved is not None, "values are decoded, not read"
        if wanted.shape != saved.shape:
            raise MismatchError(
                path,
                expected=f"shape {wanted.shape}",
                found=f"{saved.shape} in the checkpoint{self._chain(path)}",
                hint="Ask for the saved shape, or leave the leaf out with `...`",
            )
        if wanted.regions == ():
            return  # holds nothing, and does not know of what dtype
        if wanted.dtype == saved.dtype:
            return
        # before `cast` is asked for: with it, the values would be wrong
        check_scaled(path, (saved.dtype, wanted.dtype), self.view.by_path)
        for at, dtype in unscaled_sources(self.index, leaf):
            check_scaled(path, (dtype, wanted.dtype), self.index.by_path, at=at)
        if not self.options.cast:
            raise MismatchError(
                path,
                expected=wanted.dtype,
                found=f"{saved.dtype} in the checkpoint{self._chain(path)}",
                hint=cast_hint(saved.dtype, wanted.dtype),
            )
        check_cast(wanted, saved.dtype, path)

    def _chain(self, path: str) -> str:
        chain = "" if self.ruled is None else self.ruled.chain(path)
        return f", by the rules {chain}" if chain else ""

    def check_keys(self, wanted: Mapping[str, object], whole: Mapping[str, SequenceReplacement]) -> None:
        """Compares the wanted leaves with the saved ones.

        Args:
            wanted: by path.
            whole: sequences that take the saved content whole, by path.

        Raises:
            MismatchError: by `strict`, naming what is missing and what is unexpected.
        """
        self.options.check_used(lambda: [*self.names, *wanted])
        lacks = frozenset(self.missing).__contains__
        saved = [path for path in self.view.by_path if not self.is_of_others(path)]
        differences = compare_leaves(wanted, saved, lacks=lacks, whole=whole, selects=self.selected)
        self.unexpected = [*differences.unexpected]
        check_same(differences, self.options.own_strict)

    def report(self) -> LoadReport:
        report = LoadReport(
            self.checkpoint.url,
            self.batch.nbytes,
            read_nbytes=self.batch.read_nbytes,
            loaded=self.loaded,
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
            seconds=self.recorder.seconds,
            dropped=self.ruled.transformed.dropped if self.ruled else (),
            renamed=tuple(pair for pair in self.ruled.renamed if self.selected(pair[1])) if self.ruled else (),
            unverified_nbytes=self.batch.nbytes
            if self.options.read.verify is False or self.options.read.mmap
            else self.checkpoint.unverified(self.batch.nbytes),
            in_parts=tuple(self.in_parts),
            damaged=tuple(part for path, parts in self.damaged.items() if self.options.selects(path) for part in parts),
            unmade=tuple(self.unmade),
        )
        _log.debug("%s", report)
        return report


class Claims:
    """The bytes and chunks that one load needs, by the index; those of a saved array count once.

    Args:
        whole: names a shard that is cut short, even where the wanted bytes of it are there.
    """

    def __init__(self, checkpoint: Checkpoint, *, whole: bool) -> None:
        self._checkpoint, self._whole = checkpoint, whole
        self._claimed = self._chunks = self._views = 0
        self._allowed = 0
        """Bytes up to which what is claimed has been found to be there."""
        self._counted: set[int] = set()

    @cached_property
    def _unlisted(self) -> int:
        """Bytes up to which what is claimed is compared with the sizes that the index has for the shards.

        A store that is far away is not listed for them: there each shard is compared with the index when it is opened,
        before that memory is touched.
        """
        far = self._checkpoint.store.traits.far and self._whole
        return available_memory() if far else -1

    @cached_property
    def _expected(self) -> int:
        """Bytes of all shards, by the index."""
        return sum(file.header + file.nbytes for file in self._checkpoint.index.file_list)

    @cached_property
    def _present(self) -> int:
        """Bytes of all shards that are there."""
        sizes = self._checkpoint.sizes
        held = sum(sizes.get(file.name, 0) for file in self._checkpoint.index.file_list)
        return held + self._checkpoint.repeated_nbytes

    def take(self, path: str, leaf: Leaf) -> None:
        """Counts the bytes and chunks of an array, before memory is allocated for it.

        Raises:
            CorruptError: more than all the shards that are there.
        """
        for source in leaf.sources.values() if isinstance(leaf, ComposedLeaf) else (leaf,):
            spec, record = source.stored, source.record
            # ties and views have no bytes of their own in the files
            if source.number in self._counted or spec is None or type(record) is AliasRecord:
                continue
            self._counted.add(source.number)
            self._claimed += math.prod(spec.shape) * dtype_of(spec.dtype).itemsize
            if isinstance(record, ArrayRecord) and type(record.chunks) is not WholeChunk:
                self._chunks += count_chunks(record.chunks)
        if self._claimed > self._allowed or self._chunks > FREE_CHUNKS:
            self._check(path)

    def _check(self, path: str) -> None:
        """Compares what is claimed so far with the files."""
        present = self._expected if self._claimed <= self._unlisted else self._present
        try:
            check_claims(self._claimed, self._chunks, present, f"{path}: {self._checkpoint.url}")
        except CorruptError:
            for file in self._checkpoint.index.file_list:
                if self._checkpoint.sizes.get(file.name) != file.header + file.nbytes and self._whole:
                    self._checkpoint.shard(file)  # raises an error that says what is wrong with it
            check_claims(self._claimed, self._chunks, self._present, f"{path}: {self._checkpoint.url}")
        self._allowed = present if self._claimed > self._unlisted else min(present, self._unlisted)

    def take_view(self, path: str, spec: ArraySpec) -> None:
        """Counts a view whose base is not loaded: it takes memory of its own, and may repeat bytes any number of times.

        Raises:
            MismatchError: it takes far more than all the shards that are there.
        """
        self._views += math.prod(spec.shape) * dtype_of(spec.dtype).itemsize
        if self._views <= FREE_VIEW_NBYTES:  # the files are not listed for so few
            return
        most = FREE_VIEW_NBYTES + VIEW_TIMES * sum(self._checkpoint.sizes.values())
        if self._views > most:
            raise MismatchError(
                f"{path}: {self._checkpoint.url}",
                expected=f"views that take at most {most} bytes",
                found=f"{self._views} bytes for shape {spec.shape}",
                hint="Load the array that it is a view of too: then it takes no memory of its own",
            )
