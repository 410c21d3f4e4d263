"""Comparison of the leaves that are wanted with those that are saved, and the errors for leaves of one side alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from ...errors import MismatchError

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

    @property
    def paths(self) -> list[str]:
        """Those of both sides."""
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
    return LeafDifferences(missing, unexpected, common=common)


def check_same(found: LeafDifferences, strict: Strict) -> None:
    """Refuses leaves that are only wanted, or only saved, by a MismatchError that names some of them.

    Args:
        strict: False refuses only that not one leaf is in both, "missing" only what is missing.
    """
    refused = found.refused(strict)
    if not refused.paths:
        return
    if not strict:
        raise disjoint(refused)
    texts = some_of("missing in the checkpoint", refused.missing), some_of("not asked for", refused.unexpected)
    others = "`...` in like for what you do not want"
    hint = rename_hint(refused.missing, refused.unexpected)
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


def disjoint(found: LeafDifferences, hint: str = "") -> MismatchError:
    """Returns the error where nothing would be loaded, as no leaf is both wanted and saved.

    Args:
        hint: what to do where no prefix makes the names alike.
    """
    return MismatchError(
        found.missing[0],
        expected="one leaf at least that is both wanted and in the checkpoint, also with strict=False",
        found=f"{some_of('missing in the checkpoint', found.missing)}; {some_of('not asked for', found.unexpected)}",
        hint=rename_hint(found.missing, found.unexpected)
        or hint
        or "Give a tree with the outer keys of the saved one, as {'model': ...}, or rename={...}",
    )


def rename_hint(missing: Sequence[str], unexpected: Iterable[str]) -> str:
    """Returns what to do where all missing names are in the checkpoint behind another prefix, "" where they are not."""
    saved = set(unexpected)
    # a model's own weights are proposed before copies of them, such as an average in `extra`
    nearest = sorted(saved, key=lambda path: (not path.startswith("model/"), path.count("/"), path))
    for path in nearest if missing else ():
        same = next((i for i, (a, b) in enumerate(zip(missing[0], path, strict=False)) if a != b), 0)
        head = re.sub("[^/.]*$", "", path[:same])
        wanted, there = missing[0].removeprefix(head), path.removeprefix(head)
        prefix = max(wanted, there, key=len).removesuffix(min(wanted, there, key=len))
        if prefix[-1:] not in ("/", ".") or prefix in (wanted, there):
            continue
        now, before = (head, head + prefix) if len(there) > len(wanted) else (head + prefix, head)
        if all(name.startswith(now) and before + name.removeprefix(now) in saved for name in missing):
            rest = ", strict='missing'" if len(saved) > len(missing) else ""
            return f"They are in the checkpoint, {missing[0]} as {path}: pass rename={{'{before}*': '{now}*'}}{rest}"
    return ""


def some_of(what: str, paths: Sequence[str]) -> str:
    """Returns how many paths are so, with the first of them; "" for none."""
    if not paths:
        return ""
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return f"{len(paths)} {what}: {', '.join(paths[:5])}{more}"
