"""`ls --trends`: since when saves of a run take longer or less, in which phase and on which ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from .._core.format.timings import Host
from .._core.text import count_text
from .._report.terminal import print_json, print_line, print_table
from .._runs.catalog import CheckpointInfo, read_timings
from .._runs.reduced_timings import ReducedTimingsCache
from .._runs.save_trends import MIN_SAVES, HostRow, offenders, saves_in_order, timed_saves, trend_text
from ..errors import TreeckptError


def show_trends(runs: Mapping[str, Sequence[CheckpointInfo]], timings: ReducedTimingsCache, *, as_json: bool) -> None:
    """Prints what the dashboard's page of trends says of each run, and its stragglers.

    Args:
        runs: the checkpoints of each run.
        timings: with which they were listed.
    """
    rows: list[Mapping[str, object]] = []
    for run, infos in runs.items():
        listed = [(name, info, timings.of(info)) for name, info in saves_in_order((info.name, info) for info in infos)]
        saves = timed_saves(listed)
        last = next((info for _, info, found in reversed(listed) if found is not None and not info.abandoned), None)
        hosts = offenders(saves)
        text = trend_text(saves, hosts, partial(_hosts_of, last))
        rows.append({"run": run, "saves": len(saves), "text": text, "hosts": list(map(msgspec.to_builtins, hosts))})
        if not as_json:
            before = "" if len(runs) == 1 else f"{run}: "
            few = f"{count_text(len(saves), 'save')} with timings: it takes more than {MIN_SAVES} to compare them"
            print_line(f"{before}{text or few}")
            _print_stragglers(hosts)
    if as_json:
        print_json(rows)


def _hosts_of(info: CheckpointInfo | None) -> Sequence[Host]:
    """Returns the hosts of a save; none if its timings cannot be read."""
    try:
        return read_timings(info.path, save_id=info.save_id).hosts if info is not None else ()
    except TreeckptError:
        return ()


def _print_stragglers(hosts: Sequence[HostRow]) -> None:
    rows = [
        (f"rank {rank.rank}", host.host or "-", f"{rank.saves:,}", f"{rank.recent} of {host.of}", rank.phase or "all")
        for host in hosts
        for rank in host.ranks
    ]
    if rows:
        print_table(("straggler", "host", "saves", "recent", "phase"), rows, right=("saves", "recent"))
