"""Small files that claim to be huge are refused soon and within little memory, by every way of reading them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.world import reseal
from tests.integrity.hostile_files import CASES, save
from treeckpt.convert import convert

MOST = 200 << 20
"""Bytes that a way of reading may take beyond what it takes of an honest checkpoint."""
SOON = 10.0
"""Seconds of computing, on a machine with much else to do: alone each takes less than 2."""
WHOLE = frozenset({"inspect", "load", "load_into", "verify", "show", "diff", "convert", "convert to torch"})
DATA = frozenset({"load", "verify", "convert", "convert to torch", "convert to ours"})
VALUES = frozenset({"load", "verify", "convert to ours"})
REFUSED: dict[str, frozenset[str]] = dict.fromkeys(CASES, WHOLE) | {
    "200 grids of 2^16 cells": DATA,
    "a tie of 2^40 elements": frozenset({"verify", "convert"}),
    "2^12 groups of ranks": frozenset({"verify", "convert"}),
    "2^16 groups of ranks": frozenset({"verify", "convert"}),
    "a set of fractions of one hash": VALUES,
    "a set of integers of one hash": VALUES,
    "a dict of fractions of one hash": VALUES,
    "a header with a hole": DATA | {"load_into", "rebuild"},
    "timings with a hole": frozenset({"verify"}),
    "timings of 2^24 ranks": frozenset({"verify"}),
}
"""The ways that end with an error; the others are right, or show what can be shown."""
SLOWER = frozenset({"2^16 groups of ranks", "a set of fractions of one hash", "a dict of fractions of one hash"})
"""What takes longer, and is read as another case is: fewer groups; a set of integers."""


@pytest.fixture(scope="module")
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, dict[str, Any]]]:
    """What each way of reading each case came to, in a process of its own."""
    directory = tmp_path_factory.mktemp("hostile")
    mine = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == Path(__file__)]
    chosen = [item.callspec.params["case"] for item in mine if "measured" in item.fixturenames]
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrity.hostile_files", str(directory), *chosen]
    where = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=where, timeout=800)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in map(json.loads, done.stdout.splitlines()):
        found.setdefault(row["case"], {})[row["way"]] = row
    assert done.returncode == 0, f"in {list(found)[-1:]}: {done.stderr[-2000:]}"
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOWER else []) for case in CASES]
)
def test_tiny_files_cost_little_however_much_they_claim(measured: Any, case: str) -> None:
    found = measured[case]
    for row in found.values():
        assert not row["error"].startswith("!"), row
        assert row["seconds"] < SOON and row["nbytes"] < MOST, row
    refused = {way for way, row in found.items() if row["error"]}
    assert refused >= REFUSED[case], REFUSED[case] - refused


def test_the_errors_name_what_was_expected_and_found(tmp_path: Path) -> None:
    save(tmp_path / "c")
    CASES["grid of 2^20 cells"](tmp_path / "c")
    with pytest.raises(tc.CorruptError) as caught:
        tc.inspect(tmp_path / "c")
    assert "1048576 chunks" in caught.value.expected and "bytes in all files" in caught.value.found
    assert str(tmp_path / "c") in caught.value.path and caught.value.hint


def test_an_index_of_65536_ranks_is_read_without_its_shards(tmp_path: Path) -> None:
    """As it is copied to a laptop: nothing but the index."""
    save(tmp_path / "c")
    world, leaves = 1 << 16, 400

    def regular(document: Any) -> None:
        index = document["index"]
        every = [[0, 1, world]]
        index["world"] = world
        index["files"] = {name: [[0, 0, world]] for name in ("part", "stream")} | {"rank": every}
        index["files"] |= {"nbytes": [[16 * leaves, 0, world]], "header": [[8192 * 5, 0, world]]}
        index["specs"] = [{"shape": [world, 16], "dtype": "uint8"}]
        index["layouts"] = [["mesh", [[world], every, ["dp"]], [["s", 0]]]]
        cuts = [[[0, 1, world + 1]], [[0, 16, 2]]]
        index["leaves"] = [["a", 0, 0, ["g", cuts, every, [[16 * n, 0, world]]]] for n in range(leaves)]
        index["structure"] = ["dict", [f"layer{n}" for n in range(leaves)], [None] * leaves]

    reseal(tmp_path / "c", regular)
    index = tc.inspect(tmp_path / "c")
    assert len(index.file_list) == world and len(index.chunks_of(index.entries[7])) == world
    with pytest.raises(tc.CorruptError, match="65536 shards"):
        tc.verify(tmp_path / "c")


def test_an_index_with_a_hole_is_made_again_from_the_shards(tmp_path: Path) -> None:
    save(tmp_path / "c")
    CASES["an index with a hole"](tmp_path / "c")
    report = tc.verify(tmp_path / "c", repair=True)
    assert report.ok and report.repairs
    assert tc.load(tmp_path / "c", fallback=tc.Fallback(per_rank="take"))["step"] == 7


def test_small_views_that_repeat_their_bytes_are_converted(tmp_path: Path) -> None:
    array = np.arange(12.0)
    tree = {"a": array, "rows": np.broadcast_to(array, (500, 12))}
    tc.save(tmp_path / "c", tree)
    assert tc.load(tmp_path / "c")["rows"].tobytes() == tree["rows"].tobytes()
    convert(tmp_path / "c", tmp_path / "c.safetensors")


def test_a_view_without_its_array_takes_no_more_memory_than_the_files_pay_for(tmp_path: Path) -> None:
    save(tmp_path / "c")
    CASES["a tie of 2^40 elements"](tmp_path / "c")
    with pytest.raises(tc.MismatchError) as caught:
        tc.load(tmp_path / "c", select="b", fallback=tc.Fallback(per_rank="take"))
    assert "b" in caught.value.path and "1099511627776" in caught.value.found
    found = tc.load(tmp_path / "c", fallback=tc.Fallback(per_rank="take"))
    assert found["b"].shape == (1 << 20, 1 << 20) and found["b"].base is not None
