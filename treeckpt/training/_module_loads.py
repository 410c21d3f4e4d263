"""What the modules of a model take of a checkpoint: tensors that are filled in place, or all by load code of their own.

For those that are filled, what was saved has to fit in kind, shape and dtype, and to agree where several names are one
tensor. A module with load code of its own gets what was saved of it, as it was saved, by `load_state_dict`.

Own code is an override of `_load_from_state_dict`, a hook before it, `set_extra_state`, or an override of
`load_state_dict` of a model itself. It may rename, migrate, resize and assign. So nothing at or below such a module is
compared: what was saved there is read into new tensors, and passed with the saved metadata. Torch's own layers migrate
older weights alone; they count where their metadata or names differ from the saved ones. A module whose state dict has
ShardedTensors, as large tables are, is filled in place.

This code runs before any other tensor is filled, and where it fails what it changed is put back.
"""

from __future__ import annotations

import bisect
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys
from torch.nn.parameter import is_lazy

from .._arrays.dtensor import is_dtensor, is_sharded_tensor
from .._arrays.registry import any_in_parts, new_array, parts_adapter, take_apart
from .._arrays.stateful import StatePlan, load_code_of, object_states, plan_state
from .._arrays.torch import dtype_name, torch_dtype
from .._core.sharding.dtypes import cast_hint
from .._core.tree.containers import PerRank
from .._core.tree.dict_attributes import METADATA
from .._core.tree.flatten import flatten, replace_leaves
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import PerRankNode, Structure, index_path
from .._core.tree.tensor_parts import check_same_tensors
from ..errors import MismatchError, TreeckptError
from ..rules._rules import check_scaled
from ._modules import (
    CleanNames,
    Key,
    ModelEntries,
    Modules,
    StateDictEntry,
    addresses_of,
    get_in,
    key_path,
    live_state_dict,
    local_part,
    named_objects,
    plain_parts,
)
from ._sources import RestoreSource, children_of, descend, leaves_below, saved_metadata

MOST_KEPT = 256 << 20
"""Bytes of tensors of which copies are kept while load code runs."""
_LISTED = 10
"""Names in an error."""
_ASSIGNS = "assign_to_params_buffers"
"""What torch notes in the metadata of a state dict that was assigned; parameters of a restore stay the same objects."""


class SavedModel:
    """What was saved of one model, by clean names."""

    def __init__(self, source: RestoreSource, prefix: Key) -> None:
        children = children_of(descend(source.structure, ("model", *prefix)))
        self.nodes = {name: node for name, node in children.items() if type(name) is str}
        self.names = sorted(self.nodes)
        self.metadata = saved_metadata(source, prefix)
        self.modules = sorted(self.metadata or ())


Tie = tuple[int, object]
"""What stands for a new tensor: the id of the live one that it is for, and the identity of the saved one."""


