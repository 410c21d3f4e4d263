"""Copies a tree to host memory that is not shared with the original.

A leaf keeps its kind: a DTensor stays a DTensor of the same placements, pieces stay pieces, a Parameter a Parameter.
With "pinned" or "shared" all arrays are in one block, which costs one registration with the driver or one file
descriptor however many leaves there are; it lives as long as any of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal, get_args

import numpy as np

from .._arrays.numpy import order_of
from .._arrays.registry import abstract_of
from .._arrays.sharded import Sharded, with_locals
from .._arrays.stateful import state_tree
from .._core.sharding.region import memory_order, strides_in
from .._core.tree.flatten import flatten, replace_leaves
from .._core.tree.keyed_table import TableColumn
from .._core.tree.spec import ArraySpec
from .._io.comm.comm import default_comm, global_rank
from ..errors import TreeError
from ._moving import ValueCopies, fill

Memory = Literal["plain", "pinned", "shared"]

ALIGN = 64
"""Each array starts at a multiple of this many bytes in the block."""


def offload(tree: Any, *, memory: Memory = "plain", namespace: str = "") -> Any:
    """Returns a copy of the tree in host memory, also of arrays on the host. Distributed arrays keep their layout.

    >>> tc.trees.offload(model)["weight"].shape
    torch.Size([2, 4])

    Args:
        memory: "plain"; "pinned", for fast copies to and from an accelerator (plain where there is none); "shared", so
            that other processes can map it. The last two use one block for all arrays.

    Arrays on the meta device stay there. Views that overlap in part become separate arrays.

    Raises:
        TreeError, LayoutError: a leaf that cannot be copied.
    """
    if memory not in get_args(Memory):
        choices = ", ".join(map(repr, get_args(Memory)))
        raise TreeError("memory", expected=f"one of {choices}", found=f"{memory!r:.60}")
    rank = global_rank(default_comm())
    tree = state_tree(tree, rank=rank, namespace=namespace)
    _, flat = flatten(tree, rank=rank, namespace=namespace)
    # of a table the arrays are copied; the first row of each bucket is computed anew
    leaves = [(path, leaf.array if isinstance(leaf, TableColumn) else leaf) for path, leaf in flat]
    specs = [abstract_of(leaf, path, rank) for path, leaf in leaves]  # refuses what cannot be copied
    parts = [_parts(leaf, path, rank, memory) if spec else [] for (path, leaf), spec in zip(leaves, specs, strict=True)]
    plain = {_key(array): array for arrays in parts for array in arrays}
    block = None if memory == "plain" else _block(memory, sum(_aligned(array.nbytes) for array in plain.values()))
    copies: dict[Hashable, Any] = {}
    offset = 0
    for key, array in plain.items():
        copies[key] = _copy(array, None if block is None else block[offset : offset + array.nbytes])
        offset += _aligned(array.nbytes)
    made: dict[int, object] = {}
    copied_value = ValueCopies(True)
    for (path, leaf), spec, arrays in zip(leaves, specs, parts, strict=True):
        if id(leaf) not in made:
            new = [copies[_key(array)] for array in arrays]
            made[id(leaf)] = copied_value(leaf, path) if spec is None else _rebuilt(leaf, spec, new)
    return replace_leaves(tree, iter([made[id(leaf)] for _, leaf in leaves]), namespace=namespace)


def _parts(leaf: Any, path: str, rank: int, memory: Memory) -> list[Any]:
    """Returns the plain arrays that hold a leaf's memory; none of a tensor that describes itself."""
    if isinstance(leaf, ArraySpec):
        return []
    if isinstance(leaf, Sharded):
        return [part for local in leaf.locals for part in _parts(local, path, rank, memory)]
    if isinstance(leaf, np.ndarray):
        return [leaf]
    from .._arrays.dtensor import describing, is_dtensor, is_sharded_tensor, local_of

    if is_sharded_tensor(leaf):
        return [shard.tensor for shard in leaf.local_shards()]
    if (owner := describing(leaf)) is not None:
        if memory != "plain":
            raise TreeError(
                path,
                expected=f'a leaf whose memory can be chosen, for memory="{memory}"',
                found=f"a {type(owner).__name__}, which holds tensors of its own",
                hint='Pass memory="plain"',
            )
        return []
    return [local_of(leaf, path, rank)[1] if is_dtensor(leaf) else leaf.detach()]


def _rebuilt(leaf: Any, spec: ArraySpec, arrays: list[Any]) -> Any:
    """Returns the leaf with other memory: the inverse of `_parts`."""
    if isinstance(leaf, ArraySpec):
        return leaf
    if isinstance(leaf, Sharded):
        kept = [(local, abstract_of(local, "", 0), array) for local, array in zip(leaf.locals, arrays, strict=True)]
        return with_locals(leaf, [_rebuilt(local, kind, [array]) for local, kind, array in kept if kind is not None])
    if isinstance(leaf, np.ndarray):
        return arrays[0]
    from .._arrays.dtensor import describing, is_dtensor, is_sharded_tensor
    from .._arrays.sharded_tensor import with_shards
    from .._arrays.torch import as_kind, like, source

    if is_sharded_tensor(leaf):
        return with_shards(leaf, arrays)
    if describing(leaf) is not None:
        made = like(leaf, "", 0, "cpu")
        fill(made.pieces, source(leaf, "", 0).pieces)
        return made.leaf
    if is_dtensor(leaf):
        from torch.distributed.tensor import DTensor

        return as_kind(DTensor(arrays[0], leaf._spec, requires_grad=False), spec)
    return as_kind(arrays[0].detach(), spec)  # a new object: the memory may be another leaf's too


def _key(array: Any) -> Hashable:
    """Returns a key that is equal for arrays that show the same elements of the same memory."""
    if isinstance(array, np.ndarray):
        # without elements an address says nothing: empty arrays can have the same one
        if not array.size:
            return id(array)
        return (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype)
    if array.is_meta or not array.numel():
        return id(array)
    view = array.is_conj(), array.is_neg()
    return (array.data_ptr(), str(array.device), tuple(array.shape), array.stride(), array.dtype, view)


def _copy(array: Any, part: Any) -> Any:
    """Returns a dense copy, in the same order in memory if the array is dense; of a tensor on meta another one there.

    Args:
        part: a tensor of bytes that is to hold it; None for new memory.
    """
    if isinstance(array, np.ndarray):
        steps = strides_in(array.shape, order_of(array), array.itemsize)
        flat = np.empty(array.size, array.dtype) if part is None else part.numpy().view(array.dtype)
        new = np.ndarray(array.shape, array.dtype, flat, 0, steps)
        new[...] = array
        return new
    import torch

    strides = strides_in(array.shape, memory_order(array.shape, array.stride()), 1)
    if array.is_meta:
        return torch.empty_strided(array.shape, strides, dtype=array.dtype, device="meta")
    if part is None:
        return torch.empty_strided(array.shape, strides, dtype=array.dtype).copy_(array)
    return part.view(array.dtype).as_strided(array.shape, strides).copy_(array)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _block(memory: Memory, nbytes: int) -> Any:
    """Returns a tensor of bytes; "pinned" is plain memory where there is no accelerator."""
    import torch

    if memory == "shared":
        return torch.empty(nbytes, dtype=torch.uint8).share_memory_()
    pinned = memory == "pinned" and torch.cuda.is_available()
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
