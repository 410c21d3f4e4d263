"""The entries of a model's state dict by clean names, and memory for models on the meta device.

The entries are those of `state_dict`: with hooks and `get_extra_state`, without non-persistent buffers, under names
without the steps of wrappers. A buffer that is no DTensor has a copy on every rank, and these may differ (batch
statistics do): the first rank of the wrapper or mesh around the module saves it, or as `training.state` is told.

A wrapper (data parallelism, compilation, activation checkpointing) adds a step to the names of the parameters inside
it, `module.layers.0._orig_mod.weight`. The step is removed at the wrapper and nowhere else, so a child named `module`
keeps its name. A key of several steps, `("generator", "0.weight")`, is one parameter among several models.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parameter import is_lazy

from .._arrays.dtensor import is_dtensor, is_sharded_tensor
from .._arrays.registry import take_apart
from .._arrays.stateful import is_optimizer
from .._core.tree.dict_attributes import METADATA, copy_attributes
from .._core.tree.flatten import flatten
from .._core.tree.structure import key_text, parse_path
from ..errors import TreeError

Modules = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]

_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
}
"""Wrapper classes, and the step that each adds to names."""
WRAPPER_STEPS = frozenset(_WRAPPERS.values())

_FLAT = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"


class StateDictEntry(msgspec.Struct, dict=True):
    """One entry of a model's state dict."""

    key: Key
    kind: str
    """"parameter", "buffer", "extra" (what `get_extra_state` gave), "made" (a tensor that a hook of `state_dict`
    created, or an attribute) or "value" (anything else)."""
    value: Any
    module: nn.Module
    """The module that it is registered in."""
    name: str
    """The name of the entry in that module."""
    owned: bool | None = True
    """Whether this rank saves it, where ranks may differ; None where nothing tells which ranks hold the module."""
    live: bool = True
    """Whether filling it fills the model. A hook of `state_dict` may create tensors of its own, which only code of the
    module takes back."""
    root: Any = None

    @cached_property
    def full_name(self) -> str:
        """The name among all models, as the trees of the optimizers have it."""
        return key_path(self.key)

    @cached_property
    def path(self) -> str:
        """The path in a training state."""
        return f"model/{self.full_name}"

    @property
    def may_differ(self) -> bool:
        """Whether each rank may have another one: a buffer, or an attribute that a module saves by its own code."""
        return not is_dtensor(self.value) and (
            self.kind in ("buffer", "value") or (self.kind == "made" and not self.live)
        )


def named_objects(given: Any, kind: type, what: str) -> list[tuple[Key, Any]]:
    """Returns (prefix, object) for one object, for the parts of one (a sequence), or for several by name (a dict).

    Raises:
        TreeError: an object of another class.
    """
    noun = "module" if what == "model" else what
    if _is_state_dict(given):
        raise _state_dict_error(what, noun)
    if isinstance(given, Mapping):
        pairs: list[tuple[Key, Any]] = [((str(name),), part) for name, part in given.items()]
    elif isinstance(given, Sequence):
        pairs = [((), part) for part in given]
    else:
        pairs = [((), given)]
    for key, part in pairs:
        if _is_state_dict(part):
            raise _state_dict_error("/".join((what, *key)), noun)
        # What wraps an optimizer need not be one by its class.
        if not isinstance(part, kind) and not (what == "optimizer" and is_optimizer(part)):
            raise TreeError(
                "/".join((what, *key)),
                expected=f"a {kind.__module__}.{kind.__qualname__}, a list of its parts, or a dict of several",
                found=f"{type(part).__module__}.{type(part).__qualname__}",
                hint="The order is state(model, optimizer), restore(path, model, optimizer)",
            )
    return pairs


def _is_state_dict(given: Any) -> bool:
    """Whether an object is the state dict of a module or an optimizer, or contains one."""
    if not isinstance(given, Mapping) or isinstance(given, nn.Module):
        return False
    if {"state", "param_groups"} <= set(given):
        return True
    return any(isinstance(part, Tensor) or _is_state_dict(part) for part in given.values())


