"""Optimizer state for a fresh optimizer, to be filled, and the moments that a checkpoint must have.

Optimizers create their moments at the first step. Here they are created without a step: those that were saved, of the
saved dtype, with the layout of their parameter. The moments that torch's own optimizers would create are found by a
step of a tiny copy, so a moment that is missing in a checkpoint is detected although the live optimizer has none yet,
and one of another class is left out.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from .._arrays.dtensor import is_dtensor, layout_of
from .._arrays.registry import build_tensor, new_array, resolve, take_apart
from .._arrays.tensor_parts import empty_plain, is_in_parts
from .._arrays.torch import in_order, is_plain, order_of, torch_dtype
from .._core.sharding.int_runs import encode_runs
from .._core.tree.flatten import unflatten
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import PerRankNode, Structure, TensorNode, key_text
from .._core.tree.tensor_parts import TensorParts, check_own_layout, tensors_as_leaves
from ..errors import MismatchError
from ._modules import get_in, parse_key
from ._sources import OWN, RestoreSource, children_of, leaves_below

# fmt: off
_LBFGS_MOMENTS = frozenset({
    "func_evals", "n_iter", "d", "t", "old_dirs", "old_stps", "ro", "al", "H_diag", "prev_flat_grad", "prev_loss",
})
TORCH_MOMENTS = _LBFGS_MOMENTS | {
    "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "mu_product", "momentum_buffer", "square_avg",
    "grad_avg", "acc_delta", "sum", "prev", "step_size", "eta", "mu", "ax", "row_var", "col_var", "variance",
}
# fmt: on
"""The names of all moments that the classes of `torch.optim` create."""


class MomentPlacement(msgspec.Struct, frozen=True):
    """Properties of a saved and a live parameter that decide the device, layout and dtype of its moments."""

    was_on_device: bool | None = None
    """Whether the parameter was on a device when it was saved; None if that is not known."""
    counts_on_device: bool = False
    """Whether the optimizer counts steps on the device (capturable and fused ones do)."""
    was_spread: bool = False
    """Whether the parameter was distributed when it was saved."""
    whole_shape: tuple[int, ...] = ()
    """Shape of the array that the parameter is a shard of, if it is one."""
    was_ordered: bool = False
    """Whether the dimensions of the parameter lay in another order than C order when it was saved. Where they did not,
    as in all checkpoints that do not name the order, a moment in C order lies as its parameter does here."""
    own: frozenset[str] = frozenset()
    """The names of the moments that each rank had of its own, see `NamedOptimizer.own_moments`."""
    dtypes: tuple[str, str] = ("", "")
    """The (saved, live) dtype of the parameter: a moment that had the dtype of its parameter keeps to it."""

    def on_host(self, name: str, spec: ArraySpec) -> bool:
        """Whether a scalar moment is on the host: as saved relative to its parameter, else as torch's optimizers do."""
        if spec.device is not None:
            return False
        if self.was_on_device:
            return True
        return name in ("step", "mu_product") and not self.counts_on_device


def build_state(
    parameter: Tensor,
    saved: Structure,
    here: Mapping[Any, Any],
    source: RestoreSource,
    *,
    path: str,
    place: MomentPlacement,
    made: dict[object, Tensor],
) -> dict[Any, Any]:
    """Returns the state of one parameter, to be filled: existing tensors stay, missing ones are created.

    One whose dimensions lie in another order than the saved one is created anew, as `load_state_dict` does it.

    Args:
        saved: the saved structure of the state.
        here: the live state, which may be empty.
        source: provides specs and values of saved leaves.
        path: the saved path of the state.
        place: decides device, layout and dtype of new tensors.
        made: the tensors that were created for the optimizer, to which it adds: what parameters shared, as a counter,
            they share again.
    """
    state: dict[Any, Any] = {}
    for key, child in children_of(saved).items():
        child_path, live = f"{path}/{key_text(key)}", here.get(key)
        child, tensors = tensors_as_leaves(child)
        paths = [p + OWN * (p.removeprefix(f"{path}/") in place.own) for p in leaves_below(child_path, child)]
        spec = source.leaves.get(paths[0]) if child is None else None
        if child is None and isinstance(live, Tensor) and _is_kept(live, tensors.get(""), spec, child_path):
            state[key] = live
            dense = "" not in tensors and (is_plain(live) or is_dtensor(live))
            if dense and spec is not None and spec.shape == tuple(live.shape):
                order = _order(parameter, spec, place)
                if order_of(live) != order:
                    state[key] = _shared(in_order(live, order), source.identity(paths[0]), made)
            continue
        new_leaves = (
            _tensor_in_parts(parameter, node, source, p)
            if (node := tensors.get(p.removeprefix(child_path).removesuffix(OWN).removeprefix("/")))
            else _shared(
                _leaf(parameter, str(key), spec, place, whole=_is_whole(p, place, source)),
                source.identity(p),
                made,
            )
            if (spec := source.leaves[p])
            else source.value(p)
            for p in paths
        )
        state[key] = unflatten(child, new_leaves, resolve=resolve)
    return state


