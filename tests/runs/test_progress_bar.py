"""A bar follows a long read on a terminal, and there is nothing of it anywhere else."""

import io
import re
import sys
import threading

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import until
from tests.helpers.world import LONG
from treeckpt._runs import progress_bar
from treeckpt._runs.progress_bar import reading_bar, stores_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def errors_to(monkeypatch):
    """Sets the stream of errors, and how long a bar waits."""

    def put(stream, delay=0):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(progress_bar, "BAR_DELAY_SECONDS", delay)
        return stream

    return put


@pytest.fixture
def store(tmp_path):
    tc.save(tmp_path / "a", {"a": np.arange(100_000), "b": np.ones(10)})
    return tc.LocalStore(tmp_path / "a")


def test_a_load_is_followed_on_a_terminal(store, errors_to):
    screen = errors_to(Terminal())
    with reading_bar(store, "restoring", 800_080) as source:
        assert tc.load(source)["a"][-1] == 99_999
    text = screen.getvalue()
    assert "restoring" in text and "0.8/0.8 MB" in text.replace("800.1/800.1 kB", "0.8/0.8 MB"), text


def test_what_a_load_borrows_counts_too(store, errors_to):
    screen = errors_to(Terminal())
    for name in store.sizes():
        store.read(name, limit=1 << 30)  # into the page cache
    tree = {"a": np.zeros(100_000, np.int64), "b": np.ones(10)}
    with reading_bar(store, "filling", 1_600_160) as source:
        tc.load_into(source, tree, read=tc.ReadOptions(verify="first"))
    assert tree["a"][-1] == 99_999 and "1.6/1.6 MB" in screen.getvalue(), "compared, and then copied"


def test_an_unknown_total_shows_what_was_read(store, errors_to):
    screen = errors_to(Terminal())
    with reading_bar(store, "verifying") as source:
        assert tc.verify(source).ok
    assert "verifying" in screen.getvalue() and "/?" in screen.getvalue()


def test_a_total_that_is_known_late_shows_the_time_left(store, errors_to):
    screen = errors_to(Terminal())

    def shown_again():
        """Waits for a bar that shows all that was read before."""
        bars = screen.getvalue().count("comparing")
        assert until(lambda: screen.getvalue().count("comparing") >= bars + 2), "the first may have been begun before"

    with stores_bar("comparing") as counted:
        assert until(lambda: re.search(r"0:\d\d:\d\d", screen.getvalue()) is not None), "the time that passed"
        counted.expect(lambda: 10**16)
        assert tc.verify(counted(store)).ok
        shown_again()
        assert "PB" in screen.getvalue()
        assert tc.verify(counted(store)).ok
    assert re.search(r"\d{3,}:\d\d:\d\d", screen.getvalue()), "the time left: hundreds of hours"


def test_a_quick_read_shows_nothing(store, errors_to):
    screen = errors_to(Terminal(), delay=LONG)
    with reading_bar(store, "restoring") as source:
        tc.load(source)
    assert screen.getvalue() == ""


def test_elsewhere_the_store_is_passed_through(store, errors_to, monkeypatch):
    stream = errors_to(io.StringIO())
    with reading_bar(store, "restoring") as source:
        assert source is store
        tc.load(source)
    assert stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)
    with reading_bar(store, "restoring") as source:
        assert source is store


def test_lines_have_the_rate_and_the_time_left(store, errors_to, monkeypatch):
    stream = errors_to(io.StringIO())
    monkeypatch.setattr(progress_bar, "LINE_INTERVAL", 0.01)
    with stores_bar("verifying", 1_600_000, shown=True) as counted:
        assert tc.verify(counted(store)).ok
        assert until(lambda: " left" in stream.getvalue())
    assert re.search(r"^verifying: 80. kB of 1.6 MB, .+ .?B/s, .+ left$", stream.getvalue(), re.M)
    threads = [thread.name for thread in threading.enumerate()]
    assert "treeckpt-progress" not in threads


def test_the_bar_goes_when_the_read_fails(store, errors_to):
    screen = errors_to(Terminal())
    with pytest.raises(ZeroDivisionError), reading_bar(store, "restoring") as source:
        tc.load(source)
        raise ZeroDivisionError
    assert screen.getvalue().endswith(("\x1b[?25h", "\r\x1b[1A\x1b[2K")) or "\x1b[2K" in screen.getvalue()
