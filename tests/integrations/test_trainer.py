"""The Trainer of transformers with treeckpt's checkpoints. Short forms here; real kills, DDP and FSDP2 are slow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import treeckpt as tc
from tests.helpers.corruption import flip
from tests.helpers.framework_job import writers_stopped

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library
ROOT = Path(__file__).parents[2]
STEPS, SAVES = 12, (5, 10)


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the job, and with it the library, imported by the first test."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    library: Any = pytest.importorskip("transformers", minversion="5.23")
    pytest.importorskip("accelerate")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    from tests.integrations import trainer_job

    return trainer_job


def _train(
    job: Any, directory: Path, kind: Any = None, *, steps: int = STEPS, resume: Any = None, **options: Any
) -> Any:
    """Trains a new model; returns the trainer."""
    model = options.pop("model", None) or job.language_model()
    args = job.arguments_of(directory, steps, **options)
    data = job.Tokens()
    trainer = (kind or job.Recorded)(
        model=model, args=args, train_dataset=data, eval_dataset=torch.utils.data.Subset(data, range(4))
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def _log(trainer: Any) -> list[dict[str, Any]]:
    """What a trainer has logged, without times and the mean of its own steps."""
    timed = ("runtime", "per_second", "train_loss")
    return [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in trainer.state.log_history]


def _is_continued(resumed: Any, whole: Any, step: int) -> bool:
    """Whether a trainer that resumed at a step has the losses, the log and the weights of an uninterrupted one."""
    weights = whole.model.state_dict()
    return (
        resumed.losses == [loss for loss in whole.losses if loss[0] >= step]
        and _log(resumed) == _log(whole)
        and all(torch.equal(tensor, weights[name]) for name, tensor in resumed.model.state_dict().items())
    )


def _copied_in_save(job: Any, copy: Path, step: int = SAVES[-1]) -> Any:
    """Returns a trainer that copies its run's directory inside the save of a step, as a kill leaves it."""

    class Copied(job.Recorded):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            if self.state.global_step != step:
                return super()._save_checkpoint(model, trial)
            self._settle()
            with writers_stopped():
                super()._save_checkpoint(model, trial)
                shutil.copytree(self.args.output_dir, copy / "run")
            return None

    return Copied


def test_killed_inside_a_save_a_run_goes_on_from_the_step_before_bit_for_bit(job: Any, tmp_path: Path) -> None:
    whole = _train(job, tmp_path / "whole", _copied_in_save(job, tmp_path / "killed"))
    run = tmp_path / "killed" / "run"
    assert (run / "checkpoint-10").exists() and not tc.exists(run / "checkpoint-10")
    resumed = _train(job, tmp_path / "killed", resume=True)
    assert _is_continued(resumed, whole, 5)
    assert resumed.state.log_history[-1]["train_loss"] == pytest.approx(_mean_loss(whole, 5))


