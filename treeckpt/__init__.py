"""Functional checkpoints of PyTorch state."""
