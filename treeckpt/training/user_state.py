"""Restore of the parts of a training state that are user-defined trees: `loader` and `extra`.

A loader is one object or a tree of them: each loads the state that was saved at its path. A given `extra` is filled as
`treeckpt.load_into` fills a tree; leaves that only one side has are found here, before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ..arrays.registry import is_value
from ..arrays.stateful import expand_states, holds_stateful, is_stateful
from ..core.tree.flatten import flatten
from ..core.tree.sequences import differing_sequences
from ..core.tree.structure import index_path, key_text
from ..errors import MismatchError
from .sources import RestoreSource


def loader_actions(loader: Any, state: Any, path: str) -> Iterator[Callable[[], None]]:
    """Yields functions that load the state of each object in a loader's tree (dicts, lists and tuples).

    Raises:
        MismatchError: nothing was saved for an object.
    """
    if is_stateful(loader):
        yield partial(loader.load_state_dict, state)
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
        yield from loader_actions(one, part, here)


def compare_extra(extra: Any, source: RestoreSource, *, rank: int) -> tuple[list[str], list[str], list[str]]:
    """Returns the paths that only the given tree has, that only the checkpoint has, and of what both have per rank.

    Paths at or below `...` are not compared, nor is the state of an object without arrays, which checks it itself.
    """
    tree: dict[str, Any] = {"extra": extra}
    given = tuple(f"{index_path(path, rank)}/" for path, leaf in flatten(tree, rank=rank)[1] if leaf is not ...)
    found = expand_states(tree, rank=rank, mappings=True)
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
    wanted = {index_path(path, rank): leaf for path, leaf in leaves}
    free = (*(f"{path}/" for path, leaf in wanted.items() if leaf is ...), *(f"{path}/" for path in sequences))
    there = [path for path in source.leaves if path == "extra" or path.startswith("extra/")]
    missing = [
        path
        for path, leaf in wanted.items()
        if leaf is not ... and path not in source.leaves and not path.startswith(free)
    ]
    own = [path for path in there if "~rank*" in path and f"{path}/".startswith(given)]
    return missing, [path for path in there if path not in wanted and not path.startswith(free)], own
