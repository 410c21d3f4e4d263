"""What must hold behind every interleaving, whatever the processes do to keep it so; see test_interleavings.

A save is committed from the moment at which the index of its step names it. It may be missing in the end if a later
save of its step was committed that may overwrite, or if one of these deleted it that had read the index while that
named it: a clean-up whose report has its id, a deletion that succeeded, a training's own retention, or one of them
that was killed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tests.crash.interleaved_actions import Action
from tests.crash.interleaved_actor import changes
from tests.crash.interleaved_cases import Case
from treeckpt._core.format.files import step_name

__all__ = ["Event", "Record", "violations"]

_DAMAGED = ("no index", "torn", "long")
Event = tuple[int, str, Any]
"""Who; "begin", "op", "index" (of a step, and the save that it names now), "told" or "killed"; and what."""


@dataclasses.dataclass
class Record:
    """What happened in a case."""

    case: Case
    before: Mapping[int, str | None]
    """The save that each step's index named at first."""
    seeds: dict[str, int]
    """Of saves by their ids, as far as they are known."""
    events: list[Event]
    told: dict[int, dict[str, Any]]
    """What each process has told that was not killed."""
    check: dict[str, Any]
    far: bool = False
    """Whether each process was on a host of its own."""

    def commits(self, step: int) -> list[tuple[int, str | None, int]]:
        """What the index of a step named: (from which event on, save, who made it so)."""
        found: list[tuple[int, str | None, int]] = [(-1, self.before.get(step), -1)]
        for at, (who, what, data) in enumerate(self.events):
            if what == "index" and data[0] == step:
                found.append((at, data[1], who))
        return found

    def looked(self, who: int) -> set[str | None]:
        """The saves whose index a process has read."""
        now, found, reading = dict(self.before), set[str | None](), set[int]()
        for actor, what, data in self.events:
            if what == "index":
                now[data[0]] = data[1]
                if data[0] in reading:
                    found.add(data[1])
            elif actor == who and what == "op" and (step := _reads_index(data)):
                found.add(now.get(step))
                reading = {step}
            elif what == "op":
                reading = set()
        return found

    def span(self, who: int) -> tuple[int, int]:
        """The events at which a process began and ended."""
        begin = next((at for at, event in enumerate(self.events) if event[:2] == (who, "begin")), len(self.events))
        ends = (at for at, event in enumerate(self.events) if event[0] == who and event[1] in ("told", "killed"))
        return begin, next(ends, len(self.events))

    def there(self, who: int, step: int) -> set[str | None]:
        """What the index of a step named while a process was at work."""
        begin, end = self.span(who)
        commits = self.commits(step)
        return {save for at, save, _ in commits if begin < at < end} | {
            [save for at, save, _ in commits if at <= begin][-1]
        }


def _reads_index(operation: str) -> int | None:
    """The step whose index an operation reads, by its published name."""
    kind, _, path = operation.partition(" ")
    if kind in ("open", "GET") and path.endswith("/index.json") and path.startswith("step_"):
        return int(path.split("/")[0].removeprefix("step_"))
    return None


def violations(record: Record) -> list[str]:
    """What does not hold, in words; the first one is a kind's name up to the colon."""
    found: list[str] = []
    for who, told in record.told.items():
        found += _told(record, who, record.case.actions[who], told)
    for step in sorted({*record.before, *(data[0] for _, what, data in record.events if what == "index")}):
        found += _saves(record, step)
    return found + _rest(record)


def _may_overwrite(record: Record, who: int) -> bool:
    return who >= 0 and record.case.actions[who].what in ("overwrite", "manager", "follow", "incremental")


def _entitled(record: Record, step: int, save_id: str) -> bool:
    """Whether a process was there that might delete this save."""
    for who, action in enumerate(record.case.actions):
        told = record.told.get(who)  # None: it was killed
        if action.what in ("clean", "gc", "careless"):
            named = told is None or save_id in told.get("removed", ()) or step_name(step) in told.get("gone", ())
            named = named or _took(record, who, step, save_id)
        elif action.what == "delete":
            named = action.step == step and (told is None or "deleted" in told)
        elif action.what in ("manager", "incremental"):
            named = True
        else:
            continue
        if named and save_id in record.looked(who):
            return True
    return False


