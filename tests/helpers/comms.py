"""Comms over every kind of torch store, and rounds on them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.helpers.world import LONG
from treeckpt._io.comm.comm import Comm, TorchComm
from treeckpt._io.comm.rounds import Round


def hash_comms(size: int, timeout: float, tiers: tuple[int, ...] = ()) -> list[TorchComm]:
    store = dist.HashStore()
    return [TorchComm(store, rank, size, timeout=timeout, group_sizes=tiers) for rank in range(size)]


def file_comms(size: int, timeout: float, path: Path) -> list[TorchComm]:
    return [TorchComm(dist.FileStore(str(path / "store"), size), r, size, timeout=timeout) for r in range(size)]


def tcp_comms(size: int, timeout: float, tiers: tuple[int, ...] = ()) -> list[TorchComm]:
    limit = timedelta(seconds=LONG)
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    rest = [dist.TCPStore("127.0.0.1", first.port, is_master=False, timeout=limit) for _ in range(size - 1)]
    return [TorchComm(s, rank, size, timeout=timeout, group_sizes=tiers) for rank, s in enumerate([first, *rest])]


def talk(comm: Comm, topic: str = "a", *, steps: int = 2) -> list[Any]:
    """A round of gathers and shares; what was heard."""
    found: list[Any] = []
    conversation = Round(comm, topic)
    assert conversation.join() is None
    for step in range(steps):
        heard = conversation.gather(f"{step} of {comm.rank}".encode())
        assert (heard is None) == (comm.rank > 0)
        found.append(heard)
        word = f"{topic} {step} {sorted(heard)}".encode() if heard is not None else None
        found.append(conversation.broadcast(word, last=step == steps - 1))
    return found


def ended(comm: Comm, topic: str, *, joined: Callable[[], Any] = bool) -> str:
    """A round in which rank 0 says how many it heard."""
    conversation = Round(comm, topic)
    missed = conversation.join()
    joined()
    if missed is not None:
        return "missed: " + missed.decode()
    heard = conversation.gather(topic.encode())
    word = f"{topic}: {len(heard)} of {comm.size}".encode() if heard is not None else None
    if heard is not None:
        assert set(heard.values()) == {topic.encode()}, "messages of two saves"
    return conversation.broadcast(word, last=True).decode()
