"""Another program's checkpoint is read in place; what cannot do that names it, and the call that converts it works."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import treeckpt as tc
from tests.helpers.hfai_parts import write_parts
from treeckpt._cli.main import main
from treeckpt._core.format.files import step_name

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROOT = Path(__file__).parents[2]
STATE = {"w": torch.arange(6.0), "b": torch.ones(2)}


def torch_file(path: Path) -> Path:
    torch.save(STATE, path / "old.pt")
    return path / "old.pt"


def dcp_directory(path: Path) -> Path:
    dcp.save(dict(STATE), checkpoint_id=path / "dcp")
    return path / "dcp"


def safetensors_file(path: Path) -> Path:
    safetensors.torch.save_file(STATE, path / "model.safetensors")
    return path / "model.safetensors"


def hub_directory(path: Path) -> Path:
    """As the cache of the hub is: links to files that lie elsewhere."""
    (path / "hub").mkdir()
    (path / "blob").mkdir()
    (path / "hub" / "config.json").write_text("{}")
    (path / "hub" / "model.safetensors").symlink_to(safetensors_file(path / "blob"))
    return path / "hub"


def hfai_directory(path: Path) -> Path:
    write_parts(path / "hfai", {"model": [STATE], "optimizer": []}, {}, 2)
    return path / "hfai"


def paddle_directory(path: Path) -> Path:
    shutil.copytree(ROOT / "golden/paddle/two", path / "paddle")
    return path / "paddle"


KINDS = {
    "torch.save": torch_file,
    "torch.distributed.checkpoint": dcp_directory,
    "safetensors": safetensors_file,
    "a directory of safetensors files": hub_directory,
    "hfai.checkpoint": hfai_directory,
    "Paddle": paddle_directory,
}
WAYS: dict[str, Callable[[Path], Any]] = {
    "load": tc.load,
    "like": lambda path: tc.load(path, dict.fromkeys(tc.load(path), ...)),
    "load_into": lambda path: tc.load_into(path, tc.load(path, read=tc.ReadOptions(copy=True))).loaded,
    "inspect": lambda path: tc.inspect(path).by_path,
    "bank": lambda path: tc.load([path, path]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_read_in_place_and_a_run_of_it_is_named_with_the_call_that_converts_it(tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path)
    for name, way in WAYS.items():
        assert way(path), name
    with pytest.raises(tc.FormatError) as refused:
        tc.verify(path)
    assert kind in refused.value.found and str(path) in str(refused.value)
    with pytest.raises(tc.CheckpointNotFound) as caught:
        tc.Manager(path, background=False).restore()
    assert kind in caught.value.found and str(path) in str(caught.value)
    call = re.search(r"tc\.convert\.convert\((.*), 'NEW'\)", caught.value.hint)
    assert call is not None and call[1] == repr(str(path)), caught.value.hint
    assert "Check the path" not in str(caught.value)


@pytest.mark.parametrize("kind", ["torch.save", "torch.distributed.checkpoint", "safetensors", "Paddle"])
def test_the_call_that_is_told_works(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = KINDS[kind](tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tc.CheckpointNotFound) as caught:
        tc.Manager(path, background=False).restore()
    call = re.search(r"tc\.convert\.convert\(.*\)", caught.value.hint)
    assert call is not None
    exec(call[0], {"tc": tc})
    assert tc.load("NEW")


@pytest.mark.parametrize("command", [["show"], ["verify"], ["diff"], ["diff", "--values"]])
def test_the_command_line_reads_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    path = str(torch_file(tmp_path))
    code = main([*command, path, *([path] if command[0] == "diff" else [])])
    told = capsys.readouterr()
    if command == ["verify"]:
        assert code != 0 and "found a file of torch.save" in told.err + told.out
    elif command == ["show"]:
        assert code == 0 and "array float32 [6]" in told.out
    else:
        assert code == 0 and "2 leaves alike" in told.out


def test_a_step_of_a_run_that_another_program_wrote_is_told(tmp_path: Path) -> None:
    shutil.copytree(dcp_directory(tmp_path), tmp_path / "run" / step_name(3))
    with pytest.raises(tc.CheckpointNotFound, match=r"torch\.distributed\.checkpoint.*tc\.convert\.convert"):
        tc.Manager(tmp_path / "run", background=False).restore(step=3)


def test_a_bare_pickle_is_told_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(tc.CheckpointNotFound, match=r"bare pickle.*Load it with torch"):
        tc.load(tmp_path / "old.pt")


def test_where_nothing_is_the_path_is_to_be_checked(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(tc.CheckpointNotFound, match="Check the path"):
            tc.load(path)


def said_by_treeckpt(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "treeckpt"]


@pytest.mark.parametrize(
    "kind", ["a directory of safetensors files", "torch.distributed.checkpoint", "hfai.checkpoint"]
)
def test_files_of_another_format_beside_those_that_are_read_are_named(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were left without a word: of `model.safetensors` and `pytorch_model.bin`, the second."""
    path = KINDS[kind](tmp_path)
    wanted = tc.load(path)
    assert not said_by_treeckpt(caplog)
    for name in ("pytorch_model.bin", "optimizer.pt"):
        torch.save(STATE, path / name)
    (path / "notes.txt").write_text("no tensors")
    assert str(tc.load(path)) == str(wanted)
    [said] = said_by_treeckpt(caplog)
    assert str(path) in said and said.count("optimizer.pt, pytorch_model.bin. Give the path of one to load it") == 1
    report = tc.convert.convert(path, tmp_path / "new")
    assert [finding.path for finding in report.notes] == ["optimizer.pt", "pytorch_model.bin"]
    assert main(["convert", str(path), str(tmp_path / "other")]) == 0
    assert "note: pytorch_model.bin: a file beside those read becomes no part of it" in capsys.readouterr().out
    with pytest.raises(tc.CheckpointNotFound, match=r"\(not read: optimizer\.pt, pytorch_model\.bin\)"):
        tc.Manager(path, background=False).restore()
    assert str(tc.load(path / "pytorch_model.bin")) == str(STATE) and len(said_by_treeckpt(caplog)) == 1