def _state_dict_error(path: str, noun: str) -> TreeError:
    return TreeError(
        path, expected=f"the {noun} itself", found="a state dict", hint=f"Give the {noun}, not its state_dict"
    )


class ModelEntries(msgspec.Struct, frozen=True):
    """What a model has to save and to fill; parameters and buffers are the live objects."""

    entries: list[StateDictEntry]
    """The entries of its state dict."""
    hidden: list[StateDictEntry]
    """The parameters that a hook of `state_dict` left out, under their own names."""
    ties: dict[int, tuple[Key, ...]]
    """The names of each parameter, by identity."""
    shards: dict[int, tuple[Any, Any]]
    """The (global shape, offset) of each parameter that is a shard of a ShardedTensor, by identity."""
    metadata: dict[Key, OrderedDict[str, Any]]
    """What `_metadata` of its state dict has, by the clean names of modules; by the key of each of several models."""


def collect_entries(model: Modules) -> ModelEntries:
    """Returns the entries of a model.

    Raises:
        TreeError: flat parameters, whose names are lost; two parts with one name.
    """
    roots = named_objects(model, nn.Module, "model")
    metadata: dict[Key, OrderedDict[str, Any]] = {}
    entries = [entry for prefix, root in roots for entry in _collect_one(root, prefix, metadata)]
    _check_buffers(entries)
    nested((entry.key, None) for entry in entries)  # raises for two entries with one name
    there, hidden = {id(entry.value) for entry in entries}, list[StateDictEntry]()
    for prefix, root in roots:
        names, parameters = CleanNames(root, prefix), root.named_parameters(remove_duplicate=False)
        hidden += [names.entry(raw, parameter) for raw, parameter in parameters if id(parameter) not in there]
    every = (*entries, *hidden)
    ties = tie_names((entry.key, id(entry.value)) for entry in every if entry.kind == "parameter")
    shards: dict[int, tuple[Any, Any]] = {}
    for whole in (entry.value for entry in entries if is_sharded_tensor(entry.value)):
        for shard, tensor in itertools.product(whole.local_shards(), (entry.value for entry in hidden)):
            if tensor.shape == shard.tensor.shape and addresses_of(tensor) == addresses_of(shard.tensor):
                shards[id(tensor)] = tuple(whole.metadata().size), tuple(shard.metadata.shard_offsets)
    return ModelEntries(entries, hidden, ties, shards, metadata)


def _check_buffers(entries: Sequence[StateDictEntry]) -> None:
    """Refuses parts of a model, as stages of a pipeline on one rank, of which only buffers have a name in common."""
    counts = Counter(entry.key for entry in entries)
    twice = [entry for entry in entries if counts[entry.key] > 1]
    if twice and all(entry.kind == "buffer" for entry in twice):
        raise TreeError(
            twice[0].full_name,
            expected="one value for each name",
            found="a buffer of two parts on this rank",
            hint="If the modules compute it, register it with persistent=False in all but one. Else give the parts as "
            "a dict of names, {'first': ..., 'second': ...}: such a checkpoint is restored into parts of these names",
        )


def _collect_one(root: nn.Module, prefix: Key, metadata: dict[Key, OrderedDict[str, Any]]) -> Iterator[StateDictEntry]:
    # first: it makes FSDP2 reshard parameters that a forward left unsharded
    state_dict = live_state_dict(root, "/".join(("model", *prefix)))
    names = CleanNames(root, prefix)
    _join_metadata(metadata.setdefault(prefix, OrderedDict()), getattr(state_dict, METADATA, None), names)
    saves, parameters = buffer_owners(root), set(map(id, root.parameters()))
    identities = parameters.union(map(id, root.buffers()))
    memory = _ModuleMemory(root)
    for raw, value in state_dict.items():
        entry = names.entry(raw, value)
        if not isinstance(value, Tensor) or entry.name == _EXTRA_STATE_KEY_SUFFIX:
            entry.kind = "extra" if entry.name == _EXTRA_STATE_KEY_SUFFIX else "value"
            entry.live = False
        elif id(value) in identities:
            entry.kind = "parameter" if isinstance(value, nn.Parameter) or id(value) in parameters else "buffer"
        else:
            entry.kind, entry.live = memory.kind_of(value)
            entry.value = value if is_sharded_tensor(value) else value.detach()
        if entry.may_differ:
            owner = value if id(value) in saves else entry.module
            entry.owned = saves.get(id(owner))
        yield entry


