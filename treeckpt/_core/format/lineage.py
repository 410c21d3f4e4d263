"""The lineage of a run's checkpoints: which was saved last, and from which of the others it descends.

Every save of a manager gets a sequence number above those of all checkpoints on the disk, and names the save that it
follows. It also lists the sequence numbers of those that it does not descend from. So the newest checkpoint alone says
which of the others are on its lineage and which are on abandoned branches, even after others were deleted, and no clock
is used. A checkpoint without a record, which was saved by hand, is ordered by its step.

A checkpoint may have a text in the place of a step. It is ordered by its sequence number alone: it is never an earlier
step than another one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from itertools import accumulate, groupby
from typing import NamedTuple

import msgspec

from .files import CheckpointId, id_order, is_pattern, is_sidecar_name

MAX_SEQUENCE = 1 << 62
MAX_KEEP = 1000
"""Characters of recorded policies, at most; longer ones are not recorded."""

SequenceRanges = tuple[tuple[int, int], ...]
"""The (first, last) of each range of sequence numbers, rising."""


class Lineage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The position of a checkpoint in the history of its run."""

    sequence: int
    """Greater than that of every checkpoint that existed when it was saved."""
    follows: str = ""
    """The save id of the checkpoint from which the training continued; empty where there was none."""
    abandoned: SequenceRanges = ()
    """Sequence numbers of checkpoints of the run that it does not descend from."""
    name: str = ""
    """The text by which it was saved, in the place of a step: the name of its directory. Of a step, the pattern by
    which its manager names steps, as `checkpoint-{step}`; empty for `STEP_PATTERN`."""
    keep: str = ""
    """The policies of the manager that saved it, as `treeckpt.policy.keep_text` has them; empty if not known."""

    def is_sound(self) -> bool:
        """Returns whether the numbers are in order and in bounds, and the texts are such as a manager records."""
        numbers = [number for pair in self.abandoned for number in pair]
        rising = all(low <= high for low, high in self.abandoned) and numbers == sorted(numbers)
        named = not self.name or is_sidecar_name(self.name) or is_pattern(self.name)
        return (
            named
            and len(self.keep) <= MAX_KEEP
            and rising
            and 0 <= self.sequence < MAX_SEQUENCE
            and (not numbers or numbers[0] >= 0)
        )


class SavedCheckpoint(NamedTuple):
    """One checkpoint with a readable index: what a lineage is computed from."""

    step: CheckpointId
    save_id: str
    lineage: Lineage | None = None

    @property
    def sequence(self) -> int:
        return id_order(self.step)[0] if self.lineage is None else self.lineage.sequence


class LineagePosition(NamedTuple):
    """The sort key of a checkpoint among those of its run: the greatest is the newest."""

    present: bool
    """Whether it is on the lineage of the newest checkpoint, not on an abandoned branch."""
    sequence: int
    step: int
    """-1 for a checkpoint with a text in its place."""


class LineageOrder:
    """The order of a run's checkpoints.

    Args:
        marks: all checkpoints with an index, each step once.
    """

    def __init__(self, marks: Iterable[SavedCheckpoint]) -> None:
        self._marks = tuple(marks)
        self._recorded = [mark for mark in self._marks if mark.lineage is not None]
        newest = max(self._recorded, key=lambda mark: (mark.sequence, id_order(mark.step)), default=None)
        self._abandoned = _abandoned_by(newest)
        present = [
            (mark.step, mark.sequence)
            for mark in self._recorded
            if not isinstance(mark.step, str) and not _within(mark.sequence, self._abandoned)
        ]
        present.sort()
        self._steps = [step for step, _ in present]
        self._highest = list(accumulate((sequence for _, sequence in present), max))

    def position(self, mark: SavedCheckpoint) -> LineagePosition:
        """Returns the position of a checkpoint."""
        present = not _within(mark.sequence, self._abandoned)
        number, _ = id_order(mark.step)
        if present and mark.lineage is None:
            return self.position_of_step(number)
        return LineagePosition(present, mark.sequence, number)

    def position_of_step(self, step: int) -> LineagePosition:
        """Returns the position of a directory of which only the step is known: on the lineage, above lower steps."""
        count = bisect_right(self._steps, step)
        return LineagePosition(True, max(step, self._highest[count - 1]) if count else step, step)

    def newest(self) -> SavedCheckpoint | None:
        """Returns the checkpoint that was saved last; None where there is none."""
        return max(self._marks, key=self.position, default=None)

    def ancestors(self, head: SavedCheckpoint) -> list[SavedCheckpoint]:
        """Returns the existing checkpoints from which `head` descends.

        A checkpoint without a record may have been saved by hand after `head`; it counts as an ancestor.
        """
        place = self.position(head)[1:]
        before = head
        if head.lineage is None:
            lower = [mark for mark in self._recorded if (mark.sequence, id_order(mark.step)[0]) < place]
            before = max(lower, key=lambda mark: mark.sequence, default=None)
        abandoned = _abandoned_by(before)
        return [
            mark
            for mark in self._marks
            if not _within(mark.sequence, abandoned)
            and (self.position(mark)[1:] < place or (mark.lineage is None and head.lineage is not None))
        ]


def _abandoned_by(mark: SavedCheckpoint | None) -> SequenceRanges:
    return () if mark is None or mark.lineage is None else mark.lineage.abandoned


def _within(number: int, ranges: SequenceRanges) -> bool:
    count = bisect_right(ranges, number, key=lambda pair: pair[0])
    return bool(count) and number <= ranges[count - 1][1]


def next_lineage(marks: Collection[SavedCheckpoint], head: SavedCheckpoint | None, step: CheckpointId) -> Lineage:
    """Computes the lineage of a checkpoint that is about to be saved.

    It follows `head`. Steps rise during a training, so where `head` is no earlier step, the training went back by a
    load that the manager did not see; then the checkpoint follows the newest ancestor of `head` with a lower step.

    Args:
        marks: all checkpoints on the disk; that of `step` will be replaced by the new one.
        head: the checkpoint that was restored or saved last; None means the newest on the disk.
        step: the step of the new checkpoint, or the text in its place, which is no earlier step than any.
    """
    order, number, name = LineageOrder(marks), *((MAX_SEQUENCE, step) if isinstance(step, str) else (step, ""))
    head = head or order.newest()
    above = max([mark.sequence for mark in marks] + ([head.sequence] if head else []), default=-1)
    reached = head
    if head is not None and isinstance(head.step, str):  # the newest before it that has a step
        numbered = [mark for mark in order.ancestors(head) if not isinstance(mark.step, str)]
        reached = max(numbered, key=lambda mark: order.position(mark)[1:], default=None)
    if head is not None and reached is not None and id_order(reached.step)[0] >= number:
        lower = [mark for mark in order.ancestors(head) if id_order(mark.step)[0] < number]
        head = max(lower, key=lambda mark: order.position(mark)[1:], default=None)
    past = {mark.sequence for mark in order.ancestors(head) if id_order(mark.step)[0] < number} if head else set[int]()
    past |= {head.sequence} if head else set()
    ranges: list[tuple[int, int]] = []
    others = sorted({mark.sequence for mark in marks if mark.step != step})
    for is_past, group in groupby(others, key=past.__contains__):
        if not is_past:
            numbers = list(group)
            ranges.append((numbers[0], numbers[-1]))
    # at least the step, by which checkpoints without a record count, and never past what `is_sound` takes
    sequence = min(max(id_order(step)[0], above + 1), MAX_SEQUENCE - 1)
    return Lineage(sequence, head.save_id if head else "", tuple(ranges), name)