def _took(record: Record, who: int, step: int, save_id: str) -> bool:
    """Whether a clean-up of another host took an index away that it does not say to have left.

    One that was stopped for too long finds its work done by others, and does not report it.
    """
    commits = [(one, by) for _, one, by in record.commits(step)]
    taken = any(one is None and by == who and commits[at][0] == save_id for at, (one, by) in enumerate(commits[1:]))
    return record.far and taken and step_name(step) not in record.told[who].get("left", ())


def _stays(record: Record, step: int, at: int, who: int, save_id: str) -> bool:
    """Whether what somebody has published may keep a save replaced that was there before.

    One that was stopped for too long, and has failed, puts that back, unless a clean-up has taken its files meanwhile.
    """
    if "error" not in record.told.get(who, {}):
        return True
    operations = [data for actor, what, data in record.events[at:] if what == "op" and actor != who]
    return any(changes(one) and f"{step_name(step)}/" in one and save_id in one for one in operations)


def _saves(record: Record, step: int) -> list[str]:
    """No committed save of a step is missing, unless a later one or a deletion has taken its place."""
    found: list[str] = []
    commits = record.commits(step)
    end = record.check["before"].get(str(step), {})
    for number, (_, save_id, _) in enumerate(commits):
        if save_id is None or save_id == end.get("save_id") or save_id in [one for _, one, _ in commits[:number]]:
            continue
        by = commits[number + 1][2] if number + 1 < len(commits) else -1
        if by == commits[number][2] and "error" in record.told.get(by, {}):
            continue  # it has taken its own index back, and says so
        later = [(at, who) for at, one, who in commits[number + 1 :] if one not in (None, save_id)]
        replaced = any(_may_overwrite(record, who) and _stays(record, step, at, who, save_id) for at, who in later)
        if replaced or _entitled(record, step, save_id):
            continue
        found.append(f"lost: the save {save_id} of step {step} was committed and is missing")
    for who, told in record.told.items():
        if "saved" in told and told["saved"][0] == step and told["saved"][1] not in [one for _, one, _ in commits]:
            found.append(f"lost: {record.case.actions[who].words} succeeded and was never committed")
        by_repair = record.far and commits[-1][2] >= 0 and record.case.actions[commits[-1][2]].what == "repair"
        raised = "error" in told and not by_repair  # a repair takes what a process of another host has left for so long
        if raised and record.case.actions[who].seed == end.get("seed") and "save_id" in end:
            found.append(f"committed though it raised: {record.case.actions[who].words}: {told['text'][:200]}")
    expected = record.seeds.get(end.get("save_id") or "")
    damaged = record.case.start in _DAMAGED and step == 1 and end.get("save_id") == record.before.get(step)
    # one that was stopped for too long, and killed before it sees that its files are gone, cannot take its index back
    damaged |= record.far and commits[-1][2] >= 0 and commits[-1][2] not in record.told
    whole = end.get("error") is None and end.get("seed") not in (None, -1) and not end.get("problems")
    if end.get("save_id") is not None and not (whole and expected in (None, end["seed"])) and not damaged:
        found.append(f"broken: step {step} has an index, and {end['error'] or end['problems'] or end['seed']}")
    return found


