"""What all ranks do together with a run on the private disks of several hosts: saves are completed, steps deleted.

Ranks tell each other what they see of the run. The lowest rank of each disk is its leader: it acts there, by what all
disks have.

- A save that died behind its commit (`_saving.node_local`) is completed: where a disk has the index, the leaders of the
  others publish what they have prepared. Of a save that was not committed the prepared files are deleted, where the
  disk of its rank 0, which alone decides, is there to say so.
- Policies choose from the checkpoints that are whole over all disks, so that all leaders keep and delete the same
  steps. Of others, of which a disk is lost, the parts stay as long as the policies would keep them, were they whole.
- A pin on one disk counts on all; it is written on those that lack it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from .._core.format.decoding import decode_msgpack
from .._core.format.files import CheckpointId, parse_file_name, prepared_name, step_of
from .._core.format.index import INDEX_NAME, MAX_INDEX, decode_index
from .._core.format.shard_header import parse_shard_name
from .._inspect.deletion import CleanReport, JoinedRun, RetainedDirectory
from .._io.comm.collective import Conclusion, Exchange, gather_errors, raise_faults
from .._io.comm.comm import Comm
from .._io.process import this_process
from .._io.storage.deletions import discard_prepared, prepared_saves, publish_prepared
from ..errors import TreeckptError
from .catalog import CheckpointInfo
from .disks import joined_infos, seen_here
from .run import RunDirectory

_log = logging.getLogger("treeckpt")
_SHARDS = 4
"""Shards of a step that are looked at, to tell disks apart."""


class RunView(msgspec.Struct, frozen=True):
    """What the leader of a disk sees of a run."""

    host: str
    infos: list[CheckpointInfo]
    uncommitted: dict[str, tuple[int, ...]]
    """Ranks of which there are shards that no index here names, by directory and save id, as "step_00000100/<id>"."""
    marks: frozenset[int] = frozenset()
    """Of the run and of files that no save changes. Leaders with one in common see one disk."""


class RunDisks(msgspec.Struct, frozen=True, dict=True):
    """The disks of a run, by what their leaders see."""

    rank: int
    """This rank."""
    views: dict[int, RunView]
    """By leader."""

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader of its disk."""
        return self.rank in self.views

    @cached_property
    def joined(self) -> dict[str, CheckpointInfo]:
        """The checkpoints over all disks, by name."""
        return {info.name: info for info in joined_infos(view.infos for view in self.views.values())}

    def has(self, name: str, *, complete: bool) -> bool:
        """Whether a disk has a directory, or with `complete` a checkpoint in it."""
        return any(_has(view, name, complete) for view in self.views.values())

    def here(self, name: str, *, complete: bool) -> bool:
        """Whether this rank leads a disk that `has` it."""
        return self.leads and _has(self.views[self.rank], name, complete)

    def has_index(self, name: str, save_id: str) -> bool:
        """Whether a disk has the index of a save in a directory."""
        infos = (info for view in self.views.values() for info in view.infos)
        return any((i.name, i.save_id) == (name, save_id) and i.files in ("complete", "damaged") for i in infos)

    def has_asked(self, name: str, save_id: str) -> bool:
        """Whether the disk that decides about a save is among those of the run, and has not committed it.

        That is the disk with the shards of rank 0. Names of hosts do not say it: a host that was replaced, with another
        disk, may have the name of the one before.
        """
        return any(0 in view.uncommitted.get(f"{name}/{save_id}", ()) for view in self.views.values())

    def merged(self, reports: Mapping[int, CleanReport]) -> CleanReport:
        """Returns the report of the first disk, with what others left, could not remove or completed."""
        (_, first), *others = sorted(reports.items())
        left, failed, completed = list(first.left), list(first.failed), list(first.completed)
        for rank, report in others:
            on = f"on host {self.views[rank].host}: "
            left += [RetainedDirectory(each.name, on + each.why) for each in report.left if each not in first.left]
            failed += [RetainedDirectory(each.name, on + each.why) for each in report.failed]
            completed += [on + text for text in report.completed]
        return msgspec.structs.replace(first, left=tuple(left), failed=tuple(failed), completed=tuple(completed))

    def state(self) -> JoinedRun:
        """Returns what a clean-up on one disk has to know of the others."""
        joined = self.joined.values()
        return JoinedRun(
            whole=frozenset((i.name, i.save_id or "") for i in joined if i.files == "complete"),
            pinned=frozenset(i.name for i in joined if i.pinned),
            damaged=frozenset(i.name for i in joined if i.damaged),
        )


