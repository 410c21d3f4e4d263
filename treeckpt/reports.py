"""What `save`, `load` and `verify` return: paths, bytes, times and problems."""

from __future__ import annotations

from typing import Literal

import msgspec

from ._core.format.byte_map import DamagedLeaf
from ._core.format.records import Disk
from ._core.format.timings import Span
from ._core.html import el, facts, joined, table
from ._core.public_names import publish
from ._core.text import bytes_text, count_text, rate_text, seconds_text
from .errors import visible

__all__ = ["Leftover", "LoadReport", "SaveReport", "VerifyReport"]
publish(__name__, ("DamagedLeaf", "Span"), globals())  # which reports hold

NOTEBOOK_PATHS = 20
"""Paths that a notebook lists."""


class SaveReport(msgspec.Struct, frozen=True):
    """What one rank wrote in a save.

    >>> report = tc.save("run/step_00000200", model.state_dict(), step=200)
    >>> report.step, report.world, report.nbytes, len(report.files)
    (200, 1, 40, 1)

    Attributes:
        path: where it was saved.
        save_id: the random id of the save, in the names of its files.
        step: of training, as it was passed.
        world: ranks that saved.
        nbytes: bytes of array data that this rank wrote.
        files: this rank's shards.
        seconds: from the call until the index was published.
        spans: of this rank: each phase with its time and bytes.
        blocked_seconds: time until the call of a background save returned; None for a save in the foreground.
        staged_nbytes: bytes that were copied before the call of a background save returned.
        shared_nbytes: bytes of array data of this rank that were neither copied nor written, as another checkpoint of
            the run has them; see `save(base=...)`.
        disks: where ranks saw different directories at the path: the disks, each with its host and ranks.
    """

    path: str
    save_id: str
    step: int | None
    world: int
    nbytes: int
    files: tuple[str, ...]
    seconds: float
    spans: tuple[Span, ...] = ()
    blocked_seconds: float | None = None
    staged_nbytes: int = 0
    disks: tuple[Disk, ...] = ()
    shared_nbytes: int = 0

    def __str__(self) -> str:
        blocked = f", {seconds_text(self.blocked_seconds)} of it blocking" if self.blocked_seconds is not None else ""
        written, took = bytes_text(self.nbytes), seconds_text(self.seconds) + blocked
        row = f"saved {self.path}  {written} in {took}"
        if self.world > 1:
            row = f"saved {self.path}  by {self.world} ranks in {took}; this rank wrote {written}"
        rows = [row]
        if self.shared_nbytes:
            rows.append(f"  {bytes_text(self.shared_nbytes)} are shared with other checkpoints of the run")
        for span in self.spans:
            rate = rate_text(span.nbytes, span.seconds) if span.nbytes else ""
            rows.append(f"  {span.name:<10} {span.seconds:9.4f} s  {rate}".rstrip())
        return "\n".join(map(visible, rows))

    def _repr_html_(self) -> str:
        """Shows in a notebook what was written, and how long each phase of this rank took."""
        blocked = self.seconds if self.blocked_seconds is None else self.blocked_seconds
        about = [
            ("saved", self.path),
            ("step", self.step),
            ("this rank wrote", bytes_text(self.nbytes)),
            ("took", seconds_text(self.seconds)),
            ("blocked", seconds_text(blocked)),
            ("ranks", self.world),
        ]
        rows = [
            (s.name, seconds_text(s.seconds), rate_text(s.nbytes, s.seconds) if s.nbytes else None) for s in self.spans
        ]
        return joined([facts(about), table(("phase", "took", "rate"), rows, right=("took", "rate"))])


