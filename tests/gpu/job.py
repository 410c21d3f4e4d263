"""One rank with FSDP2, HSDP and tensor parallelism on a device: `python -m tests.gpu.job DEVICE DIRECTORY`."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import treeckpt as tc
from treeckpt import training


def _net(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)


def _fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh)


def _tp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> float:
    optimizer.zero_grad()
    loss = model(torch.ones(4, 32, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _check(name: str, spread: Callable[[nn.Module], nn.Module], device: str, directory: Path) -> None:
    """Trains, saves in both ways, and restores into the same layout and into a plain model."""
    model = spread(_net(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _step(model, optimizer, device)
    tree = training.state(model, optimizer)
    tc.save(directory / name, tree)
    pending = tc.save_async(directory / f"{name}-async", tree)
    pending.result(120)
    expected = _step(model, optimizer, device)
    for path in (directory / name, directory / f"{name}-async"):
        for wrap in (spread, lambda plain: plain):
            torch.manual_seed(1)
            fresh = wrap(copy.deepcopy(_net(device)))
            with torch.no_grad():
                for parameter in fresh.parameters():
                    parameter.zero_()
            own = torch.optim.AdamW(fresh.parameters(), lr=0.5)
            training.restore(path, fresh, own)
            assert next(fresh.parameters()).device.type == device
            found = _step(fresh, own, device)
            assert abs(found - expected) <= 1e-6 * abs(expected), (name, found, expected)
    print("ok", name, flush=True)


def main() -> None:
    device, directory = sys.argv[1], Path(sys.argv[2])
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.FileStore(str(directory / "store"), 1))
    one, two = init_device_mesh(device, (1,)), init_device_mesh(device, (1, 1), mesh_dim_names=("replicate", "shard"))
    _check("fsdp", lambda model: _fsdp(model, one), device, directory)
    _check("hsdp", lambda model: _fsdp(model, two), device, directory)
    _check("tp", lambda model: _tp(model, one), device, directory)
    with tc.Manager(directory / "run", comm=dist.group.WORLD) as manager:
        manager.save(1, {"x": torch.ones(4, device=device)})
        manager.wait()
        assert manager.latest() == 1 and manager.restore(device=device)["x"].device.type == device
    print("ok", "manager", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches keep gloo's threads: one that frees a tensor while the interpreter ends aborts it


if __name__ == "__main__":
    main()
