"""What the ranks do in each phase: importing the modules of cases registers them, in this order."""

from __future__ import annotations

from . import background_cases, layout_cases, rank_cases, relay_cases, talk_cases, training_cases
from .registry import PHASES, Case, Rank, of

__all__ = [
    "PHASES",
    "Case",
    "Rank",
    "background_cases",
    "layout_cases",
    "of",
    "rank_cases",
    "relay_cases",
    "talk_cases",
    "training_cases",
]
