"""What a model holds, under which names, and how a model without memory gets some.

The content is what `state_dict` gives, hooks and `get_extra_state` included and non-persistent buffers not, under
names without the steps of wrappers. A buffer that is no DTensor has a copy on every rank, and these may differ
(batch statistics do): the first of the ranks that have the module speaks for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parameter import is_lazy

from ..arrays.dtensor import is_dtensor
from ..arrays.stateful import is_optimizer
from ..errors import MismatchError, TreeError
from .names import Key, key_path, nested, strip_wrappers

__all__ = [
    "Modules",
    "StateDictEntry",
    "allocate_meta_tensors",
    "buffer_owners",
    "collect_entries",
    "named_objects",
    "on_meta",
    "reset_fsdp_shards",
    "shards_of",
]

Modules = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]

_HOPS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
}
"""Wrappers by class, and the step that each adds to names."""

_FLAT = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"


class StateDictEntry(msgspec.Struct):
    """One entry of a model's state dict."""

    key: Key
    kind: str
    """"parameter", "buffer", "extra" (what `get_extra_state` gave) or "made" (a tensor that a hook of `state_dict` put
    there)."""
    value: Any
    module: nn.Module
    """Where it is registered."""
    name: str
    """Its name there."""
    owned: bool = True
    """Whether this rank is the one that saves it, where ranks may differ."""
    live: bool = True
    """Whether filling it fills the model: a hook of `state_dict` may make tensors of its own, which are handed to
    `load_state_dict`."""
    root: Any = None
    raw: str = ""
    """Its name in the state dict of the root."""


def named_objects(given: Any, kind: type, what: str) -> list[tuple[Key, Any]]:
    """(prefix, object) of one object, of the parts of one (a sequence), or of several by name (a dict).

    Raises:
        TreeError: something of another class.
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
            )
    return pairs


def _is_state_dict(given: Any) -> bool:
    """Whether something is the state dict of a module or an optimizer, or holds one."""
    if not isinstance(given, Mapping) or isinstance(given, nn.Module):
        return False
    if {"state", "param_groups"} <= set(given):
        return True
    return any(isinstance(part, Tensor) or _is_state_dict(part) for part in given.values())


def _state_dict_error(path: str, noun: str) -> TreeError:
    return TreeError(
        path, expected=f"the {noun} itself", found="a state dict", hint=f"Give the {noun}, not its state_dict"
    )


def collect_entries(model: Modules) -> list[StateDictEntry]:
    """Everything that a model's state dict holds; parameters and buffers are the live objects.

    Raises:
        TreeError: flat parameters, whose names are lost; two parts with one name.
    """
    entries: list[StateDictEntry] = []
    for prefix, module in named_objects(model, nn.Module, "model"):
        entries += _collect_one(module, prefix)
    nested((entry.key, None) for entry in entries)  # finds two with one name
    return entries


def _collect_one(root: nn.Module, prefix: Key) -> Iterator[StateDictEntry]:
    found = root.state_dict(keep_vars=True)  # first: FSDP2 shards parameters again that a forward has left whole
    hops, modules = _scan(root)
    speaks, identities = buffer_owners(root), set(map(id, (*root.parameters(), *root.buffers())))
    memory = _ModuleMemory(root)
    for raw, value in found.items():
        name = strip_wrappers(raw, hops)
        parent, _, last = name.rpartition(".")
        module = modules.get(parent, root)
        if last == _EXTRA_STATE_KEY_SUFFIX or not isinstance(value, Tensor):
            yield StateDictEntry((*prefix, name), "extra", value, module, last, root=root, raw=raw)
        elif id(value) in identities:
            kind = "parameter" if isinstance(value, nn.Parameter) else "buffer"
            owned = kind != "buffer" or is_dtensor(value) or speaks.get(id(value), True)
            yield StateDictEntry((*prefix, name), kind, value, module, last, owned, root=root, raw=raw)
        else:
            kind, live = memory.kind_of(value)
            shown = value if is_sharded_tensor(value) else value.detach()
            yield StateDictEntry((*prefix, name), kind, shown, module, last, True, live, root, raw)


class _ModuleMemory:
    """The memory of a module's parameters and buffers."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    @cached_property
    def _addresses(self) -> tuple[set[int], set[int]]:
        parts = self._root.parameters(), self._root.buffers()
        parameters, buffers = ({a for one in part if not is_lazy(one) for a in _addresses(one)} for part in parts)
        return parameters, buffers

    def kind_of(self, tensor: Tensor) -> tuple[str, bool]:
        """The kind of a tensor that is no parameter or buffer, and whether all of it is memory of these."""
        parameters, buffers = self._addresses
        shown = set(_addresses(tensor))
        if shown & buffers:
            return "buffer", shown <= parameters | buffers
        return "made", (bool(shown) or is_sharded_tensor(tensor)) and shown <= parameters


