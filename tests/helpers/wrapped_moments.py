"""A subclass of torch.Tensor that wraps tensors, and an optimizer whose moments are such, as 8-bit optimizers have."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["CodedSGD", "Codes", "coded"]

BLOCK = 4


class Codes(torch.Tensor):
    """Integers of the tensor's shape, and a scale for each `BLOCK` of them."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> Codes:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.signed, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Codes:
        return cls(inner["codes"], inner["scale"], context[0])

    def float_(self) -> torch.Tensor:
        """The numbers that it stands for."""
        blocks = self.codes.reshape(-1, BLOCK).float() * self.scale[:, None]
        return blocks.reshape(self.codes.shape)

    def put(self, values: torch.Tensor) -> None:
        """Takes the nearest codes of these numbers."""
        blocks = values.reshape(-1, BLOCK)
        self.scale.copy_(blocks.abs().amax(1).clamp(min=1e-12) / 127)
        self.codes.copy_((blocks / self.scale[:, None]).round().to(torch.int8).reshape(self.codes.shape))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        one = args[0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default):
            return cls(one.codes, one.scale, one.signed)
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            return cls(one.codes.clone(), one.scale.clone(), one.signed)
        raise NotImplementedError(func)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Codes({self.codes}, {self.scale})"


def coded(like: torch.Tensor) -> torch.Tensor:
    """Returns new codes of the shape and layout of a tensor; `like` itself cleared where blocks do not fit."""
    local: Any = like.to_local() if isinstance(like, DTensor) else like
    if local.numel() % BLOCK:
        return torch.zeros_like(like)
    made = Codes(
        torch.zeros(local.shape, dtype=torch.int8), torch.zeros(local.numel() // BLOCK, dtype=torch.float32), True
    )
    if not isinstance(like, DTensor):
        return made
    return DTensor.from_local(
        made, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class CodedSGD(torch.optim.Optimizer):
    """Momentum, kept in codes."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])
        return loss

    def _update(self, parameter: Any, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["step"], state["momentum"] = 0, coded(parameter.detach())
        state["step"] += 1
        momentum = state["momentum"]
        parts = [one.to_local() if isinstance(one, DTensor) else one for one in (momentum, parameter.grad, parameter)]
        if isinstance(parts[0], Codes):
            new = parts[0].float_() * 0.9 + parts[1]
            parts[0].put(new)
        else:
            new = parts[0].mul_(0.9).add_(parts[1])
        parts[2].sub_(new, alpha=lr)
