"""Conversions that fail, die or are shared: what appears is whole, and nothing else stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.forked_process import ForkedProcess
from tests.helpers.training_trees import assert_same, training_tree
from tests.helpers.world import errors_of, on_ranks
from treeckpt.convert import _output

convert = tc.convert.convert
TARGETS = ("torch", "dcp", "safetensors", "treeckpt")


def _big() -> dict[str, Any]:
    large = {f"a{n}": torch.full((1200, 1000), float(n)) for n in range(4)}
    return {**large, "b": torch.arange(100_000), "c": [torch.ones(50, 50), torch.ones(3)]}


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_bytes_and_write_what_one_would(tmp_path: Path, to: str, world: int) -> None:
    torch.save(_big(), tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "one", to=to)
    outcomes = on_ranks(world, lambda comm: convert(tmp_path / "in.pt", tmp_path / "many", to=to, comm=comm))
    assert errors_of(outcomes) == [None] * world
    shares = [outcome.value.written_nbytes for outcome in outcomes]
    total = sum(t.nbytes for t in (*list(_big().values())[:-1], *_big()["c"]))
    assert sum(shares) == total and max(shares) < 0.75 * total, "each writes a share"
    if to == "treeckpt":
        assert_same(tc.load(tmp_path / "many"), tc.load(tmp_path / "one"))
        assert tc.verify(tmp_path / "many").ok
    elif to == "torch":
        assert (tmp_path / "many").read_bytes() == (tmp_path / "one").read_bytes()
        assert zipfile.ZipFile(tmp_path / "many").testzip() is None
    else:
        names = sorted(path.name for path in (tmp_path / "one").iterdir())
        assert names == sorted(path.name for path in (tmp_path / "many").iterdir())
        for name in names:
            assert (tmp_path / "many" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
    assert not list(tmp_path.glob(".*"))


def test_one_rank_that_fails_ends_it_for_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(_big(), tmp_path / "in.pt")
    original = _output.write_part

    def fails(fd: int, part: Any, tile: int) -> None:
        if part.path == "b":
            raise OSError(28, "No space left on device")
        original(fd, part, tile)

    monkeypatch.setattr(_output, "write_part", fails)
    outcomes = on_ranks(2, lambda comm: convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", comm=comm))
    for error in errors_of(outcomes):
        assert isinstance(error, tc.RankError) and len(error.ranks) == 1
        assert "No space left" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


def test_ranks_that_convert_different_things_are_told(tmp_path: Path) -> None:
    torch.save(_big(), tmp_path / "in.pt")
    outcomes = on_ranks(
        2, lambda comm: convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", exclude="ab"[comm.rank], comm=comm)
    )
    for error in errors_of(outcomes):
        assert isinstance(error, tc.MismatchError) and "same conversion on every rank" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


@pytest.mark.parametrize("to", ["torch", "dcp", "safetensors"])
def test_a_changed_byte_of_the_source_ends_it_and_leaves_nothing(tmp_path: Path, to: str) -> None:
    tc.save(tmp_path / "one", {"w": np.arange(100_000)})
    shard = next((tmp_path / "one").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(tc.CorruptError, match=r"w: .*match their checksum"):
        convert(tmp_path / "one", tmp_path / "out", to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_what_is_there_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt")
    for name, to in (("f.pt", "torch"), ("f.safetensors", "safetensors")):
        (tmp_path / name).write_text("mine")
        with pytest.raises(tc.CheckpointExists, match="overwrite"):
            convert(tmp_path / "in.pt", tmp_path / name)
        assert (tmp_path / name).read_text() == "mine"
        assert convert(tmp_path / "in.pt", tmp_path / name, overwrite=True).format == to
    folder = tmp_path / "folder"
    folder.mkdir()
    convert(tmp_path / "in.pt", folder, to="dcp")  # an empty one is taken
    with pytest.raises(tc.CheckpointExists, match="remove it first"):
        convert(tmp_path / "in.pt", folder, to="dcp", overwrite=True)
    with pytest.raises(tc.CheckpointExists, match="a directory"):
        convert(tmp_path / "in.pt", folder, to="torch", overwrite=True)
    convert(tmp_path / "in.pt", tmp_path / "ours")
    with pytest.raises(tc.CheckpointExists):
        convert(tmp_path / "in.pt", tmp_path / "ours")
    convert(tmp_path / "in.pt", tmp_path / "ours", overwrite=True)


def _convert_slowly(source: Path, out: Path, to: str) -> None:
    """Converts in a fork; waits after each part that is written until its input ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kept = _output.write_part

    def slow(fd: int, part: Any, tile: int) -> None:
        kept(fd, part, tile)
        os.write(1, b"wrote\n")  # at once: two threads write
        sys.stdin.readline()

    _output.write_part = slow
    convert(source, out, to=to)


