"""What ranks tell each other in a save, and what the coordinator makes of it. Nothing here waits or opens a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import xxhash

from ..core.format.timings import Span
from ..core.planning.rank_trees import GlobalTree, Inventory, RankClass, check_disjoint, merge_rank_trees, piece_key
from ..core.sharding.int_runs import encode_runs
from ..core.sharding.region import Region
from ..core.tree.value_codec import Value
from ..errors import CheckpointError, MismatchError
from ..io.comm.failures import CoordinatorReply, Fault

__all__ = [
    "Arguments",
    "BoxDigests",
    "CommitResult",
    "Decision",
    "FileRow",
    "MergedTree",
    "RankProposal",
    "RankTree",
    "WriteReport",
    "check_hellos",
    "check_idle",
    "clashing_of",
    "compare",
    "compare_boxes",
    "decode_each",
    "digest",
    "digests_of",
    "is_known",
    "join",
    "key_of",
    "tellers_of",
]

T = TypeVar("T")
FileRow = tuple[int, int, int, int, int]
"""(rank, part, stream, nbytes, header) of a shard."""


class Arguments(msgspec.Struct, frozen=True, array_like=True):
    """What must be the same in the call of every rank."""

    path: str
    step: int | None
    overwrite: bool
    verify_replicas: bool
    max_shard_bytes: int
    busy: str
    """What to do where a save is still under way: wait, skip or error."""
    rehearsal: bool
    """Nothing is to be written: ranks only agree on the plan."""


class RankProposal(msgspec.Struct, array_like=True):
    """A rank is here, and this is what it brings, as digests."""

    fault: Fault | None
    arguments: Arguments
    digest: bytes
    contents: bytes
    remembered: str
    """Key of the plan that the rank has kept from the save before."""
    own_values: dict[str, Value]
    running: str = ""
    """Where the rank is still saving to, in the background."""
    pieces: dict[bytes, bytes] = {}
    """Of pieces that other ranks hold too: by a digest of which they are, one of their contents."""
    metadata: dict[str, bytes] = {}
    """Digests of the values of `custom_metadata`."""


class Decision(CoordinatorReply, array_like=True):
    """What the coordinator decides after hello."""

    save_id: str
    created_ns: int
    key: str
    """Names the global plan that follows from all inventories."""
    tellers: tuple[int, ...]
    """Ranks that send their contents, and inventory; none where all are equal."""
    known: bool
    """Whether every rank has kept that plan: then inventories are not sent."""
    skipped: bool = False
    """A rank is still busy with an earlier save, and that is a reason to do nothing."""
    clash: bool = False
    """Ranks that hold the same pieces do not have the same in them: tellers send digests of each."""
    boxes: tuple[tuple[str, Region], ...] = ()
    """Without tellers, what `MergedTree.boxes` says."""


class RankTree(msgspec.Struct, array_like=True):
    """A teller's inventory, if that is not known, and digests of its contents by path."""

    inventory: Inventory | None
    contents: dict[str, bytes]
    values: dict[str, Value]


class MergedTree(CoordinatorReply, array_like=True):
    """All inventories as one; None where every rank has kept it."""

    plenum: GlobalTree | None
    boxes: tuple[tuple[str, Region], ...] = ()
    """What several listed pieces of an array hold, and ranks compare in one more exchange."""


class BoxDigests(msgspec.Struct, array_like=True):
    """What a rank has in the boxes that are compared."""

    fault: Fault | None
    digests: list[tuple[int, bytes]]
    """By number of the box, for each piece that holds it."""


class WriteReport(msgspec.Struct, array_like=True):
    """How a rank's writing went."""

    fault: Fault | None
    files: tuple[FileRow, ...]
    timings: tuple[Span, ...]
    host: str = ""
    """The name of the rank's machine."""


class CommitResult(CoordinatorReply, array_like=True):
    """How the save ended."""

    in_place: bool
    """With faults: the index may have been published all the same, so the files must stay."""


def decode_each(messages: Mapping[int, bytes], kind: type[T]) -> dict[int, T]:
    """Messages by rank; equal ones are decoded once, into one object."""
    met: dict[bytes, T] = {}
    for message in messages.values():
        if message not in met:
            met[message] = msgspec.msgpack.decode(message, type=kind)
    return {rank: met[message] for rank, message in messages.items()}


def check_hellos(hellos: Mapping[int, RankProposal]) -> None:
    """Refuses calls of save that contradict each other.

    Raises:
        MismatchError: naming the argument and the rank.
    """
    first = hellos[0].arguments
    for rank, hello in hellos.items():
        if hello.arguments is first or hello.arguments == first:
            continue
        for field in msgspec.structs.fields(Arguments):
            expected, found = getattr(first, field.name), getattr(hello.arguments, field.name)
            if expected != found:
                raise MismatchError(
                    first.path,
                    expected=f"the same {field.name} on every rank, as {expected!r} on rank 0",
                    found=f"{found!r} on rank {rank}",
                    hint="Call save with the same arguments on every rank",
                )
    for rank, hello in hellos.items():
        for key, content in hello.metadata.items():
            if hellos[0].metadata.get(key) != content:
                raise MismatchError(
                    f"custom_metadata/{key}",
                    expected="on every rank what rank 0 gives, which is kept, or nothing",
                    found=f"another value on rank {rank}" if key in hellos[0].metadata else f"it on rank {rank} alone",
                    hint="Give the same on every rank, or on rank 0 alone; what each rank has of its own belongs into "
                    "the tree, in tc.PerRank",
                )


