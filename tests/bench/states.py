"""The scenarios of developers' measurements beside those of `treeckpt bench`: ranks, tables, devices, object stores."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.bench.results import HOST, LINKS, Link
from treeckpt._bench import states as bench
from treeckpt._bench.states import BenchTask, Scenario, Shapes, State, first_rows, gpt2, make_leaf, tiny


def weights(scale: float) -> Shapes:
    """GPT-2 small without Adam's state: 148 leaves, 498 MB."""
    return {name: shape for name, shape in gpt2(scale).items() if name.startswith("model.")}


def small(scale: float) -> Shapes:
    """5,000 tensors of 1 KiB."""
    return {f"leaf.{number:04}": (256,) for number in range(max(16, round(5_000 * scale)))}


def rows(scale: float) -> Shapes:
    """One tensor of 512 MB, of which rows are wanted."""
    return {"weight": first_rows((125_000, 1_024), scale)}


def layers(scale: float) -> Shapes:
    """32 tensors of 16 MiB: 537 MB."""
    return {f"layer.{number:02}": first_rows((4096, 1024), scale) for number in range(32)}


def table(scale: float) -> Shapes:
    """Ten million rows of 16 numbers, and two moments of each: 1.92 GB, beside 80 MB of ids."""
    return {name: first_rows((10_000_000, 16), scale) for name in ("embedding", "exp_avg", "exp_avg_sq")}


class SpeedScenario(Scenario, frozen=True):
    """A state, and how it is saved and loaded."""

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


SCENARIOS: tuple[SpeedScenario, ...] = (
    *(SpeedScenario(one.name, one.text, one.shapes) for one in bench.SCENARIOS),
    SpeedScenario("slice", "1/8 of the rows of a 512 MB tensor", rows, part=8),
    SpeedScenario("replicated", "GPT-2 small and Adam on 2 ranks, the same on both", gpt2, ranks=2),
    SpeedScenario(
        "reshard", "GPT-2 small and Adam on 2 ranks, saved by rows, loaded by columns", gpt2, ranks=2, columns=True
    ),
    *(
        SpeedScenario(f"host-{n}", f"GPT-2 small, fp32, loaded by {n} ranks of one host", weights, ranks=n, one=True)
        for n in HOST
    ),
    SpeedScenario("table", "10 M rows by id: 16 numbers and two moments", table, keyed=True),
    SpeedScenario("remote", "32 tensors of 16 MiB in an object store", layers, remote=True),
    SpeedScenario("async", "GPT-2 small and Adam, saved in the background of training steps", gpt2, beside=True),
    SpeedScenario(
        "async-tiny", "20,000 tensors of one element, saved in the background", tiny, beside=True, ticks=True
    ),
    SpeedScenario("dcp", "GPT-2 small and Adam through the interface of DCP", gpt2, dcp=True),
    SpeedScenario("dcp-small", "5,000 tensors of 1 KiB through the interface of DCP", small, dcp=True),
    SpeedScenario(
        "device", "GPT-2 small and Adam on a device; limits are the smaller of the disk and the copy", gpt2, device=True
    ),
    SpeedScenario(
        "device-async",
        "GPT-2 small and Adam on a device, saved in the background of training steps there; a copy is one to the host",
        gpt2,
        device=True,
        beside=True,
    ),
    SpeedScenario("dcp-async", "GPT-2 small and Adam by async_save of DCP's interface", gpt2, dcp=True, beside=True),
)


class SpeedTask(BenchTask, frozen=True):
    """The measurement of one scenario, as it is sent to the processes that carry it out."""

    links: tuple[Link, ...] = LINKS
    """Those to object stores."""
    device: str = "cpu"
    """Where the state lies, in scenarios of devices."""

    @property
    def scenario(self) -> SpeedScenario:
        """The scenario of this name."""
        return next(scenario for scenario in SCENARIOS if scenario.name == self.name)


def locals_of(state: State) -> State:
    """Returns the pieces of DTensors that lie on this rank; other tensors as they are."""
    return {name: leaf.to_local() if isinstance(leaf, DTensor) else leaf for name, leaf in state.items()}


def synchronize(device: torch.device) -> None:
    """Waits until a device has done all that it was given; on the host there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_cut_state(shapes: Shapes, mesh: DeviceMesh | None = None, dim: int = 0) -> State:
    """Returns leaves of random numbers; on a mesh, DTensors of the same numbers that are cut along `dim`."""
    leaves = ((name, make_leaf(shape, seed)) for seed, (name, shape) in enumerate(shapes.items()))
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
