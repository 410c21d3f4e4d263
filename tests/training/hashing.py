"""A dynamic embedding on plain torch, and a job that trains it to say whether an airport lies above 1,000 feet.

Rows are made when an id is first seen and evicted when it has not been seen for a while; memory of evicted rows is used
again. Each row is changed by its own gradients only, so training does not depend on how many owners share the table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import airportsdata
import torch
from torch import nn

import treeckpt as tc

__all__ = ["HashEmbedding", "Job"]

DIM, BATCH = 8, 256
FIELDS = ("country", "subd", "city", "tz")


class HashEmbedding:
    """Rows of `DIM` numbers by id, with the two moments of Adam and the step at which each was seen last."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.free: list[int] = []
        self.slots = self._blank(0)

    def _blank(self, count: int) -> dict[str, torch.Tensor]:
        slots = {name: torch.full((count, DIM), torch.nan) for name in ("embedding", "exp_avg", "exp_avg_sq")}
        return {**slots, "seen": torch.full((count,), -1)}

    def find(self, ids: torch.Tensor, step: int) -> torch.Tensor:
        """The row of each id; new ones are made."""
        rows = torch.tensor([self.rows[i] if i in self.rows else self._add(i) for i in ids.tolist()], dtype=torch.int64)
        self.slots["seen"][rows] = step
        return rows

    def _add(self, number: int) -> int:
        if not self.free:
            size = len(self.slots["seen"])
            more = self._blank(max(16, size))
            self.slots = {name: torch.cat([old, more[name]]) for name, old in self.slots.items()}
            self.free = list(range(size, len(self.slots["seen"])))
        row = self.rows[number] = self.free.pop()
        self.slots["exp_avg"][row] = self.slots["exp_avg_sq"][row] = 0
        self.slots["embedding"][row] = 0.1 * torch.cos((number % 65_521) * torch.arange(1.0, DIM + 1))
        return row

    def update(self, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """A step of Adam on these rows alone, each given once."""
        first, second = self.slots["exp_avg"], self.slots["exp_avg_sq"]
        first[rows] = 0.9 * first[rows] + 0.1 * gradient
        second[rows] = 0.99 * second[rows] + 0.01 * gradient**2
        self.slots["embedding"][rows] -= 0.02 * first[rows] / (second[rows].sqrt() + 1e-6)

    def evict(self, before: int) -> int:
        """Forgets the ids that were last seen before a step; gives how many."""
        gone = [i for i, row in self.rows.items() if self.slots["seen"][row] < before]
        for number in gone:
            row = self.rows.pop(number)
            self.free.append(row)
            for slot in self.slots.values():
                slot[row] = torch.nan if slot.is_floating_point() else -1
        return len(gone)

    def export(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """All rows, in the order in which they were made."""
        where = torch.tensor(list(self.rows.values()), dtype=torch.int64)
        ids = torch.tensor(list(self.rows), dtype=torch.int64)
        return ids, {name: slot[where] for name, slot in self.slots.items()}

    def import_(self, ids: torch.Tensor, slots: Mapping[str, torch.Tensor]) -> None:
        """Replaces all rows."""
        self.rows, self.free = {number: row for row, number in enumerate(ids.tolist())}, []
        self.slots = {name: slot.clone() for name, slot in slots.items()}


@lru_cache(maxsize=1)
def _airports() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64[N, fields], hashes of "field=value", and whether it is high, float32[N]; in a fixed order."""
    found = sorted(airportsdata.load("ICAO").items())
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    places = [found[n][1] for n in order]

    def number(text: str) -> int:
        return int.from_bytes(hashlib.blake2s(text.encode(), digest_size=8).digest(), "little", signed=True)

    ids = torch.tensor([[number(f"{field}={place[field]}") for field in FIELDS] for place in places])
    return ids, torch.tensor([float(place["elevation"] > 1000) for place in places])


class Job:
    """Trains a table that some owners share, and a dense head."""

    def __init__(self, owners: int) -> None:
        self.owners = [HashEmbedding() for _ in range(owners)]
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(len(FIELDS) * DIM, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.step, self.evicted = 0, 0
        self.losses: list[float] = []
        self.right: list[float] = []

    def share(self, rank: int) -> tuple[int, int]:
        """The buckets of one owner."""
        return tc.KeyedTable.share(rank, len(self.owners))

    def run(self, until: int, *, evict_every: int = 20) -> None:
        """Trains up to a step."""
        ids, high = _airports()
        while self.step < until:
            batch = slice(self.step * BATCH, (self.step + 1) * BATCH)
            self.step += 1
            self._train(ids[batch], high[batch])
            if self.step % evict_every == 0:
                self.evicted += sum(owner.evict(self.step - evict_every + 1) for owner in self.owners)

    def _train(self, ids: torch.Tensor, high: torch.Tensor) -> None:
        flat, inverse = torch.unique(ids, return_inverse=True)
        found = self._rows(flat)
        table = torch.empty(len(flat), DIM)
        for owner, mine, rows in found:
            table[mine] = owner.slots["embedding"][rows]
        table.requires_grad_()
        out = self.model(table[inverse].flatten(1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(out, high)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        assert table.grad is not None
        for owner, mine, rows in found:
            owner.update(rows, table.grad[mine])
        self.losses.append(float(loss.detach()))
        self.right.append(float(((out > 0) == (high > 0)).float().mean()))

    def _rows(self, ids: torch.Tensor) -> Sequence[tuple[HashEmbedding, torch.Tensor, torch.Tensor]]:
        """Of each owner: which of the ids are its own, and their rows."""
        buckets = ids & 65_535
        found: list[tuple[HashEmbedding, torch.Tensor, torch.Tensor]] = []
        for rank, owner in enumerate(self.owners):
            start, stop = self.share(rank)
            mine = ((buckets >= start) & (buckets < stop)).nonzero().squeeze(1)
            found.append((owner, mine, owner.find(ids[mine], self.step)))
        return found

    def tables(self) -> dict[int, list[float]]:
        """Every row's numbers, moments and step, by id."""
        return {
            number: [*(x for name in sorted(owner.slots) for x in owner.slots[name][row].reshape(-1).tolist())]
            for owner in self.owners
            for number, row in owner.rows.items()
        }

    def extra(self, rank: int, **options: Any) -> dict[str, Any]:
        """What is saved, and restored, beside model and optimizer."""
        return {"table": tc.KeyedTable.of(self.owners[rank], owned=self.share(rank), **options), "step": self.step}
