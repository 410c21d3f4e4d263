"""The entries of a model's state dict by clean names, and memory for models on the meta device.

The entries are those of `state_dict`: with hooks and `get_extra_state`, without non-persistent buffers, under names
without the steps of wrappers. A buffer that is no DTensor has a copy on every rank, and these may differ (batch
statistics do): the first rank of the wrapper or mesh around the module saves it, or as `training.state` is told.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parameter import is_lazy

from ..arrays.dtensor import is_dtensor, is_sharded_tensor
from ..arrays.stateful import is_optimizer
from ..errors import MismatchError, TreeError
from .names import Key, key_path, nested, strip_wrappers, tie_names

Modules = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]

_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
}
"""Wrapper classes, and the step that each adds to names."""

_FLAT = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"


class StateDictEntry(msgspec.Struct):
    """One entry of a model's state dict."""

    key: Key
    kind: str
    """"parameter", "buffer", "extra" (what `get_extra_state` gave) or "made" (a tensor that a hook of `state_dict`
    created)."""
    value: Any
    module: nn.Module
    """The module that it is registered in."""
    name: str
    """Its name in that module."""
    owned: bool | None = True
    """Whether this rank saves it, where ranks may differ; None where nothing tells which ranks hold the module."""
    live: bool = True
    """Whether filling it fills the model. A hook of `state_dict` may create tensors of its own, which are passed to
    `load_state_dict` afterwards."""
    root: Any = None
    raw: str = ""
    """Its name in the state dict of the root."""


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
    """Of its state dict."""
    hidden: list[StateDictEntry]
    """The parameters that a hook of `state_dict` left out, under their own names."""
    ties: dict[int, tuple[Key, ...]]
    """The names of each parameter, by identity."""
    shards: dict[int, tuple[Any, Any]]
    """(global shape, offset) of parameters that are shards of a ShardedTensor, by identity."""


def collect_entries(model: Modules) -> ModelEntries:
    """Returns the entries of a model.

    Raises:
        TreeError: flat parameters, whose names are lost; two parts with one name.
    """
    roots = named_objects(model, nn.Module, "model")
    entries = [entry for prefix, root in roots for entry in _collect_one(root, prefix)]
    _check_buffers(entries)
    nested((entry.key, None) for entry in entries)  # raises for two entries with one name
    there, hidden = {id(entry.value) for entry in entries}, list[StateDictEntry]()
    for prefix, root in roots:
        names, parameters = _CleanNames(root, prefix), root.named_parameters(remove_duplicate=False)
        hidden += [names.entry(raw, parameter) for raw, parameter in parameters if id(parameter) not in there]
    every = (*entries, *hidden)
    ties = tie_names((entry.key, id(entry.value)) for entry in every if isinstance(entry.value, nn.Parameter))
    shards: dict[int, tuple[Any, Any]] = {}
    for whole in (entry.value for entry in entries if is_sharded_tensor(entry.value)):
        for shard, tensor in itertools.product(whole.local_shards(), (entry.value for entry in hidden)):
            if tensor.shape == shard.tensor.shape and _addresses(tensor) == _addresses(shard.tensor):
                shards[id(tensor)] = tuple(whole.metadata().size), tuple(shard.metadata.shard_offsets)
    return ModelEntries(entries, hidden, ties, shards)


def _check_buffers(entries: Sequence[StateDictEntry]) -> None:
    """Refuses parts of a model, as stages of a pipeline on one rank, of which only buffers have a name in common."""
    counts = Counter(entry.key for entry in entries)
    twice = [entry for entry in entries if counts[entry.key] > 1]
    if twice and all(entry.kind == "buffer" for entry in twice):
        raise TreeError(
            key_path(twice[0].key),
            expected="one value for each name",
            found="a buffer of two parts on this rank",
            hint="If the modules compute it, register it with persistent=False in all but one. Else give the parts as "
            "a dict of names, {'first': ..., 'second': ...}: such a checkpoint is restored into parts of these names",
        )


