"""The command `diff`: prints in what two checkpoints differ."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping

from msgspec.structs import asdict

from .._core.text import count_text, json_number
from .._inspect.diff import Added, Diff, Moved, Removed, diff
from .._inspect.ranking import is_optimizer_state
from .._io.storage.open import open_store
from .._loading.compare import ValueChange, value_changes
from .._loading.run_load import opened
from .._report.terminal import print_json, print_line, print_table
from .._runs.progress_bar import stores_bar
from .command import Commands, progress_of

_VALUES = (
    "compare contents too: by the checksums recorded when they were saved, number by number where these "
    "differ, or a checkpoint of another program has none; whether bytes were damaged since says `treeckpt verify`"
)
_NOT_COMPARED = "the contents of arrays are not compared without --values"
_BY_CHECKSUMS = "contents too, by their recorded checksums; treeckpt verify compares these with the bytes"
_BY_BYTES = "contents too, by their bytes: files of another program have no checksums of ours"


def add_diff(commands: Commands) -> None:
    """Adds `diff`."""
    parser = commands.add(
        "diff", _diff, "say in what two checkpoints differ, by their indexes or by every number", progress=True
    )
    parser.add_argument("--values", action="store_true", help=_VALUES)
    parser.add_argument("first", metavar="A")
    parser.add_argument("second", metavar="B")


def _diff(options: argparse.Namespace) -> int:
    with (
        stores_bar("comparing", shown=progress_of(options)) as counted,
        opened(counted(open_store(options.first))) as a,
        opened(counted(open_store(options.second))) as b,
    ):
        differences = diff(a.index, b.index)
        values, summed = None, a.has_checksums and b.has_checksums
        if options.values:
            # what the checksums do not show to be equal is read, of both
            counted.expect(lambda: 2 * sum(one.nbytes for one in value_changes(a, b, differences, exact=False)))
            values = sorted(value_changes(a, b, differences), key=_rank)
    if options.json:
        compared: dict[str, object] = {
            "changes": differences.changes,
            "same": differences.same,
            "also": differences.also,
        }
        if values is not None:
            compared["values"] = [_json_of(change) for change in values]
            compared["equal_by"] = "recorded checksums" if summed else "bytes"
        print_json(compared)
        return 0
    rows = _diff_rows(differences) + [(_content_of(v), v.path, "", _delta_text(v)) for v in values or ()]
    print_table(("what", "path", "before", "after"), rows) if rows else None
    counts = Counter(row[0] for row in rows)
    changed = {change.path for change in differences.changes}
    alike = differences.same - sum(v.path not in changed for v in values or ())
    how = _NOT_COMPARED if values is None else _BY_CHECKSUMS if summed else _BY_BYTES
    parts = [f"{n} {what}" for what, n in counts.most_common()] + [f"{count_text(alike, 'leaf', 'leaves')} alike"]
    print_line(f"{', '.join(parts)} ({how})", "dim")
    if differences.also:
        print_line(f"beside the leaves these differ: {', '.join(differences.also)}", "yellow")
    return 0


def _json_of(change: ValueChange) -> Mapping[str, object]:
    """Returns a change as JSON has it: a difference that overflows is "Infinity", and null is one that there is not."""
    delta = {name: json_number(value) for name, value in asdict(change.delta).items()} if change.delta else None
    return asdict(change) | {"delta": delta}


def _content_of(change: ValueChange) -> str:
    return "optimizer content" if is_optimizer_state(change.path) else "content"


def _rank(change: ValueChange) -> tuple[bool, float, str]:
    """The key that sorts what changed most, relative to its norm, to the front; optimizer state follows the others."""
    delta = change.delta
    assert delta is not None, "every difference was measured"
    return is_optimizer_state(change.path), -math.inf if delta.not_finite else -delta.relative, change.path


def _delta_text(change: ValueChange) -> str:
    delta = change.delta
    assert delta is not None, "every difference was measured"
    text = f"{delta.changed} of {delta.elements} differ"
    if delta.max_abs is not None and delta.mean_abs is not None:
        text += f", at most by {delta.max_abs:.6g}, by {delta.mean_abs:.6g} in the mean"
    if delta.cosine is not None:
        text += f"; relative change {delta.relative:.4g}, cosine {delta.cosine:.6f}"
    return text + (f", {delta.not_finite} of them not finite" if delta.not_finite else "")


def _diff_rows(found: Diff) -> list[tuple[str, str, str, str]]:
    rows: list[tuple[str, str, str, str]] = []
    for change in found.changes:
        if isinstance(change, Added):
            rows.append(("added", change.path, "", change.leaf))
        elif isinstance(change, Removed):
            rows.append(("removed", change.path, change.leaf, ""))
        elif isinstance(change, Moved):
            rows.append(("moved", change.path, "", change.to))
        else:
            rows.append((change.aspect, change.path, change.before, change.after))
    return rows
