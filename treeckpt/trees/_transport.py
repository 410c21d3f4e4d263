"""Sends bytes and regions of arrays between the ranks of a process group, for `treeckpt.trees`.

Ranks are counted within the group. Bytes are numpy arrays of uint8; for a group whose backend moves only device memory
(NCCL) they are copied to and from its device. `SoloTransport` stands for a single rank, or no process group. Regions of
many arrays go in few messages (`send_regions`): a thousand leaves take a handful of them. Sender and receivers compute
the same packing from the same list of regions; no headers are sent.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from .._arrays.base import ArraySource, ArrayTarget, HostArray, SourcePiece, TargetPiece, raw_dtype
from .._core.sharding.region import Region
from .._io.comm.collective import ByteGatherer
from .._io.comm.comm import check_group, launched_rank, unconnected_error
from ._moving import fill

Transfer = tuple[int, np.ndarray]
"""The other rank, and the bytes to send or to fill."""


class Transport(ByteGatherer, Protocol):
    """One rank's access to the others. Every method is called by all ranks in the same order."""

    @property
    def members(self) -> tuple[int, ...] | None:
        """The global rank of each rank; None where the numbers are the same."""
        ...

    def broadcast(self, data: np.ndarray, source: int) -> None:
        """Fills `data` with that of rank `source`."""
        ...

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """Sends and receives; between two ranks in order."""
        ...


class SoloTransport:
    """The transport of a single rank: it sends nothing."""

    rank, size, members = 0, 1, None

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: np.ndarray, source: int) -> None:
        pass

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        assert not sends and not receives, "there is no other rank"


class TorchTransport:
    """The transport of a process group."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, group
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self.members = None if self._ranks == tuple(range(dist.get_world_size())) else self._ranks
        # the device from which the backend of the group sends: that of NCCL is a GPU
        self._device = str(dist.distributed_c10d._get_object_coll_device(group))

    def all_gather(self, data: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * self.size
        self._dist.all_gather_object(gathered, data, group=self._group)
        return gathered

    def broadcast(self, data: np.ndarray, source: int) -> None:
        tensor = self._tensor(data)
        self._dist.broadcast(tensor, src=self._ranks[source], group=self._group)
        if source != self.rank:
            self._copy_back(tensor, data)

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        dist = self._dist
        filled = [(self._tensor(data), data) for _, data in receives]
        calls = [
            dist.P2POp(dist.isend, self._tensor(data), self._ranks[other], self._group) for other, data in sends
        ] + [
            dist.P2POp(dist.irecv, tensor, self._ranks[other], self._group)
            for (other, _), (tensor, _) in zip(receives, filled, strict=True)
        ]
        for work in dist.batch_isend_irecv(calls) if calls else []:
            work.wait()
        for tensor, data in filled:
            self._copy_back(tensor, data)

    def _tensor(self, data: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(data).to(self._device)

    def _copy_back(self, tensor: Any, data: np.ndarray) -> None:
        # on the host the tensor has the memory of the array
        if self._device != "cpu":
            data[:] = tensor.cpu().numpy()


def transport_of(group: Any) -> Transport:
    """Returns the transport of a process group.

    Args:
        group: None is the default group, or a solo transport where there is none; "alone" is a solo transport.

    Raises:
        RankError: this rank is not part of the group, or there is none although a launcher has started other ranks.
        TreeckptError: `group` is no process group.
    """
    if isinstance(group, str) and group == "alone":
        return SoloTransport()
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        if group is None and (launched := launched_rank()) is not None:
            raise unconnected_error(launched, "group")
        return SoloTransport()
    if group is None:
        group = dist.group.WORLD
    check_group(group, "group")
    return TorchTransport(group)


BUCKET_NBYTES = 64 << 20
"""Size of a message in bytes, at most, unless a single region is larger."""
ALIGN = 16


class PackedRegion(msgspec.Struct, frozen=True):
    """A region of the array at a path."""

    path: str
    region: Region
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.region.size * self.itemsize


class MessageBucket(msgspec.Struct, frozen=True):
    """The regions of one message, each with its first byte in it."""

    entries: tuple[tuple[PackedRegion, int], ...]
    nbytes: int


def pack_regions(entries: Sequence[PackedRegion], limit: int) -> Iterator[MessageBucket]:
    """Yields buckets of at most `limit` bytes, or of one region, in order; omits empty regions."""
    packed: list[tuple[PackedRegion, int]] = []
    offset = 0
    for entry in entries:
        if not entry.nbytes:
            continue
        if packed and offset + entry.nbytes > limit:
            yield MessageBucket(tuple(packed), offset)
            packed, offset = [], 0
        packed.append((entry, offset))
        offset += -(-entry.nbytes // ALIGN) * ALIGN
    if packed:
        yield MessageBucket(tuple(packed), offset)


def _window(data: np.ndarray, entry: PackedRegion, offset: int) -> HostArray:
    raw = data[offset : offset + entry.nbytes].view(raw_dtype(entry.itemsize))
    return HostArray(raw.reshape(entry.region.shape))


def send_regions(
    entries: Sequence[PackedRegion],
    limit: int,
    transport: Transport,
    *,
    sender: int,
    receivers: Collection[int],
    sources: Mapping[str, ArraySource],
    targets: Mapping[str, ArrayTarget],
) -> None:
    """Sends regions of one rank's arrays to others; every rank calls it with the same entries.

    Args:
        receivers: the ranks that get them; the sender too, if it is to fill targets of its own.
        sources: this rank's arrays by path, if it is the sender.
        targets: the arrays to fill, if it is a receiver; regions of others are ignored.
    """
    sends, receives = transport.rank == sender, transport.rank in receivers
    for bucket in pack_regions(entries, limit) if sends or receives else ():
        # the gaps between regions are sent too: zeros, and not what was in memory before
        data = np.zeros(bucket.nbytes, np.uint8) if sends else np.empty(bucket.nbytes, np.uint8)
        places = [(entry, _window(data, entry, offset)) for entry, offset in bucket.entries]
        if sends:
            for entry, place in places:
                fill([TargetPiece(entry.region, place)], sources[entry.path].pieces)
        if len(receivers) == transport.size:
            transport.broadcast(data, sender)
        elif sends:
            transport.exchange([(rank, data) for rank in receivers if rank != sender], [])
        else:
            transport.exchange([], [(sender, data)])
        for entry, place in places if receives else ():
            pieces = targets[entry.path].pieces if entry.path in targets else ()
            # pieces of a target have entries of their own: of many, only the one that is meant is looked at
            exact = [piece for piece in pieces if piece.region == entry.region]
            fill(exact or pieces, [SourcePiece(entry.region, place)])
