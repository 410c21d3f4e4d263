"""Trains a small model on the ranks of torchrun, and can be killed, signalled and started again; see test_resuming.

    ... -m tests.multirank.resuming RUN OUT STEPS [--kill RANK:STEP ...] [--forever]

Every step draws a batch and dropout from the RNG of its own rank, so that state that is lost, or doubled, changes all
that follows. What is left at the end is `OUT.<rank>.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import treeckpt as tc
from tests.helpers.world import LONG
from treeckpt._io.comm.comm import default_comm


def build(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    torch.manual_seed(100 + rank)
    np.random.seed(200 + rank)
    random.seed(300 + rank)
    return model, optimizer, schedule


def state_of(model: Any, optimizer: Any, schedule: Any) -> dict[str, Any]:
    rng = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "rng": tc.PerRank(rng),
    }


def set_state(state: dict[str, Any], model: Any, optimizer: Any, schedule: Any) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    rng = state["rng"].value
    torch.set_rng_state(rng["torch"])
    np.random.set_state(rng["numpy"])
    random.setstate(rng["python"])


def train(model: Any, optimizer: Any, schedule: Any) -> float:
    """One step of data parallelism; the loss."""
    scale = random.uniform(0.5, 1.5)
    batch = torch.randn(8, 16) * scale + torch.from_numpy(np.random.standard_normal((8, 16))).float()
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    schedule.step()
    return loss.item()


def digest(tree: Any) -> str:
    flat = json.dumps(tree, default=lambda leaf: hashlib.sha256(torch.as_tensor(leaf).numpy().tobytes()).hexdigest())
    return hashlib.sha256(flat.encode()).hexdigest()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--kill", action="append", default=[])
    parser.add_argument("--forever", action="store_true")
    options = parser.parse_args(arguments)
    # gloo may hang while it connects the ranks of a restart: then this one ends, and the next attempt finds the others
    signal.alarm(15 if int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) else 0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LONG))
    signal.alarm(0)
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    torch.set_num_threads(1)
    default_comm().timeout = LONG  # pyright: ignore[reportAttributeAccessIssue]
    model, optimizer, schedule = build(rank)
    losses: list[float] = []
    every = None if options.forever else 3
    keep = [tc.policy.Last(2), tc.policy.Best("loss")]
    with tc.Manager(options.run, keep=keep, every=every) as manager:
        manager.save_on_signal(exit=0)
        if manager.latest() is not None:
            set_state(manager.restore(), model, optimizer, schedule)
        print(f"rank {rank} attempt {attempt} from {manager.count}", flush=True)
        Path(f"{options.out}.{rank}.pid").write_text(f"{os.getpid()}")
        while options.forever or manager.count < options.steps:
            losses.append(train(model, optimizer, schedule))
            time.sleep(0.02 if options.forever else 0)
            Path(f"{options.out}.{rank}.step").write_text(f"{manager.count + 1}")
            manager.step(lambda: state_of(model, optimizer, schedule), metrics={"loss": losses[-1]})
            spec = f"{rank}:{manager.count}"
            killed = Path(f"{options.out}.killed.{spec}")
            if spec in options.kill and not killed.exists():
                killed.touch()  # once: gloo may fail to connect and use attempts up
                os.kill(os.getpid(), signal.SIGKILL)
    result = {"digest": digest(state_of(model, optimizer, schedule)["model"]), "loss": losses[-1].hex()}
    state = state_of(model, optimizer, schedule)
    result["optimizer"], result["rng"] = digest(state["optimizer"]), digest(state["rng"].value)
    Path(f"{options.out}.{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
