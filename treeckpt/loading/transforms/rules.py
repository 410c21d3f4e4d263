"""What becomes of saved leaves before they are wanted: rules on names and shapes, as plain data with a JSON form.

`loading.transforms.apply_rules` applies lists of rules, in order, each to what the ones before it left. Nothing here
touches data: a load reads, of what rules make, the bytes that are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...errors import FormatError
from .reshape_rules import BaseRule, Reshape, Shaping

__all__ = [
    "Carried",
    "Copy",
    "Drop",
    "Fill",
    "Keep",
    "OneRule",
    "Rename",
    "Renames",
    "Rule",
    "decode_rules",
    "encode_rules",
    "label_of",
]


class Rename(BaseRule, frozen=True, tag="rename"):
    """Leaves, or all below a node, are called otherwise: `Rename("model/h.$L.*", "model/layers.${L + 4}.*")`."""

    source: str
    target: str

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Pattern and new name."""
        return ((self.source, self.target),)


class Renames(BaseRule, frozen=True, tag="renames"):
    """Several renames at once: a leaf takes the first that means it, so names may be exchanged."""

    names: tuple[tuple[str, str], ...]

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Pattern and new name."""
        return self.names


class Copy(BaseRule, frozen=True, tag="copy"):
    """Leaves, or all below a node, are there under a second name too: one array, tied, where neither is changed."""

    source: str
    target: str

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Pattern and new name."""
        return ((self.source, self.target),)


class Drop(BaseRule, frozen=True, tag="drop"):
    """Leaves, or all below a node, are not there."""

    source: str


class Keep(BaseRule, frozen=True, tag="keep"):
    """What is wanted under these names stays as `like` has it, whatever was saved there."""

    source: str


class Fill(BaseRule, frozen=True, tag="fill"):
    """An array of one value, where none was saved.

    Args:
        target: its name; a pattern, if the shape is left to `like`.
        value: of each element.
        shape, dtype: None takes those that `like` wants there.
    """

    target: str
    value: bool | int | float = 0
    shape: tuple[int, ...] | None = None
    dtype: str = "float32"


class Carried(BaseRule, frozen=True, tag="carried"):
    """Rules for `model/...` of a state that `treeckpt.training` saved, which its optimizers' state follows.

    Moments (`optimizer/<name>/exp_avg`) are renamed, split, joined and turned as their parameters are. What a parameter
    has only one of (`step`, its place in a group) goes to all that it becomes; where parameters of one group are
    joined, the first one's is taken. Casts and fills are of parameters only.
    """

    rules: tuple[Rule, ...]


OneRule = Rename | Renames | Copy | Drop | Keep | Fill | Reshape
Rule = OneRule | Carried


def label_of(rule: Rule) -> str:
    """A rule in a few words, for errors."""
    kind = str(type(rule).__struct_config__.tag)
    if isinstance(rule, Shaping):
        return f"{kind} {', '.join(rule.patterns)} -> {', '.join(rule.targets)}"[:200]
    if isinstance(rule, (Rename, Renames, Copy)):
        more = f" and {len(rule.pairs) - 1} more" if len(rule.pairs) > 1 else ""
        return f"{kind} " + "".join(f"{a} -> {b}" for a, b in rule.pairs[:1])[:200] + more
    if isinstance(rule, Carried):
        return f"{kind} {len(rule.rules)} rules"
    return f"{kind} {rule.target if isinstance(rule, Fill) else rule.source}"


def encode_rules(rules: Sequence[Rule]) -> bytes:
    """Rules as JSON: a list of objects, each with its kind as `rule`."""
    return msgspec.json.encode(rules)


def decode_rules(data: bytes | str, name: str = "rules") -> tuple[Rule, ...]:
    """The inverse of `encode_rules`.

    Raises:
        FormatError: an unknown kind of rule or field, or one that is missing.
    """
    try:
        return msgspec.json.decode(data, type=tuple[Rule, ...])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(name, expected="a list of rules", found=f"{error}"[:200]) from error