def _is_whole(path: str, place: MomentPlacement, source: RestoreSource) -> bool:
    """Whether a rank held all of a saved moment, but not all of its parameter."""
    return path.endswith(OWN) or (place.was_spread and not source.is_spread(path))


def _is_kept(live: Tensor, saved: TensorNode | None, spec: ArraySpec | None, path: str) -> bool:
    """Returns whether a live moment is filled: it is made of other tensors as the saved one is, or neither is."""
    mine = None if is_plain(live) else take_apart(live, path)
    if saved is None or mine is None:
        return saved is None and mine is None and spec is not None
    return mine.node.cls == saved.cls


def _tensor_in_parts(parameter: Tensor, saved: TensorNode, source: RestoreSource, path: str) -> Any:
    """Returns a moment that is made of other tensors, to be filled: the live one if it is of the saved class.

    Raises:
        MismatchError: this program does not have the class, or the parts cannot be laid out as the parameter is.
    """
    saved = _of_one_rank(saved)
    paths = leaves_below(path, saved)
    if saved.cls.startswith("torch:"):  # indices that are not filled yet are not valid
        return get_in(source.part("optimizer", select=paths), parse_key(path)[1:])
    spread = is_dtensor(parameter) and saved.shape == tuple(parameter.shape)
    if saved.layout is not None and any(n > 1 for n in saved.layout.mesh.shape):
        check_own_layout(layout_of(parameter, path) if is_dtensor(parameter) else None, (saved,), path)

    def part(leaf_path: str) -> Any:
        if (spec := source.leaves[leaf_path]) is None:
            return source.value(leaf_path)
        dtype = torch_dtype(spec.dtype)
        if spread and "~rank*" not in leaf_path.split("/") and spec.shape == saved.shape:
            like = empty_plain(parameter, dtype) if is_in_parts(parameter) else parameter
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return torch.zeros(spec.shape, dtype=dtype, device=parameter.device)

    def build(made: TensorParts, below: str) -> Any:
        if spread and below == "":
            made.node = msgspec.structs.replace(made.node, layout=layout_of(parameter, path))
            made.spread = parameter._spec  # pyright: ignore[reportAttributeAccessIssue]
        return build_tensor(made, f"{path}/{below}" if below else path)

    made = unflatten(saved, map(part, paths), resolve=resolve, build=build)
    if not isinstance(made, Tensor):
        raise MismatchError(
            path,
            expected=f"the class {saved.cls}",
            found="no such class in this program",
            hint="Import the module that defines it before restoring: the optimizer that made it",
        )
    return made


def _of_one_rank(saved: Structure) -> Any:
    """Returns a saved structure as one rank has it, rank 0 in `unflatten`: several may be noted, of groups of ranks."""
    if saved is None:
        return None
    if isinstance(saved, PerRankNode):
        return PerRankNode((encode_runs([0]),), (_of_one_rank(saved.children[0]),))
    return msgspec.structs.replace(saved, children=tuple(map(_of_one_rank, saved.children)))