def check_idle(hellos: Mapping[int, RankProposal]) -> None:
    """Refuses to begin while a rank is still busy with an earlier save.

    Raises:
        CheckpointError: naming that save and the rank.
    """
    for rank, hello in hellos.items():
        if hello.running:
            raise CheckpointError(
                hello.arguments.path,
                expected="no save under way",
                found=f"that of {hello.running}, on rank {rank}",
                hint='Save less often, or pass busy="wait" or busy="skip"',
            )


def key_of(hellos: Mapping[int, RankProposal]) -> str:
    """Names the plan that follows from all ranks' inventories."""
    return xxhash.xxh3_128_hexdigest(b"".join(hellos[rank].digest for rank in sorted(hellos)))


def tellers_of(hellos: Mapping[int, RankProposal]) -> tuple[int, ...]:
    """One rank of each kind, also of those that hold the same pieces; none if all bring the same."""
    kinds: dict[tuple[bytes, bytes], int] = {}
    for rank, hello in sorted(hellos.items()):
        kinds.setdefault((hello.digest, hello.contents), rank)
    clashing = clashing_of({rank: hello.pieces for rank, hello in hellos.items()})
    return tuple(sorted({*kinds.values(), *clashing})) if len(kinds) > 1 or clashing else ()


def digests_of(groups: Sequence[Mapping[str, bytes]]) -> dict[bytes, bytes]:
    """For each group of pieces, with the digests of their contents, one digest of which they are and one of these."""
    return {digest(list(group)): digest(list(group.values())) for group in groups}


def digest(value: object) -> bytes:
    """16 bytes that are equal for what is equal as JSON."""
    return xxhash.xxh3_128_digest(msgspec.json.encode(value))


def clashing_of(pieces: Mapping[int, Mapping[bytes, bytes]]) -> set[int]:
    """Ranks that hold the same pieces with other contents, one for each, from every rank's `digests_of`."""
    holders: dict[bytes, dict[bytes, int]] = {}
    for rank, groups in sorted(pieces.items()):
        for keys, contents in groups.items():
            holders.setdefault(keys, {}).setdefault(contents, rank)
    return {rank for kinds in holders.values() if len(kinds) > 1 for rank in kinds.values()}


def compare(contents: Mapping[int, Mapping[str, bytes]]) -> None:
    """Compares digests of what replicas must have in common.

    Raises:
        MismatchError: naming the leaf and the ranks.
        LayoutError: pieces that overlap in part.
    """
    seen: dict[str, tuple[int, bytes]] = {}
    for rank, digests in contents.items():
        for path, content in digests.items():
            first, expected = seen.setdefault(path, (rank, content))
            if content != expected:
                raise MismatchError(
                    _named(path),
                    expected=f"the same content on every rank that holds it, as on rank {first}",
                    found=f"another on rank {rank}",
                    hint="Wrap what each rank has of its own in tc.PerRank; if they should be equal, find out why not",
                )
    check_disjoint([(first, path) for path, (first, _) in seen.items()])


def compare_boxes(boxes: Sequence[tuple[str, Region]], found: Mapping[int, BoxDigests]) -> None:
    """Compares what pieces have in common.

    Raises:
        MismatchError: naming the box and the ranks.
    """
    seen: dict[int, tuple[int, bytes]] = {}
    for rank, own in sorted(found.items()):
        for number, content in own.digests:
            first, expected = seen.setdefault(number, (rank, content))
            if content != expected:
                path, box = boxes[number]
                raise MismatchError(
                    _named(piece_key(path, box)),
                    expected=f"the same content in every piece that holds it, as on rank {first}",
                    found=f"another on rank {rank}" if rank != first else "another in a second piece there",
                    hint="Check the offsets and the global shape given to tc.Sharded; if ranks should agree, find out "
                    "why they do not. What each rank has of its own belongs into tc.PerRank",
                )


def _named(key: str) -> str:
    """A path, or a `piece_key`, for errors."""
    return key.replace("\0", "@", 1).replace("\0", "+", 1)


def is_known(hellos: Mapping[int, RankProposal], key: str) -> bool:
    """Whether every rank has kept the plan of that key."""
    return all(hello.remembered == key for hello in hellos.values())


def join(hellos: Mapping[int, RankProposal], told: Mapping[int, RankTree], world: int) -> GlobalTree:
    """All inventories as one.

    Raises:
        MismatchError, LayoutError: ranks contradict each other.
    """
    groups: dict[bytes, list[int]] = {}
    for rank, hello in sorted(hellos.items()):
        groups.setdefault(hello.digest, []).append(rank)
    classes: list[RankClass] = []
    for ranks in groups.values():
        inventory = told[ranks[0]].inventory
        assert inventory is not None, "the first rank of each kind was asked"
        classes.append(RankClass(encode_runs(ranks), inventory))
    return merge_rank_trees(classes, world)
