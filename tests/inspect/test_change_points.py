"""Levels of durations: since when they are longer or shorter, whatever single slow saves there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._inspect.change_points import MIN_RATIO, levels_of

NOISES = {"normal": np.random.Generator.normal, "laplace": np.random.Generator.laplace}


def noisy(levels: list[float], noise: float, seed: int = 0, kind: str = "normal") -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.array(levels) * np.exp(NOISES[kind](random, 0, noise, len(levels)))


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
@pytest.mark.parametrize(("first", "count"), [(51, 60), (40, 60), (57, 60), (3, 40), (9000, 10_000)])
def test_a_lasting_change_is_found_where_it_begins(first: int, count: int, noise: float) -> None:
    before, after = levels_of(noisy([0.1] * first + [0.4] * (count - first), noise))
    assert (before.start, before.stop, after.start, after.stop) == (0, first, first, count)
    assert before.median == pytest.approx(0.1, rel=0.15) and after.median == pytest.approx(0.4, rel=0.15)


def test_a_level_between_two_equal_ones_is_found() -> None:
    assert [level.start for level in levels_of(noisy([0.1] * 20 + [0.3] * 20 + [0.1] * 20, 0.1))] == [0, 20, 40]


@pytest.mark.parametrize("slow", [[5], [5, 6], [58, 59], list(range(0, 60, 5))])
def test_single_slow_saves_are_no_level(slow: list[int]) -> None:
    series = noisy([0.1] * 60, 0.05)
    series[slow] *= 8
    [level] = levels_of(series)
    assert level.median == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("kind", NOISES)
def test_noise_alone_has_one_level(kind: str) -> None:
    several = [
        seed
        for seed in range(200)
        if len(levels_of(noisy([0.1] * (10 + seed), 0.01 * (1 + seed % 30), seed, kind))) > 1
    ]
    assert len(several) <= 2


@given(st.lists(st.floats(1e-6, 1e4), max_size=60))
def test_levels_partition_the_series_and_neighbours_differ(seconds: list[float]) -> None:
    levels = levels_of(seconds)
    assert [n for level in levels for n in range(level.start, level.stop)] == list(range(len(seconds)))
    for before, after in itertools.pairwise(levels):
        assert max(before.median / after.median, after.median / before.median) >= MIN_RATIO
