"""The tensors that a fresh optimizer needs before its state can be loaded into it, and those that must not be missing.

Optimizers make their moments at the first step. Here they are made without one: as many as were saved, of the saved
dtype, laid out as their parameter is. What torch's own optimizers would make is found by stepping a tiny copy, so that
a moment which a checkpoint has lost is noticed even though nothing here asks for it yet.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..arrays.registry import resolve
from ..arrays.torch import torch_dtype
from ..core.tree.flatten import unflatten
from ..core.tree.spec import ArraySpec
from ..core.tree.structure import Structure, key_text, paths_of
from .sources import children_of

__all__ = ["MomentPlacement", "build_state", "expected_moments"]


class MomentPlacement(msgspec.Struct, frozen=True):
    """What a moment's parameter was like, and is: that decides where the moment goes, and of which dtype it is."""

    was_on_device: bool | None = None
    """Whether the parameter was on a device when it was saved; None if that is not known."""
    counts_on_device: bool = False
    """Whether the optimizer counts steps on the device (capturable and fused ones do)."""
    was_spread: bool = False
    """Whether the parameter was distributed when it was saved."""
    whole_shape: tuple[int, ...] = ()
    """Of the array that the parameter is a part of, if it is one."""
    dtypes: tuple[str, str] = ("", "")
    """Of the parameter, as it was saved and as it is: a moment that had its dtype has it again."""

    def on_host(self, name: str, spec: ArraySpec) -> bool:
        """As it was beside its parameter; where both were on the host, as torch's optimizers make it."""
        if spec.device is not None:
            return False
        if self.was_on_device:
            return True
        return name in ("step", "mu_product") and not self.counts_on_device


def build_state(
    parameter: Tensor,
    saved: Structure,
    here: Mapping[Any, Any],
    *,
    path: str,
    leaves: Mapping[str, ArraySpec | None],
    value: Callable[[str], Any],
    is_spread: Callable[[str], bool],
    place: MomentPlacement,
) -> dict[Any, Any]:
    """The state of one parameter, to be filled: what is there stays, what is not is made.

    Args:
        saved: its structure as it was saved.
        here: the live state, which may be empty.
        path: where the state was saved.
        leaves: what was saved, by path.
        value: gives what was saved at a path, if that is no array.
        is_spread: whether what was saved at a path was distributed.
        place: what decides where numbers go.
    """
    found: dict[Any, Any] = {}
    for key, child in children_of(saved).items():
        paths = [_join(f"{path}/{key_text(key)}", below) for below, _ in paths_of(child)]
        if child is None and isinstance(here.get(key), Tensor) and leaves[paths[0]] is not None:
            found[key] = here[key]
        else:
            made = (
                _leaf(parameter, str(key), spec, place, whole=place.was_spread and not is_spread(p))
                if (spec := leaves[p])
                else value(p)
                for p in paths
            )
            found[key] = unflatten(child, made, resolve=resolve)
    return found


def _join(path: str, below: str) -> str:
    return f"{path}/{below}" if below else path


def _leaf(parameter: Tensor, name: str, spec: ArraySpec, place: MomentPlacement, *, whole: bool) -> Any:
    """A moment to be filled.

    Args:
        whole: every rank had all of it, though not of its parameter.
    """
    if spec.kind == "numpy":
        return np.empty(spec.shape, spec.dtype)
    dtype = torch_dtype(spec.dtype)
    if not spec.shape and (name == "step" or parameter.ndim):
        # a number beside the moments: every rank has all of it
        return torch.empty((), dtype=dtype, device="cpu" if place.on_host(name, spec) else parameter.device)
    if spec.dtype == place.dtypes[0]:
        dtype = torch_dtype(place.dtypes[1])
    if whole:
        return torch.empty(spec.shape, dtype=dtype, device=parameter.device)
    if spec.shape in (tuple(parameter.shape), place.whole_shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return parameter.detach().new_empty(spec.shape, dtype=dtype)  # of a DTensor, laid out as torch's optimizers do


def expected_moments(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> frozenset[Any]:
    """The names of the moments that the first step makes; none for an optimizer that is not torch's own.

    A copy of the optimizer takes the step, with one parameter of as many dimensions and a single element.
    """
    kind = type(optimizer)
    if (
        not f"{kind.__module__}.".startswith("torch.optim.")
        or kind is torch.optim.LBFGS
        or kind is torch.optim.SparseAdam
    ):
        return frozenset()
    tiny = torch.nn.Parameter(torch.zeros((1,) * parameter.ndim, dtype=parameter.dtype))
    tiny.grad = torch.zeros_like(tiny)
    probe: Any = object.__new__(kind)  # copy.copy would run __setstate__ on the live state
    probe.__dict__.update(optimizer.__dict__)
    probe.state = collections.defaultdict(dict)
    plain = {"fused": False, "capturable": False, "foreach": False}
    values = {key: plain.get(key, value) for key, value in group.items() if key != "params"}
    values = {k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in values.items()}
    probe.param_groups = [{**values, "params": [tiny]}]
    probe._optimizer_step_pre_hooks, probe._optimizer_step_post_hooks = (
        collections.OrderedDict(),
        collections.OrderedDict(),
    )
    step: Any = kind.step
    try:
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(probe)  # without the hooks of all optimizers
    except Exception:  # a combination of hyper-parameters that only works elsewhere says nothing of moments
        return frozenset()
    return frozenset(probe.state.get(tiny, {}))
