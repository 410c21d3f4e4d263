"""Copies a tree to host memory that is not shared with the original, and makes empty arrays like those of a tree.

What comes back is what a reader of `torch.save` would get: a leaf keeps its kind (a DTensor its placements, partial
sums too, pieces stay pieces, a Parameter a Parameter, a tensor of a subclass one with its attributes), and arrays that
overlap in memory are views of one memory again. Of a storage only the bytes that leaves show are copied, where
`torch.save` writes all: the range from the first to the last byte of arrays that overlap, the elements of any other.

With `pin` or `share` all arrays are in one block, which costs one registration with the driver or one file descriptor
however many leaves there are; it lives as long as any of them.
"""

# Attributes of tensors have any type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np

from .._arrays.base import HostArray, HostMemory
from .._arrays.numpy import order_of
from .._arrays.registry import abstract_of, adapter_of, like_of, source_of, torch_adapter
from .._arrays.sharded import Sharded, with_locals
from .._arrays.stateful import state_tree
from .._core.sharding.region import memory_order, overlapping_groups, strides_in
from .._core.tree.flatten import flatten, replace_leaves
from .._core.tree.keyed_table import TableColumn
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import index_path
from .._core.tree.tensor_parts import index_parts
from .._io.comm.comm import default_comm, global_rank
from .._io.public_calls import gc_paused
from ..errors import TreeError
from ._moving import ValueCopies, chosen_ranks, fill

ALIGN = 64
"""Each array starts at a multiple of this many bytes in the block."""
_ITEM_ALIGN = 16
"""Addresses of elements are multiples of a number up to this one."""


def offload(
    tree: Any,
    *,
    ranks: Sequence[int] | None = None,
    pin: bool = False,
    share: bool = False,
    type_check: bool = True,
    namespace: str = "",
) -> Any:
    """Returns a copy of the tree in host memory, also of arrays on the host. Distributed arrays keep their layout.

    >>> tc.trees.offload(model)["weight"].shape
    torch.Size([2, 4])

    Ties and views that overlap share memory again, a leaf or container that stands at two places is one again, and
    `_metadata` of state dicts and attributes of tensors are copied too. Arrays on the meta device stay there.

    Args:
        ranks: that copy; None is all. The others get an `ArraySpec` in place of each array, as from `gather`.
        pin: in pinned memory, for fast copies to and from an accelerator; plain memory where there is none.
        share: in memory that other processes can map, pinned too with `pin`. With either all arrays are in one block.
        type_check: False takes values of unknown kinds, as deep copies.

    Raises:
        TreeError, LayoutError: a leaf that cannot be copied.
    """
    comm = default_comm()
    copies = ranks is None or comm.rank in chosen_ranks(ranks, comm.size)
    rank = global_rank(comm)
    tree = state_tree(tree, rank=rank, namespace=namespace)
    job = _HostCopy(rank, pin=pin, share=share, type_check=type_check, namespace=namespace)
    with gc_paused():
        return job.copy(tree) if copies else job.describe(tree)


def empty_like(
    tree: Any,
    *,
    device: str | None = None,
    pin: bool = False,
    share: bool = False,
    type_check: bool = True,
    namespace: str = "",
) -> Any:
    """Returns a tree of new, uninitialised arrays of the same shapes, dtypes, kinds and layouts; copies values.

    Sparse and nested tensors have elements at the same places.

    >>> tc.trees.empty_like({"w": torch.empty(2, 3, device="meta")})["w"].device
    device(type='cpu')

    Args:
        device: of the new arrays; by default that of the tree's. For an array on the meta device, or an `ArraySpec`,
            the host; for such a DTensor its mesh's device.
        pin, share: in host memory that is pinned, or that other processes can map, or both, as for `offload`.
        type_check: False takes values of unknown kinds, as deep copies.

    Raises:
        TreeError: a sparse or nested tensor of `ArraySpec`s, or on the meta device, which do not say where its elements
            are.
    """
    if pin or share:
        if device not in (None, "cpu"):
            raise TreeError("device", expected='"cpu", with pin= or share=', found=f"{device!r:.60}")
        device = "cpu"
    rank = global_rank(default_comm())
    tree = state_tree(tree, rank=rank, namespace=namespace)
    structure, leaves = flatten(tree, rank=rank, namespace=namespace)
    made: dict[int, Any] = {}
    indices, copied = index_parts(structure), ValueCopies(type_check)

    def new(path: str, leaf: object) -> object:
        if id(leaf) not in made:
            target = like_of(leaf, path, rank, device)
            made[id(leaf)] = copied(leaf, path) if target is None else target.leaf
            is_index = index_path(path, rank) in indices
            if target is not None and is_index and (source := source_of(leaf, path, rank)) is not None:
                fill(target.pieces, source.pieces)
        return made[id(leaf)]

    new_leaves = iter([new(path, leaf) for path, leaf in leaves])
    made_tree = replace_leaves(tree, new_leaves, namespace=namespace, keep_shared=True)
    if not pin and not share:
        return made_tree
    # pages of memory that nobody has written to are not allocated: the arrays above cost nothing
    job = _HostCopy(rank, pin=pin, share=share, type_check=type_check, namespace=namespace, filled=indices)
    return job.copy(state_tree(made_tree, rank=rank, namespace=namespace))


