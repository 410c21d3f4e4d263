"""Several checkpoints as the one source of a restore: which of them gives what?

Each is seen through its own rules, which the optimizers' state follows, and through rules that drop what a later one
gives. So they have no leaf in common, and their structures together are that of one training state. What each rank had
of its own, as its generators, one checkpoint gives as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, reduce
from typing import Any

import msgspec

from .. import api
from ..core.tree.merge import merge
from ..core.tree.spec import ArraySpec
from ..core.tree.structure import Structure
from ..io.comm.comm import Comm
from ..loading.aliasing import are_equal
from ..loading.match import LoadOptions
from ..loading.overlay import Bank, From, globs_of, members_of, refuse_rules
from ..loading.transforms import as_rules, carried
from ..loading.transforms.rules import Drop
from ..trees.per_rank_state import Policy
from .sources import CheckpointSource, Filled, Options, fill_from, wanted_of

__all__ = ["BankSource"]

OWN = "/~rank*"


class BankSource:
    """Checkpoints of which later ones win."""

    def __init__(self, bank: Bank, comm: Comm, options: Options) -> None:
        refuse_rules(options.rules)
        self.comm, self.options = comm, options
        members = members_of(bank, bank.sources, self._look)
        self._met = [member for _, member in members]
        for source, member in members:
            _globs(source, options.strict).check_used(lambda member=member: member.names, lambda: self.names)
        self._giver: dict[str, CheckpointSource] = {}
        given = [(member, _given(member, source)) for source, member in members]
        beside: dict[CheckpointSource, list[str]] = {}
        winner = {_unit(path): member for member, paths in given for path in paths}
        for member, paths in given:
            own = {path for path in paths if winner[_unit(path)] is member}
            self._giver.update(dict.fromkeys(own, member))
            # a table of which a part is taken stays a table
            parts = tuple(table for table in member.tables if any(path.startswith(table) for path in own))
            beside[member] = [path for path in member.leaves if path not in own and path.startswith(parts)]
            kept = own.union(beside[member])
            member.add(*(Drop(path, optional=True) for path in member.leaves if path not in kept))
        self.members = [member for member, _ in given if member.leaves]
        self._bank = Bank([From(m.path, transforms=m.rules, exclude=beside[m] or None) for m in self.members])
        self.url = ", ".join(member.url for member in self.members)
        self.world = next((m.world for m in self.members if m.world != comm.size), comm.size)
        self.step = (self._giver_of("param_groups") or self.members[-1]).step
        dropped, renamed = zip(*(member.ruled for member in self.members), strict=True)
        self.ruled = sum(dropped, ()), sum(renamed, ())

    def _look(self, source: From, _: object) -> tuple[From, CheckpointSource]:
        rules = as_rules(source.rename, source.transforms)
        options = msgspec.structs.replace(self.options, rules=(carried(*rules),) if rules else ())
        return source, CheckpointSource(source.path, self.comm, options)

    def _giver_of(self, part: str) -> CheckpointSource | None:
        """The last checkpoint that gives something of a part at the root."""
        found = [self._giver[path] for path in self._giver if path == part or path.startswith(f"{part}/")]
        return max(found, key=self.members.index, default=None)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset[str]().union(*(member.names for member in self._met))

    @cached_property
    def structure(self) -> Structure:
        return reduce(merge, (member.structure for member in self.members))

    @cached_property
    def leaves(self) -> Mapping[str, ArraySpec | None]:
        return {path: member.leaves[path] for path, member in self._giver.items()}

    def is_left(self, path: str) -> bool:
        given = path in self._giver or path + OWN in self._giver
        return not self.options.selects(path) or (not given and any(m.view.is_kept(path) for m in self.members))

    def are_equal(self, paths: tuple[str, str], wanted: Any) -> bool:
        first, second = (self._giver[path] for path in paths)
        if first is second:
            return first.are_equal(paths, wanted)
        with first.opened() as one, second.opened() as other:
            return are_equal((one, paths[0]), (other, paths[1]), wanted_of(wanted, paths[0], self.comm))

    def is_spread(self, path: str) -> bool:
        return self._giver[path].is_spread(path)

    def value(self, path: str) -> Any:
        return self._giver[path].value(path)

    def part(self, name: str) -> Any:
        tree = api.load(self._bank, select=name, comm=self.comm, per_rank="take", **self.options.reading)
        return tree[name]

    def own(self, name: str, policy: Policy) -> Any:
        giver = self._giver_of(name)
        assert giver is not None, "asked for by what is there"
        return giver.own(name, policy)

    def fill(self, target: dict[str, Any], *, take: bool) -> Filled:
        return fill_from(self._bank, target, self.comm, self.options, take=take)


def _unit(path: str) -> str:
    """What only one checkpoint gives: a leaf, or all that a rank has of its own at a place."""
    return path.partition(OWN)[0]


def _given(member: CheckpointSource, source: From) -> list[str]:
    """The leaves that a checkpoint is to give."""
    return [path for path in member.leaves if _globs(source).selects(path) and not member.view.is_kept(path)]


def _globs(source: From, strict: bool = True) -> LoadOptions:
    return LoadOptions(globs_of(source.select), strict, exclude=globs_of(source.exclude))
