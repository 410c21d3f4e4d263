"""Worlds larger than this machine: the real planning, agreement, commit and load planning, for simulated ranks."""