class ModuleLoad:
    """One module with load code of its own, and what is passed to it."""

    def __init__(self, prefix: Key, name: str, module: nn.Module, root: nn.Module, saved: SavedModel) -> None:
        self.prefix, self.name, self.module, self.root, self.saved = prefix, name, module, root, saved
        self.path = "/".join(("model", *prefix, *([name] if name else [])))
        self.live = live_state_dict(module, self.path)
        """The state dict of the module; after `plan_load` only its names."""
        self.names = CleanNames(module, ())
        self.state: OrderedDict[str, Any] = OrderedDict()
        """What the module is passed, by the names of its own state dict: new tensors, filled before, and values."""
        self.target: dict[Key, Any] = {}
        """The new tensors by the keys at which they were saved."""
        self.asked: set[str] = set()
        self.values_here: dict[str, Any] = {}
        """What the module gives now in the places of saved values, by the names of its own state dict."""
        self.plans: dict[str, StatePlan] = {}
        """The saved values, with the live objects that take the states in them, by the names of its own state dict."""
        self.values: list[tuple[str, Key]] = []
        """The (name in the own state dict, key) of everything that is no tensor itself."""
        self.casts: dict[str, str] = {}
        """The saved dtype of each tensor that has another one here, by clean name."""
        modules = {raw.rpartition(".")[0]: None for raw in self.live} | dict.fromkeys(self.live_metadata)
        # A wrapper and what it wraps have one clean name. The one in which entries stand is the first of `modules`:
        # reversed, it replaces the others.
        self.raw_modules = {self.clean_module(raw): raw for raw in reversed(modules)} | {name: ""}
        """The name of each module in its own state dict, by clean name."""
        self.raw_modules |= {self.clean_module(raw): raw for raw in modules if raw and self.clean_module(raw) == name}

    @property
    def live_metadata(self) -> Mapping[str, Any]:
        return getattr(self.live, METADATA, {})

    def clean(self, raw: str) -> str:
        """Returns the name in the model of an entry of the module's own state dict."""
        return _joined(self.name, self.names.key(raw)[-1])

    def path_of(self, name: str) -> str:
        """Returns the path of an entry of a clean name."""
        return f"model/{key_path((*self.prefix, name))}"

    def clean_module(self, raw: str) -> str:
        """Returns the name in the model of a module in the module's own state dict."""
        return self.clean(_joined(raw, "x")).rpartition(".")[0]

    def raw(self, name: str) -> str:
        """Returns the name in the module's own state dict of an entry or module that it may not have now."""
        steps = name.split(".")
        for count in range(len(steps), -1, -1):
            if (above := self.raw_modules.get(".".join(steps[:count]))) is not None:
                return _joined(above, *steps[count:])
        return name


def _joined(*steps: str) -> str:
    return ".".join(step for step in steps if step)


class ExtraState(msgspec.Struct):
    """The saved extra state of a module without other load code."""

    path: str
    module: nn.Module
    plan: StatePlan


# what is filled in place ----------------------------------------------------------------------------------------------


def check_entry(entry: StateDictEntry, leaves: Mapping[str, ArraySpec | None], path: str, *, cast: bool) -> None:
    """Compares a tensor of a module without load code of its own with what was saved at a path.

    Raises:
        MismatchError: kind, shape or dtype differ; or a cast of float8 would leave out the scales beside it.
    """
    live, spec = entry.value, leaves[path]
    if entry.kind != "value" and is_lazy(live):
        raise MismatchError(
            path,
            expected="a tensor with a shape",
            found="a lazy one, which the first forward pass makes",
            hint="Run the model once before",
        )
    if not entry.live:
        raise MismatchError(
            path,
            expected="a parameter or buffer of the model",
            found=f"a {'value' if entry.kind == 'value' else 'tensor'} that a hook of state_dict made",
            hint="Give the module a hook that takes it back (register_load_state_dict_pre_hook), "
            "or load it with treeckpt.load",
        )
    if spec is None:
        raise MismatchError(path, expected="a tensor", found="a value in the checkpoint")
    if spec.shape != tuple(live.shape):
        raise MismatchError(
            path,
            expected=f"shape {tuple(live.shape)}, as the model has it",
            found=f"{spec.shape} in the checkpoint",
            hint="Build the model with the sizes that were saved, or rename what is another parameter",
        )
    if spec.dtype == (dtype := dtype_name(live.dtype)):
        return
    # before `cast` is asked for: with it, the values would be wrong
    check_scaled(path, (spec.dtype, dtype), leaves)
    if not cast:
        raise MismatchError(
            path,
            expected=f"{dtype}, as the model has it",
            found=f"{spec.dtype} in the checkpoint",
            hint=cast_hint(spec.dtype, dtype),
        )


def check_extra_state(entry: StateDictEntry, path: str) -> None:
    """Compares whether a module takes the extra state that it gives.

    Raises:
        MismatchError: it does not.
    """
    if type(entry.module).set_extra_state is nn.Module.set_extra_state:
        raise MismatchError(
            path,
            expected="a module that has set_extra_state",
            found=f"{type(entry.module).__qualname__}, which has get_extra_state alone",
        )


