"""A training that saves through a manager, and may be killed: python -m tests.crash.resume RUN OUT STEPS KILL_AT."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import treeckpt as tc


def main(run: str, out: str, steps: int, kill_at: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    with tc.Manager(run, every=3, keep=2) as manager:
        first = manager.latest() or 0
        if first:
            tc.training.restore(manager.path(first), model, optimizer, scheduler=scheduler)
        for step in range(first + 1, steps + 1):
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if manager.should_save(step):
                manager.save(step, tc.training.state(model, optimizer, scheduler=scheduler))
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    Path(out).write_text(repr([p.tolist() for p in model.parameters()]) + repr(torch.get_rng_state().tolist()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
