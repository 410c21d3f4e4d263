"""What is registered with a manager: saved with every step, given back by every restore, chosen by name.

Some of it are the behaviours of RecIS's Saver and CheckpointManager, and what becomes of its faults.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks

IDS = np.arange(40, dtype=np.int64) * 7919


class Reader:
    """A data loader that knows where it is; the state grows."""

    def __init__(self, rank: int = 0, at: int = 0) -> None:
        self.rank, self.at = rank, at

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "seen": list(range(self.at))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rank, self.at = state["rank"], len(state["seen"])


class DumpReader(Reader):
    """The same under the names that RecIS's datasets have."""

    def dump_io_state(self) -> dict[str, Any]:
        return Reader.state_dict(self)

    def load_io_state(self, state: dict[str, Any]) -> None:
        Reader.load_state_dict(self, state)

    state_dict = load_state_dict = None


class Table:
    """A hash table that is shared by its owners."""

    def __init__(self, rank: int, world: int, value: float | None = None) -> None:
        start, stop = tc.KeyedTable.share(rank, world)
        mine = IDS[(start <= IDS % 65_536) & (stop > IDS % 65_536)] if value is not None else IDS[:0]
        self.ids, self.slots = (
            mine,
            {"row": np.full((len(mine), 2), value or 0.0), "m": np.full(len(mine), value or 0.0)},
        )

    def export(self) -> tuple[Any, dict[str, Any]]:
        return self.ids, self.slots

    def import_(self, ids: Any, slots: dict[str, Any]) -> None:
        self.ids, self.slots = ids, slots


class Job:
    """A job of RecIS's make: dense and sparse parameters, an optimizer, a counter of its own, and a reader per rank."""

    def __init__(self, run: Path, comm: Any = None, *, value: float | None = None, **options: Any) -> None:
        rank, world = (comm.rank, comm.size) if comm is not None else (0, 1)
        self.manager = tc.Manager(run, **{"background": False, "comm": comm, **options})
        full = value if value is not None else 0.0
        self.dense = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(self.dense.weight, full)
        self.table, self.extra, self.reader = Table(rank, world, value), {"counter": int(full)}, Reader(rank, int(full))
        owned = tc.KeyedTable.share(rank, world)
        self.manager.register("dense", self.dense)
        self.manager.register("sparse", tc.KeyedTable.of(self.table, owned=owned, fill={"m": -1}))
        self.manager.register("extra", self.extra)
        self.manager.register_io_state("reader", self.reader)

    def parts(self) -> dict[str, float]:
        """The number that each part holds; -1 for moments that were filled."""
        slots = self.table.slots
        return {
            "dense": float(self.dense.weight.detach().mean()),
            "sparse": float(slots["row"].mean()) if len(slots["row"]) else 0.0,
            "moments": float(slots["m"].mean()) if len(slots["m"]) else 0.0,
            "extra": float(self.extra["counter"]),
            "io": float(self.reader.at),
        }


ALL = dict.fromkeys(["dense", "sparse", "moments", "extra", "io"], 3.0)
NONE = dict.fromkeys(ALL, 0.0)


def test_everything_registered_is_saved_and_restored_without_a_tree(tmp_path: Path) -> None:
    job = Job(tmp_path, value=3.0, every=1)
    job.manager.step()
    fresh = Job(tmp_path)
    assert fresh.parts() == NONE
    assert fresh.manager.restore() == {} and fresh.parts() == ALL
    assert fresh.manager.count == 1


@pytest.mark.parametrize("how", ["like", "into", "as saved"])
def test_it_is_restored_beside_a_tree(tmp_path: Path, how: str) -> None:
    job = Job(tmp_path, value=3.0)
    job.manager.save(5, {"weights": torch.ones(3), "n": 4})
    fresh, tree = Job(tmp_path), {"weights": torch.zeros(3), "n": 0}
    if how == "into":
        fresh.manager.restore(into=tree)
    else:
        tree = fresh.manager.restore(like=tree if how == "like" else None)
    assert tree["weights"].tolist() == [1, 1, 1] and tree["n"] == 4 and list(tree) == ["weights", "n"]
    assert fresh.parts() == ALL


