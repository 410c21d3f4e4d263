"""How long requests of a `RangeFetcher` take, of which a test decides: however busy the machine is, none seems slow."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest

from treeckpt._io.storage import requests_in_flight
from treeckpt._io.storage.requests_in_flight import RangeFetcher, RequestTimes


class LateTimes(RequestTimes):
    """Calls no request slow before so many others have ended."""

    ended, least = 0, 1 << 30

    def add(self, seconds: float) -> None:
        super().add(seconds)
        self.ended += 1

    def slow(self) -> float | None:
        return super().slow() if self.ended >= self.least else None


class EqualTimes:
    """A clock on which each request takes half a second: it goes on once all that are in flight have been answered.

    Before they go on, the loop that looks for slow ones has looked at them.
    """

    def __init__(self, fetcher: RangeFetcher, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.looks, self.in_flight, self.answered, self.turn = 1000.0, 0, 0, 0, 0
        self.goes_on, self.sleep = False, time.sleep
        self.changed = threading.Condition(fetcher.lock)
        self.times, self.fetch = fetcher.times, fetcher.fetch
        take, end = requests_in_flight._Run._take, requests_in_flight._Run._end  # pyright: ignore
        fetcher.fetch, fetcher.times = self.answer, cast(Any, self)

        def counted_take(run: Any) -> Any:
            with self.changed:
                request = take(run)
                self.in_flight += request is not None
                return request

        def counted_end(run: Any, *arguments: Any) -> None:
            with self.changed:
                end(run, *arguments)
                self.in_flight -= 1
                self.changed.notify_all()

        monkeypatch.setattr(requests_in_flight._Run, "_take", counted_take)  # pyright: ignore
        monkeypatch.setattr(requests_in_flight._Run, "_end", counted_end)  # pyright: ignore
        monkeypatch.setattr(requests_in_flight, "time", self)

    def monotonic(self) -> float:
        return self.now

    def add(self, seconds: float) -> None:
        self.times.add(seconds)

    def slow(self) -> float | None:
        self.looks += 1
        self.changed.notify_all()
        return self.times.slow()

    def answer(self, wanted: Any) -> Any:
        response = self.fetch(wanted)
        with self.changed:
            self.changed.wait_for(lambda: not self.goes_on)
            turn, self.answered = self.turn, self.answered + 1
            while turn == self.turn:
                if self.answered >= self.in_flight and not self.goes_on:
                    self.go_on()
                else:
                    self.changed.wait()
        return response

    def go_on(self) -> None:
        self.now, self.goes_on, looks = self.now + 0.5, True, self.looks
        self.changed.wait_for(lambda: self.looks >= looks + 2)
        self.goes_on, self.answered, self.turn = False, 0, self.turn + 1
        self.changed.notify_all()
