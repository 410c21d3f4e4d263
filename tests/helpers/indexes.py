"""Indexes written down record by record, for tests that need one exactly so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treeckpt._core.format.records import FileTable, Index, LeafRecord, file_table
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._core.tree.structure import DictNode

ONE_FILE_EACH = ((0, 0, 0, 4096, 512), (1, 0, 0, 4096, 256))
"""Rows of the table of files: rank, part, stream, nbytes, header."""


def index_of(
    leaves: Mapping[str, LeafRecord],
    specs: Sequence[ArraySpec],
    *,
    files: FileTable | Sequence[tuple[int, int, int, int, int]] = ONE_FILE_EACH,
    **fields: Any,
) -> Index:
    """An index of a dict of these leaves, saved by two ranks."""
    table = files if isinstance(files, FileTable) else file_table(files)
    known: dict[str, Any] = {
        "save_id": "0123456789abcdef", "step": 7, "created_ns": 0, "world": 2, "layouts": (), "metadata": {},
        "structure": DictNode(tuple(leaves), (None,) * len(leaves)), "leaves": tuple(leaves.values()),
    }  # fmt: skip
    return Index(specs=tuple(specs), files=table, **known | fields)
