"""Trains with a data loader that has worker processes, until a signal ends it; see test_loader_workers.

    python -m tests.crash.loader_training RUN LOADER CONTEXT WORKERS [--late] [--torn] [--exit]

LOADER is `plain` or `stateful`, CONTEXT how workers start. `--late` listens to the signal only once the workers run,
which so die of it, and has the loop wait for a batch that does not come before it says that it trains. `--torn` has it
wait inside of a step of the optimizer, so that the loader's error comes there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import treeckpt as tc

BATCH = 4
LAST = 3
"""The step behind which, with `--late`, no batch comes."""


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, *, ends: bool) -> None:
        self.ends = ends

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(600 if self.ends and index >= (1 + LAST) * BATCH else 0.005)
        return torch.full((16,), float(index % 7))


def tell_of_waiting(batches: Any) -> None:
    """Has an iterator of a loader say that it trains when it begins to wait for the batch that does not come."""
    receive, told = batches._try_get_data, list[bool]()

    def receiving(*arguments: Any, **options: Any) -> Any:
        if batches._rcvd_idx == 1 + LAST and not told:
            told.append(True)
            print("training", flush=True)
        return receive(*arguments, **options)

    batches._try_get_data = receiving


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("loader", choices=("plain", "stateful"))
    parser.add_argument("context")
    parser.add_argument("workers", type=int)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--torn", action="store_true")
    parser.add_argument("--exit", type=int, default=None)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    kind = StatefulDataLoader if options.loader == "stateful" else DataLoader
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    with tc.Manager(options.run, every=100_000) as manager:
        if not options.late:
            manager.save_on_signal(exit=options.exit)
        data = Numbers(ends=options.late)
        loader = kind(data, batch_size=BATCH, num_workers=options.workers, multiprocessing_context=options.context)
        batches = iter(loader)
        next(batches)
        if options.late:
            manager.save_on_signal(exit=options.exit)
            tell_of_waiting(batches)
        manager.resume(model, optimizer, scheduler=scheduler)
        if options.torn:
            optimizer.register_step_pre_hook(lambda *_: [next(batches) for _ in range(1000)] and None)
        for step in range(manager.count + 1, 10_000):
            loss = model(next(batches)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if dist.is_initialized():
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            if step == LAST and not options.late:
                print("training", flush=True)
            optimizer.step()
            scheduler.step()
            if manager.should_save(step):
                manager.save(step, tc.training.state(model, optimizer, scheduler=scheduler))
            if manager.stopping:
                print(f"stopped at {step}", flush=True)
                break
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
