"""The worker: what one rank of the demo does, in each of its layouts.

`python -m treeckpt.demo.train TASK` is the one rank of the plain layout, and torchrun's agent for a layout of several
ranks. A rank prints `@step N` after each step and, if it fails, its traceback as `@error RANK LINE`; rank 0 writes the
outcome.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.tensor import DTensor
from torch.nn import functional

import treeckpt as tc
from treeckpt import training

from .fork_ranks import die_with_parent, fork_ranks
from .model import ModelConfig, batch, build_model, place, read_text
from .tasks import RANKS, Digests, Outcome, Resume, Resumed, Saved, Task, Train, Trained, checkpoint_path, outcome_path

ROWS = 8  # of a global batch
LEARNING_RATE = 1e-3
SILENCE = timedelta(seconds=90)  # longer than any step on a busy machine, shorter than a reader's patience

T = TypeVar("T")


class Trainer:
    """A model, its optimizer, and how far they are: everything that a checkpoint of this job holds."""

    def __init__(self, task: Task, config: ModelConfig, text: NDArray[np.uint8]) -> None:
        self.config, self.text, self.seed = config, text, task.seed
        self.model = build_model(config, task.seed)
        self.rows = place(self.model, task.layout, ROWS)
        # fused: with foreach, the first step under DTensor takes 3 s, and 1 s so (torch 2.13, 4 ranks, 2 cores)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.step = 0
        self.losses = torch.zeros(task.stop, dtype=torch.float64)

    def tree(self) -> dict[str, Any]:
        """Returns the state as a tree; its tensors are the live ones."""
        extra = {
            "step": self.step,
            "losses": self.losses,
            "rng": torch.get_rng_state(),  # every rank's stands alike, so that any number of ranks can take it up
            "config": dataclasses.asdict(self.config),
            "data": {"seed": self.seed, "rows": ROWS},
        }
        return training.state(self.model, self.optimizer, rng=False, extra=extra)

    def restore(self, path: Path) -> training.RestoreReport:
        """Goes on from a checkpoint of any layout: parameters are filled in place, AdamW gets its moments."""
        report = training.restore(path, self.model, self.optimizer, rng=False)
        extra = report.extra
        self.step, self.seed = extra["step"], extra["data"]["seed"]
        self.losses.copy_(extra["losses"])
        torch.set_rng_state(extra["rng"])
        return report

    def advance(self) -> None:
        """Trains one step; the loss is that of the whole global batch, on every rank."""
        self.step += 1
        found = batch(self.text, self.step, seed=self.seed, rows=self.rows, length=self.config.length)
        tokens = torch.from_numpy(found)
        logits = self.model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach().double()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.losses[self.step - 1] = mean
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"@step {self.step}", flush=True)


def run_train(task: Train) -> Trained:
    """Trains and saves."""
    trainer = Trainer(task, ModelConfig(), read_text())
    saves: list[Saved] = []
    while trainer.step < task.stop:
        trainer.advance()
        if trainer.step in task.saves:
            saves.append(save(trainer, task.run))
    return Trained(tuple(saves), tuple(trainer.losses.tolist()))


def save(trainer: Trainer, run: str) -> Saved:
    """Saves, and digests the state in memory with torch alone."""
    tree = trainer.tree()
    report = tc.save(checkpoint_path(run, trainer.step), tree, step=trainer.step)
    found = from_all(digests(tree))
    if any(other != found[0] for other in found):
        raise RuntimeError(f"step {trainer.step}: the ranks do not hold the same state")
    return Saved(trainer.step, sum(from_all(report.nbytes)), max(from_all(report.seconds)), found[0])


def run_resume(task: Resume) -> Resumed:
    """Loads the last checkpoint into this layout, compares, and trains on."""
    trainer = Trainer(task, ModelConfig(), read_text())
    report = trainer.restore(checkpoint_path(task.run, task.step))
    found = {task.step: digests(trainer.tree())}
    for step in task.earlier:
        found[step] = digests(tc.load(checkpoint_path(task.run, step)))
    while trainer.step < task.stop:
        trainer.advance()
    everywhere = from_all(found)
    by_step: dict[int, tuple[Digests, ...]] = {step: tuple(rank[step] for rank in everywhere) for step in found}
    losses = tuple(trainer.losses[task.step :].tolist())
    return Resumed(sum(from_all(report.nbytes)), max(from_all(report.seconds)), by_step, losses)


def from_all(value: T) -> list[T]:
    """Returns every rank's value, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    gathered: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def digests(tree: object) -> Digests:
    """Returns the SHA-256 of every leaf, by path. Every rank must call it, with the same paths.

    Distributed tensors are gathered with torch's own `full_tensor`: this shares no code with the checkpoint.
    """
    return {path: _digest(leaf) for path, leaf in _leaves(tree, "")}


def _leaves(node: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _leaves(child, f"{path}/{key}")
    elif isinstance(node, list | tuple):
        for position, child in enumerate(node):
            yield from _leaves(child, f"{path}/{position}")
    else:
        yield path.removeprefix("/"), node


def _digest(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return hashlib.sha256(repr(leaf).encode()).hexdigest()
    whole = (leaf.full_tensor() if isinstance(leaf, DTensor) else leaf).detach().contiguous()
    content = hashlib.sha256(f"{whole.dtype} {tuple(whole.shape)} ".encode())
    content.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def run_task(task: Task) -> Outcome:
    """Does a task, in a process group if its layout has several ranks."""
    torch.set_num_threads(1)  # the ranks share the machine's cores
    if RANKS[task.layout] > 1:
        dist.init_process_group("gloo", timeout=SILENCE)
    try:
        return run_train(task) if isinstance(task, Train) else run_resume(task)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_rank(text: str) -> None:
    """Does the task given as JSON; one that fails prints why.

    Raises:
        SystemExit: it failed.
    """
    task: Task = msgspec.json.decode(text, type=Task)  # pyright: ignore[reportArgumentType]
    rank = int(os.environ.get("RANK", "0"))
    try:
        outcome = run_task(task)
    except Exception:
        lines = traceback.format_exc().splitlines()
        sys.stdout.write("".join(f"@error {rank} {line}\n" for line in lines))
        sys.stdout.flush()
        raise SystemExit(1) from None
    if rank == 0:
        outcome_path(task).write_bytes(msgspec.json.encode(outcome))


def main(text: str) -> None:
    """Runs the task given as JSON, on as many ranks as its layout has.

    Raises:
        SystemExit: it failed.
    """
    task: Task = msgspec.json.decode(text, type=Task)  # pyright: ignore[reportArgumentType]
    ranks = RANKS[task.layout]
    if ranks == 1:
        die_with_parent(os.getppid())
        run_rank(text)
        return
    try:
        fork_ranks(run_rank, ranks, text)
    except ChildFailedError as error:
        raise SystemExit(1) from error


if __name__ == "__main__":
    main(sys.argv[1])
