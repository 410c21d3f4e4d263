"""Says which ranks called save later than the others, which waited for them."""

from __future__ import annotations

from collections.abc import Sequence

from .._core.format.timings import Host
from .._core.sharding.int_runs import decode_runs
from .._core.text import seconds_text, visible
from .profile import RankTime, SaveProfile

MIN_WAIT_SHARE = 0.1
"""The share of a save below which the wait for the last call is not worth a sentence."""


def late_call_text(profile: SaveProfile, hosts: Sequence[Host]) -> str:
    """Returns a sentence without a full stop; empty where the wait for the last call was short.

    A rank was late if it called in the second half of the time from the first call to the last.
    """
    calls = sorted(profile.ranks, key=lambda one: (one.start_ns, -one.rank))
    wait = calls[-1].start_ns - profile.start_ns if calls else 0
    if wait <= MIN_WAIT_SHARE * (profile.stop_ns - profile.start_ns):
        return ""
    on_time = [one for one in calls if 2 * (one.start_ns - profile.start_ns) < wait]
    last = _rank_text(calls[-1], hosts)
    if len(calls) - len(on_time) == 1:
        wait = calls[-1].start_ns - on_time[(len(on_time) - 1) // 2].start_ns
        others = "the others; they" if len(on_time) > 1 else f"rank {on_time[0].rank}, which"
        return f"{last} called save {seconds_text(wait / 1e9)} after {others} waited for it"
    late = f"{len(calls) - len(on_time)} of {len(calls)} ranks"
    return (
        f"{late} called save late, the last of them {last}, {seconds_text(wait / 1e9)} after the first rank; "
        "the others waited for them"
    )


def _rank_text(call: RankTime, hosts: Sequence[Host]) -> str:
    host = next((host.name for host in hosts if call.rank in decode_runs(host.ranks)), "")
    return f"rank {call.rank}" + (f" (host {visible(host)})" if host else "")
