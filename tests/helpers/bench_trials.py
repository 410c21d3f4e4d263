"""Trials of the benchmark, made up."""

from __future__ import annotations

from typing import Any

from tests.bench.results import REMOTE_LIMITS, RemoteTrial
from treeckpt._bench.results import LIMITS, Trial


def trial(contender: str = "treeckpt", phase: Any = "save", seconds: float = 1.0, **changes: Any) -> Trial:
    """One operation of one contender, as fast as its limit unless told."""
    fields: dict[str, Any] = {
        "scenario": "gpt2",
        "contender": contender,
        "phase": phase,
        "repetition": 0,
        "seconds": seconds,
        "summed": seconds,
        "nbytes": 1000,
        "limit": (limit := {**LIMITS, **REMOTE_LIMITS}[phase]),
        "limits": {limit: 1000.0},
        "extra_rss": 0,
        "read_bytes": 1000,
        "write_bytes": 0,
        "files_bytes": 1000,
        "cached": 0.0,
    }
    return (RemoteTrial if phase in REMOTE_LIMITS else Trial)(**{**fields, **changes})
