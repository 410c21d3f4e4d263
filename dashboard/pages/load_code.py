"""Python code that loads a part of a checkpoint: leaves as they were saved, or regions of arrays; public names only.

Names are written as ASCII literals of Python, so that no invisible character of one is pasted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from treeckpt._core.sharding.region import Region
from treeckpt._core.tree.containers import PerRank
from treeckpt._core.tree.paths import path_keys
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._runs.catalog import CheckpointInfo

from ..store.library import NotFound
from .checkpoints import per_rank_keyword

MAX_NAMED_LEAVES = 2000
"""Leaves that one code names."""
_TORCH_KINDS = ("tensor", "parameter", "buffer")


class SnippetPage(msgspec.Struct, frozen=True):
    """A path, and the Python code that loads it."""

    path: str
    snippet: str


class WantedLeaf(NamedTuple):
    """A leaf, and what of it is loaded."""

    path: str
    spec: ArraySpec | None
    """None of a value."""
    regions: tuple[Region, ...] | None = None
    """None for all of it."""


def selecting_code(info: CheckpointInfo, paths: Sequence[str]) -> str:
    """Returns the code that loads some leaves and nodes, with all leaves below them; for the path "" the whole tree."""
    # `select` takes globs, and a path may have their characters
    escaped = ["".join(f"[{c}]" if c in "*?[" else c for c in path) for path in paths]
    select = "" if "" in paths else f", select=[{', '.join(f'{glob!a}' for glob in escaped)}]"
    return f"import treeckpt as tc\n\ntree = tc.load({info.path!a}{select}{per_rank_keyword(info)})\n"


def regions_code(info: CheckpointInfo, leaves: Sequence[WantedLeaf], *, rank: int = 0) -> str:
    """Returns the code that loads regions of arrays, and whole values.

    Args:
        rank: whose state is loaded, where each rank had its own.

    Raises:
        NotFound: there are more than MAX_NAMED_LEAVES leaves, or none.
    """
    if not 0 < len(leaves) <= MAX_NAMED_LEAVES:
        many = f"{len(leaves):,} leaves, and code names at most {MAX_NAMED_LEAVES:,}: narrow the rules, as model/*."
        raise NotFound(f"This is {many}" if leaves else "This rank loads nothing.")
    wanted: Any = {}
    for leaf in leaves:
        at, keys = wanted, ("", *path_keys(leaf.path))
        for key in keys[:-1]:
            at = at.setdefault(_literal(key), {})
        at[_literal(keys[-1])] = _wanted_text(leaf)
    like = _nested_text(wanted[_literal("")], "")
    own = any("~rank" in leaf.path for leaf in leaves) and (info.world or 1) > 1
    lines = ["import treeckpt as tc"]
    comm = ""
    if own:
        lines.append("from treeckpt.testing import thread_comms")
        comm = f", comm=thread_comms({info.world})[{rank}]"
    lines += ["", f"like = {like}", f"tree = tc.load({info.path!a}, like, strict='missing'{comm})"]
    if len(leaves) == 1:
        lines.append(f"array = tree{_access(path_keys(leaves[0].path))}")
    return "\n".join([*lines, ""])


def _wanted_text(leaf: WantedLeaf) -> str:
    spec = leaf.spec
    if spec is None:
        return "None"
    kind = "" if spec.kind in _TORCH_KINDS else f", kind={spec.kind!a}"
    regions = ""
    if leaf.regions is not None and leaf.regions != (Region.whole(spec.shape),):
        parts = "".join(f"tc.Region({region.offset!r}, {region.shape!r}), " for region in leaf.regions)
        regions = f", regions=({parts.rstrip(' ')})" if parts else ", regions=()"
    return f"tc.ArraySpec({spec.shape!r}, {spec.dtype!a}{kind}{regions})"


def _nested_text(wanted: Any, indent: str) -> str:
    """Returns a nested dict of texts as the text of one; what each rank has of its own stands in a `PerRank`."""
    if isinstance(wanted, str):
        return wanted
    if list(wanted) == [_literal(PerRank(...))]:
        return f"tc.PerRank({_nested_text(wanted[_literal(PerRank(...))], indent)})"
    below = f"{indent}    "
    rows = "".join(f"{below}{key}: {_nested_text(value, below)},\n" for key, value in wanted.items())
    return f"{{\n{rows}{indent}}}"


def _literal(key: object) -> str:
    """Returns a key as Python writes it."""
    if isinstance(key, float) and not math.isfinite(key):
        return f"float({str(key)!a})"
    if isinstance(key, tuple):
        return f"({''.join(f'{_literal(part)}, ' for part in key)})"
    return f"{key!a}"


def _access(keys: Iterable[object]) -> str:
    return "".join(".value" if isinstance(key, PerRank) else f"[{_literal(key)}]" for key in keys)