def _has(view: RunView, name: str, complete: bool) -> bool:
    return any(info.name == name and (not complete or info.files == "complete") for info in view.infos)


def _step_paths(run: RunDirectory) -> list[Path]:
    """Returns the directories of steps, and of checkpoints that were saved by a text."""
    path = run.store.traits.local_path
    assert path is not None, "a run elsewhere is on one disk"
    names = sorted(run.store.names())
    of_steps = {name for name in names if step_of(name, (run.pattern,)) is not None}
    return [path / name for name in names if name in of_steps or (path / name / INDEX_NAME).is_file()]


def _disk_digest(run: RunDirectory) -> bytes:
    """Returns what ranks on one disk have in common, and those of two disks do not."""
    found: list[tuple[str, int, int]] = []
    for path in _step_paths(run):
        with contextlib.suppress(OSError):  # it is being deleted
            state = path.stat()
            # two disks that were filled alike may number their files alike
            found.append((path.name, state.st_ino, state.st_mtime_ns))
    return xxhash.xxh3_128_digest(repr(found).encode())


def _disk_marks(run: RunDirectory) -> frozenset[int]:
    """Returns digests that two ranks on one disk have in common while others write there, and ranks on two have not."""
    path, this = run.store.traits.local_path, this_process()
    assert path is not None, "a run elsewhere is on one disk"
    found: list[object] = []
    with contextlib.suppress(OSError):
        place = path.stat()
        if this.boot:  # the processes of one kernel number their disks alike
            found.append((this.host, this.boot, place.st_dev, place.st_ino))
    for step in _step_paths(run):
        shards = sorted(filter(parse_shard_name, run.store.folder(step.name).sizes()))
        for name in (INDEX_NAME, *shards[:_SHARDS]):
            with contextlib.suppress(OSError):  # it is not there, or is being deleted
                file = (step / name).stat()
                # a copy of a whole disk may have the numbers and times of the files, but not when it made them
                found.append((step.name, name, file.st_ino, file.st_mtime_ns, file.st_ctime_ns))
    return frozenset(xxhash.xxh3_64_intdigest(repr(mark).encode()) for mark in found)


def _one_of_each_disk(views: Mapping[int, RunView]) -> dict[int, RunView]:
    """Returns the views of the lowest rank of each disk, without their marks."""
    leaders: dict[int, RunView] = {}
    seen = set[int]()
    for rank, view in sorted(views.items()):
        if seen.isdisjoint(view.marks):
            leaders[rank] = msgspec.structs.replace(view, marks=frozenset())
        seen |= view.marks
    return leaders


def _view(run: RunDirectory) -> RunView:
    marks = _disk_marks(run)
    infos, uncommitted = seen_here(run), dict[str, list[int]]()
    committed = {(info.name, info.save_id) for info in infos if info.files in ("complete", "damaged")}
    # an index that cannot be read may be that of any save, and one that was taken away may be put back
    illegible = {info.name for info in infos if info.files in ("damaged", "unread") and info.save_id is None}
    for path in _step_paths(run):
        names = run.store.folder(path.name).sizes()
        deleted = {kind.save_id for kind in map(parse_file_name, names) if kind and kind.kind == "deleted"}
        for save_id, rank, *_ in filter(None, map(parse_shard_name, names)):
            if (path.name, save_id) not in committed and path.name not in illegible and save_id not in deleted:
                uncommitted.setdefault(f"{path.name}/{save_id}", []).append(rank)
    return RunView(this_process().host, infos, {key: tuple(ranks) for key, ranks in uncommitted.items()}, marks)