def check_tensor_in_parts(entry: StateDictEntry, saved: Structure, path: str) -> None:
    """Compares a tensor of the model with a saved one that is made of others, see `_arrays.tensor_parts`.

    Raises:
        MismatchError: it is a plain tensor, or of another class, context, shape or layout.
    """
    parts = take_apart(entry.value, path)
    if parts is None:
        _refuse_other_kind(entry.value, getattr(saved, "cls", ""), path)
    check_same_tensors(flatten(parts)[0], saved, 0, above=path)


def _refuse_other_kind(live: Any, saved: str, path: str) -> NoReturn:
    raise MismatchError(
        path,
        expected=f"a {type(live).__module__}.{type(live).__qualname__}, as the model has it",
        found=f"a {saved} in the checkpoint",
        hint="Convert the model (quantize_, convert_to_float8_training, to_sparse) as when it was saved",
    )


def without_ties(
    missing: Sequence[str], entries: Sequence[StateDictEntry], filled: Sequence[StateDictEntry]
) -> list[str]:
    """Returns the missing paths without those of tensors that are filled under another name."""
    there = {id(entry.value) for entry in filled}
    tied = {entry.path for entry in entries if isinstance(entry.value, Tensor) and id(entry.value) in there}
    return [path for path in missing if path not in tied]


def resolve_ties(
    entries: Sequence[StateDictEntry],
    paths: Mapping[int, str],
    source: RestoreSource,
    *,
    strict: bool,
) -> tuple[list[StateDictEntry], list[str]]:
    """Returns the entries to fill, and the paths of those whose tensor is filled under another name.

    Args:
        paths: the saved path of each entry, by identity.
        strict: whether different saved arrays for one tensor are an error; otherwise the last name is filled.

    Raises:
        MismatchError: the saved arrays of the names of one tensor differ.
    """
    tied: dict[int, list[StateDictEntry]] = {}
    left: list[str] = []
    for entry in entries:
        others, path = tied.setdefault(id(entry.value), []), paths[id(entry)]
        if others and not _are_equal(source, paths[id(others[0])], path, entry.value):
            if strict:
                raise MismatchError(
                    path,
                    expected=f"the bytes of {paths[id(others[0])]}, which is the same tensor in the model",
                    found="others in the checkpoint",
                    hint="Untie the two, or pass strict=False to take the last of them",
                )
            left += [paths[id(other)] for other in others]
            others.clear()
        others.append(entry)
    return [entry for others in tied.values() for entry in others], left


def _are_equal(source: RestoreSource, first: str, second: str, live: Any) -> bool:
    """Whether what was saved of a live tensor at two paths is equal."""
    parts = take_apart(live, first)
    leaves = (
        [("", live)] if parts is None else [(f"/{index_path(steps, 0)}", leaf) for steps, leaf in flatten(parts)[1]]
    )
    return all(source.are_equal((first + below, second + below), leaf) for below, leaf in leaves)


# what has load code ---------------------------------------------------------------------------------------------------


def find_loads(model: Modules, entries: ModelEntries, source: RestoreSource) -> list[ModuleLoad]:
    """Returns the outermost modules with load code of their own."""
    loads: list[ModuleLoad] = []
    for prefix, root in named_objects(model, nn.Module, "model"):
        live = {entry.key[-1]: entry.value for entry in entries.entries if entry.root is root}
        names, sharded = sorted(live), sorted(name for name, value in live.items() if is_sharded_tensor(value))
        saved, metadata = SavedModel(source, prefix), entries.metadata.get(prefix, {})
        above: str | None = None
        for name, chain in CleanNames(root, prefix).chains.items():
            if above is not None and (not above or f"{name}.".startswith(f"{above}.")):
                continue
            code = [(module, where) for module in chain for where in load_code_of(module, is_root=not name)]
            if not code or _below(sharded, name):
                continue
            if all(where.startswith("torch.nn.") for _, where in code):
                same = saved.metadata is None or saved.metadata.get(name) == metadata.get(name)
                if same and all(below in saved.nodes for below in _below(names, name)):
                    continue
            above = name
            loads.append(ModuleLoad(prefix, name, code[0][0], root, saved))
    return loads


