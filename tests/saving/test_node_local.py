"""The commit of a save to the disks of several hosts: who is on which disk, what fails before and behind the commit."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

import treeckpt as tc
from tests.crash.two_hosts import WORLD, HostRun, HostStore, disk, host_of, train
from tests.helpers.world import errors_of, on_ranks, small_tree
from treeckpt._core.format.files import parse_file_name
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.shard_header import parse_shard_name
from treeckpt._core.sharding.int_runs import decode_runs, encode_runs
from treeckpt._io.storage.deletions import hold_lock, publish_prepared
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._saving.node_local import find_disks
from treeckpt._saving.shard_writer import WriteReport


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 1], [2, 3]]),
        ([[0, 2], [1, 3], [0, 2], [1, 3]], [[0, 2], [1, 3]]),
        ([[0], [1], [2], [3]], [[0], [1], [2], [3]]),
        ([[0], [0, 1], [2], [2, 3]], [[0, 1], [2, 3]]),
        ([[0], [0, 1], [1, 2], [2, 3]], [[0, 1, 2, 3]]),
        ([[0, 1, 2, 3], [1], [2], [3]], [[0, 1, 2, 3]]),
    ],
)
def test_ranks_are_on_one_disk_if_one_has_seen_the_other(seen: list[list[int]], expected: list[list[int]]) -> None:
    reports = {rank: WriteReport(None, host=f"h{rank}") for rank in range(4)}
    disks = find_disks({rank: encode_runs(ranks) for rank, ranks in enumerate(seen)}, reports)
    assert [decode_runs(disk.ranks).tolist() for disk in disks] == expected
    assert [disk.host for disk in disks] == [f"h{ranks[0]}" for ranks in expected]


def test_ranks_on_one_disk_send_a_report_each_and_get_one_result(tmp_path: Path) -> None:
    """To find out whether there are several disks takes messages only where files are missing."""
    counts = [messages_of_a_save(tmp_path, several=several) for several in (False, True)]
    # a rank other than 0 also says that it has read the result
    assert counts == [[1, 2, 2, 2], [4, 5, 5, 5]]


def messages_of_a_save(directory: Path, *, several: bool) -> list[int]:
    """How many messages each rank has sent behind the agreement of a save."""
    sent: list[tuple[str, int]] = []

    def save(comm) -> str:
        post = comm.post

        def counted(key: str, data: bytes) -> None:
            if "heartbeat" not in key:
                sent.append((key.split("/")[0], comm.rank))
            post(key, data)

        comm.post = counted
        path = checkpoint(directory, host_of(comm.rank)) if several else directory / "shared"
        return tc.save(HostStore(path), small_tree(comm.rank, WORLD), comm=comm).save_id

    save_id = on_ranks(WORLD, save)[0].value
    return [sent.count((save_id, rank)) for rank in range(WORLD)]


class LateStore(LocalStore):
    """A shared directory that shows the shards and records of two ranks of the other host too late."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self.rank = rank

    def sizes(self) -> dict[str, int]:
        return {name: nbytes for name, nbytes in super().sizes().items() if not self._is_late(name)}

    def _is_late(self, name: str) -> bool:
        shard, kind = parse_shard_name(name), parse_file_name(name)
        writer = shard[1] if shard else int(name.split(".")[0][9:]) if kind and kind.kind == "progress" else self.rank
        return host_of(writer) != host_of(self.rank)


def test_a_shared_directory_that_shows_files_too_late_is_not_taken_for_several(tmp_path: Path) -> None:
    path = tmp_path / "shared"

    def save(comm) -> None:
        tc.save(LateStore(path, comm.rank), small_tree(comm.rank, WORLD), comm=comm)

    for error in errors_of(on_ranks(WORLD, save)):
        assert isinstance(error, tc.TreeckptError) and "shows what other hosts write too late" in str(error)
    assert [name for name in (each.name for each in path.iterdir()) if not name.startswith("timings.")] == []