def live_state_dict(module: nn.Module, path: str) -> Mapping[str, Any]:
    """Returns the state dict of a module, with its parameters and buffers themselves.

    A `state_dict` of its own that does not take `keep_vars` gives detached ones, in whose place the live ones of the
    same name and memory are put.

    Raises:
        TreeError: it is no mapping, or a module inside has a `state_dict` that does not take what torch passes.
    """
    whole = _takes(module.state_dict, "keep_vars")
    try:
        state_dict: Any = module.state_dict(keep_vars=True) if whole else module.state_dict()
    except TypeError as error:
        inner = ((name, part) for name, chain in CleanNames(module, ()).chains.items() for part in chain)
        for name, part in inner:
            if part is not module and not _takes(part.state_dict, "destination", "prefix", "keep_vars"):
                raise TreeError(
                    f"{path}/{name}" if name else path,
                    expected="a state_dict that takes destination, prefix and keep_vars, which torch passes to it",
                    found=f"{type(part).__qualname__}.state_dict{inspect.signature(part.state_dict)}",
                    hint="Define it with **options, and pass them to super().state_dict; or give this module itself",
                ) from error
        raise
    if not isinstance(state_dict, Mapping):
        raise TreeError(path, expected="a state_dict that returns a dict", found=type(state_dict).__qualname__)
    if whole:
        return state_dict
    live: dict[str, Tensor] = dict(module.named_buffers(remove_duplicate=False))
    live.update(module.named_parameters(remove_duplicate=False))
    pairs = ((name, live.get(name), value) for name, value in state_dict.items())
    state = OrderedDict((name, own if _is_view_of(value, own) else value) for name, own, value in pairs)
    return copy_attributes(state_dict, state) if isinstance(state_dict, OrderedDict) else state


def _takes(function: Any, *names: str) -> bool:
    """Whether a function takes keyword arguments of these names."""
    parameters = inspect.signature(function).parameters
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or set(names) <= parameters.keys()


def _is_view_of(value: Any, own: Tensor | None) -> bool:
    """Whether a value is a detached tensor of the same elements."""
    if own is None or is_lazy(own) or not isinstance(value, Tensor):
        return False
    if (value.shape, value.dtype, value.is_meta) != (own.shape, own.dtype, own.is_meta):
        return False
    places = [[(part.stride(), part.storage_offset()) for part in plain_parts(tensor)] for tensor in (value, own)]
    return value.is_meta or (places[0] == places[1] and addresses_of(value) == addresses_of(own))


def _join_metadata(joined: OrderedDict[str, Any], given: Any, names: CleanNames) -> None:
    """Adds the metadata of one part of a model, by clean names; that of a wrapper gives way to what it wraps.

    Raises:
        TreeError: another part has different metadata for a module of this name.
    """
    own = {names.key(raw)[-1]: local for raw, local in given.items()} if isinstance(given, Mapping) else {}
    for name, local in own.items():
        if joined.setdefault(name, local) != local:
            raise TreeError(
                f"model.{METADATA}[{name!r}]",
                expected=f"the same in each part of the model: {joined[name]!r:.80}",
                found=f"{local!r:.80}",
                hint="Give the parts as a dict of names, {'first': ..., 'second': ...}",
            )


