"""Finds repeated blocks among a node's children: layers that differ in their number only are shown once, as `xN`.

A key such as `layers.3.mlp.weight` is split into `layers`, block 3, `mlp.weight`; a plain `3` is block 3. Neighbouring
children with the same number form a block, and neighbouring blocks are a repetition where the names and kinds of all
their children are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby

import msgspec

MIN_CHILDREN = 4
"""Fewer children than this are shown one by one."""


class RepeatedBlocks(msgspec.Struct, frozen=True):
    """Children `start:stop` of a node, which are `blocks` times the same block."""

    start: int
    stop: int
    blocks: int
    head: str
    """The part of the key before the number, without the dot; empty for plain numbers."""
    first: int
    """The number of the first block."""

    @property
    def length(self) -> int:
        """The number of children of one block."""
        return (self.stop - self.start) // self.blocks

    def name(self, block: int) -> str:
        """Returns the name of a block."""
        return f"{self.head}.{self.first + block}" if self.head else f"{self.first + block}"

    @property
    def title(self) -> str:
        """The name of all blocks together, such as `layers.0..31`."""
        return f"{self.name(0)}..{self.first + self.blocks - 1}"


class _NumberedBlock(msgspec.Struct, frozen=True):
    start: int
    head: str
    number: int
    content: tuple[tuple[str, Hashable], ...]


def find_repeated_blocks(keys: Sequence[str], kinds: Sequence[Hashable]) -> list[RepeatedBlocks]:
    """Returns the repetitions among a node's children, by their start.

    Args:
        keys: the keys of the children, in order.
        kinds: what each child is: equal for children that are interchangeable.
    """
    found: list[RepeatedBlocks] = []
    row: list[_NumberedBlock] = []
    for block in (*_blocks(keys, kinds), None):
        last = row[-1] if row else None
        if block is not None and last is not None:
            follows = (last.start + len(last.content), last.head, last.number + 1)
            if follows == (block.start, block.head, block.number) and last.content == block.content:
                row.append(block)
                continue
        if last is not None and len(row) > 1 and len(row) * len(last.content) >= MIN_CHILDREN:
            stop = last.start + len(last.content)
            found.append(RepeatedBlocks(row[0].start, stop, len(row), row[0].head, row[0].number))
        row = [] if block is None else [block]
    return found


def _blocks(keys: Sequence[str], kinds: Sequence[Hashable]) -> Iterator[_NumberedBlock]:
    """Yields the neighbouring children that have one head and one number."""
    rows = [(at, _split_key(key), kind) for at, (key, kind) in enumerate(zip(keys, kinds, strict=True))]
    for which, group in groupby(rows, key=lambda row: row[1] and row[1][:2]):
        if which is not None:
            members = [(at, split[2], kind) for at, split, kind in group if split is not None]
            yield _NumberedBlock(members[0][0], *which, tuple((tail, kind) for _, tail, kind in members))


def _split_key(key: str) -> tuple[str, int, str] | None:
    """Splits a key into (head, number, tail), None if no step of it is a number."""
    steps = key.split(".")
    for at, step in enumerate(steps):
        if step.isascii() and step.isdigit() and len(step) < 10 and (step == "0" or step[0] != "0"):
            return ".".join(steps[:at]), int(step), ".".join(steps[at + 1 :])
    return None
