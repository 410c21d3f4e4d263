"""A job of DeepSpeed on one CPU process: prints the errors of saves that would lose its parameters or optimizer.

Arguments: the stage of ZeRO, a directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import treeckpt as tc


def error_of(save: Callable[[], Any]) -> str:
    try:
        save()
    except tc.TreeckptError as error:
        return f"{type(error).__name__} {error}"
    return "saved"


def main(stage: int, directory: Path) -> None:
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ["MASTER_PORT"] = "0"
    import deepspeed
    import deepspeed.ops

    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
    # kernels that DeepSpeed compiles for CPUs when they are first used
    deepspeed.ops.__compatible_ops__ = dict.fromkeys(deepspeed.ops.__compatible_ops__, False)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    inner = torch.optim.AdamW(model.parameters())
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 10}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=inner, config=config)
    path, state = directory / "c", tc.training.state
    print("parameters:", error_of(lambda: tc.save(path, dict(model.named_parameters()), overwrite=True)))
    print("state dict:", error_of(lambda: tc.save(path, model.state_dict(), overwrite=True)))
    print("engine:", error_of(lambda: tc.save(path, state(engine), overwrite=True)))
    print("optimizer:", error_of(lambda: state(engine, optimizer)))
    print("inner optimizer:", error_of(lambda: state(model, inner)))
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        tc.save(path, model.state_dict(), overwrite=True)
    saved = tc.load(path)
    assert all(torch.equal(saved[name], tensor) for name, tensor in wanted.items())
    engine.save_checkpoint(directory)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
