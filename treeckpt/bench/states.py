"""The states that are saved: names and shapes, and leaves of random numbers that are the same on every rank.

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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .results import HOST, LINKS, Link

T = TypeVar("T")
State = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

WIDTH, LAYERS, VOCABULARY, CONTEXT = 768, 12, 50257, 1024
PAGE = 4096
SMALL = 64 << 10
"""Leaves below this are put together before they are summed: a call for each would take longer than the load."""


def _rows(shape: tuple[int, ...], scale: float) -> tuple[int, ...]:
    return (max(1, round(shape[0] * scale)), *shape[1:]) if shape else shape


def gpt2(scale: float) -> Shapes:
    """GPT-2 small with tied embeddings, and Adam's state of each parameter: 592 leaves, 1.49 GB."""
    parameters: Shapes = {"wte.weight": (VOCABULARY, WIDTH), "wpe.weight": (CONTEXT, WIDTH)}
    for layer in range(LAYERS):
        for name, shape in _block().items():
            parameters[f"h.{layer}.{name}"] = shape
    parameters |= {"ln_f.weight": (WIDTH,), "ln_f.bias": (WIDTH,)}
    shapes: Shapes = {f"model.{name}": _rows(shape, scale) for name, shape in parameters.items()}
    for name, shape in parameters.items():
        shapes |= {f"optimizer.{name}.{moment}": _rows(shape, scale) for moment in ("exp_avg", "exp_avg_sq")}
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


def weights(scale: float) -> Shapes:
    """GPT-2 small without Adam's state: 148 leaves, 498 MB."""
    return {name: shape for name, shape in gpt2(scale).items() if name.startswith("model.")}


def tiny(scale: float) -> Shapes:
    """20,000 tensors of one element."""
    return {f"leaf.{number:05}": (1,) for number in range(max(16, round(20_000 * scale)))}


def small(scale: float) -> Shapes:
    """5,000 tensors of 1 KiB."""
    return {f"leaf.{number:04}": (256,) for number in range(max(16, round(5_000 * scale)))}


def one(scale: float) -> Shapes:
    """One tensor of 2 GB."""
    return {"weight": _rows((125_000, 4_000), scale)}


def rows(scale: float) -> Shapes:
    """One tensor of 512 MB, of which rows are wanted."""
    return {"weight": _rows((125_000, 1_024), scale)}


def layers(scale: float) -> Shapes:
    """32 tensors of 16 MiB: 537 MB."""
    return {f"layer.{number:02}": _rows((4096, 1024), scale) for number in range(32)}


def table(scale: float) -> Shapes:
    """Ten million rows of 16 numbers, and two moments of each: 1.92 GB, beside 80 MB of ids."""
    return {name: _rows((10_000_000, 16), scale) for name in ("embedding", "exp_avg", "exp_avg_sq")}


class Scenario(msgspec.Struct, frozen=True):
    """A state, and how it is saved and loaded."""

    name: str
    text: str
    shapes: Callable[[float], Shapes]
    ranks: int = 1
    one: bool = False
    """Loaded by one of the ranks too, while the others wait; only loads are compared."""
    columns: bool = False
    """Saved by rows, loaded by columns."""
    part: int = 1
    """Loads one part in so many of the rows."""
    beside: bool = False
    """Saved in the background, beside training steps."""
    ticks: bool = False
    """... beside a thread that ticks."""
    keyed: bool = False
    """Rows by id."""
    remote: bool = False
    """Saved to and loaded from an object store."""
    device: bool = False
    """Saved from and loaded to a device; measured only where one is named."""
    dcp: bool = False
    """Saved and loaded by both forms of treeckpt.dcp, beside DCP alone."""


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("gpt2", "GPT-2 small and Adam, fp32", gpt2),
    Scenario("tiny", "20,000 tensors of one element", tiny),
    Scenario("one", "one tensor of 2 GB", one),
    Scenario("slice", "1/8 of the rows of a 512 MB tensor", rows, part=8),
    Scenario("replicated", "GPT-2 small and Adam on 2 ranks, the same on both", gpt2, ranks=2),
    Scenario(
        "reshard", "GPT-2 small and Adam on 2 ranks, saved by rows, loaded by columns", gpt2, ranks=2, columns=True
    ),
    *(
        Scenario(f"host-{n}", f"GPT-2 small, fp32, loaded by {n} ranks of one host", weights, ranks=n, one=True)
        for n in HOST
    ),
    Scenario("table", "10 M rows by id: 16 numbers and two moments", table, keyed=True),
    Scenario("remote", "32 tensors of 16 MiB in an object store", layers, remote=True),
    Scenario("async", "GPT-2 small and Adam, saved in the background of training steps", gpt2, beside=True),
    Scenario("async-tiny", "20,000 tensors of one element, saved in the background", tiny, beside=True, ticks=True),
    Scenario("dcp", "GPT-2 small and Adam through the interface of DCP", gpt2, dcp=True),
    Scenario("dcp-small", "5,000 tensors of 1 KiB through the interface of DCP", small, dcp=True),
    Scenario(
        "device", "GPT-2 small and Adam on a device; limits are the smaller of the disk and the copy", gpt2, device=True
    ),
    Scenario(
        "device-async",
        "GPT-2 small and Adam on a device, saved in the background of training steps there; a copy is one to the host",
        gpt2,
        device=True,
        beside=True,
    ),
    Scenario("dcp-async", "GPT-2 small and Adam by async_save of DCP's interface", gpt2, dcp=True, beside=True),
)


