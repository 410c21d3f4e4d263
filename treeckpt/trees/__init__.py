"""Operations on trees of arrays, distributed or not: what a state dict's utilities are, for any tree.

    whole = tc.trees.gather(state)                    # every rank has the full arrays
    whole = tc.trees.gather(state, ranks=[0])         # rank 0 has them, the others their specs
    state = tc.trees.distribute(whole, like, src=0)   # and back, cut as `like` is
    host = tc.trees.offload(state, memory="pinned")
    names = tc.trees.flatten_names(state)             # {"model.layers.0.weight": ...}

No function but `copy_into` changes its arguments, and none gives back memory of theirs where it does not say so. What
they have in common:

- An object with `state_dict` and `load_state_dict` stands for its state, as for `save`.
- Containers come back as new ones of the same kind; Python values as equal ones, and a value of an unknown kind is
  refused (TreeError), as it can not be copied for sure.
- 0-dim and empty arrays are arrays like others. What is not contiguous comes back dense, in C order; conjugate and
  negative views as the values that they show. Complex numbers and every other dense dtype are kept bit for bit.
- A Parameter stays one, with `requires_grad`; a Buffer too; a DTensor, ShardedTensor or `Sharded` stays what it is in
  its layout, where the function does not change just that. Other subclasses, sparse, nested and quantised tensors, and
  DTensors of partial sums are refused (TreeError, LayoutError), all by name.
- Leaves that are one object, or show exactly the same memory, stay one and share memory again.
- On the meta device there is nothing to copy: see each function.

`gather`, `broadcast` and `distribute(src=...)` talk through collectives of the process group, so call them on all of
its ranks; ranks are counted within the group. If one rank fails to begin, all raise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..io.comm.comm import default_comm, global_rank
from . import compare, gathering, moving, names, offloading, sending
from .compare import Sameness
from .offloading import Memory
from .packing import BUCKET_NBYTES
from .transport import transport_of

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


def _rank() -> int:
    return global_rank(default_comm())


def offload(tree: Any, *, memory: Memory = "plain", namespace: str = "") -> Any:
    """A copy of the tree in host memory; also of what is there already. Distributed arrays keep their layout.

    Args:
        memory: "plain"; "pinned", for fast copies to and from an accelerator (plain where there is none); "shared", so
            that other processes can map it. The last two are one block for all arrays.

    Arrays on the meta device stay there. Views that overlap in part become arrays of their own.

    Raises:
        TreeError, LayoutError: a leaf that can not be copied.
    """
    return offloading.offload(tree, rank=_rank(), memory=memory, namespace=namespace)


def empty_like(tree: Any, *, device: str | None = None, namespace: str = "") -> Any:
    """A tree of new arrays, not initialised, of the same shapes, dtypes, kinds and layouts; values are copied.

    Args:
        device: where the arrays go; by default where the tree's are. What is on the meta device, or an `ArraySpec`,
            gets memory on the host, a DTensor on its mesh's device.
    """
    return moving.empty_like(tree, rank=_rank(), device=device, namespace=namespace)


def copy_into(tree: Any, into: Any, *, cast: bool = False, namespace: str = "") -> None:
    """Copies the arrays of `tree` into those of `into`, in place, and puts values where their containers can change.

    Each array takes what this rank holds of the source, whatever the two layouts: whole arrays fill the parts of a
    DTensor. The trees may share memory. Every check comes before the first byte is written.

    Args:
        cast: converts dtypes instead of refusing them.

    Raises:
        MismatchError: other leaves, shapes or dtypes; two arrays that differ for one place in memory; a value beside an
            array in a tuple that would have to change; a target on the meta device, or with less memory than elements.
        TreeError: a source on the meta device.
        LayoutError: this rank does not hold all that a target takes.
    """
    moving.copy_into(tree, into, rank=_rank(), cast=cast, namespace=namespace)


def gather(
    tree: Any,
    *,
    ranks: Sequence[int] | None = None,
    device: str | None = None,
    group: Any = None,
    bucket_bytes: int = BUCKET_NBYTES,
    namespace: str = "",
) -> Any:
    """The tree with full arrays: what `load` would give, had these ranks saved it.

    Ranks may hold different parts of the tree (pipeline stages): it comes back joined. What replicas hold must agree,
    as for `save`; state under `PerRank` stays each rank's own.

    Args:
        ranks: who gets the arrays, counted within the group; None is all. The others get an `ArraySpec` in the place of
            each array (a target for `load` or `distribute`), and the values.
        device: where the arrays go; by default to the host.
        group: a process group of torch.distributed; by default the default one. "alone" is this process only.
        bucket_bytes: how much travels in one message.

    Raises:
        TreeError: a leaf without data (meta), or that can not be sent.
        LayoutError: pieces that do not make up their array, partial sums.
        MismatchError: ranks contradict each other.
        RankError: some ranks failed to begin, or this one is not part of the group.
    """
    wire = transport_of(group)
    return gathering.gather(tree, wire=wire, ranks=ranks, device=device, limit=bucket_bytes, namespace=namespace)


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
    """A tree of new arrays as `like` describes them: shape, dtype, kind, device and layout, with the data of `tree`.

    Args:
        tree: has what is asked for, whole; without `src` at least what this rank asks for. More of it is not sent.
        like: as for `load`: tensors, DTensors, pieces or specs, whose data does not matter and may be on meta; `...`
            stays. Ranks may ask for different leaves.
        src: the rank that has the tree, counted within the group (the others' is not looked at); None where every
            rank has it: then nothing is sent.
        device: where the arrays go; by default where like's are, or to the host for those on meta.

    Raises:
        MismatchError: the tree lacks a leaf, or has it of another shape or dtype.
        LayoutError: arrays of the source that are not whole.
        TreeError, RankError: as `gather`.
    """
    if src is None:
        return moving.distribute_local(tree, like, rank=_rank(), device=device, namespace=namespace)
    wire = transport_of(group)
    return sending.distribute(tree, like, wire=wire, source=src, device=device, limit=bucket_bytes, namespace=namespace)


def broadcast(
    tree: Any,
    *,
    src: int = 0,
    device: str | None = None,
    group: Any = None,
    bucket_bytes: int = BUCKET_NBYTES,
    namespace: str = "",
) -> Any:
    """The tree of one rank, on every rank: that rank gets its own back, the very object, the others new arrays.

    Args:
        tree: of rank `src`; the others' is not looked at.
        src: counted within the group.
        device: where new arrays go; by default to the host.
        bucket_bytes: how much travels in one message: a thousand small leaves are one.

    Raises:
        LayoutError: a distributed array; `distribute` sends to such.
        TreeError: a leaf without data (meta), or that can not be sent; `PerRank`.
        RankError: the source failed to begin, or this rank is not part of the group.
    """
    wire = transport_of(group)
    return sending.broadcast(tree, wire=wire, source=src, device=device, limit=bucket_bytes, namespace=namespace)


def same_structure(found: Any, expected: Any, *, namespace: str = "") -> Sameness:
    """Whether two trees have the same containers and keys, with arrays of the same shapes, dtypes, kinds and layouts.

    The result is true or false in a condition, and as text has a line per difference. Contents are not compared, and
    arrays may be on meta or be `ArraySpec`s.
    """
    return compare.same_structure(found, expected, rank=_rank(), namespace=namespace)


def flatten_names(tree: Any, *, separator: str = ".", namespace: str = "") -> dict[str, Any]:
    """The leaves by dotted name, as a state dict has them; the very objects, not copies.

    A key that is not text stands by its text. What is under `PerRank` keeps that mark, leaf by leaf.

    Raises:
        TreeError: two leaves would have the same name, as `a.b` beside {"a": {"b"}}; it names both.
    """
    return names.flatten_names(tree, separator=separator, namespace=namespace)


def unflatten_names(named: Mapping[str, Any], like: Any = None, *, separator: str = ".", namespace: str = "") -> Any:
    """The inverse of `flatten_names`; the leaves are the very objects.

    Args:
        like: a tree with the wanted containers and keys, which names alone do not tell. Without it names become dicts
            in dicts, all keys text.

    Raises:
        MismatchError: with like, names that it lacks or has beyond.
        TreeError: without like, a name that is a leaf and a container.
    """
    return names.unflatten_names(named, like, separator=separator, namespace=namespace)
