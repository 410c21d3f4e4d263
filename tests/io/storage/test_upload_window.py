"""Parts of uploads in flight: cut where they end, not copied, and waited for."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.background import until
from treeckpt._io.storage import requests_in_flight
from treeckpt._io.storage.obstore import MAX_PARTS, PART, PARTS, part_nbytes
from treeckpt._io.storage.requests_in_flight import NEAR_PER_CPU, START, RequestDepth, UploadWindow, first_depth

MIB = 1 << 20


@given(st.integers(1, 5 << 40))
def test_parts_are_8_to_64_mib_and_never_more_than_a_service_takes(nbytes: int) -> None:
    part = part_nbytes(nbytes)
    assert -(-nbytes // part) <= MAX_PARTS
    assert part >= PART and (part <= 64 * MIB or part == -(-nbytes // MAX_PARTS))
    assert part == PART or -(-nbytes // part) <= PARTS or part >= 64 * MIB


@given(st.integers(1, 512), st.integers(0, MIB - 1))
def test_a_header_before_whole_parts_is_no_part_of_its_own(whole: int, header: int) -> None:
    nbytes = whole * PART + header
    assert -(-nbytes // part_nbytes(nbytes)) == whole


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 30))
def test_the_pieces_are_the_blocks_uncopied_and_none_lies_in_two_parts(sizes: list[int], part: int) -> None:
    data = np.arange(sum(sizes), dtype=np.uint16).astype(np.uint8)
    ends = np.cumsum(sizes, dtype=int).tolist()
    blocks = [data[end - size : end].data for size, end in zip(sizes, ends, strict=True)]
    window, at = UploadWindow(), 0
    for piece in window.stream(blocks, part):
        assert len(piece) and np.shares_memory(piece, data[at : at + 1])
        assert at // part == (at + len(piece) - 1) // part
        at += len(piece)
        del piece
    assert at == len(data)


def test_a_part_waits_until_another_one_is_not_referred_to_any_more() -> None:
    window, seen = UploadWindow(), list[np.ndarray]()
    window.depth = RequestDepth(2, most=2)
    blocks = [np.full(6, number, np.uint8).data for number in range(4)]

    def send() -> None:
        for piece in window.stream(blocks, 8):
            seen.append(piece)
            del piece

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert until(lambda: len(seen) == 4, 60)  # 6 and 2 bytes, 4 and 4: two parts
    thread.join(0.2)
    assert len(seen) == 4, "the third part waits"
    del seen[0]
    thread.join(0.2)
    assert len(seen) == 3, "one part was sent in two pieces"
    del seen[0]
    thread.join(60)
    assert not thread.is_alive() and sum(map(len, seen)) == 16


def test_uploads_begin_with_more_parts_the_farther_the_store_is_and_stay_with_what_was_found() -> None:
    window = UploadWindow()
    window.expect(0.04)
    assert window.depth.depth == first_depth()
    window.expect(0.003)
    assert window.depth.depth == first_depth(NEAR_PER_CPU) < first_depth()
    window.expect(0.15)
    assert window.depth.depth == START
    window.depth = RequestDepth(8)
    with window.changed:
        window.in_flight = 1
        window.leave(8 * MIB, 0.0)
    window.expect(0.15)
    assert window.depth.depth == 8


@pytest.mark.parametrize(
    ("seconds", "depth"),
    [
        ([0.1] * 30, 64),  # as many as are in flight at a time, all alike
        ([0.3, 0.6, 1.2, 0.9], 64),  # they share a rate
        ([0.3, 1.5], 32),
        ([0.3, 1.5, 1.6, 1.7], 32),  # in flight at the same time
        ([0.3, 1.5, -1.5, -1.5, -1.5, -1.5], 8),  # each after the one before
        ([10.0, 30.0], 64),
        ([10.0, 41.0], 32),
    ],
)
def test_parts_that_take_far_longer_than_the_fastest_halve_what_is_in_flight(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], depth: int
) -> None:
    window, now = UploadWindow(), 100.0
    window.depth = RequestDepth(64)
    monkeypatch.setattr(requests_in_flight, "time", SimpleNamespace(monotonic=lambda: now))
    window.depth.restart(now)
    for taken in seconds:
        sent = 100.0 if taken > 0 else now
        now = sent + abs(taken)
        with window.changed:
            window.leave(8 * MIB, sent)
    assert window.depth.depth == depth
