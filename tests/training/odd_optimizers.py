"""Optimizers with a `state_dict` of their own, in every form that is met."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["KINDS", "Counting", "Lookahead", "Slow", "Wrapper"]

AdamW = torch.optim.AdamW


class Counting(torch.optim.SGD):
    """Entries of its own, at the root and below, some with a tensor for each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.count, self.sums, self.last = 0, {}, torch.zeros(2)

    @property
    def parameters(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.count += 1
        self.last = self.last + self.count
        for p in self.parameters:
            self.sums[p] = self.sums.get(p, torch.zeros_like(p)) + p.grad
            p.data.sub_(0.001 * self.sums[p] * float(self.last.sum()))
        return loss

    def state_dict(self) -> dict[str, Any]:
        numbers = {p: i for i, p in enumerate(self.parameters)}
        more = {"deep": [{"sums": {numbers[p]: total for p, total in self.sums.items()}}, None], "last": self.last}
        return {**super().state_dict(), "count": self.count, "more": more}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        parameters = self.parameters
        self.count, self.last = state_dict["count"], state_dict["more"]["last"]
        self.sums = {parameters[i]: total for i, total in state_dict["more"]["deep"][0]["sums"].items()}


class Lookahead(torch.optim.Optimizer):
    """Keeps nothing itself: all is in the optimizer that it wraps."""

    def __init__(self, base: torch.optim.Optimizer, every: int = 2) -> None:
        self._base_optimizer, self.every, self.defaults = base, every, base.defaults
        self.param_groups, self.state = base.param_groups, collections.defaultdict(dict)
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = collections.OrderedDict()
        for group in self.param_groups:
            group.setdefault("lookahead_step", 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = self._base_optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            for p in group["params"] if group["lookahead_step"] % self.every == 0 else ():
                slow = self._base_optimizer.state[p].setdefault("slow", p.clone())
                p.copy_(slow.lerp_(p, 0.5))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._base_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self._base_optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._base_optimizer.load_state_dict(state_dict)
        self.param_groups = self._base_optimizer.param_groups


class Slow(torch.optim.Optimizer):
    """State of its own by (group, place), beside the whole state dict of the optimizer that it wraps."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = collections.OrderedDict()
        self.optimizer, self.defaults, self.state = base, base.defaults, collections.defaultdict(dict)

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = self.optimizer.step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            p.copy_(self.state[p].setdefault("slow", p.clone()).lerp_(p, 0.5))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        places = {p: (i, j) for i, group in enumerate(self.param_groups) for j, p in enumerate(group["params"])}
        own = {places[p]: dict(state) for p, state in self.state.items()}
        return {"slow": own, "base": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict["base"])
        for (i, j), state in state_dict["slow"].items():
            self.state[self.param_groups[i]["params"][j]] = dict(state)


class Factored(torch.optim.Optimizer):
    """Lists of tensors of other shapes for each parameter, and a generator's state; caches that a load drops."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.rng, self.cache = random.Random(7), {}

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.cache = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is not None
        with torch.enable_grad():
            loss = closure()
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(step=0, Q=[torch.eye(n) for n in p.shape])
            scale = self.cache.setdefault(p, sum(float(q.sum()) for q in state["Q"]))
            state["step"] += 1
            for q in state["Q"]:
                q.mul_(0.9).add_(p.grad.norm())
            self.cache[p] = sum(float(q.sum()) for q in state["Q"])
            p.sub_(p.grad, alpha=0.001 * scale)
        p.mul_(1 + 0.01 * self.rng.random())
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rng_state": self.rng.getstate()}

    def load_state_dict(self, state_dict: Any) -> None:
        state_dict = state_dict.copy()
        self.rng.setstate(state_dict.pop("rng_state"))
        super().load_state_dict(state_dict)


class Master(torch.optim.SGD):
    """Copies of the parameters in double precision, as a list in their order."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.masters = [[p.detach().double() for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group, masters in zip(self.param_groups, self.masters, strict=True):
            for p, master in zip(group["params"], masters, strict=True):
                p.data.copy_(master.lerp_(p.data.double(), 0.3))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "masters": self.masters}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for mine, saved in zip(self.masters, state_dict["masters"], strict=True):
            for master, other in zip(mine, saved, strict=True):
                master.copy_(other)


class Coarse(torch.optim.Optimizer):
    """Moments of other dtypes than their parameters, which `Optimizer.load_state_dict` casts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is not None
        with torch.enable_grad():
            loss = closure()
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                state["momentum"], state["steps"] = p.new_zeros(p.shape, dtype=torch.bfloat16), torch.zeros(1).long()
            state["momentum"].mul_(0.9).add_(p.grad)
            state["steps"] += 1
            p.sub_(state["momentum"].to(p.dtype), alpha=0.05)
        return loss


class Nested:
    """No optimizer by its class; the state dict of what it wraps stands inside its own."""

    def __init__(self, base: Any) -> None:
        self.optimizer, self.count = base, 0

    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return self.optimizer.step(closure)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "base": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.count = state_dict["count"]
        self.optimizer.load_state_dict(state_dict["base"])


class Wrapper:
    """No optimizer by its class; all that it keeps is in the one that it wraps."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.optimizer = base

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)


def _hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer: Any = AdamW(parameters, lr=0.01)
    optimizer.temperature = {"now": 1.0}
    optimizer.register_step_post_hook(lambda o, *_: o.temperature.update(now=o.temperature["now"] * 0.9))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "temperature": dict(o.temperature)})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: o.temperature.update(state["temperature"]))
    return optimizer


KINDS: dict[str, Callable[[Any], Any]] = {
    "entries of its own": Counting,
    "all in what it wraps": lambda p: Lookahead(AdamW(p, lr=0.01)),
    "by place beside what it wraps": lambda p: Slow(AdamW(p, lr=0.01)),
    "lists of tensors": Factored,
    "a list in their order": Master,
    "no optimizer by its class": lambda p: Wrapper(AdamW(p, lr=0.01)),
    "other dtypes": Coarse,
    "other dtypes, wrapped": lambda p: Slow(Coarse(p)),
    "other dtypes, nested": lambda p: Nested(Slow(Coarse(p))),
    "a rate that is a tensor, nested": lambda p: Nested(AdamW(p, lr=torch.tensor(0.01))),
    "a wrapper of a wrapper": lambda p: Wrapper(Lookahead(Counting(p))),
    "hooks": _hooked,
}