class _ModuleMemory:
    """The memory addresses of a module's parameters and buffers."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    @cached_property
    def _addresses(self) -> tuple[set[int], set[int]]:
        parts = self._root.parameters(), self._root.buffers()
        parameters, buffers = (
            {a for tensor in part if not is_lazy(tensor) for a in addresses_of(tensor)} for part in parts
        )
        return parameters, buffers

    def kind_of(self, tensor: Tensor) -> tuple[str, bool]:
        """Returns the kind of a tensor that is no parameter or buffer, and whether it shows only memory of these."""
        parameters, buffers = self._addresses
        shown = set(addresses_of(tensor))
        if shown & buffers:
            return "buffer", shown <= parameters | buffers
        return "made", (bool(shown) or is_sharded_tensor(tensor)) and shown <= parameters


def addresses_of(tensor: Any) -> list[int]:
    """Returns the start addresses of the memory of this rank's part; none for a tensor without memory."""
    if is_sharded_tensor(tensor):
        return [address for shard in tensor.local_shards() for address in addresses_of(shard.tensor)]
    parts = map(local_part, plain_parts(tensor))
    return [start for part in parts if not part.is_meta and (start := part.untyped_storage().data_ptr())]


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that one is made of, which have its memory; itself where it is not made of others."""
    parts = take_apart(tensor, "")
    return [tensor] if parts is None else [leaf for _, leaf in flatten(parts)[1] if isinstance(leaf, Tensor)]


def local_part(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this rank has, detached."""
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()  # pyright: ignore[reportAttributeAccessIssue]


def is_meta(value: Any) -> bool:
    """Whether a tensor has no memory."""
    return not is_sharded_tensor(value) and value.is_meta


class CleanNames:
    """The names in a module without the steps that wrappers add."""

    def __init__(self, root: nn.Module, prefix: Key) -> None:
        self._root, self._prefix = root, prefix
        self.wrapper_steps: dict[str, list[str]] = {}
        """The steps that the wrappers around a module add, by its clean name."""
        self._modules: dict[str, nn.Module] = {}
        self.chains: dict[str, list[nn.Module]] = {}
        """The wrappers of each module and the module itself, from the outside in, by its clean name."""
        self._walk(root, "")

    def _walk(self, module: nn.Module, name: str) -> None:
        self.chains.setdefault(name, []).append(module)
        step_name = _wrapper_step_of(module, name)
        if step_name is not None:
            self.wrapper_steps.setdefault(name, []).append(step_name)
            self._walk(getattr(module, step_name), name)
            return
        self._modules[name] = module
        for step, child in module._modules.items():
            if child is not None:
                self._walk(child, f"{name}.{step}" if name else step)

    def key(self, raw: str) -> Key:
        """Returns the key of an entry of the root's state dict."""
        return (*self._prefix, strip_wrappers(raw, self.wrapper_steps))

    def entry(self, raw: str, value: Any) -> StateDictEntry:
        """Returns an entry of the root's state dict, as that of a parameter."""
        key = self.key(raw)
        parent, _, name = key[-1].rpartition(".")
        module = self._modules.get(parent, self._root)
        return StateDictEntry(key, "parameter", value, module, name, root=self._root)


def _wrapper_step_of(module: nn.Module, name: str) -> str | None:
    for kind in type(module).__mro__:
        full = f"{kind.__module__}.{kind.__qualname__}"
        if full == _FLAT:
            raise TreeError(
                f"model/{name}",
                expected="a module whose parameters have names",
                found="FullyShardedDataParallel, which joins them into flat ones",
                hint="Use fully_shard (FSDP2). Or save {'model': a, 'optimizer': b} of a, b = get_state_dict(model, "
                "optimizer) of treeckpt.dcp.state_dict with tc.save; to resume, fill it with tc.load_into, and call "
                "set_state_dict. training.restore reads it too, into models of other layouts",
            )
        if full in _WRAPPERS:
            return _WRAPPERS[full]
    return None