class LoadReport(msgspec.Struct, frozen=True):
    """What a load read, and the paths at which the checkpoint and the requested tree differ.

    >>> report = tc.load_into("run/step_00000100", {"step": 0, "more": 1}, strict=False)
    >>> report.loaded, report.missing, report.unexpected
    (1, ('more',), ('model/weight', 'model/bias'))

    Attributes:
        path: of the checkpoint.
        nbytes: bytes of array data that were requested.
        read_nbytes: bytes that were read from data areas to get them.
        loaded: leaves that were filled.
        missing: paths that were requested, but are not in the checkpoint.
        unexpected: paths in the checkpoint that were not requested.
        seconds: that the load took.
        dropped: paths in the checkpoint that a rule left out.
        renamed: leaves that rules only renamed: (path in the checkpoint, path as loaded).
        sources: for a load from several checkpoints, the report of each.
        joined: keyed tables of which several checkpoints have rows: (path of the table, checkpoint, rows here that are
            of it). Of an id that several have, the last one's row is taken.
        damaged: leaves that `Fallback(on_corrupt="skip")` left out, each with the bytes that are damaged.
        unverified_nbytes: bytes of `nbytes` that were compared with no checksum: all with `ReadOptions` of
            `verify=False` or `mmap=True`; in files of other programs those of entries without a CRC-32, or of which
            this process read a part alone. safetensors has none.
        in_parts: (path, class) of tensors of which a dict of their parts was returned: the class, or one of an object
            that it keeps beside them, is not imported here, or each rank has saved its own part.
        unmade: what this program cannot make, as of a class that it lacks, and has `...` in its place: of an `extra`
            that comes back where weights alone are restored. Elsewhere this is an error.
    """

    path: str
    nbytes: int
    read_nbytes: int
    loaded: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    seconds: float
    dropped: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    sources: tuple[LoadReport, ...] = ()
    joined: tuple[tuple[str, str, int], ...] = ()
    damaged: tuple[DamagedLeaf, ...] = ()
    unverified_nbytes: int = 0
    in_parts: tuple[tuple[str, str], ...] = ()
    unmade: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [
            f"loaded {self.path}  {count_text(self.loaded, 'leaf', 'leaves')}, "
            f"{bytes_text(self.nbytes)} in {seconds_text(self.seconds)} "
            f"({rate_text(self.nbytes, self.seconds)}, {bytes_text(self.read_nbytes)} read)"
        ]
        if self.unverified_nbytes:
            rows.append(f"  {bytes_text(self.unverified_nbytes)} compared with no checksum")
        rows += [f"  missing     {path}" for path in self.missing]
        rows += [f"  unexpected  {path}" for path in self.unexpected]
        rows += [f"  damaged     {part}" for part in self.damaged]
        rows += [f"  in parts    {path} ({name})" for path, name in self.in_parts]
        rows += [f"  unmade      {path}" for path in self.unmade]
        rows += [f"  dropped     {path}" for path in self.dropped]
        rows += [f"  renamed     {before} -> {now}" for before, now in self.renamed]
        rows += [f"  joined      {path}: {count_text(count, 'row')} of {url}" for path, url, count in self.joined]
        rows += [f"  {line}" for source in self.sources for line in str(source).splitlines()]
        return "\n".join(map(visible, rows))

    def _repr_html_(self) -> str:
        """Shows in a notebook what was read, and the leaves that did not match."""
        about = [
            ("loaded", self.path),
            ("leaves", self.loaded),
            ("size", bytes_text(self.nbytes)),
            ("took", seconds_text(self.seconds)),
            ("rate", rate_text(self.nbytes, self.seconds)),
            ("read", bytes_text(self.read_nbytes)),
        ]
        odd = [(path, "missing") for path in self.missing] + [(path, "unexpected") for path in self.unexpected]
        odd += [(path, f"a dict of the parts of a {name}") for path, name in self.in_parts]
        odd += [(str(part), "damaged") for part in self.damaged] + [(path, "unmade") for path in self.unmade]
        listed = table(("path", "is"), odd[:NOTEBOOK_PATHS]) if odd else None
        more = el("p", f"and {len(odd) - NOTEBOOK_PATHS} more") if len(odd) > NOTEBOOK_PATHS else None
        return joined([facts(about), listed, more])


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """A fault of a checkpoint.

    Attributes:
        file: its name.
        text: what is wrong.
        start: first byte in the file, header included; None where the whole file is meant.
        stop: the byte after the last.
        leaves: paths of the leaves that cannot be loaded because of it.
    """

    file: str
    text: str
    start: int | None = None
    stop: int | None = None
    leaves: tuple[str, ...] = ()


