"""Trains with `TreeckptTrainer`, or the Trainer itself; writes what it has logged and its weights.

python -m torch.distributed.run --nproc-per-node N -m tests.integrations.trainer_job DIRECTORY STEPS [...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor

from tests.helpers import framework_job as job
from treeckpt.integrations.transformers import TreeckptMixin

SAVED_EVERY = 5


class Tokens(torch.utils.data.Dataset[Any]):
    """Sequences of random tokens, the same for the same index."""

    def __len__(self) -> int:
        return 56

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def language_model(**options: int) -> Any:
    """Returns a small GPT-2 with dropout."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, **options}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLMLoss")
    return transformers.GPT2LMHeadModel(config)


def adapted(model: Any) -> Any:
    """Returns a model of PEFT with two adapters, of which the first is trained."""
    import peft

    model = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    )
    model.add_adapter("other", peft.LoraConfig(target_modules=["c_proj"], fan_in_fan_out=True))
    return model


def adapted_by_adalora(model: Any) -> Any:
    """Returns a model of PEFT whose adapter loses ranks in steps 2 to 9, see `AllocatesRanks`."""
    import peft

    schedule: dict[str, Any] = {"init_r": 6, "target_r": 2, "total_step": 12, "tinit": 1, "tfinal": 3, "deltaT": 1}
    return peft.get_peft_model(model, peft.AdaLoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, **schedule))


class AllocatesRanks(transformers.TrainerCallback):
    """Has AdaLoRA allocate its ranks after each step."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        given["model"].base_model.update_and_allocate(state.global_step + 1)


def arguments_of(directory: Path, steps: int, **options: Any) -> transformers.TrainingArguments:
    """Returns arguments: a log every three steps and a save every five, so that a save can be between two logs."""
    given: dict[str, Any] = {
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "warmup_steps": 3,
        "logging_steps": 3,
        "save_steps": SAVED_EVERY,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(str(directory / "run"), **{**given, **options})


def use_fsdp2(trainer: Any) -> None:
    """Has the Trainer's Accelerate shard by FSDP2 on CPUs, where it turns that on by itself with a GPU only."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        cpu_ram_efficient_loading=False,
    )
    for state in (PartialState(), trainer.accelerator.state):
        state.distributed_type = DistributedType.FSDP
    trainer.accelerator.state.fsdp_plugin = plugin
    trainer.is_fsdp_enabled = True


def use_scaler(trainer: Any) -> None:
    """Gives a Trainer a scaler whose scale grows until gradients overflow, when the step is skipped."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**62, growth_interval=2)


class RecordedLosses:
    """A Trainer that keeps the loss of every micro-batch, and can die inside a save."""

    def __init__(self, *args: Any, kill_in: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.losses: list[tuple[int, float]] = []
        self._kill_in = kill_in

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        found = super().training_step(*args, **options)
        self.losses.append((self.state.global_step, found.item()))
        return found

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        dies = self.state.global_step == self._kill_in
        if dies:
            self._settle()
        with job.killed_in_save() if dies else contextlib.nullcontext():
            super()._save_checkpoint(model, trial)


class Recorded(RecordedLosses, TreeckptMixin, transformers.Trainer):
    """With treeckpt."""


class RecordedOwn(RecordedLosses, transformers.Trainer):
    """As the Trainer saves itself."""


def kill_in_export(step: int, at: int) -> None:
    """Kills this process where it is about to make a directory or file of a step's weights for `from_pretrained`."""
    reached = 0

    def hook(event: str, given: tuple[Any, ...]) -> None:
        nonlocal reached
        if event in ("tempfile.mkdtemp", "os.rename") and f"checkpoint-{step}/weights-" in str(given[0]):
            reached += 1
            if reached == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--kill-in", type=int, help="the step in whose save each rank kills itself")
    parser.add_argument("--kill-in-export", type=int, help="which of the effects that make the weights of step 10")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--adalora", action="store_true")
    parser.add_argument("--scaler", action="store_true", help="of gradients, which often overflow")
    parser.add_argument("--incremental", action="store_true")
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--batch", type=int, default=2)
    options = parser.parse_args()
    if options.kill_in_export:
        kill_in_export(2 * SAVED_EVERY, options.kill_in_export)
    model = language_model()
    for module in model.modules() if options.no_dropout else ():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model = adapted(model) if options.lora else adapted_by_adalora(model) if options.adalora else model
    given: dict[str, Any] = {"max_grad_norm": 0.0} if options.scaler else {}  # Accelerate unscales for autocast alone
    args = arguments_of(options.directory, options.steps, per_device_train_batch_size=options.batch, **given)
    kind: Any = RecordedOwn if options.own else Recorded
    trainer = kind(model=model, args=args, train_dataset=Tokens(), kill_in=options.kill_in)
    if options.adalora:
        trainer.add_callback(AllocatesRanks())
    if options.incremental:
        trainer.manager_options = {"incremental": True}
    if options.scaler:
        use_scaler(trainer)
    if options.fsdp:
        use_fsdp2(trainer)
    there = any((options.directory / "run").glob("*/trainer_state.json"))  # else the Trainer itself refuses True
    trainer.train(resume_from_checkpoint=there if options.own else True)
    outcome = {
        "weights": {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in trainer.model.state_dict().items()},
        "losses": trainer.losses,
        "log": trainer.state.log_history,
        "scaler": trainer.accelerator.scaler and trainer.accelerator.scaler.state_dict(),
    }
    torch.save(outcome, options.directory / f"outcome-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