def with_load_code(entries: Iterable[StateDictEntry], loads: Sequence[ModuleLoad]) -> list[StateDictEntry]:
    """Returns the entries that stand at or below modules with load code."""
    heads = {(id(load.root), load.name) for load in loads}

    def is_below(entry: StateDictEntry) -> bool:
        above = itertools.accumulate(entry.key[-1].split(".")[:-1], "{}.{}".format)
        return any((id(entry.root), name) in heads for name in ("", *above))

    return [entry for entry in entries if is_below(entry)] if heads else []


def _below(names: Sequence[str], above: str) -> Sequence[str]:
    """Returns those of sorted names that stand at or below a module."""
    if not above:
        return names
    # The character "/" follows ".": between the two places stand exactly the names that begin with `above.`.
    return names[bisect.bisect_left(names, f"{above}.") : bisect.bisect_left(names, f"{above}/")]


# what is passed -------------------------------------------------------------------------------------------------------


def plan_load(
    load: ModuleLoad,
    source: RestoreSource,
    stays: Callable[[str, bool], bool],
    *,
    own: Callable[[str, str], None],
    others: bool,
    device: str | torch.device | None,
    made: dict[Tie, Tensor],
) -> None:
    """Chooses what a module is passed, with new tensors for what was saved of it.

    Args:
        stays: returns whether the entry of a clean name stays as it is, given whether it was saved.
        own: is called with the name and path of what each rank has saved of its own.
        others: whether a model gets names too whose first step it does not have.
        made: the new tensors of a restore, to which it adds: what is one tensor when saved and here is one in the
            states that modules are passed, as in a file of `torch.save`.
    """
    live, nodes = load.live, load.saved.nodes
    raws = {load.clean(raw): raw for raw in live}
    heads = {name.partition(".")[0] for name in (*raws, *load.raw_modules)}
    for name in _below(load.saved.names, load.name):
        if not load.name and not others and name.partition(".")[0] not in heads:
            continue
        key = (*load.prefix, name)
        path, node, raw = f"model/{key_path(key)}", nodes[name], raws.get(name) or load.raw(name)
        if stays(name, True):
            continue
        if isinstance(node, PerRankNode):
            own(name, path)
            path += "/~rank*"
            load.asked.update(leaf_path for child in node.children for leaf_path in leaves_below(path, child))
        else:
            load.asked.update(leaves_below(path, node))
        spec = source.leaves.get(path)
        if spec is None or raw.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX:
            load.values.append((raw, key))
            load.values_here[raw] = live.get(raw)
            load.state[raw] = None
            continue
        here, identity = live.get(raw), source.identity(path)
        tie = (id(here), path if identity is None or here is None else identity)
        if (tensor := made.get(tie)) is None:
            tensor = made[tie] = _new_like(here, spec, path, device, load)
            load.target[key] = PerRank(tensor) if isinstance(node, PerRankNode) else tensor
        load.state[raw] = tensor.detach()
        if isinstance(here, Tensor) and here.dtype != tensor.dtype:
            load.casts[name] = dtype_name(tensor.dtype)
    _add_ties(load, stays)
    vars(load.state)[METADATA] = _metadata_for(load)
    load.live = dict.fromkeys(load.live)  # a view of a tensor on the meta device keeps it from getting memory


