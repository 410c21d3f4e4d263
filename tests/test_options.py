"""Options in groups: `ReadOptions`, `Fallback` and `BackgroundOptions`, over every call that takes them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.world import on_ranks
from treeckpt import training

GROUPS = {
    "read": tc.ReadOptions(verify="first", memory=1 << 20),
    "fallback": tc.Fallback(on_corrupt="skip", per_rank={"loader": "take"}),
    "background": tc.BackgroundOptions(staging="lazy", writer="thread", busy="skip", timeout=9.0),
}


def model() -> torch.nn.Module:
    return torch.nn.Linear(2, 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the training state of a model as step 1; no test changes it."""
    run = tmp_path_factory.mktemp("options") / "run"
    with tc.Manager(run, background=False) as manager:
        manager.save(1, training.state(model(), rng=False))
    return run


CALLS: dict[str, Callable[..., Any]] = {
    "load": lambda run, **o: tc.load(run / "step_00000001", **o),
    "load_async": lambda run, **o: tc.load_async(run / "step_00000001", **o).result(60),
    "load_abstract": lambda run, **o: tc.load_abstract(run / "step_00000001", **o),
    "load_into": lambda run, **o: tc.load_into(run / "step_00000001", training.state(model(), rng=False), **o),
    "training.restore": lambda run, **o: training.restore(run / "step_00000001", model(), rng=False, **o),
    "Manager.restore": lambda run, **o: tc.Manager(run).restore(**o),
    "Manager.restore into": lambda run, **o: tc.Manager(run).restore(into=training.state(model(), rng=False), **o),
    "Manager.resume": lambda run, **o: tc.Manager(run).resume(model(), rng=False, **o),
    "save_async": lambda run, **o: tc.save_async(run.with_name("new"), {"w": np.ones(3)}, **o).result(60),
    "prewarm": lambda run, **o: tc.prewarm({"w": np.ones(3)}, **o) or True,
    "Manager": lambda run, **o: tc.Manager(run.with_name("other"), **o).save(2, {"w": np.ones(3)}),
}
LOADS = [name for name in CALLS if "load" in name or "restore" in name or "resume" in name]
SAVES = ["save_async", "prewarm", "Manager"]


@pytest.mark.parametrize("call", LOADS)
def test_the_same_objects_serve_every_load(run: Path, call: str) -> None:
    read, fallback = tc.ReadOptions(memory=1 << 20, verify=True), tc.Fallback(per_rank="take")
    assert CALLS[call](run, read=read, fallback=fallback) is not None


@pytest.mark.parametrize("call", SAVES)
def test_the_same_object_serves_every_background_save(run: Path, call: str) -> None:
    assert CALLS[call](run, background=tc.BackgroundOptions(writer="thread")) is not None


# what a call cannot do ------------------------------------------------------------------------------------------------
REFUSED = {
    "mmap": (tc.ReadOptions(mmap=True), ["load", "load_async", "Manager.restore"]),
    "copy": (tc.ReadOptions(copy=True), ["load", "load_async", "Manager.restore"]),
    "follow_links": (
        tc.ReadOptions(follow_links=True),
        ["load", "load_async", "load_abstract", "load_into", "training.restore"],
    ),
    "once": (tc.ReadOptions(once=True), [name for name in LOADS if name != "load_abstract"]),
    "on_corrupt": (
        tc.Fallback(on_corrupt="skip"),
        ["load", "load_async", "load_into", "Manager.restore", "Manager.restore into"],
    ),
    "per_rank": (tc.Fallback(per_rank=lambda states, rank, world: states[0]), ["training.restore", "Manager.resume"]),
}


@pytest.mark.parametrize("call", LOADS)
@pytest.mark.parametrize("field", REFUSED)
def test_a_field_is_honoured_or_refused_by_name(run: Path, call: str, field: str) -> None:
    group, able = REFUSED[field]
    options: Any = {"read" if isinstance(group, tc.ReadOptions) else "fallback": group}
    if call in able:
        assert CALLS[call](run, **options) is not None
        return
    with pytest.raises(tc.MismatchError, match=f"^{field}: expected .*, in [a-z_]+, found ") as caught:
        CALLS[call](run, **options)
    assert caught.value.hint


@pytest.mark.parametrize("call", LOADS)
def test_a_field_that_asks_for_nothing_is_never_refused(run: Path, call: str) -> None:
    read = tc.ReadOptions(once=False, mmap=False, copy=False, follow_links=False)
    assert CALLS[call](run, read=read) is not None


def test_each_rank_reads_for_itself_in_the_background_if_told(tmp_path: Path) -> None:
    tc.save(tmp_path, {"n": 1})
    own = tc.ReadOptions(once=False)
    told = on_ranks(2, lambda comm: tc.load_async(tmp_path, read=own, comm=comm).result(60))
    assert [one.value for one in told] == [{"n": 1}] * 2


def test_a_refused_field_is_told_before_there_is_anything_to_restore(tmp_path: Path) -> None:
    with tc.Manager(tmp_path) as manager:
        for options in ({"read": tc.ReadOptions(mmap=True)}, {"fallback": tc.Fallback(on_corrupt="skip")}):
            with pytest.raises(tc.MismatchError, match="in resume"):
                manager.resume(model(), **options)  # type: ignore[arg-type]


