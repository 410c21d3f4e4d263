"""The three layouts of the model over the ranks.

Each follows the recipe that PyTorch documents: FSDP2 on a 2x2 mesh (every parameter is cut by rows in two,
and each half has two replicas), tensor and sequence parallelism over two ranks (cut by rows or by columns, some not
at all), and one plain process. The checkpoint code is the same for all three and sees none of this module.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from .model import GPT
from .tasks import RANKS, Layout


def place(model: GPT, layout: Layout, rows: int) -> range:
    """Lays the model out in place; a layout of several ranks needs the process group.

    Returns:
        This rank's rows of a global batch of `rows`.
    """
    match layout:
        case "plain":
            return range(rows)
        case "tp":
            split_tensors(model, init_device_mesh("cpu", (RANKS[layout],), mesh_dim_names=("tp",)))
            return range(rows)
        case "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)  # small: keep for the backward pass
            fully_shard(model, mesh=mesh)
            share = rows // mesh.size()
            return range(mesh.get_rank() * share, (mesh.get_rank() + 1) * share)


def split_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Applies tensor and sequence parallelism over a mesh of one dimension."""
    rows, whole = Shard(1), Replicate()  # activations are (batch, time, width): between layers, time is split
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=rows),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=whole),
    }
    block: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=rows),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,)),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=rows),
    }
    parallelize_module(model, mesh, ends)
    for layer in model.get_submodule("layers").children():
        parallelize_module(layer, mesh, block)