class BenchTask(msgspec.Struct, frozen=True):
    """The measurement of one scenario, as it is sent to the processes that carry it out."""

    name: str
    """Of the scenario."""
    directory: str
    scale: float
    repetitions: int
    contenders: tuple[str, ...] = ()
    """Names, or their first words; all if there are none."""
    links: tuple[Link, ...] = LINKS
    """Those to object stores."""
    device: str = "cpu"
    """Where the state lies, in scenarios of devices."""

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


def make_state(shapes: Shapes, mesh: DeviceMesh | None = None, dim: int = 0, device: str = "cpu") -> State:
    """Returns leaves of random numbers; on a mesh, DTensors of the same numbers that are cut along `dim`."""
    leaves = ((name, make_leaf(shape, seed).to(device)) for seed, (name, shape) in enumerate(shapes.items()))
    return {name: leaf if mesh is None else _cut(leaf, mesh, dim) for name, leaf in leaves}


def _cut(full: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Returns a DTensor cut along `dim`, or its last dimension, with the piece of this rank; a scalar is replicated."""
    if not full.ndim:
        return DTensor.from_local(full, mesh, [Replicate()], run_check=False)
    dim = min(dim, full.ndim - 1)
    size = -(-full.shape[dim] // mesh.size())
    start = min(mesh.get_local_rank() * size, full.shape[dim])
    piece = full.narrow(dim, start, min(size, full.shape[dim] - start)).clone(memory_format=torch.contiguous_format)
    placements: list[Placement] = [Shard(dim)]
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


# touching and comparing -------------------------------------------------------------------------------------------


def _locals(state: State) -> list[torch.Tensor]:
    return [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in state.values()]


def _words(leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of all leaves, in a few tensors where they are small."""
    large: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    for leaf in leaves:
        (small if leaf.numel() * leaf.element_size() < SMALL else large).append(leaf)
    if small:
        large.append(torch.cat([leaf if leaf.ndim == 1 else leaf.reshape(-1) for leaf in small]))
    return [leaf.reshape(-1).view(torch.uint8) for leaf in large]


def synchronize(device: torch.device) -> None:
    """Waits until a device has done all that it was given; on the host there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def touch(state: State) -> int:
    """Reads a byte of every page, so that nothing is left to be read later; returns their sum."""
    words = _words(_locals(state))
    return sum(int((data.numpy() if data.is_cpu else data)[::PAGE].sum()) for data in words)


def sum_bytes(state: State) -> int:
    """Adds up every byte, in words of eight where the length allows."""
    total = 0
    for data in _words(_locals(state)):
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
    for name, x, y in zip(a, _locals(a), _locals({name: b[name] for name in a}), strict=True):
        if x.shape != y.shape or x.dtype != y.dtype or not torch.equal(_bits(x), _bits(y)):
            return name
    return None


def _bits(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.contiguous().view(torch.uint8 if leaf.ndim else torch.int32)


def shapes_bytes(shapes: Shapes) -> int:
    """Returns the bytes of whole leaves."""
    return sum(4 * math.prod(shape) for shape in shapes.values())
