"""What several ranks of one host want is read once: from an object store, by its log, and from a local device."""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import treeckpt as tc
from tests.helpers.far_s3 import FarS3
from treeckpt._bench.measure import Meter, cached_fraction, drop_cache
from treeckpt._io.comm.comm import default_comm

from .layouts import difference, distribute, mesh_of, seeded
from .registry import Case, Phases, Rank

PHASES: Phases = {"some": (3, {}), "eight": (8, {})}
ROWS = 10 << 10
MIB = 1 << 20


def case(function: Case) -> Case:
    """Registers a case for three ranks, and for eight."""
    for _, found in PHASES.values():
        found[function.__name__.replace("_", " ")] = function
    return function


def _tree() -> dict[str, Any]:
    return dict(_leaves())


@functools.cache
def _leaves() -> dict[str, Any]:
    """The leaves of the tree, which no case writes to; made before the ranks are forked."""
    tree: dict[str, Any] = {f"big{n}": torch.randn(ROWS, 512, generator=seeded()) for n in range(2)}
    return tree | {f"small{n}": torch.randn(1 + n, generator=seeded()) for n in range(9)}


def _zeros() -> dict[str, Any]:
    return {name: torch.zeros_like(leaf) for name, leaf in _tree().items()}


UNIQUE = sum(leaf.nbytes for name, leaf in _tree().items() if name[:3] == "big")
"""Bytes of the large arrays; the others are a few hundred."""


def _gathered(thing: Any) -> list[Any]:
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, thing)
    return heard


def _saved(here: Rank, name: str) -> str:
    """Returns the URL of a checkpoint of the tree, which rank 0 has saved."""
    url = f"s3://bucket/{here.directory.name}-{here.world}/{name}"
    if here.rank == 0:
        tc.save(url, _tree(), comm="alone")
    dist.barrier()
    return url


def _requests(here: Rank, act: Callable[[], object]) -> tuple[list[dict[str, Any]], int]:
    """Acts on every rank; returns the GETs of data that the server has seen, and how many of the index."""
    port = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port or 0
    server = FarS3(port, port)
    if here.rank == 0:
        server.set()
    dist.barrier()
    act()
    dist.barrier()
    shards = [row for row in server.gets(".safetensors") if row["sent"] > 70_000]  # others are fronts of headers
    return shards, len(server.gets("index.json"))


def _check_once(shards: list[dict[str, Any]]) -> None:
    """Fails where a byte was asked for twice, or is missing."""
    found = sorted(tuple(map(int, re.findall(r"\d+", row["range"]))) for row in shards)
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(found)), found
    assert UNIQUE <= sum(stop + 1 - start for start, stop in found) <= 1.02 * UNIQUE, found
    assert len(found) <= 1.1 * UNIQUE / (8 * MIB) + 4


@case
def replicas_are_asked_for_once_by_the_ranks_of_a_host(here: Rank) -> None:
    url, target, loaded = _saved(here, "replicas"), _zeros(), list[Any]()
    shards, _ = _requests(here, lambda: loaded.append(tc.load(url, read=tc.ReadOptions(once=True))))
    assert not difference(loaded[0], _tree())
    _check_once(shards)
    shards, _ = _requests(here, lambda: tc.load_into(url, target, read=tc.ReadOptions(once=True)))
    assert not difference(target, _tree())
    _check_once(shards)


@case
def ranks_with_shards_ask_for_theirs_alone(here: Rank) -> None:
    url = _saved(here, "shards")
    target = {"big0": distribute(torch.zeros(ROWS, 512), mesh_of(here.world), (Shard(0),))}
    shards, _ = _requests(here, lambda: tc.load_into(url, target, strict=False))
    assert torch.equal(target["big0"].full_tensor(), _tree()["big0"])
    # at each border a block of checksums is read by two ranks
    assert sum(row["sent"] for row in shards) <= target["big0"].numel() * 4 + (here.world + 1) * (256 << 10)


@case
def a_plain_load_sends_no_messages(here: Rank) -> None:
    url = _saved(here, "plain")
    if here.rank == 0:
        assert not difference(tc.load(url), _tree()), "no other rank loads"
    dist.barrier()


