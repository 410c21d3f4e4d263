"""Pickles that name endless work: each is an error of ours, in little time and memory; honest ones are read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import treeckpt as tc
from tests.helpers.hfai_parts import trained, write_parts
from tests.helpers.limited_reads import SECONDS, LimitedReads
from tests.helpers.pickle_bombs import BOMBS, DIRECTORIES, doubled, huge, name, text, write_bomb

LONG = ("60,000 uuids of one hash",)
"""Those that take more than a second."""


def _check(limited: LimitedReads, path: Path, names: Iterable[str]) -> None:
    failed, slowest = {}, 0.0
    for number, what in enumerate(names):
        source = write_bomb(path / f"{number}.pt", BOMBS[what])
        outcome, told, seconds = limited.outcomes(source, path, ("load",))["load"]
        slowest = max(slowest, seconds)
        if outcome != "ours":
            failed[what] = (outcome, told[:200], seconds)
    assert not failed, failed
    assert slowest < SECONDS


def test_each_is_an_error_of_ours_within_limits(tmp_path: Path, limited: LimitedReads) -> None:
    _check(limited, tmp_path, BOMBS.keys() - LONG)


def test_so_are_those_in_the_metadata_of_directories(tmp_path: Path, limited: LimitedReads) -> None:
    failed = {}
    for number, (what, (file, pickled)) in enumerate(DIRECTORIES.items()):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / file).write_bytes(b"\x80\x02" + pickled + b".")
        (tmp_path / f"{number}" / "__0_0.distcp").write_bytes(bytes(100))
        outcome, told, seconds = limited.outcomes(tmp_path / f"{number}", tmp_path, ("load",))["load"]
        right = "ok" if what == "offsets of one hash" else "ours"  # of nothing: no tensor lies at them
        if outcome != right or seconds > SECONDS:
            failed[what] = (outcome, told[:200], seconds)
    assert not failed, failed


def test_shares_of_tensors_of_no_shape_are_refused(tmp_path: Path, limited: LimitedReads) -> None:
    model, optimizer = trained(0)
    write_parts(tmp_path / "parts", {"model": [model], "optimizer": [optimizer]}, {}, 1)
    for number, shape in enumerate((huge(), doubled(40))):
        share = b"}" + text("w") + shape + b"N\x86s"
        part = {
            "__nshards__": b"K\x01",
            "__version__": text("2.0.0"),
            "optimizer": b"]",
            "model": b"]}" + share + b"\x86a",
        }
        pickled = b"}(" + b"".join(text(key) + value for key, value in part.items()) + b"u"
        write_bomb(tmp_path / "parts" / "PART_000.pt", pickled)
        outcome, told, _ = limited.outcomes(tmp_path / "parts", tmp_path, ("load",))["load"]
        assert outcome == "ours" and ("a torch.Size", "over and over")[number] in told, (number, told)


@pytest.mark.slow
def test_so_are_long_ones(tmp_path: Path, limited: LimitedReads) -> None:
    _check(limited, tmp_path, LONG)


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_honest_objects_of_many_elements_are_read(tmp_path: Path, count: int) -> None:
    """Sets, odd keys, nested dicts under long names and copies of arrays: none comes near what is refused."""
    long = "module." * 40
    tree: dict[str, Any] = {
        "sets": [set(range(n, n + 50)) for n in range(count // 10)],
        "floats": {n / 7: n for n in range(count)},
        "tuples": {(n, f"exp_avg_{n}", (n, n)): n for n in range(count)},
        "same": [{0.5: n, None: n, True: n, -1: n} for n in range(count)],
        "deep": {long: {long: {n: n for n in range(2 * count)}}},
        "bytes": [bytes([n % 256]) * 3_000 for n in range(count // 100)],
    }
    for protocol in (2, 5):
        torch.save(tree, tmp_path / "file.pt", pickle_protocol=protocol)
        assert tc.load(tmp_path / "file.pt") == tree


@pytest.mark.parametrize("called", ["set", "frozenset"])
def test_an_array_in_a_set_is_refused_by_its_path(tmp_path: Path, called: str) -> None:
    array = (
        name("numpy.core.multiarray", "_reconstruct") + b")R(K\x01(K\x01t" + name("numpy", "dtype") + text("u1")
        + b"\x85R\x89C\x01\x00tb"
    )  # fmt: skip
    path = write_bomb(tmp_path / "file.pt", b"}" + text("a") + name("builtins", called) + b"]" + array + b"a\x85Rs")
    with pytest.raises(tc.TreeError, match=rf"a: .*a {called} with"):
        tc.load(path)