def _addresses(tensor: Any) -> list[int]:
    """Where the memory of this rank's part begins; nothing of what has none."""
    if is_sharded_tensor(tensor):
        return [address for shard in tensor.local_shards() for address in _addresses(shard.tensor)]
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    return [] if local.is_meta or not (address := local.untyped_storage().data_ptr()) else [address]


def is_sharded_tensor(value: object) -> bool:
    """Whether a tensor is torch.distributed's ShardedTensor, which has next to no operators."""
    return type(value).__name__ == "ShardedTensor"


def is_meta(value: Any) -> bool:
    """Whether a tensor has no memory."""
    return not is_sharded_tensor(value) and value.is_meta


def hidden_parameters(model: Modules, entries: Sequence[StateDictEntry]) -> list[StateDictEntry]:
    """The parameters that a hook of `state_dict` has left out, under their own names."""
    there = {id(entry.value) for entry in entries}
    found: list[StateDictEntry] = []
    for prefix, root in named_objects(model, nn.Module, "model"):
        hops, modules = _scan(root)
        for raw, parameter in root.named_parameters(remove_duplicate=False):
            if id(parameter) not in there:
                name = strip_wrappers(raw, hops)
                parent, _, last = name.rpartition(".")
                module: Any = modules.get(parent, root)
                found.append(StateDictEntry((*prefix, name), "parameter", parameter, module, last, root=root, raw=raw))
    return found


def shards_of(entries: Sequence[StateDictEntry], left_out: Sequence[StateDictEntry]) -> dict[int, tuple[Any, Any]]:
    """By identity of each parameter that is a shard of a ShardedTensor in the state dict: shape of that, and offset."""
    shards = [shard for entry in entries if is_sharded_tensor(entry.value) for shard in entry.value.local_shards()]
    wholes = [entry.value for entry in entries if is_sharded_tensor(entry.value) for _ in entry.value.local_shards()]
    found: dict[int, tuple[Any, Any]] = {}
    for whole, shard in zip(wholes, shards, strict=True):
        for entry in left_out:
            tensor = entry.value
            if tensor.shape == shard.tensor.shape and _addresses(tensor) == _addresses(shard.tensor):
                found[id(tensor)] = tuple(whole.metadata().size), tuple(shard.metadata.shard_offsets)
    return found


def load_hook_tensors(entries: Sequence[StateDictEntry], filled: Sequence[StateDictEntry]) -> None:
    """Has modules whose hooks of `state_dict` made tensors take them back, once these are filled.

    Raises:
        MismatchError: a module does not take what its own state dict has.
    """
    for root in {id(entry.root): entry.root for entry in filled if not entry.live}.values():
        state = {entry.raw: entry.value for entry in entries if entry.root is root and entry.kind != "extra"}
        left = root.load_state_dict(state, strict=False).unexpected_keys
        if left:
            raise MismatchError(
                f"model/{left[0]}",
                expected="a name that the model's load_state_dict takes, as its state_dict has it",
                found=f"{len(left)} that it does not",
                hint="Register a hook with register_load_state_dict_pre_hook that takes them back",
            )


def has_load_hook(entry: StateDictEntry) -> bool:
    """Whether a module around an entry has code of its own for `load_state_dict`."""
    base, root = nn.Module, entry.root
    around = [root] + [m for name, m in root.named_modules() if entry.raw.startswith(f"{name}.")]
    return any(
        one._load_state_dict_pre_hooks
        or type(one)._load_from_state_dict is not base._load_from_state_dict
        or type(one).load_state_dict is not base.load_state_dict
        for one in around
    )


def _scan(root: nn.Module) -> tuple[dict[str, list[str]], dict[str, nn.Module]]:
    """The hops of wrappers, and the modules below them, by clean name."""
    hops: dict[str, list[str]] = {}
    modules: dict[str, nn.Module] = {}

    def walk(module: nn.Module, name: str) -> None:
        hop = _hop_of(module, name)
        if hop is not None:
            hops.setdefault(name, []).append(hop)
            walk(getattr(module, hop), name)
            return
        modules[name] = module
        for step, child in module._modules.items():
            if child is not None:
                walk(child, f"{name}.{step}" if name else step)

    walk(root, "")
    return hops, modules


