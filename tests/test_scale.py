"""Worlds larger than any machine here: what the real planning, agreement, commit and load planning come to."""

from __future__ import annotations

import msgspec
import pytest

from .bench.scale.models import MODELS, Grid, arrays_of
from .bench.scale.report import CHUNK_NBYTES, growth, judge
from .bench.scale.simulate import Figures, simulate

MODEL = msgspec.structs.replace(MODELS["llama 8B"], layers=8)
EXPERTS = msgspec.structs.replace(MODELS["mixtral 8x22B"], layers=2)


@pytest.fixture(scope="module")
def worlds() -> list[Figures]:
    return [simulate(MODEL, Grid(n // 8, 8), Grid(n // 8, 4, 2)) for n in (64, 256, 1024)]


def test_an_index_grows_far_slower_than_the_world(worlds: list[Figures]) -> None:
    assert growth(worlds, lambda row: row.world)["index bytes"] < 0.8
    assert worlds[-1].index_nbytes < 5 << 20


def test_a_message_of_a_rank_is_as_long_in_any_world(worlds: list[Figures]) -> None:
    assert max(row.hello_nbytes for row in worlds) < 200
    assert max(row.done_nbytes for row in worlds) < 1000
    assert all(row.joined_nbytes == row.told_nbytes == 0 for row in worlds), (
        "ranks that bring the same tell digests only"
    )
    assert all(row.messages == 2 * row.world for row in worlds)


def test_loads_read_what_they_need_and_saves_are_balanced(worlds: list[Figures]) -> None:
    assert max(row.amplification for row in worlds) <= 1.05
    assert max(row.write_balance for row in worlds) <= 1.2


def test_stages_of_a_pipeline_tell_their_parts_once_each() -> None:
    row = simulate(MODEL, Grid(16, 4, 4), Grid(32, 8))
    assert row.classes == 4 and row.messages == 2 * row.world + 4
    assert row.amplification <= 1.05


def test_experts_are_laid_out_over_their_own_mesh() -> None:
    row = simulate(EXPERTS, Grid(16, 2, ep=8), Grid(8, 2, ep=4))
    assert row.leaves == len(arrays_of(EXPERTS, 1)) and row.amplification <= 1.05


def test_uneven_ranges_of_everything_take_few_bytes_each() -> None:
    row = simulate(MODEL, Grid(64), Grid(8, 8), flat=True)
    assert row.classes == 64 and row.chunks > 64
    assert row.index_nbytes / row.chunks <= 1.5 * CHUNK_NBYTES + row.leaves * 60 / row.chunks
    assert not [missed for missed in judge([row]) if missed[1].unit != "bytes"]
