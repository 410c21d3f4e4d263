"""Loads a tree: matches what is wanted with what was saved, reads it, and builds the tree.

Keys, kinds, shapes, dtypes and layouts are checked before memory is touched; then every needed shard is checked to be
there, whole and of this save. Checksums are compared as the bytes are put in place, or all of them before. Ranks do not
communicate, unless they share the reads: each reads the ranges that it wants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec

from .._arrays.registry import (
    abstract_of,
    build_tensor,
    is_same_value,
    is_value,
    library_of,
    like_of,
    resolve,
    resolve_function,
    target_of,
)
from .._arrays.sharded import Sharded
from .._core.format.records import AliasRecord, Leaf
from .._core.format.table_deltas import JoinedIndex
from .._core.sharding.int_runs import encode_runs
from .._core.sharding.region import strides_in
from .._core.tree.flatten import (
    child_of_rank,
    flatten,
    replace_leaves,
    unflatten,
    update_in_place,
    update_metadata,
    without_left_out,
)
from .._core.tree.keyed_table import TableColumn
from .._core.tree.leaf_differences import SequenceReplacement, differing_sequences
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import Node, PerRankNode, Structure, containers_of, index_path, paths_of
from .._core.tree.tensor_parts import TensorParts, check_no_tensors, check_same_tensors
from .._core.tree.treespec import LEAF
from .._io.comm.comm import Comm
from .._io.os_errors import read_errors_wrapped
from .._io.storage.checkpoint import Checkpoint
from ..errors import MismatchError, TreeckptError
from ..reports import LoadReport
from .aliasing import check_ties, tied_to
from .keyed_tables import check_tables, column_slot, find_column, refuse_plain, slot_as_saved
from .match import Load, LoadOptions
from .plan import LeafPlaceholder
from .read_batch import BatchOptions, add_changed, open_relay, together

# without like ----------------------------------------------------------------------------------------------------


class _SavedTree(msgspec.Struct):
    """The structure of the tree as it was saved, and a placeholder for each leaf."""

    job: Load
    structure: Structure
    slots: list[LeafPlaceholder]
    tensors: dict[object, object] = {}
    """The tensors that are made of others, by class and parts."""

    def build(self) -> object:
        """Returns the tree, once all is read."""
        leaves = iter([slot.leaf for slot in self.slots])
        options = self.job.options
        return unflatten(
            self.structure,
            leaves,
            resolve=resolve,
            build=self._tensor,
            functions=resolve_function if options.allow_pickle else None,
            rank=self.job.rank,
            namespace=options.namespace,
            refused=self.job.unmade if options.lenient else None,
        )

    def _tensor(self, made: TensorParts, path: str) -> object:
        """Returns a tensor that is made of others, or its parts."""
        # by identity: parts of tied tensors are the same objects, and equal parts of two tensors are not
        known = made.node, tuple(map(id, made.parts.values()))
        if known in self.tensors:
            return self.tensors[known]  # tied when it was saved
        made_tensor = self.tensors[known] = build_tensor(made, path)
        if isinstance(made_tensor, dict) and not any(part is ... for part in made.parts.values()):
            self.job.in_parts.append((path, made.node.cls))
        return made_tensor


def _match_saved(job: Load) -> _SavedTree:
    """Adds the selected leaves of the saved tree to what is read; all others are `...`.

    A container of a class of which nothing is loaded is `...` as a whole: its class may not be in this program.
    """
    if job.ruled is not None:
        job.ruled.check_fills()
    job.options.check_used(lambda: job.names)
    order = [leaf for leaf in job.view.entries if leaf.ranks is None or job.owns(leaf)]
    taken = [leaf for leaf in order if job.selected(leaf.path) and leaf.number not in job.index.offsets]
    job.read_blobs(taken)
    by_path = _specs(job, taken) if job.options.specs_only else _arrays(job, taken)
    structure = job.view.structure
    # after rules the structure is that of this rank already
    if not job.options.rules and any(leaf.ranks is not None for leaf in order):
        structure = _own_structure(structure, job)
    left_out = LeafPlaceholder(...)
    slots = [by_path.get(leaf.path, left_out) for leaf in order]
    if job.options.is_part or job.damaged:
        taken = [slot is not left_out for slot in slots]
        structure, kept = without_left_out(structure, taken, job.selected)
        slots = [left_out if number is None else slots[number] for number in kept]
    return _SavedTree(job, structure, slots)


def _specs(job: Load, taken: Sequence[Leaf]) -> dict[str, LeafPlaceholder]:
    """Returns the values, and the specs of arrays."""
    ties: dict[object, ArraySpec] = {}
    specs = ((leaf, _spec_of(job, leaf, ties)) for leaf in taken)
    return {leaf.path: LeafPlaceholder(job.value(leaf, leaf.path) if spec is None else spec) for leaf, spec in specs}


def _spec_of(job: Load, leaf: Leaf, ties: dict[object, ArraySpec]) -> ArraySpec | None:
    """Returns the spec of an array, which names no device, so that it is wanted on any machine; None of a value.

    Args:
        ties: the specs so far: names of one array get one spec, as leaves that are one object in a target stay one.
    """
    if leaf.spec is None:
        return None
    record, spec = leaf.record, msgspec.structs.replace(leaf.spec, device=None)
    if isinstance(job.index, JoinedIndex) and (rows := job.index.counted.get(leaf.number)) is not None:
        spec = msgspec.structs.replace(spec, shape=(rows, *spec.shape[1:]))
    base = record.of if isinstance(record, AliasRecord) and record.view is None else leaf.number
    return ties.setdefault((base, spec), spec)


def _arrays(job: Load, taken: Sequence[Leaf]) -> dict[str, LeafPlaceholder]:
    """Returns the values, and a placeholder for each array, which is added to what is read."""
    made: dict[int, LeafPlaceholder] = {}
    by_path: dict[str, LeafPlaceholder] = {}
    apart = job.options.rules or job.options.given_apart or job.options.ids is not None
    if job.index.tables and (apart or isinstance(job.index, JoinedIndex)):
        by_path = {leaf.path: slot for leaf in taken if (slot := slot_as_saved(job, leaf)) is not None}
    plain = [leaf for leaf in taken if leaf.path not in by_path]
    whole = {leaf.number for leaf in plain}
    for leaf in plain:
        if leaf.number in made:
            continue  # a second name for it
        if leaf.spec is None:
            made[leaf.number] = LeafPlaceholder(job.value(leaf, leaf.path))
        elif not (isinstance(leaf.record, AliasRecord) and leaf.record.of in whole):
            spec = leaf.spec
            if spec.device and job.options.device != "original":
                spec = msgspec.structs.replace(spec, device=None)
            if isinstance(leaf.record, AliasRecord) and leaf.record.view is not None:
                job.claims.take_view(leaf.path, spec)
            made[leaf.number] = job.array(leaf.path, leaf, spec)
    for leaf in plain:
        if leaf.number not in made:
            made[leaf.number] = slot = LeafPlaceholder()
            job.batch.after.append(partial(_tie, job, leaf, slot, made))
        by_path[leaf.path] = made[leaf.number]
    return by_path


def _tie(job: Load, leaf: Leaf, slot: LeafPlaceholder, made: Mapping[int, LeafPlaceholder]) -> None:
    """Puts the array in a slot that a leaf is tied to, or the view of it that the leaf is."""
    record, spec = leaf.record, leaf.spec
    assert isinstance(record, AliasRecord) and spec is not None, "only ties are left"
    base, base_spec = made[record.of].leaf, job.index.entries[record.of].spec
    job.loaded += 1
    # a parameter and a plain tensor can share an array, but not be one object
    same = base_spec is not None and (base_spec.kind, base_spec.requires_grad) == (spec.kind, spec.requires_grad)
    if record.view is None and same:
        slot.leaf = base
        return
    if record.view is not None:
        offset, strides = record.view.offset, record.view.strides
    else:
        there = abstract_of(base, leaf.path, job.here)  # mapped memory is in C order, whatever was saved
        offset, strides = 0, strides_in(spec.shape, there.order if there is not None else None, 1)
    slot.leaf = library_of(spec).view(base, spec, offset, strides)


def _own_structure(structure: Structure, job: Load) -> Structure:
    """Reduces each `PerRank` of a structure to the subtree of the source rank, as this rank's own."""
    if structure is None:
        return None
    if isinstance(structure, PerRankNode):
        own = child_of_rank(structure, job.source_rank, "")
        return PerRankNode((encode_runs([job.rank]),), (own,))
    children = list(structure.children)
    for number, child in enumerate(children):
        if child is not None:
            children[number] = _own_structure(child, job)
    return msgspec.structs.replace(structure, children=tuple(children))


