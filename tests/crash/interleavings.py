"""Interleavings of processes at their file operations; see test_interleavings.

    python -m tests.crash.interleavings PLACE NUMBERS [ACTION...]

PLACE is a directory, best in memory, or "s3"; with "far:" before it each process is on a host of its own, where others
cannot see whether it runs, and one is stopped for so long that it counts as ended. With "sharing:" before that the
checkpoints of the run share files, and clocks are set back in some cases. NUMBERS is a case, or FIRST-END.

A few processes are forked at first, and do one action in each case. All of them are stopped but for one, which goes on
for one operation or a few; `Order` says which. A case is the same whenever its number is run, with the same actions if
some are given. Every line that is printed is a case of which something does not hold, with all that happened; the last
one has the counts.
"""

from __future__ import annotations

import collections
import gc
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.crash.interleaved_actions import Action
from tests.crash.interleaved_actor import SLEEP, changes
from tests.crash.interleaved_cases import BEGIN, STARTS, Case, Order, Turn, base_of, draw
from tests.crash.interleaved_checks import Record, violations
from tests.crash.interleaved_s3 import RemoteStage
from tests.crash.interleaved_stage import LATER, Link, LocalStage, Process, Stage
from treeckpt._core.format.files import step_name

SLEEPS = 6000
"""Sleeps in a row of processes that wait for nothing that could still happen."""


