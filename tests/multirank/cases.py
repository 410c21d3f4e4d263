"""What the ranks do in each phase: importing the modules of cases registers them, in this order."""

from __future__ import annotations

from . import (
    background_cases,
    convert_cases,
    dcp_cases,
    described_cases,
    layout_cases,
    layout_groups,
    layout_trees,
    parts_cases,
    rank_cases,
    relay_cases,
    state_dict_cases,
    talk_cases,
    together_cases,
    training_cases,
)
from .registry import PHASES, WHOLE, Case, Rank, of

__all__ = [
    "PHASES",
    "WHOLE",
    "Case",
    "Rank",
    "background_cases",
    "convert_cases",
    "dcp_cases",
    "described_cases",
    "layout_cases",
    "layout_groups",
    "layout_trees",
    "of",
    "parts_cases",
    "rank_cases",
    "relay_cases",
    "state_dict_cases",
    "talk_cases",
    "together_cases",
    "training_cases",
]
