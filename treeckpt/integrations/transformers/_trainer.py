"""The Trainer of transformers on treeckpt's checkpoints; see `treeckpt.integrations.transformers`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import nested_gather

import treeckpt as tc

from ._hub_files import HubFiles, is_peft

_Base: Any = Trainer if TYPE_CHECKING else object
_log = logging.getLogger("treeckpt")
BEST = "best_metric"
"""A metric of the steps at which `metric_for_best_model` was better than before."""


class TreeckptMixin(_Base):
    """Saves and resumes with treeckpt. Put it before any Trainer: `class MyTrainer(TreeckptMixin, SFTTrainer)`.

    A save returns when the state may change, and `on_save` of callbacks follows; the commit and what `from_pretrained`
    needs come later, at the end of `train` at the latest.
    """

    _manager: tc.Manager
    _hub: HubFiles
    _opened: Any = None
    """What is being loaded."""
    _unlogged: dict[str, Any] | None = None
    """The loss of steps that no log has, and the step after which they began."""
    _is_warm = False

    def make_manager(self, run: str) -> tc.Manager:
        """Returns the manager of a run's directory; override it to give it other options."""
        keep: Any = self.args.save_total_limit or None
        if keep and self.args.metric_for_best_model and self.args.eval_strategy != "no":
            best = tc.policy.Best(BEST, mode="max" if self.args.greater_is_better else "min")
            keep = tc.policy.Total(max(keep, 2), including=best)
        return tc.Manager(run, name="checkpoint-{step}", keep=keep)

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> Any:
        """Trains as `transformers.Trainer.train` does.

        Args:
            resume_from_checkpoint: True for the newest step in `output_dir` that loads; or the path of a checkpoint,
                there or elsewhere. Those that a plain Trainer has saved are loaded as it does.
            trial, ignore_keys_for_eval: as there.

        Raises:
            TreeckptError: DeepSpeed or XLA trains.
            CorruptError, CheckpointNotFound: the checkpoint, or all of `output_dir`, cannot be loaded.
        """
        if self.is_deepspeed_enabled or self.is_fsdp_xla_enabled:
            hint = "Leave TreeckptMixin out: these save their own state"
            raise tc.TreeckptError("args", expected="plain training, DDP or FSDP2", found="DeepSpeed or XLA", hint=hint)
        with (
            self.make_manager(self._get_output_dir(trial)) as self._manager,
            HubFiles(self, self._manager) as self._hub,
        ):
            while True:
                with contextlib.ExitStack() as self._reading:
                    path = self._open(resume_from_checkpoint)
                    try:
                        return super().train(path, trial, ignore_keys_for_eval)
                    except tc.CorruptError:
                        if self._opened is None or resume_from_checkpoint is not True:
                            raise

    def _open(self, given: Any) -> Any:
        """Opens the checkpoint to resume, if it is one of treeckpt; returns its path, or else what is given."""
        self._opened = None
        if given is True:
            self._opened = self._reading.enter_context(self._manager.open())
        elif given and tc.exists(given):
            run = Path(given).resolve().parent
            here = Path(self._manager.path(0)).resolve().parent == run
            manager = self._manager if here else self.make_manager(str(run))
            self._opened = self._reading.enter_context(manager.open(tc.inspect(given).step))
        return given if self._opened is None else self._opened.path

    # loading, in the order of the calls -----------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._opened is None:  # the model is restored together with the optimizer
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._opened is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        options: dict[str, Any] = {"rng": False, "strict": "missing"}
        if not self._opened.custom_metadata["save_only_model"]:
            self._unlogged = {"loss": torch.zeros(()), "since": 0}
            options |= self._parts() | {"fallback": tc.Fallback(per_rank={"extra": "take"})}
        else:
            _log.warning("%s is of the model alone: optimizer, scheduler and generators start anew", self._opened.path)
        self._opened.restore(self.model_wrapped, **options)
        return None

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._opened is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._opened is None:
            return super()._load_rng_state(checkpoint)
        if self._unlogged is not None:
            self._opened.restore_rng()
            self._tr_loss += self._unlogged["loss"].to(self._tr_loss.device)
            self._globalstep_last_logged = self._unlogged["since"]
            # it is in the next loss that is logged, but not in the mean of the steps of this call
            self._total_loss_scalar -= nested_gather(self._tr_loss, self.args.parallel_mode).mean().item()
        self._opened = None
        self._reading.close()
        return None

    def _load_best_model(self) -> None:
        if not tc.exists(path := self.state.best_model_checkpoint):
            return super()._load_best_model()
        tc.training.restore(path, self.model, rng=False, extra=False, strict="missing")
        return None

    # saving -----------------------------------------------------------------------------------------------------------

    def _prepare_for_training(self, *args: Any, **more: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **more)
        with tempfile.TemporaryDirectory() as made:  # configs, tokenizer, arguments: what is saved beside the weights
            self._save(made, state_dict={})
            files = [path for path in Path(made).iterdir() if path.is_file() and path.suffix != ".safetensors"]
            self._files = {path.name: path.read_bytes() for path in files}
        return prepared

    def _maybe_log_save_evaluate(self, *args: Any, **more: Any) -> None:
        if not self._is_warm:  # the optimizer has its state now
            self._is_warm = True
            tc.prewarm(self._training_state())
        super()._maybe_log_save_evaluate(*args, **more)

    def _parts(self) -> dict[str, Any]:
        """Returns what is saved and restored beside the model."""
        extra = {"unlogged": tc.PerRank(self._unlogged), "scaler": getattr(self.accelerator, "scaler", None)}
        return {"optimizer": self.optimizer, "scheduler": self.lr_scheduler, "extra": extra}

    def _training_state(self) -> dict[str, Any]:
        self._unlogged = {"loss": self._tr_loss.detach(), "since": self._globalstep_last_logged}
        state: Any = tc.training.state
        if is_peft(self.model):
            from ..peft import peft_state as state
        return state(self.model_wrapped, **({"rng": False} if self.args.save_only_model else self._parts()))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        state, step = self.state, self.state.global_step
        logged = {key: value for entry in state.log_history if entry["step"] == step for key, value in entry.items()}
        metrics = {key: value for key, value in logged.items() if isinstance(value, int | float) and key != "step"}
        path = self._manager.path(step)
        if state.best_global_step == step:
            state.best_model_checkpoint, metrics[BEST] = path, state.best_metric
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                noted, name = state.stateful_callbacks, type(callback).__name__
                noted[name] = [*noted[name], callback.state()] if isinstance(noted[name], list) else callback.state()
        files = None
        if self.is_world_process_zero():
            text = json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n"
            files = {**self._files, "trainer_state.json": text.encode()}
        self._hub.before_save(path)
        saved = self._manager.save(
            step,
            self._training_state(),
            metrics=metrics,
            files=files,
            custom_metadata={"save_only_model": self.args.save_only_model},
        )
        self._hub.add(step, saved)
        if self.args.push_to_hub:
            self._settle()
            self._push_from_checkpoint(path)

    def _settle(self) -> None:
        """Waits until all that was saved is committed and opens with `from_pretrained`."""
        self._manager.wait()
        self._hub.wait()

    def _finalize_training(self, *args: Any, **more: Any) -> Any:
        self._settle()
        return super()._finalize_training(*args, **more)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model for `from_pretrained`; with FSDP2 the whole one, whatever its `state_dict_type` is."""
        if not self.is_fsdp_enabled:
            return super().save_model(output_dir, _internal_call)
        self._save(output_dir, state_dict=self.accelerator.get_state_dict(self.model))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        return None


class TreeckptTrainer(TreeckptMixin, Trainer):
    """`transformers.Trainer` on treeckpt's checkpoints; see `TreeckptMixin`."""