@case
def a_manager_restores_by_asking_once(here: Rank) -> None:
    run = f"s3://bucket/{here.directory.name}-{here.world}/run"
    with tc.Manager(run, background=False) as manager:
        torch.manual_seed(1)
        model = torch.nn.Linear(2048, 2048, bias=False)
        manager.register("model", model)
        manager.save(3, _tree())
        weights, target = model.weight.detach().clone(), _zeros()
        with torch.no_grad():
            model.weight.zero_()
        shards, indexes = _requests(here, lambda: manager.restore(into=target))
        assert not difference(target, _tree()) and torch.equal(model.weight, weights)
        total = UNIQUE + weights.nbytes
        assert total <= sum(row["sent"] for row in shards) <= 1.02 * total
        assert indexes <= 3, "rank 0 reads it, also to choose the step"
        shards, _ = _requests(here, lambda: manager.restore(into=target, read=tc.ReadOptions(once=False)))
        assert sum(row["sent"] for row in shards) >= here.world * total, "what the caller says wins"


@case
def a_training_is_restored_by_asking_once(here: Rank) -> None:
    run = f"s3://bucket/{here.directory.name}-{here.world}/training"
    torch.manual_seed(1)
    model = torch.nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    saved = [leaf.detach().clone() for leaf in (model.weight, *_moments(optimizer))]
    total = sum(leaf.nbytes for leaf in saved)
    with tc.Manager(run, background=False) as manager:
        manager.save(3, tc.training.state(model, optimizer))
        acts: list[Callable[[], object]] = [
            lambda: manager.resume(model, optimizer),
            lambda: tc.training.restore(
                f"{run}/step_00000003", model, optimizer, rng=False, read=tc.ReadOptions(once=True)
            ),
        ]
        for act in acts:
            with torch.no_grad():
                for leaf in (model.weight, *_moments(optimizer)):
                    leaf.zero_()
            shards, _ = _requests(here, act)
            assert all(map(torch.equal, (model.weight, *_moments(optimizer)), saved))
            assert total <= sum(row["sent"] for row in shards) <= 1.02 * total


def _moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    [state] = optimizer.state.values()
    return [state["exp_avg"], state["exp_avg_sq"]]


@case
def a_rank_that_cannot_restore_is_named_by_the_others_at_once(here: Rank) -> None:
    run = f"s3://bucket/{here.directory.name}-{here.world}/refused"
    begin = time.monotonic()
    with tc.Manager(run, background=False) as manager:
        manager.save(3, _tree())
        manager.save(4, _tree())
        last = here.rank == here.world - 1
        like = _zeros()
        like["big0"] = torch.zeros(3, 3) if last else like["big0"]
        wrong: list[dict[str, Any]] = [
            {"into": like},
            {"step": 3 if last else 4},
            {"select": 7 if last else "big0"},
            {"into": _zeros(), "rename": {"x.*": "y.*"} if last else None},
        ]
        for keywords in wrong:
            with pytest.raises((tc.TreeckptError, TypeError)):
                manager.restore(**keywords)
        assert not difference(manager.restore(), _tree()), "the next call works"
    assert time.monotonic() - begin < default_comm().timeout / 2, "nobody waits for the rank that failed"


@case
def the_ranks_of_a_host_read_the_device_once(here: Rank) -> None:
    """A plain load and fill of a cold checkpoint; what lies in memory, as in tmpfs, is never read from a device."""
    path = here.directory / f"local {here.world}"
    if here.rank == 0:
        tc.save(path, _tree(), comm="alone")
    dist.barrier()
    target, loaded = _zeros(), list[Any]()
    mesh = mesh_of(here.world)
    pieces = {"big0": distribute(torch.zeros(ROWS, 512), mesh, (Shard(0),))}
    acts: list[tuple[Callable[[], object], float, bool]] = [
        (lambda: loaded.append(tc.load(path)), UNIQUE, True),
        (lambda: tc.load_into(path, target), UNIQUE, True),
        (lambda: tc.load_into(path, target, read=tc.ReadOptions(verify="first")), UNIQUE, True),
        (lambda: tc.load_into(path, pieces, strict=False), pieces["big0"].numel() * 4, False),
    ]
    for act, wanted, shared in acts:
        assert _read_cold(here, path, act) <= 1.1 * wanted + (here.world + 1) * (256 << 10)
        if here.rank == 0 and shared:
            assert cached_fraction(path) > 0.9, "it went through the page cache"
    assert not difference(loaded[0], _tree()) and not difference(target, _tree())
    assert torch.equal(pieces["big0"].full_tensor(), _tree()["big0"])


def _read_cold(here: Rank, path: Path, act: Callable[[], object]) -> int:
    """Acts on every rank, with no file in the page cache; returns the bytes that all have read from the device."""
    if here.rank == 0:
        drop_cache(path)
    dist.barrier()
    with Meter() as meter:
        act()
        read = meter.lap().read_bytes
    return sum(_gathered(read))
