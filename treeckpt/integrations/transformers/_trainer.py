"""The Trainer of transformers on treeckpt's checkpoints; see `treeckpt.integrations.transformers`."""

from __future__ import annotations

import contextlib
from types import MappingProxyType
from typing import Any

from transformers import Trainer

import treeckpt as tc

from ._hub_weights import HubWeights
from ._loads import LoadsSteps
from ._step_files import SAVE_ONLY_MODEL, config_files, logged_metrics, state_file, state_function

BEST = "best_metric"
"""A metric of the steps at which `metric_for_best_model` was better than before."""


class TreeckptMixin(LoadsSteps):
    """Saves and resumes with treeckpt. Put it before any Trainer: `class MyTrainer(TreeckptMixin, SFTTrainer)`.

    A save returns when the state may change, and `on_save` of callbacks follows; the commit, and the weights that
    `from_pretrained` opens, come later: at the end of `train` at the latest.
    """

    manager_options: Any = MappingProxyType({})
    """A dict with options of `treeckpt.Manager`, as `{"incremental": True}`: set it before `train`."""
    _weights: Any = None
    """On rank 0, the `HubWeights`."""
    _is_warm = False

    def make_manager(self, run: str) -> tc.Manager:
        """Returns the manager of a run's directory."""
        keep: Any = self.args.save_total_limit or None
        if keep and self.args.metric_for_best_model and self.args.eval_strategy != "no":
            best = tc.policy.Best(BEST, mode="max" if self.args.greater_is_better else "min")
            keep = tc.policy.Total(max(keep, 2), including=best)
        options: Any = {"name": "checkpoint-{step}", "keep": keep, **self.manager_options}
        return tc.Manager(run, **options)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **options: Any) -> Any:
        """Trains as `transformers.Trainer.train` does.

        Args:
            resume_from_checkpoint: True for the newest step of `output_dir` that loads; without one the training begins
                anew, with a warning. Or the path of a checkpoint, there or elsewhere; one whose save was killed stands
                for the newest step beside it. Those of a plain Trainer are loaded as it does.
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
                        named = resume_from_checkpoint is not True and tc.exists(resume_from_checkpoint)
                        if self._opened is None or named:
                            raise

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        if not self._is_warm:  # the optimizer has its state now
            self._is_warm, self._configs = True, config_files(self)
            tc.prewarm(self._training_state())
        if self._weights is not None:
            self._weights.repair()
        super()._maybe_log_save_evaluate(*args, **options)

    def _training_state(self) -> dict[str, Any]:
        loss: Any = self._tr_loss
        self._unlogged = {"loss": loss.detach(), "since": self._globalstep_last_logged}
        parts = {"rng": False, **self._model_parts()} if self.args.save_only_model else self._parts()
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
            self._weights.replace(path)
        kind = {SAVE_ONLY_MODEL: self.args.save_only_model}
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
        self._manager.clean()  # of steps that were read for the weights when the clean-up after a save came
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