def _new_like(here: Any, spec: ArraySpec, path: str, device: str | torch.device | None, load: ModuleLoad) -> Tensor:
    """Returns a new tensor of a saved dtype and shape, laid out as the live one where that has the shape."""
    where: Any = device_of(load.module, load.root) or device or torch.get_default_device()
    if isinstance(here, Tensor) and not is_lazy(here):
        where = here.device
        if here.is_meta:
            where = here.device_mesh.device_type if is_dtensor(here) else device or torch.get_default_device()  # pyright: ignore[reportAttributeAccessIssue]
        if tuple(here.shape) == spec.shape:
            return torch.empty_like(here.detach(), dtype=torch_dtype(spec.dtype, path), device=where)
    made: Any = new_array(spec, path, str(where)).leaf
    return made


def device_of(*modules: nn.Module) -> torch.device | None:
    """Returns the device of the first tensor of the modules that has memory."""
    tensors = (t for module in modules for part in (module.buffers(), module.parameters()) for t in part)
    return next((t.device for t in tensors if not is_lazy(t) and not t.is_meta), None)


def _add_ties(load: ModuleLoad, stays: Callable[[str, bool], bool]) -> None:
    """Adds entries that stay, as they are, and other names of tensors that are passed under one."""
    given = {id(load.live[raw]): tensor for raw, tensor in load.state.items() if isinstance(load.live.get(raw), Tensor)}
    for raw, value in load.live.items():
        if raw not in load.state and isinstance(value, Tensor) and id(value) in given:
            load.state[raw] = given[id(value)]
        elif raw not in load.state and stays(load.clean(raw), False):
            # A copy, because load code may change what it is passed.
            load.state[raw] = _own_copy(value, None)


def _metadata_for(load: ModuleLoad) -> OrderedDict[str, Any]:
    """Returns the saved metadata by the names of a module's own state dict; its own where none was saved."""
    saved = load.saved.metadata
    metadata = dict(load.live_metadata)
    if saved is not None:
        inside = [name for name in (load.name, *_below(load.saved.modules, load.name)) if name in saved]
        metadata = {load.raw(name): saved[name] for name in inside}
        of_wrappers = {raw: load.clean_module(raw) for raw in load.live_metadata}
        metadata |= {raw: saved[name] for raw, name in of_wrappers.items() if name in saved}
    plain = ((raw, local) for raw, local in metadata.items() if isinstance(local, Mapping))
    return OrderedDict((raw, {k: v for k, v in local.items() if k != _ASSIGNS}) for raw, local in plain)


def _own_copy(value: Any, device: torch.device | None) -> Any:
    """Returns a tree with copies of its tensors."""

    def copied(leaf: Any) -> Any:
        return leaf.detach().clone().to(device or leaf.device) if isinstance(leaf, Tensor) else leaf

    return replace_leaves(value, iter([copied(leaf) for _, leaf in flatten(value)[1]]))


def load_values(loads: Sequence[ModuleLoad], part: Mapping[str, Any]) -> None:
    """Puts the values of `part`, which was loaded as it was saved, into what modules are passed."""
    for load in loads:
        device = device_of(load.module, load.root)
        for raw, key in load.values:
            value = get_in(part, key)
            is_extra = raw.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX
            value = _own_copy(value.value if isinstance(value, PerRank) else value, None if is_extra else device)
            load.plans[raw] = plan_state(f"model/{key_path(key)}", None, value, live=load.values_here[raw])


# run ------------------------------------------------------------------------------------------------------------------