def _told(record: Record, who: int, action: Action, told: Mapping[str, Any]) -> list[str]:
    """What each process says is an answer of ours, and right."""
    found: list[str] = []
    if "stuck" in told:
        return [f"stuck: {action.words}: {told['stuck']}"]
    if "error" in told and not told["ours"]:
        found.append(f"bare error: {action.words}: {told['error']}: {told['text'][:200]}\n{told['trace']}")
    if "error" in told and told["error"] == "AssertionError":
        found.append(f"bare error: {action.words}: an assertion")
    begin, _ = record.span(who)
    before = [save_id for at, save_id, _ in record.commits(action.step) if at <= begin][-1] if action.step else ""
    intact = record.case.start not in _DAMAGED and before is not None
    if told.get("error") == "CorruptError" and intact:
        found.append(f"called damaged: {action.words}: {told['text'][:300]}")
    if told.get("ok") is False and intact:
        found.append(f"called damaged: {action.words} found an intact step damaged")
    found += [f"failed: {action.words}: {why[:300]}" for why in told.get("failed", ())]
    if "pinned" in told and record.check["before"].get(str(action.step), {}).get("save_id") is None and intact:
        found.append(f"pinned, and deleted: {action.words}")
    if action.what == "load":
        found += _read(record, who, action, told)
    elif action.what == "restore":
        found += _restored(record, who, told)
    return found + _deleted(record, who, action, told)


def _deleted(record: Record, who: int, action: Action, told: Mapping[str, Any]) -> list[str]:
    """What somebody says to have deleted is not there; a repair that began before may have made its index again."""
    if any(other.what in ("repair", "rebuild") for other in record.case.actions):
        return []
    there = {state["save_id"] for state in record.check["before"].values()}
    found = [
        f"not deleted: {action.words} says that it removed {one}" for one in told.get("removed", ()) if one in there
    ]
    if "deleted" in told and len(record.there(who, action.step) - {None}) == len(record.there(who, action.step)) == 1:
        found.append(f"not deleted: {action.words} succeeded, and nothing has changed")
    return found


def _restored(record: Record, who: int, told: Mapping[str, Any]) -> list[str]:
    """A training that resumes gets what one save wrote, and finds one if a step was there all the time."""
    if told.get("loaded") == -1:
        return ["wrong values: restore"]
    there = [record.there(who, step) for step in record.before]
    if told.get("loaded") is None and any(len(saves) == 1 and None not in saves for saves in there):
        return [f"not read: restore, though a step was there: {told.get('text', 'it found none')[:300]}"]
    return []


def _read(record: Record, who: int, action: Action, told: Mapping[str, Any]) -> list[str]:
    """A reader gets what one save wrote that was there meanwhile, and an error only if one was not there throughout."""
    there = record.there(who, action.step)
    if "loaded" in told:
        known = [record.seeds.get(save_id or "") for save_id in there]
        wrong = told["loaded"] == -1 or (None not in known and told["loaded"] not in known)
        return [f"wrong values: {action.words} gave {told['loaded']}"] if wrong else []
    if "error" in told and len(there) == 1 and None not in there and record.case.start not in _DAMAGED:
        return [f"not read: {action.words}, though it was there: {told['text'][:300]}"]
    return []


def _rest(record: Record) -> list[str]:
    """One clean-up more leaves nothing but committed saves; and it takes none away."""
    found: list[str] = []
    check = record.check
    for step, state in check["after"].items():
        why = check["left"].get(step, "")
        damaged = why.startswith("damaged") or "its repair was cut short" in why  # of it nothing is deleted
        if state["save_id"] is None and not state["named"] and not damaged and not _pinned(state):
            found.append(f"left over: step {step} has no checkpoint, and {state['others'] or 'an empty directory'}")
        elif state["others"] and not damaged and not _pinned(state):
            found.append(f"left over: step {step} has {state['others']}")
    for step, state in check["before"].items():
        if state["save_id"] is not None and check["after"].get(step, {}).get("save_id") != state["save_id"]:
            found.append(f"lost: the last clean-up took step {step}")
    found += [f"failed: the last clean-up: {why[:300]}" for why in check["failed"]]
    whats = {action.what for action in record.case.actions}
    kept = any(state["save_id"] is not None for state in check["before"].values())
    if not kept and "delete" not in whats:
        found.append("lost: no checkpoint is left, though every clean-up keeps one")
    return found


def _pinned(state: Mapping[str, Any]) -> bool:
    return "pinned.json" in state["others"]