@pytest.mark.parametrize(("to", "blow"), [("dcp", signal.SIGKILL), ("torch", signal.SIGINT)])
def test_a_killed_conversion_leaves_nothing_that_counts_and_the_next_clears_it(
    tmp_path: Path, to: str, blow: signal.Signals
) -> None:
    torch.save({"w": torch.ones(2), "v": torch.ones(1000)}, tmp_path / "in.pt")
    child = ForkedProcess(partial(_convert_slowly, tmp_path / "in.pt", tmp_path / "out", to))
    try:
        assert child.line() == "wrote"
        assert list(tmp_path.glob(".out.*.tmp")) and not (tmp_path / "out").exists()
        convert(tmp_path / "in.pt", tmp_path / "out", to=to)  # another one beside it: neither disturbs the other
        assert list(tmp_path.glob(".out.*.tmp")), "its place is not taken for litter while it lives"
        child.send_signal(blow)
        time.sleep(0.05)
        child.stdin.close()  # the interrupted one may go on to its end
        told = child.stdout.read()  # until it has ended
    finally:
        child.end()
    if blow == signal.SIGINT:
        assert not list(tmp_path.glob(".*")), f"it cleared up after itself: {told}"
    else:
        assert list(tmp_path.glob(".out.*.tmp"))
        os.rename(tmp_path / "out", tmp_path / "first")
        convert(tmp_path / "in.pt", tmp_path / "out", to=to)
    assert not list(tmp_path.glob(".*"))
    convert(tmp_path / "out", tmp_path / "back")
    assert_same(tc.load(tmp_path / "back"), torch.load(tmp_path / "in.pt"))


