"""The rank that called save late is named, by its own word and by clocks that are corrected where hosts' differ."""

import itertools
import json
import threading
import time

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks
from treeckpt._core.format.timings import BLOCKING, MAX_TIME, Host, Span, Timings
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._inspect.perfetto import encode_trace
from treeckpt._inspect.profile import LATE_CALL, TOLERANCE_NS
from treeckpt._inspect.timing_report import TimingReport
from treeckpt._io.comm.message_store import ThreadMessageStore
from treeckpt._io.timing import Recorder
from treeckpt._runs import catalog

MS = 10**6
HOSTS = (Host("a", encode_runs([0, 1])), Host("b", encode_runs([2, 3])))


def save_of(*calls, hosts=HOSTS, ahead=(0, 0), error=None, at=10**18):
    """A save that ranks called after these milliseconds, and wrote for 100 ms; the clocks of hosts are ahead."""
    agreed, spans = max(calls) + 10, []
    for rank, call in enumerate(calls):
        start = at + ahead[rank // 2]
        rows = [
            ("save", call, agreed + 100, -1), ("flatten", call, call + 5, 0), ("agree", call + 5, agreed, 0),
            (BLOCKING, call, agreed, -1), ("write", agreed, agreed + 100, 0),
        ]  # fmt: skip
        spans += [Span(name, rank, start + low * MS, start + high * MS, 0, up) for name, low, high, up in rows]
    return Timings("0" * 16, 1, len(calls), tuple(spans), error, hosts)


def said_of(*calls, **options):
    return TimingReport(save_of(*calls, **options)).late_call


# who was late ---------------------------------------------------------------------------------------------------------
def test_one_late_rank_is_named_with_its_host_and_how_much_later_than_the_others_it_called():
    assert said_of(0, 4, 2, 2004) == "rank 3 (host b) called save 2 s after the others; they waited for it"
    assert said_of(2000, 0, 1, 2, hosts=()) == "rank 0 called save 2 s after the others; they waited for it"
    assert said_of(0, 500, hosts=()) == "rank 1 called save 500 ms after rank 0, which waited for it"


def test_of_several_late_ranks_the_last_is_named():
    several = "2 of 4 ranks called save late, the last of them rank 3 (host b), 2 s after the first rank; "
    assert said_of(0, 4, 1000, 2000) == several + "the others waited for them"


def test_ranks_that_call_within_a_tenth_of_the_save_are_not_late():
    assert said_of(0, 0, 0, 0) == said_of(0, 1, 5, 12) == said_of(0, hosts=()) == ""
    assert said_of(0, 1, 5, 13) != ""
    assert TimingReport(Timings("0" * 16, 1, 4, ())).late_call == ""


class Moments:
    """The clock of all recorders: a microsecond passes with each reading, and what `pass_seconds` adds."""

    def __init__(self):
        self._begin, self._readings, self._passed_ns = time.time_ns(), itertools.count(), 0

    def now(self):
        return self._begin + self._passed_ns + 1000 * next(self._readings)

    def pass_seconds(self, seconds):
        self._passed_ns += seconds * 10**9


def test_a_rank_that_calls_long_after_the_others_is_named_after_a_real_save(tmp_path, monkeypatch):
    moments, calling, waiting, all_wait = Moments(), set(), set(), threading.Event()
    monkeypatch.setattr(Recorder, "now", lambda recorder: moments.now())
    wait = ThreadMessageStore.wait

    def noted(store, keys, timeout):
        waiting.add(threading.get_ident())
        if len(waiting & calling) == 3:
            all_wait.set()
        return wait(store, keys, timeout)

    monkeypatch.setattr(ThreadMessageStore, "wait", noted)

    def act(comm):
        if comm.rank != 2:
            calling.add(threading.get_ident())
        else:
            assert all_wait.wait(120)
            moments.pass_seconds(1)
        tc.save(tmp_path / "step_00000001", {"x": np.ones(1000)}, step=1, comm=comm)

    assert errors_of(on_ranks(4, act)) == [None] * 4
    report = TimingReport(catalog.read_timings(tmp_path / "step_00000001"))
    assert report.late_call.startswith("rank 2 (host ") and "the others; they waited for it" in report.late_call
    assert (report.critical[0].rank, report.critical[0].phase) == (2, LATE_CALL)
    assert (report.stragglers[0].rank, report.stragglers[0].phase) == (2, LATE_CALL)
    assert sum(one.stop_ns - one.start_ns for one in report.critical) == pytest.approx(report.profile.seconds * 1e9)


# clocks of hosts ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("calls", [(0, 0, 0, 0), (0, 4, 2, 2004), (2000, 0, 1, 2)])
@pytest.mark.parametrize("ahead", [(0, 5 * 10**9), (-3600 * 10**9, 0), (-(10**9), 0)])
def test_clocks_that_differ_change_nothing_but_are_told(calls, ahead):
    true, found = TimingReport(save_of(*calls)), TimingReport(save_of(*calls, ahead=ahead))
    assert (found.late_call, found.profile.seconds) == (true.late_call, true.profile.seconds)
    assert [(s.rank, s.phase) for s in found.critical] == [(s.rank, s.phase) for s in true.critical]
    assert found.profile.blocked_seconds == true.profile.blocked_seconds
    assert json.loads(encode_trace(found.timings)) == json.loads(encode_trace(true.timings))
    assert true.clocks == "" != found.clocks


def test_the_clock_of_the_fewer_hosts_is_the_one_that_differs():
    hosts = tuple(Host(name, encode_runs([2 * n, 2 * n + 1])) for n, name in enumerate("xyz"))
    found = TimingReport(save_of(*[0] * 6, hosts=hosts, ahead=(0, -2500 * MS, 0))).clocks
    assert found == (
        "The clocks of the hosts differ: that of y is 2.5 s behind. "
        "All times are corrected by that, to the precision of a message between hosts."
    )


def test_of_many_hosts_that_differ_three_are_named():
    hosts = tuple(Host(f"h{n}", encode_runs([2 * n, 2 * n + 1])) for n in range(9))
    ahead = [0, 0, 0, 0, 0, *(n * 10**9 for n in (1, -2, 3, 4))]
    found = TimingReport(save_of(*[0] * 18, hosts=hosts, ahead=ahead)).clocks
    assert "h8 is 4 s ahead, that of h7 is 3 s ahead, that of h6 is 2 s behind, 1 more differ." in found


def test_clocks_that_differ_by_no_more_than_a_message_takes_are_left_alone():
    assert TimingReport(save_of(0, 0, 0, 0, ahead=(0, TOLERANCE_NS - 1))).clocks == ""
    assert TimingReport(save_of(0, 0, 0, 0, ahead=(0, TOLERANCE_NS))).clocks != ""


def test_of_a_failed_save_or_one_without_hosts_no_clock_is_judged():
    """Ranks of a save that fails do not hear of it at one time."""
    for options in ({"error": "rank 3 is lost"}, {"hosts": ()}, {"hosts": HOSTS[:1]}):
        assert TimingReport(save_of(0, 0, 0, 0, ahead=(0, 10**10), **options)).clocks == ""


def test_times_stay_in_the_range_of_the_format_whatever_a_clock_says():
    spans = (Span("agree", 0, 1 - MAX_TIME, 2 - MAX_TIME), Span("agree", 2, MAX_TIME - 2, MAX_TIME - 1))
    report = TimingReport(Timings("0" * 16, 1, 4, spans, None, HOSTS))
    assert report.clocks == "" and report.profile.seconds > 0