class _Taken(msgspec.Struct, frozen=True):
    """A leaf that is copied: the plain arrays that hold its memory, and what makes it again of copies of them."""

    path: str
    arrays: list[Any]
    build: Callable[[list[Any]], Any]
    leaf: Any
    """It stays alive, so that no other object has its id."""


class _HostCopy:
    """One copy of a tree.

    Args:
        filled: the paths of the arrays that get the data of the originals, with `~rank*`; None for all.
    """

    def __init__(
        self,
        rank: int,
        *,
        pin: bool,
        share: bool,
        type_check: bool,
        namespace: str,
        filled: frozenset[str] | None = None,
    ) -> None:
        self._rank, self._namespace, self._filled = rank, namespace, filled
        self._pin, self._share = pin, share
        self._values, self._attributes = ValueCopies(type_check), ValueCopies(type_check=False)
        self._attributes.memo = self._values.memo
        self._taken: dict[int, _Taken] = {}
        """Leaves and attributes by id."""
        self._open: set[int] = set()

    def copy(self, tree: Any) -> Any:
        """Returns the tree with copies."""
        _, flat = flatten(tree, rank=self._rank, namespace=self._namespace)
        # of a table the arrays are copied; the first row of each bucket is computed anew
        leaves = [(path, leaf.array if isinstance(leaf, TableColumn) else leaf) for path, leaf in flat]
        taken = [self._take(leaf, path) for path, leaf in leaves]
        copies = iter(self._copies([(one.path, array) for one in taken for array in one.arrays]))
        news = [(one, [next(copies) for _ in one.arrays]) for one in taken]
        # values after arrays: an object that holds an array of the tree takes its copy
        for one, new_arrays in sorted(news, key=lambda pair: not pair[1]):
            self._built(one, new_arrays)
        new = iter([self._values.memo[id(leaf)] for _, leaf in leaves])
        self._taken.clear()  # it refers to this object, which would keep the copies until a collection of garbage
        return replace_leaves(tree, new, namespace=self._namespace, keep_shared=True)

    def describe(self, tree: Any) -> Any:
        """Returns the tree with an `ArraySpec` in the place of each array, and copies of values."""
        _, leaves = flatten(tree, rank=self._rank, namespace=self._namespace)
        made: dict[int, Any] = {}
        for path, leaf in leaves:
            if id(leaf) not in made:
                spec = self._spec(leaf, path)
                made[id(leaf)] = self._values(leaf, path) if spec is None else spec
        new = iter([made[id(leaf)] for _, leaf in leaves])
        return replace_leaves(tree, new, namespace=self._namespace, keep_shared=True)

    def _spec(self, leaf: Any, path: str) -> ArraySpec | None:
        spec = None
        if is_tensor(leaf):
            from .._arrays.dtensor import is_partial
            from .._arrays.torch import spec_of

            spec = spec_of(leaf) if is_partial(leaf) or is_subclass(leaf) else None
        spec = abstract_of(leaf, path, self._rank) if spec is None else spec
        return None if spec is None else msgspec.structs.replace(spec, device=None, regions=None)

    # what a leaf is made of ------------------------------------------------------------------------------------------

    def _take(self, leaf: Any, path: str, *, type_check: bool = True) -> _Taken:
        """Takes a leaf, or an attribute of a tensor, of which values of any kind are copied."""
        if (known := self._taken.get(id(leaf))) is not None:
            return known
        if id(leaf) in self._open:
            raise TreeError(path, expected="a tensor", found="one that is an attribute of itself")
        self._open.add(id(leaf))
        taken = self._take_array(leaf, path)
        self._open.remove(id(leaf))
        if taken is None:
            values = self._values if type_check else self._attributes
            taken = _Taken(path, [], lambda _: values(leaf, path), leaf)
        self._taken[id(leaf)] = taken
        return taken

    def _built(self, taken: _Taken, new: list[Any]) -> Any:
        """Returns the one object that is made of a leaf."""
        key, memo = id(taken.leaf), self._values.memo
        if key not in memo:
            memo[key] = taken.build(new)
        return memo[key]

    def _take_array(self, leaf: Any, path: str) -> _Taken | None:
        if isinstance(leaf, ArraySpec):
            return _Taken(path, [], lambda _: leaf, leaf)
        if is_tensor(leaf):
            return self._take_tensor(leaf, path)
        if isinstance(leaf, (Sharded, np.ndarray)):
            abstract_of(leaf, path, self._rank)  # refuses what cannot be copied
        if isinstance(leaf, Sharded):
            return self._joined(
                leaf, path, [self._take(local, path) for local in leaf.locals], partial(with_locals, leaf)
            )
        return _Taken(path, [leaf], itemgetter(0), leaf) if isinstance(leaf, np.ndarray) else None

    def _take_tensor(self, leaf: Any, path: str) -> _Taken:
        adapter = torch_adapter()
        if type(leaf) not in adapter.PLAIN_CLASSES:
            return self._take_other_tensor(leaf, path)
        # of a plain tensor both are known at once
        spec = adapter.abstract(leaf, path, self._rank)
        plain = _Taken(path, [leaf.detach()], partial(_as_kind, spec), leaf)
        return self._with_state(plain) if leaf.__dict__ else plain

    def _take_other_tensor(self, leaf: Any, path: str) -> _Taken:
        from .._arrays import dtensor
        from .._arrays.sharded_tensor import with_shards
        from .._arrays.torch import as_kind, check_tensor, spec_of

        if dtensor.is_sharded_tensor(leaf):
            abstract_of(leaf, path, self._rank)
            return _Taken(path, [shard.tensor for shard in leaf.local_shards()], partial(with_shards, leaf), leaf)
        if (owner := dtensor.describing(leaf)) is not None:
            return self._take_described(leaf, type(owner).__name__, path)
        if is_subclass(leaf):
            return self._take_subclass(leaf, path)
        check_tensor(leaf, path)
        if not dtensor.is_partial(leaf):
            _, local = dtensor.local_of(leaf, path, self._rank)
        else:
            local = dtensor.part_of(leaf)
        spec = spec_of(leaf)
        return _Taken(path, [local], lambda new: as_kind(dtensor.same_dtensor(leaf, new[0]), spec), leaf)

    def _take_described(self, leaf: Any, owner: str, path: str) -> _Taken:
        from .._arrays.torch import like, source

        if self._pin or self._share:
            raise TreeError(
                path,
                expected="a leaf whose memory can be chosen, for pin= or share=",
                found=f"a {owner}, which holds tensors of its own",
                hint="Leave both out",
            )
        abstract_of(leaf, path, self._rank)

        def build(_: list[Any]) -> Any:
            made = like(leaf, "", 0, "cpu")
            fill(made.pieces, source(leaf, "", 0).pieces)
            return made.leaf

        return _Taken(path, [], build, leaf)

    def _take_subclass(self, leaf: Any, path: str) -> _Taken:
        """Takes a tensor of a subclass: its memory, or none of one that only wraps others, and its attributes."""
        import torch
        from torch._utils import _rebuild_wrapper_subclass

        from .._arrays.torch import check_tensor

        kind = type(leaf)
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            layout = tuple(leaf.shape), leaf.stride(), leaf.storage_offset()
            grad: bool = leaf.requires_grad
            dispatches = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # pyright: ignore
            if dispatches and not leaf.data_ptr():
                given = kind, leaf.dtype, *layout, leaf.layout, torch.device("cpu"), grad
                return self._with_state(_Taken(path, [], lambda _: _rebuild_wrapper_subclass(*given), leaf))
            shape, strides, offset = layout
            plain = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            plain = plain.set_(leaf.untyped_storage(), offset, shape, strides)
            plain = _with_bits(plain, conj=leaf.is_conj(), neg=leaf.is_neg())
        check_tensor(plain, path)

        def build(new: list[Any]) -> Any:
            return torch.Tensor._make_subclass(kind, new[0].detach(), grad)  # pyright: ignore[reportPrivateUsage]

        return self._with_state(_Taken(path, [plain], build, leaf))

    def _with_state(self, taken: _Taken) -> _Taken:
        """Adds the attributes of a tensor, which are a tree of their own."""
        from torch._tensor import _rebuild_from_type_v2
        from torch._utils import _get_obj_state

        state = _get_obj_state(taken.leaf)
        parts = flatten(state, rank=self._rank, namespace=self._namespace)[1]
        inner = [self._take(part, f"{taken.path}.{path}", type_check=False) for path, part in parts]

        def build(new: list[Any]) -> Any:
            made = taken.build(new[: len(taken.arrays)])
            copied = replace_leaves(state, iter(new[len(taken.arrays) :]), namespace=self._namespace, keep_shared=True)
            return _rebuild_from_type_v2(lambda: made, type(made), (), copied)

        return self._joined(taken.leaf, taken.path, inner, build, first=taken.arrays)

    def _joined(
        self,
        leaf: Any,
        path: str,
        parts: Sequence[_Taken],
        build: Callable[[list[Any]], Any],
        *,
        first: Sequence[Any] = (),
    ) -> _Taken:
        """Returns what is made of arrays, and of other leaves."""

        def build_all(new: list[Any]) -> Any:
            left = iter(new)
            own = [next(left) for _ in first]
            return build([*own, *(self._built(part, [next(left) for _ in part.arrays]) for part in parts)])

        return _Taken(path, [*first, *(array for part in parts for array in part.arrays)], build_all, leaf)

    # memory ----------------------------------------------------------------------------------------------------------

    def _copies(self, given: Sequence[tuple[str, Any]]) -> list[Any]:
        """Returns the copy of each array; equal ones have the same."""
        keys = [_key(array) for _, array in given]
        distinct: dict[Hashable, tuple[str, Any]] = {}
        for key, (path, array) in zip(keys, given, strict=True):
            if not isinstance(array, np.ndarray) and not array.is_meta:
                torch_adapter().memory_of(array, path)  # refuses one whose storage was freed
            distinct.setdefault(key, (path, array))
        entries = list(distinct.values())
        groups = _overlapping([array for _, array in entries])
        together = {number for group in groups for number in group}
        groups += [[number] for number in range(len(entries)) if number not in together]
        places = [_Place.of([entries[number] for number in group]) for group in groups]
        block = _block(sum(place.aligned for place in places), pin=self._pin, share=self._share)
        copies: list[Any] = [None] * len(entries)
        offset = 0
        for group, place in zip(groups, places, strict=True):
            part = None if block is None else block[offset : offset + place.nbytes]
            filled = self._filled is None or index_path(place.path, self._rank) in self._filled
            for number, new in zip(group, place.copied(part, filled=filled), strict=True):
                copies[number] = new
            offset += place.aligned
        _wait_for_devices([array for _, array in entries] if block is not None and block.is_pinned() else [])
        by_key = dict(zip(distinct, copies, strict=True))
        return [by_key[key] for key in keys]