@pytest.mark.parametrize(
    ("select", "restored"),
    [
        ("*", {"dense", "sparse", "moments", "extra", "io"}),
        ("registered/sparse", {"sparse", "moments"}),
        (["registered/dense", "io"], {"dense", "io"}),
        (["registered/extra"], {"extra"}),
        (["io/reader"], {"io"}),
        (["registered/sparse/ids", "registered/sparse/scalars", "registered/sparse/slots/row"], {"sparse"}),
        (["registered/*"], {"dense", "sparse", "moments", "extra"}),
        ([], set()),
    ],
)
def test_parts_are_chosen_by_globs(tmp_path: Path, select: Any, restored: set[str]) -> None:
    """RecIS: load=["*"], or some of sparse, dense, extra, sparse_opt, io_state; there, no extra meant no io."""
    Job(tmp_path, value=3.0).manager.save(1)
    fresh = Job(tmp_path)
    fresh.manager.restore(select=select)
    expected = {part: 3.0 if part in restored else 0.0 for part in ALL}
    if "sparse" in restored and "moments" not in restored:
        expected["moments"] = -1.0
    assert fresh.parts() == expected


def test_parts_are_left_out_by_globs(tmp_path: Path) -> None:
    """RecIS: exclude=["io_state"] and the like; there, excluding extra dropped io too."""
    Job(tmp_path, value=3.0).manager.save(1)
    fresh = Job(tmp_path)
    before = fresh.parts()
    fresh.manager.restore(exclude=["registered/*", "io/*"])
    assert fresh.parts() == before
    fresh.manager.restore(exclude="io/*")
    parts = fresh.parts()
    assert {part for part in ALL if parts[part] != before[part]} == set(ALL) - {"io"}, parts


def test_a_name_that_another_begins_with_is_not_taken_along(tmp_path: Path) -> None:
    """RecIS: a prefix match of names took fc.weight_g for fc.weight."""
    manager = tc.Manager(tmp_path, background=False)
    manager.register("fc", {"n": 1})
    manager.register("fc_g", {"n": 2})
    manager.save(1)
    fresh, things = tc.Manager(tmp_path, background=False), ({"n": 0}, {"n": 0})
    fresh.register("fc", things[0])
    fresh.register("fc_g", things[1])
    fresh.restore(select="registered/fc")
    assert things == ({"n": 1}, {"n": 0})


def test_a_name_is_registered_once(tmp_path: Path) -> None:
    manager = tc.Manager(tmp_path)
    manager.register("a", {"n": 0})
    manager.register_io_state("a", Reader())
    with pytest.raises(ValueError, match="'a' is registered already"):
        manager.register("a", {})
    with pytest.raises(ValueError, match="'a' is registered as io state already"):
        manager.register_io_state("a", Reader())
    with pytest.raises(tc.TreeError, match="io/b"):
        manager.register_io_state("b", object())
    with pytest.raises(tc.MismatchError, match="'take'"):
        manager.register_io_state("b", Reader(), changed="guess")


def test_what_lacks_in_the_checkpoint_is_an_error_or_left_alone(tmp_path: Path) -> None:
    """RecIS: no io state at save was FileNotFoundError at load, a new extra KeyError."""
    manager = tc.Manager(tmp_path, background=False)
    manager.register("extra", {"counter": 3})
    manager.save(1)
    fresh = Job(tmp_path)
    with pytest.raises(tc.MismatchError, match=r"io/reader|registered/dense"):
        fresh.manager.restore()
    assert fresh.parts() == NONE
    fresh.manager.restore(strict=False)
    assert fresh.parts() == {**NONE, "extra": 3.0}


