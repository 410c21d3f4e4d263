"""Many ranges at once: each is consumed once, within the memory, whatever fails, is throttled or is slow."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from treeckpt.io.storage.bucket import FetchFailure, RangeResponse
from treeckpt.io.storage.range_fetcher import HEDGED, MOST, START, RangeFetcher, RequestDepth, RequestTimes

RANGES = [("file", 10 * n, 10) for n in range(100)]


class Passing(Exception):
    """An error after which the same request may succeed."""


class Throttled(Passing):
    """The store asks for fewer requests."""


def judge(error: Exception) -> FetchFailure:
    return FetchFailure(isinstance(error, Throttled), isinstance(error, Passing))


def content(wanted: Any) -> bytes:
    """The bytes of a file whose ranges differ."""
    _, offset, nbytes = wanted
    return bytes(at % 251 for at in range(offset, offset + nbytes))


def answer(wanted: Any, *, pieces: int = 3, size: int | None = None) -> RangeResponse:
    """A range in pieces of a few bytes."""
    data = memoryview(content(wanted))
    return RangeResponse(size, (data[at : at + pieces] for at in range(0, len(data), pieces)))


class Collected:
    """What was consumed: each range's bytes, in order and once."""

    def __init__(self) -> None:
        self.ranges: dict[int, bytearray] = {}
        self.busy: set[int] = set()

    def __call__(self, number: int, at: int, data: memoryview, size: int | None) -> None:
        assert number not in self.busy, "one call at a time"
        self.busy.add(number)
        found = self.ranges.setdefault(number, bytearray())
        assert at == len(found), "in order"
        found += data
        self.busy.remove(number)


def fetch_all(fetch: Callable[[Any], RangeResponse], *, memory: int = 1 << 20, tries: int = 5) -> Counter[bytes]:
    """Fetches `RANGES`; counts what was consumed under each number."""
    found = Collected()
    RangeFetcher(fetch, judge, tries).run(RANGES, found, memory=memory)
    assert all(data == content(RANGES[number]) for number, data in found.ranges.items())
    return Counter(content(RANGES[number]) for number in found.ranges)


def test_each_range_is_consumed_once() -> None:
    assert fetch_all(answer) == Counter(map(content, RANGES))


@pytest.mark.parametrize(("size", "lengths"), [(27, [10, 10, 7, 0]), (20, [10, 10, 0, 0]), (1000, [10] * 4)])
def test_what_lies_behind_the_end_of_the_file_is_left_out(size: int, lengths: list[int]) -> None:
    found = Collected()

    def fetch(wanted: Any) -> RangeResponse:
        name, offset, nbytes = wanted
        return answer((name, offset, max(min(nbytes, size - offset), 0)), size=size)

    RangeFetcher(fetch, judge, 1).run(RANGES[:4], found, memory=100)
    assert [len(found.ranges[number]) for number in range(4)] == lengths


@pytest.mark.parametrize("cut", [0, 1, 3, 9])
def test_a_range_that_breaks_off_goes_on_where_it_ended(cut: int) -> None:
    asked: list[int] = []

    def fetch(wanted: Any) -> RangeResponse:
        if wanted[1] // 10 != 3:
            return answer(wanted)
        asked.append(wanted[1])
        if len(asked) > 1:
            return answer(wanted)
        whole = answer((*wanted[:2], cut))

        def pieces() -> Any:
            yield from whole.pieces
            if cut % 2:
                raise Passing

        return RangeResponse(None, pieces())

    assert sum(fetch_all(fetch).values()) == len(RANGES)
    assert asked == [30, 30 + cut]


def test_the_first_ranges_are_consumed_before_all_others_which_are_on_their_way_meanwhile() -> None:
    order, others = list[int](), threading.Event()

    def fetch(wanted: Any) -> RangeResponse:
        if wanted[1] > 10:
            others.set()
        else:
            others.wait(60)
        return answer(wanted)

    def consume(number: int, at: int, data: memoryview, size: int | None) -> None:
        order.append(number)

    RangeFetcher(fetch, judge, 1).run(RANGES[:8], consume, memory=1000, first=2)
    assert set(order[:8]) == {0, 1} and set(order[8:]) == set(range(2, 8))


def test_an_error_of_the_first_ranges_ends_those_that_wait_for_them() -> None:
    seen: list[int] = []

    def consume(number: int, at: int, data: memoryview, size: int | None) -> None:
        seen.append(number)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        RangeFetcher(answer, judge, 1).run(RANGES[:8], consume, memory=1000, first=1)
    assert seen == [0]


