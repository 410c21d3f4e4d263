"""A folder of a dozen runs: what a dashboard meets, written by the library itself or by its own encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

import treeckpt as tc
from tests.helpers.corruption import flip
from tests.helpers.large import write_large_checkpoint, write_timed
from tests.helpers.samples import START_NS, write_checkpoint, write_run
from tests.helpers.world import on_ranks, shards_of
from treeckpt import convert
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.timings import Span

STEPS = range(10, 61, 10)
"""The steps of the runs that the manager writes."""
NAN_STEP, NAN_LEAF, NAN_INDEX = 40, "model/layers.1.weight", (3, 5)
"""Where the first NaN of `write_dozen`'s run `nan` is; its loss is NaN from then on."""
SLOW_SINCE = 41
"""The first slow save of the runs `slow_disk` and `slow_rank`."""
_MS = 1_000_000


def state(step: int, *, layers: int = 2) -> dict[str, object]:
    """A small model with its optimizer."""
    random = np.random.default_rng(step)
    weights = {f"layers.{n}.weight": random.standard_normal((8, 8), np.float32) for n in range(layers)}
    moments = {name: {"exp_avg": value * 0.1, "exp_avg_sq": value**2} for name, value in weights.items()}
    return {"model": weights, "optimizer": moments, "step": step}


def write_dozen(folder: Path) -> dict[str, Path]:
    """Writes the runs below a folder; returns them by name."""
    runs = {
        name: folder / name
        for name in (
            "healthy", "damaged", "killed", "rolled_back", "slow_rank", "slow_disk", "nan", "tables", "pipeline",
            "mesh", "wide", "foreign",
        )
    }  # fmt: skip
    _train(runs["healthy"])
    _damage(_train(runs["damaged"]))
    write_run(runs["killed"], steps=(100, 200))
    write_checkpoint(runs["killed"] / "step_00000300", step=300, publish=False)
    with tc.Manager(_train(runs["rolled_back"]), keep=None, background=False) as manager:
        manager.restore(step=30)
        for step in (35, 45):
            manager.save(step, state(step), metrics={"loss": 1 / step})
    write_timed(runs["slow_rank"], 60, lambda n: _spans(slow=(2,) if n >= SLOW_SINCE else ()), per_host=2)
    write_timed(runs["slow_disk"], 60, lambda n: _spans(slow=range(4) if n >= SLOW_SINCE else ()), per_host=2)
    _train(runs["nan"], nan=True)
    _write_tables(runs["tables"])
    _write_pipeline(runs["pipeline"])
    write_run(runs["mesh"], steps=(100, 200))
    write_large_checkpoint(runs["wide"] / "step_00000001", leaves=20_000)
    tc.save(runs["foreign"] / "step_00000001", state(1), step=1)
    convert.to_safetensors(runs["foreign"] / "step_00000001", runs["foreign"] / "exported", subtree="model")
    return runs


def _train(run: Path, *, nan: bool = False) -> Path:
    with tc.Manager(run, keep=None, background=False) as manager:
        for step in STEPS:
            tree, loss = state(step), 1 / step
            if nan and step >= NAN_STEP:
                group, _, name = NAN_LEAF.partition("/")
                tree[group][name][NAN_INDEX] = np.nan  # type: ignore[index]
                loss = float("nan")
            manager.save(step, tree, metrics={"loss": loss, "accuracy": 1 - 1 / step})
    return run


def write_rolled_back(
    run: Path,
    steps: Iterable[int],
    back_to: int,
    then: Iterable[int],
    loss: Callable[[int], float] = lambda step: 1 / step,
) -> Path:
    """A run that was restored from one of its steps after it had saved later ones, and went on from there."""
    with tc.Manager(run, keep=None, background=False) as manager:
        for step in steps:
            manager.save(step, {"x": step}, metrics={"loss": loss(step)})
    with tc.Manager(run, keep=None, background=False) as manager:
        manager.restore(step=back_to)
        for step in then:
            manager.save(step, {"x": step}, metrics={"loss": loss(step)})
    return run


def _damage(run: Path) -> None:
    """One checkpoint has a changed byte, which only a verification finds; one lost its shard, one its index."""
    changed, lost, unpublished = (run / f"step_{step:08d}" for step in (60, 50, 30))
    (shard,) = shards_of(changed)
    shard.write_bytes(flip(shard.read_bytes(), shard.stat().st_size - 1))
    (shard,) = shards_of(lost)
    shard.unlink()
    (unpublished / INDEX_NAME).unlink()


def _spans(*, slow: range | tuple[int, ...]) -> Iterator[Span]:
    """Spans of four ranks; on slow ones fsync takes 220 ms, not 20."""
    slowest = 50 + (220 if slow else 20)
    for rank in range(4):
        times = {"plan": 10, "write": 40, "fsync": 220 if rank in slow else 20}
        yield Span("save", rank, START_NS, START_NS + (slowest + 5) * _MS)
        at = START_NS
        for name, milliseconds in times.items():
            yield Span(name, rank, at, at + milliseconds * _MS, 0, 0)
            at += milliseconds * _MS
        yield Span("gather", rank, at, START_NS + (slowest + 5) * _MS, 0, 0)


def _write_tables(run: Path) -> None:
    ids = np.array([-5, 3, 7, 2**62, 11, 100], np.int64)
    for step in (1, 2):
        rows = np.arange(24, dtype=np.float32).reshape(6, 4) + step
        tc.save(run / f"step_{step:08d}", {"emb": tc.KeyedTable(ids, {"w": rows}, buckets=4)}, step=step)


def _write_pipeline(run: Path) -> None:
    """Two stages: each rank has a layer of its own."""

    def save(comm: object) -> None:
        layer = {f"layers.{comm.rank}.weight": np.full((16, 16), comm.rank, np.float32)}  # type: ignore[attr-defined]
        tc.save(run / "step_00000001", {"model": layer}, step=1, comm=comm)

    for outcome in on_ranks(2, save):
        if outcome.error is not None:
            raise outcome.error
