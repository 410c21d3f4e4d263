"""`rm` deletes steps whatever their state, all of them or none, and asks before."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
from functools import partial
from pathlib import Path

import pytest

import treeckpt as tc
from tests.helpers.s3 import S3, wait_for_late_requests
from treeckpt._cli.main import main
from treeckpt._core.format.files import step_name
from treeckpt._runs.run import RunDirectory


def step_at(run: Path, step: int) -> Path:
    return run / step_name(step)


def make_run(run: Path) -> Path:
    """Steps 1 and 2 are complete, 3 has a truncated shard, 4 an index of other bytes, 5 none; 6 is pinned."""
    for step in range(1, 7):
        tc.save(step_at(run, step), {"n": list(range(step))}, step=step)
    shard = next(step_at(run, 3).glob("shard*"))
    shard.write_bytes(shard.read_bytes()[:-3])
    (step_at(run, 4) / "index.json").write_bytes(b"{broken")
    (step_at(run, 5) / "index.json").unlink()
    RunDirectory(run).pin(6)
    return run


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.iterdir())


def test_every_state_goes_with_yes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert main(["gc", str(run), "--keep-last", "9"]) == 0
    assert steps(run) == [1, 2, 3, 4, 5, 6], "none of them ever goes by itself"
    capsys.readouterr()
    assert main(["rm", str(run), "3", "step_00000004", "5", "--yes"]) == 0
    told = capsys.readouterr().out
    assert steps(run) == [1, 2, 6] and "damaged" in told and "partial" in told and "3 steps removed" in told
    assert main(["rm", str(run), "1", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"][0]["name"] == step_name(1)
    assert steps(run) == [2, 6]


@pytest.mark.parametrize(("others", "code", "why"), [([99], 2, "step 99|no checkpoint"), ([6], 1, "Unpin it first")])
def test_nothing_goes_if_one_of_the_steps_may_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], others: list[int], code: int, why: str
) -> None:
    run = make_run(tmp_path / "run")
    assert main(["rm", str(run), "1", *map(str, others), "3", "--yes"]) == code
    assert any(word in " ".join(capsys.readouterr().err.split()) for word in why.split("|"))
    assert steps(run) == [1, 2, 3, 4, 5, 6]


def test_a_step_that_is_read_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    with tc.Manager(run).reading(2):
        assert main(["rm", str(run), "2", "--yes"]) == 1
    assert "being read" in capsys.readouterr().err and 2 in steps(run)


def test_without_a_terminal_and_yes_nothing_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert main(["rm", str(run), "1"]) == 2
    assert "--yes" in capsys.readouterr().err and 1 in steps(run)


@pytest.mark.parametrize(("answer", "left"), [(b"y\n", [1, 2, 4, 5, 6]), (b"\n", [1, 2, 3, 4, 5, 6])])
def test_a_terminal_is_asked_with_a_list_of_what_goes(
    tmp_path: Path,
    answer: bytes,
    left: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run(tmp_path / "run")
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    with open(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        assert main(["rm", str(run), "3"]) == (0 if 3 not in left else 2)
    os.close(ours)
    out, err = capsys.readouterr()
    assert "step_00000003" in out and "damaged" in out and "Delete 1 step?" in err
    assert steps(run) == left


def test_of_a_step_that_is_a_link_the_link_goes(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "elsewhere"
    tc.save(other, {"n": 1}, step=7)
    tc.save(step_at(run, 8), {"n": 1}, step=8)
    step_at(run, 7).symlink_to(other)
    (run / step_name(9)).symlink_to(tmp_path / "nowhere")
    assert main(["rm", str(run), "7", "--yes"]) == 0
    assert steps(run) == [8, 9] and tc.load(other) == {"n": 1}
    assert main(["rm", str(run), "9", "--yes"]) == 0
    assert steps(run) == [8]


def test_a_manager_deletes_a_damaged_step_by_force_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with tc.Manager(run) as manager:
        for step in (3, 4, 5):
            with pytest.raises(tc.CheckpointError, match="force=True"):
                manager.delete(step)
            manager.delete(step, force=True)
        with pytest.raises(tc.CheckpointError, match="Unpin it first"):
            manager.delete(6, force=True)
        with pytest.raises(tc.CheckpointNotFound):
            manager.delete(77, force=True)
    assert steps(run) == [1, 2, 6]


def test_steps_in_a_bucket_go(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.rules()
    url = s3.url()
    for step in (1, 2, 3):
        tc.save(f"{url}/{step_name(step)}", {"n": step}, step=step)
    tc.ObjectStore(f"{url}/{step_name(2)}").publish("index.json", b"{broken", replace=True)
    tc.ObjectStore(f"{url}/{step_name(3)}").delete("index.json")
    wait_for_late_requests()  # the records of the saves are deleted
    assert main(["rm", url, "2", "3", "--yes"]) == 0
    wait_for_late_requests()
    assert tc.ObjectRun(url).names() == [step_name(1)]


@pytest.mark.parametrize("arguments", [["--keep-last", "1"], []])
def test_gc_of_a_directory_of_runs_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    for name in ("lr1", "lr2"):
        tc.save(tmp_path / name / step_name(1), {"n": 1}, step=1)
    assert main(["gc", str(tmp_path), *arguments]) == 2
    assert "Name one of them: lr1, lr2" in " ".join(capsys.readouterr().err.split())
    assert main(["rm", str(tmp_path), "1", "--yes"]) == 2


def test_gc_with_a_step_that_is_not_there_removes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert main(["gc", str(run), "--steps", "1,12"]) == 2
    assert "has no step 12" in " ".join(capsys.readouterr().err.split()) and steps(run) == [1, 2, 3, 4, 5, 6]
    assert main(["gc", str(run), "--steps", "1,5"]) == 2, "a step without an index cannot be kept"
    assert steps(run) == [1, 2, 3, 4, 5, 6]


class Answer(io.StringIO):
    """A terminal on which somebody pins a step before the answer."""

    def __init__(self, run: Path, step: int) -> None:
        super().__init__("y\n")
        self._pin = partial(RunDirectory(run).pin, step)

    def isatty(self) -> bool:
        return True

    def readline(self, *_: int) -> str:  # type: ignore[override]
        self._pin()
        return super().readline()


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_what_is_gone_and_what_is_not_is_said_where_one_of_several_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(sys, "stdin", Answer(run, 2))
    assert main(["rm", str(run), "1", "2", "3", *options]) == 1
    out, err = capsys.readouterr()
    assert steps(run) == [2, 4, 5, 6], "the others go"
    assert "step_00000002 was not removed" in " ".join(err.split()) and "Unpin it first" in " ".join(err.split())
    if options:
        found = json.loads(out[out.index("{") :])
        assert [one["name"] for one in found["removed"]] == [step_name(1), step_name(3)]
        assert [one["name"] for one in found["failed"]] == [step_name(2)] and "Unpin" in found["failed"][0]["why"]
    else:
        assert "2 steps removed (step_00000001, step_00000003)" in " ".join(out.split())
