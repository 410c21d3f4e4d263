"""The dashboard: pages over runs and checkpoints, each one also JSON. Read-only; no torch, no network but its own."""