# with a structure of optree as like ---------------------------------------------------------------------------------


class SavedTargets:
    """The targets of a `PyTreeSpec` that is loaded: its leaves as they were saved.

    Args:
        jobs: one for each checkpoint; of a leaf that several of them give, the last one's is taken.
    """

    def __init__(self, jobs: Sequence[Load]) -> None:
        self._jobs, self._ties = jobs, dict[object, ArraySpec]()
        self._containers: dict[int, dict[str, Node]] = {}

    def fill(self, tree: object, rank: int, namespace: str) -> object:
        """Returns the tree with a target for each `LEAF`: the spec of an array, or a subtree of these.

        `LEAF` stays where a value was saved, or nothing, and `...` is put where nothing is selected.

        Raises:
            MismatchError: a piece of an array, whose shape a `PyTreeSpec` does not have.
        """
        _, leaves = flatten(tree, rank=rank, namespace=namespace)
        for path, leaf in leaves:
            if type(leaf) is Sharded:
                hint = "Pass like= with the tc.Sharded itself, or a tree with `...` there"
                raise MismatchError(
                    path, expected="a leaf, or a container", found="a Sharded without arrays", hint=hint
                )
        new = (self._target(index_path(path, rank)) if leaf is LEAF else leaf for path, leaf in leaves)
        return replace_leaves(tree, new, namespace=namespace)

    def _target(self, path: str) -> object:
        for number, job in reversed([*enumerate(self._jobs)]):
            if path in job.view.by_path:
                if job.selected(path) and (leaf := job.find(path)) is not None:
                    return _spec_of(job, leaf, self._ties) or LEAF
            elif (node := self._containers_of(number).get(path)) is not None:
                below = [f"{path}/{step}" if path else step for step, _ in paths_of(node)]
                functions = resolve_function if job.options.allow_pickle else None
                return unflatten(
                    node,
                    map(self._target, below),
                    resolve=resolve,
                    build=build_tensor,
                    functions=functions,
                    rank=job.rank,
                    namespace=job.options.namespace,
                )
        return LEAF if any(job.options.selects(path) for job in self._jobs) else ...

    def _containers_of(self, number: int) -> dict[str, Node]:
        """Returns the containers of a checkpoint by path; of state that each rank has, this rank's."""
        if number not in self._containers:
            job = self._jobs[number]
            structure = _own_structure(job.view.structure, job)
            self._containers[number] = {path: node for node, path, _ in containers_of(structure)}
        return self._containers[number]