def test_the_last_directory_of_a_run_stands_for_the_step_before_where_its_save_was_killed(
    job: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As programs pass it that call `get_last_checkpoint`."""
    from transformers.trainer_utils import get_last_checkpoint

    whole = _train(job, tmp_path / "whole", _copied_in_save(job, tmp_path / "killed"))
    last = get_last_checkpoint(str(tmp_path / "killed" / "run"))
    assert Path(last).name == "checkpoint-10"
    resumed = _train(job, tmp_path / "killed", resume=last)
    assert _is_continued(resumed, whole, 5) and "checkpoint-10 is not whole" in caplog.text


@pytest.mark.parametrize("given", [True, "checkpoint-5"])
def test_without_a_whole_step_a_run_begins_anew(
    job: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, given: bool | str
) -> None:
    whole = _train(job, tmp_path / "whole", _copied_in_save(job, tmp_path / "killed", SAVES[0]), resume=True)
    assert "whole/run has no whole checkpoint" in caplog.text
    run = tmp_path / "killed" / "run"
    assert (run / "checkpoint-5").exists() and not tc.exists(run / "checkpoint-5")
    resumed = _train(job, tmp_path / "killed", resume=given is True or str(run / given))
    assert _is_continued(resumed, whole, 0) and "killed/run has no whole checkpoint" in caplog.text
    assert tc.verify(run / "checkpoint-5").ok


@pytest.mark.parametrize("given", ["other", "other/checkpoint-5", "run", "run/checkpoint-7"])
def test_a_path_that_no_save_has_begun_here_is_an_error(job: Any, tmp_path: Path, given: str) -> None:
    for name in ("other/checkpoint-5", "run"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        _train(job, tmp_path, resume=str(tmp_path / given))


@pytest.mark.parametrize("made", [False, True], ids=["before", "within"])
def test_weights_that_a_killed_process_has_not_made_are_made_when_it_resumes(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    from treeckpt.integrations.transformers import _hub_weights, _trainer

    class Copied(_hub_weights.HubWeights):
        """Copies the run's directory before or after it makes the weights of the last step, as a kill leaves it."""

        def _write(self, source: Path, destination: Path) -> None:
            if made:
                super()._write(source, destination)
            if source.name == "checkpoint-10":
                # the last step may be being saved meanwhile, or have been saved
                shutil.copytree(source.parent, run, ignore=shutil.ignore_patterns(".*.tmp", "checkpoint-1[!0]"))
            if not made:
                super()._write(source, destination)

    run = tmp_path / "killed" / "run"
    with monkeypatch.context() as patched:
        patched.setattr(_trainer, "HubWeights", Copied)
        whole = _train(job, tmp_path / "whole")
    assert tc.exists(run / "checkpoint-10") and not (run / "checkpoint-10" / "model.safetensors").exists()
    resumed = _train(job, tmp_path / "killed", resume=True)
    assert _is_continued(resumed, whole, 10)
    for step in (5, 10, STEPS):
        names = {path.name for path in (run / f"checkpoint-{step}").iterdir()}
        assert "model.safetensors" in names and not any(name.startswith("weights-") for name in names)
    loaded, saved = (load_file(one / "checkpoint-10/model.safetensors") for one in (run, tmp_path / "whole" / "run"))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def test_the_weights_of_deleted_steps_go_in_as_many_files_as_they_are(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeckpt.convert._conversion.SHARD_NBYTES", 10_000)
    _train(job, tmp_path, save_total_limit=1)
    [step] = (tmp_path / "run").iterdir()
    assert step.name == f"checkpoint-{STEPS}" and (step / "model.safetensors.index.json").exists()


def _mean_loss(trainer: Any, step: int) -> float:
    losses = [loss for at, loss in trainer.losses if at >= step]
    return sum(losses) / (STEPS - step)


def test_a_run_resumes_from_a_path_in_another_directory(job: Any, tmp_path: Path) -> None:
    whole = _train(job, tmp_path / "whole")
    resumed = _train(job, tmp_path / "other", resume=tmp_path / "whole" / "run" / "checkpoint-5")
    assert _is_continued(resumed, whole, 5)
    assert not (tmp_path / "other" / "run" / "checkpoint-5").exists()


@pytest.mark.parametrize("given", [True, "checkpoint-15"])
def test_a_damaged_step_is_passed_over(job: Any, tmp_path: Path, given: bool | str) -> None:
    whole = _train(job, tmp_path, steps=10)
    [shard] = (tmp_path / "run" / "checkpoint-10").glob("shard-*")
    shard.write_bytes(flip(shard.read_bytes(), shard.stat().st_size - 5))
    with pytest.raises(tc.CorruptError, match="checkpoint-10"):
        _train(job, tmp_path, steps=10, resume=str(shard.parent))
    (tmp_path / "run" / "checkpoint-15").mkdir()  # of a save that was killed
    resume = given is True or str(tmp_path / "run" / given)
    assert _is_continued(_train(job, tmp_path, steps=10, resume=resume), whole, 5)


def test_a_step_that_has_lost_its_index_is_passed_over_too(job: Any, tmp_path: Path) -> None:
    """The Trainer itself would take its weights, without the optimizer."""
    whole = _train(job, tmp_path, steps=10)
    (step := tmp_path / "run" / "checkpoint-10").joinpath("index.json").unlink()
    assert _is_continued(_train(job, tmp_path, steps=10, resume=str(step)), whole, 5)


def test_a_checkpoint_of_the_trainer_itself_is_loaded_as_the_trainer_does(job: Any, tmp_path: Path) -> None:
    _train(job, tmp_path, job.RecordedOwn, steps=5)
    own = _train(job, tmp_path / "own", job.RecordedOwn, resume=str(tmp_path / "run" / "checkpoint-5"))
    assert _train(job, tmp_path, _copied_in_save(job, tmp_path / "killed"), resume=True).losses == own.losses
    assert _train(job, tmp_path / "killed", resume=True).losses == own.losses


def test_a_step_opens_with_from_pretrained(job: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trained = _train(job, tmp_path, steps=10).model.state_dict()
    step = tmp_path / "run" / "checkpoint-10"
    loaded, info = AutoModelForCausalLM.from_pretrained(step, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(tensor, trained[name]) for name, tensor in loaded.state_dict().items())
    assert torch.load(step / "training_args.bin", weights_only=False).max_steps == 10


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_the_steps_that_stay_and_the_best_model_are_those_of_the_trainer(
    job: Any, tmp_path: Path, limit: int | None
) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": limit}
    options |= {"load_best_model_at_end": True, "learning_rate": 0.3}
    kept: list[set[str]] = []
    trained: list[Any] = []
    for kind in (job.Recorded, job.RecordedOwn):
        trained.append(_train(job, tmp_path / kind.__name__, kind, **options))
        run = tmp_path / kind.__name__ / "run"
        kept.append({path.name for path in run.iterdir()})
    ours, own = trained
    assert kept[0] == kept[1] and own.state.best_global_step < STEPS
    assert _log(ours) == _log(own)
    assert Path(ours.state.best_model_checkpoint).name == Path(own.state.best_model_checkpoint).name
    weights = own.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in ours.model.state_dict().items())


def test_a_save_of_the_model_only_resumes_with_a_new_optimizer(
    job: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _train(job, tmp_path, steps=5, save_only_model=True)
    assert "optimizer" not in tc.load(tmp_path / "run" / "checkpoint-5")
    resumed = _train(job, tmp_path, steps=6, resume=True)
    assert resumed.losses[0][0] == 5 and "optimizer, scheduler and generators start anew" in caplog.text


def test_adapters_are_saved_without_their_base_and_resume_bit_for_bit(job: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    whole = _train(
        job, tmp_path / "whole", _copied_in_save(job, tmp_path / "killed"), model=job.adapted(job.language_model())
    )
    resumed = _train(job, tmp_path / "killed", resume=True, model=job.adapted(job.language_model()))
    assert _is_continued(resumed, whole, 5)
    step = tmp_path / "killed" / "run" / f"checkpoint-{STEPS}"
    assert all("lora_" in name for name in tc.load(step)["model"])
    loaded = peft.PeftModel.from_pretrained(job.language_model(), step, is_trainable=True)
    loaded.load_adapter(step / "other", "other")
    weights = resumed.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.slow
def test_incremental_steps_have_what_is_trained_alone_also_after_a_restart(job: Any, tmp_path: Path) -> None:
    """By one line: `manager_options`."""
    peft = pytest.importorskip("peft")

    class Incremental(job.Recorded):
        manager_options: ClassVar[Any] = {"incremental": True}

    def adapted() -> Any:
        model = job.language_model(n_embd=256)
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True))
        model.add_adapter("other", peft.LoraConfig(r=256, target_modules=["c_proj"], fan_in_fan_out=True))
        return model

    def nbytes(name: str, step: int) -> int:
        return sum(path.stat().st_size for path in (tmp_path / name / f"run/checkpoint-{step}").glob("shard-*"))

    whole = _train(job, tmp_path / "whole", model=adapted())
    _train(job, tmp_path / "part", Incremental, model=adapted())
    for step in (10, STEPS):
        shutil.rmtree(tmp_path / f"part/run/checkpoint-{step}")
    resumed = _train(job, tmp_path / "part", Incremental, model=adapted(), resume=True)
    assert _is_continued(resumed, whole, 5)
    sizes = [(one.numel(), one.requires_grad) for name, one in whole.model.named_parameters() if "lora_" in name]
    trained, frozen = (4 * sum(size for size, kind in sizes if kind == wanted) for wanted in (True, False))
    assert nbytes("part", 5) > frozen + 3 * trained > 10 * 3 * trained
    for step in (10, STEPS):  # parameters and two moments
        assert 3 * trained < nbytes("part", step) < 1.05 * 3 * trained + 2**15 < nbytes("whole", step)
        assert tc.verify(tmp_path / f"part/run/checkpoint-{step}").ok
        opened = load_file(tmp_path / f"part/run/checkpoint-{step}/other/adapter_model.safetensors")
        assert 4 * sum(tensor.numel() for tensor in opened.values()) == frozen


class Launch(NamedTuple):
    """How a job runs."""

    ranks: int
    resumed: int
    """The number of ranks that resume."""
    options: tuple[str, ...] = ()


LAUNCHES = (
    Launch(1, 1),
    Launch(2, 2),
    Launch(2, 2, ("--fsdp",)),
    Launch(2, 1, ("--fsdp", "--no-dropout")),
    Launch(2, 2, ("--lora",)),
    Launch(2, 2, ("--fsdp", "--lora")),
    Launch(2, 2, ("--scaler",)),
    Launch(2, 2, ("--adalora",)),
    Launch(1, 1, ("--lora", "--incremental")),
)


def _launch(directory: Path, ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "tests.integrations.trainer_job", str(directory), str(STEPS), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    out, err = subprocess.PIPE, subprocess.STDOUT
    return subprocess.run(
        command, cwd=ROOT, env=environment, timeout=300, check=False, text=True, stdout=out, stderr=err
    )


@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda one: "-".join((f"{one.ranks}to{one.resumed}", *one.options)))
def test_killed_inside_a_save_ranks_go_on_bit_for_bit(tmp_path: Path, launch: Launch) -> None:
    whole = _launch(tmp_path / "whole", launch.ranks, *launch.options)
    assert whole.returncode == 0, whole.stdout
    killed = _launch(tmp_path / "killed", launch.ranks, *launch.options, "--kill-in", "10")
    assert "SIGKILL" in killed.stdout, killed.stdout
    run, batch = tmp_path / "killed" / "run", 2 * launch.ranks // launch.resumed
    assert tc.exists(run / "checkpoint-5") and not tc.exists(run / "checkpoint-10")
    resumed = _launch(tmp_path / "killed", launch.resumed, *launch.options, "--batch", str(batch))
    assert resumed.returncode == 0, resumed.stdout
    outcomes = [_outcomes(tmp_path, rank) for rank in range(launch.resumed)]
    for one, other in outcomes:
        losses = [loss for loss in one["losses"] if loss[0] >= 5]
        assert [step for step, _ in other["losses"]] == [step for step, _ in losses]
        if launch.ranks == launch.resumed:
            assert other["losses"] == losses and other["log"][:-1] == one["log"][:-1]
            assert other["scaler"] == one["scaler"]
            assert all(torch.equal(other["weights"][name], tensor) for name, tensor in one["weights"].items())
        else:
            _check_resharded(tmp_path, launch, other["losses"])
    opened = load_file(run / f"checkpoint-{STEPS}" / f"{_file(launch.options)}.safetensors")
    saved = {name.replace(".default", ""): tensor for name, tensor in outcomes[0][1]["weights"].items()}
    cut = "--adalora" in launch.options  # to the ranks that are left
    assert opened and (cut or all(torch.equal(saved[name], tensor) for name, tensor in opened.items()))


def _file(options: tuple[str, ...]) -> str:
    return "adapter_model" if {"--lora", "--adalora"} & {*options} else "model"


def _check_resharded(directory: Path, launch: Launch, losses: list[tuple[int, float]]) -> None:
    """Compares the losses of one rank with those of the ranks before, and after the resharding of torch itself."""
    ranks = [torch.load(directory / "whole" / f"outcome-{rank}.pt")["losses"] for rank in range(launch.ranks)]
    means = [sum(loss for _, loss in each) / launch.ranks for each in zip(*ranks, strict=True)]
    assert [loss for _, loss in losses] == pytest.approx(means[-len(losses) :], rel=1e-6)
    own = _launch(directory / "own", launch.ranks, *launch.options, "--own")
    assert own.returncode == 0, own.stdout
    for step in (10, STEPS):
        shutil.rmtree(directory / "own" / "run" / f"checkpoint-{step}")
    batch = 2 * launch.ranks // launch.resumed
    own = _launch(directory / "own", launch.resumed, *launch.options, "--own", "--batch", f"{batch}")
    assert own.returncode == 0, own.stdout
    assert torch.load(directory / "own" / "outcome-0.pt")["losses"] == losses


@pytest.mark.slow
@pytest.mark.parametrize("kill", [("1",), ("2",), ("1", "--lora"), ("2", "--lora"), ("3", "--lora")], ids="-".join)
def test_killed_inside_the_export_of_a_step_it_opens_with_from_pretrained_after_the_resume(
    tmp_path: Path, kill: tuple[str, ...]
) -> None:
    options = kill[1:]
    killed = _launch(tmp_path / "killed", 1, *options, "--kill-in-export", *kill)
    assert "SIGKILL" in killed.stdout, killed.stdout
    run, weights = tmp_path / "killed" / "run", "adapter_model.safetensors" if options else "model.safetensors"
    assert tc.exists(run / "checkpoint-10") and not (run / f"checkpoint-{STEPS}" / weights).exists()
    resumed = _launch(tmp_path / "killed", 1, *options)
    assert resumed.returncode == 0, resumed.stdout
    for step in (5, 10, STEPS):
        folder = run / f"checkpoint-{step}"
        opened = load_file(folder / weights)
        saved = {name.replace(".default", ""): tensor for name, tensor in tc.load(folder)["model"].items()}
        assert opened and all(torch.equal(saved[name], tensor) for name, tensor in opened.items())
        assert not list(folder.glob("weights-*")) and (folder / "other").is_dir() == bool(options)


def _outcomes(directory: Path, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a rank wrote at the end of the whole run, and of the resumed one."""
    whole, killed = (torch.load(directory / run / f"outcome-{rank}.pt") for run in ("whole", "killed"))
    return whole, killed
