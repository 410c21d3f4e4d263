"""The check that a restore and its source have the same leaves; the error says what to do where they have not."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

from ..errors import MismatchError
from ..loading.match import Strict, disjoint, rename_hint, some_of
from .hyperparameters import BY_SCHEDULERS

_NO_NAME_ALIKE = (
    "Not one name of the model is in the checkpoint: pass rename={saved name: name here}, with globs, or transforms="
)

_OF_OPTIMIZER = "optimizer/", "param_groups/"
_SAVED_CLASS = "Give an optimizer of the class and options that were saved; optimizer=None leaves it as it is"


def check_keys(
    missing: Sequence[str],
    unexpected: Sequence[str],
    strict: Strict,
    *,
    alike: bool,
    left_out: Set[str],
    extra: Collection[str],
) -> None:
    """Checks that the targets and the source of a restore have the same leaves.

    Args:
        missing: leaves of the targets that the source lacks.
        unexpected: the reverse.
        alike: whether any leaf of the model is in both, or is left as it is.
        left_out: names of the model that were left out on purpose.
        extra: the names that were saved in `extra`.

    Raises:
        MismatchError: they have not, by `strict`; without it, not one of the model's is in both.
    """
    if not strict and missing and unexpected and not alike:
        raise disjoint(missing, unexpected, _NO_NAME_ALIKE)
    refused = unexpected if strict is True else []
    if not strict or not (bad := [*missing, *refused]):
        return
    texts = some_of("missing in the checkpoint", missing), some_of("not here", refused)
    part = {path.removeprefix("model/") for path in missing} <= left_out
    options_differ = any(path.startswith(_OF_OPTIMIZER[1]) for path in bad)
    raise MismatchError(
        bad[0],
        expected="the same parameters and moments here as in the checkpoint",
        found="; ".join(filter(None, texts)),
        hint="Pass strict='missing', or partial=True, if one is a part of the other"
        if part and not options_differ
        else rename_hint(missing, unexpected) or _hint(missing, unexpected, extra, alike=alike),
    )


def _hint(missing: Sequence[str], unexpected: Sequence[str], extra: Collection[str], *, alike: bool) -> str:
    if not alike:
        return _NO_NAME_ALIKE
    if missing and all(path.startswith("extra/") for path in missing):
        return f"The checkpoint has in extra: {', '.join(extra)}. Give these names, and `...` for what stays as it is"
    if not all(path.startswith(_OF_OPTIMIZER) for path in missing):
        return "Pass strict=False to restore what both have"
    if any(path.startswith(_OF_OPTIMIZER[1]) for path in unexpected):
        return f"The optimizer here is of another class than the saved one. {_SAVED_CLASS}"
    options = {path.rpartition("/")[2] for path in missing if path.startswith(_OF_OPTIMIZER[1])}
    if len(options) < len(missing) or any(path.startswith(_OF_OPTIMIZER[0]) for path in unexpected):
        return _SAVED_CLASS
    if options <= BY_SCHEDULERS:
        return "A scheduler added them here, as OneCycleLR does, and not when this was saved. Make it after the restore"
    return "Pass strict=False to keep these options as they are here, as with a checkpoint of an older torch"
