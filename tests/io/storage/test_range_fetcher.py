"""Many ranges at once: each is consumed once, within the memory, whatever fails, is throttled or is slow."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.world import LONG
from treeckpt._io.storage import requests_in_flight
from treeckpt._io.storage.bucket import FetchFailure, RangeResponse
from treeckpt._io.storage.requests_in_flight import HEDGED, RangeFetcher, RequestTimes

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
    return RangeResponse(size, [data[at : at + pieces] for at in range(0, len(data), pieces)])


def pieces_of(wanted: Any) -> Iterator[memoryview]:
    """The pieces of `answer`."""
    return iter(answer(wanted).pieces)


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


def test_the_first_retry_of_a_range_waits_up_to_what_its_constant_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, waited = Counter[int](), list[float]()

    def fetch(wanted: Any) -> RangeResponse:
        asked[wanted[1]] += 1
        if wanted[1] == 0 and asked[0] < 4:
            raise Passing
        return answer(wanted)

    monkeypatch.setattr(requests_in_flight, "FIRST_PAUSE", 0.004)
    monkeypatch.setattr(requests_in_flight, "LONGEST_PAUSE", 0.01)
    # of this module alone: threads of other tests may sleep too
    clock = SimpleNamespace(
        monotonic=time.monotonic, sleep=lambda seconds: (waited.append(seconds), time.sleep(seconds))
    )
    monkeypatch.setattr(requests_in_flight, "time", clock)
    fetch_all(fetch)
    monkeypatch.undo()
    assert len(waited) == 3
    for seconds, most in zip(waited, (0.004, 0.008, 0.01), strict=True):
        assert most / 2 <= seconds <= most


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

        def pieces() -> Any:
            yield from pieces_of((*wanted[:2], cut))
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
    assert most[0] <= max(memory, 10) and most[0] <= 10 * 64


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
            for number, piece in enumerate(pieces_of(wanted)):
                if number * 3 == after:
                    held.wait(60)
                yield piece

        return RangeResponse(None, pieces())

    assert sum(fetch_all(fetch).values()) == len(RANGES)
    held.set()
    assert asked == [990, 990 + after]


def test_of_twenty_requests_that_have_ended_one_slow_one_is_sent_again() -> None:
    again, asked, lock = threading.Event(), list[int](), threading.Lock()

    def fetch(wanted: Any) -> RangeResponse:
        with lock:
            asked.append(wanted[1])
            count = asked.count(wanted[1])
        if count > 1:
            again.set()
        elif wanted[1] >= 300:
            again.wait(LONG)  # far longer than the first 30
        return answer(wanted)

    assert sum(fetch_all(fetch).values()) == len(RANGES)
    assert len(RANGES) < len(asked) <= len(RANGES) * (1 + 1 / HEDGED) + 1
    assert max(map(asked.count, asked)) == 2


def test_a_request_that_is_sent_again_counts_for_the_memory_and_goes_before_new_ones() -> None:
    asked, flights, lock, again = list[int](), [0], threading.Lock(), threading.Event()
    most = 0

    def fetch(wanted: Any) -> RangeResponse:
        nonlocal most
        with lock:
            asked.append(wanted[1])
            flights[0] += wanted[2]
            most = max(most, flights[0])
            count = asked.count(300)
        time.sleep(0.02)
        if wanted[1] == 300:
            again.set() if count > 1 else again.wait(LONG)
        with lock:
            flights[0] -= wanted[2]
        return answer(wanted)

    assert sum(fetch_all(fetch, memory=40).values()) == len(RANGES)
    assert asked.count(300) == 2 and most <= 40


def test_no_range_is_no_request() -> None:
    RangeFetcher(answer, judge, 1).run([], lambda *_: None, memory=10)


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


def test_a_retry_draws_nothing_from_the_generator_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training draws from it, and its numbers would depend on how often requests fail."""
    monkeypatch.setattr(requests_in_flight, "FIRST_PAUSE", 0.001)
    before, failed = random.getstate(), list[int]()

    def fetch(wanted: Any) -> RangeResponse:
        if not failed:
            failed.append(wanted[1])
            raise Passing
        return answer(wanted)

    fetch_all(fetch)
    assert failed and random.getstate() == before
