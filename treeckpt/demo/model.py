"""A small GPT in plain torch: bytes in, the logits of the next byte out.

Pre-norm blocks of causal attention (rotary positions) and a GELU feed-forward. It knows nothing of parallelism: the
number of heads is read off the projected tensor, so that a tensor-parallel rank, which holds some of the heads, runs
the same code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


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
