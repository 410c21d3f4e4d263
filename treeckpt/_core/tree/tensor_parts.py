"""Tensors that are made of other tensors, as containers of these: `TensorParts`.

Such are tensors of a subclass that wraps tensors, sparse tensors, and nested ones. The library's adapter takes them
apart before a tree is flattened, and makes them again of new parts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import msgspec

from ...errors import MismatchError
from ..sharding.int_runs import decode_runs
from ..sharding.placements import MeshLayout
from .structure import PerRankNode, Structure, TensorNode, child_path, containers_of
from .value_codec import Value

_HINT = "Quantize or convert the model here as when it was saved, or leave the tensor out with `...`"


class TensorParts:
    """A tensor in parts.

    Args:
        node: what the tensor is beside its parts; without children.
        parts: its tensors by name, or what stands for them, as `ArraySpec`.
        build: makes a tensor of this.
        spread: of a distributed tensor, the library's own object for its layout; None otherwise.
        path: of the tensor, for errors.
    """

    __slots__ = ("_made", "build", "node", "parts", "path", "spread")

    def __init__(
        self,
        node: TensorNode,
        parts: Mapping[str, Any],
        build: BuildTensor | None = None,
        *,
        spread: Any = None,
        path: str = "",
    ) -> None:
        self.node = msgspec.structs.replace(node, children=())
        self.parts, self.build, self.spread, self.path = dict(parts), build, spread, path
        self._made: tuple[Sequence[Any], Any] = ((), None)

    def __repr__(self) -> str:
        return f"TensorParts({self.node.cls}, {self.parts!r})"

    def node_of(self, children: tuple[Structure, ...]) -> TensorNode:
        """Returns the node of a tree's structure."""
        return msgspec.structs.replace(self.node, children=children)

    def with_parts(self, parts: Sequence[Any]) -> Any:
        """Returns what is made of other parts: a tensor where they are tensors.

        Of parts for which it was called before it is the same object: this may be at two places of a tree.
        """
        before, made = self._made
        # by identity: a comparison of tensors returns a tensor
        if len(before) == len(parts) and all(new is old for new, old in zip(parts, before, strict=True)):
            return made
        made = TensorParts(
            self.node, dict(zip(self.parts, parts, strict=True)), self.build, spread=self.spread, path=self.path
        )
        self._made = parts, made if self.build is None else self.build(made, self.path)
        return self._made[1]


BuildTensor = Callable[[TensorParts, str], Any]
"""Makes a tensor of its parts; the second argument is its path, for errors."""


def tensors_as_leaves(structure: Structure) -> tuple[Structure, dict[str, TensorNode]]:
    """Returns the structure with a leaf in the place of each tensor in parts, and the nodes of these by path."""
    if not _has_tensors(structure):
        return structure, {}

    def lowered(node: Structure) -> Structure:
        if node is None or isinstance(node, TensorNode):
            return None
        children = list(node.children)
        for position, child in enumerate(children):
            children[position] = lowered(child)
        return msgspec.structs.replace(node, children=tuple(children))

    found = {path: node for node, path, _ in containers_of(structure) if isinstance(node, TensorNode)}
    return lowered(structure), {path: node for path, node in found.items() if not _is_inside(path, found)}


def _is_inside(path: str, others: Mapping[str, TensorNode]) -> bool:
    steps = path.split("/")
    return path != "" and any("/".join(steps[:depth]) in others for depth in range(len(steps)))


