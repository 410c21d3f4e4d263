"""The dashboard: pages over runs and checkpoints."""
