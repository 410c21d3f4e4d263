"""Checks and normalizes the arguments of a manager before anything is done with them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Literal, SupportsIndex, TypedDict

from .._arrays.digests import Comparison
from .._arrays.registry import abstract_of, is_value
from .._arrays.stateful import is_stateful
from .._core.tree.containers import flatten_one_level
from .._core.tree.flatten import flatten, replace_leaves, update_in_place
from .._core.tree.leaf_differences import Strict
from .._core.tree.paths import Selection
from .._io.public_calls import check_options
from .._loading.options import (
    IN_PLACE,
    NO_SALVAGE,
    ONLY_OF_LOAD,
    Fallback,
    LoadKeywords,
    ReadOptions,
    fallback_of,
    fallback_of_load,
    read_of,
)
from .._saving.options import (
    BackgroundOptions,
    SaveOptions,
    background_of,
    shard_limit,
)
from ..errors import TreeckptError, TreeError
from ..policy import All, Best, KeepError, Last, Policy, best_among, check_policies, parse_keep
from ..rules import Renaming, Transforms
from .index_summary import METRICS

_LINKS = {"follow_links": "Give it to the manager: Manager(run, follow_links=True)"}
_LOAD = (*LoadKeywords.__optional_keys__, "together")
"""The options of `Manager.restore`; `ONLY_OF_LOAD` are none with `into`."""
Keep = Policy | str | Sequence[Policy | str] | int | None


class SaveKeywords(TypedDict, total=False):
    """The options of `treeckpt.save` that a manager passes on."""

    overwrite: bool
    verify_replicas: Comparison
    allow_pickle: bool
    max_shard_bytes: int | None
    namespace: str


class RestoreKeywords(TypedDict, total=False):
    """The options of `treeckpt.training.restore` that `Manager.resume` passes on."""

    scheduler: Any
    loader: Any
    rng: bool | None
    extra: Any
    select: Selection
    exclude: Selection
    rename: Renaming
    transforms: Transforms
    from_root: bool
    strict: Strict
    partial: bool
    cast: bool
    keep: Sequence[str]
    read: ReadOptions | None
    fallback: Fallback | None
    device: Any
    allow_pickle: bool
    namespace: str


def training_options(given: RestoreKeywords, namespace: str, call: str) -> dict[str, Any]:
    """Returns the options of a restore of a training state.

    Args:
        namespace: of the manager.

    Raises:
        TypeError: there is no such option, or a group of options is something else.
        MismatchError: `call` cannot do what a group of options asks for.
    """
    check_options(given, RestoreKeywords.__optional_keys__, call)
    read = read_of(given.get("read"), call, {**_LINKS, **IN_PLACE})
    fallback = fallback_of(given.get("fallback"), call, NO_SALVAGE)
    return {"namespace": namespace, **given, "read": read, "fallback": fallback}


def load_options(given: LoadKeywords, namespace: str, call: str, targets: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a load of any tree, as `training_options` does.

    Args:
        targets: `like` of the call, and what it may have in the place of it; None where it is not given.

    Raises:
        TreeckptError: `like` and another one are given.
    """
    others = [name for name, target in targets.items() if name != "like" and target is not None]
    if others and targets["like"] is not None:
        found, hint = f"like and {others[0]}", "Leave like out to fill a tree in place; tc.load(path, like) makes one"
        raise TreeckptError(call, expected="one target", found=found, hint=hint)
    known, of = ({*_LOAD} - ONLY_OF_LOAD, f"{call} with into") if others else (_LOAD, call)
    check_options(given, known, of)
    read = read_of(given.get("read"), call, {**_LINKS, **(IN_PLACE if others else {})})
    fallback = fallback_of_load(given.get("fallback"), call)
    return {"namespace": namespace, **given, "read": read, "fallback": fallback}


def as_policies(keep: Keep) -> tuple[Policy, ...]:
    """Returns the policies of the argument `keep` of a manager.

    Raises:
        TreeckptError: it is no policy, or its policies keep nothing.
    """
    if keep is None:
        return (All(),)
    if isinstance(keep, SupportsIndex):
        # A bool stays one here, and is refused by `check_policies`.
        policies: tuple[Policy, ...] = (Last(keep if isinstance(keep, bool) else operator.index(keep)),)
    else:
        listed = (keep,) if isinstance(keep, str) or not isinstance(keep, Sequence) else keep
        try:
            parsed = [parse_keep(one) if isinstance(one, str) else (one,) for one in listed]
        except KeepError as error:
            raise TreeckptError("keep", expected="policies", found=f"{keep!r:.60}", hint=f"{error}") from error
        policies = tuple(itertools.chain(*parsed))
    check_policies(policies)
    return policies


