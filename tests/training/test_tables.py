"""A dynamic embedding in training: saved by some owners, evicted between saves, resumed by others to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks
from tests.training.hashing import HashEmbedding, Job


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other take most of the time of such small work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def save(job: Job, path: Path) -> None:
    def act(comm: Any) -> None:
        state = tc.training.state(job.model, job.optimizer, rng=False, extra=job.extra(comm.rank))
        tc.save(path, state, comm=comm, step=job.step)

    assert errors_of(on_ranks(len(job.owners), act)) == [None] * len(job.owners)


def resume(path: Path, owners: int) -> Job:
    jobs = [Job(owners) for _ in range(owners)]

    def act(comm: Any) -> int:
        job = jobs[comm.rank]
        extra = job.extra(comm.rank)
        tc.training.restore(path, job.model, job.optimizer, rng=False, extra=extra, comm=comm)
        return extra["step"]

    outcomes = on_ranks(owners, act)
    assert errors_of(outcomes) == [None] * owners
    job = jobs[0]
    job.owners = [one.owners[rank] for rank, one in enumerate(jobs)]
    job.step = outcomes[0].value
    return job


def test_training_goes_on_to_the_last_bit_under_any_number_of_owners(tmp_path: Path) -> None:
    whole = Job(1)
    whole.run(60)
    job, losses, evicted = Job(3), [], 0
    for stop, owners in ((25, 2), (45, 5), (60, 1)):
        job.run(stop)
        save(job, tmp_path / f"{stop}")
        losses, evicted = losses + job.losses, evicted + job.evicted
        before = job.tables()
        job = resume(tmp_path / f"{stop}", owners)
        assert job.step == stop and job.tables() == before
    assert losses == whole.losses and evicted == whole.evicted > 1000
    assert job.tables() == whole.tables()
    assert sum(whole.right[-10:]) / 10 > 0.75  # 63 of 100 are not high


def test_what_was_evicted_is_neither_saved_nor_there_after_loading(tmp_path: Path) -> None:
    job = Job(1)
    job.run(10, evict_every=1000)
    save(job, tmp_path / "before")
    seen = set(job.tables())
    assert job.owners[0].evict(9) > 500
    left = set(job.tables())
    save(job, tmp_path / "after")
    job.run(12, evict_every=1000)  # rows of the evicted are used again
    assert set(job.tables()) - seen
    sizes = [tc.inspect(tmp_path / name).by_path["extra/table/ids"][0].spec.shape[0] for name in ("before", "after")]
    assert sizes == [len(seen), len(left)]
    job = resume(tmp_path / "after", 1)
    assert set(job.tables()) == left
    ids, slots = job.owners[0].export()
    assert len(ids) == len(left) and not any(slot.isnan().any() for slot in slots.values())


def test_a_hash_table_that_lacks_a_slot_is_filled_where_that_is_asked_for(tmp_path: Path) -> None:
    job = Job(1)
    job.run(2)
    ids, slots = job.owners[0].export()
    del slots["exp_avg_sq"]
    tc.save(tmp_path, {"table": tc.KeyedTable(ids, slots)})
    fresh = HashEmbedding()
    with pytest.raises(tc.MismatchError, match="table/slots/exp_avg_sq"):
        tc.load_into(tmp_path, {"table": tc.KeyedTable.of(fresh)})
    assert fresh.rows == {}
    tc.load_into(tmp_path, {"table": tc.KeyedTable.of(fresh, fill={"exp_avg_sq": 0})})
    assert set(fresh.rows) == set(ids.tolist())
    assert torch.equal(fresh.slots["exp_avg_sq"], torch.zeros(len(ids), 8))


@pytest.mark.parametrize("turned", [False, True])
def test_moments_of_another_checkpoint_are_joined_to_the_ids_under_other_owners(tmp_path: Path, turned: bool) -> None:
    """Between the two saves ids were evicted and others came: their moments are filled, or named where they are not."""
    job = Job(2)
    job.run(25)
    save(job, tmp_path / "old")
    before = job.tables()
    job.run(45)
    save(job, tmp_path / "new")
    after = job.tables()
    assert set(before) - set(after) and set(after) - set(before) and set(after) & set(before)
    moments = ["extra/table/slots/exp_avg", "extra/table/slots/exp_avg_sq"]
    bank = [tmp_path / "old", tc.From(tmp_path / "new", select=moments)]
    if turned:
        bank = [tc.From(tmp_path / "new", select=moments), tc.From(tmp_path / "old", exclude=moments)]

    def restored(fill: dict[str, float]) -> tuple[list[Any], list[Job]]:
        jobs = [Job(3) for _ in range(3)]

        def act(comm: Any) -> None:
            job = jobs[comm.rank]
            extra = job.extra(comm.rank, fill=fill)
            tc.training.restore(bank, job.model, job.optimizer, rng=False, extra=extra, comm=comm)

        return errors_of(on_ranks(3, act)), jobs

    errors, jobs = restored(dict.fromkeys(("exp_avg", "exp_avg_sq"), 0.0))
    assert errors == [None] * 3
    found = {number: row for rank, one in enumerate(jobs) for number, row in _of(one, rank).items()}
    width = (len(next(iter(before.values()))) - 1) // 3
    assert set(found) == set(before)
    for number, row in found.items():
        there = after.get(number, [0.0] * len(row))
        assert row == before[number][:width] + there[width : 3 * width] + before[number][3 * width :]
    errors, jobs = restored({})
    assert all(isinstance(e, tc.MismatchError) and e.path.startswith("extra/table/slots/exp_avg") for e in errors)
    assert not any(owner.rows for one in jobs for owner in one.owners)


def _of(job: Job, rank: int) -> dict[int, list[float]]:
    """The rows of one owner."""
    job.owners = [job.owners[rank]]
    return job.tables()
