"""What save, load and verify say they did."""

from __future__ import annotations

from typing import Any

import msgspec

from .core.format.damage import DamagedLeaf
from .core.format.timings import Span
from .core.html import el, facts, joined, table
from .core.text import seconds_text

__all__ = ["Leftover", "LoadReport", "SaveReport", "VerifyReport", "human_bytes", "human_rate"]


def human_bytes(nbytes: float) -> str:
    """Bytes with a unit of 1,000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    raise AssertionError("the last unit returns")


def human_rate(nbytes: float, seconds: float) -> str:
    """Bytes a second."""
    return f"{human_bytes(nbytes / seconds)}/s" if seconds > 0 else "-"


SHOWN = 20
"""Paths that a notebook lists."""


class SaveReport(msgspec.Struct, frozen=True):
    """What a save wrote, as one rank saw it."""

    path: str
    save_id: str
    step: int | None
    world: int
    nbytes: int
    """Bytes of array data that this rank wrote."""
    files: tuple[str, ...]
    """This rank's shards."""
    seconds: float
    """From the call until the index was published."""
    spans: tuple[Span, ...] = ()
    blocked_seconds: float | None = None
    """Of a save in the background: from the call until it returned. None where the caller waited for all of it."""
    staged_nbytes: int = 0
    """Bytes that were copied, for the save to go on in the background."""

    def __str__(self) -> str:
        blocked = f", {self.blocked_seconds:.3f} s of it blocking" if self.blocked_seconds is not None else ""
        written = human_bytes(self.nbytes)
        row = f"saved {self.path}  {written} in {self.seconds:.3f} s{blocked}"
        if self.world > 1:
            row = (
                f"saved {self.path}  by {self.world} ranks in {self.seconds:.3f} s{blocked}; this rank wrote {written}"
            )
        return "\n".join([row, *_span_rows(self.spans)])

    def _repr_html_(self) -> str:
        """For notebooks: what was written, and where this rank's time went."""
        blocked = self.seconds if self.blocked_seconds is None else self.blocked_seconds
        about = [
            ("saved", self.path),
            ("step", self.step),
            ("this rank wrote", human_bytes(self.nbytes)),
            ("took", seconds_text(self.seconds)),
            ("blocked", seconds_text(blocked)),
            ("ranks", self.world),
        ]
        rows = [
            (s.name, seconds_text(s.seconds), human_rate(s.nbytes, s.seconds) if s.nbytes else None) for s in self.spans
        ]
        return joined([facts(about), table(("phase", "took", "rate"), rows, right=("took", "rate"))])


def _span_rows(spans: tuple[Span, ...]) -> list[str]:
    rows: list[str] = []
    for span in spans:
        rate = human_rate(span.nbytes, span.seconds) if span.nbytes else ""
        rows.append(f"  {span.name:<10} {span.seconds:9.4f} s  {rate}".rstrip())
    return rows


class LoadReport(msgspec.Struct, frozen=True):
    """What a load read, and what it did not find."""

    path: str
    nbytes: int
    """Bytes of array data that were asked for."""
    read_nbytes: int
    """Bytes that were read from data areas to get them."""
    loaded: int
    """Leaves that were filled."""
    missing: tuple[str, ...]
    """Asked for, not in the checkpoint."""
    unexpected: tuple[str, ...]
    """In the checkpoint, not asked for."""
    seconds: float
    dropped: tuple[str, ...] = ()
    """In the checkpoint, and left out by a rule; as it is called there."""
    renamed: tuple[tuple[str, str], ...] = ()
    """What rules gave another name and nothing else: as in the checkpoint, and as loaded."""
    sources: tuple[LoadReport, ...] = ()
    """Of a bank, what each of its checkpoints gave."""
    damaged: tuple[DamagedLeaf, ...] = ()
    """Asked for with `on_corrupt="skip"`, and not to be had: by leaf, with the bytes for which that is so."""

    def __str__(self) -> str:
        rows = [
            f"loaded {self.path}  {self.loaded} leaves, {human_bytes(self.nbytes)} in {self.seconds:.3f} s "
            f"({human_rate(self.nbytes, self.seconds)}, {human_bytes(self.read_nbytes)} read)"
        ]
        rows += [f"  missing     {path}" for path in self.missing]
        rows += [f"  unexpected  {path}" for path in self.unexpected]
        rows += [f"  damaged     {part}" for part in self.damaged]
        rows += [f"  dropped     {path}" for path in self.dropped]
        rows += [f"  renamed     {before} -> {now}" for before, now in self.renamed]
        return "\n".join(rows + ["  " + line for source in self.sources for line in str(source).splitlines()])

    def _repr_html_(self) -> str:
        """For notebooks: what was read, and what did not fit."""
        about = [
            ("loaded", self.path),
            ("leaves", self.loaded),
            ("size", human_bytes(self.nbytes)),
            ("took", seconds_text(self.seconds)),
            ("rate", human_rate(self.nbytes, self.seconds)),
            ("read", human_bytes(self.read_nbytes)),
        ]
        odd = [(path, "missing") for path in self.missing] + [(path, "unexpected") for path in self.unexpected]
        odd += [(str(part), "damaged") for part in self.damaged]
        listed = table(("path", "is"), odd[:SHOWN]) if odd else None
        more = el("p", f"and {len(odd) - SHOWN} more") if len(odd) > SHOWN else None
        return joined([facts(about), listed, more])


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """One thing that is wrong with a checkpoint."""

    file: str
    text: str
    start: int | None = None
    """First of the bytes in the file, header included; None where all of it is meant."""
    stop: int | None = None
    leaves: tuple[str, ...] = ()
    """Paths that cannot be loaded for it."""


class Repair(msgspec.Struct, frozen=True, array_like=True):
    """A file that was made again."""

    file: str
    what: str
    kept_as: str | None = None
    """Where the damaged file is kept, in the same directory."""

    def __str__(self) -> str:
        return f"{self.file}: {self.what}" + (f" (the damaged file is kept as {self.kept_as})" if self.kept_as else "")


class Leftover(msgspec.Struct, frozen=True, array_like=True):
    """A file that belongs neither to the checkpoint nor to a save that is known to be alive."""

    file: str
    nbytes: int
    why: str
    """How its save ended, or that this is not known."""


class VerifyReport(msgspec.Struct, frozen=True):
    """What verification found."""

    path: str
    files: int
    nbytes: int
    """Bytes of array data whose checksums were compared."""
    problems: tuple[Problem, ...]
    """After a repair, what is left of them."""
    seconds: float
    repairs: tuple[Repair, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    """What dead saves left in the directory: no fault of the checkpoint. The next save there, and `gc`, remove it."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def lost(self) -> tuple[str, ...]:
        """The paths of leaves that cannot be loaded."""
        return tuple(sorted({path for problem in self.problems for path in problem.leaves}))

    def __str__(self) -> str:
        state = "intact" if self.ok else f"{len(self.problems)} problems"
        rows = [f"verified {self.path}  {self.files} shards, {human_bytes(self.nbytes)}: {state}"]
        rows += [f"  repaired {repair}" for repair in self.repairs]
        rows += [f"  {problem.file}: {problem.text}" for problem in self.problems]
        return "\n".join(rows + [f"  {one.file}: {human_bytes(one.nbytes)} {one.why}" for one in self.leftovers])


def as_json(report: Any) -> bytes:
    """Any report as JSON."""
    return msgspec.json.encode(report)