def _collect_one(root: nn.Module, prefix: Key) -> Iterator[StateDictEntry]:
    found = root.state_dict(keep_vars=True)  # first: it makes FSDP2 reshard parameters that a forward left unsharded
    names = _CleanNames(root, prefix)
    saves_buffer, identities = buffer_owners(root), set(map(id, (*root.parameters(), *root.buffers())))
    memory = _ModuleMemory(root)
    for raw, value in found.items():
        entry = names.entry(raw, value)
        if entry.name == _EXTRA_STATE_KEY_SUFFIX or not isinstance(value, Tensor):
            entry.kind = "extra"
        elif id(value) in identities:
            entry.kind = "parameter" if isinstance(value, nn.Parameter) else "buffer"
            entry.owned = entry.kind != "buffer" or is_dtensor(value) or saves_buffer.get(id(value))
        else:
            entry.kind, entry.live = memory.kind_of(value)
            entry.value = value if is_sharded_tensor(value) else value.detach()
        yield entry


class _ModuleMemory:
    """The memory addresses of a module's parameters and buffers."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    @cached_property
    def _addresses(self) -> tuple[set[int], set[int]]:
        parts = self._root.parameters(), self._root.buffers()
        parameters, buffers = ({a for one in part if not is_lazy(one) for a in _addresses(one)} for part in parts)
        return parameters, buffers

    def kind_of(self, tensor: Tensor) -> tuple[str, bool]:
        """Returns the kind of a tensor that is no parameter or buffer, and whether it shows only memory of these."""
        parameters, buffers = self._addresses
        shown = set(_addresses(tensor))
        if shown & buffers:
            return "buffer", shown <= parameters | buffers
        return "made", (bool(shown) or is_sharded_tensor(tensor)) and shown <= parameters


def _addresses(tensor: Any) -> list[int]:
    """Returns the start addresses of the memory of this rank's part; none for a tensor without memory."""
    if is_sharded_tensor(tensor):
        return [address for shard in tensor.local_shards() for address in _addresses(shard.tensor)]
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    return [] if local.is_meta or not (address := local.untyped_storage().data_ptr()) else [address]


def is_meta(value: Any) -> bool:
    """Whether a tensor has no memory."""
    return not is_sharded_tensor(value) and value.is_meta


def load_hook_tensors(entries: Sequence[StateDictEntry], filled: Sequence[StateDictEntry]) -> None:
    """Loads filled tensors that hooks of `state_dict` created into their modules, by `load_state_dict`.

    Raises:
        MismatchError: a module does not take a name of its own state dict.
    """
    for root in {id(entry.root): entry.root for entry in filled if not entry.live}.values():
        if left := _load_own_tensors(root, entries):
            raise MismatchError(
                f"model/{left[0]}",
                expected="a name that the model's load_state_dict takes, as its state_dict has it",
                found=f"{len(left)} that it does not",
                hint="Register a hook with register_load_state_dict_pre_hook that takes them back",
            )


def derive_from_tensors(entries: Sequence[StateDictEntry], filled: Sequence[StateDictEntry]) -> None:
    """Runs `load_state_dict` of models whose modules derive something in it, with the tensors that they have."""
    for root in {id(entry.root): entry.root for entry in filled}.values():
        if any(map(_has_code_for_load, root.modules())):
            _load_own_tensors(root, entries)


def _load_own_tensors(root: nn.Module, entries: Sequence[StateDictEntry]) -> list[str]:
    """Loads a model's tensors into itself; returns the names that it does not take."""
    state = {entry.raw: entry.value for entry in entries if entry.root is root and entry.kind != "extra"}
    return root.load_state_dict(state, strict=False).unexpected_keys


def _has_code_for_load(module: nn.Module) -> bool:
    """Whether code that is not torch's runs when a module is loaded: a hook afterwards, or a method of its class."""
    code = (
        *module._load_state_dict_post_hooks.values(),
        type(module)._load_from_state_dict,
        type(module).load_state_dict,
    )
    return not all((getattr(one, "__module__", None) or "").startswith("torch.") for one in code)


def has_load_hook(entry: StateDictEntry) -> bool:
    """Whether a module around an entry has its own code for `load_state_dict`."""
    base, root = nn.Module, entry.root
    around = [root] + [m for name, m in root.named_modules() if entry.raw.startswith(f"{name}.")]
    return any(
        one._load_state_dict_pre_hooks
        or type(one)._load_from_state_dict is not base._load_from_state_dict
        or type(one).load_state_dict is not base.load_state_dict
        for one in around
    )