class Theatre:
    """Runs cases one after the other."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.starts: dict[str, tuple[dict[str, bytes], dict[str, int]]] = {}

    def _start(self, name: str) -> tuple[dict[str, bytes], dict[str, int]]:
        """The files of a start, and the seeds of its saves."""
        seeds: dict[str, int] = {}
        files: dict[str, bytes] = {}
        for number, (what, step, where) in enumerate(STARTS[name]):
            if what in ("lose index", "tear index", "lengthen"):
                files = _damaged(files, what, step)
                continue
            seed = 10 + number
            self.stage.begin(files)
            before = dict(self.stage.names)
            self._alone(Action(what, step, seed, base=base_of(step) if what == "follow" else 0), where)
            seeds |= {s: seed for n, s in self.stage.names.items() if s is not None and s != before[n]}
            files = self.stage.files()
            self.stage.end()
        return files, seeds

    def _alone(self, action: Action, where: str) -> None:
        """One action, killed somewhere."""
        stage, process = self.stage, self.stage.processes[0]
        stage.call(0, action)
        while True:
            stage.settle()
            if process.state != "busy":
                assert "error" not in (told := stage.told.get(0, {})), told
                return
            link = stage.stopped(process)[0]
            assert link.next is not None
            met = process.done == int(where) if where.isdigit() else where and _met(where, link.next)
            if met:
                stage.kill(process)
                return
            stage.go_on(link, 1)

    def play(self, case: Case) -> Record:
        stage, order = self.stage, Order(case)
        if case.start not in self.starts:
            self.starts[case.start] = self._start(case.start)
        files, seeds = self.starts[case.start]
        stage.begin(files)
        before = dict(stage.names)
        actors = stage.processes[: len(case.actions)]
        for process in actors:
            process.state, process.done = "called", 0
        sleeps = 0
        while True:
            stage.settle()
            turns, links = self._turns(actors)
            if not turns or sleeps > SLEEPS:
                if any(process.state == "busy" for process in actors):
                    self._stop(actors)
                break
            turn, count = order.choose(turns)
            if case.clock is not None and len(stage.events) >= case.clock[0]:
                stage.clock.late = case.clock[1]
            if stage.far and order.stopping:
                stage.clock.late = LATER
            link, process = links[turn.place], actors[turn.actor]
            sleeps = sleeps + 1 if turn.what == SLEEP else 0
            if link is not None and case.killed is not None and case.killed[0] == turn.actor:
                if process.done >= case.killed[1]:
                    stage.kill(process)
                    continue
                count = min(count, case.killed[1] - process.done)
            if link is None:
                action = case.actions[turn.actor]
                stage.call(turn.actor, action, only_changes=case.only_changes)
                stage.events.append((turn.actor, "begin", action.words))
            else:
                stage.go_on(link, count if link is process.main else 1)
        stage.look(-1)
        told = dict(stage.told)
        known = {told[who]["saved"][1]: told[who]["saved"][2] for who in told if "saved" in told[who]}
        record = Record(case, before, {**seeds, **known}, list(stage.events), told, stage.check(case.number), stage.far)
        stage.end()
        return record

    def _turns(self, actors: list[Process]) -> tuple[list[Turn], list[Link | None]]:
        turns: list[Turn] = []
        links: list[Link | None] = []
        for process in actors:
            if process.state == "called":
                turns.append(Turn(process.number, BEGIN, 0, len(links)))
                links.append(None)
            for link in self.stage.stopped(process) if process.state == "busy" else ():
                single = link is not process.main
                turns.append(Turn(process.number, link.next or "", process.done, len(links), single))
                links.append(link)
        return turns, links

    def _stop(self, actors: list[Process]) -> None:
        for process in actors:
            if process.state == "busy":
                self.stage.told[process.number] = {"stuck": "it waits for what does not happen"}
                self.stage.kill(process)


def _met(where: str, operation: str) -> bool:
    return changes(operation) and re.search(where, operation) is not None


def _damaged(files: dict[str, bytes], what: str, step: int) -> dict[str, bytes]:
    folder = f"{step_name(step)}/"
    index = f"{folder}index.json"
    if what == "lose index":
        return {name: data for name, data in files.items() if name != index}
    if what == "tear index":
        return {**files, index: files[index][:-20]}
    return {n: data + b"x" * (n.startswith(f"{folder}shard")) for n, data in files.items()}


def row_of(record: Record, found: list[str]) -> dict[str, Any]:
    case = record.case
    names = [action.words for action in case.actions]
    lines = [f"{names[who] if who >= 0 else '-'} [{who}]: {what} {data}" for who, what, data in record.events]
    return {
        "number": case.number,
        "kind": case.kind,
        "start": case.start,
        "order": case.order,
        "only_changes": case.only_changes,
        "frozen": case.frozen,
        "killed": case.killed,
        "clock": case.clock,
        "violations": found,
        "before": record.before,
        "trace": lines,
        "check": record.check,
    }


def main(place: str, numbers: range, actions: Sequence[str]) -> None:
    sharing, place = place.startswith("sharing:"), place.removeprefix("sharing:")
    far, place = place.startswith("far:"), place.removeprefix("far:")
    with tempfile.TemporaryDirectory(dir=None if place == "s3" else place) as directory:
        os.environ["TREECKPT_CACHE"] = f"{directory}/cache"
        gc.collect()
        gc.freeze()
        theatre = Theatre(RemoteStage(far=far) if place == "s3" else LocalStage(Path(directory), far=far))
        cases: collections.Counter[str] = collections.Counter()
        failed: collections.Counter[str] = collections.Counter()
        told: collections.Counter[str] = collections.Counter()
        operations, begin = 0, time.monotonic()
        for number in numbers:
            case = draw(number, actions, far=far, sharing=sharing)
            record = theatre.play(case)
            cases[case.kind] += 1
            operations += sum(what == "op" for _, what, _ in record.events)
            told.update(f"{case.actions[who].what}: {one.get('error', 'ended')}" for who, one in record.told.items())
            if found := violations(record):
                failed[case.kind] += 1
                print(json.dumps(row_of(record, found)), flush=True)
        theatre.stage.close()
        times = {"seconds": time.monotonic() - begin, "processor": sum(os.times()[:4])}
        counts = {"cases": cases, "failed": failed, "told": told, "operations": operations}
        print(json.dumps(counts | times), flush=True)


if __name__ == "__main__":
    first, _, end = sys.argv[2].partition("-")
    main(sys.argv[1], range(int(first), int(end or first) + (not end)), sys.argv[3:])
