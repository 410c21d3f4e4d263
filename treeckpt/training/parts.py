"""What becomes of the parts of a training state that are trees of the user's own: `loader` and `extra`?

A loader may be one object or a tree of them: each takes what was saved where it stands. An `extra` that is given is
filled as `treeckpt.load_into` fills a tree; what only one side has is found here, before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..arrays.registry import is_value
from ..arrays.stateful import expand, holds_stateful, is_stateful
from ..core.tree.flatten import flatten
from ..core.tree.sequences import differing_sequences
from ..core.tree.structure import index_path, key_text
from ..errors import MismatchError
from .sources import Source

__all__ = ["compare_extra", "loads_of"]


def loads_of(loader: Any, state: Any, path: str) -> Iterator[Callable[[], None]]:
    """What hands each object of a loader's tree (dicts, lists and tuples) its state.

    Raises:
        MismatchError: an object where nothing was saved.
    """
    if is_stateful(loader):
        yield lambda: loader.load_state_dict(state)
        return
    pairs: Any = loader.items() if isinstance(loader, Mapping) else ()
    for key, one in enumerate(loader) if isinstance(loader, (list, tuple)) else pairs:
        if not holds_stateful(one):
            continue
        here = f"{path}/{key_text(key)}"
        try:
            part = state[key]
        except (LookupError, TypeError) as error:
            raise MismatchError(
                here,
                expected=f"the state of a {type(one).__qualname__}",
                found="nothing in the checkpoint",
                hint="Give the loaders in a tree as that which was saved",
            ) from error
        yield from loads_of(one, part, here)


def compare_extra(extra: Any, source: Source, *, rank: int) -> tuple[list[str], list[str]]:
    """The paths that only the given tree has, and those that only the checkpoint has.

    What `...` stands for is not asked for, nor is what an object keeps whose state has no arrays: it judges it itself.
    """
    tree: dict[str, Any] = {"extra": extra}
    found = expand(tree, rank=rank, mappings=True)
    tree = tree if found is None else found.target()
    _, leaves = flatten(tree, rank=rank)
    sequences = differing_sequences(
        tree,
        source.structure,
        is_value=is_value,
        is_saved_value=lambda path: path in source.leaves and source.leaves[path] is None,
        rank=rank,
        source_rank=rank % source.world,
    )
    asked = {index_path(path, rank): leaf for path, leaf in leaves}
    free = (*(f"{path}/" for path, leaf in asked.items() if leaf is ...), *(f"{path}/" for path in sequences))
    there = [path for path in source.leaves if path == "extra" or path.startswith("extra/")]
    missing = [
        path
        for path, leaf in asked.items()
        if leaf is not ... and path not in source.leaves and not path.startswith(free)
    ]
    return missing, [path for path in there if path not in asked and not path.startswith(free)]
