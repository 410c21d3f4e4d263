"""Every file that is written has the permissions that the umask of the program leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import treeckpt as tc


@pytest.fixture(params=[0o002, 0o027])
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


TREE = {"w": np.arange(300_000.0), "n": 1}


def modes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("writer", [None, "thread", "process"])
def test_shards_index_sidecars_and_records_follow_the_umask(tmp_path: Path, mode: int, writer: str | None) -> None:
    background = tc.BackgroundOptions(writer=writer) if writer else False
    with tc.Manager(tmp_path / "run", background=background) as made:
        made.save(1, TREE, pin=True, files={"config.json": b"{}"})
    found = modes(tmp_path)
    assert {name.split(".")[0].split("-")[0] for name in found} == {
        "config", "ended", "file", "index", "pinned", "shard", "timings",
    }  # fmt: skip
    assert set(found.values()) == {mode}


def test_files_of_other_formats_follow_the_umask(tmp_path: Path, mode: int) -> None:
    tc.save(tmp_path / "c", {"w": TREE["w"]})
    tc.convert.to_safetensors(tmp_path / "c", tmp_path / "s")
    tc.convert.to_torch_file(tmp_path / "c", tmp_path / "t.pt")
    tc.convert.to_dcp(tmp_path / "c", tmp_path / "d")
    assert set(modes(tmp_path).values()) == {mode}