def test_what_is_not_registered_any_more_is_an_error_or_left_out(tmp_path: Path) -> None:
    Job(tmp_path, value=3.0).manager.save(1)
    fresh, dense = tc.Manager(tmp_path), torch.nn.Linear(2, 2)
    fresh.register("dense", dense)
    with pytest.raises(tc.MismatchError, match="registered/sparse/ids"):
        fresh.restore()
    fresh.restore(strict=False)
    assert dense.weight.detach().mean() == 3.0
    assert set(tc.Manager(tmp_path).restore()) == {"registered", "io"}, "as any other tree where nothing is registered"


def test_the_tree_beside_is_a_dict_that_leaves_their_names_free(tmp_path: Path) -> None:
    job = Job(tmp_path, value=3.0)
    for tree in ([1], {"io": 1}, {"registered": 1}):
        with pytest.raises(tc.TreeError, match="beside whose keys"):
            job.manager.save(1, tree)
    with pytest.raises(tc.TreeError, match="nothing registered"):
        tc.Manager(tmp_path).save(1)
    assert job.manager.steps() == []


def test_the_state_is_that_of_the_moment_of_saving(tmp_path: Path) -> None:
    """RecIS captured the state when the saver was made."""
    manager, module = tc.Manager(tmp_path, background=False), torch.nn.Linear(1, 1)
    manager.register("module", module)
    module.weight = torch.nn.Parameter(torch.full((1, 1), 8.0))
    manager.save(1)
    module.weight.data.fill_(0)
    manager.restore()
    assert module.weight.item() == 8.0


def test_a_step_is_chosen_and_a_missing_one_named(tmp_path: Path) -> None:
    """RecIS returned silently where there was no checkpoint; `latest` asks first."""
    job = Job(tmp_path, value=3.0, keep=2)
    assert job.manager.latest() is None
    with pytest.raises(tc.CheckpointNotFound):
        job.manager.restore()
    for step in range(1, 5):
        job.extra["counter"] = step
        job.manager.save(step)
    assert job.manager.steps() == [3, 4]
    fresh = Job(tmp_path, keep=2)
    fresh.manager.restore(step=3)
    assert fresh.extra == {"counter": 3} and fresh.manager.count == 3
    with pytest.raises(tc.CheckpointNotFound):
        fresh.manager.restore(step=2)
    fresh.manager.save(4)  # the same id twice, after a restart: neither is lost nor forgotten
    fresh.manager.save(5)
    assert fresh.manager.steps() == [4, 5] and Job(tmp_path).manager.latest() == 5


# many ranks ----------------------------------------------------------------------------------------------------------


def save_by(run: Path, world: int, reader: type[Reader] = Reader) -> None:
    def act(comm: Any) -> None:
        with tc.Manager(run, background=False, comm=comm) as manager:
            manager.register("sparse", tc.KeyedTable.of(Table(comm.rank, world, 2.0), owned=share(comm)))
            manager.register_io_state("reader", reader(comm.rank, 10 * comm.rank))
            manager.save(1)

    assert errors_of(on_ranks(world, act)) == [None] * world


def share(comm: Any) -> tuple[int, int]:
    return tc.KeyedTable.share(comm.rank, comm.size)


def merged(states: list[Any], rank: int, world: int) -> Any:
    """Goes on from where the slowest was."""
    assert [state["rank"] for state in states] == list(range(len(states)))
    return {"rank": rank, "seen": min((s["seen"] for s in states[1:]), key=len)}


@pytest.mark.parametrize(
    ("world", "changed", "expected"),
    [
        (2, "error", [(0, 0), (1, 10)]),
        (3, "take", [(0, 0), (1, 10), (0, 0)]),
        (1, "take", [(0, 0)]),
        (3, merged, [(0, 10), (1, 10), (2, 10)]),
    ],
)
def test_readers_follow_a_policy_when_ranks_have_changed(
    tmp_path: Path, world: int, changed: Any, expected: list[tuple[int, int]]
) -> None:
    save_by(tmp_path, 2, DumpReader)

    def act(comm: Any) -> tuple[int, int, int]:
        reader, table = Reader(), Table(comm.rank, world)
        manager = tc.Manager(tmp_path, background=False, comm=comm)
        manager.register("sparse", tc.KeyedTable.of(table, owned=share(comm)))
        manager.register_io_state("reader", reader, changed=changed)
        manager.restore()
        return reader.rank, reader.at, len(table.ids)

    outcomes = on_ranks(world, act)
    assert errors_of(outcomes) == [None] * world
    assert [o.value[:2] for o in outcomes] == expected and sum(o.value[2] for o in outcomes) == len(IDS)


