"""Comparison of the leaves that are wanted with those that are saved, and the errors for leaves of one side alone.

A list or tuple that holds only values is one value, which a load replaces as a whole. If such a sequence in the target
and the saved one have the same keys at all levels, their leaves match one by one, like all other leaves. If they differ
(a list that grew), the whole content comes from the saved one (`differing_sequences`).
"""

# A tree holds objects of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ...errors import MismatchError
from ..sharding.int_runs import decode_runs
from .containers import PerRank, flatten_one_level, is_leaf_type
from .flatten import child_of_rank, flatten, unflatten
from .keyed_table import KeyedTable
from .structure import (
    DequeNode,
    ListNode,
    NamedTupleNode,
    Node,
    PerRankNode,
    Structure,
    TupleNode,
    key_text,
    keys_of,
    paths_of,
)
from .value_codec import Resolver

Strict = bool | Literal["missing"]
"""Whether leaves must be on both sides: True, False, or "missing": those asked for must be in the checkpoint."""


class LeafDifferences(msgspec.Struct, frozen=True):
    """The leaves that only one side has, by path."""

    missing: Sequence[str]
    """Leaves that are wanted and not saved."""
    unexpected: Sequence[str]
    """Leaves that are saved and not wanted."""
    common: bool
    """Whether any leaf is on both sides, or left to be as it is."""
    roots: frozenset[str] = frozenset()
    """Keys at the root below which a leaf is on both sides; only where both sides have leaves alone."""

    @property
    def paths(self) -> list[str]:
        """The leaves of both sides, the missing ones first."""
        return [*self.missing, *self.unexpected]

    def refused(self, strict: Strict) -> LeafDifferences:
        """Returns those that are an error: all, or with "missing" the first, or with False all if none is common."""
        if not strict and self.missing and self.unexpected and not self.common:
            return self
        return LeafDifferences(
            self.missing if strict else (), self.unexpected if strict is True else (), common=self.common
        )


def compare_leaves(
    wanted: Mapping[str, object],
    saved: Iterable[str],
    *,
    lacks: Callable[[str], bool] | None = None,
    whole: Iterable[str] = (),
    selects: Callable[[str], bool] | None = None,
) -> LeafDifferences:
    """Compares the paths of wanted leaves with those of saved ones.

    Args:
        wanted: leaves by path; `...` stands for all that was saved at and below its path.
        lacks: whether nothing is given for a wanted path; by default whether it is not saved.
        whole: paths whose content is taken as it was saved, whatever is wanted below them.
        selects: whether a path counts; by default all do.
    """
    covered = tuple(f"{path}/" if path else "" for path in whole)
    free = (*covered, *(f"{path}/" if path else "" for path, leaf in wanted.items() if leaf is ...))

    def counts(path: str, free: tuple[str, ...]) -> bool:
        return (selects is None or selects(path)) and not (free and f"{path}/".startswith(free))

    lacking = set(filter(lacks, wanted)) if lacks is not None else wanted.keys() - set(saved)
    missing = [path for path in wanted if path in lacking and wanted[path] is not ... and counts(path, covered)]
    unexpected = [path for path in saved if path not in wanted and counts(path, free)]
    common = bool(free) or any(path not in lacking and counts(path, free) for path in wanted)
    alike = (path for path in wanted if path not in lacking) if missing and unexpected else ()
    return LeafDifferences(
        missing, unexpected, common=common, roots=frozenset(path.partition("/")[0] for path in alike)
    )


def check_same(differences: LeafDifferences, strict: Strict) -> None:
    """Refuses leaves that are only wanted, or only saved, by a MismatchError that names some of them.

    Args:
        strict: False refuses only that not one leaf is in both, "missing" only what is missing.
    """
    refused = differences.refused(strict)
    if not refused.paths:
        return
    if not strict:
        raise disjoint(refused)
    texts = some_of("missing in the checkpoint", refused.missing), some_of("not asked for", refused.unexpected)
    others = "`...` in like for what you do not want"
    hint = rename_hint(refused.missing, refused.unexpected) or _other_names_hint(differences)
    raise MismatchError(
        refused.paths[0],
        expected="the leaves of like and of the checkpoint to be the same"
        if strict is True
        else "every leaf of like to be in the checkpoint",
        found="; ".join(text for text in texts if text),
        hint=hint or f"Pass strict=False to load what both have, or {others}"
        if refused.missing
        else f'Pass strict="missing" to leave the rest of the checkpoint unread, or {others}',
    )


def _other_names_hint(differences: LeafDifferences) -> str:
    """Returns what to do where both sides have something at a key of the root, without a name in common."""
    for root in dict.fromkeys(path.partition("/")[0] for path in differences.missing):
        if root in differences.roots:
            continue
        here, there = (
            [path.removeprefix(f"{root}/") for path in paths if path.startswith(f"{root}/")][:3]
            for paths in (differences.missing, differences.unexpected)
        )
        if here and there:
            return (
                f"Not one name below {root} is in both: like has {', '.join(here)}, the checkpoint {', '.join(there)}. "
                "Give like the saved names, or pass rename={saved name: name in like}"
            )
    return ""


def disjoint(differences: LeafDifferences, hint: str = "") -> MismatchError:
    """Returns the error where nothing would be loaded, as no leaf is both wanted and saved.

    Args:
        hint: what to do where no prefix makes the names alike.
    """
    missing, unexpected = differences.missing, differences.unexpected
    return MismatchError(
        missing[0],
        expected="one leaf at least that is both wanted and in the checkpoint, also with strict=False",
        found=f"{some_of('missing in the checkpoint', missing)}; {some_of('not asked for', unexpected)}",
        hint=rename_hint(missing, unexpected)
        or hint
        or "Give a tree with the outer keys of the saved one, as {'model': ...}, or rename={...}",
    )


