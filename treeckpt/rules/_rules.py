"""Load rules on names, and the union of all rules, as plain data with a JSON form.

`rules._apply_rules` applies a list of rules in order, each to the result of those before it. Rules never
touch data: a load reads only the bytes that it needs of their result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ._base_rule import BaseRule
from ._reshape_rules import ArrayRule, Reshape


class OneName(BaseRule, frozen=True):
    """The base of rules that give one new name to what a pattern matches."""

    source: str
    target: str

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(pattern, new name) pairs."""
        return ((self.source, self.target),)


class Rename(OneName, frozen=True, tag="rename"):
    """Renames leaves, or everything below a node: `Rename("model/h.$L.*", "model/layers.${L + 4}.*")`.

    >>> sorted(tc.load("run/step_00000100", transforms=tc.rules.Rename("model/weight", "model/w"))["model"])
    ['bias', 'w']

    Args:
        source, target: the pattern of leaves, or of a node above them, and their new name.
    """


class Renames(BaseRule, frozen=True, tag="renames"):
    """Applies several renames at once: the first pattern that matches a leaf counts, so names can be exchanged.

    >>> swap = tc.rules.Renames((("model/weight", "model/bias"), ("model/bias", "model/weight")))
    >>> tc.load("run/step_00000100", transforms=swap)["model"]["bias"].shape
    torch.Size([2, 4])

    Args:
        names: (pattern, new name) pairs.
    """

    names: tuple[tuple[str, str], ...]

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(pattern, new name) pairs."""
        return self.names


class Copy(OneName, frozen=True, tag="copy"):
    """Adds a second name to leaves, or to everything below a node; both are one tied array while neither is changed.

    >>> sorted(tc.load("run/step_00000100", transforms=tc.rules.Copy("model", "ema")))
    ['ema', 'model', 'step']

    Args:
        source, target: the pattern of leaves, or of a node above them, and their second name.
    """


class Drop(BaseRule, frozen=True, tag="drop"):
    """Removes leaves, or everything below a node.

    >>> tc.load("run/step_00000100", transforms=tc.rules.Drop("model"))
    {'step': 100}

    Args:
        source: the pattern of leaves, or of a node above them.
    """

    source: str


class Keep(BaseRule, frozen=True, tag="keep"):
    """Leaves the target's values under these names unchanged, whatever was saved there.

    >>> tc.load_into("run/step_00000100", {"model": model, "step": 0}, transforms=tc.rules.Keep("model/bias")).loaded
    2

    Args:
        source: the pattern of leaves, or of a node above them.
    """

    source: str


class Fill(BaseRule, frozen=True, tag="fill"):
    """Adds an array of one value where none was saved.

    >>> tc.load("run/step_00000100", transforms=tc.rules.Fill("model/scale", 1.0, shape=(2,)))["model"]["scale"]
    tensor([1., 1.])

    Args:
        target: its name; a pattern if the shape comes from `like`.
        value: the value of every element.
        shape, dtype: of the array; a shape of None means the shape and dtype that `like` has there.
    """

    target: str
    value: bool | int | float = 0
    shape: tuple[int, ...] | None = None
    dtype: str = "float32"


class Carried(BaseRule, frozen=True, tag="carried"):
    """Applies rules to `model/...` of a state saved by `treeckpt.training`, and to the optimizers' state of it.

    Moments (`optimizer/<name>/exp_avg`) are renamed, split, joined and permuted as their parameters are. State of which
    a parameter has one value (`step`, its membership in a group) is copied to each parameter that it is split into;
    where parameters of one group are joined, the value of the first is taken. Casts, scales and fills apply to
    parameters only.

    >>> report = tc.save("run/step_00000200", tc.training.state(torch.nn.ModuleDict({"old": model})))
    >>> rule = tc.rules.Carried((tc.rules.Rename("model/old.*", "model/*"),))
    >>> tc.training.restore("run/step_00000200", model, transforms=rule).loaded
    2

    Args:
        rules: applied in order, on the names that they have in the state.
    """

    rules: tuple[Rule, ...]


OneRule = Rename | Renames | Copy | Drop | Keep | Fill | Reshape
Rule = OneRule | Carried


_NAMES = ("source", "target", "into", "sources", "names", "scales")
"""The fields of rules that hold patterns and names."""


def placed_below(rules: Iterable[Rule], prefix: str) -> tuple[Rule, ...]:
    """Returns the rules for leaves of which each has become `prefix/...`."""

    def placed(name: Any) -> Any:
        if isinstance(name, str):
            return f"{prefix}/{name}" if name else prefix
        return tuple(map(placed, name)) if isinstance(name, tuple) else name

    found: list[Rule] = []
    for rule in rules:
        if isinstance(rule, Carried):
            found.append(Carried(placed_below(rule.rules, prefix)))
        else:
            names = {name: placed(getattr(rule, name)) for name in _NAMES if name in rule.__struct_fields__}
            found.append(msgspec.structs.replace(rule, **names))
    return tuple(found)


def label_of(rule: Rule) -> str:
    """Returns a short description of a rule, for errors."""
    kind = str(type(rule).__struct_config__.tag)
    if isinstance(rule, ArrayRule):
        return f"{kind} {', '.join(rule.patterns)} -> {', '.join(rule.targets)}"[:200]
    if isinstance(rule, (Rename, Renames, Copy)):
        more = f" and {len(rule.pairs) - 1} more" if len(rule.pairs) > 1 else ""
        return f"{kind} " + "".join(f"{a} -> {b}" for a, b in rule.pairs[:1])[:200] + more
    if isinstance(rule, Carried):
        return f"{kind} {len(rule.rules)} rules"
    return f"{kind} {rule.target if isinstance(rule, Fill) else rule.source}"