def _shared(new: Any, identity: object, made: dict[object, Tensor]) -> Any:
    """Returns the tensor that was created before for the same saved one, if there is one as the new one."""
    if identity is None or type(new) is not Tensor:
        return new
    return made.setdefault((identity, new.shape, new.dtype, new.device), new)


def _leaf(parameter: Tensor, name: str, spec: ArraySpec, place: MomentPlacement, *, whole: bool) -> Any:
    """Returns a new moment, to be filled.

    Args:
        whole: whether each rank that held it had all of it, but not the whole parameter.
    """
    if spec.kind == "numpy":
        return new_array(spec, name, None).leaf
    dtype = torch_dtype(spec.dtype)
    # Where the parameter itself is a scalar, so are its moments; only `step` is surely a counter then.
    if not spec.shape and (name == "step" or parameter.ndim):
        # a scalar beside the moments: every rank has it
        return torch.empty((), dtype=dtype, device="cpu" if place.on_host(name, spec) else parameter.device)
    if spec.dtype == place.dtypes[0]:
        dtype = torch_dtype(place.dtypes[1])
    if whole:
        made = torch.empty(spec.shape, dtype=dtype, device=parameter.device)
    else:
        if is_in_parts(parameter):  # the saved moment is not made of others
            parameter = empty_plain(parameter, dtype)
        if spec.shape in (tuple(parameter.shape), place.whole_shape):
            made = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:  # a DTensor as torch's optimizers lay it out
            made = parameter.detach().new_empty(spec.shape, dtype=dtype)
    if spec.shape != tuple(made.shape) or order_of(made) == (order := _order(parameter, spec, place)):
        return made
    return in_order(made, order)


def _order(parameter: Tensor, spec: ArraySpec, place: MomentPlacement) -> tuple[int, ...] | None:
    """Returns the order in memory of the dimensions of a moment of the saved shape; None for C order."""
    as_parameter = spec.order is None and not place.was_ordered and spec.shape == tuple(parameter.shape)
    return order_of(parameter) if as_parameter else spec.order


def expected_moments(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> frozenset[Any] | None:
    """Returns the names of the moments that the first step creates; None for optimizers that are not torch's own.

    A copy of the optimizer takes the step, with one single-element parameter of as many dimensions.
    """
    kind = type(optimizer)
    known = f"{kind.__module__}.".startswith("torch.optim.")
    # It refuses dense gradients, so the copy could not take a step.
    if kind is torch.optim.SparseAdam:
        return frozenset({"step", "exp_avg", "exp_avg_sq"})
    # The step of LBFGS needs a closure.
    if not known or kind is torch.optim.LBFGS:
        return None
    tiny = torch.nn.Parameter(torch.zeros((1,) * parameter.ndim, dtype=parameter.dtype))
    tiny.grad = torch.zeros_like(tiny)
    probe: Any = object.__new__(kind)  # copy.copy would run __setstate__ on the live state
    probe.__dict__.update(optimizer.__dict__)
    probe.state = collections.defaultdict(dict)
    # A capturable step refuses parameters on the host, where the tiny one is.
    plain = {"fused": False, "capturable": False, "foreach": False}
    values = {key: plain.get(key, value) for key, value in group.items() if key != "params"}
    values = {k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in values.items()}
    probe.param_groups = [{**values, "params": [tiny]}]
    probe._optimizer_step_pre_hooks = probe._optimizer_step_post_hooks = {}
    step: Any = kind.step
    try:
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(probe)  # without the hooks of all optimizers
    except Exception:  # hyper-parameters that only work on another device: the moments are unknown
        return None
    return frozenset(probe.state.get(tiny, {}))


def foreign_moments(optimizer: Any, saved: Iterable[Any], expected: frozenset[Any] | None) -> frozenset[Any]:
    """Returns the saved moments that other classes or options of torch's optimizers create, and this one does not.

    Args:
        expected: the result of `expected_moments`.
    """
    if type(optimizer) is torch.optim.LBFGS:
        expected = _LBFGS_MOMENTS
    return frozenset() if expected is None else TORCH_MOMENTS.intersection(saved) - expected
