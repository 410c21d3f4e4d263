"""Restore of a saved training state into live objects.

First everything is compared and every small part is loaded, without any change: names, shapes, param groups, scheduler
state, per-rank state. Then modules with load code of their own take what was saved of them, and so do modules with an
extra state, which have their own tensors by then; where one fails, what they changed is put back. Then meta tensors
get memory, and one load fills all arrays in place, those of the generators' states and of registered objects too. The
optimizers, loader, schedulers, hooks after `load_state_dict` and random number generators follow. Ranks exchange no
messages.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .._arrays.stateful import plan_state
from .._core.tree.containers import PerRank
from .._core.tree.flatten import flatten
from .._core.tree.leaf_differences import Strict, some_of
from .._core.tree.paths import Selection, as_path
from .._core.tree.structure import PerRankNode, TensorNode, key_text, parse_path
from .._io.comm.comm import Comm, as_comm, other_world_error
from .._io.public_calls import checks_options, takes_no_save
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.open import following
from .._loading.disks import LoadingRanks
from .._loading.match import LoadOptions
from .._loading.options import IN_PLACE, NO_SALVAGE, Fallback, ReadOptions, choice_of, fallback_of, read_of
from .._loading.overlay import Bank
from .._loading.partial_ranks import partial_ranks
from .._loading.read_batch import open_relay, together
from .._loading.run_load import on_versions
from ..errors import CheckpointNotFound, MismatchError
from ..reports import LoadReport
from ..rules import Renaming, Transforms
from ._capture import LEFT_OUT, optimizer_of
from ._foreign_states import Arrangement
from ._groups import from_groups, held_values, match_schedulers, put_back, unused_entries
from ._module_loads import (
    Before,
    ExtraState,
    ModuleLoad,
    Tie,
    check_entry,
    check_extra_state,
    check_tensor_in_parts,
    find_loads,
    load_values,
    plan_load,
    resolve_ties,
    run_load,
    run_post_hooks,
    say_what_changed,
    set_extra_state,
    with_load_code,
    without_ties,
)
from ._modules import (
    ModelEntries,
    Modules,
    StateDictEntry,
    allocate_meta_tensors,
    collect_entries,
    get_in,
    key_path,
    nested,
    on_meta,
    put_in,
    reset_fsdp_shards,
)
from ._optimizer_plan import OptimizerPlan, Schedule, apply_optimizers, plan_optimizers, taken_options
from ._optimizers import NamedOptimizer, Optimizers, all_groups, name_optimizers
from ._rank_state import RankState, is_rng, set_rng
from ._report import RestoreReport, Sides, check_keys, tied_when_saved
from ._sources import (
    RestoreSource,
    check_globs,
    check_source,
    children_of,
    descend,
    holds_state_dicts,
    is_stored,
    leaves_below,
    missing_part,
    nodes_by_name,
    open_source,
    place_under,
    rules_of,
)
from ._user_state import (
    TreeToFill,
    check_generators,
    check_loader,
    compare_extra,
    loader_actions,
    objects_of_extra,
    own_leaves,
)


class RestoreTargets(msgspec.Struct, frozen=True):
    """The arguments of `restore` that name what is filled."""

    model: Modules
    optimizer: Optimizers | None
    scheduler: Any
    loader: Any
    rng: bool | None
    """Whether generators are restored; None restores them where they were saved."""
    extra: Any
    """A tree to fill; None if the saved one comes back in the report, False if it is left alone."""
    keep: tuple[str, ...]
    device: str | torch.device | None

    def __post_init__(self) -> None:
        for part in ("optimizer", "scheduler", "loader"):
            if getattr(self, part) is False:
                msgspec.structs.force_setattr(self, part, None)

    @property
    def fills_extra(self) -> bool:
        """Whether a tree for `extra` was given."""
        return self.extra is not None and self.extra is not False

    def ask_for(self, part: Any) -> bool:
        """Whether a part at the root of a checkpoint is asked for, returned in the report, or turned down by name."""
        if part in ("optimizer", "param_groups"):
            return self.optimizer is not None
        if part in ("scheduler", "loader"):
            return getattr(self, part) is not None
        return part in ("model", "rng", "extra", LEFT_OUT)


class WithObjects(msgspec.Struct, frozen=True):
    """A checkpoint as the source of a restore that fills the objects of a manager in the same load."""

    checkpoint: Checkpoint
    objects: Mapping[str, Mapping[str, Any]]
    """Trees by the key at the root of the checkpoint and the name under which they were saved."""


_log = logging.getLogger("treeckpt")


@checks_options
@takes_no_save
def restore(
    source: Any,
    model: Modules,
    optimizer: Optimizers | None = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    rng: bool | None = None,
    extra: Any = None,
    select: Selection = None,
    exclude: Selection = None,
    rename: Renaming = None,
    transforms: Transforms = None,
    under: Any = "",
    from_root: bool = False,
    strict: Strict = True,
    partial: bool = False,
    cast: bool = False,
    keep: Sequence[str] = (),
    read: ReadOptions | None = None,
    fallback: Fallback | None = None,
    device: str | torch.device | None = None,
    allow_pickle: bool = False,
    comm: Any = None,
    namespace: str = "",
) -> RestoreReport:
    """Puts a saved training state into live objects, in place; parameters stay the same objects with the same memory.

    Any parallelism restores into any other. All is compared before the first change, checksums as for `load_into`.

    >>> report = tc.training.restore("run/step_00000100", model, strict="missing")

    Args:
        source: a path or store; a `Bank` or list of several; or a tree, `state(..., buffers="per_rank")` of this rank.
        model, optimizer, scheduler, loader, rng, extra: as for `state`; the optimizer may be fresh. A part that is None
            or False is left alone; but `extra=None` comes back in the report, and `rng=None` restores generators where
            they were saved (True insists). Meta modules get memory for this rank's share; what is not saved stays so.
        select, exclude: globs over `model/...` as rules name it, and "extra" if None: the rest stays, moments too.
        rename, transforms: as for `treeckpt.load`, on `model/...`; the optimizers' state follows (`rules.Carried`).
        under: the path in a training state where the source belongs: "model" of a state dict. Rules see its own names.
        from_root: rules see all names, and can move `state_dict/...` to `model/...`; the optimizers' state stays.
        strict: all here must be in the checkpoint, and parts that are asked for here; "missing": the first alone.
        partial: this rank has a part, as a stage of a pipeline: strict holds for all ranks together, which all call.
        keep: hyper-parameters that stay as here, as ("lr",). Others, and a scheduler's, come as saved, with a warning.
        cast, read, allow_pickle, comm, namespace: as for `treeckpt.load_into`; fresh moments are cast too.
        fallback: for each rank's own state of another number of ranks: `Fallback(per_rank={"loader": "take"})`.
        device: where plain tensors on the meta device go, by default torch's default device.

    Raises:
        As `treeckpt.load_into`; TreeError for an optimizer with parameters that are not the model's.
    """
    comm, under = as_comm(comm, sends_messages=partial), under if isinstance(under, str) else as_path(under, "under")
    with partial_ranks(comm, "restore", partial) as ranks:
        options = LoadOptions(
            **choice_of(select, exclude), strict=strict, partial=ranks, cast=cast, allow_pickle=allow_pickle,
            rules=rules_of(rename, transforms, under, from_root=from_root), read=read_of(read, "restore", IN_PLACE),
            fallback=fallback_of(fallback, "restore", NO_SALVAGE), namespace=namespace,
        )  # fmt: skip
        targets = RestoreTargets(model, optimizer, scheduler, loader, rng, extra, keep=tuple(keep), device=device)
        return _on_versions(source, comm=comm, options=options, targets=targets, under=under, from_root=from_root)


def _on_versions(source: Any, *, comm: Comm, options: LoadOptions, **others: Any) -> RestoreReport:
    """Restores from a tree, or from files, on one version of each checkpoint."""
    run = functools.partial(_restore, comm=comm, options=options, **others)
    if not is_stored(source):
        return run(source)
    stored, across = following(source, options.read.follow_links), LoadingRanks(comm) if options.read.once else None
    return on_versions(stored, run, together=bool(across or options.partial), across=across)


def _restore(
    given: Any, *, comm: Comm, targets: RestoreTargets, options: LoadOptions, under: str, from_root: bool
) -> RestoreReport:
    """Restores one version of a source: compares everything first, then changes the targets."""
    given, objects = (given.checkpoint, given.objects) if isinstance(given, WithObjects) else (given, {})
    not_asked_for = options.not_asked_for
    options = msgspec.structs.replace(options, strict=options.own_strict, partial=None)
    opened = [given] if isinstance(given, Checkpoint) else given.paths if isinstance(given, Bank) else []
    for checkpoint in opened if options.is_part else ():
        with contextlib.suppress(CheckpointNotFound):  # one that may be missing
            options = options.for_structure(checkpoint.index.structure)
    relay = open_relay(comm, opened, options.read.once)
    with together(relay):
        placed = place_under(given, under) if under else given
        check_source(placed)
        model = collect_entries(targets.model)
        arrange, arranged = None, placed
        if isinstance(placed, Bank):
            arrange = Arrangement(model, targets.optimizer, from_root=from_root)
            arranged = arrange.bank(placed, options, under)
        elif isinstance(placed, Checkpoint) and not _has_names_of(placed, model, targets, options):
            arrange = Arrangement(model, targets.optimizer, from_root=from_root)
            arranged, rules = arrange.checkpoint(placed, options.rules)
            options = msgspec.structs.replace(options, rules=rules)
        source = open_source(arranged, comm, options)
        if arrange is not None:
            source.ruled = arrange.ruled(*source.ruled)
        job = _Restore(source, comm, targets, options, model, under)
        paths = [entry.path for entry in job.entries]
        check_globs(source, options, paths, with_extra="extra" in job.parts and not targets.fills_extra)
        job.plan_model()
        job.plan_optimizer()
        job.plan_schedulers()
        job.plan_rest()
        for part, trees in objects.items():
            job.plan_objects((*parse_path(under), part), trees)
        if job.missing or job.unexpected:
            job.check_keys()
        job.unexpected = not_asked_for(job.unexpected)
        job.note_rest(is_ours=arrange is None or not arrange.has_rearranged)
    with together(relay, "restored"):
        return job.run()


def _has_names_of(saved: Checkpoint, model: ModelEntries, targets: RestoreTargets, options: LoadOptions) -> bool:
    """Whether a checkpoint is a training state of ours with the names of the model, so that nothing is arranged."""
    has_state = targets.optimizer is not None and holds_state_dicts(saved)
    return not (has_state or options.rules) and all(entry.path in saved.index.by_path for entry in model.entries)


class _Restore:
    """One restore on one rank."""

    def __init__(
        self,
        source: RestoreSource,
        comm: Comm,
        targets: RestoreTargets,
        options: LoadOptions,
        model: ModelEntries,
        under: str,
    ) -> None:
        self.began = time.perf_counter()
        self.source, self.comm, self.targets, self.options, self.under = source, comm, targets, options, under
        self.model = model
        self.entries = self.model.entries
        self.optimizers: list[NamedOptimizer] = name_optimizers(targets.optimizer, self.model)
        self.plans: list[OptimizerPlan] = []
        self.parts = children_of(source.structure)
        self.left_out = frozenset[str](source.part(LEFT_OUT) if LEFT_OUT in self.parts else ())
        self.left_alone: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.ignored: list[str] = []
        self.left: set[str] = set()
        """The names of parameters and buffers that stay as they are, by `select`, `exclude` or a rule."""
        self.own_buffers: set[str] = set()
        """The names of buffers of which every rank has saved its own."""
        self.wanted: list[StateDictEntry] = []
        """Entries of the model that are filled in place."""
        self.loads: list[ModuleLoad] = []
        self.passed: dict[Tie, Tensor] = {}
        """The new tensors that modules with load code of their own are passed."""
        self.tied: list[tuple[StateDictEntry, Tensor]] = []
        """Entries after such modules that are tied to their tensors, and what these were passed in their place."""
        self.extra_states: list[ExtraState] = []
        self.last: list[Callable[[], None]] = []
        """Actions to run after all arrays are in place."""
        self.own = RankState(source, comm, options.fallback.per_rank)
        self.loader: Any = None
        self.extra: Any = None
        self.trees: dict[tuple[Any, ...], TreeToFill] = {}
        """A given `extra`, and the objects of a manager, by the keys that lead to each in the checkpoint."""
        self.lengths: Mapping[str, tuple[int, int]] = {}
        """Sequences in `extra` of other lengths: (items here, items saved)."""
        self.returned: list[LoadReport] = []
        """The reports of the loads of extra states and values of modules, and of an `extra` that comes back."""
        self.filled_before: list[LoadReport] = []
        """The report of the load of what modules with load code of their own are passed, if there are any."""
        self.rng_state: Any = None
        self.schedules: list[Schedule] = []
        self.replaced: list[str] = []
        self.cleared: list[str] = []
        """State of the optimizers here that the checkpoint has none of."""
        self.reasons: dict[str, str] = {}
        """Why only one side has a path, where that is known."""

    # compare, and load the small parts --------------------------------------------------------------------------------

    def plan_model(self) -> None:
        """Compares the model with the source, and chooses the entries to fill."""
        leaves, asked, extra = self.source.leaves, set[str](), list[StateDictEntry]()
        names = {entry.full_name for entry in self.entries}
        saved = nodes_by_name(descend(self.source.structure, ("model",)), names)
        self.loads = find_loads(self.targets.model, self.model, self.source)
        with_code = with_load_code(self.entries, self.loads)
        alone, paths = {id(entry) for entry in with_code}, dict[int, str]()
        for entry in self.entries:
            name, path = entry.full_name, entry.path
            if id(entry) in alone or self._stays(name, is_saved=name in saved):
                continue
            if entry.kind == "extra":
                if name not in saved:
                    self.missing.append(path)
                    continue
                check_extra_state(entry, path)
                asked.update(leaves_below(path, saved[name]))
                extra.append(entry)
                continue
            if isinstance(saved.get(name), PerRankNode):
                self._take_own(name, path)
                path += "/~rank*"
            if isinstance(saved.get(name), TensorNode):
                asked.update(leaves_below(path, saved[name]))
                check_tensor_in_parts(entry, saved[name], path)
            else:
                asked.add(path)
                if path not in leaves:
                    self.missing.append(path)
                    continue
                check_entry(entry, leaves, path, cast=self.options.cast)
            self.wanted.append(entry)
            paths[id(entry)] = path
        self._plan_loads()
        asked = asked.union(*(load.asked for load in self.loads))
        self._load_values(extra)
        self._resolve_ties(with_code, paths)
        self.unexpected += [path for path in leaves if path.startswith("model/") and path not in asked]

    def _stays(self, name: str, *, is_saved: bool) -> bool:
        """Whether an entry of the model stays as it is, which is noted."""
        path = f"model/{name}"
        left_out = name in self.left_out and not is_saved and self.options.strict is not True
        if not left_out and not self.source.is_left(path):
            return False
        self.left.add(name)
        if left_out and not self.source.is_left(path):
            self.left_alone.append(path)
        return True

    def _take_own(self, name: str, path: str) -> None:
        """Notes a buffer of which every rank has saved its own."""
        self.own_buffers.add(name)
        self.own.check("buffers", [path])

    def _plan_loads(self) -> None:
        """Chooses what modules with load code of their own are passed."""
        alone = len({id(entry.root) for entry in self.entries}) < 2 and self.options.strict is True
        for load in self.loads:
            plan_load(
                load,
                self.source,
                lambda name, is_saved, load=load: self._stays(key_path((*load.prefix, name)), is_saved=is_saved),
                own=lambda name, path, load=load: self._take_own(key_path((*load.prefix, name)), path),
                others=alone or bool(load.prefix),
                device=self.targets.device,
                made=self.passed,
            )

    def _load_values(self, extra: Sequence[StateDictEntry]) -> None:
        """Loads extra states, and values that modules with load code are passed."""
        keys = [entry.key for entry in extra] + [key for load in self.loads for _, key in load.values]
        if not keys:
            return
        paths = [f"model/{key_path(key)}" for key in keys]
        part = self.source.part("model", self.returned.append, select=paths)
        load_values(self.loads, part)
        for entry in extra:
            path = entry.path
            plan = plan_state(path, None, get_in(part, entry.key), live=entry.value)
            self.extra_states.append(ExtraState(path, entry.module, plan))

    def _resolve_ties(self, with_code: Sequence[StateDictEntry], paths: dict[int, str]) -> None:
        """Compares the saved arrays of tensors with several names; what the last of its modules loads counts."""
        order = {id(entry): number for number, entry in enumerate(self.entries)}
        coded = list[StateDictEntry]()
        for entry in with_code:
            path = entry.path
            spec = self.source.leaves.get(path)
            live = entry.value
            if spec is None or not isinstance(live, Tensor) or is_lazy(live):
                continue
            if spec.shape == tuple(live.shape) and spec.dtype == str(live.dtype).removeprefix("torch."):
                paths[id(entry)] = path
                coded.append(entry)
        every = sorted((*self.wanted, *coded), key=lambda entry: order[id(entry)])
        self.missing = without_ties(self.missing, self.entries, every)
        kept, left = resolve_ties(every, paths, self.source, strict=bool(self.options.strict))
        self.ignored += left
        last = {id(entry.value): order[id(entry)] for entry in coded}
        known, wanted = {id(entry) for entry in coded}, list[StateDictEntry]()
        for entry in kept:
            if id(entry) in known or order[id(entry)] <= last.get(id(entry.value), -1):
                continue
            # load code may have changed what was passed: torch copies that
            path = paths[id(entry)]
            is_tied = id(entry.value) in last and path in self.source.leaves
            passed = self.passed.get((id(entry.value), self.source.identity(path))) if is_tied else None
            if passed is None:
                wanted.append(entry)
            else:
                self.tied.append((entry, passed))
        self.wanted = wanted

    def plan_optimizer(self) -> None:
        """Compares the optimizers with the source."""
        keep = self.targets.keep
        if not self.optimizers:
            return
        if "optimizer" not in self.parts or "param_groups" not in self.parts:
            raise missing_part("optimizer", "training.state(model, optimizer)", self.source)
        known = sorted({name for live in self.optimizers for group in live.groups for name in group.values})
        if unknown := [name for name in keep if name not in known]:
            raise MismatchError("keep", expected=f"some of {', '.join(known)}", found=f"{unknown[0]!r}")
        parameters = (entry for entry in (*self.entries, *self.model.hidden) if entry.kind == "parameter")
        frozen = (entry for entry in parameters if not entry.value.requires_grad)
        names = frozenset(entry.full_name for entry in frozen)
        self.plans, differences = plan_optimizers(
            self.optimizers, self.model.ties, self.source, keep=keep, frozen=names
        )
        left = tuple(
            f"{key_path(('optimizer', *live.prefix))}/{name}/" for live in self.optimizers for name in self.left
        )
        self.missing += [path for path in differences.missing if not f"{path}/".startswith(left)]
        self.unexpected += differences.unexpected
        self.ignored += differences.ignored
        self.reasons, self.cleared = differences.reasons, differences.cleared
        if differences.frozen:
            self._warn(some_of("states of parameters that are frozen here were not restored", differences.frozen))

    def plan_rest(self) -> None:
        """Loads the state of the loader and the generators, and compares or loads `extra`."""
        loader, extra = self.targets.loader, self.targets.extra
        if loader is not None:
            namespace = self.options.namespace
            check_loader(loader, self.comm.rank, allow_pickle=self.options.allow_pickle, namespace=namespace)
            if self.comm.rank == 0:
                check_generators(loader)
            if self._has("loader", "loader=..."):
                self.loader = self.own.load("loader")
                self.last += loader_actions(loader, self.loader, "loader", namespace)
        if self.targets.fills_extra and self._has("extra", "extra=..."):
            self.extra = extra
            tree = self.trees["extra",] = TreeToFill(extra, ("extra",), self.source)
            differences = compare_extra(extra, tree.target, self.source, rank=self.comm.rank)
            self.ignored += differences.unused
            self.missing += differences.keys.missing
            self.unexpected += differences.keys.unexpected
            self.own.check("extra", differences.own)
            self.lengths = differences.lengths
            self.last += differences.additions
        elif extra is None and "extra" in self.parts and not self.options.selects("extra"):
            self.ignored.append("extra")
        elif extra is None and "extra" in self.parts:
            own = [path for path in self.source.leaves if path.startswith("extra") and "~rank*" in path]
            self.own.check("extra", own)
            self._return_extra()
        # of a tree that was loaded in part they may be there as `...`
        if self.targets.rng is None and not is_rng(self.source.leaves):
            self.left_alone.append("rng")
        elif self.targets.rng is not False and self._has("rng", "rng=True"):
            self.rng_state = self.own.load_generators()

    def plan_objects(self, keys: tuple[Any, ...], trees: Mapping[str, Any]) -> None:
        """Plans to fill the objects of a manager, which the fill compares before it changes anything.

        Args:
            keys: those that lead to them in the checkpoint.

        Raises:
            MismatchError: what each rank has of its own was saved by another number of ranks, and is not to be taken.
        """
        self.trees |= {(*keys, name): TreeToFill(tree, (*keys, name), self.source) for name, tree in trees.items()}
        if self.comm.size != self.source.world and self.options.fallback.per_rank != "take":
            for name in trees:
                target, path = self.trees[*keys, name].target, "/".join(map(key_text, (*keys, name)))
                if own := own_leaves(target, path, self.source, rank=self.comm.rank):
                    take = "fallback=Fallback(per_rank='take')"
                    raise other_world_error(own[0], self.comm, self.source.world, take=take)

    def _return_extra(self) -> None:
        """Loads `extra` as it was saved; where no training goes on, without what this program cannot make.

        Raises:
            MismatchError: it has a class that this program lacks, and an optimizer is restored.
        """
        try:
            self.extra = self.source.part("extra", self.returned.append, lenient=not self.optimizers)
        except MismatchError as error:
            error.add_hint("extra=False leaves it unread")
            raise
        unmade = [path for report in self.returned for path in report.unmade]
        self.ignored += unmade
        if unmade:
            self._warn(f"`...` in place of what this program cannot make: {', '.join(unmade)}")

    def _warn(self, text: str) -> None:
        if self.comm.rank == 0:
            _log.warning("%s: %s", self.source.url, text)

    def _has(self, part: str, how: str) -> bool:
        """Whether the source has a part; under `strict` it raises if not."""
        if part in self.parts:
            return True
        if self.options.strict:
            raise missing_part(part, f"training.state(model, ..., {how})", self.source)
        self.missing.append(part)
        return False

    def note_rest(self, *, is_ours: bool) -> None:
        """Notes options that are replaced, and parts that are not asked for; warns where a training goes on so.

        Args:
            is_ours: whether it is what `state` gave, which has random generators unless they were left out.
        """
        self.replaced = taken_options(self.plans, self.schedules)
        if self.replaced:
            self._warn(f"other options here: {'. '.join(self.replaced)}")
        rest = [part for part in self.parts if not self.targets.ask_for(part)]
        self.ignored += map(key_text, rest)
        left = [part for part in ("scheduler", "loader") if part in rest]
        if self.optimizers and left:
            how = ", ".join(f"{part}=" for part in left)
            self._warn(f"{', '.join(left)} in the checkpoint was not restored, as {how} was not passed")
        others = any(path.split("/", 1)[0] == "rng" for path in self.source.leaves)
        if self.optimizers and (is_ours or others) and "rng" in self.left_alone:
            what = "rng is not what training.rng_state gives" if others else "no random generators in the checkpoint"
            self._warn(f"{what}: those here go on as they are; rng=False says that it is meant")
        is_returned = self.optimizers and self.targets.extra is None and self.extra is not None
        if is_returned and (objects := objects_of_extra(self.source)):
            names = ", ".join(f"extra/{name}" for name in sorted(objects))
            how = "was put into no object, as extra= was not passed; RestoreReport.extra has it"
            self._warn(f"{names} in the checkpoint {how}")

    def plan_schedulers(self) -> None:
        """Loads the states of the schedulers, for the param groups of the live optimizers.

        Raises:
            MismatchError: other schedulers were saved.
        """
        scheduler = self.targets.scheduler
        if scheduler is None or not self._has("scheduler", "scheduler=..."):
            return
        saved, lives = self.source.part("scheduler"), self.optimizers
        for path, part, optimizer, state in match_schedulers(scheduler, saved, lambda part: optimizer_of(part, lives)):
            if optimizer is not None:
                of = next((plan.of for plan in self.plans if plan.live is optimizer), {})
                state = from_groups(state, optimizer.groups, of, path=path)
            self.ignored += unused_entries(part, state, (self.source.url, path), warn=self.comm.rank == 0)
            self.schedules.append((path, part, state))
            self.last.append(plan_state(path, part, state, live=part.state_dict()).load)

    def check_keys(self) -> None:
        """Checks that the targets and the source have the same leaves.

        Raises:
            MismatchError: they have not, by `strict`; without it, not one of the model's is in both.
        """
        saved_extra = children_of(descend(self.source.structure, ("extra",)))
        heads = {f"{key_path(('optimizer', *live.prefix))}/" for live in self.optimizers}
        asked = {entry.path for entry in self.entries if entry.full_name not in self.left}
        check_keys(
            self.missing,
            self.unexpected,
            self.options.strict,
            Sides(
                alike=not asked or not asked <= set(self.missing),
                left_out=self.left_out,
                extra=[key_text(key) for key in saved_extra],
                given=self.targets.extra,
                here={entry.path: getattr(entry.value, "shape", None) for entry in self.entries},
                tied=tied_when_saved(self.missing, heads, self.source),
                reasons=self.reasons,
                saved=self.source.leaves,
                lengths=self.lengths,
                under=self.under,
            ),
        )

    # change ---------------------------------------------------------------------------------------------------------

    def run(self) -> RestoreReport:
        """Fills the targets."""
        fills_model = bool(self.wanted or self.loads or self.extra_states)
        made, before = self._run_loads()
        held = held_values(all_groups(self.targets.optimizer) if self.trees else ())
        try:
            made += allocate_meta_tensors(self.wanted, self.targets.device)
            if made:
                reset_fsdp_shards(self.targets.model)
            filled = self.source.fill(
                self._target(),
                # What each rank has of its own was compared before, by `RankState.check` and `plan_objects`.
                take=self.comm.size != self.source.world,
                strict="missing" if self.options.strict else False,
            )
        except Exception:
            if before is not None:  # the load code may run again, with an older checkpoint
                before.put_back({})
            raise
        for tree in self.trees.values():
            tree.take_back()
        put_back(held)  # schedulers among the objects may have written others into the groups, which keep= leaves
        beside = [getattr(leaf, "nbytes", 0) for _, leaf in flatten(self.own.to_fill, rank=self.comm.rank)[1]]
        self.ignored += apply_optimizers(self.plans)
        held = held_values(all_groups(self.targets.optimizer))
        for action in self.last:
            action()
        put_back(held)  # schedulers may have written others into the groups
        if fills_model:
            run_post_hooks(self.targets.model, self.loads)
        # Last, because load code and hooks may draw random numbers.
        if self.rng_state is not None:
            self.ignored += set_rng(self.rng_state)
        if left := on_meta(self.targets.model):
            _log.warning(
                "%s: still on the meta device, as not saved: %s. Set before the model runs", self.source.url, left
            )
        loads = (filled, *self.filled_before, *self.returned)
        return RestoreReport(
            path=self.source.url,
            step=self.source.step,
            loaded=sum(load.loaded for load in (filled, *self.filled_before)) - len(beside),
            nbytes=sum(load.nbytes for load in loads) - sum(beside),
            read_nbytes=sum(load.read_nbytes for load in loads),
            seconds=time.perf_counter() - self.began,
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
            materialised=tuple(made),
            on_meta=tuple(left),
            ignored=tuple(self.ignored),
            loader=self.loader,
            extra=self.extra,
            dropped=self.source.ruled[0],
            renamed=self.source.ruled[1],
            joined=tuple(dict.fromkeys(row for load in loads for row in load.joined)),
            left_alone=tuple(self.left_alone),
            world_changed=tuple(f"{part}: {what}" for part, what in self.own.notes.items()),
            replaced=tuple(self.replaced),
            cleared=tuple(self.cleared),
        )

    def _run_loads(self) -> tuple[list[str], Before | None]:
        """Runs the load code of modules; returns the paths of tensors that were given memory, and what was before.

        Modules with an extra state have their own tensors filled here, which `set_extra_state` may read.

        Raises:
            MismatchError: one does not take what was saved, and all is as before; an error of reading likewise.
        """
        if not self.loads and not self.extra_states:
            return [], None
        covered, extra = with_load_code((*self.entries, *self.model.hidden), self.loads), set[int]()
        extra.update(id(states.module) for states in self.extra_states)
        first = [entry for entry in self.wanted if id(entry.module) in extra]
        self.wanted = [entry for entry in self.wanted if id(entry.module) not in extra]
        before = Before(self.loads, self.extra_states, (entry.value for entry in (*covered, *first)))
        paths = {id(entry.value): entry.path for entry in (*covered, *first)}
        try:
            own = [entry for entry in covered if entry.kind in ("parameter", "buffer")]
            made = allocate_meta_tensors([*own, *first], self.targets.device)
            target = {**dict.fromkeys(self.parts, ...), "model": self._model_target(first)}
            for key, tensor in (pair for load in self.loads for pair in load.target.items()):
                put_in(target["model"], key, tensor)
            if target["model"]:
                take = self.comm.size != self.source.world
                # Alone, because ranks whose modules have no load code, as other stages, do not come here.
                self.filled_before.append(self.source.fill(target, take=take, alone=True))
            for load in self.loads:
                missing, unexpected = run_load(load, strict=self.options.strict is True, cast=self.options.cast)
                self.missing += [path for path in missing if path.removeprefix("model/") not in self.left]
                self.unexpected += unexpected
            with torch.no_grad():
                for entry, passed in self.tied:
                    entry.value.copy_(passed)
            for extra in self.extra_states:
                set_extra_state(extra)
            if self.missing or self.unexpected:
                self.check_keys()
        except Exception as error:
            say_what_changed(error, before.put_back(paths))
            raise
        return made, before

    def _model_target(self, entries: Sequence[StateDictEntry]) -> dict[str, Any]:
        """Returns the tree of live tensors of the model, to fill."""
        owned = ((entry, entry.full_name in self.own_buffers) for entry in entries)
        return nested((entry.key, PerRank(entry.value) if own else entry.value) for entry, own in owned)

    def _target(self) -> dict[str, Any]:
        """Returns the tree to fill: live tensors and new moments where the checkpoint has them, `...` for all else."""
        target: dict[str, Any] = {**dict.fromkeys(self.parts, ...), "model": self._model_target(self.wanted)}
        if self.plans:
            target["optimizer"] = {}
            for plan in self.plans:
                for key, moments in plan.build_moments(self.source).items():
                    put_in(target["optimizer"], key, moments)
        for keys, tree in self.trees.items():
            node = target
            for key in keys[:-1]:
                node[key] = below = {} if node.get(key, ...) is ... else node[key]
                node = below
            node[keys[-1]] = tree.target
        return target | self.own.to_fill