def rename_hint(missing: Sequence[str], unexpected: Iterable[str]) -> str:
    """Returns what to do where all missing names are in the checkpoint behind another prefix, "" where they are not."""
    saved = set(unexpected)
    # a model's own weights are proposed before copies of them, such as an average in `extra`
    nearest = sorted(saved, key=lambda path: (not path.startswith("model/"), path.count("/"), path))
    found: list[str] = []
    for path in nearest if missing else ():
        shorter = min(len(missing[0]), len(path))
        same = next((i for i in range(shorter) if missing[0][i] != path[i]), shorter)
        head = re.sub("[^/.]*$", "", path[:same])
        wanted, there = missing[0].removeprefix(head), path.removeprefix(head)
        prefix = max(wanted, there, key=len).removesuffix(min(wanted, there, key=len))
        if prefix[-1:] not in ("/", ".") or prefix in (wanted, there):
            continue
        now, before = (head, head + prefix) if len(there) > len(wanted) else (head + prefix, head)
        if all(name.startswith(now) and before + name.removeprefix(now) in saved for name in missing):
            rest = ", strict='missing'" if len(saved) > len(missing) else ""
            found.append(f"{path}: pass rename={{'{before}*': '{now}*'}}{rest}")
        if found and (len(found) > 1 or found[0].startswith("model/")):
            break
    if not found:
        return ""
    others = f", for the first of several: another one is {found[1].partition(':')[0]}" if len(found) > 1 else ""
    return f"They are in the checkpoint, {missing[0]} as {found[0]}{others}"


def some_of(what: str, paths: Sequence[str]) -> str:
    """Returns how many paths are so, with the first of them; "" for none."""
    if not paths:
        return ""
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return f"{len(paths)} {what}: {', '.join(path or '<root>' for path in paths[:5])}{more}"


# sequences of values ------------------------------------------------------------------------------------------------
_SEQUENCES = (ListNode, TupleNode, DequeNode, NamedTupleNode)


class SequenceReplacement(msgspec.Struct, frozen=True):
    """A sequence in the target, and the saved one that replaces it."""

    path: str
    here: Any
    saved: Node

    @property
    def paths(self) -> list[str]:
        """The paths of the saved leaves."""
        return [f"{self.path}/{below}" if self.path else below for below, _ in paths_of(self.saved)]

    def content(self, leaves: Iterator[object], *, resolve: Resolver, namespace: str = "") -> Any:
        """Returns the saved content, in a container like the one of the target.

        Raises:
            MismatchError: a deque of the target is too short for it.
        """
        content: Any = unflatten(self.saved, leaves, resolve=resolve, namespace=namespace)
        if isinstance(self.here, collections.deque):
            if self.here.maxlen is not None and len(content) > self.here.maxlen:
                raise MismatchError(
                    self.path,
                    expected=f"at most {self.here.maxlen} items, as the deque has room for",
                    found=f"{len(content)} in the checkpoint",
                    hint="Make the deque with a larger maxlen",
                )
            return collections.deque(content, self.here.maxlen)
        kind = type(self.here)
        # a subclass of a namedtuple may override `_make`
        return tuple.__new__(kind, content) if hasattr(kind, "_fields") else kind(content)


def differing_sequences(
    tree: object,
    saved: Structure,
    *,
    is_value: Callable[[object], bool],
    is_saved_value: Callable[[str], bool],
    rank: int,
    source_rank: int,
    namespace: str = "",
) -> dict[str, SequenceReplacement]:
    """Returns the sequences of values in a tree that differ from the saved ones in more than their leaves, by path.

    Args:
        is_value: returns whether a leaf of the tree is a value.
        is_saved_value: returns whether a value was saved at a path (with `~rank*`), and is requested.
        source_rank: the rank whose subtrees of the saved structure are used under `PerRank`.
    """
    replaced: dict[str, SequenceReplacement] = {}
    equal: list[SequenceReplacement] = []

    def walk(here: Any, node: Structure, path: str, prefix: str) -> bool:
        """Returns whether the keys are the same at all levels, or become so by the replacements found."""
        if here is ... or type(here) is KeyedTable:
            return True
        taken = flatten_one_level(here, path, namespace, rank)
        if taken is None or node is None:
            return taken is None and node is None
        if isinstance(node, PerRankNode):
            if type(here) is PerRank and any(source_rank in decode_runs(group) for group in node.ranks):
                below = f"{prefix}~rank*"
                return walk(here.value, child_of_rank(node, source_rank, path), below, below + "/")
            return False
        texts = [key_text(key) for key in taken.keys]
        children = dict(zip((key_text(key) for key in keys_of(node, path)), node.children, strict=True))
        same = set(texts) == children.keys()
        for text, child in zip(texts, taken.children, strict=True):
            if text in children and not (children[text] is None and is_leaf_type(type(child))):
                fits = walk(child, children[text], prefix + text, f"{prefix}{text}/")
                same = same and fits
        if not isinstance(here, (list, tuple, collections.deque)) or not isinstance(node, _SEQUENCES):
            return same
        sequence = SequenceReplacement(path, here, node)
        if same:
            equal.append(sequence)
        # a namedtuple has the fields of its class, whatever was saved
        elif hasattr(here, "_fields") and set(texts) != children.keys():
            return False
        elif all(is_value(leaf) for _, leaf in flatten(here, rank=rank, namespace=namespace)[1]) and all(
            map(is_saved_value, sequence.paths)
        ):
            replaced[path] = sequence
            return True
        return same

    walk(tree, saved, "", "")
    # an object at two places is replaced at both
    ids = {id(sequence.here) for sequence in replaced.values()}
    replaced.update((sequence.path, sequence) for sequence in equal if id(sequence.here) in ids)
    return replaced
