"""Every region of every file x every kind of damage x every way to load: found each time, by leaf, file and bytes.

The quick half takes one place in each region; the slow one goes through every file in small steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.corruption import flip
from tests.helpers.world import assert_equal, errors_of, on_ranks, shards_of
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.shard_header import BLOCK, parse_shard_name
from treeckpt._io.storage import local_files
from treeckpt._runs import discovery

WORLD = 2
N = BLOCK // 8


def state(rank: int, world: int, seed: int = 0) -> dict[str, Any]:
    """Large and small, whole and in pieces, of each rank's own, tied and keyed."""
    rows = np.arange(2.0 * N).reshape(8, N // 4) + seed
    low, high = 8 * rank // world, 8 * (rank + 1) // world
    weight = np.arange(N + 77) + seed
    return {
        "weight": weight,
        "tie": weight,
        "rows": tc.Sharded(rows[low:high].copy(), (8, N // 4), (low, 0)),
        "columns": tc.Sharded(rows[:, low * 64 : high * 64].copy(), (8, 512), (0, low * 64)),
        "own": tc.PerRank(np.full(N, rank + seed)),
        "small": [np.arange(9) + seed, np.full(5, seed, np.int16)],
        "table": tc.KeyedTable(np.arange(64), {"w": np.arange(64.0) + seed}, buckets=16),
        "step": seed,
    }


def filled(rank: int, world: int) -> dict[str, Any]:
    tree = state(rank, world)
    for array in (tree["weight"], tree["rows"].local, tree["columns"].local, tree["own"].value, *tree["small"]):
        array[:] = 99
    return tree


class Saves:
    """A checkpoint, and one of another step, with files of the same names but for the save id."""

    def __init__(self, path: Path) -> None:
        self.path, self.other = path / "c", path / "other"
        for place, seed in ((self.path, 0), (self.other, 1)):
            outcomes = on_ranks(WORLD, lambda c, p=place, s=seed: tc.save(p, state(c.rank, WORLD, s), step=s, comm=c))
            assert errors_of(outcomes) == [None] * WORLD
        self.data = {file.name: file.read_bytes() for file in self.path.iterdir()}
        self.whole = tc.load(self.path, fallback=tc.Fallback(per_rank="take"))

    def swapped(self, name: str) -> bytes:
        """The file of the other step in the place of one."""
        if name == INDEX_NAME:
            return (self.other / name).read_bytes()
        [file] = [f for f in self.other.iterdir() if f.name.split(".")[0] == name.split(".")[0]]
        return file.read_bytes()


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saves]:
    saves = Saves(tmp_path_factory.mktemp("matrix"))
    yield saves
    assert tc.verify(saves.path).ok
    assert_same(tc.load(saves.path, fallback=tc.Fallback(per_rank="take")), saves.whole)


def assert_same(found: Any, expected: Any) -> None:
    for tree in (found, expected):
        assert isinstance(tree["table"], tc.KeyedTable)
    assert_equal(found["table"].slots, expected["table"].slots)
    assert_equal(*[{k: v for k, v in tree.items() if k != "table"} for tree in (found, expected)])


# the ways to load -----------------------------------------------------------------------------------------------------
def as_saved(path: Path) -> None:
    tc.load(path, fallback=tc.Fallback(per_rank="take"))


def as_copies(path: Path) -> None:
    tc.load(path, read=tc.ReadOptions(copy=True, memory=1), fallback=tc.Fallback(per_rank="take"))


def like_ranks(path: Path) -> None:
    """Each rank of another world its own part."""
    outcomes = on_ranks(3, lambda c: tc.load(path, state(c.rank, 3), fallback=tc.Fallback(per_rank="take"), comm=c))
    errors = [error for error in errors_of(outcomes) if error is not None]
    if errors:
        raise errors[0]


def into(path: Path) -> None:
    """In one pass: what the error does not name among those that may have changed has not."""
    tree = filled(0, 1)
    try:
        tc.load_into(path, tree, fallback=tc.Fallback(per_rank="take"))
    except tc.CheckpointError as error:
        changed = str(error).partition("may have changed: ")[2]
        assert_as_filled(tree, {key for key in tree if key in changed})
        assert tree["step"] == 0 and (tree["table"].slots["w"] == np.arange(64.0)).all(), "values and tables come last"
        raise


def comparing_first(path: Path) -> None:
    tree = filled(0, 1)
    try:
        tc.load_into(path, tree, read=tc.ReadOptions(verify="first"), fallback=tc.Fallback(per_rank="take"))
    except tc.CheckpointError:
        assert_as_filled(tree, set())
        raise


def assert_as_filled(tree: dict[str, Any], but: set[str]) -> None:
    """All arrays but some are as they were before the load."""
    expected = filled(0, 1)
    for key in {"rows", "columns"} - but:
        assert_equal(tree[key].local, expected[key].local)
    for key in {"weight", "own", "small"} - but:
        assert_equal(tree[key], expected[key])


WAYS: dict[str, Callable[[Path], None]] = {
    f.__name__: f for f in (as_saved, as_copies, like_ranks, into, comparing_first)
}


@pytest.fixture(params=["page cache", "device"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the reader is told that the bytes lie: it takes them by read_parts and lend, or by O_DIRECT."""
    monkeypatch.setattr(local_files, "is_cached", lambda *_: request.param == "page cache")
    return request.param


# the damage -----------------------------------------------------------------------------------------------------------
def zero(data: bytes, at: int) -> bytes:
    """A sector, as a disk loses it."""
    low = at // 512 * 512
    high = min(low + 512, len(data))
    return data[:low] + bytes(high - low) + data[high:]


def truncate(data: bytes, at: int) -> bytes:
    return data[:at]


def extend(data: bytes, at: int) -> bytes:
    return data + data[: at + 1]


CHANGES: dict[str, Callable[[bytes, int], bytes]] = {f.__name__: f for f in (flip, zero, truncate, extend)}


def regions(name: str, data: bytes) -> dict[str, int]:
    """A place in each region of a file."""
    if parse_shard_name(name) is None:
        return {"start": 0, "seal": data.index(b'"seal":"') + 9, "body": len(data) // 2, "end": len(data) - 1}
    header = int.from_bytes(data[:8], "little") + 8
    return {
        "length": 1,
        "seal": data.index(b'"seal":"') + 9,
        "checksums": data.index(b'"hashes":"') + 12,
        "entries": data.index(b'"data_offsets"') + 3,
        "padding": header - 1,
        "first byte": header,
        "a block's end": header + BLOCK - 1,
        "a block's start": header + BLOCK,
        "last byte": len(data) - 1,
    }


def check(saves: Saves, name: str, changed: bytes, way: Callable[[Path], None], at: int | None) -> None:
    """A change is found by loading, and says where it is."""
    with pytest.raises((tc.CorruptError, tc.FormatError)) as caught:
        way(saves.path)
    error = caught.value
    assert name in error.path and error.expected and error.found, str(error)
    if parse_shard_name(name) is None:
        return
    ranges = [(int(a), int(b)) for a, b in re.findall(r"(\d+):(\d+)", error.found)]
    assert ranges, str(error)
    if at is not None:
        assert any(low <= at < high for low, high in ranges), f"{at}: {error}"
    behind = len(changed) > len(saves.data[name])
    assert behind or any(leaf in error.path for leaf in ("weight", "rows", "columns", "own", "small", "table")), error


def full_name(saves: Saves, name: str) -> str:
    return next(full for full in sorted(saves.data) if full.startswith(name))


@pytest.mark.parametrize("name", ["index", "shard-00000", "shard-00001"])
@pytest.mark.parametrize("way", WAYS)
def test_damage_anywhere_is_found_by_every_way_to_load(saves: Saves, way: str, name: str, held: str) -> None:
    name = full_name(saves, name)
    data, tried = saves.data[name], 0
    try:
        for region, at in regions(name, data).items():
            for kind, change in CHANGES.items():
                if (kind == "extend" and region != "last byte") or (
                    held == "device" and kind in ("extend", "truncate")
                ):
                    continue
                changed = change(data, at)
                if changed == data:
                    continue
                (saves.path / name).write_bytes(changed)
                check(saves, name, changed, WAYS[way], at if kind in ("flip", "truncate") else None)
                tried += 1
        (saves.path / name).write_bytes(saves.swapped(name))
        if name == INDEX_NAME:
            with pytest.raises(tc.CorruptError, match="no such file"):
                WAYS[way](saves.path)
        else:
            check(saves, name, data, WAYS[way], None)
    finally:
        (saves.path / name).write_bytes(data)
    assert tried >= 7


def test_verify_finds_all_of_it_and_names_the_bytes(saves: Saves) -> None:
    for name, data in saves.data.items():
        for at in regions(name, data).values():
            for change in (*CHANGES.values(), lambda data, at, name=name: saves.swapped(name)):
                changed = change(data, at)
                if changed == data:
                    continue
                (saves.path / name).write_bytes(changed)
                try:
                    report = tc.verify(saves.path)
                except tc.CheckpointError as error:
                    assert name == INDEX_NAME and name in str(error)
                else:
                    assert not report.ok
                    assert name == INDEX_NAME or {problem.file for problem in report.problems} == {name}
                    if parse_shard_name(name) is not None and change is CHANGES["flip"]:
                        (problem,) = report.problems
                        assert problem.start is not None and problem.stop is not None
                        assert problem.start <= at < problem.stop and problem.leaves
        (saves.path / name).write_bytes(data)


def test_verify_names_every_damaged_place_of_a_file_and_not_only_the_first(saves: Saves) -> None:
    name = full_name(saves, "shard-00000")
    data = saves.data[name]
    header = int.from_bytes(data[:8], "little") + 8
    places = [header, len(data) - 1]
    changed = data
    for at in places:
        changed = flip(changed, at)
    (saves.path / name).write_bytes(changed)
    problems = tc.verify(saves.path).problems
    (saves.path / name).write_bytes(data)
    assert len(problems) == 2
    assert all((p.start or 0) <= at < (p.stop or 0) for p, at in zip(problems, places, strict=True))


RECORDS = ("progress-00000.0123456789abcdef.json", "lease.0123456789abcdef.json", "pinned.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 4096, b"x" * 100_000, b'{"rank":' + b"9" * 4000 + b"}"])
def test_damaged_records_beside_a_checkpoint_change_nothing(tmp_path: Path, content: bytes) -> None:
    tree = {"w": np.arange(9)}
    tc.save(tmp_path / "step_00000001", tree)
    for record in RECORDS:
        (tmp_path / "step_00000001" / record).write_bytes(content)
    assert_equal(tc.load(tmp_path / "step_00000001"), tree)
    assert tc.verify(tmp_path / "step_00000001").ok
    (info,) = discovery.scan(tmp_path)
    assert info.status == "complete" and info.pinned and info.saving == ()


def test_two_shards_of_one_save_in_each_others_place_are_found(saves: Saves) -> None:
    first, second = shards_of(saves.path)
    first.write_bytes(saves.data[second.name])
    second.write_bytes(saves.data[first.name])
    for way in WAYS.values():
        with pytest.raises(tc.CorruptError, match=r"rank|bytes"):
            way(saves.path)
    assert len({problem.file for problem in tc.verify(saves.path).problems}) == 2
    for file in (first, second):
        file.write_bytes(saves.data[file.name])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("name", ["index", "shard-00000", "shard-00001"])
def test_the_whole_matrix(saves: Saves, kind: str, name: str) -> None:
    name = full_name(saves, name)
    data = saves.data[name]
    header = 8192 if parse_shard_name(name) else len(data)
    places = [*range(0, min(header, len(data)), 37), *range(header, len(data), 4099)]
    for number, at in enumerate(places):
        changed = CHANGES[kind](data, at)
        if changed != data:
            (saves.path / name).write_bytes(changed)
            check(saves, name, changed, list(WAYS.values())[number % len(WAYS)], at if kind == "flip" else None)
    (saves.path / name).write_bytes(data)
