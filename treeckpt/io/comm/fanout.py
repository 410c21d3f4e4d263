"""Who speaks to whom in a large world: ranks in groups, these in larger groups, each led by its first rank.

With spans (8, 512) rank 8 leads 8 to 15, as a host's ranks usually are; rank 512 leads 513 to 519, the leaders 520, 528
... 1016, and with them all up to 1023; rank 0 leads its own and the leaders of all other groups. Messages go up in
bundles, in which equal ones stand once, and words are handed down; `io.comm.rounds` does so, over a board of each
leader's.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...core.sharding.int_runs import Runs, decode_runs, encode_runs

__all__ = [
    "GROUP_SIZES",
    "TREE_ABOVE",
    "bundle",
    "children_of",
    "group_sizes_for",
    "is_leader",
    "parent_of",
    "unbundle",
]

TREE_ABOVE = 1024
"""Ranks of the largest world in which all speak to rank 0 itself.

While it waits a rank asks twenty times a second, and the one thread of a Store's server answers some 50,000 requests a
second (`python -m tests.bench scale` measures it): with 2,500 ranks it is busy with their waiting alone.
"""
GROUP_SIZES = (8, 512)
"""Ranks of a host, as they usually are, and of 64 hosts: of 16,384 ranks 101 speak to rank 0, 70 to other leaders."""


class _Bundle(msgspec.Struct, array_like=True):
    words: list[tuple[Runs, bytes]]
    """Messages, with the ranks that sent them."""
    lost: dict[int, str]
    """Ranks that fell silent, and what is known of each."""


def group_sizes_for(size: int) -> tuple[int, ...]:
    """The spans by which a world of this size is grouped; none where all speak to rank 0."""
    return GROUP_SIZES if size > TREE_ABOVE else ()


def parent_of(rank: int, spans: tuple[int, ...]) -> int:
    """The leader to whom a rank speaks; rank 0's own is itself."""
    return next((rank - rank % span for span in spans if rank % span), 0)


def children_of(rank: int, size: int, spans: tuple[int, ...]) -> list[int]:
    """The ranks that speak to this one."""
    children: list[int] = []
    step = 1
    for span in (*spans, size):
        if rank % span:
            break
        children += range(rank + step, min(rank + span, size), step)
        step = span
    return children


def is_leader(rank: int, size: int, spans: tuple[int, ...]) -> bool:
    """Whether others speak to this rank."""
    return bool(children_of(rank, size, spans))


def bundle(heard: Mapping[int, bytes], lost: Mapping[int, str]) -> bytes:
    """Messages by rank as one: equal ones stand in it once."""
    senders: dict[bytes, list[int]] = {}
    for rank, message in heard.items():
        senders.setdefault(message, []).append(rank)
    words = [(encode_runs(sorted(ranks)), message) for message, ranks in senders.items()]
    return msgspec.msgpack.encode(_Bundle(words, dict(lost)))


def unbundle(data: bytes) -> tuple[dict[int, bytes], dict[int, str]]:
    """The messages of a bundle by rank, and the ranks that are lost; equal messages are one object."""
    found = msgspec.msgpack.decode(data, type=_Bundle)
    heard: dict[int, bytes] = {}
    for ranks, message in found.words:
        heard |= dict.fromkeys(decode_runs(ranks).tolist(), message)
    return heard, found.lost
