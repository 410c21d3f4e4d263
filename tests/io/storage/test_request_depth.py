"""The number of requests in flight follows the rate that a store gives for it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

import treeckpt as tc
from treeckpt._io.storage.requests_in_flight import MAX_REQUESTS, RequestDepth, UploadWindow, first_depth


def rated(depth: RequestDepth, rate: Callable[[int], float], windows: int) -> list[int]:
    """The depth after each window, of a store whose bytes per second depend on it."""
    found, now = [], 1.0
    depth.restart(now)
    for _ in range(windows):
        count = max(depth.depth, 10)
        for _ in range(count):
            now += 100 / rate(depth.depth)
            depth.add(100, now)
        found.append(depth.depth)
    return found


@pytest.mark.parametrize(("processors", "requests"), [(1, 16), (2, 32), (4, 64), (96, 64)])
def test_a_machine_with_few_processors_begins_with_fewer_requests(
    processors: int, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(processors)), raising=False)
    assert first_depth() == UploadWindow().depth.depth == requests
    for endpoint in ("http://10.0.0.1:9000", "https://10.0.0.1:9000"):
        store = tc.ObjectStore("s3://bucket/run", endpoint=endpoint, access_key_id="k", secret_access_key="s")
        assert store._fetcher.depth.depth == requests  # pyright: ignore[reportPrivateUsage]


def test_the_depth_rises_while_the_rate_does() -> None:
    depth = RequestDepth(8, most=100)
    assert rated(depth, lambda depth: 100.0 * depth, 12)[-1] == 100


@pytest.mark.parametrize("latency", [0.005, 0.04, 0.15])
@pytest.mark.parametrize("of_connection", [30e6, 90e6, 1e9])
@pytest.mark.parametrize("of_link", [1.5e9, 12e9])
def test_the_depth_that_is_found_gives_nearly_the_best_rate(
    latency: float, of_connection: float, of_link: float
) -> None:
    def rate(depth: int) -> float:  # in requests of 8 MiB, 100 of which `rated` takes for one
        return 100 * min(depth / (latency + (8 << 20) / of_connection), of_link / (8 << 20))

    assert rate(rated(RequestDepth(), rate, 20)[-1]) > 0.85 * max(rate(depth) for depth in range(1, MAX_REQUESTS + 1))


def test_the_depth_stays_where_more_requests_gain_nothing() -> None:
    depth = RequestDepth(8, most=100)
    assert set(rated(depth, lambda depth: 1000.0, 12)[2:]) == {8}


@pytest.mark.parametrize("enough", [12, 30])
def test_the_depth_falls_to_what_is_enough(enough: int) -> None:
    found = rated(RequestDepth(), lambda depth: 100.0 * min(depth, enough), 16)
    assert enough <= found[-1] < 1.6 * enough and len(set(found[-4:])) == 1


def test_the_depth_falls_where_refusals_that_nobody_sees_cost_time() -> None:
    assert rated(RequestDepth(), lambda depth: 400.0 if depth <= 16 else 6400.0 / depth, 16)[-1] <= 16


def test_the_depth_is_looked_for_again_when_the_rate_has_changed() -> None:
    depth = RequestDepth()
    assert rated(depth, lambda depth: 10.0 * min(depth, 12), 16)[-1] < 20
    assert rated(depth, lambda depth: 90.0 * min(depth, 60), 16)[-1] >= 60
    assert rated(depth, lambda depth: 10.0 * min(depth, 12), 16)[-1] < 20


def test_a_pause_between_two_loads_is_not_taken_for_a_low_rate() -> None:
    depth = RequestDepth(8, most=100)
    rated(depth, lambda depth: 100.0 * depth, 2)
    before = depth.depth
    depth.restart(1000.0)
    for number in range(before):
        depth.add(100, 1000.0 + (number + 1) / before)
    assert depth.depth >= before


def test_a_store_that_throttles_gets_half_the_requests_once_for_all_that_were_in_flight() -> None:
    depth = RequestDepth(64)
    for _ in range(20):
        depth.throttle(started=1.0, now=2.0)
    assert depth.depth == 32
    depth.throttle(started=2.5, now=3.0)
    assert depth.depth == 16
    assert max(rated(depth, lambda depth: 100.0 * depth, 5)) <= 16 + 5, "then one more for each window"
