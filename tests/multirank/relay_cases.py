"""Reading once: what several ranks of a host want is read by one of them, and handed on."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import treeckpt as tc
from tests.helpers.elsewhere import elsewhere
from treeckpt._io.comm.comm import SoloComm, default_comm
from treeckpt._io.storage.local_store import LocalStore

from .layouts import difference, distribute, mesh_of, seeded
from .registry import Rank, case


def _tree() -> dict[str, Any]:
    return dict(_leaves())


@functools.cache
def _leaves() -> dict[str, Any]:
    """The leaves of the tree, which no case writes to."""
    tree: dict[str, Any] = {f"big{n}": torch.randn(1 << 20, 3, generator=seeded()) for n in range(2)}
    tree |= {f"small{n}": torch.randn(1 + n, generator=seeded()) for n in range(40)}
    tree["half"] = torch.randn(3000, generator=seeded()).to(torch.bfloat16)
    return tree | {"step": 7, "empty": torch.empty(0, 4)}


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    arrays = {name: leaf for name, leaf in expected.items() if isinstance(leaf, torch.Tensor)}
    values = [name for name in expected if name not in arrays and found[name] != expected[name]]
    return difference({name: found[name] for name in arrays}, arrays) or ", ".join(values)


def _saved(here: Rank) -> Path:
    path = here.directory / "once"
    if not (path / "index.json").exists():
        dist.barrier()  # all have looked
        tc.save(path, _tree(), step=7)
    return path


def _sum(number: int) -> int:
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, number)
    return sum(heard)


def _reports(path: Path, like: Any = None, **options: Any) -> tuple[Any, tc.LoadReport]:
    reports: list[tc.LoadReport] = []
    tree = tc.load(path, like, read=tc.ReadOptions(once=True), on_report=reports.append, **options)
    return tree, reports[0]


@case("four")
def replicas_are_read_once_by_the_ranks_of_a_host(here: Rank) -> None:
    path, expected = _saved(here), _tree()
    unique = sum(leaf.nbytes for leaf in expected.values() if isinstance(leaf, torch.Tensor))
    found, report = _reports(path)
    assert not _difference(found, expected)
    assert report.nbytes == unique, "each rank has all of it"
    assert unique <= _sum(report.read_nbytes) <= 1.02 * unique + (1 << 20), "all ranks together read it once"
    target = {name: torch.full_like(v, 9) if isinstance(v, torch.Tensor) else 0 for name, v in expected.items()}
    options: list[dict[str, Any]] = [{}, {"verify": "first"}, {"verify": False}, {"memory": 1 << 20}]
    for chosen in options:
        for leaf in target.values():
            if isinstance(leaf, torch.Tensor):
                leaf.fill_(9)
        report = tc.load_into(path, target, read=tc.ReadOptions(once=True, **chosen))
        assert not _difference(target, expected), chosen
        # each read is rounded out to the borders of checksums
        assert _sum(report.read_nbytes) <= (3 if "memory" in chosen else 1.1) * unique + (1 << 20), chosen


@case("four")
def ranks_that_want_different_things_share_what_they_have_in_common(here: Rank) -> None:
    path, expected = _saved(here), _tree()
    globs = ["small1*", "big0", f"small2{here.rank}", "step" if here.rank else "half"]
    globs += ["big1"] if here.rank in (1, 3) else []
    found, report = _reports(path, select=globs)
    wanted = {name: leaf for name, leaf in expected.items() if any(Path(name).match(glob) for glob in globs)}
    assert not _difference(found, wanted)
    assert all(found[name] is ... for name in expected if name not in wanted)
    nbytes = expected["big0"].nbytes * 2
    assert nbytes <= _sum(report.read_nbytes) <= nbytes + (8 << 20)


@case("four")
def a_full_checkpoint_goes_into_shards_and_replicas(here: Rank) -> None:
    path, expected = _saved(here), _tree()
    mesh = mesh_of(2, 2)
    like = {
        "big0": distribute(torch.zeros(1 << 20, 3), mesh, (Shard(0), Replicate())),
        "big1": distribute(torch.zeros(1 << 20, 3), mesh, (Replicate(), Shard(1))),
        "half": torch.zeros(3000, dtype=torch.float32),
    }
    found, report = _reports(path, like, strict=False, cast=True)
    for name in ("big0", "big1"):
        whole = found[name].full_tensor()
        assert torch.equal(whole, expected[name]), name
    assert torch.equal(found["half"], expected["half"].float())
    assert _sum(report.read_nbytes) <= 1.6 * 2 * expected["big0"].nbytes, "rows once, columns by two"


@case("four")
def what_rules_make_of_arrays_is_read_once_too(here: Rank) -> None:
    """Pieces, turned shards and replicas of two arrays that lie whole in the checkpoint."""
    path, expected = _saved(here), _tree()
    mesh, rows = mesh_of(2, 2), 1 << 18
    rules = [tc.rules.Split("big0", ("a", "b"), sizes=(1, 3)), tc.rules.Permute("big1", target="turned")]
    like = {
        "a": torch.zeros(rows, 3),
        "b": distribute(torch.zeros(3 * rows, 3), mesh, (Shard(0), Replicate())),
        "turned": distribute(torch.zeros(3, 4 * rows), mesh, (Replicate(), Shard(1))),
    }
    found, report = _reports(path, like, strict=False, transforms=rules)
    assert torch.equal(found["a"], expected["big0"][:rows])
    assert torch.equal(found["b"].full_tensor(), expected["big0"][rows:])
    assert torch.equal(found["turned"].full_tensor(), expected["big1"].T)
    unique = 2 * expected["big0"].nbytes
    assert unique <= _sum(report.read_nbytes) <= 1.1 * unique + (4 << 20), "all ranks together read it once"


@case("four")
def a_rank_that_cannot_load_is_named_by_the_others_at_once(here: Rank) -> None:
    path = _saved(here)
    begin = time.monotonic()
    like = dict(_tree())
    if here.rank == 2:
        like["big0"] = torch.zeros(3, 3)
    with pytest.raises(tc.TreeckptError) as caught:
        _reports(path, like)
    if here.rank == 2:
        assert isinstance(caught.value, tc.MismatchError) and caught.value.path == "big0", caught.value
    else:
        assert isinstance(caught.value, tc.RankError) and set(caught.value.ranks) == {2}, caught.value
    assert time.monotonic() - begin < default_comm().timeout / 2


@case("four")
def tied_shards_that_differ_on_one_rank_stop_all_ranks(here: Rank) -> None:
    path, other = here.directory / "once tied", torch.ones(4, 2)
    other[3, 1] = 9
    tc.save(path, {"a": torch.ones(4, 2), "b": other})
    leaf = distribute(torch.zeros(4, 2), mesh_of(4), (Shard(0),))
    with pytest.raises(tc.TreeckptError) as caught:
        tc.load_into(path, {"a": leaf, "b": leaf.detach()}, read=tc.ReadOptions(once=True))
    assert isinstance(caught.value, tc.MismatchError if here.rank == 3 else tc.RankError), caught.value
    assert not leaf.to_local().any(), "nothing is written"
    if here.rank < 3:
        tc.load_into(path, {"a": leaf, "b": leaf.detach()})
        assert leaf.to_local().all(), "this rank's rows are equal"


@case("four")
def a_changed_byte_fails_the_load_of_every_rank(here: Rank) -> None:
    path = here.directory / "once changed"
    tc.save(path, _tree())
    if here.rank == 0:
        shard = sorted(path.glob("*.safetensors"))[1]
        data = bytearray(shard.read_bytes())
        data[-5000] ^= 1
        shard.write_bytes(data)
    dist.barrier()
    with pytest.raises(tc.TreeckptError) as caught:
        _reports(path)
    kinds: list[Any] = [None] * here.world
    dist.all_gather_object(kinds, type(caught.value).__name__)
    assert sorted(set(kinds)) == ["CorruptError", "RankError"] and kinds.count("CorruptError") == 1, kinds
    target = {name: torch.full_like(leaf, 9) for name, leaf in _tree().items() if isinstance(leaf, torch.Tensor)}
    with pytest.raises(tc.TreeckptError):
        tc.load_into(path, target, read=tc.ReadOptions(once=True, verify="first"), strict=False)
    assert all(bool((leaf == 9).all()) for leaf in target.values()), "compared before the first byte is written"
    begin = time.monotonic()
    with pytest.raises(tc.TreeckptError, match=r"partly filled|was not changed") as caught:
        tc.load_into(path, target, read=tc.ReadOptions(once=True), strict=False)
    assert time.monotonic() - begin < default_comm().timeout / 2, "nobody waits for the rank that failed"
    assert isinstance(caught.value, (tc.CorruptError, tc.RankError))
    found, report = _reports(path, fallback=tc.Fallback(on_corrupt="skip"))
    lost: list[Any] = [None] * here.world
    dist.all_gather_object(lost, {part.path for part in report.damaged})
    assert lost[0] and all(paths == lost[0] for paths in lost), "all ranks skip the same"
    arrays = {name: leaf for name, leaf in _tree().items() if isinstance(leaf, torch.Tensor)}
    assert all((found[name] is ...) == (name in lost[0]) for name in arrays)
    assert not difference(*({n: t[n] for n in arrays if n not in lost[0]} for t in (found, arrays)))


@case("four")
def a_rank_that_finds_a_changed_byte_goes_on_with_what_others_share_with_it(here: Rank) -> None:
    """Ranks 0 and 1 share the rows with the changed byte; each of them shares the columns with another rank."""
    path, mesh = here.directory / "once crossed", mesh_of(2, 2)
    tc.save(path, _tree())
    if here.rank == 0:
        [entry] = tc.inspect(path).by_path["big0"]
        index = tc.inspect(path)
        chunk = index.chunks_of(entry)[0]
        file, start = index.locate(chunk.rank, chunk.start, chunk.start + 1, "big0")
        data = bytearray((path / file.name).read_bytes())
        data[start + 7] ^= 1
        (path / file.name).write_bytes(data)
    dist.barrier()
    target = {
        "big0": distribute(torch.zeros(1 << 20, 3), mesh, (Shard(0), Replicate())),
        "big1": distribute(torch.zeros(1 << 20, 3), mesh, (Replicate(), Shard(0))),
    }
    begin = time.monotonic()
    with pytest.raises(tc.TreeckptError, match=r"partly filled|was not changed") as caught:
        tc.load_into(path, target, read=tc.ReadOptions(once=True), strict=False)
    assert time.monotonic() - begin < default_comm().timeout / 2
    kinds: list[Any] = [None] * here.world
    dist.all_gather_object(kinds, type(caught.value).__name__)
    assert sorted(kinds) == ["CorruptError", "RankError", "RankError", "RankError"], kinds


class _Raced(LocalStore):
    """Into which this rank saves something else right after it has read the index."""

    times = 1

    def read(self, name: str, *, limit: int) -> bytes:
        data = super().read(name, limit=limit)
        if name == "index.json" and self.times:
            self.times -= 1
            tree = {name: leaf + 1 for name, leaf in _tree().items() if isinstance(leaf, torch.Tensor)}
            elsewhere(tc.save, str(self.directory), tree, comm=SoloComm(), overwrite=True)
        return data


@case("four")
def all_ranks_read_the_new_version_where_one_finds_that_its_own_was_replaced(here: Rank) -> None:
    path = here.directory / "once replaced"
    tc.save(path, {name: leaf for name, leaf in _tree().items() if isinstance(leaf, torch.Tensor)})
    like = {name: torch.zeros_like(leaf) for name, leaf in _tree().items() if isinstance(leaf, torch.Tensor)}
    tc.load_into(_Raced(path) if here.rank == 1 else path, like, read=tc.ReadOptions(once=True))
    assert not difference(like, {name: leaf + 1 for name, leaf in _tree().items() if name in like})


@case("four")
def a_model_and_its_optimizer_are_restored_by_reading_once(here: Rank) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(here.rank)
        model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.BatchNorm1d(400), torch.nn.Linear(400, 300))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.BatchNorm1d(400), torch.nn.Linear(400, 300))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 300, generator=seeded())).sum().backward()
    optimizer.step()
    path = here.directory / "once trained"
    tc.save(path, tc.training.state(model, optimizer, rng=False))
    fresh, moments = make()
    report = tc.training.restore(path, fresh, moments, rng=False, read=tc.ReadOptions(once=True))
    for found, expected in ((fresh.state_dict(), model.state_dict()), (moments.state, optimizer.state)):
        assert str(tc.abstract(list(found.values()))) == str(tc.abstract(list(expected.values())))
    assert all(torch.equal(found, model.state_dict()[name]) for name, found in fresh.state_dict().items())
    pairs = zip(moments.state.values(), optimizer.state.values(), strict=True)
    assert all(torch.equal(found[name], expected[name]) for found, expected in pairs for name in expected)
    assert report.nbytes <= _sum(report.read_nbytes) <= 1.1 * report.nbytes + (1 << 20)
    other = torch.nn.Sequential(torch.nn.Linear(300, 400 + (here.rank == 1)))
    with pytest.raises(tc.TreeckptError) as caught:
        tc.training.restore(path, other, rng=False, read=tc.ReadOptions(once=True), strict=False)
    assert isinstance(caught.value, tc.MismatchError if here.rank == 1 else tc.RankError), caught.value