@pytest.mark.parametrize("memory", [0, 10, 35, 1 << 20])
def test_what_is_in_flight_or_not_consumed_fits_the_memory(memory: int) -> None:
    lock, flying, most = threading.Lock(), [0], [0]

    def fetch(wanted: Any) -> RangeResponse:
        with lock:
            flying[0] += wanted[2]
            most[0] = max(most[0], flying[0])
        time.sleep(0.001)
        with lock:
            flying[0] -= wanted[2]
        return answer(wanted)

    assert sum(fetch_all(fetch, memory=memory).values()) == len(RANGES)
    assert most[0] <= max(memory, 10) and most[0] <= 10 * START


@pytest.mark.parametrize("kind", [Passing, Throttled])
def test_requests_that_fail_for_a_moment_are_repeated(kind: type[Exception]) -> None:
    failing = {0, 10, 500}

    def fetch(wanted: Any) -> RangeResponse:
        if wanted[1] in failing:
            failing.discard(wanted[1])
            raise kind
        return answer(wanted)

    assert sum(fetch_all(fetch).values()) == len(RANGES)


@pytest.mark.parametrize(("error", "requests"), [(Passing(), 3), (ValueError(), 1)])
def test_a_request_that_keeps_failing_is_given_up_with_its_error(error: Exception, requests: int) -> None:
    asked: list[int] = []

    def fetch(wanted: Any) -> RangeResponse:
        if wanted[1] == 30:
            asked.append(1)
            raise error
        return answer(wanted)

    with pytest.raises(type(error)):
        fetch_all(fetch, tries=3)
    assert requests <= len(asked) <= requests + 1, "it may have been slow too"


def test_an_error_of_the_consumer_ends_the_run_and_nothing_is_consumed_after_it() -> None:
    seen: list[int] = []

    def consume(number: int, at: int, data: memoryview, size: int | None) -> None:
        seen.append(number)
        if number == 5:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        RangeFetcher(answer, judge, 1).run(RANGES, consume, memory=10)
    assert sorted(set(seen)) == list(range(6)) and seen.count(5) == 1


@pytest.mark.parametrize("after", [0, 3, 6])
def test_a_slow_request_is_sent_again_for_what_is_missing_and_the_first_answer_counts(after: int) -> None:
    held, asked = threading.Event(), list[int]()

    def fetch(wanted: Any) -> RangeResponse:
        if wanted[1] // 10 != 99:
            return answer(wanted)
        asked.append(wanted[1])
        if len(asked) > 1:
            return answer(wanted)

        def pieces() -> Any:
            for number, piece in enumerate(answer(wanted).pieces):
                if number * 3 == after:
                    held.wait(60)
                yield piece

        return RangeResponse(None, pieces())

    assert sum(fetch_all(fetch).values()) == len(RANGES)
    held.set()
    assert asked == [990, 990 + after]


def test_of_twenty_requests_that_have_ended_one_slow_one_is_sent_again() -> None:
    held, asked = threading.Event(), list[int]()

    def fetch(wanted: Any) -> RangeResponse:
        asked.append(wanted[1])
        if wanted[1] >= 300 and asked.count(wanted[1]) == 1:
            held.wait(0.5)  # far longer than the first 30
        return answer(wanted)

    assert sum(fetch_all(fetch).values()) == len(RANGES)
    assert len(RANGES) < len(asked) <= len(RANGES) * (1 + 1 / HEDGED) + 1
    assert max(map(asked.count, asked)) == 2


def test_a_request_that_is_sent_again_counts_for_the_memory_and_goes_before_new_ones() -> None:
    asked, flights, lock = list[int](), [0], threading.Lock()
    most = 0

    def fetch(wanted: Any) -> RangeResponse:
        nonlocal most
        with lock:
            asked.append(wanted[1])
            flights[0] += wanted[2]
            most = max(most, flights[0])
        time.sleep(1.0 if wanted[1] == 300 and asked.count(300) == 1 else 0.02)
        with lock:
            flights[0] -= wanted[2]
        return answer(wanted)

    assert sum(fetch_all(fetch, memory=40).values()) == len(RANGES)
    assert asked.count(300) == 2 and most <= 40


def test_no_range_is_no_request() -> None:
    RangeFetcher(answer, judge, 1).run([], lambda *_: None, memory=10)


# depth and times ------------------------------------------------------------------------------------------------------
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
    assert RangeFetcher(answer, judge, tries=1).depth.depth == requests


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

    assert rate(rated(RequestDepth(), rate, 20)[-1]) > 0.85 * max(rate(depth) for depth in range(1, MOST + 1))


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


def test_a_request_is_slow_past_the_99th_percentile_of_enough_others() -> None:
    times = RequestTimes(most=200)
    for _ in range(15):
        times.add(1.0)
    assert times.slow() is None
    times.add(2.0)
    assert times.slow() == 3.0
    for _ in range(200):
        times.add(0.5)
    assert times.slow() == 0.75, "the last ones count"
