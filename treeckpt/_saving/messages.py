"""The messages by which several ranks agree on a save, and what the coordinator concludes; nothing here waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import xxhash

from .._core.planning.rank_trees import (
    GlobalTree,
    Inventory,
    RankClass,
    check_disjoint,
    digest_of,
    merge_rank_trees,
    piece_key,
)
from .._core.sharding.int_runs import encode_runs
from .._core.sharding.region import Region
from .._core.tree.value_codec import Value
from ..errors import CheckpointError, MismatchError
from .options import CommonOptions

Boxes = tuple[tuple[str, Region], ...]
"""(path, box) of what several listed pieces of an array hold."""
BoxDigests = list[tuple[int, bytes]]
"""(number of the box, digest), for each piece of a rank that holds it."""


class RankProposal(msgspec.Struct, array_like=True):
    """A rank's call of save: its arguments, and its tree as digests."""

    path: str
    options: CommonOptions
    inventory: bytes = b""
    """Digest of the rank's inventory."""
    contents: bytes = b""
    """Digest of the contents that replicas must share."""
    cached_plan: str = ""
    """Key of the plan that the rank has kept from the save before."""
    own_values: dict[str, Value] = {}
    running: str = ""
    """The path of a background save that has not ended on this rank; then there is no tree."""
    pieces: dict[bytes, bytes] = {}
    """For groups of pieces that other ranks hold too: a digest of their keys, and one of their contents."""
    metadata: dict[str, bytes] = {}
    """Digests of the values of `custom_metadata`."""
    files: dict[str, str] = {}
    """Checksums of the sidecar files that are given to the rank; "" for a path, which rank 0 alone reads."""


class Decision(msgspec.Struct, array_like=True):
    """The coordinator's reply to the proposals."""

    save_id: str
    created_ns: int
    key: str
    """Names the global plan that follows from all inventories."""
    representatives: tuple[int, ...] = ()
    """Ranks that send their contents, and inventory; none where all are equal."""
    plan_is_cached: bool = False
    """Whether every rank has kept that plan: then inventories are not sent."""
    skipped: bool = False
    """A rank is still busy with an earlier save, and the options say to do nothing then."""
    conflict: bool = False
    """Ranks that hold the same pieces have different contents in them: representatives send digests of each."""
    boxes: Boxes = ()
    """Without representatives, the same as `MergedTree.boxes`."""
    contents_differ: bool = False
    """Ranks with equal inventories have different contents: representatives send digests of all of these."""


class RankTree(msgspec.Struct, array_like=True):
    """A representative's inventory, unless every rank has its plan, and digests of its contents by path."""

    inventory: Inventory | None
    contents: dict[str, bytes]
    values: dict[str, Value]


class MergedTree(msgspec.Struct, array_like=True):
    """All inventories as one global tree; None where every rank has kept it."""

    global_tree: GlobalTree | None
    boxes: Boxes = ()
    """What ranks compare in one more step."""
    common: tuple[str, ...] = ()
    """With a global tree: the paths that are in several inventories."""


class CommonPaths(msgspec.Struct, frozen=True):
    """The paths that are in several of the inventories with one key: the others hold the ranks of one inventory."""

    key: str
    paths: frozenset[str]

    def of(self, contents: Mapping[str, bytes]) -> dict[str, bytes]:
        """Returns the digests that ranks with other inventories have too; keys are paths or `piece_key`s."""
        return {key: digest for key, digest in contents.items() if key.partition("\0")[0] in self.paths}


def check_arguments(proposals: Mapping[int, RankProposal]) -> None:
    """Raises MismatchError, naming the argument and the rank, for calls of save that contradict each other."""
    first = proposals[0]
    expected = {"path": first.path, **msgspec.structs.asdict(first.options)}
    for rank, proposal in proposals.items():
        if proposal.path == first.path and proposal.options == first.options:
            continue
        found = {"path": proposal.path, **msgspec.structs.asdict(proposal.options)}
        name = next(name for name, value in expected.items() if found[name] != value)
        raise MismatchError(
            first.path,
            expected=f"the same {name} on every rank, as {expected[name]!r} on rank 0",
            found=f"{found[name]!r} on rank {rank}",
            hint="Call save with the same arguments on every rank",
        )
    for rank, proposal in proposals.items():
        for key, content in proposal.metadata.items():
            if first.metadata.get(key) != content:
                raise MismatchError(
                    f"custom_metadata/{key}",
                    expected="on every rank what rank 0 gives, which is kept, or nothing",
                    found=f"another value on rank {rank}" if key in first.metadata else f"it on rank {rank} alone",
                    hint="Give the same on every rank, or on rank 0 alone; what each rank has of its own belongs into "
                    "the tree, in tc.PerRank",
                )
        for name, content in proposal.files.items():
            if name not in first.files or content not in ("", first.files[name]):
                raise MismatchError(
                    f"files/{name}",
                    expected="on every rank what rank 0 gives, which is kept, or nothing",
                    found=f"another content on rank {rank}" if name in first.files else f"it on rank {rank} alone",
                    hint="Give files on rank 0 alone, or the same on every rank",
                )


