"""Threads as ranks, stores that fail, and small checkpoints: what the tests of failures have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import treeckpt as tc
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.shard_header import sealed
from treeckpt._io.comm.comm import Comm, thread_comms
from treeckpt._io.storage.store import DirectoryEntry, Store, VersionTag, Writer

__all__ = [
    "LIMIT",
    "LONG",
    "Faulty",
    "Outcome",
    "Patient",
    "Switch",
    "assert_equal",
    "assert_holds",
    "errors_of",
    "on_ranks",
    "reseal",
    "reseal_shard",
    "shards_of",
    "small_tree",
    "whole_tree",
]

LONG = 240.0
"""Seconds that nothing takes, however busy the machine is: for waits that are to end sooner."""
LIMIT = 480.0
"""Seconds after which ranks, and saves in the background, count as hung."""


class Outcome(msgspec.Struct):
    """What one rank's function gave or raised."""

    value: Any = None
    error: BaseException | None = None


def on_ranks(size_or_comms: int | Sequence[Comm], act: Callable[[Any], Any], *, timeout: float = LONG) -> list[Outcome]:
    """Runs a function with each rank's comm, in threads; no rank may hang."""
    comms = thread_comms(size_or_comms, timeout=timeout) if isinstance(size_or_comms, int) else size_or_comms
    outcomes = [Outcome() for _ in comms]

    def run(comm: Comm, outcome: Outcome) -> None:
        try:
            outcome.value = act(comm)
        except BaseException as error:
            outcome.error = error

    threads = [
        threading.Thread(target=run, args=(comm, outcome), daemon=True)
        for comm, outcome in zip(comms, outcomes, strict=True)
    ]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(LIMIT)
        assert not thread.is_alive(), f"rank {rank} hangs"
    return outcomes


def errors_of(outcomes: Sequence[Outcome]) -> list[BaseException | None]:
    return [outcome.error for outcome in outcomes]


class Patient:
    """A rank's comm to which only some ranks ever seem silent: all others it waits for, however busy the machine is.

    Args:
        silent: ranks that say nothing; to wait for them takes the comm's time limit.
    """

    def __init__(self, inner: Comm, *silent: int, timeout: float = 0.1) -> None:
        self.rank, self.size, self.state, self.timeout = inner.rank, inner.size, inner.state, timeout
        self.post, self.drop, self._wait = inner.post, inner.drop, inner.wait
        self._silent = {"all" if rank == 0 else str(rank) for rank in silent}
        self.waited: list[int] = []
        """The silent ranks that were waited for; 0 where it was for its word to all."""
        self._waiting: list[str] = []

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        if not timeout:
            return self._wait(keys, 0)
        senders = [key.rpartition("/")[2] for key in keys]
        if talking := [key for key, sender in zip(keys, senders, strict=True) if sender not in self._silent]:
            self._wait(talking, LONG)
        silent = [key for key, sender in zip(keys, senders, strict=True) if sender in self._silent]
        if silent == self._waiting:
            return self._wait(keys, timeout)  # a wait goes on that was interrupted to look for notes
        self._waiting = silent
        missed = [0 if sender == "all" else int(sender) for sender in senders if sender in self._silent]
        self.waited += missed
        return self._wait(keys, timeout if missed else 0)


RECORD = "publish progress-"


