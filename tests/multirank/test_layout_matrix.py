"""Every layout saved, and loaded as every other one: of eight, four, three and one rank, and of eight again."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cases import WHOLE
from .launch import launch
from .layout_alone import load_alone, save_alone


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_layout_loads_into_every_other_across_world_sizes(tmp_path: Path) -> None:
    save_alone(tmp_path)
    found = launch(WHOLE, tmp_path, timeout=1000)
    for phase, (_, cases) in WHOLE.items():
        results = found[phase]
        for case in cases:
            assert not results.get(case, "did not run"), f"{phase}, {case}: {results.get(case)}\n{results['']}"
        assert not results[""], results[""]
    for before in (8, 4, 3, 1):
        load_alone(tmp_path, before, variants=range(4))
