"""Hostile files: an attacker may write anything and make the seals fit, and still gets an error of ours, cheaply."""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import treeckpt as tc
from tests.helpers.world import assert_equal, on_ranks, reseal, reseal_shard, shards_of, small_tree, whole_tree
from treeckpt._core.format.index import INDEX_NAME


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""
    assert all(o.error is None for o in on_ranks(2, lambda c: tc.save(tmp_path / "c", small_tree(c.rank, 2), comm=c)))
    return tmp_path / "c"


def _field(name: str, value: Any) -> Callable[[Any], None]:
    return lambda document: document["index"].__setitem__(name, value)


def _file(column: str, value: Any) -> Callable[[Any], None]:
    return lambda document: document["index"]["files"].__setitem__(column, value)


def _spec(**changes: Any) -> Callable[[Any], None]:
    return lambda document: document["index"]["specs"][0].update(changes)


def _leaf(number: int, at: int, value: Any) -> Callable[[Any], None]:
    return lambda document: document["index"]["leaves"][number].__setitem__(at, value)


def _nest(levels: int, node: Any = None) -> Any:
    for _ in range(levels):
        node = ["list", [node]]
    return node


def _mark(number: int) -> Any:
    """Stands for a piece of the structure that lies beside it."""
    return ["custom", "", number, [], []]


HUGE = 1 << 60
COLUMNS = ("rank", "part", "stream", "nbytes", "header")
ONE_FILE = {"rank": 0, "part": 0, "stream": 0, "nbytes": 9000, "header": 4096}
TWICE = [0, 0, 2]
"""The column 0, 0."""
MANY = [[0, 0, 1 << 24]]
CUTS = [[0, 6, 3]], [[0, 5, 2]]
"""Those of the array in pieces: rows 0, 6, 12, columns 0, 5."""


def _boxes(rows: Any, heights: Any, ranks: Any = (0, 1, 2), starts: Any = TWICE) -> Callable[[Any], None]:
    """Boxes of full width in the place of the grid of the array in pieces."""
    return _leaf(1, 3, ["b", [[rows], [TWICE]], [[heights], [[5, 0, 2]]], [ranks], [starts]])


def _grid(*cuts: Any, ranks: Any = (0, 1, 2), starts: Any = TWICE) -> Callable[[Any], None]:
    return _leaf(1, 3, ["g", cuts, [ranks], [starts]])


def _files(columns: dict[str, Any]) -> Callable[[Any], None]:
    return _field("files", columns)


def _view(offset: int, stride: int) -> Callable[[Any], None]:
    return lambda document: document["index"]["leaves"].__setitem__(3, ["t", 2, 2, [offset, [stride]]])


def _consistent_but_huge(document: Any) -> None:
    document["index"]["specs"][0].update(shape=[1 << 40])
    document["index"]["files"].update(nbytes=[[1 << 41, 0, 2]])


