"""The versions that modules write into `_metadata` of a state dict come back to what reads them, as with torch.save."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks
from treeckpt._io.comm.comm import SoloComm
from treeckpt._loading.match import LoadOptions
from treeckpt._loading.run_load import on_versions
from treeckpt.convert._contents import open_source
from treeckpt.errors import MismatchError, TreeError
from treeckpt.rules import as_rules
from treeckpt.training._sources import saved_metadata


class Scaled(nn.Module):
    """Version 2 keeps weights 100 times as large as version 1, which had no number yet."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 5.0))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version") is None:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 100
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def model() -> nn.Module:
    return nn.Sequential(OrderedDict(a=Scaled(), act=nn.ReLU(), b=nn.Sequential(Scaled(), nn.BatchNorm1d(2))))


VERSIONS = {"": 1, "a": 2, "act": 1, "b": 1, "b.0": 2, "b.1": 2}


def versions_of(state_dict: Any) -> dict[str, int]:
    return {name: local["version"] for name, local in state_dict._metadata.items()}


def taken_by(state_dict: Any) -> float:
    """What a fresh model has after it loaded a state dict: 5 if the version came along, 500 if not."""
    fresh = model()
    fresh.load_state_dict(state_dict)
    return float(fresh.a.weight.detach()[0])  # type: ignore[union-attr, index]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tc.save(tmp_path / "saved", tc.training.state(model(), rng=False))
    return tmp_path / "saved"


Wrap = Callable[[nn.Module], nn.Module]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        nn.DataParallel,
        lambda m: torch.compile(m, backend="eager"),
        checkpoint_wrapper,
        lambda m: torch.compile(nn.DataParallel(checkpoint_wrapper(m)), backend="eager"),
        lambda m: nn.Sequential(
            OrderedDict(a=torch.compile(m.a, backend="eager"), act=m.act, b=checkpoint_wrapper(m.b))
        ),
    ],
    ids=["plain", "parallel", "compiled", "checkpointed", "all three", "parts"],
)
def test_the_model_part_of_a_state_is_an_ordered_dict_with_versions_by_clean_names(wrap: Wrap) -> None:
    found = tc.training.state(wrap(model()), rng=False)["model"]
    assert type(found) is OrderedDict and versions_of(found) == VERSIONS
    assert list(found) == list(model().state_dict())


def test_several_models_have_their_own_versions(tmp_path: Path) -> None:
    state = tc.training.state({"first": model(), "second": Scaled()}, rng=False)
    tc.save(tmp_path / "saved", state)
    for tree in (state, tc.load(tmp_path / "saved")):
        assert type(tree["model"]) is dict
        assert versions_of(tree["model"]["first"]) == VERSIONS and versions_of(tree["model"]["second"]) == {"": 2}


def parts(*names: str) -> list[nn.Module]:
    whole = model()
    return [nn.Sequential(OrderedDict({name: getattr(whole, name)})) for name in names]


def test_the_versions_of_the_parts_of_a_model_are_joined() -> None:
    found = tc.training.state(parts("a", "act", "b"), rng=False)["model"]
    assert type(found) is OrderedDict and versions_of(found) == VERSIONS


def test_pipeline_stages_on_several_ranks_save_the_versions_of_all(tmp_path: Path) -> None:
    stages = ("a", "act"), ("b",)

    def act(comm: Any) -> None:
        tc.save(tmp_path / "saved", tc.training.state(parts(*stages[comm.rank]), rng=False), comm=comm)

    assert errors_of(on_ranks(2, act)) == [None, None]
    found = tc.load(tmp_path / "saved")["model"]
    assert versions_of(found) == VERSIONS and taken_by(found) == 5


def test_parts_with_other_versions_of_one_module_are_refused(tmp_path: Path) -> None:
    second = nn.Sequential(OrderedDict(c=nn.Linear(1, 1)))
    second._version = 3  # type: ignore[assignment]
    pair = nn.Sequential(OrderedDict(d=nn.Linear(1, 1))), second
    with pytest.raises(TreeError, match=r"model\._metadata\[''\]"):
        tc.training.state(pair, rng=False)
    outcomes = on_ranks(
        2, lambda comm: tc.save(tmp_path / "x", tc.training.state(pair[comm.rank], rng=False), comm=comm)
    )
    assert all(
        isinstance(error, MismatchError) and "model._metadata['']" in str(error) for error in errors_of(outcomes)
    )


