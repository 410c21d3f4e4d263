"""The tree of a checkpoint as rows: containers, values, and shapes in the place of arrays, from the index alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from .._core.format.records import AliasRecord, Index, Leaf, PerRankValues, ValueRecord
from .._core.sharding.int_runs import length_of
from .._core.text import blob_text, count_text, shape_text, value_text
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import KeyTextCache, PerRankNode, Structure
from .._core.tree.value_codec import Value

INDENT = "  "
VALUE_CHARS = 400
"""Characters of a value that are shown."""


class StructureRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A container, or a leaf."""

    path: str
    kind: str
    """"dict", "list", "namedtuple", "per_rank" and so on; of a leaf "array", "value", or "values" of each rank."""
    depth: int
    cls: str = ""
    """The class of a namedtuple, dataclass or registered node."""
    children: int = 0
    ranks: int = 0
    """Below `PerRank`: how many ranks it stands for."""
    spec: ArraySpec | None = None
    shares: str = ""
    """Of an array: the path of the one whose memory it shares."""
    value: Value | tuple[Value, ...] = None
    blob: ArraySpec | None = None
    """Of a text or bytes whose content is in shards: its type and length."""

    def text(self) -> str:
        """Describes the row in one line, without its key."""
        if self.spec is not None:
            kind = "" if self.spec.kind == "tensor" else f"{self.spec.kind} "
            return f"{kind}{self.spec.dtype}{shape_text(self.spec.shape)}" + self._shares()
        if self.blob is not None:
            text = blob_text(self.blob.kind, self.blob.nbytes)
            return text if self.kind == "value" else f"{count_text(self.ranks, 'rank')}: {text}"
        if self.kind == "values":
            assert isinstance(self.value, tuple), "one for each rank"
            shown = ", ".join(value_text(one, 40) for one in self.value[:4])
            return f"{count_text(self.ranks, 'rank')}: {shown}" + (", ..." if len(self.value) > 4 else "")
        if self.kind == "value":
            value: Any = self.value
            return value_text(value, VALUE_CHARS)
        return f"{self.kind} {self.cls}".rstrip() + ("" if self.children else ", empty")

    def _shares(self) -> str:
        return f", shares the memory of {self.shares}" if self.shares else ""


def structure_rows(index: Index, below: str = "") -> list[StructureRow]:
    """Returns the rows of a tree, each container before what is in it.

    Args:
        below: a path, of a container or a leaf: only that is given.
    """
    texts, leaves, rows = KeyTextCache(), iter(index.entries), list[StructureRow]()

    def walk(node: Structure, path: str, depth: int, ranks: int) -> None:
        if node is None:
            rows.append(_leaf_row(index, next(leaves), depth, ranks))
            return
        kind, count = str(node.__struct_config__.tag), len(node.children)
        rows.append(StructureRow(path, kind, depth, getattr(node, "cls", ""), count, ranks))
        groups = [length_of(group) for group in node.ranks] if isinstance(node, PerRankNode) else [ranks] * count
        for step, child, group in zip(texts.of(node, path), node.children, groups, strict=True):
            walk(child, f"{path}/{step}" if depth else step, depth + 1, group)

    walk(index.structure, "", 0, 0)
    prefix = f"{below}/"
    return [row for row in rows if not below or row.path == below or row.path.startswith(prefix)]


def _leaf_row(index: Index, leaf: Leaf, depth: int, ranks: int) -> StructureRow:
    record = leaf.record
    if isinstance(record, ValueRecord):
        return StructureRow(leaf.path, "value", depth, ranks=ranks, value=record.value)
    if isinstance(record, PerRankValues):
        return StructureRow(leaf.path, "values", depth, ranks=ranks, value=record.values)
    if leaf.spec is None:
        kind = "value" if leaf.ranks is None else "values"
        return StructureRow(leaf.path, kind, depth, ranks=ranks, blob=leaf.stored)
    shares = index.entries[record.of].path if isinstance(record, AliasRecord) else ""
    return StructureRow(leaf.path, "array", depth, ranks=ranks, spec=leaf.spec, shares=shares)


def structure_lines(rows: list[StructureRow]) -> Iterator[str]:
    """Yields a line for each row, indented, with the last step of its path; the first row has its whole path."""
    for number, row in enumerate(rows):
        key = row.path.rpartition("/")[2] if number else row.path
        yield f"{INDENT * (row.depth - rows[0].depth)}{key}{': ' if key else ''}{row.text()}"
