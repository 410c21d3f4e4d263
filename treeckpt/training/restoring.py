"""Putting a saved training state into live objects: what is looked at, in which order, and what is said of it.

First everything is compared and every small part is loaded, without a change to anything: names, shapes, groups,
schedules, per-rank state. Then modules without memory get theirs, arrays are filled in place, and the optimizers,
extra states, loader, schedulers and generators take what they are given. Ranks do not talk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from ..bank import globs_of
from ..core.errors import MismatchError
from ..core.structure import PerRankNode
from ..core.tree import PerRank
from ..filling import Verify
from ..io.comm import Comm, as_comm
from ..io.relay import open_relay, together
from ..leaves.torch import dtype_name
from ..ranks import Policy, policy_of
from ..rules import Renaming, Transforms, as_rules, carried
from .capture import live_of, ties_of
from .modules import Entry, Modules, collect, materialise, on_meta, settle_shards
from .names import Key, key_path, put_in
from .opening import open_source
from .optimizers import Live, Optimizers, survey
from .parts import compare_extra, loads_of
from .plans import OptimizerPlan, apply_optimizers, plan_optimizers
from .report import RestoreReport
from .rng import check_rng, set_rng
from .schedules import from_groups
from .sources import Options, Source, children_of, descend
from .values import is_same

__all__ = ["restore"]

_log = logging.getLogger("treeckpt")


def restore(
    source: Any,
    model: Modules,
    optimizer: Optimizers | None = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    rng: bool = True,
    extra: Any = None,
    select: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Renaming = None,
    transforms: Transforms = None,
    strict: bool = True,
    partial: bool = False,
    cast: bool = False,
    keep: Sequence[str] = (),
    verify: Verify = True,
    read: Literal["each", "once"] = "each",
    world_changed: Policy | Mapping[str, Policy] = "error",
    device: str | torch.device | None = None,
    allow_pickle: bool = False,
    comm: Comm | None = None,
) -> RestoreReport:
    """Puts a saved training state into live objects, in place; parameters stay the same objects with the same memory.

    What was saved under one parallelism is restored into any other. Everything that can be compared is compared
    before the first change.

    Args:
        source: a path or store; a `Bank` or list of several, of which later ones win, each with rules and globs of its
            own by `From`; or a tree in memory as `state(..., buffers="per_rank")` gives it, with all that this
            rank holds.
        model: as for `state`. Parts on the meta device get memory for this rank's share, and only that. Buffers that
            are not persistent are in no checkpoint: those on the meta device stay there, are named in the report and
            in a warning to the log "treeckpt", and are yours to set.
        optimizer: as for `state`; it may be fresh: its moments are made as they were saved.
        scheduler, loader, rng, extra: as for `state`. A part that is None or False is left alone; an `extra` that is
            not given comes back in the report.
        select, exclude: globs over the model's paths, `model/...`: what is not selected stays as it is here, as does
            the optimizers' state of it.
        rename, transforms: as for `treeckpt.load`, on `model/...`; the optimizers' state follows, see
            `treeckpt.rules.Carried`.
        strict: everything here must be in the checkpoint, and the reverse for the parts that are asked for.
        partial: this rank's model is a part of what was saved (a pipeline stage): the rest is not unexpected.
        cast: converts dtypes instead of refusing them.
        keep: hyper-parameters of param groups that stay as they are here, e.g. ("lr",).
        verify: compares checksums of all that is read, as for `treeckpt.load_into`.
        read: "once" lets the ranks of a host share the reading, as for `treeckpt.load`: replicas are read by one of
            them and handed on. Every rank has to call.
        world_changed: what to do about state that each rank had of its own when their number changed: "error",
            "take" (that of rank modulo the old world), or `merge(states of all old ranks, rank, world)`; or a mapping
            with one of these for "rng", "loader", "buffers" and "extra" (the last two take no function).
        device: where plain tensors on the meta device go, by default torch's default device.
        allow_pickle: unpickles values that were saved so. This can run any code: only for files you trust.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: the state of the files.
        MismatchError: what is here is not what was saved, named by its path.
        TreeError: an optimizer with parameters that are not the model's.
    """
    comm = as_comm(comm)
    with together(open_relay(comm) if read == "once" else None):
        rules = as_rules(rename, transforms)
        chosen = Options(
            cast, verify, allow_pickle, read, (carried(*rules),) if rules else (), globs_of(select), globs_of(exclude)
        )
        found = open_source(source, comm, chosen)
        job = _Restore(found, comm, model, optimizer, strict, partial, cast, world_changed)
        job.plan_model()
        job.plan_optimizer(tuple(keep))
        job.plan_rest(scheduler, loader, rng, extra)
        job.check_keys()
    return job.run(device)


class _Restore:
    """One restore on one rank."""

    def __init__(
        self,
        source: Source,
        comm: Comm,
        model: Modules,
        optimizer: Optimizers | None,
        strict: bool,
        partial: bool,
        cast: bool,
        world_changed: Policy | Mapping[str, Policy],
    ) -> None:
        self.began = time.perf_counter()
        self.source, self.comm, self.model = source, comm, model
        self.strict, self.partial, self.cast = strict, partial, cast
        self.world_changed: Policy | Mapping[str, Policy] = world_changed
        self.entries: list[Entry] = collect(model)
        self.ties: dict[int, tuple[Key, ...]] = ties_of(self.entries)
        self.lives: list[Live] = survey(optimizer, self.ties)
        self.plans: list[OptimizerPlan] = []
        self.parts = children_of(source.structure)
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.ignored: list[str] = []
        self.left: set[str] = set()
        """Names of parameters and buffers that stay as they are, by `select`, `exclude` or a rule."""
        self.wanted: list[Entry] = []
        """Entries of the model that are filled in place."""
        self.last: list[Callable[[], None]] = []
        """What is done after all arrays are in place."""
        self.loader: Any = None
        self.extra: Any = None
        self.fill_extra = False

    # compare, and load what is small --------------------------------------------------------------------------------

    def plan_model(self) -> None:
        leaves, asked = self.source.leaves, set[str]()
        saved_extra: Any = None
        paths: dict[int, str] = {}
        for entry in self.entries:
            path = f"model/{key_path(entry.key)}"
            node = descend(self.source.structure, ("model", *entry.key))
            if self.source.is_left(path):
                self.left.add(key_path(entry.key))
                continue
            if entry.kind == "extra":
                if not self._is_there(("model", *entry.key)):
                    self.missing.append(path)
                    continue
                saved_extra = self.source.part("model") if saved_extra is None else saved_extra
                asked.update(p for p in leaves if p == path or p.startswith(path + "/"))
                self._plan_extra_state(entry, saved_extra)
                continue
            if isinstance(node, PerRankNode):
                self._refuse_changed_world("buffers", path)
                path += "/~rank*"
            asked.add(path)
            if path not in leaves:
                self.missing.append(path)
                continue
            self._check_entry(entry, path)
            self.wanted.append(entry)
            paths[id(entry)] = path
        self._check_ties(paths)
        self.unexpected += [path for path in leaves if path.startswith("model/") and path not in asked]

    def _is_there(self, keys: tuple[str, ...]) -> bool:
        return keys[-1] in children_of(descend(self.source.structure, keys[:-1]))

    def _plan_extra_state(self, entry: Entry, saved: Any) -> None:
        for step in entry.key:
            saved = saved[step]
        value = saved
        self.last.append(lambda: entry.module.set_extra_state(value))

    def _refuse_changed_world(self, part: str, path: str) -> None:
        policy = policy_of(self.world_changed, part)
        if self.comm.size != self.source.world and policy != "take":
            raise MismatchError(
                path,
                expected=f"state of one rank of {self.comm.size}",
                found=f"state saved by a world of {self.source.world}",
                hint=f"The world size changed: pass world_changed={{{part!r}: 'take'}}",
            )

    def _check_entry(self, entry: Entry, path: str) -> None:
        """Compares a tensor of the model with what was saved.

        Raises:
            MismatchError: of kind, shape or dtype.
        """
        spec, live = self.source.leaves[path], entry.value
        if is_lazy(live):
            raise MismatchError(
                path,
                expected="a tensor with a shape",
                found="a lazy one, which the first forward pass makes",
                hint="Run the model once before",
            )
        if not entry.live:
            raise MismatchError(
                path,
                expected="a parameter or buffer of the model",
                found="a tensor that a hook of state_dict made",
                hint="Load it with treeckpt.load, and hand it to the model's load_state_dict",
            )
        if spec is None:
            raise MismatchError(path, expected="a tensor", found="a value in the checkpoint")
        if spec.shape != tuple(live.shape):
            raise MismatchError(
                path,
                expected=f"shape {tuple(live.shape)}, as the model has it",
                found=f"{spec.shape} in the checkpoint",
                hint="Build the model with the sizes that were saved, or rename what is another parameter",
            )
        if spec.dtype != dtype_name(live.dtype) and not self.cast:
            raise MismatchError(
                path,
                expected=f"{dtype_name(live.dtype)}, as the model has it",
                found=f"{spec.dtype} in the checkpoint",
                hint="Pass cast=True to convert",
            )

    def _check_ties(self, paths: Mapping[int, str]) -> None:
        """Names of one tensor here must stand for equal arrays there, or the last to be filled would win.

        Args:
            paths: of the entries that are wanted, by identity.
        """
        tied: dict[int, list[Entry]] = {}
        for entry in self.wanted:
            others, path = tied.setdefault(id(entry.value), []), paths[id(entry)]
            if others and not self.source.are_equal((paths[id(others[0])], path), entry.value):
                if self.strict:
                    raise MismatchError(
                        path,
                        expected=f"the bytes of {paths[id(others[0])]}, which is the same tensor in the model",
                        found="others in the checkpoint",
                        hint="Untie the two, or pass strict=False to take the last of them",
                    )
                self.ignored += [paths[id(other)] for other in others]
                others.clear()
            others.append(entry)
        self.wanted = [entry for others in tied.values() for entry in others]

    def plan_optimizer(self, keep: tuple[str, ...]) -> None:
        if not self.lives:
            return
        if "optimizer" not in self.parts or "param_groups" not in self.parts:
            self._missing_part("optimizer", "training.state(model, optimizer)")
        frozen = (e for e in self.entries if e.kind == "parameter" and not e.value.requires_grad)
        names = frozenset(key_path(entry.key) for entry in frozen)
        self.plans, differences = plan_optimizers(self.lives, self.ties, self.source, keep=keep, frozen=names)
        left = tuple(f"{key_path(('optimizer', *live.prefix))}/{name}/" for live in self.lives for name in self.left)
        self.missing += [path for path in differences.missing if not f"{path}/".startswith(left)]
        self.unexpected += differences.unexpected
        self.ignored += differences.ignored

    def plan_rest(self, scheduler: Any, loader: Any, rng: bool, extra: Any) -> None:
        if scheduler is not None and self._has("scheduler", "scheduler=..."):
            self._plan_schedulers(scheduler)
        if loader is not None and self._has("loader", "loader=..."):
            self.loader = self.source.own("loader", policy_of(self.world_changed, "loader"))
            self.last += loads_of(loader, self.loader, "loader")
        if extra is not None and self._has("extra", "extra=..."):
            self.extra, self.fill_extra = extra, True
            found = compare_extra(extra, self.source, rank=self.comm.rank)
            self.missing, self.unexpected = self.missing + found[0], self.unexpected + found[1]
        elif "extra" in self.parts:
            if any("~rank*" in path for path in self.source.leaves if path.startswith("extra")):
                self._refuse_changed_world("extra", "extra")
            self.extra = self.source.part("extra")
        if rng and self._has("rng", "rng=True"):
            state = self.source.own("rng", policy_of(self.world_changed, "rng"))
            check_rng(state)
            self.last.append(lambda: self.ignored.extend(set_rng(state)))

    def _has(self, part: str, how: str) -> bool:
        if part in self.parts:
            return True
        if self.strict:
            self._missing_part(part, f"training.state(model, ..., {how})")
        self.missing.append(part)
        return False

    def _missing_part(self, part: str, how: str) -> None:
        raise MismatchError(
            part,
            expected=f"a state saved with {how}",
            found=f"one of {', '.join(map(str, self.parts))}",
            hint=f"Leave it out: {part}={False if part == 'rng' else None}",
        )

    def _plan_schedulers(self, scheduler: Any) -> None:
        saved = self.source.part("scheduler")
        of = {plan.prefix: plan.of for plan in self.plans}

        def plan_one(one: Any, state: Any, path: str) -> None:
            live = live_of(one, self.lives)
            if live is not None:
                state = from_groups(state, live.groups, of.get(live.prefix, {}), path=path, same=is_same)
            self.last.append(lambda: one.load_state_dict(state))

        if not isinstance(scheduler, (Mapping, list, tuple)):
            plan_one(scheduler, saved, "scheduler")
            return
        keys = list(scheduler) if isinstance(scheduler, Mapping) else list(range(len(scheduler)))
        saved_keys = list(saved) if isinstance(saved, Mapping) else list(range(len(saved)))
        if set(keys) != set(saved_keys):
            raise MismatchError("scheduler", expected=f"schedulers {keys}", found=f"{saved_keys} in the checkpoint")
        for key in keys:
            plan_one(scheduler[key], saved[key], f"scheduler/{key}")

    def check_keys(self) -> None:
        """Refuses what is only here, or only there.

        Raises:
            MismatchError: under `strict`.
        """
        bad = self.missing + ([] if self.partial else self.unexpected)
        if not self.strict or not bad:
            return
        texts = [
            f"{len(paths)} {what}: {', '.join(paths[:5])}{f' and {len(paths) - 5} more' if len(paths) > 5 else ''}"
            for what, paths in (("missing in the checkpoint", self.missing), ("not here", self.unexpected))
            if paths and (what != "not here" or not self.partial)
        ]
        raise MismatchError(
            bad[0],
            expected="the same parameters and moments here as in the checkpoint",
            found="; ".join(texts),
            hint="Pass strict=False to restore what both have, or partial=True if this rank's model is a part of it",
        )

    # change ---------------------------------------------------------------------------------------------------------

    def run(self, device: str | torch.device | None) -> RestoreReport:
        made = materialise(self.wanted, device)
        if made:
            settle_shards(self.model)
        target = self._target()
        take = self.comm.size != self.source.world
        filled = self.source.fill(target, take=take)
        apply_optimizers(self.plans)
        for act in self.last:
            act()
        left = on_meta(self.model)
        if left:
            _log.warning(
                "%s: still on the meta device, as not saved: %s. Set before the model runs", self.source.url, left
            )
        return RestoreReport(
            self.source.url,
            self.source.step,
            filled.loaded,
            filled.nbytes,
            filled.read_nbytes,
            time.perf_counter() - self.began,
            tuple(self.missing),
            tuple(self.unexpected),
            tuple(made),
            tuple(left),
            tuple(self.ignored),
            self.loader,
            self.extra,
            *self.source.ruled,
        )

    def _target(self) -> dict[str, Any]:
        """The tree to fill: live tensors and new moments where the checkpoint has them, `...` for all else."""
        target: dict[str, Any] = dict.fromkeys(self.parts, ...)
        tensors: dict[str, Any] = {}
        for entry in self.wanted:
            node = descend(self.source.structure, ("model", *entry.key))
            put_in(tensors, entry.key, PerRank(entry.value) if isinstance(node, PerRankNode) else entry.value)
        target["model"] = tensors
        if self.plans:
            target["optimizer"] = {}
            for plan in self.plans:
                for key, moments in plan.build_moments(self.source).items():
                    put_in(target["optimizer"], key, moments)
        if self.fill_extra:
            target["extra"] = self.extra
        return target
