"""How the Trainer loads steps of treeckpt: the model, optimizer and scheduler at once, and the generators last."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import nested_gather
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import treeckpt as tc

from ._step_files import SAVE_ONLY_MODEL, adalora_ranks, is_peft

_Base: Any = Trainer if TYPE_CHECKING else object
_log = logging.getLogger("treeckpt")


class LoadsSteps(_Base):
    """The methods by which a Trainer loads, in the order of its calls; those of others are left to it."""

    _manager: Any
    """The `treeckpt.Manager` of the run."""
    _reading: contextlib.ExitStack
    """It holds what is opened."""
    _opened: Any = None
    """The `treeckpt.OpenedStep` that is being loaded."""
    _unlogged: dict[str, Any] | None = None
    """The loss of the steps that no log has, and the step after which these began."""

    def make_manager(self, run: str) -> tc.Manager:
        """Returns the manager of a run's directory."""
        raise NotImplementedError

    @property
    def _strict(self) -> Any:
        return "missing" if is_peft(self.model) else True

    def _parts(self) -> dict[str, Any]:
        """Returns what is saved and restored beside the model."""
        extra = {"unlogged": tc.PerRank(self._unlogged), "scaler": getattr(self.accelerator, "scaler", None)}
        extra |= self._model_parts()["extra"]
        return {"optimizer": self.optimizer, "scheduler": self.lr_scheduler, "extra": extra}

    def _model_parts(self) -> dict[str, Any]:
        """Returns those of the model alone."""
        return {"extra": {"adalora": adalora_ranks(self.model)}}

    def _open(self, given: Any) -> Any:
        """Opens the checkpoint to resume, if it is one of treeckpt; returns its path, or None to begin anew.

        Args:
            given: True for the newest step of the run; or the path of a checkpoint. A step beside it stands for one
                that is not whole.
        """
        self._opened, manager, step = None, self._manager, None
        if not given:
            return given
        run = home = Path(manager.path(0)).resolve().parent
        if given is not True:
            folder = Path(given).resolve()
            if tc.exists(given):
                step = tc.inspect(given).step
            elif _is_own(folder) or not folder.is_dir() or _number(folder) is None:
                return given
            run = folder.parent
            manager = manager if run == home else self.make_manager(str(run))
        self._opened = self._reading.enter_context(manager.open(step))
        path = _newest_own(run) if self._opened is None else self._opened.path
        if path is None and run != home:
            return given
        if path is None:
            _log.warning("%s has no whole checkpoint: the training begins anew", run)
        elif given is not True and step is None:
            _log.warning("%s is not whole; %s is loaded", given, path)
        return path

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._opened is None:  # the model is restored together with the optimizer
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._opened is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        parts = self._model_parts()
        if self._opened.custom_metadata.get(SAVE_ONLY_MODEL):
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
        extra = self._model_parts()["extra"] if is_peft(self.model) else False
        tc.training.restore(path, self.model, rng=False, extra=extra, strict=self._strict)
        return None


def _is_own(folder: Path) -> bool:
    """Whether a directory is a checkpoint that the Trainer has written itself, to its end."""
    return (folder / TRAINER_STATE_NAME).exists() and not any(folder.glob("shard-*.safetensors"))


def _number(folder: Path) -> int | None:
    """Returns the step in the name of a checkpoint's directory; None if it has another name."""
    number = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(number) if number != folder.name and number.isdecimal() else None


def _newest_own(run: Path) -> str | None:
    """Returns the path of the newest one below a directory."""
    steps = {number: path for path in run.glob("*") if _is_own(path) and (number := _number(path)) is not None}
    return str(steps[max(steps)]) if steps else None
