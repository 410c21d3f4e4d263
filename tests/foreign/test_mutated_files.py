"""Changed files of every format under limits of memory and time: an error of ours or a right result, by any way in."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.limited_reads import ACTS, SECONDS, LimitedReads
from tests.helpers.mutations import mutated

COUNT = int(os.environ.get("TREECKPT_MUTATED_FILES", "500"))
FIRST = int(os.environ.get("TREECKPT_MUTATED_FIRST", "0"))


def _check(reads: LimitedReads, path: Path, numbers: range) -> Counter[str]:
    """Reads the checkpoints of some numbers by each way; returns how often each outcome was."""
    outcomes: Counter[str] = Counter()
    failed: list[tuple[int, str, str, str]] = []
    slowest = 0.0
    for number in numbers:
        name, source = mutated(path, number)
        out = path / f"out{number}"
        out.mkdir()
        for act, (outcome, told, seconds) in reads.outcomes(source, out, ACTS).items():
            outcomes[f"{act}: {outcome}"] += 1
            slowest = max(slowest, seconds)
            if outcome not in ("ok", "ours"):
                failed.append((number, name, act, told))
                print(number, name, act, outcome, told, flush=True)
        shutil.rmtree(out)
        shutil.rmtree(path / f"m{number}")
    print(dict(sorted(outcomes.items())), f"slowest {slowest:.2f} s", flush=True)
    assert not failed, failed
    assert slowest <= SECONDS
    return outcomes


def test_a_few_changed_files_of_each_format(tmp_path: Path, limited: LimitedReads) -> None:
    outcomes = _check(limited, tmp_path, range(8))
    assert outcomes["load: ours"] > 2


@pytest.mark.slow
def test_many_changed_files(tmp_path: Path, limited: LimitedReads) -> None:
    outcomes = _check(limited, tmp_path, range(FIRST, FIRST + COUNT))
    assert outcomes["load: ours"] > COUNT // 4 and outcomes["load: ok"] > COUNT // 20