def test_a_changed_world_is_an_error_unless_said_otherwise_or_left_out(tmp_path: Path) -> None:
    save_by(tmp_path, 2)

    def act(comm: Any, select: Any) -> int:
        table = Table(comm.rank, 3)
        manager = tc.Manager(tmp_path, background=False, comm=comm)
        manager.register("sparse", tc.KeyedTable.of(table, owned=share(comm)))
        manager.register_io_state("reader", Reader())
        manager.restore(select=select)
        return len(table.ids)

    for error in errors_of(on_ranks(3, lambda comm: act(comm, None))):
        assert isinstance(error, tc.MismatchError) and "io/reader" in str(error) and "changed='take'" in str(error)
    assert sum(o.value for o in on_ranks(3, lambda comm: act(comm, "registered"))) == len(IDS)


def test_a_checkpoint_is_none_before_every_rank_has_written_its_state(tmp_path: Path) -> None:
    """RecIS published its pointer before other ranks had written their io state."""
    late = threading.Event()

    class Late(Reader):
        def state_dict(self) -> dict[str, Any]:
            assert late.wait(60)
            return super().state_dict()

    def act(comm: Any) -> None:
        manager = tc.Manager(tmp_path, background=False, comm=comm)
        manager.register_io_state("reader", (Reader, Late)[comm.rank](comm.rank, 3))
        manager.save(1)

    watcher = tc.Manager(tmp_path)
    saving = threading.Thread(target=lambda: on_ranks(2, act))
    saving.start()
    saving.join(0.5)
    assert saving.is_alive() and watcher.latest() is None
    late.set()
    saving.join()
    assert watcher.latest() == 1


def test_saves_in_the_background_hold_what_was_registered_at_the_time(tmp_path: Path) -> None:
    manager, extra = tc.Manager(tmp_path, background=tc.BackgroundOptions(writer="thread")), {"counter": 1}
    table = Table(0, 1, 2.0)
    manager.register("extra", extra)
    manager.register("sparse", tc.KeyedTable.of(table))
    manager.save(1)
    extra["counter"], table.slots["row"][:] = 2, 9
    manager.save(2)
    manager.wait()
    for step, value in ((1, 2.0), (2, 9.0)):
        manager.restore(step=step)
        assert extra["counter"] == step and (table.slots["row"] == value).all()
    manager.close()


# what can be given back, and what cannot -------------------------------------------------------------------------
def _stepped(optimizer: Any, times: int = 2) -> None:
    torch.manual_seed(7)
    for _ in range(times):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.5, betas=(0.5, 0.6), amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "lbfgs": lambda p: torch.optim.LBFGS(p, history_size=3),
    "groups": lambda p: torch.optim.Adam([{"params": [p[0]], "lr": 0.1}, {"params": [p[1]], "betas": (0.1, 0.2)}]),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.5),
}