class Repair(msgspec.Struct, frozen=True, array_like=True):
    """A file that was rebuilt.

    Attributes:
        file: its name.
        what: what was made again, and from what.
        kept_as: where the damaged file is kept, in the same directory.
    """

    file: str
    what: str
    kept_as: str | None = None

    def __str__(self) -> str:
        kept = f" (the damaged file is kept as {self.kept_as})" if self.kept_as else ""
        return visible(f"{self.file}: {self.what}{kept}")


class Leftover(msgspec.Struct, frozen=True, array_like=True):
    """A file that belongs neither to the checkpoint nor to a save that is known to be alive.

    Attributes:
        file: its name.
        nbytes: its size.
        why: how its save ended, or that this is not known.
    """

    file: str
    nbytes: int
    why: str


class VerifyReport(msgspec.Struct, frozen=True):
    """What a verification compared and found.

    >>> report = tc.verify("run/step_00000100")
    >>> report.ok, report.nbytes, report.problems
    (True, 40, ())

    Attributes:
        path: of the checkpoint.
        files: shards that were read.
        nbytes: bytes of array data whose checksums were compared.
        problems: faults that were found; after a repair, those that remain.
        seconds: that it took.
        repairs: what was made again, with `repair=True`.
        leftovers: files that dead saves left in the directory. They are no fault of the checkpoint; the next save
            there, and `gc`, remove them.
        unread: parts that could not be read, for want of descriptors or permission, or because a disk failed. Nothing
            is known of them: they are no damage, and another verification may read them.
        notes: what to do about parts that could not be read, what could not be done beside the comparison, and which
            copies of sidecar files are missing or were changed: the checkpoint needs none.
        elsewhere: the disks of other hosts that a node-local checkpoint has, with what is there. It was not compared,
            and is no fault of what is here: verify it there.
    """

    path: str
    files: int
    nbytes: int
    problems: tuple[Problem, ...]
    seconds: float
    repairs: tuple[Repair, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    unread: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the checkpoint is intact: all of it that is here was compared, and is as it was saved."""
        return self.verdict == "intact"

    def __bool__(self) -> bool:
        """As `ok`: `assert tc.verify(path)` says nothing of damage otherwise."""
        return self.ok

    @property
    def verdict(self) -> Literal["intact", "damaged", "unread"]:
        """What is known of the checkpoint; "unread" where no fault was found, and not all could be read."""
        return "damaged" if self.problems else "unread" if self.unread else "intact"

    @property
    def state(self) -> str:
        """The verdict as text, with how many faults, and how many parts that could not be read."""
        parts = f"{count_text(len(self.unread), 'part')} could not be read" if self.unread else ""
        faults = count_text(len(self.problems), "problem") if self.problems else ""
        disks = f"; {count_text(len(self.elsewhere), 'disk')} of other hosts not compared" if self.elsewhere else ""
        return (", and ".join(text for text in (faults, parts) if text) or "intact") + disks

    @property
    def lost(self) -> tuple[str, ...]:
        """The paths of leaves that cannot be loaded."""
        return tuple(sorted({path for problem in self.problems for path in problem.leaves}))

    def __str__(self) -> str:
        rows = [f"verified {self.path}  {count_text(self.files, 'shard')}, {bytes_text(self.nbytes)}: {self.state}"]
        rows += [f"  repaired {repair}" for repair in self.repairs]
        rows += [f"  {problem.file}: {problem.text}" for problem in (*self.problems, *self.unread)]
        rows += [f"  {note}" for note in self.notes]
        rows += [f"  not here: {disk}" for disk in self.elsewhere]
        rows += [f"  {one.file}: {bytes_text(one.nbytes)} {one.why}" for one in self.leftovers]
        return "\n".join(map(visible, rows))