class Switch:
    """Counts a rank's store calls; at number `at` something happens: before the call takes effect, or after it.

    Where the record of a save under way is written again, that does not count: a slow save does so more often.

    Args:
        at: counted from 0; None never.
        act: what happens, by default an OSError.
        names: only these calls count, but for the record of a save under way, which harms no save.
    """

    def __init__(
        self,
        at: int | None = None,
        *,
        after: bool = False,
        act: Callable[[str], None] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.at, self.after, self.act, self.names = at, after, act or fail, names
        self.calls: list[str] = []
        self.fired = ""
        self._lock, self._records = threading.Lock(), set[str]()

    def __call__(self, name: str, effect: Callable[[], Any]) -> Any:
        if self.names is not None and (name.partition(" ")[0] not in self.names or name.startswith(RECORD)):
            return effect()
        with self._lock:
            renewed = name in self._records
            if name.startswith(RECORD):
                self._records.add(name)
            now = len(self.calls) == self.at and not renewed
            self.calls += [] if renewed else [name]
            if now:
                self.fired = name
        if now and not self.after:
            self.act(name)
        result = effect()
        if now and self.after:
            self.act(name)
        return result


def fail(name: str) -> None:
    raise OSError(5, f"injected at {name}")


class Faulty(Store):
    """A store that does what another one does, through a switch."""

    def __init__(self, inner: Store, switch: Switch) -> None:
        self.inner, self.switch = inner, switch

    @property
    def url(self) -> str:
        return self.inner.url

    def prepare(self) -> None:
        self.switch("prepare", self.inner.prepare)

    def entries(self) -> dict[str, DirectoryEntry]:
        return self.switch("sizes", self.inner.entries)

    def read(self, name: str, *, limit: int) -> bytes:
        return self.switch(f"read {name}", lambda: self.inner.read(name, limit=limit))

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        self.switch(f"read_into {name}", lambda: self.inner.read_into(name, offset, out, shared=shared))

    def read_parts(self, name: str, offset: int, parts: Sequence[memoryview], *, shared: bool = False) -> bool:
        return self.switch(f"read_parts {name}", lambda: self.inner.read_parts(name, offset, parts, shared=shared))

    def map(self, name: str, offset: int, nbytes: int) -> memoryview:
        return self.switch(f"map {name}", lambda: self.inner.map(name, offset, nbytes))

    def create(self, name: str, nbytes: int) -> Writer:
        return self.switch(f"create {name}", lambda: _FaultyWriter(self.inner.create(name, nbytes), self.switch, name))

    def publish(
        self, name: str, data: bytes, *, replace: bool | VersionTag, check: Callable[[], object] = lambda: None
    ) -> None:
        check()
        self.switch(f"publish {name}", lambda: self.inner.publish(name, data, replace=replace))

    def delete(self, name: str, *, version: VersionTag | None = None) -> None:
        self.switch(f"delete {name}", lambda: self.inner.delete(name))

    def close(self) -> None:
        self.inner.close()


class _FaultyWriter:
    ordered = False

    def __init__(self, inner: Writer, switch: Switch, name: str) -> None:
        self.inner, self.switch, self.name = inner, switch, name

    def write(self, offset: int, data: memoryview) -> None:
        self.switch(f"write {self.name}", lambda: self.inner.write(offset, data))

    def commit(self) -> None:
        self.switch(f"commit {self.name}", self.inner.commit)

    def abort(self) -> None:
        self.inner.abort()


def small_tree(rank: int, world: int, *, seed: int = 0) -> dict[str, Any]:
    """A tree with replicas, pieces, values, a tie and state of each rank's own; the same under every world."""
    random = np.random.default_rng(seed)
    full = random.standard_normal((12, 5)).astype(np.float32)
    low, high = 12 * rank // world, 12 * (rank + 1) // world
    shared = random.standard_normal(700)
    return {
        "replica": random.integers(0, 255, 5000, np.uint8),
        "pieces": tc.Sharded(full[low:high], (12, 5), (low, 0)),
        "shared": shared,
        "tie": shared,
        "empty": np.empty((0, 3), np.int16),
        "step": 100 + seed,
        "own": tc.PerRank({"rng": np.full(9, rank + seed), "n": rank}),
        "nested": [{"lr": 0.5 + seed}, (1, None, "text")],
    }


def assert_equal(found: Any, expected: Any) -> None:
    """Trees bit for bit; pieces against the whole they come from."""
    if isinstance(expected, tc.PerRank):
        assert isinstance(found, tc.PerRank)
        assert_equal(found.value, expected.value)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected) and len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_equal(a, b)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    else:
        assert type(found) is type(expected) and found == expected


def whole_tree(*, seed: int = 0, rank: int = 0) -> dict[str, Any]:
    """What `small_tree` comes back as on one rank."""
    tree = small_tree(0, 1, seed=seed)
    tree["pieces"] = tree["pieces"].local
    tree["own"] = tc.PerRank({"rng": np.full(9, rank + seed), "n": rank})
    return tree


def assert_holds(path: Path | Store, *, seed: int) -> None:
    """The checkpoint at a path is `small_tree` with this seed, whole and intact."""
    assert_equal(tc.load(path, fallback=tc.Fallback(per_rank="take")), whole_tree(seed=seed))
    report = tc.verify(path)
    assert report.ok, str(report)


def seed_of(path: Path | Store) -> int | None:
    """Which checkpoint is there, bit for bit, of those saved at step 100 and its seed; None where there is none."""
    try:
        step = tc.load(path, select="step")["step"]
    except tc.CheckpointNotFound:
        return None
    assert_holds(path, seed=step - 100)
    return step - 100


def reseal(path: Path, change: Callable[[Any], None]) -> None:
    """Changes an index as an attacker would: with a seal that fits."""
    file = path / INDEX_NAME
    document = msgspec.json.decode(file.read_bytes())
    change(document)
    document["seal"] = "0" * 16
    file.write_bytes(sealed(msgspec.json.encode(document)))


def shards_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def reseal_shard(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = msgspec.json.decode(data[8 : 8 + size])
    change(header)
    header["__metadata__"] = {"seal": "0" * 16} | {k: v for k, v in header["__metadata__"].items() if k != "seal"}
    text = msgspec.json.encode(header)
    assert len(text) <= size, "it fits into the padding"
    path.write_bytes(sealed(data[:8] + text.ljust(size)) + data[8 + size :])
