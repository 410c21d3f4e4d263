"""The attributes of an OrderedDict as plain data; `_metadata` of state dicts is one.

`torch.nn.Module.state_dict` sets `_metadata` on the dict that it returns: by the dotted name of each module a dict with
the version of its class, which `load_state_dict` passes to the module, so that it can migrate older weights. Most
modules have the same small entry, which is stored once. Other attributes, and a `_metadata` of another form, are one
value.
"""

# A tree holds objects of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false

from __future__ import annotations

import collections
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from ...errors import FormatError, MismatchError, TreeckptError, TreeError
from ..sharding.int_runs import Runs, check_runs, decode_runs, encode_runs
from .value_codec import TypedValue, Value, decode_value, encode_value, type_name

T = TypeVar("T")

SHARED_NBYTES = 128
"""Bytes of a value in JSON, at most, that is stored once for all modules which have it: each gets a copy in a load."""
METADATA = "_metadata"
"""The attribute in which torch keeps what modules say of themselves."""
_SCALARS = frozenset((type(None), bool, int, float, str, bytes))
_HINT = "Set it to plain values, or delete it: `del state_dict._metadata[name]`"


class ModuleMetadata(msgspec.Struct, frozen=True, array_like=True):
    """What each module says of itself, by its dotted name; the root's name is empty."""

    names: tuple[str, ...]
    values: tuple[Value, ...]
    """The values, of which those of up to `SHARED_NBYTES` are distinct; a larger one is of one module."""
    numbers: Runs
    """The number of the value of each name."""

    def by_name(self) -> dict[str, Value]:
        """Returns the value of each module as it is stored."""
        values = self.values
        return {name: values[n] for name, n in zip(self.names, decode_runs(self.numbers).tolist(), strict=True)}

    def decoded(self, path: str) -> collections.OrderedDict[str, Any]:
        """Returns what torch has in `_metadata`, with objects of its own for each module."""
        made: list[Any] = [decode_value(value, path) for value in self.values]
        # a dict of scalars is copied: to decode it for each module takes longer
        is_flat = [type(one) is dict and _SCALARS.issuperset(map(type, one.values())) for one in made]
        return collections.OrderedDict(
            (name, dict(made[n]) if is_flat[n] else decode_value(self.values[n], path))
            for name, n in zip(self.names, decode_runs(self.numbers).tolist(), strict=True)
        )


class DictAttributes(msgspec.Struct, frozen=True, array_like=True):
    """The attributes of one OrderedDict."""

    metadata: ModuleMetadata | None = None
    others: Value = None
    """A dict of all other attributes; None where there are none."""

    def check(self, path: str) -> None:
        """Checks what a file holds, before it is expanded.

        Raises:
            FormatError: naming `path`.
        """
        if (metadata := self.metadata) is not None:
            check_runs(metadata.numbers, path=path, length=len(metadata.names), low=0, high=len(metadata.values))
            # else a few bytes of a file could become a large value of each of many modules
            uses = np.bincount(decode_runs(metadata.numbers), minlength=len(metadata.values))
            for number in np.flatnonzero(uses > 1).tolist():
                if (nbytes := len(msgspec.json.encode(metadata.values[number]))) > SHARED_NBYTES:
                    raise FormatError(
                        f"{path}.{METADATA}",
                        expected=f"at most {SHARED_NBYTES} bytes of a value that several modules have",
                        found=f"{nbytes} for {uses[number]} modules",
                    )

    def decoded(self, path: str) -> dict[str, Any]:
        """Returns the attributes.

        Raises:
            FormatError: names or values that no OrderedDict has.
        """
        attributes: Any = {} if self.others is None else decode_value(self.others, path)
        if type(attributes) is not dict or not all(type(name) is str and _is_free(name) for name in attributes):
            raise FormatError(path, expected="the attributes of an OrderedDict", found=f"{attributes!r:.80}")
        return attributes if self.metadata is None else {METADATA: self.metadata.decoded(path), **attributes}