def test_safetensors_files_that_the_index_does_not_name_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = hub_directory(tmp_path)
    index = {"weight_map": dict.fromkeys(STATE, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tc.load(path).keys() == STATE.keys() and not said_by_treeckpt(caplog)
    safetensors.torch.save_file(STATE, path / "consolidated.safetensors")
    assert tc.load(path).keys() == STATE.keys() and "these are not: consolidated.safetensors." in caplog.text


def test_a_data_file_of_dcp_is_refused_with_its_directory(tmp_path: Path) -> None:
    """It holds tensors one after the other; the last one was loaded as if it were all."""
    dcp.save({"a": torch.ones(2), "b": torch.zeros(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    for call in (tc.load, tc.inspect, lambda path: tc.convert.convert(path, tmp_path / "new")):
        with pytest.raises(tc.TreeckptError, match=rf"{file.name}"):
            call(file)
    with pytest.raises(tc.CheckpointNotFound, match=rf"a data file of torch.dist.* Give its directory, {file.parent}"):
        tc.load(file)


def test_what_lies_one_or_two_directories_below_the_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "out/files").mkdir(parents=True)
    torch.save({"w": torch.ones(2)}, tmp_path / "out/files/model.pt")
    tc.save(tmp_path / "out/run/step_00000001", {"w": 1}, step=1)
    for path in (tmp_path, tmp_path / "out"):
        with pytest.raises(tc.CheckpointNotFound) as caught:
            tc.load(path)
        below = f"Give one of those below it: {tmp_path}/out/files/model.pt, {tmp_path}/out/run"
        assert below in str(caught.value)