HOSTILE: dict[str, Callable[[Any], None]] = {
    "file name outside": _field("save_id", "../../../../etc"),
    "slashes in the save id": _field("save_id", "0123456/89abcdef"),
    "long save id": _field("save_id", "a" * 100_000),
    "no world": _field("world", 0),
    "huge world": _field("world", HUGE),
    "negative world": _field("world", -2),
    "deep structure": _field("structure", _nest(400)),
    "deeper than others are": _field("structure", _nest(150)),
    "deeper by a shared part": lambda document: document["index"].update(
        structure=_nest(150, _mark(0)), shared=[_nest(150)]
    ),
    "shared parts that hold each other": lambda document: document["index"].update(
        structure=_mark(0), shared=[_nest(1, _mark(n + 1)) for n in range(20_000)] + [_nest(2)]
    ),
    "a shared part in many places": lambda document: document["index"].update(
        structure=["list", [_mark(0)] * 1000], shared=[["list", [_mark(1)] * 1000], ["list", [None] * 1000]]
    ),
    "other structure": _field("structure", ["list", [None]]),
    "leaf too few": lambda document: document["index"]["leaves"].pop(),
    "leaf too many": lambda document: document["index"]["leaves"].append(["v", 1]),
    "unknown record": _leaf(0, 0, "zip"),
    "unknown dtype": _spec(dtype="float1024"),
    "object dtype": _spec(dtype="object"),
    "huge shape": _spec(shape=[HUGE]),
    "huge product": _spec(shape=[1 << 20] * 3),
    "huge but consistent": _consistent_but_huge,
    "negative shape": _spec(shape=[-5000]),
    "many dimensions": _spec(shape=[1] * 100_000),
    "number past 64 bits": _spec(shape=[10**30]),
    "float shape": _spec(shape=[5000.5]),
    "spec out of range": _leaf(0, 1, 99),
    "negative spec": _leaf(0, 1, -1),
    "layout out of range": _leaf(0, 2, 99),
    "chunk outside of the file": _leaf(0, 3, ["w", 0, 1 << 30]),
    "chunk before the file": _leaf(0, 3, ["w", 0, -4096]),
    "chunk past 64 bits": _leaf(0, 3, ["w", 0, 10**30]),
    "chunk of no rank": _leaf(0, 3, ["w", 7, 0]),
    "chunk of a negative rank": _leaf(0, 3, ["w", -1, 0]),
    "no chunks": _leaf(0, 3, ["n"]),
    "overlapping boxes": _boxes(TWICE, [6, 0, 2]),
    "boxes with a gap": _boxes([0, 7, 2], [5, 0, 2]),
    "boxes outside": _boxes([6, 6, 2], [6, 0, 2]),
    "negative boxes": _boxes([-6, 6, 2], [6, 0, 2]),
    "boxes of no size": _boxes([0, 6, 2], [0, 0, 2]),
    "boxes of other dimensions": _leaf(1, 3, ["b", [[TWICE]], [[[6, 0, 2]]], [TWICE], [TWICE]]),
    "endless boxes": _leaf(1, 3, ["b", [MANY, MANY], [[[1, 0, 1 << 24]]] * 2, MANY, MANY]),
    "grid that falls": _grid([[0, -6, 3]], CUTS[1]),
    "grid that ends early": _grid([[0, 3, 3]], CUTS[1]),
    "grid past the shape": _grid([[0, 60, 3]], CUTS[1]),
    "grid of endless cells": _grid([[0, 0, HUGE]], CUTS[1], ranks=[0, 0, HUGE], starts=[0, 0, HUGE]),
    "columns that differ in length": _grid(*CUTS, starts=[0, 0, 3]),
    "malformed run": _grid([[0, 6]], CUTS[1]),
    "run of no length": _grid([[0, 6, 0]], CUTS[1]),
    "nested endless run": _grid(*CUTS, ranks=[0, *[1, 1 << 20] * 50]),
    "no files": _files({}),
    "fewer files": _files({name: [[0]] for name in COLUMNS}),
    "endless files": _files(dict.fromkeys(COLUMNS, MANY)),
    "millions of files": _files({name: [[0, int(name == "part"), 1 << 23]] for name in COLUMNS}),
    "one file many times": _files({name: [[value, 0, 1000]] for name, value in ONE_FILE.items()}),
    "files of no rank": _file("rank", [[0, 9, 2]]),
    "files with a lying size": _file("nbytes", [[HUGE, 0, 2]]),
    "files with a negative size": _file("nbytes", [[-1, 0, 2]]),
    "files with a lying header": _file("header", [[8, 0, 2]]),
    "files with a lying stream": _file("stream", [[5000, 0, 2]]),
    "files with a negative stream": _file("stream", [[-5000, 0, 2]]),
    "files with a lying part": _file("part", [[1, 0, 2]]),
    "tie of nothing": _leaf(3, 2, 99),
    "tie of itself": _leaf(3, 2, 3),
    "tie of another shape": _leaf(3, 2, 0),
    "view outside": _view(500, 1),
    "view of endless stride": _view(0, HUGE),
    "view of negative stride": _view(699, -1),
}


