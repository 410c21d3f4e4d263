"""Moments that each rank has of its own: plain arrays in the state of a parameter that is spread over ranks.

Codes and block scales of 8-bit optimizers and sums of rows are made of a rank's part of its parameter, so they are the
rank's own: saved under `PerRank`, and restored where each rank holds the same part as then. No other rank's fit, and
only the optimizer could make those of another layout. A number, and an array of the shape of the whole parameter, are
the same on all ranks. What is so of one parameter is so of all that the optimizer has, by the name of the moment: the
part of a small parameter may look like either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from ..arrays.dtensor import is_dtensor
from ..arrays.sharded import Sharded
from ..core.tree.flatten import PerRank, flatten, replace_leaves
from ..core.tree.spec import ArraySpec
from ..core.tree.structure import PerRankNode, Structure, TensorNode, key_text
from ..core.tree.tensor_parts import tensors_as_leaves
from ..errors import MismatchError
from .names import Key
from .sources import OWN, RestoreSource, children_of, leaves_below

State = Mapping[Any, Any]
"""The state of one parameter, by moment."""
Shard = tuple[tuple[int, ...], Any]
"""(global shape, offset) of a parameter that is a shard of an array."""


def is_spread(parameter: Any, shard: Shard | None) -> bool:
    """Whether ranks hold different parts of a parameter."""
    if not is_dtensor(parameter):
        return shard is not None and tuple(parameter.shape) != tuple(shard[0])
    mesh = parameter.device_mesh
    return any(not one.is_replicate() and mesh.size(dim) > 1 for dim, one in enumerate(parameter.placements))


def own_moments(
    parameters: Mapping[Key, Tensor], states: Mapping[Key, State], shards: Mapping[int, Shard]
) -> frozenset[str]:
    """Returns the names of the moments of an optimizer that each rank has of its own: paths in a parameter's state."""
    found = set[str]()
    for key, parameter in parameters.items():
        shard = shards.get(id(parameter))
        if is_spread(parameter, shard):
            # of a shard, what has its shape is a part of an array too
            same = {tuple(parameter.shape), tuple(shard[0])} if shard is not None else {tuple(parameter.shape)}
            arrays = _plain_arrays(states[key])
            found |= {name for name, one in arrays if math.prod(one.shape) != 1 and tuple(one.shape) not in same}
    return frozenset(found)


def _plain_arrays(state: State) -> Iterator[tuple[str, Any]]:
    """Yields (name, array) for the plain tensors and arrays of numpy in the state of a parameter."""
    for key, value in state.items():
        if isinstance(value, (Tensor, np.ndarray)):
            leaves = [("", value)]
        elif isinstance(value, (int, float, str, type(None), Sharded)):
            continue
        else:
            leaves = flatten(value)[1]
        for below, leaf in leaves:
            if isinstance(leaf, (Tensor, np.ndarray)) and not is_dtensor(leaf):
                yield f"{key_text(key)}/{below}" if below else key_text(key), leaf


def with_own(state: State, names: frozenset[str]) -> dict[Any, Any]:
    """Returns the state of a parameter with what each rank has of its own under `PerRank`."""
    own = {name for name, _ in _plain_arrays(state)} & names
    if not own:
        return dict(state)
    marked: Any = replace_leaves(
        dict(state), iter([PerRank(leaf) if path in own else leaf for path, leaf in flatten(dict(state))[1]])
    )
    return marked


def without_own(structure: Structure) -> Structure:
    """Returns the structure of a saved state as if nothing in it were under `PerRank`, but for parts of a tensor."""
    if isinstance(structure, PerRankNode):
        return structure.children[0]
    if structure is None or isinstance(structure, TensorNode):
        return structure
    return msgspec.structs.replace(structure, children=tuple(map(without_own, structure.children)))


def saved_own(structure: Structure) -> frozenset[str]:
    """Returns the names of what each rank had of its own in the saved state of a parameter."""

    def names(node: Structure, path: str) -> Iterator[str]:
        if isinstance(node, PerRankNode):
            yield path
        elif not isinstance(node, TensorNode):
            for key, child in children_of(node).items():
                yield from names(child, f"{path}/{key_text(key)}" if path else key_text(key))

    return frozenset(names(structure, ""))


class ParameterPart(msgspec.Struct, frozen=True):
    """A live parameter as a rank holds it, with its state."""

    parameter: Any
    shard: Shard | None
    state: State
    own: frozenset[str]
    """The names of the moments that each rank has of its own here, in the whole optimizer."""
    of_torch: bool
    """Whether the optimizer is of `torch.optim`, whose moments of a DTensor are DTensors."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(self.parameter.shape if self.shard is None else self.shard[0])

    def takes(self, name: str, spec: ArraySpec, *, spread: bool) -> bool:
        """Whether a saved moment that is not each rank's own is not a rank's own here either, as far as that is known.

        A fresh optimizer gets a moment as torch's lay it out where each dimension is one of the parameter, or 1.

        Args:
            spread: whether it was a distributed array.
        """
        if math.prod(spec.shape) == 1 or spec.shape == self.shape:
            return True
        if name in self.own:
            return False
        sides = zip(spec.shape, self.shape, strict=False)
        like_it = len(spec.shape) == len(self.shape) and all(n in (1, m) for n, m in sides)
        return like_it or spread or self.of_torch or name.partition("/")[0] in map(key_text, self.state)


def check_own(source: RestoreSource, paths: tuple[str, str], structure: Structure, part: ParameterPart) -> None:
    """Compares the saved state of a parameter with the part of it that this rank holds.

    Args:
        paths: of the saved state, and of the saved parameter.

    Raises:
        MismatchError: a moment is of other parts of the parameter than the ranks hold here.
    """
    path, weight = paths
    spread = is_spread(part.parameter, part.shard)
    if own := saved_own(structure):
        wanted = part.parameter if part.shard is None else Sharded(part.parameter, *part.shard)
        if not (spread and source.is_same_part(weight, wanted)):
            raise _of_other_parts(f"{path}/{min(own)}", "each rank's own, of the part that it held when it was saved")
    for at in leaves_below(path, tensors_as_leaves(structure)[0]) if spread else ():
        spec, name = source.leaves.get(at), at.removeprefix(f"{path}/")
        if spec is None or OWN in at:
            continue
        if not part.takes(name, spec, spread=source.is_spread(at)):
            raise _of_other_parts(at, f"one for all ranks, of shape {spec.shape}")


def _of_other_parts(path: str, found: str) -> MismatchError:
    return MismatchError(
        path,
        expected="a moment of the part of the parameter that this rank holds here",
        found=found,
        hint="Only the optimizer could make it of another layout. Restore it with as many ranks and the layout with "
        "which it was saved; or pass optimizer=None, and the optimizer begins anew",
    )