def best_policy(policies: Sequence[Policy], metric: str | None, mode: Literal["min", "max"] | None) -> Best:
    """Returns the policy that selects the best checkpoint; missing arguments come from the first matching policy.

    Raises:
        TreeckptError: no metric is given, and no policy has one; or the mode is unknown.
    """
    named = next((best for best in best_among(policies) if metric in (None, best.metric)), None)
    if metric is None and named is None:
        raise TreeckptError(
            "best", expected="a metric", found="none, and no Best policy", hint="Pass the name of a metric"
        )
    policy = Best(metric or (named.metric if named else ""), mode=mode or (named.mode if named else "min"))
    check_policies([policy])
    return policy


def is_factory(tree: object, namespace: str) -> bool:
    """Whether a tree argument is a function that returns the tree. A model is callable too, but is itself a tree."""
    return callable(tree) and not is_stateful(tree) and flatten_one_level(tree, "", namespace, 0) is None


def as_save_options(
    options: SaveKeywords, background: bool | BackgroundOptions, others: Iterable[str] = ()
) -> SaveOptions:
    """Returns the options of a manager's saves, which replace a checkpoint of the same step by default.

    Args:
        others: the other arguments of a manager, which the error for an unknown one may name.

    Raises:
        TypeError: `save` has no such option, or `background` is something else.
        TreeckptError: `max_shard_bytes` is no size.
    """
    check_options(options, [*others, *SaveKeywords.__optional_keys__], "Manager, nor of save")
    group = background_of(None if isinstance(background, bool) else background, "Manager")
    limit = shard_limit(options.get("max_shard_bytes"))
    return SaveOptions(**{"overwrite": True, **options, "max_shard_bytes": limit, "background": group})


def check_full_every(given: int | None, *, incremental: bool) -> int | None:
    """Returns of how many saves of a manager one is full: 0 for none, None where no save is incremental.

    Raises:
        TreeckptError: it is no number of saves, or no save is incremental.
    """
    if given is None:
        return 0 if incremental else None
    if isinstance(given, bool) or not isinstance(given, int) or given < 1 or not incremental:
        expected, found = "a number of saves, 1 or more, beside incremental=True", f"{given!r:.60}"
        raise TreeckptError("full_every", expected=expected, found=found if incremental else f"{found} alone")
    return given


def named_metrics(metrics: object, custom: Mapping[str, object]) -> dict[str, dict[str, float]]:
    """Returns the metrics of a step as custom metadata: floats by name, under `METRICS`.

    Args:
        custom: the custom metadata that is saved beside it.

    Raises:
        TreeError: it is no mapping to numbers, or the custom metadata has an entry of that name.
    """
    if not isinstance(metrics, Mapping):
        raise TreeError("metrics", expected='numbers by name, as {"loss": 0.5}', found=f"{metrics!r:.60}")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            # torch warns where a tensor that requires gradients becomes a number.
            numbers[str(name)] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError) as error:
            raise TreeError(f"metrics/{name}", expected="a number", found=f"{value!r:.60}") from error
    if METRICS in custom:
        raise TreeError(
            f"custom_metadata/{METRICS}",
            expected=f"another name beside the argument {METRICS}, which is saved under this one",
            found=f"{custom[METRICS]!r:.60}",
            hint="Give it another name; without the argument the numbers of a dict of this name are the metrics",
        )
    return {METRICS: numbers}


def check_can_restore(path: str, name: str, thing: Any, namespace: str) -> None:
    """Checks that every value of a registered object can be restored in place.

    Args:
        path: where the object is saved.

    Raises:
        TreeError: a value cannot be changed in place; the error names it.
    """
    _, leaves = flatten(thing, namespace=namespace)
    kept = [
        is_stateful(leaf) or abstract_of(leaf, at, 0) is not None or isinstance(leaf, MutableMapping)
        for at, leaf in leaves
    ]
    # Each value becomes a new object, which differs from it: the dry run lists those that could not be put in place.
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
