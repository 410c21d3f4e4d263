"""`treeckpt show --rules`: prints the leaves that load rules produce from a checkpoint. Only the index is read."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..core.format.records import Index
from ..core.text import shape_text
from ..core.tree.spec import ArraySpec
from ..errors import FormatError
from ..loading.transforms import decode, parse
from ..loading.transforms.rules import Rule
from ..loading.transforms.view import View, view_of
from ..report.terminal import print_json, print_line, print_table

__all__ = ["read_rules", "show_rules"]


def read_rules(path: str) -> tuple[Rule, ...]:
    """Reads the rules of a file: JSON, or statements.

    Raises:
        FormatError: it cannot be read, or contains neither.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(path, expected="a file of rules", found=f"{error}"[:200]) from error
    return decode(text) if text.lstrip().startswith("[") else parse(text)


def show_rules(index: Index, options: argparse.Namespace) -> int:
    """Prints the leaves that rules produce from an index on rank 0, at and below a path."""
    view = view_of(index, read_rules(options.rules), source_rank=0, rank=0)
    below = options.leaf.rstrip("/")
    rows = [_row(view, path) for path in view.by_path if not below or path == below or path.startswith(below + "/")]
    dropped = list(view.transformed.dropped)
    if options.json:
        print_json({"leaves": rows, "dropped": dropped})
        return 0
    specs = [f"{row['dtype']} {shape_text(row['shape'])}" if row["dtype"] else "value" for row in rows]
    print_table(("path", "is", "how"), [(row["path"], spec, row["how"]) for row, spec in zip(rows, specs, strict=True)])
    for path in dropped:
        print_line(f"dropped  {path}", "dim")
    return 0


def _row(view: View, path: str) -> dict[str, Any]:
    spec = view.by_path[path][0].spec
    array = spec if isinstance(spec, ArraySpec) else None
    # the chain ends in the path itself, which is printed beside it
    how = view.chain(path).removesuffix(path).rstrip()
    return {"path": path, "dtype": array and array.dtype, "shape": array and array.shape, "how": how}
