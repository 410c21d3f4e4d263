"""Trains a small Llama with torchtitan's own `Trainer` on CPUs and `TreeckptManager`; resumes what is there.

Two ranks are data-parallel, four are also tensor-parallel. torchtitan asks for an accelerator: `CpuDevice` answers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset


class CpuDevice(ModuleType):
    """torch.cpu, with what torchtitan asks of a device's memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any) -> str:
        return "CPU"

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=1 << 30)

    def current_device(self) -> int:
        return 0

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.tools import utils  # noqa: E402

utils.device_type, utils.device_module = "cpu", CpuDevice("cpu")
if not hasattr(dist, "set_timeout"):  # new in torch 2.14, which torchtitan 0.3 is made for
    dist.set_timeout = lambda *_, **__: None  # type: ignore[attr-defined]

from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from tests.helpers import framework_job as job  # noqa: E402
from treeckpt.integrations.torchtitan import TreeckptManager  # noqa: E402

VOCABULARY, LENGTH = 64, 16


class Numbers(IterableDataset[Any]):
    """A rank's rows of tokens, which go on where they were."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            seed = torch.Generator().manual_seed(1000 * self.rank + self.position)
            tokens = torch.randint(VOCABULARY // 4, (LENGTH + 1,), generator=seed)
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class NumbersLoader(ParallelAwareDataloader):
    """torchtitan's loader of these rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Without options of its own."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        super().__init__(Numbers(dp_rank), dp_rank, dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):
    """The rows are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Without options."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


def small_llama() -> Any:
    """Returns torchtitan's spec of a Llama of two layers, with an attention that runs on CPUs."""
    spec = llama3.model_registry("debugmodel")
    dim = 32
    config = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=VOCABULARY,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=dim, out_features=VOCABULARY, param_init=llama3._output_linear_init(dim)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=2,
            dim=dim,
            n_heads=4,
            hidden_dim=64,
            rope=llama3.ComplexRoPE.Config(dim=dim // 4, max_seq_len=LENGTH, theta=10000),
            attn_backend="flex",
        ),
    )
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model = config
    return spec


class KilledManager(TreeckptManager):
    """Kills its process in the save of a step."""

    @dataclass(kw_only=True, slots=True)
    class Config(TreeckptManager.Config):
        """Never without a step."""

        kill_at: int | None = None

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if curr_step != self.config.kill_at:
            return super()._save(curr_step, last_step)
        self.maybe_wait_for_saving()
        with job.killed_in_save():
            return super()._save(curr_step, last_step)


def main() -> None:
    arguments = job.arguments()
    config = Trainer.Config(
        model_spec=small_llama(),
        dump_folder=str(arguments.directory),
        tokenizer=NoTokenizer.Config(),
        dataloader=NumbersLoader.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=default_adamw(lr=1e-2, implementation="foreach"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=LENGTH,
            steps=arguments.steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=max(int(os.environ["WORLD_SIZE"]) // 2, 1), spmd_backend="partial_dtensor"
        ),
        activation_checkpoint=None,
        checkpoint=KilledManager.Config(enable=True, interval=2, kill_at=arguments.kill_at, **arguments.options),
        debug=DebugConfig(seed=0, deterministic=True),
    )
    init_logger()
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # all that gloo has
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
