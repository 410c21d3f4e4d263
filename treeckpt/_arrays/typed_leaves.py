"""Trees as structures and typed leaves, and the plan of a save, as pure functions: no file, no message.

They are the steps between a program's tree and the bytes of a checkpoint: `tree_flatten` says what each leaf is and
which part of its array is here, `plan_writes` which rank writes which part, `tree_unflatten` makes the tree again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Any

import msgspec

from .._core.planning.rank_trees import RankClass, merge_rank_trees
from .._core.planning.save_plan import array_leaves, assign_writers, writes_of
from .._core.sharding.int_runs import decode_runs, encode_runs
from .._core.sharding.region import Region
from .._core.tree.flatten import flatten, unflatten
from .._core.tree.keyed_table import TableColumn
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import Structure, paths_of
from ..errors import MismatchError
from .describe import describe_tree
from .registry import abstract_of, build_tensor, resolve, resolve_function
from .stateful import state_tree


class TreeLeaf(msgspec.Struct, frozen=True, eq=False):
    """One leaf of a tree, with its type; see `tree_flatten`.

    >>> leaves, structure = tc.tree_flatten({"w": tc.Sharded(np.zeros((2, 4)), (8, 4), (6, 0))})
    >>> leaves[0].path, leaves[0].spec.shape, leaves[0].regions[0].offset
    ('w', (8, 4), (6, 0))

    Args:
        path: as `path_text` writes it.
        value: the array, or the Python value.
        spec: shape and dtype of the whole array; None of a Python value.
    """

    path: str
    value: Any
    spec: ArraySpec | None = None

    @property
    def regions(self) -> tuple[Region, ...]:
        """The parts of the whole array that are here, each with its global offset and shape; none of a Python value."""
        if self.spec is None:
            return ()
        return (Region.whole(self.spec.shape),) if self.spec.regions is None else self.spec.regions


def tree_flatten(tree: Any, *, rank: int = 0, namespace: str = "") -> tuple[list[TreeLeaf], Structure]:
    """Returns the leaves of a tree, in order, and its structure; `tree_unflatten` is the inverse.

    The structure is plain data, as an index has it (`Index.structure`): two trees of the same containers and keys have
    equal ones, None is that of a leaf alone. Containers are those of a save: unlike optree, None is a leaf, dicts keep
    their order, and dataclasses need not be registered. An object with `state_dict` and `load_state_dict` stands for
    what the first gives, `FromRank` for its value.

    >>> leaves, structure = tc.tree_flatten({"b": [1, None], "a": np.zeros((2, 3))})
    >>> [(leaf.path, leaf.spec and leaf.spec.shape) for leaf in leaves]
    [('b/0', None), ('b/1', None), ('a', (2, 3))]

    Args:
        rank: whose tree it is; what is under `PerRank` is this rank's.
        namespace: of optree's registry of node classes.

    Raises:
        TreeError: a key or container that cannot be stored.
    """
    structure, leaves = flatten(state_tree(tree, rank=rank, namespace=namespace), rank=rank, namespace=namespace)
    arrays = ((path, leaf.array if type(leaf) is TableColumn else leaf, leaf) for path, leaf in leaves)
    return [TreeLeaf(path, value, abstract_of(leaf, path, rank)) for path, value, leaf in arrays], structure


def tree_unflatten(
    structure: Structure, leaves: Iterable[Any], *, rank: int = 0, namespace: str = "", allow_pickle: bool = False
) -> Any:
    """Returns the tree of a structure; the inverse of `tree_flatten`.

    >>> leaves, structure = tc.tree_flatten({"b": [1, None], "a": 2})
    >>> tc.tree_unflatten(structure, ["x" if leaf.path == "a" else leaf for leaf in leaves])
    {'b': [1, None], 'a': 'x'}

    Args:
        structure: of `tree_flatten`, or of an index.
        leaves: in the order of the structure, each a `TreeLeaf`, whose value counts, or what is put in its place. Of a
            `PerRank` those of `rank` alone.
        rank: whose tree it is.
        namespace: of optree's registry of node classes.
        allow_pickle: takes the functions that nodes keep, as `optree.functools.partial`, by their names; only for
            structures you trust.

    Raises:
        MismatchError: no structure; another number of leaves; a class or function that is not in this program.
        FormatError: a structure that no tree has.
    """
    if not isinstance(structure, Structure):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = "Give the structure first, then the leaves; optree.tree_unflatten takes a PyTreeSpec"
        found = f"a {type(structure).__qualname__}"  # pyright: ignore[reportUnreachable]
        raise MismatchError("structure", expected="a structure of tree_flatten", found=found, hint=hint)
    given = [leaf.value if isinstance(leaf, TreeLeaf) else leaf for leaf in leaves]
    own = [path for path, ranks in paths_of(structure) if ranks is None or rank in decode_runs(ranks)]
    if len(given) != len(own):
        raise MismatchError(
            own[len(given)] if len(given) < len(own) else "leaves",
            expected=f"{len(own)} leaves, as the structure has",
            found=f"{len(given)}",
            hint="Give one leaf for each of tree_flatten, in the same order",
        )
    return unflatten(
        structure,
        iter(given),
        resolve=resolve,
        build=build_tensor,
        functions=resolve_function if allow_pickle else None,
        rank=rank,
        namespace=namespace,
    )


def plan_writes(trees: Sequence[Any], *, namespace: str = "") -> list[dict[str, tuple[Region, ...]]]:
    """Returns what each rank of a save writes: the regions of arrays, by path, each element by one rank.

    It is computed from what the ranks hold, without their data: what `save` agrees on when each rank gives its tree.

    >>> halves = [{"w": tc.Sharded(np.zeros(2), (4,), 2 * rank), "b": np.zeros(3)} for rank in range(2)]
    >>> [sorted(writes) for writes in tc.plan_writes(halves)]
    [['b', 'w'], ['w']]

    Args:
        trees: one for each rank, in order.
        namespace: of optree's registry of node classes.

    Raises:
        TreeError, LayoutError, MismatchError: as `save`, but that values and replicas are not compared.
    """
    if not isinstance(trees, Sequence) or not trees:  # pyright: ignore[reportUnnecessaryIsInstance]
        found = f"a {type(trees).__qualname__} of {len(trees)}" if isinstance(trees, Sized) else f"{trees!r:.60}"
        raise MismatchError("trees", expected="a list of trees, one for each rank", found=found)
    expanded = [state_tree(tree, rank=rank, namespace=namespace, world=len(trees)) for rank, tree in enumerate(trees)]
    described = (describe_tree(tree, rank=rank, namespace=namespace) for rank, tree in enumerate(expanded))
    classes = [RankClass(encode_runs([rank]), one.inventory) for rank, one in enumerate(described)]
    arrays = [leaf for _, leaf in array_leaves(merge_rank_trees(classes, len(trees)))]
    shares = list(zip(arrays, assign_writers(arrays), strict=True))
    return [
        {leaf.path: tuple(regions) for leaf, share in shares if (regions := writes_of(leaf, share, rank))}
        for rank in range(len(trees))
    ]
