"""The states that are saved: names and shapes, and leaves of random numbers, the same in each run.

A state is a flat dict of tensors, which every contender takes as it is. `scale` shortens the first dimension of every
leaf (or the number of leaves, where each has one element), so that a small run has the same make-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

T = TypeVar("T")
State = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

WIDTH, LAYERS, VOCABULARY, CONTEXT = 768, 12, 50257, 1024
PAGE_NBYTES = 4096
SUMMED_TOGETHER_NBYTES = 64 << 10
"""Leaves below this are put together before they are summed: a call for each would take longer than the load."""


def first_rows(shape: tuple[int, ...], scale: float) -> tuple[int, ...]:
    """Returns a shape with a part of its first dimension, at least one row."""
    return (max(1, round(shape[0] * scale)), *shape[1:]) if shape else shape


def gpt2(scale: float) -> Shapes:
    """GPT-2 small with tied embeddings, and Adam's state of each parameter: 592 leaves, 1.49 GB."""
    parameters: Shapes = {"wte.weight": (VOCABULARY, WIDTH), "wpe.weight": (CONTEXT, WIDTH)}
    for layer in range(LAYERS):
        for name, shape in _block().items():
            parameters[f"h.{layer}.{name}"] = shape
    parameters |= {"ln_f.weight": (WIDTH,), "ln_f.bias": (WIDTH,)}
    shapes: Shapes = {f"model.{name}": first_rows(shape, scale) for name, shape in parameters.items()}
    for name, shape in parameters.items():
        shapes |= {f"optimizer.{name}.{moment}": first_rows(shape, scale) for moment in ("exp_avg", "exp_avg_sq")}
        shapes[f"optimizer.{name}.step"] = ()
    return shapes


def _block() -> Shapes:
    linears = {
        "attn.c_attn": (WIDTH, 3 * WIDTH),
        "attn.c_proj": (WIDTH, WIDTH),
        "mlp.c_fc": (WIDTH, 4 * WIDTH),
        "mlp.c_proj": (4 * WIDTH, WIDTH),
    }
    shapes: Shapes = {f"{norm}.{part}": (WIDTH,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[1:]}
    return shapes


def tiny(scale: float) -> Shapes:
    """20,000 tensors of one element."""
    return {f"leaf.{number:05}": (1,) for number in range(max(16, round(20_000 * scale)))}


def one(scale: float) -> Shapes:
    """One tensor of 2 GB."""
    return {"weight": first_rows((125_000, 4_000), scale)}


class Scenario(msgspec.Struct, frozen=True):
    """A state by its name."""

    name: str
    text: str
    shapes: Callable[[float], Shapes]


SCENARIOS = (
    Scenario("gpt2", "GPT-2 small and Adam, fp32", gpt2),
    Scenario("tiny", "20,000 tensors of one element", tiny),
    Scenario("one", "one tensor of 2 GB", one),
)


class BenchTask(msgspec.Struct, frozen=True):
    """The measurement of one scenario."""

    name: str
    """The name of the scenario."""
    directory: str
    scale: float
    repetitions: int
    contenders: tuple[str, ...] = ()
    """Names, or their first words; all if there are none."""

    @property
    def scenario(self) -> Scenario:
        """The scenario of this name."""
        return next(scenario for scenario in SCENARIOS if scenario.name == self.name)

    @property
    def shapes(self) -> Shapes:
        """The shapes of the leaves in this scale."""
        return self.scenario.shapes(self.scale)

    @property
    def path(self) -> Path:
        """The directory to write in."""
        return Path(self.directory)

    def selects(self, contender: str) -> bool:
        """Whether the contender of a name is measured."""
        return not self.contenders or bool({contender, contender.partition(" ")[0]} & set(self.contenders))

    def turns(self, contenders: Sequence[T]) -> Iterator[tuple[int, T]]:
        """Yields (repetition, contender), forwards and backwards by turns: drifts of the machine affect all alike."""
        for repetition in range(self.repetitions):
            for contender in contenders if repetition % 2 == 0 else reversed(contenders):
                yield repetition, contender


def make_leaf(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Returns random numbers between 0 and 1, the same for the same seed."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def make_state(shapes: Shapes) -> State:
    """Returns leaves of random numbers, the same for the same shapes."""
    return {name: make_leaf(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}


# touching and comparing -------------------------------------------------------------------------------------------


def _words(leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of all leaves, in a few tensors where they are small."""
    large: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    for leaf in leaves:
        (small if leaf.numel() * leaf.element_size() < SUMMED_TOGETHER_NBYTES else large).append(leaf)
    if small:
        large.append(torch.cat([leaf if leaf.ndim == 1 else leaf.reshape(-1) for leaf in small]))
    return [leaf.reshape(-1).view(torch.uint8) for leaf in large]


def touch(state: State) -> int:
    """Reads a byte of every page, so that nothing is left to be read later; returns their sum."""
    words = _words(state.values())
    return sum(int((data.numpy() if data.is_cpu else data)[::PAGE_NBYTES].sum()) for data in words)


def sum_bytes(state: State) -> int:
    """Adds up every byte, in words of eight where the length allows."""
    total = 0
    for data in _words(state.values()):
        whole = len(data) // 8 * 8
        if data.data_ptr() % 8 == 0:
            total += int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum())
        else:
            total += int(data.sum())
    return total


def different_leaf(a: State, b: State) -> str | None:
    """Returns the name of a leaf that is not the same in both, byte for byte; None if there is none."""
    for name in a.keys() ^ b.keys():
        return name
    for name, x in a.items():
        y = b[name]
        if x.shape != y.shape or x.dtype != y.dtype or not torch.equal(_bits(x), _bits(y)):
            return name
    return None


def _bits(leaf: torch.Tensor) -> torch.Tensor:
    # A tensor without dimensions can be viewed as a dtype of the same width only.
    return leaf.contiguous().view(torch.uint8 if leaf.ndim else torch.int32)


def shapes_bytes(shapes: Shapes) -> int:
    """Returns the bytes of whole leaves."""
    return sum(4 * math.prod(shape) for shape in shapes.values())