def check_same_tensors(
    wanted: Structure,
    saved: Structure,
    rank: int,
    leaves: Container[str] = (),
    selects: Callable[[str], bool] = lambda _: True,
    above: str = "",
) -> None:
    """Compares the tensors in parts that two structures have at the same paths.

    Args:
        wanted: of the tree that is filled, on one rank.
        saved: of the tree that fills it.
        rank: of the saved subtrees under `PerRank` that count.
        leaves: the paths of the saved leaves.
        selects: returns whether anything at a path is filled.
        above: the path of both structures, for errors.

    Raises:
        MismatchError: a leaf was saved in the place of one; it is of another class, context or shape; or it is laid out
            differently, and a part of it is a rank's own, which cannot be resharded.
    """
    if not _has_tensors(wanted):
        return
    found = {path: node for node, path, ranks in containers_of(saved) if ranks is None or rank in decode_runs(ranks)}
    for node, path, _ in containers_of(wanted):
        if isinstance(node, TensorNode) and path in leaves and selects(path):
            raise MismatchError(
                path,
                expected=f"a tensor of the class {node.cls}",
                found="a plain one in the checkpoint",
                hint=_HINT,
            )
        other = found.get(path)
        if (
            isinstance(node, TensorNode)
            and isinstance(other, TensorNode)
            and any(selects(child_path(path, key)) for key in node.keys)
        ):
            _check_same(node, other, "/".join(part for part in (above, path) if part))


def _has_tensors(structure: Structure) -> bool:
    waiting = [structure]
    while waiting:
        node = waiting.pop()
        if isinstance(node, TensorNode):
            return True
        if node is not None:
            waiting += [child for child in node.children if child is not None]
    return False


def index_parts(structure: Structure) -> frozenset[str]:
    """Returns the paths of all parts of sparse and nested tensors but the values: they say where these lie."""
    if not _has_tensors(structure):
        return frozenset()
    tensors = [(path, node) for node, path, _ in containers_of(structure) if isinstance(node, TensorNode)]
    return frozenset(
        child_path(path, key)
        for path, node in tensors
        for key in node.keys
        if node.cls.startswith("torch:") and key != "values"
    )


def check_no_tensors(missing: Sequence[str], saved: Structure) -> None:
    """Checks that no array is wanted at the path of a saved tensor in parts.

    Raises:
        MismatchError: naming it.
    """
    wanted = set(missing)
    for node, path, _ in containers_of(saved) if wanted else ():
        if isinstance(node, TensorNode) and path in wanted:
            raise MismatchError(
                path, expected="a plain array", found=f"a tensor of the class {node.cls} in the checkpoint", hint=_HINT
            )


def _check_same(wanted: TensorNode, saved: TensorNode, path: str) -> None:
    for what, here, there in (
        ("a tensor of the class", wanted.cls, saved.cls),
        ("one of shape", wanted.shape, saved.shape),
        (f"a {wanted.cls} of context", _text(wanted.context), _text(saved.context)),
        (f"a {wanted.cls} of the parts", wanted.keys, saved.keys),
    ):
        if here != there:
            raise MismatchError(path, expected=f"{what} {here!s:.200}", found=f"{there!s:.200}", hint=_HINT)
    check_own_layout(wanted.layout, (wanted, saved), path)


def check_own_layout(layout: MeshLayout | None, nodes: Sequence[TensorNode], path: str) -> None:
    """Checks that a tensor of which each rank has parts of its own was laid out as it is here.

    Args:
        layout: of the tensor here; None for a whole one.
        nodes: the saved one last, after the one here, if there is one.

    Raises:
        MismatchError: it was laid out otherwise.
    """
    saved = nodes[-1]
    own = [key for node in nodes for key, child in zip(node.keys, node.children, strict=True)
           if isinstance(child, PerRankNode)]  # fmt: skip
    if own and _spread_over(layout) != _spread_over(saved.layout):
        raise MismatchError(
            path,
            expected=f"the layout {_layout_text(layout)}, as the tensor here has it",
            found=f"{_layout_text(saved.layout)} in the checkpoint",
            hint=f"{own[0]} of {saved.cls} belongs to a rank's own part and cannot be resharded: load it in the layout "
            "that it was saved in",
        )


def _spread_over(layout: MeshLayout | None) -> object:
    return None if layout is None else (layout.mesh.shape, layout.placements)


def _text(context: Value) -> str:
    return msgspec.json.encode(context).decode()


def _layout_text(layout: MeshLayout | None) -> str:
    if layout is None:
        return "of a whole tensor"
    return f"{layout.mesh.shape} {', '.join(map(repr, layout.placements))}"
