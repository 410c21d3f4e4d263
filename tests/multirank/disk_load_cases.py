"""Loads of a checkpoint whose files lie on the private disks of two hosts, at one path.

Which rank sees which file, and who reads it for whom: paddle-pr59659-semi-auto, lines 55-76.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard

import treeckpt as tc
import treeckpt.convert
import treeckpt.dcp
from tests.helpers.placed_reader import PlacedReader
from tests.helpers.two_disks import LOCAL, host_of
from treeckpt._cli.main import main
from treeckpt._core.format.files import prepared_name
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._io.comm.comm import SoloComm, default_comm
from treeckpt._runs.discovery import scan

from .disk_cases import PHASES, case, enter
from .layouts import distribute, mesh_of, seeded
from .registry import Rank

__all__ = ["PHASES", "enter"]

ONCE = tc.ReadOptions(once=True)


def _tree(here: Rank, **more: Any) -> dict[str, Any]:
    rows = torch.randn(1 << 10, 512, generator=seeded())
    return {
        "rows": distribute(rows, mesh_of(here.world), (Shard(0),)),
        "whole": torch.randn(300, 70, generator=seeded()),
        "text": "x" * 5000,
        "own": tc.PerRank(torch.full((9,), here.rank)),
        "step": 7,
    } | more


def saved(here: Rank, name: str, tree: Any = None, *, step: int | None = None) -> Path:
    """Returns the path of a checkpoint of which each host has the files of its two ranks, and the index."""
    path = here.directory / LOCAL / name
    tc.save(path, _tree(here) if tree is None else tree, step=step)
    dist.barrier()
    return path


def alone(here: Rank, rank: int, act: Callable[[], object]) -> None:
    """Acts on one rank, while the others wait."""
    if here.rank == rank:
        act()
    dist.barrier()


def _check(here: Rank, found: dict[str, Any]) -> None:
    expected = _tree(here)
    assert torch.equal(found["whole"], expected["whole"]) and found["text"] == expected["text"]
    assert torch.equal(found["own"].value, expected["own"].value) and found["step"] == 7


@case("loads")
def all_ranks_together_load_what_lies_on_two_disks(here: Rank) -> None:
    path = saved(here, "together")
    found = tc.load(path, read=ONCE)
    _check(here, found)
    assert torch.equal(found["rows"], _tree(here)["rows"].full_tensor())
    columns = distribute(torch.zeros(1 << 10, 512), mesh_of(here.world), (Shard(1),))
    like = {"rows": columns, "whole": torch.zeros(300, 70)}
    tc.load_into(path, like, strict=False, read=ONCE)
    assert torch.equal(columns.full_tensor(), found["rows"]) and torch.equal(like["whole"], found["whole"])


@case("loads")
def a_rank_alone_is_told_which_host_has_what_it_lacks(here: Rank) -> None:
    path = saved(here, "alone")
    other = 1 - host_of(here.rank, here.world)
    target = torch.full((1 << 10, 512), 9.0)
    with pytest.raises(tc.StoreError, match=f"host host{other}, with ranks {2 * other}-{2 * other + 1}") as caught:
        tc.load_into(path, {"rows": target}, strict=False)
    assert "once=True" in caught.value.hint and (target == 9).all()
    own = tc.load(path, select="own")
    assert torch.equal(own["own"].value, torch.full((9,), here.rank)), "its own disk has that"


@case("loads")
def a_new_host_without_the_directory_takes_part(here: Rank) -> None:
    path = saved(here, "new host")
    alone(here, 2, lambda: shutil.copytree(path, here.directory / "copy"))
    alone(here, 2, lambda: shutil.rmtree(path))
    with pytest.raises(tc.TreeckptError):
        tc.load(path, read=ONCE)
    alone(here, 0, lambda: [shutil.copy(file, path) for file in (here.directory / "copy").iterdir()])
    found = tc.load(path, read=ONCE)
    _check(here, found)


@case("loads")
def a_wiped_host_is_named_with_what_it_had(here: Rank) -> None:
    path = saved(here, "wiped")
    alone(here, 2, lambda: shutil.rmtree(path))
    target = torch.full((1 << 10, 512), 9.0)
    with pytest.raises(tc.TreeckptError, match=r"host host1, with ranks 2-3: [\d.]+ MB of \d leaves"):
        tc.load_into(path, {"rows": target}, strict=False, read=ONCE)
    assert (target == 9).all()
    salvaged = tc.load(path, read=ONCE, fallback=tc.Fallback(on_corrupt="skip"))
    assert salvaged["rows"] is ... and salvaged["step"] == 7
    assert here.rank > 1 or torch.equal(salvaged["own"].value, torch.full((9,), here.rank))


def model_and_optimizer(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 48)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


@case("loads")
def a_manager_resumes_from_both_disks(here: Rank) -> None:
    run = here.directory / LOCAL / "resumed"
    model, optimizer = model_and_optimizer(1)
    with tc.Manager(run, keep=None, background=False) as manager:
        assert manager.latest() is None and manager.resume(model, optimizer) is None
        for step in (1, 2):
            manager.save(step, tc.training.state(model, optimizer, extra=tc.PerRank({"at": here.rank})))
    dist.barrier()
    fresh, state = model_and_optimizer(2)
    with tc.Manager(run, keep=None, background=False) as manager:
        assert (manager.steps(), manager.latest()) == ([1, 2], 2)
        report = manager.resume(fresh, state)
        assert report is not None and (manager.count, report.passed_over) == (2, ())
        assert report.extra.value == {"at": here.rank}
        assert all(map(torch.equal, fresh.parameters(), model.parameters()))
        assert torch.equal(state.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


@case("loads")
def a_manager_opens_a_step_that_one_host_or_both_have(here: Rank) -> None:
    """What is beside it comes from a disk that has it, whether or not that is rank 0's."""
    for hosts in ((0,), (1,), (0, 1)):
        run = here.directory / LOCAL / f"opened {hosts}"
        model, optimizer = model_and_optimizer(1)
        state = tc.training.state(model, optimizer)
        options = {"files": {"state.json": b"{}"}, "custom_metadata": {"epoch": 3}}
        if len(hosts) == 2:
            with tc.Manager(run, keep=None, background=False) as manager:
                manager.save(3, state, **options)
            dist.barrier()
        else:
            path = run / "step_00000003"
            alone(here, 2 * hosts[0], lambda s=state, p=path, o=options: tc.save(p, s, comm="alone", step=3, **o))
        fresh, other = model_and_optimizer(2)
        with tc.Manager(run, keep=None, background=False) as manager, manager.open() as opened:
            assert opened is not None and (opened.step, opened.custom_metadata) == (3, {"epoch": 3})
            assert opened.files == ("state.json",) and opened.read_file("state.json") == b"{}"
            opened.restore(fresh, rng=False)
            opened.restore(fresh, other, rng=False)
            assert torch.equal(fresh.weight, model.weight) and manager.count == 3
            assert torch.equal(other.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


@case("loads")
def a_manager_resumes_what_one_host_has_saved(here: Rank) -> None:
    """A job of one host, that goes on with a second one: what it saved names no disks."""
    for host in (0, 1):
        run = here.directory / LOCAL / f"of host {host}"
        model, optimizer = model_and_optimizer(1)
        state = tc.training.state(model, optimizer)
        alone(here, 2 * host, lambda state=state, run=run: tc.save(run / "step_00000003", state, comm="alone", step=3))
        fresh, other = model_and_optimizer(2)
        with tc.Manager(run, keep=None, background=False) as manager:
            report = manager.resume(fresh, other)
            assert report is not None and report.step == 3 and report.passed_over == ()
            assert torch.equal(fresh.weight, model.weight)
            with pytest.raises(tc.MismatchError, match="state saved by a world of 1"):
                manager.restore()
            assert torch.equal(manager.restore(step=3, select="model")["model"]["weight"], model.weight)


@case("loads")
def a_manager_resumes_from_the_newest_step_that_is_whole(here: Rank) -> None:
    """Each host in turn has lost its newest step, then its whole disk."""
    for host in (0, 1):
        run = here.directory / LOCAL / f"wiped {host}"
        model, optimizer = model_and_optimizer(1)
        with tc.Manager(run, keep=None, background=False) as manager:
            for step in (1, 2, 3):
                with torch.no_grad():
                    model.bias.fill_(step)
                manager.save(step, tc.training.state(model, optimizer))
        dist.barrier()
        alone(here, host * 2, lambda run=run: shutil.rmtree(run / "step_00000003"))
        fresh, state = model_and_optimizer(2)
        with tc.Manager(run, keep=None, background=False) as manager:
            assert (manager.steps(), manager.latest(), manager.latest(verify=True)) == ([1, 2], 2, 2)
            report = manager.resume(fresh, state)
            assert report is not None and manager.count == 2 and (fresh.bias == 2).all()
            assert len(report.passed_over) == 1 and f"host host{host}" in report.passed_over[0], report.passed_over
            with pytest.raises(tc.CheckpointError, match=f"host host{host}, with ranks {host * 2}-{host * 2 + 1}"):
                manager.restore(step=3)
        dist.barrier()
        alone(here, host * 2, lambda run=run: shutil.rmtree(run))
        with tc.Manager(run, keep=None, background=False) as manager:
            assert manager.steps() == [] and manager.latest() is None
            with pytest.raises(tc.CheckpointNotFound, match=f"host host{host}"):
                manager.resume(fresh, state)


def check_on_one_disk(here: Rank, path: Path) -> None:
    """What the commands and calls of one process say of a checkpoint on the disk of its host."""
    other = 1 - host_of(here.rank, here.world)
    host = f"host{other}, with ranks {2 * other}-{2 * other + 1}"
    report = tc.verify(path)
    assert report.ok and report.files == 2 and not report.problems and not report.leftovers
    assert len(report.elsewhere) == 1 and host in report.elsewhere[0] and host in str(report)
    assert not report.elsewhere[0].startswith("/")
    assert tc.verify(path, repair=True).repairs == ()
    assert main(["verify", str(path)]) == 0
    [info] = scan(path.parent)
    assert info.status == "complete" and info.problem is not None and f"2 of 2 shards of host {host}" in info.problem
    assert main(["ls", str(path.parent)]) == 0 and main(["show", str(path)]) == 0
    assert main(["gc", str(path.parent)]) == 0
    assert tc.inspect(path).disks[other].host == f"host{other}" and tc.load_abstract(path, exclude="text")["step"] == 7
    with pytest.raises(tc.StoreError, match=host):
        tc.convert.to_torch_file(path, here.directory / f"never {here.rank}.pt")
    salvaged = tc.load(path, fallback=tc.Fallback(on_corrupt="skip", per_rank="take"), comm=SoloComm())
    assert salvaged["rows"] is ... and salvaged["step"] == 7
    shard = next(path.glob(f"shard-{here.rank:05}*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert [problem.file for problem in tc.verify(path).problems] == [shard.name], "its own disk is compared"
    shard.unlink()
    [info] = scan(path.parent)
    assert info.status == "damaged" and shard.name in str(info.error), "a file that belongs here is missing"
    with pytest.raises(tc.CorruptError, match="no such file"):
        tc.load(path, select="own")


@case("loads")
def one_process_says_what_is_elsewhere(here: Rank) -> None:
    path = saved(here, "one process/step_00000007", step=7)
    if here.rank in (0, 2):
        check_on_one_disk(here, path)


@case("loads")
def the_interface_of_torch_loads_from_both_disks(here: Rank) -> None:
    path = here.directory / LOCAL / "dcp"
    rows = torch.randn(1 << 10, 512, generator=seeded())
    tc.dcp.save({"rows": distribute(rows, mesh_of(here.world), (Shard(0),)), "text": "x" * 5000}, checkpoint_id=path)
    dist.barrier()
    for lost in (None, 0, 2):
        if lost is not None:
            alone(here, lost, lambda lost=lost: shutil.move(path, here.directory / f"moved {lost}"))
        state = {"rows": distribute(torch.zeros(1 << 10, 512), mesh_of(here.world), (Shard(1),)), "text": ""}
        if lost is None:
            tc.dcp.load(state, checkpoint_id=path)
            assert torch.equal(state["rows"].full_tensor(), rows) and state["text"] == "x" * 5000
            continue
        host = host_of(lost, here.world)
        with pytest.raises(CheckpointException, match=f"host host{host}, with ranks {lost}-{lost + 1}"):
            tc.dcp.load(state, checkpoint_id=path)
        alone(here, lost, lambda lost=lost: shutil.move(here.directory / f"moved {lost}", path))


@case("loads")
def a_rank_that_cannot_load_is_named_and_the_next_load_goes_on(here: Rank) -> None:
    path = saved(here, "refused")
    like = {"whole": torch.zeros(3 if here.rank == 3 else 300, 70)}
    begin = time.monotonic()
    with pytest.raises(tc.TreeckptError) as caught:
        tc.load(path, like, strict=False, read=ONCE)
    assert time.monotonic() - begin < default_comm().timeout / 2
    if here.rank == 3:
        assert isinstance(caught.value, tc.MismatchError)
    else:
        assert isinstance(caught.value, tc.RankError) and set(caught.value.ranks) == {3}
    _check(here, tc.load(path, read=ONCE))


@case("loads")
def several_checkpoints_load_as_one_from_both_disks(here: Rank) -> None:
    first, second = (
        saved(here, "first"),
        saved(here, "second", {"whole": torch.full((300, 70), 2.0), "more": "y" * 5000}),
    )
    found = tc.load([first, second], read=ONCE)
    assert (found["whole"] == 2).all() and found["more"] == "y" * 5000 and found["text"] == "x" * 5000
    assert torch.equal(found["rows"], _tree(here)["rows"].full_tensor())


@case("loads")
def rows_of_a_table_come_from_both_disks(here: Rank) -> None:
    ids = torch.arange(here.rank, 400, here.world)
    table = tc.KeyedTable(
        ids, {"row": ids[:, None].float().repeat(1, 8)}, owned=tc.KeyedTable.modulo(here.rank, here.world)
    )
    path = saved(here, "table", {"table": table})
    asked = torch.tensor([7, 390, 2, 201])
    found = tc.load(path, ids=asked, read=ONCE)["table"]
    assert torch.equal(torch.as_tensor(found.slots["row"])[:, 0], asked.float())


@case("loads")
def what_is_registered_is_restored_from_both_disks(here: Rank) -> None:
    run, weights = here.directory / LOCAL / "registered", torch.randn(40, 30, generator=seeded())
    reader = PlacedReader(here.rank)
    with tc.Manager(run, background=True) as manager:
        manager.register("table", {"weights": weights.clone()})
        manager.register_io_state("reader", reader)
        manager.save(4, _tree(here))
        manager.wait()
    dist.barrier()
    with tc.Manager(run, background=False) as manager:
        target, other = {"weights": torch.zeros(40, 30)}, PlacedReader(-1)
        manager.register("table", target)
        manager.register_io_state("reader", other)
        _check(here, manager.restore())
        assert torch.equal(target["weights"], weights) and other.at == here.rank
        with pytest.raises(tc.TreeckptError, match=r"host host[01], with ranks .*once=True"):
            manager.restore(read=tc.ReadOptions(once=False))


@case("loads")
def a_training_is_restored_by_its_path(here: Rank) -> None:
    model, optimizer = model_and_optimizer(1)
    path = saved(here, "training", tc.training.state(model, optimizer))
    fresh, state = model_and_optimizer(2)
    tc.training.restore(path, fresh, state, read=ONCE)
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))


@case("loads")
def damage_on_one_disk_is_found_by_those_that_read_it_and_the_step_before_is_taken(here: Rank) -> None:
    run = here.directory / LOCAL / "damaged"
    with tc.Manager(run, keep=None, background=False) as manager:
        for step in (1, 2):
            manager.save(step, {"rows": _tree(here)["rows"] * step})
    dist.barrier()
    [shard] = (run / "step_00000002").glob(f"shard-{here.rank:05}*")

    def flip() -> None:
        data = bytearray(shard.read_bytes())
        data[-5] ^= 1
        shard.write_bytes(data)

    alone(here, 2, flip)
    with pytest.raises(tc.TreeckptError, match=r"changed bytes|CorruptError|failed"):
        tc.load(run / "step_00000002", read=ONCE)
    like = {"rows": torch.zeros(1 << 10, 512)}
    with tc.Manager(run, keep=None, background=False) as manager:
        manager.restore(into=like)
        assert manager.count == 1 and torch.equal(like["rows"], _tree(here)["rows"].full_tensor())


@case("loads")
def a_disk_on_which_the_index_is_only_prepared_has_its_part(here: Rank) -> None:
    path = saved(here, "prepared/step_00000003", step=3)
    save_id = tc.inspect(path).save_id
    dist.barrier()
    alone(here, 2, lambda: (path / INDEX_NAME).rename(path / prepared_name(save_id)))
    _check(here, tc.load(path, read=ONCE))
    with tc.Manager(path.parent, background=False) as manager:
        assert manager.steps() == [3]
        _check(here, manager.restore())


@case("loads")
def of_two_versions_the_one_that_was_committed_last_is_loaded(here: Rank) -> None:
    path = saved(here, "versions")
    old = path / INDEX_NAME
    before = old.read_bytes()
    dist.barrier()
    if here.rank == 0:
        time.sleep(0.01)
    tc.save(path, _tree(here, step=8), overwrite=True)
    dist.barrier()
    alone(here, 2, lambda: old.write_bytes(before))
    assert tc.load(path, read=ONCE)["step"] == 8


@case("three of four")
def another_number_of_ranks_loads_what_lies_on_two_disks(here: Rank) -> None:
    path = here.directory / LOCAL / "together"
    found = tc.load(path, read=ONCE, fallback=tc.Fallback(per_rank="take"))
    assert found["text"] == "x" * 5000 and found["own"].value.tolist() == [here.rank] * 9
    columns = distribute(torch.zeros(1 << 10, 512), mesh_of(here.world), (Shard(1),))
    tc.load_into(path, {"rows": columns}, strict=False, read=ONCE)
    assert torch.equal(columns.full_tensor(), found["rows"])


@case("one host")
def ranks_of_one_host_are_told_what_the_other_one_had(here: Rank) -> None:
    path, run = here.directory / LOCAL / "together", here.directory / LOCAL / "resumed"
    with pytest.raises(tc.TreeckptError, match=r"host host1, with ranks 2-3: [\d.]+ MB of \d leaves"):
        tc.load(path, read=ONCE, fallback=tc.Fallback(per_rank="take"))
    with tc.Manager(run, background=False) as manager:
        assert manager.steps() == []
        with pytest.raises(tc.CheckpointNotFound, match="host host1, with ranks 2-3"):
            manager.restore(fallback=tc.Fallback(per_rank="take"))
