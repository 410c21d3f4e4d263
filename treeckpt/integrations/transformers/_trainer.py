"""The Trainer of transformers on treeckpt's checkpoints; see `treeckpt.integrations.transformers`."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer
from transformers.trainer_pt_utils import nested_gather

import treeckpt as tc

from ._step_files import HubWeights, config_files, is_peft, logged_metrics, state_file, state_function

_Base: Any = Trainer if TYPE_CHECKING else object
_log = logging.getLogger("treeckpt")
BEST = "best_metric"
"""A metric of the steps at which `metric_for_best_model` was better than before."""


class TreeckptMixin(_Base):
    """Saves and resumes with treeckpt. Put it before any Trainer: `class MyTrainer(TreeckptMixin, SFTTrainer)`.

    A save returns when the state may change, and `on_save` of callbacks follows; the commit, and the weights that
    `from_pretrained` opens, come later: at the end of `train` at the latest.
    """

    _manager: Any
    """The `treeckpt.Manager` of the run."""
    _weights: Any = None
    """On rank 0, the `HubWeights`."""
    _opened: Any = None
    """The `treeckpt.OpenedStep` that is being loaded."""
    _unlogged: dict[str, Any] | None = None
    """The loss of the steps that no log has, and the step after which these began."""
    _is_warm = False

    def make_manager(self, run: str) -> tc.Manager:
        """Returns the manager of a run's directory; override it to give it other options."""
        keep: Any = self.args.save_total_limit or None
        if keep and self.args.metric_for_best_model and self.args.eval_strategy != "no":
            best = tc.policy.Best(BEST, mode="max" if self.args.greater_is_better else "min")
            keep = tc.policy.Total(max(keep, 2), including=best)
        return tc.Manager(run, name="checkpoint-{step}", keep=keep)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **options: Any) -> Any:
        """Trains as `transformers.Trainer.train` does.

        Args:
            resume_from_checkpoint: True for the newest step of `output_dir` that loads; or the path of a checkpoint,
                there or elsewhere. Those of a plain Trainer are loaded as it does.
            trial, args, options: as there.

        Raises:
            TreeckptError: DeepSpeed or XLA trains.
            CorruptError, CheckpointNotFound: the checkpoint, or all of `output_dir`, cannot be loaded.
        """
        if self.is_deepspeed_enabled or self.is_fsdp_xla_enabled:
            hint = "Leave TreeckptMixin out: these save their own state"
            raise tc.TreeckptError("args", expected="plain training, DDP or FSDP2", found="DeepSpeed or XLA", hint=hint)
        with contextlib.ExitStack() as whole:
            self._manager = whole.enter_context(self.make_manager(self._get_output_dir(trial)))
            weights = HubWeights(self, self._manager)
            self._weights = whole.enter_context(weights) if self.is_world_process_zero() else None
            while True:
                with contextlib.ExitStack() as self._reading:
                    path = self._open(resume_from_checkpoint)
                    try:
                        return super().train(path, trial, *args, **options)
                    except tc.CorruptError:
                        if self._opened is None or resume_from_checkpoint is not True:
                            raise

    def _open(self, given: Any) -> Any:
        """Opens the checkpoint to resume, if it is one of treeckpt; returns its path, or else what is given."""
        self._opened, manager, step = None, self._manager, None
        if given and given is not True:
            if not tc.exists(given):
                return given
            run, step = Path(given).resolve().parent, tc.inspect(given).step
            manager = manager if Path(manager.path(0)).resolve().parent == run else self.make_manager(str(run))
        if given:
            self._opened = self._reading.enter_context(manager.open(step))
        return given if self._opened is None else self._opened.path

    # loading, in the order of the calls -----------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._opened is None:  # the model is restored together with the optimizer
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._opened is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        parts: dict[str, Any] = {}
        if self._opened.custom_metadata.get("save_only_model"):
            _log.warning("%s is of the model alone: optimizer, scheduler and generators start anew", self._opened.path)
        else:
            self._unlogged = {"loss": torch.zeros(()), "since": 0}
            parts = {**self._parts(), "fallback": tc.Fallback(per_rank={"extra": "take"})}
        self._opened.restore(self.model_wrapped, rng=False, strict=self._strict, **parts)
        return None

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._opened is None:
            return super()._load_rng_state(checkpoint)
        if self._unlogged is not None:
            self._opened.restore_rng()
            self._tr_loss += self._unlogged["loss"].to(self._tr_loss.device)
            self._globalstep_last_logged = self._unlogged["since"]
            # it is in the next loss that is logged, but not in the mean of the steps of this call
            gathered: Any = nested_gather(self._tr_loss, self.args.parallel_mode)
            self._total_loss_scalar -= gathered.mean().item()
        self._opened = None
        self._reading.close()
        return None

    def _load_best_model(self) -> None:
        if not tc.exists(path := self.state.best_model_checkpoint):
            return super()._load_best_model()
        tc.training.restore(path, self.model, rng=False, extra=False, strict=self._strict)
        return None

    # saving -----------------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        if not self._is_warm:  # the optimizer has its state now
            self._is_warm, self._configs = True, config_files(self)
            tc.prewarm(self._training_state())
        super()._maybe_log_save_evaluate(*args, **options)

    @property
    def _strict(self) -> Any:
        return "missing" if is_peft(self.model) else True

    def _parts(self) -> dict[str, Any]:
        """Returns what is saved and restored beside the model."""
        extra = {"unlogged": tc.PerRank(self._unlogged), "scaler": getattr(self.accelerator, "scaler", None)}
        return {"optimizer": self.optimizer, "scheduler": self.lr_scheduler, "extra": extra}

    def _training_state(self) -> dict[str, Any]:
        loss: Any = self._tr_loss
        self._unlogged = {"loss": loss.detach(), "since": self._globalstep_last_logged}
        parts = {"rng": False} if self.args.save_only_model else self._parts()
        return state_function(self.model)(self.model_wrapped, **parts)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        state, step = self.state, self.state.global_step
        path, files = self._manager.path(step), None
        metrics = logged_metrics(state)
        if state.best_global_step == step:
            state.best_model_checkpoint, metrics[BEST] = path, state.best_metric
        if self._weights is not None:
            files = {**self._configs, "trainer_state.json": state_file(self)}
            self._weights.clear(path)
        kind = {"save_only_model": self.args.save_only_model}
        saved = self._manager.save(step, self._training_state(), metrics=metrics, files=files, custom_metadata=kind)
        if self._weights is not None:
            self._weights.add(step, saved)
        if self.args.push_to_hub:
            self._settle()
            self._push_from_checkpoint(path)

    def _settle(self) -> None:
        """Waits until all that was saved is committed and opens with `from_pretrained`."""
        self._manager.wait()
        if self._weights is not None:
            self._weights.wait()

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self._settle()
        return super()._finalize_training(*args, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model for `from_pretrained`; with FSDP2 the whole one, whatever its `state_dict_type` is."""
        if self.is_fsdp_enabled and "FULL" not in str(self.accelerator.state.fsdp_plugin.state_dict_type):
            self._save(output_dir, state_dict=self.accelerator.get_state_dict(self.model))
        super().save_model(output_dir, _internal_call)


class TreeckptTrainer(TreeckptMixin, Trainer):
    """`transformers.Trainer` on treeckpt's checkpoints; see `TreeckptMixin`."""