def run_load(load: ModuleLoad, *, strict: bool, cast: bool) -> list[list[str]]:
    """Runs the load code of a module; returns the paths that it misses, and that it does not know.

    Args:
        strict: whether a `load_state_dict` of the model's own is called as `load_state_dict(state)`, which is strict.

    Raises:
        MismatchError: it fails, does not take what the module itself gives, or casts without `cast`.
    """
    module = load.module
    method = module.load_state_dict
    is_own = getattr(method, "__func__", method) is not nn.Module.load_state_dict
    try:
        load.state.update((raw, plan.loaded()) for raw, plan in load.plans.items())
        # torch calls `load_state_dict` of the root alone; of a module inside, an override of it would never run.
        if not is_own or load.name:
            result: Any = nn.Module.load_state_dict(module, load.state, strict=False)
        elif strict or "strict" not in inspect.signature(method).parameters:
            result = method(load.state)
        else:
            result = method(load.state, strict=False)  # pyright: ignore[reportCallIssue]
    except Exception as error:
        raise MismatchError(
            load.path,
            expected=f"a state that the load code of {type(module).__qualname__} takes",
            found=_said(error),
        ) from error
    missing, unexpected = (list(getattr(result, name, None) or ()) for name in ("missing_keys", "unexpected_keys"))
    if left := [raw for raw in unexpected if raw in load.live and raw in load.state]:
        raise MismatchError(
            load.path_of(load.clean(left[0])),
            expected="a name that the model's load_state_dict takes, as its state_dict has it",
            found=f"{len(left)} that it does not",
            hint="Register a hook with register_load_state_dict_pre_hook that takes them back",
        )
    modules = CleanNames(module, ())
    for name, dtype in {} if cast else load.casts.items():
        inner = name.removeprefix(f"{load.name}.") if load.name else name
        owner = modules.chains.get(inner.rpartition(".")[0], [module])[-1]
        tensor = getattr(owner, inner.rpartition(".")[2], None)
        if not isinstance(tensor, Tensor) or dtype_name(tensor.dtype) != dtype:
            raise MismatchError(
                load.path_of(name),
                expected=f"{dtype_name(tensor.dtype)}, as the model has it"
                if isinstance(tensor, Tensor)
                else "its dtype",
                found=f"{dtype} in the checkpoint",
                hint="Pass cast=True to convert",
            )
    return [[load.path_of(load.clean(raw)) for raw in raws] for raws in (missing, unexpected)]


def _said(error: Exception) -> str:
    """Returns an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def set_extra_state(extra: ExtraState) -> None:
    """Passes a module its extra state.

    Raises:
        MismatchError: it fails.
    """
    try:
        extra.module.set_extra_state(extra.plan.loaded())
    except Exception as error:
        raise MismatchError(
            extra.path,
            expected=f"a state that {type(extra.module).__qualname__}.set_extra_state takes",
            found=_said(error),
        ) from error


def run_post_hooks(model: Modules, loads: Sequence[ModuleLoad]) -> None:
    """Runs the hooks after `load_state_dict` of the modules that were filled in place, except torch's own."""
    done = {id(load.module) for load in loads}

    def walk(module: nn.Module) -> None:
        if id(module) in done:
            return
        done.add(id(module))
        for child in module.children():
            walk(child)
        for hook in module._load_state_dict_post_hooks.values():
            if not (getattr(hook, "__module__", None) or "").startswith("torch."):
                try:
                    hook(module, _IncompatibleKeys([], []))
                except Exception as error:
                    kind = type(module).__qualname__
                    error.add_note(f"raised by a hook after load_state_dict of {kind}; the model's arrays are filled")
                    raise

    for _, root in named_objects(model, nn.Module, "model"):
        walk(root)


