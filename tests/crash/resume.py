"""A training that resumes through its manager and is killed again and again.

    python -m tests.crash.resume DIR STEPS KILLS SEED

This process imports torch once and forks: first a training that nothing interrupts (DIR/calm), then one that is killed
KILLS times (DIR/killed). Each writes `STEP LOSS` for each step that it trains, and at its end the parameters and the
state of the generator.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path

import torch
import torch._dynamo  # what optimizers import when they are made: before the forks

import treeckpt as tc
import treeckpt.training

AHEAD = 8
"""Steps that are trained before a kill is ordered, at most. Behind them comes one more: no training ends before it."""


def train(directory: Path, steps: int, kill_after: int | None, delay: float) -> None:
    """Trains up to a step, or is killed some seconds after it has trained a number of steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    with tc.Manager(directory / "run", every=3, keep=2) as manager, (directory / "losses").open("a") as losses:
        manager.resume(model, optimizer, scheduler=scheduler)
        kill_at = None if kill_after is None else manager.count + kill_after
        for step in range(manager.count + 1, steps + 1):
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            print(step, loss.item().hex(), file=losses, flush=True)
            if step == kill_at:
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if manager.should_save(step):
                manager.save(step, tc.training.state(model, optimizer, scheduler=scheduler))
            if kill_at is not None and step > kill_at:
                threading.Event().wait()
        if kill_at is not None:
            os.kill(os.getpid(), signal.SIGKILL)
    end = repr([p.tolist() for p in model.parameters()]) + repr(torch.get_rng_state().tolist())
    (directory / "end").write_text(end)


def fork(directory: Path, steps: int, kill_after: int | None = None, delay: float = 0.0) -> int:
    """Trains in a process of its own; returns its exit code, or the negative signal that ended it."""
    directory.mkdir(exist_ok=True)
    child = os.fork()
    if not child:
        code = 1
        try:
            train(directory, steps, kill_after, delay)
            code = 0
        finally:
            sys.excepthook(*sys.exc_info()) if code else None  # type: ignore[arg-type]
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(directory: Path, steps: int, kills: int, seed: int) -> int:
    torch.set_num_threads(1)
    if code := fork(directory / "calm", steps):
        return code
    chance = random.Random(seed)
    for _ in range(kills):
        code = fork(directory / "killed", steps, chance.randint(1, AHEAD), chance.choice((0.0, 0.005, 0.05, 0.2)))
        if code != -signal.SIGKILL:
            return code or 1
    return fork(directory / "killed", steps)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:5])))
