"""A training that saves what has changed, with retention and kills: python -m tests.crash.sharing_soak RUN STEPS SEED.

Leaves are frozen and thawed, some change now and then, one of so many saves is full, and every twentieth save or so is
made by a process that is killed at one of its effects; see test_sharing. Prints what there was at the end.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import treeckpt as tc
from tests.crash.effects import killed_at
from treeckpt._core.format.index import INDEX_NAME
from treeckpt.policy import EverySteps, Last

LEAVES = 6
NUMBERS = 40_000
KEEP = [Last(2), EverySteps(20)]


class Training:
    """What is trained, and what each step was."""

    def __init__(self, run: Path, seed: int) -> None:
        self.run, self.chance = run, random.Random(seed)
        self.frozen = [torch.nn.Parameter(torch.full((NUMBERS,), float(i)), requires_grad=False) for i in range(LEAVES)]
        self.trained = [torch.nn.Parameter(torch.zeros(100)) for _ in range(LEAVES)]
        self.saved = dict[int, str]()
        self.committed = list[int]()
        self.counts = {"kills": 0, "changes": 0, "shared": 0, "written": 0}

    def train(self, step: int) -> dict[str, Any]:
        """The tree of the next step."""
        chance = self.chance
        with torch.no_grad():
            for parameter in self.trained:
                parameter += 1
            if chance.random() < 0.1:  # an average, or a layer that is trained for a while
                chance.choice(self.frozen)[: chance.randrange(NUMBERS)] += 1
                self.counts["changes"] += 1
        if chance.random() < 0.03:
            chosen = chance.choice(self.frozen)
            chosen.requires_grad_(not chosen.requires_grad)
        tree = {f"layer{i}": {"base": self.frozen[i], "adapter": self.trained[i]} for i in range(LEAVES)}
        self.saved[step] = fingerprint({**tree, "step": step})
        return {**tree, "step": step}

    def opened(self) -> tc.Manager:
        manager = tc.Manager(self.run, keep=KEEP, incremental=True, full_every=50, background=False, grace=0)
        if manager.latest() is not None:
            self.check(manager.restore())
        return manager

    def check(self, tree: dict[str, Any]) -> None:
        assert fingerprint(tree) == self.saved[tree["step"]], f"step {tree['step']} is not as it was saved"

    def go_on(self, steps: int) -> None:
        manager = self.opened()
        for step in range(1, steps + 1):
            tree = self.train(step)
            if self.chance.random() < 0.05:
                manager.close()
                killed = partial(save_alone, self, step, tree)
                self.counts["kills"] += killed_at(killed, self.run, self.chance.randrange(60))
                self.committed += [step] if (self.path(step) / INDEX_NAME).exists() else []
                manager = self.opened()
                continue
            report = manager.save(step, tree)
            assert isinstance(report, tc.SaveReport)
            self.committed.append(step)
            self.counts["shared"] += report.shared_nbytes
            self.counts["written"] += report.nbytes
        manager.close()
        manager.clean()
        kept = [step for step in self.committed if step % 20 == 0 or step in self.committed[-2:]]
        assert manager.steps() == kept, "those that the policies keep, and none else"
        for step in kept:
            assert tc.verify(self.path(step)).ok, step
            self.check(tc.load(self.path(step)))

    def path(self, step: int) -> Path:
        return self.run / f"step_{step:08d}"


def save_alone(training: Training, step: int, tree: dict[str, Any], run: Path) -> None:
    with training.opened() as manager:
        manager.save(step, tree)


def fingerprint(tree: dict[str, Any]) -> str:
    found = hashlib.blake2b(str(tree["step"]).encode())
    for name in sorted(tree.keys() - {"step"}):
        for key in ("adapter", "base"):
            found.update(tree[name][key].detach().numpy().tobytes())
    return found.hexdigest()


def unnamed(run: Path) -> set[str]:
    """Files of a run that no index needs."""
    indexes = {path.parent.name: tc.inspect(path.parent) for path in run.glob(f"*/{INDEX_NAME}")}
    named = {run / (f.directory or name) / f.name for name, index in indexes.items() for f in index.file_list}
    saves = {file.name.split(".")[-2] for file in named}
    found = {file for file in run.rglob("step_*/*") if file.is_file()} - named
    return {
        f"{file.relative_to(run)}" for file in found if file.name != INDEX_NAME and not saves & {*file.name.split(".")}
    }


def main(run: Path, steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    training = Training(run, seed)
    training.go_on(steps)
    print(json.dumps({**training.counts, "unnamed": sorted(unnamed(run))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