def test_registered_arrays_are_filled_in_place_while_the_tree_is_mapped(tmp_path: Path) -> None:
    mine = {"w": np.zeros(3)}
    with tc.Manager(tmp_path, background=False) as manager:
        manager.register("own", {"w": np.arange(3.0)})
        manager.save(1, {"tree": np.ones(5)})
    with tc.Manager(tmp_path) as manager:
        manager.register("own", mine)
        found = manager.restore(read=tc.ReadOptions(mmap=True, copy=True))
    assert found["tree"].tolist() == [1.0] * 5 and mine["w"].tolist() == [0, 1, 2]


# what is wrong --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (tc.ReadOptions, "verify", "strem"),
        (tc.ReadOptions, "memory", 0),
        (tc.ReadOptions, "memory", "1 MiB"),
        (tc.ReadOptions, "memory", True),
        (tc.ReadOptions, "once", "once"),
        (tc.ReadOptions, "mmap", None),
        (tc.ReadOptions, "copy", "yes"),
        (tc.ReadOptions, "follow_links", None),
        (tc.Fallback, "on_corrupt", "ignore"),
        (tc.Fallback, "per_rank", "all"),
        (tc.Fallback, "per_rank", {"loder": "take"}),
        (tc.Fallback, "per_rank", {"loader": "give"}),
        (tc.BackgroundOptions, "staging", "none"),
        (tc.BackgroundOptions, "writer", "fork"),
        (tc.BackgroundOptions, "busy", "wiat"),
        (tc.BackgroundOptions, "timeout", 0),
        (tc.BackgroundOptions, "timeout", "1"),
    ],
)
def test_a_wrong_value_is_refused_when_the_group_is_made(kind: Any, field: str, value: Any) -> None:
    with pytest.raises(tc.TreeckptError, match=r"expected .*, found ") as caught:
        kind(**{field: value})
    assert caught.value.path in (field, "loader")


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_a_group_is_immutable_and_can_be_pickled(group: Any) -> None:
    name = group.__struct_fields__[0]
    with pytest.raises(AttributeError, match="immutable"):
        setattr(group, name, getattr(group, name))
    assert pickle.loads(pickle.dumps(group)) == group
    with pytest.raises(TypeError):
        type(group)(True)


OLD = [
    *[(call, name, "read") for call in LOADS for name in ("verify", "memory", "mmap", "copy", "follow_links")],
    *[(call, name, "fallback") for call in LOADS for name in ("on_corrupt", "per_rank", "world_changed")],
    *[(call, name, "background") for call in SAVES for name in ("staging", "writer", "busy", "timeout")],
]
NEW = {"read": "ReadOptions", "fallback": "Fallback", "background": "BackgroundOptions"}


@pytest.mark.parametrize(("call", "name", "group"), OLD)
def test_the_error_for_an_option_of_a_group_names_the_group(run: Path, call: str, name: str, group: str) -> None:
    field = "per_rank" if name == "world_changed" else name
    with pytest.raises(
        TypeError, match=rf"^'{name}' is no option of .*; write {group}=tc\.{NEW[group]}\({field}=\.\.\."
    ):
        CALLS[call](run, **{name: "first"})


def test_an_unknown_option_is_told_before_there_is_anything_to_restore(tmp_path: Path) -> None:
    with tc.Manager(tmp_path) as manager:
        for options in ({"mmap": True}, {"into": {"n": 0}, "verify": "first"}):
            with pytest.raises(TypeError, match=r"is no option of restore.*; write read=tc\.ReadOptions\("):
                manager.restore(**options)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="'ids' is no option of restore with into"):
            manager.restore(into={"n": 0}, ids=[1])


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        *[(call, "read", "once") for call in LOADS],
        *[(call, "fallback", "skip") for call in LOADS],
        *[(call, "background", "thread") for call in SAVES],
    ],
)
def test_another_type_in_the_place_of_a_group_is_refused_with_the_form(
    run: Path, call: str, name: str, value: str
) -> None:
    with pytest.raises(TypeError, match=rf" takes {name}=tc\.{NEW[name]}\(.*\), found {name}='{value}'$"):
        CALLS[call](run, **{name: value})


# what a field does, over several calls --------------------------------------------------------------------------------
def test_state_of_each_rank_follows_one_policy_in_every_load(tmp_path: Path) -> None:
    path = tmp_path / "c"
    on_ranks(2, lambda comm: tc.save(path, {"own": tc.PerRank(comm.rank + 10)}, comm=comm))
    take, refuse = tc.Fallback(per_rank="take"), tc.Fallback(per_rank="error")
    assert tc.load(path, fallback=take)["own"].value == 10
    assert tc.load_abstract(path)["own"].value == 10, "a look at the structure takes by default"
    target = {"own": tc.PerRank(0)}
    tc.load_into(path, target, fallback=take)
    assert target["own"].value == 10
    for act in (
        lambda: tc.load(path),
        lambda: tc.load(path, fallback=refuse),
        lambda: tc.load_into(path, target),
        lambda: tc.load_abstract(path, fallback=refuse),
    ):
        with pytest.raises(tc.MismatchError, match=r"fallback=Fallback\(per_rank='take'\)"):
            act()
