"""Groups of ranks in a large world, and the leader of each: ranks exchange messages with their leader only.

With group sizes (8, 512) rank 8 leads ranks 8 to 15, usually the ranks of one host; rank 512 leads 513 to 519, the
leaders 520, 528 ... 1016, and with them all ranks up to 1023; rank 0 leads its own group and the leaders of all other
groups. Messages go up in bundles, in which equal messages are stored once, and rank 0's messages are passed down.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..._core.format.decoding import decode_msgpack
from ..._core.sharding.int_runs import Runs, decode_runs, encode_runs

TREE_ABOVE = 1024
"""Number of ranks of the largest world in which every rank exchanges messages with rank 0 itself.

While it waits, a rank polls twenty times a second, and the one thread of a Store's server answers some 50,000 requests
a second (`python -m tests.bench scale` measures it): with 2,500 ranks the polls alone keep it busy.
"""
GROUP_SIZES = (8, 512)
"""Ranks of a usual host, and of 64 hosts: of 16,384 ranks 101 exchange messages with rank 0, 70 with other leaders."""


class _Bundle(msgspec.Struct, array_like=True):
    messages: list[tuple[Runs, bytes]]
    """Distinct messages, each with the ranks that sent it."""
    lost: dict[int, str]
    """Ranks that fell silent, and what is known of each."""


def group_sizes_for(size: int) -> tuple[int, ...]:
    """Returns the group sizes of a world of `size` ranks; none where every rank exchanges messages with rank 0."""
    return GROUP_SIZES if size > TREE_ABOVE else ()


def parent_of(rank: int, group_sizes: tuple[int, ...]) -> int:
    """Returns the leader of a rank; rank 0's is rank 0."""
    return next((rank - rank % size for size in group_sizes if rank % size), 0)


def children_of(rank: int, world: int, group_sizes: tuple[int, ...]) -> list[int]:
    """Returns the ranks whose leader this one is."""
    children: list[int] = []
    step = 1
    for size in (*group_sizes, world):
        if rank % size:
            break
        children += range(rank + step, min(rank + size, world), step)
        step = size
    return children


def is_leader(rank: int, world: int, group_sizes: tuple[int, ...]) -> bool:
    """Returns whether a rank leads others."""
    return bool(children_of(rank, world, group_sizes))


def bundle(messages: Mapping[int, bytes], lost: Mapping[int, str]) -> bytes:
    """Encodes messages by rank as one message, which holds equal ones once."""
    senders: dict[bytes, list[int]] = {}
    for rank, message in messages.items():
        senders.setdefault(message, []).append(rank)
    distinct = [(encode_runs(sorted(ranks)), message) for message, ranks in senders.items()]
    return msgspec.msgpack.encode(_Bundle(distinct, dict(lost)))


def unbundle(data: bytes) -> tuple[dict[int, bytes], dict[int, str]]:
    """Decodes a bundle: messages by rank, and the lost ranks. Equal messages are one object."""
    bundled = decode_msgpack(data, _Bundle)
    messages: dict[int, bytes] = {}
    for ranks, message in bundled.messages:
        messages |= dict.fromkeys(decode_runs(ranks).tolist(), message)
    return messages, bundled.lost
