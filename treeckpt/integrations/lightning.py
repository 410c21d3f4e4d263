"""Lightning (2.6 or later) on treeckpt: a plugin that saves and loads, and strategies whose ranks all save.

    trainer = Trainer(plugins=[TreeckptIO()], callbacks=[ModelCheckpoint("run", save_last="link")])
    trainer.fit(module, loader, ckpt_path="last")

With the plugin rank 0 saves alone, and nobody waits for it. `Trainer(strategy=TreeckptDDP())` is DDP in which each rank
saves its part of what all have, and the places of its own loops and loaders; `TreeckptModelParallel` is the same for
FSDP2 and tensor parallelism.

It works with `pytorch_lightning` or `lightning_fabric` if the program has imported one, otherwise with `lightning`. A
checkpoint is a directory of the name that Lightning gives it, in the run of a `Manager`. Saves go on in the background:
what Lightning removes is deleted before the next save, and a name whose save was killed loads the newest checkpoint
beside it, with a warning. Files that Lightning saved load as before. Like these, checkpoints have no random generators.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import treeckpt as tc

from .._core.public_names import publish
from ._lightning_io import TreeckptIO, install, pytorch

__all__ = ["TreeckptDDP", "TreeckptIO", "TreeckptModelParallel", "install"]
_Base: Any = pytorch.strategies.Strategy if TYPE_CHECKING else object
_PARTS = {"state_dict": "model", "optimizer_states": "optimizer"}  # by Lightning's names


class _SavesOnAllRanks(_Base):
    """What strategies have in common whose ranks save together: put before that of Lightning."""

    def __init__(self, *arguments: Any, io: TreeckptIO | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.checkpoint_io = io or TreeckptIO()
        self.checkpoint_io.options["comm"] = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves parameters and DTensors of all ranks, the loops and loaders of each, and what else rank 0 has."""
        state = copy.copy(checkpoint["state_dict"])
        own = dict(self.lightning_module.named_parameters(remove_duplicate=False))
        state |= {k: tc.FromRank(v) for k, v in state.items() if k not in own and not isinstance(v, DTensor)}
        tree = {k: tc.FromRank(v) if isinstance(v, dict) else v for k, v in checkpoint.items()}
        tree |= {"state_dict": state, "loops": tc.PerRank(checkpoint["loops"])}
        self.checkpoint_io.save_checkpoint(tree, self.broadcast(filepath), storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return super().load_checkpoint(self.broadcast(checkpoint_path), weights_only)

    def teardown(self) -> None:
        super().teardown()
        self.checkpoint_io.teardown()


class TreeckptDDP(_SavesOnAllRanks, pytorch.strategies.DDPStrategy):
    """DDP: each rank saves its part, `io` says how; a checkpoint restores on any number of ranks."""


class TreeckptModelParallel(_SavesOnAllRanks, pytorch.strategies.ModelParallelStrategy):
    """FSDP2 and tensor parallelism: each rank saves what it has, and a checkpoint restores into any other mesh."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        if Path(path).is_file() or Path(path, "meta.pt").is_file():
            return super().load_checkpoint(path, weights_only)
        options = {"rename": _PARTS, "from_root": True, "strict": self.lightning_module.strict_loading}
        fill = partial(tc.OpenedStep.restore, model=self.model, optimizer=self.optimizers or None, **options)
        rest = self.checkpoint_io.restore(path, fill, exclude=[*_PARTS])
        return {key: part for key, part in rest.items() if key not in _PARTS}


publish(__name__, __all__, globals())