def _hop_of(module: nn.Module, name: str) -> str | None:
    for kind in type(module).__mro__:
        full = f"{kind.__module__}.{kind.__qualname__}"
        if full == _FLAT:
            raise TreeError(
                f"model/{name}",
                expected="a module whose parameters have names",
                found="FullyShardedDataParallel, which joins them into flat ones",
                hint="Use fully_shard (FSDP2), or save FSDP.state_dict_type(..., SHARDED_STATE_DICT) with tc.save",
            )
        if full in _HOPS:
            return _HOPS[full]
    return None


def buffer_owners(root: nn.Module) -> dict[int, bool]:
    """By identity of each buffer whether this rank saves it, as the first of the ranks that have its module.

    Which these are is told by the wrappers and distributed parameters in the smallest part of the model around the
    buffer that has any: experts may be laid over other ranks than what is around them. Where nothing tells, each rank
    speaks, and the save compares what they say.
    """
    found: dict[int, bool] = {}

    def walk(module: nn.Module) -> tuple[list[bool], list[int]]:
        """Whether this rank comes first in each group that the module is laid over; buffers that wait for an answer."""
        firsts, waiting = _firsts(module), [id(buffer) for buffer in module.buffers(recurse=False)]
        for child in module.children():
            below = walk(child)
            firsts += below[0]
            waiting += below[1]
        if firsts:
            found.update((buffer, found.get(buffer, False) or all(firsts)) for buffer in waiting)
            waiting = []
        return firsts, waiting

    _, rest = walk(root)
    return found | dict.fromkeys(rest, True)


def _firsts(module: nn.Module) -> list[bool]:
    """Whether this rank comes first in the groups of a wrapper, and of a module's own parameters."""
    meshes = {p.device_mesh for p in module.parameters(recurse=False) if is_dtensor(p)}  # type: ignore[attr-defined]
    firsts = [(place := mesh.get_coordinate()) is not None and not any(place) for mesh in meshes]
    group = getattr(module, "process_group", None)
    if group is not None and type(module).__module__ == "torch.nn.parallel.distributed":
        firsts.append(group.rank() == 0)
    return firsts


# without memory -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def allocate_meta_tensors(entries: Sequence[StateDictEntry], device: str | torch.device | None) -> list[str]:
    """Gives memory, of this rank's part only, to what stands on the meta device; returns the paths.

    A parameter stays the same object, so an optimizer that was built before goes on with it.

    Args:
        device: for plain tensors, by default torch's default device; a DTensor goes to its mesh's.
    """
    made: dict[int, Tensor] = {}
    touched: dict[int, nn.Module] = {}
    paths: list[str] = []
    for entry in entries:
        if entry.kind == "extra" or not is_meta(entry.value):
            continue
        old = entry.value
        if id(old) not in made:
            where = old.device_mesh.device_type if is_dtensor(old) else device or torch.get_default_device()
            new = torch.empty_like(old, device=where)
            made[id(old)] = _swapped(old, new)
        if entry.kind == "buffer" and entry.name in entry.module._buffers:
            entry.module._buffers[entry.name] = made[id(old)]
        entry.value = made[id(old)]
        touched[id(entry.module)] = entry.module
        paths.append(f"model/{key_path(entry.key)}")
    return paths


def _swapped(old: Tensor, new: Tensor) -> Tensor:
    if not isinstance(old, nn.Parameter):
        return new
    torch.utils.swap_tensors(old, nn.Parameter(new, requires_grad=old.requires_grad))
    return old


def on_meta(model: Modules) -> list[str]:
    """The paths of parameters and buffers, persistent or not, that stand on the meta device."""
    found: list[str] = []
    for prefix, root in named_objects(model, nn.Module, "model"):
        hops, _ = _scan(root)
        tensors = [*root.named_parameters(), *root.named_buffers()]
        names = [strip_wrappers(name, hops) for name, tensor in tensors if tensor.is_meta]
        found += [f"model/{key_path((*prefix, name))}" for name in names]
    return found


def reset_fsdp_shards(model: Modules) -> None:
    """Has FSDP2 look at its parameters again: it pads uneven shards, and keeps references to their memory."""
    for _, root in named_objects(model, nn.Module, "model"):
        for module in root.modules():
            state = getattr(module, "_get_fsdp_state", None)
            for group in state()._fsdp_param_groups if state is not None else ():
                for shard in group.fsdp_params:
                    shard.reset_sharded_param()