def test_a_large_model_takes_no_more_memory_than_the_budget(tmp_path: Path) -> None:
    budget, mebibytes = 56 << 20, 224
    root = str(Path(tc.__file__).parent.parent)
    script = str(Path(__file__).parent / "memory_child.py")
    path = os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))
    found = subprocess.run(
        [sys.executable, "-W", "ignore", script, str(tmp_path), str(mebibytes), str(budget)],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    grown = json.loads(found.stdout)
    assert len(grown) == 4 and all(nbytes <= budget for nbytes in grown.values()), grown
    source, back = torch.load(tmp_path / "source.pt", mmap=True), torch.load(tmp_path / "back.pt", mmap=True)
    for name, tensor in source["model"].items():
        assert torch.equal(back[name][:5000:7], tensor[:5000:7].bfloat16()), name


def test_every_leaf_of_a_training_state_survives_all_formats_in_a_row(tmp_path: Path) -> None:
    tree = {key: value for key, value in training_tree().items() if key not in ("parameter", "optimizer")}
    torch.save(tree, tmp_path / "0.pt")
    steps = ("1", "2.pt", "3", "4")
    kinds = ("treeckpt", "torch", "dcp", "treeckpt")
    before = "0.pt"
    for name, to in zip(steps, kinds, strict=True):
        convert(tmp_path / before, tmp_path / name, to=to)
        before = name
    back = tc.load(tmp_path / before)
    assert_same({key: back[key] for key in tree}, tree)


def test_sidecar_files_come_along_and_none_of_another_content_is_replaced_unless_asked(tmp_path: Path) -> None:
    files = {"config.json": b'{"n": 1}', "tokenizer.model": bytes(range(256))}
    tc.save(tmp_path / "one", {"w": torch.ones(2)}, files=files)
    for to in ("dcp", "safetensors"):
        report = convert(tmp_path / "one", tmp_path / to, to=to)
        assert {name: (tmp_path / to / name).read_bytes() for name in files} == files
        assert set(files) < set(report.files) and not [note for note in report.notes if note.path in files]
    place = tmp_path / "export"
    for name in ("f.pt", "f.safetensors"):
        convert(tmp_path / "one", place / name)  # the second time they are there already
    assert {name: (place / name).read_bytes() for name in files} == files
    (place / "config.json").write_text("mine")
    for dry_run in (True, False):
        with pytest.raises(tc.CheckpointExists, match=r"config\.json: .*written beside g\.pt, found another one"):
            convert(tmp_path / "one", place / "g.pt", dry_run=dry_run)
    assert (place / "config.json").read_text() == "mine" and not (place / "g.pt").exists()
    convert(tmp_path / "one", place / "g.pt", overwrite=True)
    assert (place / "config.json").read_bytes() == files["config.json"]
    assert sorted(path.name for path in place.iterdir()) == sorted([*files, "f.pt", "f.safetensors", "g.pt"])


def test_a_sidecar_file_with_a_name_of_the_format_is_named_and_left(tmp_path: Path) -> None:
    files = {"Model.safetensors": b"x", "PART_000.pt": b"x", "config.json": b"{}"}
    tc.save(tmp_path / "one", {"w": torch.ones(2)}, files=files)
    report = convert(tmp_path / "one", tmp_path / "hub", to="safetensors")
    assert [note.path for note in report.notes if "sidecar" in note.found] == ["Model.safetensors", "PART_000.pt"]
    assert sorted(path.name for path in (tmp_path / "hub").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("sidecar", ["weights.pt", "Weights.PT"])
def test_a_sidecar_file_of_the_name_of_the_destination_is_named_and_left(tmp_path: Path, sidecar: str) -> None:
    tc.save(tmp_path / "c", {"w": np.ones(3)}, files={sidecar: b"other", "config.json": b"{}"})
    report = tc.convert.convert(tmp_path / "c", tmp_path / "to" / "weights.pt", lossy=True)
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["config.json", "weights.pt"]
    assert [note.path for note in report.notes if "sidecar" in note.found] == [sidecar]
    assert torch.load(tmp_path / "to" / "weights.pt")["w"].tolist() == [1, 1, 1]


def test_small_files_beside_those_of_another_program_come_along_and_others_are_named(tmp_path: Path) -> None:
    convert_from = tmp_path / "hub"
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", convert_from, to="safetensors")
    for name in ("config.json", "tokenizer.model", "weights.gguf", ".hidden"):
        (convert_from / name).write_bytes(name.encode())
    report = convert(convert_from, tmp_path / "ours")
    names = [sidecar.name for sidecar in tc.inspect(tmp_path / "ours").sidecars]
    assert names == ["config.json", "tokenizer.model"]
    assert [note.path for note in report.notes if "beside" in note.found] == ["weights.gguf"]


def test_sidecar_files_beside_a_file_go_again_where_it_cannot_be_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tc.save(tmp_path / "one", {"w": torch.ones(2)}, files={"config.json": b"{}"})
    original = Path.replace

    def fails(self: Path, target: Any) -> Any:
        if Path(target).name == "new.pt":
            raise OSError(28, "No space left on device")
        return original(self, target)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(tc.TreeckptError, match="No space left"):
        convert(tmp_path / "one", tmp_path / "export" / "new.pt")
    assert not list((tmp_path / "export").iterdir())
