"""How ranks talk: no collectives, digests only, and plans that are remembered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import treeckpt as tc
from treeckpt._core.planning.save_plan import GlobalPlan
from treeckpt._io.comm.comm import Comm, default_comm

from .layouts import build
from .registry import Rank, case


# how ranks talk -------------------------------------------------------------------------------------------------------
class Collectives(TorchDispatchMode):
    """Counts the operators of c10d that this thread calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def sequence() -> int:
    """How many collectives the default group has issued, from any thread."""
    return dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()


@case("four")
def no_collective_is_issued(here: Rank) -> None:
    tree = {"d": build("fsdp tp", here.rank, 4), "p": build("plain", here.rank, 4), "own": tc.PerRank(here.rank)}
    stages = build("stages", here.rank, 4)
    path = here.directory / "quiet"
    with Collectives() as control:
        before = sequence()
        dist.all_reduce(torch.ones(1))
        assert control.found, "the operator count sees a collective"
        assert sequence() == before + 1, "so does the group's own count"
    with Collectives() as collectives:
        before = sequence()
        tc.save(path, tree)
        tc.save(path, tree, overwrite=True, verify_replicas=True)
        tc.save(here.directory / "quiet stages", stages)
        tc.load(path, tree)
        tc.load(path)
        tc.load_into(path, tree)
        tc.load(path, tc.abstract(tree))
        after = sequence()
    assert not collectives.found
    assert after == before, f"{after - before} collectives"


class _Counting:
    """A comm that counts the bytes that this rank sends."""

    def __init__(self, inner: Comm) -> None:
        self._inner, self._sent = inner, 0
        self.rank, self.size, self.timeout, self.state = inner.rank, inner.size, inner.timeout, inner.state

    def post(self, key: str, data: bytes) -> None:
        self._sent += len(data)
        self._inner.post(key, data)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        return self._inner.wait(keys, timeout)

    def drop(self, keys: Sequence[str]) -> None:
        self._inner.drop(keys)

    def sent(self) -> int:
        """Bytes since the last call."""
        found, self._sent = self._sent, 0
        return found


INVENTORY = 15_000
"""Bytes: less than what 300 leaves take to be told; more than digests, names, reports and spans do."""


@case("four")
def equal_trees_exchange_digests_only(here: Rank) -> None:
    comm = _Counting(default_comm())
    comm.state.remove(GlobalPlan)
    for step in range(3):
        tree = {f"layers.{n}.weight": torch.zeros(200, 100) for n in range(300)}
        path = here.directory / f"digests {step}"
        tc.save(path, {"model": tree, "sharded": build("rows", here.rank, 4), "step": step}, comm=comm)
        sent = comm.sent()
        assert 0 < sent < INVENTORY / 4, sent


@case("four")
def joined_plans_are_remembered(here: Rank) -> None:
    comm = _Counting(default_comm())
    comm.state.remove(GlobalPlan)
    spent = []
    for step in range(3):
        model = {f"layers.{4 * n + here.rank}.weight": torch.zeros(200, 100) for n in range(300)}
        tree = {"model": model, "step": step}
        tc.save(here.directory / f"joined {step}", tree, comm=comm)
        spent.append(comm.sent())
        loaded = tc.load(here.directory / f"joined {step}", tree, strict=False)
        assert loaded["step"] == step
        assert len(tc.inspect(here.directory / f"joined {step}").leaves) == 1201
    assert spent[0] > INVENTORY, "an inventory is sent once"
    assert max(spent[1:]) < INVENTORY / 4, f"{spent}: then digests only"
    tc.save(here.directory / "joined other", {"model": {**model, "new": torch.zeros(3)}}, comm=comm)
    assert comm.sent() > INVENTORY, "another tree is joined anew"
    assert tc.load(here.directory / "joined other", select="model/new")["model"]["new"].shape == (3,)
