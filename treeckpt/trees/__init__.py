"""Operations on trees of arrays, distributed or not: state dict utilities for any tree.

    whole = tc.trees.gather(state)                    # every rank has the full arrays
    whole = tc.trees.gather(state, ranks=[0])         # rank 0 has them, the others their specs
    state = tc.trees.distribute(whole, like, src=0)   # and back, cut as `like` is
    host = tc.trees.offload(state, memory="pinned")
    names = tc.trees.flatten_names(state)             # {"model.layers.0.weight": ...}

Only `copy_into` changes its arguments, and no function returns their memory unless its docstring says so. For all of
them:

- An object with `state_dict` and `load_state_dict` is replaced by its state, as for `save`.
- Containers come back as new ones of the same kind, Python values as equal ones. A value of an unknown kind is refused
  (TreeError), because it cannot be copied reliably.
- 0-dim and empty arrays are arrays like others. A non-contiguous array comes back dense, in C order; a conjugate or
  negative view as the values that it shows. Complex numbers and every other dense dtype are kept bit for bit.
- A Parameter stays one, with `requires_grad`; a Buffer too; a DTensor, ShardedTensor or `Sharded` stays what it is in
  its layout, where the function does not change just that. Other subclasses, sparse, nested and quantised tensors, and
  DTensors of partial sums are refused (TreeError, LayoutError), all by name.
- Leaves that are one object, or show exactly the same memory, stay one object and share memory again.
- Arrays on the meta device have no data to copy: see each function.

`gather`, `broadcast` and `distribute(src=...)` use collectives of the process group, so call them on all of its ranks;
ranks are counted within the group. If one rank fails before data is sent, all raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._core.public_names import publish
from . import _collectives
from ._collectives import BUCKET_NBYTES, transport_of
from ._compare import Sameness, same_structure
from ._moving import copy_into, distribute_local, empty_like
from ._names import flatten_names, unflatten_names
from ._offloading import offload

__all__ = [
    "Sameness",
    "broadcast",
    "copy_into",
    "distribute",
    "empty_like",
    "flatten_names",
    "gather",
    "offload",
    "same_structure",
    "unflatten_names",
]
publish(__name__, __all__, globals())


def gather(
    tree: Any,
    *,
    ranks: Sequence[int] | None = None,
    device: str | None = None,
    group: Any = None,
    bucket_bytes: int = BUCKET_NBYTES,
    namespace: str = "",
) -> Any:
    """Returns the tree with full arrays: what `load` would return, had these ranks saved it.

    Ranks may hold different parts of the tree (pipeline stages): it comes back merged. Replicas must be equal, as
    for `save`; state under `PerRank` stays each rank's own.

    >>> tc.trees.gather({"w": np.ones(3)}, group="alone")
    {'w': array([1., 1., 1.])}

    Args:
        ranks: that receive the arrays, counted within the group; None is all. The others receive an `ArraySpec` in
            place of each array (a target for `load` or `distribute`), and the values.
        device: of the new arrays; by default the host.
        group: a process group of torch.distributed; by default the default one. "alone" is this process only.
        bucket_bytes: size of one message, at most, unless a single region is larger.

    Raises:
        TreeError: a leaf without data (meta), or that cannot be sent.
        LayoutError: pieces that do not cover their array, partial sums.
        MismatchError: ranks contradict each other.
        RankError: some ranks failed before data was sent, or this one is not part of the group.
    """
    transport = transport_of(group)
    return _collectives.gather(
        tree, transport=transport, ranks=ranks, device=device, limit=bucket_bytes, namespace=namespace
    )


def distribute(
    tree: Any,
    like: Any,
    *,
    src: int | None = None,
    device: str | None = None,
    group: Any = None,
    bucket_bytes: int = BUCKET_NBYTES,
    namespace: str = "",
) -> Any:
    """Returns a tree of new arrays with the data of `tree`, and the shape, dtype, kind, device and layout of `like`.

    >>> like = {"w": tc.Sharded(np.empty((1, 2)), (2, 2), (1, 0))}
    >>> tc.trees.distribute({"w": np.array([[1.0, 2.0], [3.0, 4.0]])}, like)["w"].local
    array([[3., 4.]])

    Args:
        tree: holds the wanted arrays whole; without `src` at least the part that this rank wants. Leaves that are not
            wanted are not sent.
        like: as for `load`: tensors, DTensors, pieces or specs, whose data is ignored and may be on meta; `...`
            stays. Ranks may want different leaves.
        src: the rank that has the tree, counted within the group (the tree of the others is ignored); None where every
            rank has it: then nothing is sent.
        device: of the new arrays; by default that of like's, or the host for those on meta.

    Raises:
        MismatchError: a leaf is missing in the tree, or has another shape or dtype.
        LayoutError: arrays of the source that are not whole.
        TreeError, RankError: as `gather`.
    """
    if src is None:
        return distribute_local(tree, like, device=device, namespace=namespace)
    transport = transport_of(group)
    return _collectives.distribute(
        tree, like, transport=transport, source=src, device=device, limit=bucket_bytes, namespace=namespace
    )


def broadcast(
    tree: Any,
    *,
    src: int = 0,
    device: str | None = None,
    group: Any = None,
    bucket_bytes: int = BUCKET_NBYTES,
    namespace: str = "",
) -> Any:
    """Returns the tree of one rank, on every rank: on that rank the same object, on the others new arrays.

    >>> tc.trees.broadcast({"step": 7}, src=0, group="alone")
    {'step': 7}

    Args:
        tree: of rank `src`; that of the others is ignored.
        src: counted within the group.
        device: of new arrays; by default the host.
        bucket_bytes: size of one message, at most: a thousand small leaves are one message.

    Raises:
        LayoutError: a distributed array; `distribute` sends to such arrays.
        TreeError: a leaf without data (meta), or that cannot be sent; `PerRank`.
        RankError: the source failed before data was sent, or this rank is not part of the group.
    """
    transport = transport_of(group)
    return _collectives.broadcast(
        tree, transport=transport, source=src, device=device, limit=bucket_bytes, namespace=namespace
    )
