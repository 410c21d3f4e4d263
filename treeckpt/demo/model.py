"""What the demo trains: bytes of text, a small GPT in plain torch that predicts the next one, and its three layouts.

The text is the standard library's own sources, which every machine that runs this has. A batch is a pure function of
(text, seed, step, row): the start of each row is drawn by a hash of those numbers, so that no generator has to be
saved and every rank can make exactly its own rows. Tokens are bytes; there is no vocabulary to learn or to store.

The model has pre-norm blocks of causal attention (rotary positions) and a GELU feed-forward. It knows nothing of
parallelism: the number of heads is read off the projected tensor, so that a tensor-parallel rank, which holds some of
the heads, runs the same code.

Each layout follows the recipe that PyTorch documents: FSDP2 on a 2x2 mesh (every parameter is cut by rows in two,
and each half has two replicas), tensor and sequence parallelism over two ranks (cut by rows or by columns, some not
at all), and one plain process. The checkpoint code is the same for all three and sees none of this module.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
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
from torch.nn import functional

from .tasks import RANKS, Layout

# text -----------------------------------------------------------------------------------------------------------------

TEXT_BYTES = 1 << 20


def read_text(folder: Path | None = None, *, nbytes: int = TEXT_BYTES) -> NDArray[np.uint8]:
    """Returns the first bytes of a folder's top-level Python files, joined in the order of their names.

    Returns:
        1-D, at most `nbytes` long.

    Raises:
        FileNotFoundError: there is no Python source there (some systems ship the library compiled or zipped).
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        if len(text) >= nbytes:
            break
        text += file.read_bytes()
    if not text:
        raise FileNotFoundError(f"{folder}: expected Python sources to train on, found none")
    return np.frombuffer(bytes(text[:nbytes]), dtype=np.uint8)


def row_start(seed: int, step: int, row: int, *, stop: int) -> int:
    """Returns the start of a row of a step's batch in the text: a number in [0, stop)."""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % stop


def batch(text: NDArray[np.uint8], step: int, *, seed: int, rows: range, length: int) -> NDArray[np.int64]:
    """Returns rows of a step's global batch: inputs are `[:, :-1]`, targets `[:, 1:]`.

    Returns:
        (len(rows), length + 1), each row a part of the text.
    """
    stop = len(text) - length
    if stop < 1:
        raise ValueError(f"expected a text of more than {length} bytes, got {len(text)}")
    starts = [row_start(seed, step, row, stop=stop) for row in rows]
    return np.stack([text[start : start + length + 1] for start in starts]).astype(np.int64)


# model ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes; the defaults give 1.9 million parameters (7.7 MB) in 63 tensors."""

    vocabulary: int = 256
    layers: int = 6
    width: int = 160
    heads: int = 4
    hidden: int = 640
    length: int = 64
    """Bytes of context."""


def rotate(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864): x is (batch, heads, time, head width)."""
    time, half = x.shape[-2], x.shape[-1] // 2
    frequencies = 10_000.0 ** -(torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(time, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention over the heads that this rank holds."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.wq = nn.Linear(config.width, config.width, bias=False)
        self.wk = nn.Linear(config.width, config.width, bias=False)
        self.wv = nn.Linear(config.width, config.width, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(project(x)) for project in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class FeedForward(nn.Module):
    """width -> hidden -> width."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class TransformerBlock(nn.Module):
    """One layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """(batch, time) bytes -> (batch, time, vocabulary) logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build_model(config: ModelConfig, seed: int) -> GPT:
    """Builds the same weights for the same seed, on every rank."""
    torch.manual_seed(seed)
    model = GPT(config)
    nn.init.normal_(model.embedding.weight, std=0.02)
    return model


# layouts --------------------------------------------------------------------------------------------------------------


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