def _weights(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3, 2, dtype=dtype)), torch.nn.Parameter(torch.ones(2, dtype=dtype))]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("here", ["fresh", "stepped"])
@pytest.mark.parametrize("nested", [False, True])
def test_an_optimizer_takes_its_state_fresh_or_not(tmp_path: Path, kind: str, here: str, nested: bool) -> None:
    def step(optimizer: Any) -> None:
        if kind == "lbfgs":
            weights = optimizer.param_groups[0]["params"]

            def closure() -> Any:
                optimizer.zero_grad()
                loss = sum(((w - 3) ** 2).sum() for w in weights)
                loss.backward()
                return loss

            optimizer.step(closure)
        else:
            _stepped(optimizer)

    optimizer, other = OPTIMIZERS[kind](_weights()), OPTIMIZERS[kind](_weights())
    step(optimizer)
    if here == "stepped":
        step(other)
        step(other)
    other.param_groups[0]["lr"] = 77.0
    tree = {"opt": other, "k": 0, "seen": [1]}
    writer, reader = tc.Manager(tmp_path, background=False), tc.Manager(tmp_path, background=False)
    writer.register("opt", {"opt": optimizer, "k": 5, "seen": [1, 2, 3]} if nested else optimizer)
    reader.register("opt", tree if nested else other)
    writer.save(1)
    reader.restore()
    found, expected = other.state_dict(), optimizer.state_dict()
    assert repr(found) == repr(expected)
    if nested:
        assert tree["opt"] is other and tree["k"] == 5 and tree["seen"] == [1, 2, 3]
    for one in (optimizer, other):
        with torch.no_grad():
            for group in one.param_groups:
                for parameter in group["params"]:
                    parameter.fill_(1)
        step(one)
    assert repr(other.state_dict()) == repr(optimizer.state_dict())


def test_an_optimizer_goes_back_to_having_no_state(tmp_path: Path) -> None:
    optimizer = torch.optim.Adam(_weights())
    manager = tc.Manager(tmp_path, background=False)
    manager.register("opt", optimizer)
    manager.save(1)
    _stepped(optimizer)
    manager.restore()
    assert optimizer.state_dict()["state"] == {}


def test_moments_of_a_fresh_optimizer_keep_their_dtype(tmp_path: Path) -> None:
    optimizers = [torch.optim.Adam(_weights(torch.bfloat16)) for _ in range(2)]
    _stepped(optimizers[0])
    for moments in optimizers[0].state.values():
        moments["exp_avg"] = torch.full(moments["exp_avg"].shape, 1 / 3)
    for optimizer, act in zip(optimizers, ("save", "restore"), strict=True):
        manager = tc.Manager(tmp_path, background=False)
        manager.register("opt", optimizer)
        manager.save(1) if act == "save" else manager.restore()
    for moments in optimizers[1].state.values():
        assert moments["exp_avg"].dtype == torch.float32 and (moments["exp_avg"] == 1 / 3).all()