def buffer_owners(root: nn.Module) -> dict[int, bool]:
    """Returns, by identity of each module and buffer, whether this rank saves the latter: is the first that holds it.

    The ranks are those of the wrappers and distributed parameters in the smallest submodule around the buffer that has
    any: experts may be on other ranks than the modules around them. Buffers without any are not in the result.
    """
    saves: dict[int, bool] = {}

    def walk(module: nn.Module) -> tuple[list[bool], list[int]]:
        """Returns whether this rank is first in each process group of the module, and the undecided buffers."""
        firsts, waiting = _firsts(module), [id(owner) for owner in (module, *module.buffers(recurse=False))]
        for child in module.children():
            below = walk(child)
            firsts += below[0]
            waiting += below[1]
        if firsts:
            # A module that stands at several places is found at each; it is enough that this rank is first at one.
            saves.update((buffer, saves.get(buffer, False) or all(firsts)) for buffer in waiting)
            waiting = []
        return firsts, waiting

    walk(root)
    return saves


def _firsts(module: nn.Module) -> list[bool]:
    """Returns whether this rank is first in the process groups of a wrapper and of a module's own parameters."""
    meshes = {p.device_mesh for p in module.parameters(recurse=False) if is_dtensor(p)}  # type: ignore[attr-defined]
    # A rank that is not in the mesh has no coordinate.
    firsts = [(place := mesh.get_coordinate()) is not None and not any(place) for mesh in meshes]
    group = getattr(module, "process_group", None)
    if group is not None and type(module).__module__ == "torch.nn.parallel.distributed":
        firsts.append(group.rank() == 0)
    return firsts


# meta tensors ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def allocate_meta_tensors(entries: Sequence[StateDictEntry], device: str | torch.device | None) -> list[str]:
    """Allocates memory, for this rank's part only, for entries on the meta device; returns their paths.

    A parameter stays the same object, so an optimizer that was built before keeps it.

    Args:
        device: for plain tensors, by default torch's default device; a DTensor is on the device of its mesh.
    """
    new_tensors: dict[int, Tensor] = {}
    paths: list[str] = []
    for entry in entries:
        if not isinstance(entry.value, Tensor) or not is_meta(entry.value):
            continue
        old: Any = entry.value
        if id(old) not in new_tensors:
            where = old.device_mesh.device_type if is_dtensor(old) else device or torch.get_default_device()
            new_tensors[id(old)] = new = torch.empty_like(old, device=where)
            if isinstance(old, nn.Parameter):
                torch.utils.swap_tensors(old, nn.Parameter(new, requires_grad=old.requires_grad))
                new_tensors[id(old)] = old
        if entry.kind == "buffer" and entry.name in entry.module._buffers:
            entry.module._buffers[entry.name] = new_tensors[id(old)]
        entry.value = new_tensors[id(old)]
        paths.append(entry.path)
    return paths


def on_meta(model: Modules) -> list[str]:
    """Returns the paths of parameters and buffers, persistent or not, on the meta device."""
    paths: list[str] = []
    for prefix, root in named_objects(model, nn.Module, "model"):
        names, tensors = CleanNames(root, prefix), [*root.named_parameters(), *root.named_buffers()]
        paths += [f"model/{key_path(names.key(raw))}" for raw, tensor in tensors if tensor.is_meta]
    return paths


def reset_fsdp_shards(model: Modules) -> None:
    """Resets the sharded parameters of FSDP2, which pads uneven shards and keeps references to their memory."""
    for _, root in named_objects(model, nn.Module, "model"):
        for module in root.modules():
            state = getattr(module, "_get_fsdp_state", None)
            for group in state()._fsdp_param_groups if state is not None else ():
                for shard in group.fsdp_params:
                    shard.reset_sharded_param()


# names ----------------------------------------------------------------------------------------------------------------

Key = tuple[str, ...]
"""Steps from the root of the models, or of the optimizers, to an object; the last is the dotted name."""


def strip_wrappers(name: str, wrapper_steps: Mapping[str, Sequence[str]]) -> str:
    """Returns the dotted name without the steps that wrappers added.

    Args:
        wrapper_steps: by the clean name of the wrapped module, the steps that its wrappers add, from the outside in.
    """
    clean: list[str] = []
    pending = list(wrapper_steps.get("", ()))
    for step in name.split("."):
        if step in pending:  # some wrappers remove their own step already: those before it are skipped
            del pending[: pending.index(step) + 1]
        else:
            clean.append(step)
            pending = list(wrapper_steps.get(".".join(clean), ()))
    return ".".join(clean)


