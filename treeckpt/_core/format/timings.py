"""The timing record of a save: spans, as the checkpoint stores them and the dashboard draws them.

A span is a named interval of one rank's time. Spans of a rank nest by `parent`, an index into that rank's own spans.
Times are Unix nanoseconds by the rank's clock. All spans of a rank come from one monotonic clock, so durations are
exact; only comparisons between hosts have the error of their clocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...errors import FormatError
from ..sharding.int_runs import Runs, check_runs, length_of
from .shard_header import MAX_NBYTES, MAX_WORLD, SAVE_ID, check_seal, sealed

VERSION = 1
BLOCKING = "blocking"
"""The span of a background save from its start until the call returned. It overlaps the phases and is none itself."""
MAX_PARTIAL_WORLD = 1 << 18
"""Timings of more ranks than this must have spans of every rank."""
MAX_TIME = 1 << 62
"""Nanoseconds; differences of two times fit an int64."""


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An interval of one rank's time.

    Attributes:
        name: the phase: "save", "flatten", "plan", "agree", "write", "hash", "fsync", "gather", "publish" ...
        rank: whose time it is.
        start_ns: Unix time at which it began, in nanoseconds.
        stop_ns: Unix time at which it ended.
        nbytes: bytes that were moved in that time.
        parent: position of the enclosing span among the rank's spans, -1 for none.
    """

    name: str
    rank: int
    start_ns: int
    stop_ns: int
    nbytes: int = 0
    parent: int = -1

    @property
    def seconds(self) -> float:
        return (self.stop_ns - self.start_ns) / 1e9


class Host(msgspec.Struct, frozen=True, array_like=True):
    """A machine, and the ranks that ran on it."""

    name: str
    ranks: Runs


class Timings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The spans of every rank of one save; a failed save has them too, with its error."""

    save_id: str
    step: int | None
    world: int
    spans: tuple[Span, ...]
    error: str | None = None
    hosts: tuple[Host, ...] = ()
    """The ranks of each machine."""

    def of_rank(self, rank: int) -> Sequence[Span]:
        """Returns one rank's spans in the order in which `parent` counts them."""
        return [span for span in self.spans if span.rank == rank]


class _TimingsDocument(msgspec.Struct, forbid_unknown_fields=True):
    seal: str
    format: str
    version: int
    timings: Timings


_DOCUMENT = msgspec.json.Decoder(_TimingsDocument)
"""Made when this module is imported, as all decoders of files: two threads that make the first one of a struct crash
msgspec."""


def timings_name(save_id: str) -> str:
    """Returns the file name of a save's timings."""
    return f"timings.{save_id}.json"


def encode_timings(timings: Timings) -> bytes:
    """Encodes the file."""
    return sealed(msgspec.json.encode(_TimingsDocument("0" * 16, "treeckpt-timings", VERSION, timings)))


def decode_timings(data: bytes, name: str) -> Timings:
    """Decodes the file.

    Raises:
        CorruptError: the seal is broken.
        FormatError: another version, or no timings of treeckpt.
    """
    check_seal(data, name)
    try:
        document = _DOCUMENT.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(name, expected="timings as treeckpt writes them", found=f"{error}"[:200]) from error
    if document.format != "treeckpt-timings" or document.version != VERSION:
        raise FormatError(name, expected=f"timings version {VERSION}", found=f"version {document.version}")
    _check_timings(document.timings, name)
    return document.timings


def _check_timings(timings: Timings, name: str) -> None:
    if not 0 < timings.world <= MAX_WORLD or SAVE_ID.fullmatch(timings.save_id) is None:
        raise FormatError(name, expected="a save id and a world", found=f"{timings.save_id!r:.40}, {timings.world}")
    for host in timings.hosts:
        check_runs(host.ranks, path=name, low=0, high=timings.world)
    if sum(length_of(host.ranks) for host in timings.hosts) > timings.world:
        raise FormatError(name, expected="each rank on one host", found=f"more than {timings.world} ranks on hosts")
    counts: dict[int, int] = {}
    for span in timings.spans:
        before = counts.get(span.rank, 0)
        if not -1 <= span.parent < before:
            raise FormatError(name, expected="spans after their parents", found=_span_text(span))
        in_time = -MAX_TIME < span.start_ns <= span.stop_ns < MAX_TIME
        if not 0 <= span.rank < timings.world or not in_time or not 0 <= span.nbytes < MAX_NBYTES:
            raise FormatError(name, expected="spans of time of its ranks", found=_span_text(span))
        counts[span.rank] = before + 1
    if timings.world > max(MAX_PARTIAL_WORLD, len(timings.spans)):
        raise FormatError(name, expected="spans of every rank", found=f"{len(timings.spans)} of {timings.world} ranks")


def _span_text(span: Span) -> str:
    times = f"from {span.start_ns} to {span.stop_ns} ns"
    return f"a span {span.name[:40]} of rank {span.rank} {times}, {span.nbytes} bytes, with parent {span.parent}"