@pytest.mark.parametrize("here", ["fresh", "stepped"])
def test_an_optimizer_of_named_parameters_in_another_order_is_refused(tmp_path: Path, here: str) -> None:
    def made(order: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
        return model, torch.optim.Adam(list(model.named_parameters())[::order])

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    model, optimizer = made(1)
    step(model, optimizer)
    with tc.Manager(tmp_path) as manager:
        manager.register("optimizer", optimizer)
        manager.save(1, {}).result()
    for order in (1, -1):
        model, optimizer = made(order)
        if here == "stepped":
            step(model, optimizer)
        manager = tc.Manager(tmp_path)
        manager.register("optimizer", optimizer)
        if order == 1:
            manager.restore()
            continue
        with pytest.raises(tc.MismatchError, match=r"registered/optimizer/param_groups: .* order .* 0.weight"):
            manager.restore()
        assert optimizer.param_groups[0]["param_names"] == ["1.weight", "0.weight"]


def test_a_fresh_optimizer_of_other_groups_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    for weights, act in ((_weights(), "save"), (_weights()[:1], "restore")):
        optimizer = torch.optim.Adam(weights)
        manager = tc.Manager(tmp_path, background=False)
        manager.register("model", model)
        manager.register("opt", optimizer)
        if act == "save":
            _stepped(optimizer)
            manager.save(1)
            model.weight.data.fill_(9)
            continue
        with pytest.raises(tc.MismatchError, match="registered/opt/param_groups: expected groups of 1 parameters"):
            manager.restore()
        with pytest.raises(tc.MismatchError, match="all of an optimizer's state"):
            manager.restore(select=["registered/opt/param_groups"])
    assert model.weight.item() == 9 and not optimizer.state


@pytest.mark.parametrize(
    ("thing", "path"),
    [
        (3, "registered/thing"),
        ("text", "registered/thing"),
        (None, "registered/thing"),
        ((), "registered/thing"),
        ((1, 2), "registered/thing"),
        ((torch.ones(1), 5), "registered/thing/1"),
        ({"deep": (torch.ones(1), 5)}, "registered/thing/deep/1"),
        ({1, 2}, "registered/thing"),
        (object(), "registered/thing"),
        (np.float32(1), "registered/thing"),
        (tc.PerRank(4), "registered/thing"),
    ],
)
def test_values_that_cannot_be_given_back_are_refused_when_they_are_registered(
    tmp_path: Path, thing: Any, path: str
) -> None:
    manager = tc.Manager(tmp_path, background=False)
    with pytest.raises(tc.TreeError, match=r"register_value\('thing', get, set\)") as caught:
        manager.register("thing", thing)
    assert caught.value.path == path
    manager.register("thing", {})


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2),
        lambda: np.zeros(2),
        lambda: (torch.zeros(2), {"n": 1}),
        lambda: {"pair": (1, 2)},
        lambda: [1, 2],
        lambda: tc.PerRank({"n": 1}),
        lambda: torch.nn.Linear(1, 1),
        dict,
    ],
)
def test_what_can_be_given_back_is_registered(tmp_path: Path, make: Any) -> None:
    manager = tc.Manager(tmp_path, background=False)
    manager.register("thing", make())
    manager.save(1)
    manager.restore()


def test_a_registered_list_takes_what_was_saved(tmp_path: Path) -> None:
    lists: tuple[list[Any], list[Any]] = ([1, {"a": 2}, 3], [])
    for one, act in zip(lists, ("save", "restore"), strict=True):
        manager = tc.Manager(tmp_path, background=False)
        manager.register("seen", one)
        manager.save(1) if act == "save" else manager.restore()
    assert lists[1] == lists[0]


class Settings:
    """A program's own: values in attributes."""

    def __init__(self, value: Any) -> None:
        self.value, self.sets = value, 0

    def set(self, value: Any) -> None:
        self.value, self.sets = value, self.sets + 1


@pytest.mark.parametrize(
    "value", [3, "text", None, (1, (2, 3)), [1, 2], {"a": {"b": 1}}, {1, 2}, torch.arange(3), {"w": np.ones(2), "n": 1}]
)
def test_a_value_is_given_back_by_its_setter(tmp_path: Path, value: Any) -> None:
    settings = Settings(value), Settings(0)
    for one, act in zip(settings, ("save", "restore"), strict=True):
        manager = tc.Manager(tmp_path, background=False)
        manager.register_value("value", lambda one=one: one.value, one.set)
        manager.register("weights", {"w": torch.ones(1)})
        manager.save(1) if act == "save" else manager.restore()
    assert repr(settings[1].value) == repr(value) and settings[1].sets == 1 and settings[0].sets == 0


def test_values_are_chosen_and_missed_as_all_that_is_registered(tmp_path: Path) -> None:
    manager, settings = tc.Manager(tmp_path, background=False), Settings(4)
    manager.register_value("value", lambda: settings.value, settings.set)
    manager.register("extra", {"n": 1})
    manager.save(1)
    manager.restore(select="registered/extra")
    assert settings.sets == 0
    with pytest.raises(ValueError, match="'value' is registered already"):
        manager.register_value("value", lambda: 1, settings.set)
    with pytest.raises(TypeError, match="expected set to be a function"):
        manager.register_value("other", lambda: 1, 5)  # pyright: ignore[reportArgumentType]
    manager.register_value("new", lambda: 1, settings.set)
    with pytest.raises(tc.MismatchError, match="registered/new"):
        manager.restore()
    manager.restore(strict=False)
    assert settings.sets == 1
