"""Lightning on `treeckpt.integrations.lightning`: killed inside a save, a run resumes bit for bit."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import treeckpt as tc
from tests.helpers.framework_job import launch, writers_stopped

ROOT = Path(__file__).parents[2]
STEPS = 7


class Job(NamedTuple):
    """How a run is begun and resumed."""

    strategy: str
    ranks: int = 2
    resumed: int = 2
    """The number of ranks that resume."""
    package: str = "lightning.pytorch"
    options: tuple[str, ...] = ()


JOBS = (
    Job("auto", 1, 1, "pytorch_lightning", ("--dropout", "0.5")),
    Job("auto", 1, 1, options=("--dropout", "0.5", "--save-last", "link")),
    Job("ddp", options=("--dropout", "0.5", "--kill-in", "last")),
    Job("ddp-all", options=("--dropout", "0.5", "--own-order")),
    Job("ddp-all", 2, 1, options=("--kill-in", "last")),
    Job("fsdp", 2, 2, "pytorch_lightning", ("--dropout", "0.5")),
    Job("fsdp", 2, 1, options=("--kill-in", "last")),
    Job("fsdp", 1, 2),
)


def run(job: Job, ranks: int, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    directory.mkdir(exist_ok=True)
    given = ("--package", job.package, "--strategy", job.strategy, *job.options, *arguments)
    return launch("tests.integrations.lightning_job", ranks, str(directory), f"{STEPS}", *given)


def outcome(directory: Path, ranks: int) -> dict[str, Any]:
    """Returns what the ranks of a run have, with the losses of all."""
    found = [torch.load(directory / f"outcome-{rank}.pt") for rank in range(ranks)]
    return found[0] | {"losses": {step: loss for one in found for step, loss in one["losses"].items()}}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.package}-{job.strategy}-{job.ranks}-{job.resumed}")
def test_a_run_killed_in_a_save_resumes_bit_for_bit(job: Job, tmp_path: Path) -> None:
    if importlib.util.find_spec(job.package.partition(".")[0]) is None:
        pytest.skip(f"{job.package} is not installed: `make test-frameworks` installs it")
    whole = run(job, job.ranks, tmp_path / "whole")
    assert whole.returncode == 0, whole.stdout
    killed = run(job, job.ranks, tmp_path / "killed", "--kill-at", "4")
    assert "SIGKILL" in killed.stdout and not list((tmp_path / "killed").glob("outcome-*.pt")), killed.stdout
    resumed = run(job, job.resumed, tmp_path / "killed")
    assert resumed.returncode == 0, resumed.stdout
    one, other = outcome(tmp_path / "whole", job.ranks), outcome(tmp_path / "killed", job.resumed)
    steps = {step for step, _ in other["losses"]}
    assert steps in (set(range(2, STEPS)), set(range(4, STEPS)))
    assert all(one["losses"][step] == loss for step, loss in other["losses"].items())
    assert all(torch.equal(other["weights"][key], weight) for key, weight in one["weights"].items())
    kept = {Path(path).name for path in other["kept"]}
    assert {name.replace("-v1", "") for name in kept} == {Path(path).name for path in one["kept"]}
    assert all(tc.verify(tmp_path / "killed" / name).ok for name in kept)
    assert not (tmp_path / "killed" / "step=2.ckpt").exists(), "Lightning has removed it"
    saving = 1 if job.strategy == "ddp" else job.ranks
    for step in one["kept"]:
        assert len(list(Path(step).glob("shard-*"))) == saving
    link = "link" in job.options
    assert all(path.is_symlink() == link for path in (tmp_path / "whole").glob("last*"))


@pytest.fixture
def io() -> Iterator[Any]:
    pytest.importorskip("lightning", reason="`make test-frameworks` installs it")
    from treeckpt.integrations.lightning import TreeckptIO

    made = TreeckptIO()
    yield made
    with contextlib.suppress(tc.TreeckptError):
        made.teardown()


def checkpoint(step: int) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((1000,), float(step))}, "global_step": step}


def kill_next_save(io: Any, directory: Path, name: str) -> None:
    """Begins a save whose writer is killed, so that nothing is committed."""
    io.save_checkpoint(checkpoint(0), directory / "first.ckpt")
    io.load_checkpoint(directory / "first.ckpt")  # it is there, and so is its writer
    with contextlib.suppress(ProcessLookupError), writers_stopped() as writers:
        io.save_checkpoint(checkpoint(1), directory / name)
        for pid in writers:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_error_of_a_save_in_the_background_is_raised_by_the_next_save_or_at_the_end(
    io: Any, tmp_path: Path
) -> None:
    kill_next_save(io, tmp_path, "second.ckpt")
    with pytest.raises(tc.CheckpointError, match=r"second\.ckpt.*writer"):
        io.save_checkpoint(checkpoint(2), tmp_path / "third.ckpt")
    kill_next_save(io, tmp_path, "second.ckpt")
    with pytest.raises(tc.CheckpointError, match=r"second\.ckpt.*writer"):
        io.teardown()


@pytest.mark.slow
@pytest.mark.parametrize("link", [False, True])
def test_a_name_whose_save_was_killed_loads_the_newest_beside_it(
    io: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, link: bool
) -> None:
    kill_next_save(io, tmp_path, "second.ckpt")
    with pytest.raises(tc.CheckpointError):
        io.teardown()
    (tmp_path / "last.ckpt").symlink_to("second.ckpt")
    found = io.load_checkpoint(tmp_path / ("last.ckpt" if link else "second.ckpt"))
    assert found["global_step"] == 0 and "first.ckpt is loaded" in caplog.text
    with pytest.raises(tc.CheckpointNotFound, match=r"other\.ckpt"):
        io.load_checkpoint(tmp_path / "other.ckpt")


@pytest.mark.slow
def test_the_link_to_a_first_save_that_was_killed_is_named_for_removal(io: Any, tmp_path: Path) -> None:
    (tmp_path / "first.ckpt").mkdir()
    (tmp_path / "last.ckpt").symlink_to("first.ckpt")
    with pytest.raises(tc.CheckpointNotFound, match=r"first\.ckpt.*unfinished.*anew, remove .*/last\.ckpt"):
        io.load_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.slow
def test_what_is_removed_stays_until_the_saves_before_are_committed(io: Any, tmp_path: Path) -> None:
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    io.load_checkpoint(tmp_path / "1.ckpt")
    with writers_stopped():
        io.save_checkpoint(checkpoint(2), tmp_path / "2.ckpt")
        io.remove_checkpoint(tmp_path / "1.ckpt")
        assert tc.exists(tmp_path / "1.ckpt") and not tc.exists(tmp_path / "2.ckpt")
    io.teardown()
    assert tc.exists(tmp_path / "2.ckpt") and not (tmp_path / "1.ckpt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_modules_and_fabrics_load_checkpoints_and_files(package: str, tmp_path: Path) -> None:
    """In a process of its own, as an adapter is for the package that is imported first."""
    pytest.importorskip(package, reason="`make test-frameworks` installs it")
    command = [sys.executable, "-m", "tests.integrations.lightning_loads", package, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=False, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