def test_the_hostile_index_starts_from_what_is_thought(saved: Path) -> None:
    leaves = msgspec.json.decode((saved / INDEX_NAME).read_bytes())["index"]["leaves"]
    assert [leaf[0] for leaf in leaves[:5]] == ["a", "a", "a", "t", "a"] and leaves[0][1] == 0
    reseal(saved, lambda document: None)
    assert_equal(tc.load(saved, fallback=tc.Fallback(per_rank="take")), whole_tree())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_indices_are_refused_cheaply(saved: Path, name: str) -> None:
    reseal(saved, HOSTILE[name])
    target = whole_tree(seed=9)
    tracemalloc.start()
    try:
        for act in (
            lambda: tc.load(saved, fallback=tc.Fallback(per_rank="take")),
            lambda: tc.load(saved, whole_tree(), fallback=tc.Fallback(per_rank="take")),
            lambda: tc.load_into(saved, target, fallback=tc.Fallback(per_rank="take")),
        ):
            with pytest.raises((tc.FormatError, tc.CorruptError, tc.MismatchError)) as caught:
                act()
            assert caught.value.expected and caught.value.found and len(str(caught.value)) < 2000
        with contextlib.suppress(tc.FormatError, tc.CorruptError):
            assert not tc.verify(saved).ok
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20, f"{peak >> 20} MiB"
    assert_equal(target, whole_tree(seed=9))


VALUES: dict[str, Any] = {
    "unknown kind": ["nuke", []],
    "code": ["enum", ["os:system", None, "true"]],
    "endless number": ["Fraction", ["1e999999999"]],
    "endless power": ["Decimal", ["1e999999999999999999999"]],
    "wrong arguments": ["range", [1, 2, 3, 4, 5]],
    "object dtype": ["numpy", ["|O", "AAAAAAAAAAA="]],
    "no base64": ["bytes", ["%%%"]],
    "unhashable": ["set", [["list", []]]],
    "zone outside": ["ZoneInfo", ["../../../../etc/passwd"]],
    "nested": ["list", [["list", [["list", [["nope", []]]]]]]],
    "torch call": ["torch.load", ["x"]],
    "number as text": ["int", ["zz"]],
    "wrong types": ["timedelta", [None, "x", 3]],
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", VALUES)
def test_hostile_values_are_refused(saved: Path, name: str) -> None:
    reseal(saved, _leaf(5, 1, VALUES[name]))
    assert tc.inspect(saved).entries[5].path == "step"
    target = whole_tree(seed=9)
    for act in (
        lambda: tc.load(saved, fallback=tc.Fallback(per_rank="take")),
        lambda: tc.load_into(saved, target, fallback=tc.Fallback(per_rank="take")),
    ):
        with pytest.raises((tc.FormatError, tc.MismatchError)) as caught:
            act()
        assert caught.value.path == "step"
    assert_equal(target, whole_tree(seed=9))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["__metadata__"].update(rank="-1"),
        lambda h: h["__metadata__"].update(rank="7"),
        lambda h: h["__metadata__"].update(world="99999999999999999999999999"),
        lambda h: h["__metadata__"].update(stream="99999999999999999999999999"),
        lambda h: h["__metadata__"].update(part="-5"),
        lambda h: h["__metadata__"].update(block="0"),
        lambda h: h["__metadata__"].update(block="-4096"),
        lambda h: h["__metadata__"].update(block="5000"),
        lambda h: h["__metadata__"].update(block=str(1 << 62)),
        lambda h: h["__metadata__"].update(hashes=""),
        lambda h: h["__metadata__"].update(hashes="AAAA"),
        lambda h: h["__metadata__"].update(partial="{"),
        lambda h: h["__metadata__"].update(dtypes='{"replica":"float1024"}'),
        lambda h: h["__metadata__"].pop("hashes"),
        lambda h: h.update(extra={"dtype": "U8", "shape": [1 << 60], "data_offsets": [0, 1 << 60]}),
        lambda h: h.update(extra={"dtype": "U8", "shape": [-1], "data_offsets": [0, 0]}),
        lambda h: h.update(extra={"dtype": "U8", "shape": [10**30], "data_offsets": [0, 10**30]}),
        lambda h: h.pop("replica"),
    ],
)
def test_hostile_shard_headers_are_refused(saved: Path, change: Callable[[Any], None]) -> None:
    shard = shards_of(saved)[0]
    reseal_shard(shard, change)
    report = tc.verify(saved)
    assert not report.ok
    os.unlink(saved / INDEX_NAME)
    with pytest.raises(tc.CheckpointError):
        tc.rebuild_index(saved)
    assert not (saved / INDEX_NAME).exists()
