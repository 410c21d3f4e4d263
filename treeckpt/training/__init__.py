"""Training state and checkpoints."""

from .guard import Guard, guard

__all__ = ["Guard", "guard"]