class Before:
    """What modules have before their load code runs: attributes, their containers, copies of tensors and of states."""

    def __init__(self, loads: Sequence[ModuleLoad], extras: Sequence[ExtraState], live: Iterable[Any]) -> None:
        """Args:
        live: what the state dicts of `loads` have here.
        """
        whole = {id(module): module for load in loads for module in load.module.modules()}
        alone = {id(extra.module): extra.module for extra in extras if id(extra.module) not in whole}
        self._attributes: list[tuple[Any, Any]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor | None]] = []
        self._found: dict[int, Tensor] = {}
        for module in (*whole.values(), *alone.values()):
            self._keep(module, skip=() if id(module) in whole else ("_parameters",))
        for tensor in tuple(self._found.values()):
            self._keep(tensor)
        places = {place for tensor in self._found.values() for place in addresses_of(tensor)}
        for value in live:
            own = addresses_of(value) if isinstance(value, Tensor) and not is_lazy(value) else ()
            # A view of memory of which a copy is kept already needs none of its own.
            if not own or not places.issuperset(own):
                self._find(value)
        room = MOST_KEPT
        tensors = {id(part): part for tensor in self._found.values() for part in _filled_parts(tensor)}
        # The smallest first: one large table does not take the room of all the others.
        for tensor in sorted(tensors.values(), key=_nbytes):
            room -= _nbytes(tensor)
            self._tensors.append((tensor, local_part(tensor).clone() if room >= 0 and not tensor.is_meta else None))
        self._meta = [tensor for tensor, _ in self._tensors if tensor.is_meta]
        plans = [extra.plan for extra in extras] + [plan for load in loads for plan in load.plans.values()]
        self._objects = [_present(inner) for plan in plans for inner in plan.inner.values()]

    def _keep(self, owner: Any, skip: Sequence[str] = ()) -> None:
        """Keeps the attributes of a module or tensor, of which weights beside extra state are skipped."""
        attributes = getattr(owner, "__dict__", None)
        if not attributes:
            return
        self._attributes.append((attributes, dict(attributes)))
        for name, value in attributes.items():
            if type(value) in (dict, OrderedDict, list, set):
                self._contents.append((value, value.copy()))
            if name not in skip:
                self._find(value)

    def _find(self, value: Any) -> None:
        """Notes a tensor, or those in a container."""
        parts = value.values() if isinstance(value, dict) else value if type(value) in (list, set) else ()
        for part in (value, *parts):
            if isinstance(part, Tensor) and not is_sharded_tensor(part) and not is_lazy(part):
                self._found[id(part)] = part

    @torch.no_grad()
    def put_back(self, paths: Mapping[int, str]) -> list[str]:
        """Puts everything back; returns the paths of tensors of which no copy was kept.

        Args:
            paths: those of the model's tensors, by identity.
        """
        for now, before in self._attributes:
            now.clear()
            now.update(before)
        for now, before in self._contents:
            now.clear()
            now.extend(before) if isinstance(now, list) else now.update(before)
        for plan in self._objects:
            plan.load()
        changed: list[str] = []
        for tensor, copy in self._tensors:
            local = local_part(tensor)
            if copy is None:
                changed += [] if any(tensor is meta for meta in self._meta) else [paths.get(id(tensor), "a tensor")]
            elif any_in_parts((tensor,)):
                parts_adapter().set_content(tensor, copy)
            elif local.shape == copy.shape:
                local.copy_(copy)
            else:
                # Load code has resized it.
                tensor.data = copy
        for tensor in self._meta:
            if not tensor.is_meta:
                # Load code gave it memory. After the swap the object that optimizers and others hold has none again.
                new = torch.empty_like(tensor, device="meta")
                torch.utils.swap_tensors(tensor, nn.Parameter(new, requires_grad=tensor.requires_grad))
        return sorted(changed)


def _present(plan: StatePlan) -> StatePlan:
    """Returns a plan that loads a copy of the present state of the object of another one."""
    state = _own_copy(object_states(plan.live, plan.path, (plan.owner,)), None)
    return plan_state(plan.path, plan.owner, state, live=plan.live)


def _filled_parts(tensor: Tensor) -> list[Tensor]:
    """Returns the parts of a tensor of which the elements are put back; a sparse or nested one is put back whole."""
    return plain_parts(tensor) if any_in_parts((tensor,)) and parts_adapter().fills_in_place(tensor) else [tensor]


def _nbytes(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else sum(local_part(part).nbytes for part in plain_parts(tensor))


def say_what_changed(error: Exception, changed: Sequence[str]) -> None:
    """Adds to an error of load code what stays changed."""
    more = f" and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
    text = f"Changed, as no copies of them were kept: {', '.join(changed[:_LISTED])}{more}" if changed else ""
    text = text or "The tensors and attributes of the model are as they were before"
    if isinstance(error, TreeckptError):
        error.add_hint(text)
    else:
        error.add_note(text)