# with like -------------------------------------------------------------------------------------------------------


def _is_array_like(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


class _MatchedTree(msgspec.Struct):
    """The leaves of a tree, in order, and a placeholder for each."""

    tree: object
    namespace: str
    leaves: list[object]
    slots: list[LeafPlaceholder]
    whole: frozenset[int]
    """The ids of sequences of values that are leaves here, as they take the saved content whole."""
    loaded: dict[str, bool]
    """Whether each leaf is loaded, by path."""

    def build(self, leaves: Iterable[object] | None = None) -> object:
        """Returns the tree with other leaves; by default with what was read."""
        leaves = (slot.leaf for slot in self.slots) if leaves is None else leaves
        return replace_leaves(self.tree, iter(leaves), namespace=self.namespace, whole=self.whole)


def _match(job: Load, like: object, *, in_place: bool) -> _MatchedTree:
    """Matches the leaves of a tree with saved ones; arrays are added to what is read, not yet read."""
    structure, leaves = flatten(like, rank=job.rank, namespace=job.options.namespace)
    sequences = compare_containers(job, like, structure)
    # by identity: an equal list at another place may match leaf by leaf
    whole = frozenset(id(sequence.here) for sequence in sequences.values())
    if sequences:
        _, leaves = flatten(like, rank=job.rank, namespace=job.options.namespace, whole=whole)
    places = [(wanted, index_path(text, job.rank)) for text, wanted in leaves]
    is_whole = not (sequences or job.options.is_part or job.damaged or job.ruled)
    tied: dict[str, int] = {}
    if is_whole and [path for _, path in places] == [leaf.path for leaf in job.view.entries]:
        pairs = _pair_in_order(job, places)  # the usual case: nothing is missing or left over
    else:
        pairs = _pair_by_path(job, places, sequences, in_place=in_place)
        if job.missing:
            tied = _tie_missing(job, pairs, in_place=in_place)
        job.check_keys({path: wanted for wanted, path, _ in pairs}, sequences)
    ties: dict[tuple[int, int], LeafPlaceholder] = {}
    job.read_blobs(leaf for wanted, _, leaf in pairs if type(wanted) is not TableColumn)
    slots = [
        column_slot(job, wanted, path, leaf)
        if type(wanted) is TableColumn
        else LeafPlaceholder(_content(job, sequences[path]) if whole and path in sequences else wanted)
        if leaf is None
        else _slot(job, wanted, path, leaf, ties, in_place=in_place)
        for wanted, path, leaf in pairs
    ]
    if tied and not in_place:
        slots = [slots[tied.get(path, number)] for number, (_, path, _) in enumerate(pairs)]
    loaded = {path: leaf is not None for _, path, leaf in pairs}
    return _MatchedTree(like, job.options.namespace, [wanted for _, wanted in leaves], slots, whole, loaded)


_Pairs = list[tuple[object, str, Leaf | None]]
"""What is wanted at each leaf of a tree, its path, and the saved leaf that is loaded there."""


def _pair_in_order(job: Load, places: Sequence[tuple[object, str]]) -> _Pairs:
    """Pairs the leaves of a tree with all saved ones, which have the same paths in the same order."""
    pairs: _Pairs = []
    for (wanted, path), leaf in zip(places, job.view.entries, strict=True):
        # rows are found by ids, and an absent slot may be filled: a column needs more than its path
        if type(wanted) is TableColumn:
            pairs.append((wanted, path, find_column(job, wanted, path)))
        elif wanted is ...:
            pairs.append((wanted, path, None))
        else:
            pairs.append((wanted, path, leaf if leaf.ranks is None else job.find(path)))
    return pairs


def _pair_by_path(
    job: Load, places: Sequence[tuple[object, str]], whole: Mapping[str, SequenceReplacement], *, in_place: bool
) -> _Pairs:
    """Pairs the leaves of a tree with saved ones by path; notes what is missing.

    Args:
        whole: the sequences that take the saved content whole, by path.
    """
    ids = {id(sequence.here) for sequence in whole.values()}
    pairs: _Pairs = []
    for wanted, path in places:
        leaf = None
        if path in job.damaged and not in_place:
            wanted = ...
        if type(wanted) is TableColumn:
            leaf = find_column(job, wanted, path)
        elif wanted is not ... and not (id(wanted) in ids and path in whole) and job.selected(path):
            leaf = job.find(path)
            if leaf is None:
                leaf = job.filled(path, abstract_of(wanted, path, job.here))
            if leaf is None:
                _check_container(job, wanted, path)
                job.missing.append(path)
        pairs.append((wanted, path, leaf))
    return pairs


def _tie_missing(job: Load, pairs: _Pairs, *, in_place: bool) -> dict[str, int]:
    """Takes leaves that are one array with a leaf that was found out of the missing ones; returns its number by path.

    Raises:
        MismatchError: an array is missing where a tensor in parts was saved.
    """
    missing = set(job.missing)
    there = [(number, wanted) for number, (wanted, _, leaf) in enumerate(pairs) if leaf is not None and leaf.spec]
    lacking = [(path, wanted) for wanted, path, _ in pairs if path in missing]
    tied = tied_to(lacking, there, job.here, in_place=in_place)
    job.missing = [path for path in job.missing if path not in tied]
    check_no_tensors(job.missing, job.view.structure)
    return tied


def compare_containers(job: Load, like: object, structure: Structure) -> dict[str, SequenceReplacement]:
    """Returns the sequences of values in a tree that take the saved ones whole, by path.

    Raises:
        MismatchError: a tensor that is made of others, and another one was saved.
    """
    try:
        if structure == job.view.structure:
            return {}
    except RecursionError:  # too deep for a comparison
        pass
    source_rank = job.rank if job.options.rules else job.source_rank
    check_same_tensors(structure, job.view.structure, source_rank, job.view.by_path, job.options.selects)

    def is_saved_value(path: str) -> bool:
        return job.selected(path) and (leaf := job.find(path)) is not None and leaf.spec is None

    return differing_sequences(
        like,
        job.view.structure,
        is_value=is_value,
        is_saved_value=is_saved_value,
        rank=job.rank,
        source_rank=source_rank,
        namespace=job.options.namespace,
    )


def _content(job: Load, sequence: SequenceReplacement) -> object:
    """Returns the saved content of a sequence of values."""
    values = (job.value(leaf, path) for path in sequence.paths if (leaf := job.find(path)) is not None)
    return sequence.content(values, resolve=resolve, namespace=job.options.namespace)


def _check_container(job: Load, wanted: object, path: str) -> None:
    """Refuses a container of a class that cannot be filled, where the checkpoint has leaves for it."""
    if not isinstance(wanted, (Mapping, Sequence)) or isinstance(wanted, (str, bytes, bytearray, range)):
        return
    if any(other.startswith(f"{path}/" if path else "") for other in job.view.by_path):
        raise MismatchError(
            path,
            expected="a container that can be filled, or `...`",
            found=f"a {type(wanted).__module__}.{type(wanted).__qualname__}, and leaves below it in the checkpoint",
            hint="Make it a dict or a list; a dict of a class of its own is filled where allow_pickle is not given",
        )


def _slot(
    job: Load,
    wanted: object,
    path: str,
    leaf: Leaf,
    ties: dict[tuple[int, int], LeafPlaceholder],
    *,
    in_place: bool,
) -> LeafPlaceholder:
    if leaf.spec is None:
        value = job.value(leaf, path)
        # a numpy scalar has a shape and a dtype too, and is a value: no array is made like it
        if isinstance(wanted, ArraySpec) or (
            _is_array_like(wanted)
            and (target_of(wanted, path, job.here) if in_place else like_of(wanted, path, job.here, None)) is not None
        ):
            raise MismatchError(path, expected="an array", found=f"the value {value!r:.60} in the checkpoint")
        return LeafPlaceholder(value)
    if job.index.tables and (job.options.rules or isinstance(job.index, JoinedIndex)):
        refuse_plain(job, leaf, path, wanted)
    record = leaf.record
    base = record.of if isinstance(record, AliasRecord) and record.view is None else leaf.number
    # leaves that are one object in like, and one array in the checkpoint, stay one object
    slot = ties.get((id(wanted), base))
    if slot is None:
        add = job.fill if in_place else job.array
        slot = ties[id(wanted), base] = add(path, leaf, wanted)
    return slot


def load_tree(checkpoint: Checkpoint, like: object, comm: Comm, options: LoadOptions) -> tuple[object, LoadReport]:
    """Loads a new tree; see `treeckpt.load`."""
    relay = open_relay(comm, [checkpoint], options.read.once)
    read = options.read
    with read_errors_wrapped(checkpoint.url):
        with together(relay):
            job = Load(checkpoint, comm, options)
            if job.options.ids is not None:
                check_tables(job, job.options.ids)
            matched = _match_saved(job) if like is None else _match(job, like, in_place=False)
            job.unexpected = job.options.not_asked_for(job.unexpected)
        # ranks that share reads plan the same ranges, so each has to know the shards' own blocks before
        job.batch.run(BatchOptions(job.memory, read.verify, mapped=read.mmap, ahead=relay is None, relay=relay))
    tree = matched.build()
    if isinstance(matched, _MatchedTree):
        _update_metadata(tree, job, matched)
    return tree, job.report()


def _update_metadata(tree: object, job: Load, matched: _MatchedTree) -> None:
    structure, rank = job.view.structure, job.rank if job.options.rules else job.source_rank
    update_metadata(tree, structure, matched.loaded, rank=rank, namespace=job.options.namespace)


def load_into_tree(sources: Sequence[tuple[Checkpoint, LoadOptions]], tree: object, comm: Comm) -> list[LoadReport]:
    """Fills a tree in place from checkpoints, each of which gives other leaves of it; see `treeckpt.load_into`.

    All checks of the sources come before the first byte, and all arrays before the first value.
    """
    options = sources[0][1]
    checkpoints = [checkpoint for checkpoint, _ in sources]
    relay = open_relay(comm, checkpoints, options.read.once)
    with together(relay):
        new, jobs, matched = tree, list[Load](), list[_MatchedTree]()
        for checkpoint, own in sources:
            with read_errors_wrapped(checkpoint.url):
                jobs.append(Load(checkpoint, comm, own))
                matched.append(_match(jobs[-1], new, in_place=True))
            new = _prepare_into(matched[-1], new)
        check_ties([(job, filled) for job in jobs for filled in job.batch.filled])
        for job in jobs:
            job.unexpected = job.options.not_asked_for(job.unexpected)
    # shards of several checkpoints are opened before the first one fills anything
    ahead, verify = relay is None and len(jobs) == 1, options.read.verify
    readings = [BatchOptions(job.memory, verify, in_place=True, ahead=ahead, relay=relay) for job in jobs]
    batches = [job.batch for job in jobs]
    for batch, reading in zip(batches, readings, strict=True):
        with read_errors_wrapped(batch.checkpoint.url):
            batch.prepare(reading)
    for batch, reading in zip(batches, readings, strict=True):
        try:
            with read_errors_wrapped(batch.checkpoint.url):
                batch.put(reading)
        except Exception as error:
            add_changed(error, batches)
            raise
    if new is not tree:
        update_in_place(tree, new, is_value=is_value, namespace=options.namespace)
    for job, leaves in zip(jobs, matched, strict=True):
        _update_metadata(tree, job, leaves)
    return [job.report() for job in jobs]


def _prepare_into(matched: _MatchedTree, tree: object) -> object:
    """Returns a tree that is filled in place with its new values, once each has a place."""
    # what is equal already stays the very object, so that only real changes need a container that can change
    kept = [
        old if _is_same(old, slot.leaf) else slot.leaf for old, slot in zip(matched.leaves, matched.slots, strict=True)
    ]
    if all(old is leaf for old, leaf in zip(matched.leaves, kept, strict=True)):
        return tree
    new = matched.build(kept)
    if stuck := update_in_place(tree, new, is_value=is_value, namespace=matched.namespace, dry=True):
        path, value = stuck[0]
        raise MismatchError(
            path,
            expected="a value that is as saved, or in a container that can change",
            found=f"{value!r:.60} in the checkpoint",
            hint="Use load(path, like=tree), which returns a new tree",
        )
    return new


def _is_same(old: object, new: object) -> bool:
    """Whether two values are stored alike; Python's own comparison takes 1, 1.0 and True for the same."""
    if old is new or (type(old) is type(new) and type(old) in (int, bool, str) and old == new):
        return True
    if _is_array_like(old) or _is_array_like(new):
        return False
    try:
        # a value that only pickle can store has no stored form to compare: it counts as changed
        return is_same_value(old, new)
    except TreeckptError:
        return False
