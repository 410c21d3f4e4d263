"""`TreeckptManager`: the checkpoint manager of torchtitan's `Trainer` on treeckpt, selected in its config.

    config.checkpoint = TreeckptManager.Config(enable=True, interval=500, background=True)
    trainer = config.build()
    trainer.checkpointer.manager.save_on_signal()  # a `treeckpt.Manager`

It is written against torchtitan 0.3. A run goes on from its newest intact checkpoint on any mesh. torchtitan's data
loader goes on with as many data-parallel ranks; `exclude_from_loading=["dataloader"]` starts it anew with others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torchtitan.components.checkpointer import (  # pyright: ignore[reportMissingImports]
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP  # pyright: ignore[reportMissingImports]
from torchtitan.tools import filesystem  # pyright: ignore[reportMissingImports]

import treeckpt as tc

__all__ = ["TreeckptManager"]


class TreeckptManager(BaseCheckpointManager):
    """Saves and loads what torchtitan's own checkpoint manager does, under the same names, by the same options.

    Attributes:
        manager: the `treeckpt.Manager` of the folder of checkpoints.

    Args:
        config: of the class `Config`.
        states, dataloader, model_parts, optimizers, lr_schedulers, sd_adapter, base_folder: as torchtitan passes them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's options, but for `last_save_in_hf` and `initial_load_in_hf_quantized`, which are refused."""

        background: bool | tc.BackgroundOptions = True
        """As in `treeckpt.Manager`: with staging "lazy" copies are made beside the next forward and backward pass."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not config.enable:
            return
        for name in ("last_save_in_hf", "initial_load_in_hf_quantized"):
            if getattr(config, name):
                hint = "Convert between checkpoints by torchtitan's own CheckpointManager"
                raise tc.CheckpointError(name, expected="False", found="True", hint=hint)
        self.config, self.sd_adapter, self.states, self.save_future = config, sd_adapter, states, None
        states |= {MODEL: ModelWrapper(model_parts), OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers}
        states |= {} if dataloader is None else {DATALOADER: dataloader}
        self.manager = tc.Manager(
            filesystem.join(base_folder, config.folder),
            name="step-{step}",
            keep=config.keep_latest_k or None,
            every=config.interval,
            background=config.background,
        )

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self.config
        due = self.manager.should_save(curr_step) or (curr_step == 1 and config.enable_first_step_checkpoint)
        if config.load_only or not (due or last_step):
            return False
        if last_step and config.last_save_model_only:
            dtype, tree = TORCH_DTYPE_MAP[config.export_dtype], self._tree([MODEL])
            tree = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in tree.items()}
        else:
            tree = self._tree(self.states)
        saved = self.manager.save(curr_step, tree)
        self.save_future: Any = saved if isinstance(saved, tc.Pending) else None
        if last_step:
            self.maybe_wait_for_saving()
        return True

    def _maybe_wait_for_staging(self) -> None:
        if self.save_future is not None:
            self.save_future.wait_staged()

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self.manager.wait()

    def _close(self) -> None:
        if hasattr(self, "manager"):
            self.manager.close()

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        while True:
            with self.manager.open(None if step == -1 else step) as opened:
                if opened is None:
                    return self._load_initial()
                try:
                    self._fill(partial(opened.load, strict="missing"), model_only=opened.step == 0)
                except tc.CorruptError:
                    if step != -1:
                        raise
                else:
                    return True

    def _load_initial(self) -> bool:
        """Loads what the options of a first run name; returns whether they do."""
        config = self.config
        if config.initial_load_in_hf:
            path = config.initial_load_path or self.sd_adapter.hf_assets_path
            weights = self.sd_adapter.to_hf(self._tree([MODEL]))
            tc.load_into(path, weights, strict="missing", cast=True)
            self.states[MODEL].load_state_dict(self.sd_adapter.from_hf(weights))
        elif config.initial_load_path:
            path, only = config.initial_load_path, config.initial_load_model_only
            self._fill(lambda into: tc.load_into(path, into, strict="missing"), model_only=only)
        return bool(config.initial_load_in_hf or config.initial_load_path)

    def _fill(self, load: Callable[..., Any], *, model_only: bool) -> None:
        """Fills the states that the options name."""
        names = [MODEL] if model_only else [n for n in self.states if n not in self.config.exclude_from_loading]
        tree = self._tree(names)
        load(into=tree)
        self.states[MODEL].load_state_dict(tree)

    def _tree(self, names: Any) -> dict[str, Any]:
        """Returns a tree with states by their names, in which the entries of the model stand at the root."""
        tree = {name: self.states[name] for name in names if name != MODEL}
        return {**self.states[MODEL].state_dict(), **tree} if MODEL in names else tree
