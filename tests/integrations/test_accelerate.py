"""Accelerate on `treeckpt.integrations.accelerate`: killed inside a save, a run resumes bit for bit."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import treeckpt as tc
from tests.helpers.framework_job import launch, writers_stopped

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library
STEPS = 9
KILLED_AT = 8
"""The step in whose save a run is killed: three steps into an epoch of five, the save before is one step into it."""


class Job(NamedTuple):
    """How a run is begun and resumed."""

    ranks: int
    resumed: int
    """The number of ranks that resume."""
    options: tuple[str, ...] = ("--dropout", "0.5")


JOBS = (
    Job(1, 1),
    Job(2, 2),
    Job(2, 2, ("--dropout", "0.5", "--seedable")),
    Job(2, 2, ("--dropout", "0.5", "--dispatch")),
    Job(1, 1, ("--dropout", "0.5", "--skip")),
    Job(2, 2, ("--skip", "--seedable")),
    Job(2, 2, ("--dropout", "0.5", "--fsdp")),
    Job(2, 1, ("--fsdp",)),
    Job(1, 2, ()),
)


def run(job: Job, ranks: int, directory: Path, *arguments: str, steps: int = STEPS) -> subprocess.CompletedProcess[str]:
    directory.mkdir(exist_ok=True)
    given = (str(directory), f"{steps}", *job.options, *arguments)
    return launch("tests.integrations.accelerate_job", ranks, *given)


def outcome(directory: Path, ranks: int) -> dict[str, Any]:
    """Returns what the ranks of a run have, with the losses of all."""
    found = [torch.load(directory / f"outcome-{rank}.pt") for rank in range(ranks)]
    return found[0] | {"losses": {step: loss for one in found for step, loss in one["losses"].items()}}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, (job.ranks, job.resumed, *job.options))))
def test_a_run_killed_in_a_save_resumes_bit_for_bit(job: Job, tmp_path: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed: `make test-frameworks` installs it")
    whole = run(job, job.ranks, tmp_path / "whole")
    assert whole.returncode == 0, whole.stdout
    killed = run(job, job.ranks, tmp_path / "killed", "--kill-at", f"{KILLED_AT}")
    assert "SIGKILL" in killed.stdout and not list((tmp_path / "killed").glob("outcome-*.pt")), killed.stdout
    resized = () if job.resumed == job.ranks else ("--resized",)
    one, losses = outcome(tmp_path / "whole", job.ranks), {}
    for steps, begins, again in ((KILLED_AT, 6, resized), (STEPS, KILLED_AT, ())):
        resumed = run(job, job.resumed, tmp_path / "killed", *again, steps=steps)
        assert resumed.returncode == 0, resumed.stdout
        other = outcome(tmp_path / "killed", job.resumed)
        assert other["resumed_from"] == begins
        losses |= other["losses"]
    assert losses == {step: loss for step, loss in one["losses"].items() if step[0] >= 6} and len(losses) == 6
    assert one["rate"] == other["rate"] and one["scaler"] == other["scaler"]
    assert all(torch.equal(other["weights"][key], weight) for key, weight in one["weights"].items())
    runs = [tc.Manager(tmp_path / name / "checkpoints", name="checkpoint_{step}") for name in ("whole", "killed")]
    assert runs[0].steps() == runs[1].steps() == [2, 3]


def test_killed_inside_a_save_a_run_goes_on_from_the_one_before_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", minversion="1.15")
    from tests.integrations import accelerate_job as job

    @contextlib.contextmanager
    def copied() -> Iterator[None]:
        """Copies the run's directory inside the save in the body, as a kill leaves it."""
        with writers_stopped():
            yield
            shutil.copytree(tmp_path / "whole", tmp_path / "killed")

    one = job.train(job.parse([f"{tmp_path / 'whole'}", f"{STEPS}", "--dropout", "0.5", "--kill-at", "8"]), copied)
    assert tc.exists(tmp_path / "killed/checkpoints/checkpoint_2")
    assert (tmp_path / "killed/checkpoints/checkpoint_3").exists()
    assert not tc.exists(tmp_path / "killed/checkpoints/checkpoint_3")
    other = job.train(job.parse([f"{tmp_path / 'killed'}", f"{STEPS}", "--dropout", "0.5"]))
    assert other["resumed_from"] == 6 and one["scaler"]["scale"] > 4
    assert other["losses"] == {step: loss for step, loss in one["losses"].items() if step[0] >= 6}
    assert [one[key] == other[key] for key in ("rate", "scaler")] == [True, True]
    assert all(torch.equal(other["weights"][key], weight) for key, weight in one["weights"].items())


def test_states_go_to_a_directory_and_come_back_and_what_would_be_ignored_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", minversion="1.15")
    from treeckpt.integrations.accelerate import TreeckptAccelerator

    made = TreeckptAccelerator(cpu=True)
    nets: list[Any] = [torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)]
    optimizers: list[Any] = [torch.optim.Adam(net.parameters()) for net in nets]
    *nets, one, other = made.prepare(*nets, *optimizers)
    made.backward(nets[1](nets[0](torch.ones(1, 4))).sum())
    one.step()
    other.step()
    made.step = 7
    weight = nets[1].weight.detach().clone()
    assert made.save_state(tmp_path / "step_3") == tmp_path / "step_3"
    made.wait_for_saves()
    torch.nn.init.zeros_(nets[1].weight)
    made.step = 0
    made.load_state(tmp_path / "step_3")
    assert torch.equal(nets[1].weight, weight) and made.step == 7
    with pytest.raises(ValueError, match="automatic_checkpoint_naming"):
        made.load_state()
    with pytest.raises(ValueError, match="automatic_checkpoint_naming"):
        made.save_state()
    made.register_save_state_pre_hook(print)
    with pytest.raises(TypeError, match=r"hooks.*print"):
        made.save_state(tmp_path / "step_3")
    with pytest.raises(TypeError, match="strict"):
        made.save_state(tmp_path / "step_3", strict=True)