def _is_free(name: str) -> bool:
    """Whether an attribute of this name hides none of the class."""
    return not hasattr(collections.OrderedDict, name)


def encode_attributes(given: Mapping[str, Any], path: str) -> DictAttributes | None:
    """Returns the attributes of an OrderedDict as data; None where it has none.

    Names like `__orig_class__`, which Python sets itself, are not taken.

    Raises:
        TreeError: a name or a value that cannot be stored.
    """
    others = {name: value for name, value in given.items() if not (type(name) is str and name.startswith("__"))}
    metadata = None
    if not others:
        return None
    if isinstance(given.get(METADATA), dict) and all(type(name) is str for name in given[METADATA]):
        metadata = _encode_metadata(others.pop(METADATA), f"{path}.{METADATA}")
    for name, value in others.items():
        if type(name) is not str or not _is_free(name):
            raise TreeError(
                path,
                expected="attributes that an OrderedDict does not have itself",
                found=f"{name!r:.60} of {type_name(type(value))}",
                hint="Delete the attribute",
            )
        encode_value(value, f"{path}.{name}")  # for the path of an error
    return DictAttributes(metadata, encode_value(others, path) if others else None)


def _encode_metadata(given: Mapping[str, Any], path: str) -> ModuleMetadata:
    stored: dict[str, Value] = {}
    versions: dict[int, Value] = {}
    for name, local in given.items():
        # nearly all are {"version": 1}
        version = local.get("version") if type(local) is dict and len(local) == 1 else None
        try:
            name.encode()
            # True is no version: as a key it would be found as 1
            known = versions.get(version) if type(version) is int else None
            stored[name] = encode_value(local, f"{path}[{name!r}]") if known is None else known
        except (TreeckptError, UnicodeEncodeError) as error:
            raise TreeError(
                f"{path}[{name!r:.200}]",
                expected="plain values and names of valid Unicode",
                found=getattr(error, "found", f"{error}")[:200],
                hint=_HINT,
            ) from error
        if type(version) is int:
            versions[version] = stored[name]
    return metadata_of(stored)


def metadata_of(stored: Mapping[str, Value]) -> ModuleMetadata:
    """Returns the metadata of modules whose values are stored so; the inverse of `ModuleMetadata.by_name`."""
    numbers: dict[object, int] = {}
    values: list[Value] = []
    column: list[int] = []
    seen: dict[int, int] = {}
    for value in stored.values():
        # most modules have the very object of another one, which is encoded once
        number = seen.get(id(value))
        if number is None:
            text = msgspec.json.encode(value)
            is_shared = len(text) <= SHARED_NBYTES
            number = numbers.setdefault(text, len(values)) if is_shared else len(values)
            if number == len(values):
                values.append(value)
            if is_shared:
                seen[id(value)] = number
        column.append(number)
    return ModuleMetadata(tuple(stored), tuple(values), encode_runs(column))


def merge_attributes(
    a: DictAttributes | None, b: DictAttributes | None, path: str, where: str | None
) -> DictAttributes | None:
    """Returns the attributes of an OrderedDict that is merged from two, the metadata joined by the names of modules.

    Args:
        where: says in errors whose attributes have to agree; None takes those of `b` where they differ.

    Raises:
        MismatchError: naming what the two contradict each other about.
    """
    if a is None or b is None or msgspec.json.encode(a) == msgspec.json.encode(b):
        return a or b
    others = [{} if one.others is None else _pairs(one.others) for one in (a, b)]
    modules = [{} if one.metadata is None else one.metadata.by_name() for one in (a, b)]
    for kind, (first, second) in (("", others), (METADATA, modules)):
        for name in first.keys() & second.keys() if where is not None else ():
            if msgspec.json.encode(first[name]) != msgspec.json.encode(second[name]):
                named = f"{path}.{METADATA}[{name!r}]" if kind else f"{path}.{name}"
                raise MismatchError(
                    named,
                    expected=f"the same {where}: {_text(first[name])}",
                    found=_text(second[name]),
                    hint="A module of one name has another class or version there",
                )
    joined = {**others[0], **others[1]}
    items = tuple(item for pair in joined.items() for item in pair)
    both = a.metadata is not None or b.metadata is not None
    return DictAttributes(
        metadata_of({**modules[0], **modules[1]}) if both else None, TypedValue("dict", items) if joined else None
    )


