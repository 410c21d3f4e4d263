"""What a manager is told, understood and checked before anything is done with it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Literal, SupportsIndex

from .. import api
from ..arrays.registry import abstract_of, is_value
from ..arrays.stateful import is_stateful
from ..core.analysis.retention_policy import All, Best, Last, Policy, check_policies
from ..core.tree.containers import flatten_one_level
from ..core.tree.flatten import flatten, replace_leaves
from ..core.tree.in_place import update_in_place
from ..errors import TreeckptError, TreeError
from ..saving.options import shard_limit

__all__ = ["best_policy", "check_options", "check_thing", "is_maker", "numbers_of", "policies_of"]


def policies_of(keep: Policy | Sequence[Policy] | int | None) -> tuple[Policy, ...]:
    """The policies that `keep` stands for.

    Raises:
        TreeckptError: it stands for none, or for some that keep nothing.
    """
    if keep is None:
        return (All(),)
    if isinstance(keep, SupportsIndex):
        policies: tuple[Policy, ...] = (Last(keep if isinstance(keep, bool) else operator.index(keep)),)
    else:
        policies = tuple(keep) if isinstance(keep, Sequence) else (keep,)
    check_policies(policies)
    return policies


def best_policy(policies: Sequence[Policy], metric: str | None, mode: Literal["min", "max"] | None) -> Best:
    """The policy by which to choose the best: what is not given is taken from the first that fits.

    Raises:
        TreeckptError: no metric is given, and no policy has one; or an unknown mode.
    """
    found = next((p for p in policies if isinstance(p, Best) and metric in (None, p.metric)), None)
    if metric is None and found is None:
        raise TreeckptError(
            "best", expected="a metric", found="none, and no Best policy", hint="Pass the name of a metric"
        )
    policy = Best(metric or (found.metric if found else ""), mode=mode or (found.mode if found else "min"))
    check_policies([policy])
    return policy


def is_maker(tree: Any) -> bool:
    """Whether it gives the tree when it is called. Models can be called too, but are trees themselves."""
    return callable(tree) and not is_stateful(tree) and flatten_one_level(tree, "", "", 0) is None


def check_options(options: dict[str, Any], *, background: bool) -> None:
    """Refuses what the save would refuse, but now."""
    save = api.save_async if background else api.save
    known = (save.__kwdefaults__ or {}).keys() - {"step", "comm", "custom_metadata"}
    if unknown := options.keys() - known:
        raise TypeError(f"{sorted(unknown)[0]!r} is no option of Manager, nor of {save.__name__}")
    shard_limit(options.get("max_shard_bytes"))


def numbers_of(metrics: Any) -> dict[str, float]:
    """What was measured of a step, by name.

    Raises:
        TreeError: anything else.
    """
    if not isinstance(metrics, Mapping):
        raise TreeError("metrics", expected='numbers by name, as {"loss": 0.5}', found=f"{metrics!r:.60}")
    return {str(name): _number(str(name), value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> float:
    """The number of a metric.

    Raises:
        TreeError: it is none.
    """
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TreeError(f"metrics/{name}", expected="a number", found=f"{value!r:.60}") from error


def check_thing(path: str, name: str, thing: Any, namespace: str) -> None:
    """Refuses to register what holds a value that could not be put back.

    Args:
        path: where it would be saved.

    Raises:
        TreeError: naming the value.
    """
    _, leaves = flatten(thing, namespace=namespace)
    kept = [
        is_stateful(leaf) or abstract_of(leaf, at, 0) is not None or isinstance(leaf, MutableMapping)
        for at, leaf in leaves
    ]
    marks = iter([leaf if keep else object() for keep, (_, leaf) in zip(kept, leaves, strict=True)])
    marked = replace_leaves(thing, marks, namespace=namespace)
    stuck = update_in_place(thing, marked, is_value=is_value, namespace=namespace, dry=True)
    if stuck or (isinstance(thing, tuple) and not leaves):
        path = f"{path}/{stuck[0][0]}" if stuck and stuck[0][0] else path
        value = dict(leaves).get(stuck[0][0], thing) if stuck else thing
        raise TreeError(
            path,
            expected="what can be changed in place: an array, an object with state_dict and load_state_dict, "
            "or values in a dict, a list or a dataclass",
            found=f"{type(value).__qualname__} {value!r:.60}",
            hint=f"Use register_value({name!r}, get, set) with functions that give the value and take it",
        )