def wrapped_modules(root: nn.Module) -> dict[str, str]:
    """Returns the names that the state dict of a module has for modules in wrappers, by their clean names."""
    names, found = CleanNames(root, ()), dict[str, str]()
    for raw in live_state_dict(root, "model") if names.wrapper_steps else ():
        [clean] = names.key(raw)
        module, rest = _split_name(clean, names.wrapper_steps)
        if raw != clean and module is not None:
            found[module] = raw.removesuffix(rest).removesuffix(".")
    return found


def with_wrappers(name: str, wrapped: Mapping[str, str]) -> str:
    """Returns the name in a state dict of what has a clean name; the inverse of `strip_wrappers`.

    Args:
        wrapped: as `wrapped_modules` returns it.
    """
    module, rest = _split_name(name, wrapped)
    return name if module is None else ".".join(part for part in (wrapped[module], rest) if part)


def _split_name(name: str, modules: Container[str]) -> tuple[str | None, str]:
    """Returns the innermost of some modules around what has a name, None without any, and the name inside of it."""
    steps = name.split(".") if name else []
    for depth in range(len(steps), -1, -1):
        if (module := ".".join(steps[:depth])) in modules:
            return module, ".".join(steps[depth:])
    return None, name


def key_path(key: Key) -> str:
    """Returns a key as the text of a path: `generator/0.weight`."""
    return "/".join(key_text(step) for step in key)


def parse_key(text: str) -> Key:
    """Returns the key of a path; the inverse of `key_path`."""
    return tuple(step.removeprefix("~s") if step.startswith("~s") else step for step in parse_path(text))


def nested(pairs: Iterable[tuple[Key, Any]]) -> dict[str, Any]:
    """Returns nested dicts of (key, value) pairs."""
    root: dict[str, Any] = {}
    for key, value in pairs:
        put_in(root, key, value)
    return root


def with_metadata(tree: dict[str, Any], metadata: Mapping[Key, OrderedDict[str, Any]]) -> dict[str, Any]:
    """Returns the nested dicts of several models, that of each an OrderedDict with its metadata, as torch gives one.

    Args:
        metadata: by the key of each model; empty where a model has none.
    """
    for key, own in metadata.items():
        part = get_in(tree, key)
        if part is None:
            continue  # all of this model was left out
        made: Any = OrderedDict(part)
        if own:
            setattr(made, METADATA, own)
        if key:
            get_in(tree, key[:-1])[key[-1]] = made
        else:
            tree = made
    return tree


def put_in(root: dict[str, Any], key: Key, value: Any) -> None:
    """Sets the value of a key in nested dicts.

    Raises:
        TreeError: the key, or a prefix of it, has a value.
    """
    node = root
    for step in key[:-1]:
        node = node.setdefault(step, {})
    if key[-1] in node:
        raise TreeError(
            key_path(key),
            expected="one value for each name",
            found="two",
            hint="Give several models or optimizers as a dict of names, {'generator': ..., 'discriminator': ...}; "
            "a list is for the parts of one, whose names differ",
        )
    node[key[-1]] = value


def get_in(root: Any, key: Sequence[Any], default: Any = None) -> Any:
    """Returns the value of a key in nested dicts, or `default`."""
    for step in key:
        if not isinstance(root, Mapping) or step not in root:
            return default
        root = root[step]
    return root


def tie_names(names: Iterable[tuple[Key, int]]) -> dict[int, tuple[Key, ...]]:
    """Returns the sorted names of each object by identity; the first is its name, independent of the model's order."""
    keys_of_object: dict[int, list[Key]] = {}
    for key, identity in names:
        keys_of_object.setdefault(identity, []).append(key)
    return {identity: tuple(sorted(keys)) for identity, keys in keys_of_object.items()}