def check_idle(path: str, running: Mapping[int, str]) -> None:
    """Checks that no rank is still busy with an earlier save.

    Args:
        running: of each rank the path of that save, empty for none.

    Raises:
        CheckpointError: one is; it names the save and the rank.
    """
    for rank, busy in running.items():
        if busy:
            raise CheckpointError(
                path,
                expected="no save under way",
                found=f"that of {busy}, on rank {rank}",
                hint='Save less often, or pass BackgroundOptions(busy="wait") or busy="skip"',
            )


def plan_key(proposals: Mapping[int, RankProposal]) -> str:
    """Returns the key of the plan that follows from all ranks' inventories."""
    return xxhash.xxh3_128_hexdigest(b"".join(proposals[rank].inventory for rank in sorted(proposals)))


def representatives(proposals: Mapping[int, RankProposal]) -> tuple[int, ...]:
    """Returns one rank for each kind of tree, and for each content of shared pieces; none if all ranks are equal."""
    kinds: dict[tuple[bytes, bytes], int] = {}
    for rank, proposal in sorted(proposals.items()):
        kinds.setdefault((proposal.inventory, proposal.contents), rank)
    conflicting = conflicting_ranks({rank: proposal.pieces for rank, proposal in proposals.items()})
    return tuple(sorted({*kinds.values(), *conflicting})) if len(kinds) > 1 or conflicting else ()


def common_paths(trees: Iterable[RankTree]) -> tuple[str, ...]:
    """Returns the paths that are in several of the inventories that representatives have sent."""
    distinct = {digest_of(one): one for tree in trees if (one := tree.inventory) is not None}
    counts = Counter(leaf.path for one in distinct.values() for leaf in one.leaves)
    return tuple(path for path, count in counts.items() if count > 1)


def digest_groups(groups: Iterable[Mapping[str, bytes]]) -> dict[bytes, bytes]:
    """Returns for each group of pieces, given by key and digest, one digest of the keys and one of the contents."""
    return {json_digest(list(group)): json_digest(list(group.values())) for group in groups}


def json_digest(value: object) -> bytes:
    """Returns 16 bytes that are equal for what is equal as JSON."""
    return xxhash.xxh3_128_digest(msgspec.json.encode(value))


def conflicting_ranks(pieces: Mapping[int, Mapping[bytes, bytes]]) -> set[int]:
    """Returns ranks that hold the same pieces with different contents by `digest_groups`, one for each content."""
    holders: dict[bytes, dict[bytes, int]] = {}
    for rank, groups in sorted(pieces.items()):
        for keys, contents in groups.items():
            holders.setdefault(keys, {}).setdefault(contents, rank)
    return {rank for contents in holders.values() if len(contents) > 1 for rank in contents.values()}


def compare_contents(contents: Mapping[int, Mapping[str, bytes]]) -> None:
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
                    _readable_key(path),
                    expected=f"the same content on every rank that holds it, as on rank {first}",
                    found=f"another on rank {rank}",
                    hint="Wrap what each rank has of its own in tc.PerRank, and that of which rank 0's counts in "
                    "tc.FromRank; if they should be equal, find out why not",
                )
    check_disjoint([(first, path) for path, (first, _) in seen.items()])


def compare_boxes(boxes: Sequence[tuple[str, Region]], found: Mapping[int, BoxDigests]) -> None:
    """Compares what pieces have in common; raises MismatchError, naming the box and the ranks, where it differs."""
    seen: dict[int, tuple[int, bytes]] = {}
    for rank, own in sorted(found.items()):
        for number, content in own:
            first, expected = seen.setdefault(number, (rank, content))
            if content != expected:
                path, box = boxes[number]
                raise MismatchError(
                    _readable_key(piece_key(path, box)),
                    expected=f"the same content in every piece that holds it, as on rank {first}",
                    found=f"another on rank {rank}" if rank != first else "another in a second piece there",
                    hint="Check the offsets and the global shape given to tc.Sharded; if ranks should agree, find out "
                    "why they do not. What each rank has of its own belongs into tc.PerRank",
                )


def _readable_key(key: str) -> str:
    """Returns a path, or a `piece_key`, as text for errors."""
    return key.replace("\0", "@", 1).replace("\0", "+", 1)


def merge_inventories(digests: Mapping[int, bytes], trees: Mapping[int, RankTree], world: int) -> GlobalTree:
    """Merges all inventories into one global tree.

    Args:
        digests: of every rank's inventory.
        trees: of at least the lowest rank of each digest.

    Raises:
        MismatchError, LayoutError: ranks contradict each other.
    """
    groups: dict[bytes, list[int]] = {}
    for rank, inventory_digest in sorted(digests.items()):
        groups.setdefault(inventory_digest, []).append(rank)
    classes: list[RankClass] = []
    for ranks in groups.values():
        inventory = trees[ranks[0]].inventory
        assert inventory is not None, "the first rank of each kind sends it"
        classes.append(RankClass(encode_runs(ranks), inventory))
    return merge_rank_trees(classes, world)
