"""transformers: a Trainer on treeckpt's checkpoints, and load rules for names of the hub.

from treeckpt.integrations.transformers import TreeckptTrainer

trainer = TreeckptTrainer(model=model, args=args, train_dataset=data)  # as transformers.Trainer
trainer.train(resume_from_checkpoint=True)  # the newest `checkpoint-<step>` that is whole
"""

from typing import TYPE_CHECKING, Any

from ..._core.public_names import publish
from ._hub_names import hub_rules, module_rules

if TYPE_CHECKING:
    from ._trainer import TreeckptMixin, TreeckptTrainer

__all__ = ["TreeckptMixin", "TreeckptTrainer", "hub_rules", "module_rules"]
publish(__name__, __all__, globals())


def __getattr__(name: str) -> Any:
    """The Trainer, which imports that of transformers when it is first asked for."""
    if name in ("TreeckptMixin", "TreeckptTrainer"):
        from . import _trainer

        publish(__name__, __all__, _trainer.__dict__)
        return getattr(_trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
