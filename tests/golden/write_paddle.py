"""Writes the checkpoints of Paddle that tests read; Paddle itself is no dependency, so they are committed.

In an environment with paddlepaddle (3.3.1 wrote those that are here), and torch-free:

    export CUDA_VISIBLE_DEVICES=
    python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo write_paddle.py DIRECTORY
    python write_paddle.py DIRECTORY

The first makes DIRECTORY/two, of two ranks, the second DIRECTORY/one; `expected` and `nested` are what they hold.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["expected"]


def expected() -> dict[str, Any]:
    """What two ranks hold, each some pieces; `flat` is bfloat16 there."""
    rows = np.arange(30, dtype=np.float32).reshape(6, 5)
    return {
        "rows": rows,
        "columns": np.arange(24, dtype=np.float64).reshape(4, 6) / 4,
        "flat": np.arange(21, dtype=np.float32).reshape(7, 3) / 2,
        "same": np.array([1, -2, 3]),
        "big": np.arange(3000, dtype=np.int32).reshape(60, 50),
    }


def nested() -> dict[str, Any]:
    """What one rank holds, of all dtypes; besides `brain`, [1.5, -2] in bfloat16."""
    return {
        "model": {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "scalar": np.float32(2.5)},
        "moments": {"half": np.ones(2, np.float16), "flags": np.array([True, False])},
        "complex": np.array([1 + 2j], np.complex64),
        "bytes": np.arange(3, dtype=np.uint8),
    }


def main() -> None:
    import paddle
    import paddle.distributed as dist
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    rank, directory = dist.get_rank(), Path(sys.argv[1])
    if dist.get_world_size() == 1:
        tensors = {key: _tensors(value) for key, value in nested().items()}
        tensors["brain"] = paddle.to_tensor([1.5, -2.0]).astype("bfloat16")
        dist.save_state_dict(tensors, str(directory / "one"))
        return
    dist.init_parallel_env()
    whole = expected()

    def piece(name: str, low: tuple[int, ...], high: tuple[int, ...]) -> Any:
        array = whole[name][tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
        return ShardedWeight(name, paddle.to_tensor(array.copy()), array.shape, whole[name].shape, low)

    start, stop = (0, 10) if rank == 0 else (10, 21)
    flat = paddle.to_tensor(whole["flat"].reshape(-1)[start:stop].copy()).astype("bfloat16")
    state = {
        "rows": piece("rows", (0, 0), (2, 5)) if rank == 0 else piece("rows", (2, 0), (6, 5)),
        "columns": piece("columns", (0, 0), (4, 3)) if rank == 0 else piece("columns", (0, 3), (4, 6)),
        "flat": ShardedWeight("flat", flat, (7, 3), (7, 3), (0, 0), True, slice(start, stop)),
        "same": piece("same", (0,), (3,)),
        "big": piece("big", (0, 0), (31, 50)) if rank == 0 else piece("big", (31, 0), (60, 50)),
    }
    dist.save_state_dict(state, str(directory / "two"))


def _tensors(node: Any) -> Any:
    import paddle

    return {key: _tensors(child) for key, child in node.items()} if isinstance(node, dict) else paddle.to_tensor(node)


if __name__ == "__main__":
    main()
