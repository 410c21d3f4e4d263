"""The world of one: the process that runs the tests saves and loads what the ranks load and save."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import treeckpt as tc

from .layout_cases import check_load, make
from .layout_models import models_of
from .layouts import bits, kept, layouts_of

__all__ = ["load_alone", "save_alone"]


def save_alone(directory: Path) -> None:
    """Saves under each layout of one rank."""
    for layout in (*layouts_of(1), *models_of(1)):
        tc.save(directory / f"1 {layout}", make(layout, 0, 1))


def load_alone(directory: Path, world: int, *, variants: Iterable[int]) -> None:
    """Loads what a world of ranks saved, whole and as each layout of one rank."""
    for family in (layouts_of, models_of):
        oracle = kept(make, family(1)[0], 0, 1)
        for layout in family(world):
            path = directory / f"{world} {layout}"
            for variant in variants:
                for target in family(1):
                    check_load(path, target, 0, 1, variant)
            found = tc.load(path)
            assert set(found) == set(oracle)
            for name, expected in oracle.items():
                assert bits(found[name]) == bits(expected), f"{layout}: {name}"