def _pairs(value: Value) -> dict[Any, Value]:
    """Returns the entries of an encoded dict."""
    items = value.items if isinstance(value, TypedValue) else ()
    return dict(zip(items[::2], items[1::2], strict=False))


def _text(value: Value) -> str:
    return f"{decode_value(value, '')!r:.80}"


def renamed_modules(stored: Mapping[str, T], keys: Iterable[str], moves: Sequence[tuple[str, str]]) -> dict[str, T]:
    """Returns the metadata of modules by the names that they have after entries of the state dict were renamed.

    A module follows its own entries, one above follows what is the same before and after, and one without entries
    follows the module that it is in. A module all of whose entries are left out is left out.

    Args:
        stored: by the names before.
        keys: of all entries before.
        moves: the names before and after of each entry that is still there.
    """
    parents = dict.fromkeys((old.rpartition(".")[0], new.rpartition(".")[0]) for old, new in moves)
    # in reverse, so that the first of several origins counts
    origins = {new: old for old, new in reversed(parents)}
    unmoved: set[str] = set()
    for old, new in parents:
        before, after = (name.split(".") if name else [] for name in (old, new))
        unmoved.update(".".join(before[:n]) for n in range(len(before) + 1) if before[:n] == after[:n])
        # where `layers.0` has become `blocks.0`, `layers` has become `blocks`
        while before and after and before.pop() == after.pop():
            origins.setdefault(".".join(after), ".".join(before))
    for name in unmoved.difference(origins.values()):
        origins.setdefault(name, name)
    with_entries = {""}
    for key in keys:
        while key and (key := key.rpartition(".")[0]) not in with_entries:
            with_entries.add(key)
    renamed = {new: stored[old] for new, old in origins.items() if old in stored}
    names: dict[str, list[str]] = {}
    for new, old in origins.items():
        names.setdefault(old, []).append(new)
    for name in stored.keys() - with_entries:
        above = name
        while above not in with_entries:
            above = above.rpartition(".")[0]
        rest = name[len(above) :].removeprefix(".")
        for new in names.get(above, ()):
            renamed.setdefault(f"{new}.{rest}" if new else rest, stored[name])
    return renamed


def take_metadata(
    here: Mapping[str, Any] | None, kept: Container[str], saved: Mapping[str, Any], taken: Container[str]
) -> collections.OrderedDict[str, Any]:
    """Returns the metadata of a state dict of which some entries were loaded from another.

    A module's is that of the state dict which its own entries come from. One without entries has the loaded one.

    Args:
        here: of the state dict; None if it has none.
        kept: the names of modules of which an entry stays.
        saved: of the state dict that was loaded from.
        taken: the names of modules of which an entry was loaded.
    """
    here = here or {}
    taken_over: collections.OrderedDict[str, Any] = collections.OrderedDict()
    for name in dict.fromkeys((*saved, *here)):
        source = saved if name in taken or (name not in kept and name in saved) else here
        if name in source:
            taken_over[name] = source[name]
    return taken_over


def copy_attributes(old: Any, new: Any) -> Any:
    """Gives an OrderedDict the attributes of another, and returns it; the metadata is copied, as torch adds to it."""
    attributes: dict[str, Any] = vars(old)
    if attributes:
        vars(new).update(attributes)
        if isinstance(metadata := attributes.get(METADATA), dict):
            vars(new)[METADATA] = copied = metadata.copy()
            copied.update([(name, dict(local)) for name, local in metadata.items() if type(local) is dict])
    return new