def test_the_log_names_the_disks_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A shared directory that is not mounted on one host looks the same."""

    def save(comm) -> None:
        for name in ("one", "two"):
            report = tc.save(HostStore(disk(tmp_path, host_of(comm.rank)) / name), {"n": tc.PerRank(1)}, comm=comm)
            assert [decode_runs(each.ranks).tolist() for each in report.disks] == [[0, 1], [2, 3]]

    assert errors_of(on_ranks(WORLD, save)) == [None] * WORLD
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    [warning] = [text for text in warnings if "has waited" not in text]  # a rank on a busy machine
    assert "2 different directories" in warning and "ranks 0-1;" in warning and "not mounted on all" in warning


class FullStore(HostStore):
    """The disk of a host on which no file can be renamed."""

    def rename(self, name: str, target: str, *, replace: bool) -> None:
        raise OSError(errno.EIO, "injected", target)


def checkpoint(directory: Path, host: int) -> Path:
    return disk(directory, host) / "checkpoint"


def save_with_a_bad_disk(directory: Path, seed: int) -> list[BaseException | None]:
    def save(comm) -> None:
        store = (FullStore if comm.rank == 2 else HostStore)(checkpoint(directory, host_of(comm.rank)))
        tc.save(store, small_tree(comm.rank, WORLD, seed=seed), comm=comm, overwrite=True)

    return errors_of(on_ranks(WORLD, save))


def test_a_disk_that_cannot_publish_behind_the_commit_is_named_and_keeps_all(tmp_path: Path) -> None:
    for error in save_with_a_bad_disk(tmp_path, 1):
        assert isinstance(error, tc.RankError) and list(error.ranks) == [2], error
        assert "is committed, on the disks of the other ranks" in str(error)
    first, second = checkpoint(tmp_path, 0), checkpoint(tmp_path, 1)
    save_id = tc.inspect(first).save_id
    names = {path.name for path in second.iterdir()}
    assert INDEX_NAME not in names and f"prepared.{save_id}.json" in names
    assert (second / f"prepared.{save_id}.json").read_bytes() == (first / INDEX_NAME).read_bytes()
    assert publish_prepared(LocalStore(second), save_id) and not publish_prepared(LocalStore(second), save_id)
    assert (second / INDEX_NAME).read_bytes() == (first / INDEX_NAME).read_bytes()


def test_what_is_prepared_beside_its_own_index_goes_alone(tmp_path: Path) -> None:
    """Of a job that was killed behind its commit, on the disk of rank 0."""
    assert errors_of(on_ranks(WORLD, lambda comm: train(comm, tmp_path, 1))) == [None] * WORLD
    step = disk(tmp_path, 0) / "run" / "step_00000001"
    before, save_id = {path.name for path in step.iterdir()}, tc.inspect(step).save_id
    (step / f"prepared.{save_id}.json").write_bytes((step / INDEX_NAME).read_bytes())
    assert not publish_prepared(LocalStore(step), save_id)
    assert {path.name for path in step.iterdir()} == before


def test_what_another_process_deletes_or_repairs_is_not_completed_meanwhile(tmp_path: Path) -> None:
    save_with_a_bad_disk(tmp_path, 1)
    store, save_id = LocalStore(checkpoint(tmp_path, 1)), tc.inspect(checkpoint(tmp_path, 0)).save_id
    with hold_lock(store, "deleting"), pytest.raises(tc.CheckpointError, match="deletes it"):
        publish_prepared(store, save_id)
    assert publish_prepared(store, save_id)


def test_a_clean_up_waits_for_a_host_that_no_rank_is_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its disk may have the index."""

    def train_on(comm, host_of_last: int) -> None:
        run = HostRun(disk(tmp_path, host_of_last if comm.rank else 1) / "run")
        with tc.Manager(run, keep=None, background=False, comm=comm) as manager:
            manager.clean()

    assert errors_of(on_ranks(WORLD, lambda comm: train(comm, tmp_path, 1))) == [None] * WORLD
    step = disk(tmp_path, 1) / "run" / "step_00000001"
    save_id = tc.inspect(step).save_id
    (step / INDEX_NAME).rename(step / f"prepared.{save_id}.json")
    (disk(tmp_path, 2) / "run" / "step_00000009").mkdir(parents=True)
    assert errors_of(on_ranks(2, lambda comm: train_on(comm, 2))) == [None] * 2
    assert (step / f"prepared.{save_id}.json").exists()
    index = disk(tmp_path, 0) / "run" / step.name / INDEX_NAME
    data = index.read_bytes()
    index.write_bytes(data[:-9])  # a damaged one may be that of the save
    assert errors_of(on_ranks(2, lambda comm: train_on(comm, 0))) == [None] * 2
    assert (step / f"prepared.{save_id}.json").exists()
    index.write_bytes(data)
    assert errors_of(on_ranks(2, lambda comm: train_on(comm, 0))) == [None] * 2
    assert (step / INDEX_NAME).exists() and "completed, as another disk has the index" in caplog.text


def test_a_disk_without_the_tree_is_told_where_its_index_is(tmp_path: Path) -> None:
    assert errors_of(on_ranks(WORLD, lambda comm: save_on_both(tmp_path, comm))) == [None] * WORLD
    first, second = checkpoint(tmp_path, 0), checkpoint(tmp_path, 1)
    (second / INDEX_NAME).unlink()
    with pytest.raises(tc.CorruptError, match=r"disks of several hosts, copy the index\.json of another one here"):
        tc.rebuild_index(second)
    (second / INDEX_NAME).write_bytes((first / INDEX_NAME).read_bytes())
    assert tc.verify(second).ok


def save_on_both(directory: Path, comm) -> None:
    tc.save(HostStore(checkpoint(directory, host_of(comm.rank))), small_tree(comm.rank, WORLD), comm=comm)


def test_incremental_saves_to_private_disks_write_all_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = torch.nn.Parameter(torch.ones(100_000), requires_grad=False)

    def save(comm) -> list[tuple[int, int]]:
        run = HostRun(disk(tmp_path, host_of(comm.rank)) / "run")
        with tc.Manager(run, keep=None, background=False, incremental=True, comm=comm) as manager:
            reports = [manager.save(step, {"frozen": frozen, "step": step}) for step in (1, 2, 3)]
        return [(report.nbytes, report.shared_nbytes) for report in reports]

    outcomes = on_ranks(WORLD, save)
    assert errors_of(outcomes) == [None] * WORLD
    written = [sum(one[step][0] for one in (o.value for o in outcomes)) for step in range(3)]
    assert written == [400_000] * 3 and not any(shared for o in outcomes for _, shared in o.value)
    [said] = [record.getMessage() for record in caplog.records if "different directories" in record.getMessage()]
    assert said.endswith("Incremental saves share no files there: each writes all")