def _as_kind(spec: ArraySpec, new: list[Any]) -> Any:
    # a new object: the memory may be another leaf's too
    return torch_adapter().as_kind(new[0].detach(), spec)


def is_tensor(leaf: object) -> bool:
    """Returns whether a leaf is a tensor of torch, of any class; does not import torch."""
    adapter = adapter_of(type(leaf))
    return adapter is not None and not isinstance(leaf, (np.ndarray, Sharded))


def is_subclass(leaf: Any) -> bool:
    """Returns whether a tensor has memory of its own, or wraps tensors, in a class that no adapter knows."""
    from torch.nn import UninitializedBuffer, UninitializedParameter

    from .._arrays.dtensor import is_dtensor, is_sharded_tensor
    from .._arrays.torch import PLAIN_CLASSES

    kind = type(leaf)
    if kind in PLAIN_CLASSES or is_dtensor(leaf) or is_sharded_tensor(leaf) or leaf.is_quantized:
        return False
    fake = kind.__module__.startswith("torch._subclasses")
    return not fake and not isinstance(leaf, (UninitializedBuffer, UninitializedParameter))


class _Place(msgspec.Struct, frozen=True):
    """Memory of the host for an array, or for arrays that overlap in memory, which are views of one range then."""

    path: str
    arrays: list[Any]
    nbytes: int
    low: int = 0
    """The address of the first byte of arrays that overlap."""
    lead: int = 0
    """The bytes before the first one, so that elements stay aligned."""

    @classmethod
    def of(cls, entries: Sequence[tuple[str, Any]]) -> _Place:
        """Returns the place of arrays with their paths.

        Raises:
            TreeError: arrays that overlap in a part of an element, which no tensors do.
        """
        path, arrays = entries[0][0], [array for _, array in entries]
        if len(arrays) == 1:
            return cls(path, arrays, arrays[0].nbytes)
        spans = [_span(array) for array in arrays]
        low, high = min(low for low, _ in spans), max(high for _, high in spans)
        places = [(_address(array) - low, _itemsize(array)) for array in arrays]
        for lead in range(_ITEM_ALIGN):
            if all((lead + place) % size == 0 for place, size in places):
                return cls(path, arrays, lead + high - low, low, lead)
        raise TreeError(
            path,
            expected="arrays that overlap in whole elements",
            found=f"elements of {sorted({size for _, size in places})} bytes that begin inside of each other",
            hint="Copy one of them first",
        )

    @property
    def aligned(self) -> int:
        """The bytes to the next place in a block."""
        return -(-self.nbytes // ALIGN) * ALIGN

    def copied(self, part: Any, *, filled: bool) -> list[Any]:
        """Returns the copies.

        Args:
            part: a tensor of bytes that is to hold them; None for new memory.
            filled: False leaves the new memory of an array that overlaps with no other as it is.
        """
        if len(self.arrays) == 1:
            return [_copy(self.arrays[0], part, filled=filled)]
        memory = part
        tensor = next((array for array in self.arrays if not isinstance(array, np.ndarray)), None)
        if memory is None and tensor is None:
            memory = np.empty(self.nbytes, np.uint8)
            memory[self.lead :] = self._bytes()
        else:
            import torch

            memory = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu") if memory is None else memory
            if tensor is None or tensor.is_cpu:
                given = torch.from_numpy(self._bytes())
            else:
                storage = tensor.untyped_storage()
                empty: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                given = empty.set_(storage, self.low - storage.data_ptr(), (self.nbytes - self.lead,))
            memory[self.lead :].copy_(given, non_blocking=memory.is_pinned())
        return [self._view(array, memory) for array in self.arrays]

    def _bytes(self) -> np.ndarray:
        """Returns the memory of arrays on the host that overlap."""
        return HostMemory(self.low, (self.nbytes - self.lead,), 1, self.arrays).array.view(np.uint8)

    def _view(self, array: Any, memory: Any) -> Any:
        """Returns the view of the new memory that an array is of the old."""
        offset = self.lead + _address(array) - self.low
        if isinstance(array, np.ndarray):
            flat = memory if isinstance(memory, np.ndarray) else memory.numpy()
            return np.ndarray(array.shape, array.dtype, flat, offset, array.strides)
        import torch

        start = (memory.storage_offset() + offset) // array.dtype.itemsize
        plain = torch.empty(0, dtype=array.dtype, device="cpu")
        plain = plain.set_(memory.untyped_storage(), start, array.shape, array.stride())
        return _with_bits(plain, conj=array.is_conj(), neg=array.is_neg())


def _with_bits(tensor: Any, *, conj: bool, neg: bool) -> Any:
    """Returns a view that shows the conjugate or negative of memory."""
    import torch

    tensor = tensor.conj() if conj else tensor
    return torch._neg_view(tensor) if neg else tensor  # pyright: ignore


def _address(array: Any) -> int:
    return array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data_ptr()


def _itemsize(array: Any) -> int:
    return array.dtype.itemsize


def _span(array: Any) -> tuple[int, int]:
    """Returns the addresses of the first byte of an array, and of the byte after the last."""
    if isinstance(array, np.ndarray):
        return HostArray(array).window.extent
    last = sum((n - 1) * step for n, step in zip(array.shape, array.stride(), strict=True))
    return array.data_ptr(), array.data_ptr() + (last + 1) * array.dtype.itemsize


def _overlapping(arrays: Sequence[Any]) -> list[list[int]]:
    """Returns the numbers of arrays that overlap in memory, directly or through others."""
    memories: dict[Hashable, list[int]] = {}
    for number, array in enumerate(arrays):
        if isinstance(array, np.ndarray):
            where: Hashable = "cpu" if array.size else None
        elif array.is_meta or not array.numel():
            where = None
        else:  # a range of a device's memory is read through one storage
            where = "cpu" if array.is_cpu else (str(array.device), array.untyped_storage().data_ptr())
        if where is not None:
            memories.setdefault(where, []).append(number)
    groups: list[list[int]] = []
    for numbers in memories.values():
        spans = [_span(arrays[number]) for number in numbers]
        found = overlapping_groups([low for low, _ in spans], [high for _, high in spans])
        groups += [[numbers[at] for at in group] for group in found]
    return groups


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
    return (array.data_ptr(), array.device, array.shape, array.stride(), array.dtype, view)


def _copy(array: Any, part: Any, *, filled: bool) -> Any:
    """Returns a dense copy, in the same order in memory if the array is dense; of a tensor on meta another one there.

    Args:
        part, filled: as for `_Place.copied`.
    """
    if isinstance(array, np.ndarray):
        steps = strides_in(array.shape, order_of(array), array.itemsize)
        flat = np.empty(array.size, array.dtype) if part is None else part.numpy().view(array.dtype)
        new = np.ndarray(array.shape, array.dtype, flat, 0, steps)
        if filled:
            new[...] = array
        return new
    if (
        part is None
        and filled
        and array.is_cpu
        and array.is_contiguous()
        and not array.is_conj()
        and not array.is_neg()
    ):
        return array.clone()  # most are so, and it takes half the time
    import torch

    strides = strides_in(array.shape, memory_order(array.shape, array.stride()), 1)
    if array.is_meta:
        return torch.empty_strided(array.shape, strides, dtype=array.dtype, device="meta")
    if part is None:
        new = torch.empty_strided(array.shape, strides, dtype=array.dtype, device="cpu")
    else:
        new = part.view(array.dtype).as_strided(array.shape, strides)
    if filled:
        adapter = torch_adapter()
        plain = array.dtype in adapter.PLAIN_DTYPES or array.is_conj() or array.is_neg()
        to, given = (new, array) if plain else (adapter.as_integers(new), adapter.as_integers(array))
        to.copy_(given, non_blocking=part is not None and part.is_pinned())
    return new


def _wait_for_devices(arrays: Sequence[Any]) -> None:
    """Waits for copies from devices that were only started."""
    devices = {array.device for array in arrays if not isinstance(array, np.ndarray) and array.is_cuda}
    for device in devices:
        import torch

        torch.cuda.synchronize(device)


def _block(nbytes: int, *, pin: bool, share: bool) -> Any:
    """Returns a tensor of bytes; None for plain memory, which each array has its own of."""
    if not pin and not share:
        return None
    import torch

    pin = pin and torch.cuda.is_available()
    if not share:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin, device="cpu")
    block = torch.empty(nbytes, dtype=torch.uint8, device="cpu").share_memory_()
    if pin and nbytes:
        from .._arrays.cuda_copies import pin as pin_memory

        unpin = weakref.finalize(block.untyped_storage(), pin_memory(block.data_ptr(), nbytes))
        unpin.atexit = False  # the driver may be gone then
    return block