class _CleanNames:
    """The names in a module without the steps that wrappers add."""

    def __init__(self, root: nn.Module, prefix: Key) -> None:
        self._root, self._prefix = root, prefix
        self._wrapper_steps: dict[str, list[str]] = {}
        self._modules: dict[str, nn.Module] = {}
        self._walk(root, "")

    def _walk(self, module: nn.Module, name: str) -> None:
        step_name = _wrapper_step_of(module, name)
        if step_name is not None:
            self._wrapper_steps.setdefault(name, []).append(step_name)
            self._walk(getattr(module, step_name), name)
            return
        self._modules[name] = module
        for step, child in module._modules.items():
            if child is not None:
                self._walk(child, f"{name}.{step}" if name else step)

    def key(self, raw: str) -> Key:
        """Returns the key of an entry of the root's state dict."""
        return (*self._prefix, strip_wrappers(raw, self._wrapper_steps))

    def entry(self, raw: str, value: Any) -> StateDictEntry:
        """Returns an entry of the root's state dict, as that of a parameter."""
        key = self.key(raw)
        parent, _, name = key[-1].rpartition(".")
        module = self._modules.get(parent, self._root)
        return StateDictEntry(key, "parameter", value, module, name, root=self._root, raw=raw)


def _wrapper_step_of(module: nn.Module, name: str) -> str | None:
    for kind in type(module).__mro__:
        full = f"{kind.__module__}.{kind.__qualname__}"
        if full == _FLAT:
            raise TreeError(
                f"model/{name}",
                expected="a module whose parameters have names",
                found="FullyShardedDataParallel, which joins them into flat ones",
                hint="Use fully_shard (FSDP2), or save FSDP.state_dict_type(..., SHARDED_STATE_DICT) with tc.save",
            )
        if full in _WRAPPERS:
            return _WRAPPERS[full]
    return None


def buffer_owners(root: nn.Module) -> dict[int, bool]:
    """Returns, by identity of each buffer, whether this rank saves it: whether it is the first that holds its module.

    The ranks are those of the wrappers and distributed parameters in the smallest submodule around the buffer that has
    any: experts may be on other ranks than the modules around them. Buffers without any are not in the result.
    """
    found: dict[int, bool] = {}

    def walk(module: nn.Module) -> tuple[list[bool], list[int]]:
        """Returns whether this rank is first in each process group of the module, and the undecided buffers."""
        firsts, waiting = _firsts(module), [id(buffer) for buffer in module.buffers(recurse=False)]
        for child in module.children():
            below = walk(child)
            firsts += below[0]
            waiting += below[1]
        if firsts:
            found.update((buffer, found.get(buffer, False) or all(firsts)) for buffer in waiting)
            waiting = []
        return firsts, waiting

    walk(root)
    return found


def _firsts(module: nn.Module) -> list[bool]:
    """Returns whether this rank is first in the process groups of a wrapper and of a module's own parameters."""
    meshes = {p.device_mesh for p in module.parameters(recurse=False) if is_dtensor(p)}  # type: ignore[attr-defined]
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
        if entry.kind == "extra" or not is_meta(entry.value):
            continue
        old = entry.value
        if id(old) not in new_tensors:
            where = old.device_mesh.device_type if is_dtensor(old) else device or torch.get_default_device()
            new_tensors[id(old)] = new = torch.empty_like(old, device=where)
            if isinstance(old, nn.Parameter):
                torch.utils.swap_tensors(old, nn.Parameter(new, requires_grad=old.requires_grad))
                new_tensors[id(old)] = old
        if entry.kind == "buffer" and entry.name in entry.module._buffers:
            entry.module._buffers[entry.name] = new_tensors[id(old)]
        entry.value = new_tensors[id(old)]
        paths.append(f"model/{key_path(entry.key)}")
    return paths


def on_meta(model: Modules) -> list[str]:
    """Returns the paths of parameters and buffers, persistent or not, on the meta device."""
    found: list[str] = []
    for prefix, root in named_objects(model, nn.Module, "model"):
        names, tensors = _CleanNames(root, prefix), [*root.named_parameters(), *root.named_buffers()]
        found += [f"model/{key_path(names.key(raw))}" for raw, tensor in tensors if tensor.is_meta]
    return found


def reset_fsdp_shards(model: Modules) -> None:
    """Resets the sharded parameters of FSDP2, which pads uneven shards and keeps references to their memory."""
    for _, root in named_objects(model, nn.Module, "model"):
        for module in root.modules():
            state = getattr(module, "_get_fsdp_state", None)
            for group in state()._fsdp_param_groups if state is not None else ():
                for shard in group.fsdp_params:
                    shard.reset_sharded_param()