def look_at_disks(comm: Comm, run: RunDirectory, call: str) -> RunDisks | None:
    """Returns the disks of a run, on every rank; None where all ranks see one.

    Ranks that look while something is written there may see one disk differently: files that stay say that it is one.
    """
    if comm.size == 1 or run.store.traits.local_path is None:
        return None

    def choose_leaders(digests: dict[int, bytes]) -> Conclusion[tuple[int, ...]]:
        first = dict[bytes, int]()
        for rank in sorted(digests):
            first.setdefault(digests[rank], rank)
        return Conclusion(tuple(first.values()), last=len(first) == 1)

    def joined(views: dict[int, bytes]) -> Conclusion[dict[int, RunView]]:
        return Conclusion(
            _one_of_each_disk({rank: decode_msgpack(view, RunView) for rank, view in views.items() if view})
        )

    with Exchange(comm, f"{run.url} {call}: disks", call=call) as exchange:
        leaders = exchange.step(lambda: _disk_digest(run), choose_leaders, tuple[int, ...])
        if len(leaders) == 1:
            return None
        mine = comm.rank in leaders
        views = exchange.step(lambda: msgspec.msgpack.encode(_view(run)) if mine else b"", joined, dict[int, RunView])
    return RunDisks(comm.rank, views) if len(views) > 1 else None


def on_each_disk(
    comm: Comm, disks: RunDisks, topic: str, path: str, act: Callable[[], Any] | None, *, hint: str = ""
) -> None:
    """Calls a function on the leaders, which give one; raises what it raised on any of them, on every rank."""
    error: Exception | None = None
    try:
        if act is not None:
            act()
    except Exception as failed:
        error = failed
    faults = gather_errors(comm, topic, error)
    common = len(faults) == len(disks.views)  # else the error names the ranks
    faults = [msgspec.structs.replace(fault, common=common) for fault in faults]
    raise_faults(faults, path, comm.size, cause=error, hint=hint)


def complete_saves(run: RunDirectory, disks: RunDisks, busy: Collection[str] = ()) -> tuple[str, ...]:
    """Completes, on a leader's disk, saves of which another disk has the index; deletes what none has committed.

    Args:
        busy: names of directories in which this process is saving.

    Returns:
        What was done, as text. What cannot be done is logged.
    """
    done: list[str] = []
    for name in sorted({info.name for info in disks.views[disks.rank].infos} - set(busy)):
        folder = run.store.folder(name)
        try:
            names = folder.sizes()
            for save_id in prepared_saves(names):
                if disks.has_index(name, save_id):
                    if publish_prepared(folder, save_id):
                        done.append(f"{folder.place}: completed, as another disk has the index of save {save_id}")
                    continue
                if disks.has_asked(name, save_id):
                    if discard_prepared(folder, names, (save_id,)):
                        folder.remove_directory()
                        done.append(
                            f"{folder.place}: deleted what save {save_id} has left, which no disk has committed"
                        )
                else:
                    prepared = decode_index(folder.read(prepared_name(save_id), limit=MAX_INDEX), folder.url)
                    host = prepared.disks[0].host if prepared.disks else "another host"
                    _log.warning("%s: save %s waits for the disk of %s", folder.place, save_id, host)
        except (TreeckptError, OSError) as error:
            _log.warning("%s: a save of several disks could not be completed: %s", folder.place, error)
    for text in done:
        _log.warning("%s", text)
    return tuple(done)


def spread_pins(run: RunDirectory, disks: RunDisks) -> None:
    """Writes, on a leader's disk, the pins that other disks have."""
    for info in disks.views[disks.rank].infos:
        joined = disks.joined[info.name]
        if info.files == "complete" and joined.pinned and not info.pinned and joined.save_id == info.save_id:
            run.put_pin(run.store.folder(info.name))


def act_on_disks(
    comm: Comm,
    run: RunDirectory,
    call: str,
    step: CheckpointId,
    act: Callable[[], Any],
    *,
    check: Callable[[], Any] | None = None,
    busy: Callable[[], Collection[str]],
) -> bool:
    """Acts on each disk that has a step; returns False where all ranks see one disk, or no disk has it.

    Args:
        check: raises where it must not be done on a disk; then it is done on none.
        busy: returns the names of directories in which this process is saving.
    """
    disks, name = look_at_disks(comm, run, call), run.folder(step).name
    if disks is None or not disks.has(name, complete=check is None):
        return False
    here = disks.here(name, complete=check is None)

    def prepare() -> None:
        complete_saves(run, disks, busy())
        spread_pins(run, disks)
        if check is not None and here:
            check()

    for what, each in (("prepare", prepare if disks.leads else None), ("act", act if here else None)):
        hint = "It may be done on the disks of other ranks" if what == "act" else "Nothing was done"
        on_each_disk(comm, disks, f"{run.url} {call}: {what}", run.folder(step).place, each, hint=hint)
    return True