def test_a_model_that_is_left_out_has_no_versions() -> None:
    state = tc.training.state({"first": Scaled(), "second": Scaled()}, rng=False, exclude="model/second")
    assert list(state["model"]) == ["first"]


def test_a_plain_state_dict_without_metadata_is_taken(tmp_path: Path) -> None:
    class Plain(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return dict(super().state_dict(*args, **kwargs))

    state = tc.training.state(Plain(2, 2), rng=False)
    assert not hasattr(state["model"], "_metadata")
    tc.save(tmp_path / "saved", state)
    assert not hasattr(tc.load(tmp_path / "saved")["model"], "_metadata")


# loaded -----------------------------------------------------------------------------------------------------------


def test_a_loaded_state_dict_migrates_nothing_that_was_saved_by_this_version(saved: Path) -> None:
    for tree in (
        tc.load(saved),
        tc.load(saved, select="model"),
        tc.load(saved, read=tc.ReadOptions(mmap=True)),
        tc.load([saved, saved]),
    ):
        assert versions_of(tree["model"]) == VERSIONS and taken_by(tree["model"]) == 5
    assert versions_of(tc.load_abstract(saved)["model"]) == VERSIONS
    assert versions_of(tc.load(saved, tc.load_abstract(saved))["model"]) == VERSIONS


def test_an_older_version_is_given_to_what_is_loaded_into(tmp_path: Path) -> None:
    old = model().state_dict()
    for local in old._metadata.values():  # type: ignore[attr-defined]
        local.pop("version")
    tc.save(tmp_path / "old", {"model": old})
    found = tc.load(tmp_path / "old", {"model": model().state_dict()})["model"]
    assert taken_by(found) == 500
    into = model().state_dict()
    tc.load_into(tmp_path / "old", {"model": into})
    assert into._metadata["a"] == {} and taken_by(into) == 500  # type: ignore[attr-defined]
    here = model()
    tc.load_into(tmp_path / "old", {"model": here})
    assert float(here.a.weight.detach()[0]) == 500  # type: ignore[union-attr, index]


def test_a_checkpoint_without_versions_leaves_those_of_like(tmp_path: Path) -> None:
    tc.save(tmp_path / "old", {"model": dict(model().state_dict())})
    found = tc.load(tmp_path / "old", {"model": model().state_dict()})["model"]
    assert versions_of(found) == VERSIONS and taken_by(found) == 5


def test_versions_follow_renamed_entries(saved: Path) -> None:
    moved = tc.load(saved, rename={"model/*": "model/module.*"})["model"]
    assert versions_of(moved) == {f"module.{name}".rstrip("."): version for name, version in VERSIONS.items()}
    other = tc.load(saved, rename={"model/b.0.*": "model/c.*"}, transforms=tc.rules.Drop("model/a.*"))["model"]
    assert versions_of(other) == {"": 1, "act": 1, "b": 1, "b.1": 2, "c": 2}
    into = nn.ModuleDict({"module": model()}).state_dict()
    tc.load_into(saved, {"model": into}, rename={"model/*": "model/module.*"})
    assert into._metadata["module.a"] == {"version": 2}  # type: ignore[attr-defined]


def test_of_several_checkpoints_each_gives_the_versions_of_the_modules_that_it_provides(saved: Path) -> None:
    newer = model()
    for module in newer.modules():
        module._version = 7  # type: ignore[assignment]
    tc.save(saved.parent / "newer", tc.training.state(newer, rng=False))
    bank = [saved, tc.From(saved.parent / "newer", select="model/b.0.*")]
    for like in (None, {"model": model().state_dict()}):
        found = versions_of(tc.load(bank, like)["model"])
        assert found["b.0"] == 7 and found["a"] == found["b.1"] == 2
    into = model().state_dict()
    tc.load_into(bank, {"model": into})
    assert versions_of(into)["b.0"] == 7 and versions_of(into)["a"] == 2


# for a restore ----------------------------------------------------------------------------------------------------


def metadata_for_restore(given: Any, key: tuple[str, ...] = (), rename: Any = None) -> Any:
    options = LoadOptions(rules=as_rules(rename, None))

    def look(opened: Any) -> Any:
        return saved_metadata(open_source(opened, SoloComm(), options), key)

    return look(given) if isinstance(given, dict) else on_versions(given, look)


def test_a_restore_sees_the_saved_versions_of_a_model(saved: Path) -> None:
    expected = {name: {"version": version} for name, version in VERSIONS.items()}
    assert metadata_for_restore(saved) == expected
    assert metadata_for_restore([saved, saved]) == expected
    assert metadata_for_restore(tc.training.state(model(), rng=False)) == expected
    assert metadata_for_restore(saved, rename={"model/a.*": "model/c.*"})["c"] == {"version": 2}
    assert metadata_for_restore({"model": {"w": torch.zeros(1)}}) is None


def test_a_restore_sees_the_saved_versions_of_one_of_several_models(tmp_path: Path) -> None:
    tc.save(tmp_path / "saved", tc.training.state({"first": model(), "second": Scaled()}, rng=False))
    assert metadata_for_restore(tmp_path / "saved", ("second",)) == {"": {"version": 2}}
    assert metadata_for_restore(tmp_path / "saved") is None


# other ways to a checkpoint ---------------------------------------------------------------------------------------


def test_the_dcp_interface_keeps_versions(tmp_path: Path) -> None:
    older = {"model": model().state_dict()}
    older["model"]._metadata["a"] = {}  # type: ignore[attr-defined]
    tc.dcp.save(older, checkpoint_id=tmp_path / "saved", no_dist=True)
    state = {"model": model().state_dict()}
    tc.dcp.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert state["model"]._metadata["a"] == {}  # type: ignore[attr-defined]
    assert taken_by(state["model"]) == taken_by(tc.load(tmp_path / "saved")["model"]) == 500


def test_what_a_manager_registers_and_tracks_keeps_versions(tmp_path: Path) -> None:
    here = model()
    for module in here.modules():
        module._version = None  # type: ignore[assignment]
    with tc.Manager(tmp_path / "run") as manager:
        manager.register("ema", here)
        manager.save(1, {"model": model().state_dict()})
    fresh = model()
    with tc.Manager(tmp_path / "run") as manager:
        manager.register("ema", fresh)
        found = manager.restore()
    assert versions_of(found["model"]) == VERSIONS and taken_by(found["model"]) == 5
    assert float(fresh.a.weight.detach()[0]) == 500  # type: ignore[union-attr, index]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_file_of_torch_save_gives_its_versions_to_a_restore(tmp_path: Path, *, wrapped: bool) -> None:
    here = nn.DataParallel(model()) if wrapped else model()
    optimizer = torch.optim.SGD(here.parameters(), lr=0.1)
    torch.save({"model": here.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    found = metadata_for_restore(tmp_path / "a.pt", rename={"model/module.*": "model/*"} if wrapped else None)
    assert {name: local["version"] for name, local in found.items()} == VERSIONS


class Noted(OrderedDict[str, Any]):
    """A subclass, whose attributes come back as those of an OrderedDict do."""


def test_state_dicts_of_each_rank_and_of_a_subclass_keep_versions(tmp_path: Path) -> None:
    noted = Noted(model().state_dict())
    vars(noted).update(_metadata=model().state_dict()._metadata)  # type: ignore[attr-defined]
    tree = {"own": tc.PerRank(model().state_dict()), "noted": noted}
    tc.save(tmp_path / "saved", tree)
    target = {"own": tc.PerRank(model().state_dict()), "noted": Noted(model().state_dict())}
    del target["own"].value._metadata  # type: ignore[union-attr]
    for found in (tc.load(tmp_path / "saved"), tc.load(tmp_path / "saved", target)):
        assert versions_of(found["own"].value) == VERSIONS
    assert type(tc.load(tmp_path / "saved")["noted"]) is Noted
    assert versions_of(tc.load(tmp_path / "saved")["noted"]) == VERSIONS


def test_trees_are_copied_and_offloaded_with_versions(saved: Path) -> None:
    tree = tc.load(saved)
    for made in (tc.trees.offload(tree), tc.trees.empty_like(tree), tc.abstract(tree), tc.trees.gather(tree)):
        assert versions_of(made["model"]) == VERSIONS
