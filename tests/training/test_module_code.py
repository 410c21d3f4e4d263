"""Modules with load code of their own get their saved state by `load_state_dict`, as it was saved."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization.observer import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver

import treeckpt as tc
from treeckpt import training

from .jobs import same_tensors


class Metric(nn.Module):
    """Keeps lists, numbers, texts and tensors of any size as plain attributes, and saves them by code of its own."""

    names = ("seen", "total", "note", "table", "nothing", "best")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.total, self.note, self.table, self.nothing = 0, "", {}, None
        self.best = torch.tensor(0.0)

    def update(self, *values: float) -> Metric:
        for value in values:
            self.seen.append(torch.full((len(self.seen) + 1,), value))
        self.total, self.note, self.table = len(self.seen), "used", {"last": torch.ones(2), "n": 2}
        self.best = torch.tensor(max(values), dtype=torch.float64)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.names:
            destination[prefix + name] = getattr(self, name)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for name in self.names:
            if prefix + name in state:
                setattr(self, name, state.pop(prefix + name))
        super()._load_from_state_dict(state, prefix, *rest)


def _measured(seed: int = 0, *values: float) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), Metric())
    if values:
        model[1].update(*values)
    return model


def _sources(path: Path, model: Any, *given: Any) -> list[Any]:
    """A checkpoint, the tree in memory, and a file of torch.save."""
    tc.save(path / "c", training.state(model, *given, rng=False))
    torch.save({"model": model.state_dict()}, path / "c.pt")
    tc.save(path / "own", training.state(model, *given, buffers="per_rank", rng=False))
    return [
        path / "c",
        path / "own",
        copy.deepcopy(training.state(model, *given, buffers="per_rank", rng=False)),
        path / "c.pt",
    ]


@pytest.mark.parametrize("used", [(), (9.0,)], ids=["fresh", "used"])
@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel], ids=["plain", "parallel"])
def test_values_of_a_state_dict_come_back(tmp_path: Path, wrap: Any, used: Any) -> None:
    model = _measured(0, 1.0, 2.0)
    for source in _sources(tmp_path, model):
        fresh = _measured(1, *used)
        weight = fresh[0].weight
        report = training.restore(source, wrap(fresh), rng=False)
        assert same_tensors(dict(fresh.state_dict()), dict(model.state_dict())) and fresh[0].weight is weight
        assert (report.missing, report.unexpected) == ((), ())


def test_what_a_module_takes_from_a_tree_is_its_own(tmp_path: Path) -> None:
    model, fresh = _measured(0, 1.0), _measured(1)
    training.restore(training.state(model, rng=False), fresh, rng=False)
    fresh[1].seen[0].add_(5)
    fresh[1].table["last"].zero_()
    fresh[1].best.zero_()
    assert model[1].seen[0].tolist() == [1.0] and model[1].best == 1.0 and model[1].table["last"].tolist() == [1, 1]


def test_a_value_that_no_code_takes_back_is_refused(tmp_path: Path) -> None:
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    for one in (model, fresh):
        one.register_state_dict_post_hook(lambda m, state, prefix, _: state.update({f"{prefix}note": "x"}))
    tc.save(tmp_path / "c", training.state(model))
    before = fresh.weight.detach().clone()
    with pytest.raises(tc.MismatchError, match=r"model/note: .* a value that a hook of state_dict made"):
        training.restore(tmp_path / "c", fresh)
    assert torch.equal(fresh.weight, before)


# sizes ----------------------------------------------------------------------------------------------------------------


class Queue(nn.Module):
    """A buffer of the size that it has when it is loaded."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(size, 2))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if (saved := state.get(f"{prefix}queue")) is not None and saved.shape != self.queue.shape:
            self.queue = self.queue.new_empty(saved.shape)
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("make", [PerChannelMinMaxObserver, MinMaxObserver, HistogramObserver, Queue])
def test_buffers_have_the_size_that_the_module_gives_them(tmp_path: Path, make: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make(5) if make is Queue else make())
    model(torch.randn(3, 4)) if make is not Queue else None
    for source in _sources(tmp_path, model):
        fresh = nn.Sequential(nn.Linear(4, 4), make())
        training.restore(source, fresh, rng=False)
        assert same_tensors(dict(fresh.state_dict()), dict(model.state_dict()))


def test_a_size_that_the_module_does_not_take_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model, fresh = (nn.Sequential(Queue(3), Metric(), nn.Linear(4, 4)) for _ in range(2))
    model[1].register_buffer("fixed", torch.zeros(3))
    fresh[1].register_buffer("fixed", torch.zeros(4))
    before = copy.deepcopy(dict(fresh.state_dict()))
    tc.save(tmp_path / "c", training.state(model))
    with pytest.raises(tc.MismatchError, match=r"model/1: .*size mismatch for fixed.*are as they were before"):
        training.restore(tmp_path / "c", fresh)
    assert same_tensors(dict(fresh.state_dict()), before)


# versions -------------------------------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    """Whose older weights are smaller by a factor of 100."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version") in (None, 1):
            state[f"{prefix}weight"] *= 100
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


class Older(nn.Linear):
    """The same before."""


def _sized(weight: float, kind: Any = Scaled, wrap: Any = lambda m: m) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), kind(2, 2))
    nn.init.constant_(model[1].weight, weight)
    return wrap(model)


WRAPPERS = [lambda m: m, nn.DataParallel, torch.compile]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["plain", "parallel", "compiled"])
@pytest.mark.parametrize("wrap_saved", WRAPPERS, ids=["of plain", "of parallel", "of compiled"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_module_learns_the_version_that_was_saved(tmp_path: Path, wrap: Any, wrap_saved: Any) -> None:
    for kind, expected in ((Scaled, 5.0), (Older, 500.0)):
        model = _sized(5.0, kind)
        path = tmp_path / kind.__name__
        path.mkdir()
        tc.save(path / "c", training.state(wrap_saved(model), rng=False))
        torch.save({"model": model.state_dict()}, path / "c.pt")
        for source in (path / "c", path / "c.pt", training.state(wrap_saved(model), rng=False)):
            fresh = _sized(1.0)
            weight = fresh[1].weight
            training.restore(source, wrap(fresh), rng=False)
            assert fresh[1].weight is weight and weight.tolist() == [[expected] * 2] * 2
        assert model[1].weight.tolist() == [[5.0] * 2] * 2, "what was saved stays"


def test_of_a_checkpoint_without_versions_nothing_is_migrated(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"model": dict(_sized(5.0).state_dict())})
    training.restore(tmp_path / "c", fresh := _sized(1.0), rng=False)
    assert fresh[1].weight.tolist() == [[5.0] * 2] * 2


def test_versions_follow_rules_and_models(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", training.state({"a": _sized(5.0), "b": _sized(3.0, Older)}, rng=False))
    models = {"a": _sized(1.0), "b": _sized(1.0)}
    training.restore(tmp_path / "c", models, rng=False)
    assert [model[1].weight.unique().item() for model in models.values()] == [5.0, 300.0]
    for kind, expected in ((Scaled, 5.0), (Older, 500.0)):
        path = tmp_path / kind.__name__
        tc.save(path, training.state(_sized(5.0, kind), rng=False))
        fresh = nn.ModuleDict({"first": nn.Linear(2, 2), "deep": nn.Sequential(Scaled(2, 2))})
        rename = {"model/0.*": "model/first.*", "model/1.*": "model/deep.0.*"}
        training.restore(path, fresh, rng=False, rename=rename)
        assert fresh["deep"][0].weight.tolist() == [[expected] * 2] * 2
        parts: Any = [nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"1": Scaled(2, 2)})]
        training.restore(path, parts, rng=False)
        assert parts[1]["1"].weight.tolist() == [[expected] * 2] * 2


def test_versions_come_from_each_of_several_checkpoints_and_from_runs(tmp_path: Path) -> None:
    tc.save(tmp_path / "new", {"model": OrderedDict(_sized(3.0, Older).state_dict())})
    for name, kind in (("a", Scaled), ("b", Older)):
        tc.save(tmp_path / name, training.state(_sized(5.0, kind), rng=False))
    for sources, expected in ((["a", "b"], 500.0), (["b", "a"], 5.0)):
        training.restore([tmp_path / name for name in sources], fresh := _sized(1.0), rng=False)
        assert fresh[1].weight.unique().item() == expected, "the version goes with the weights"
    manager = tc.Manager(tmp_path / "run", background=False)
    manager.save(1, training.state(_sized(5.0, Older)))
    manager.resume(fresh := _sized(1.0))
    assert fresh[1].weight.unique().item() == 500.0


class Grown(nn.Module):
    """Whose older versions had a smaller first layer, which it makes anew to take their weights."""

    _version = 2

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width, bias=False), nn.Linear(3, 2))

    def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version") not in (1, 2):
            raise ValueError("a version that is not known")
        if local_metadata["version"] == 1:
            self.layers[0] = nn.Linear(2, 3, bias=False)
            self._version = 1
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


def test_a_module_may_change_its_structure_for_an_older_version(tmp_path: Path) -> None:
    old = Grown(3)
    old._version = 1
    for source in _sources(tmp_path, old):
        fresh = Grown()
        training.restore(source, fresh, rng=False)
        assert fresh._version == 1 and torch.equal(fresh.layers[0].weight, old.layers[0].weight)
    unknown = Grown()
    unknown._version = 7
    fresh = nn.ModuleDict({"plain": nn.Linear(2, 2), "grown": Grown()})
    before = copy.deepcopy(fresh.state_dict())
    tc.save(tmp_path / "unknown", training.state(nn.ModuleDict({"plain": nn.Linear(2, 2), "grown": unknown})))
    with pytest.raises(tc.MismatchError, match=r"model/grown: .*a version that is not known.*are as they were before"):
        training.restore(tmp_path / "unknown", fresh)
    assert same_tensors(dict(fresh.state_dict()), dict(before))


def test_older_norms_lack_a_counter_which_torch_does_not_miss(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model(torch.randn(4, 3))
    state = model.state_dict()
    del state["1.num_batches_tracked"]
    state._metadata["1"] = {"version": 1}
    torch.save({"model": state}, tmp_path / "old.pt")
    fresh = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    assert training.restore(tmp_path / "old.pt", fresh, rng=False).missing == ()
    assert torch.equal(fresh[1].running_mean, model[1].running_mean) and fresh[1].num_batches_tracked == 0
    state._metadata["1"] = {"version": 2}
    torch.save({"model": state}, tmp_path / "new.pt")
    with pytest.raises(tc.MismatchError, match=r"model/1.num_batches_tracked: .*missing"):
        training.restore(tmp_path / "new.pt", fresh, rng=False)


def test_a_state_dict_that_was_assigned_is_copied_all_the_same(tmp_path: Path) -> None:
    model, state = _sized(5.0), _sized(5.0).state_dict()
    model.load_state_dict(state, assign=True)  # notes this in the metadata of the state dict
    torch.save({"model": state}, tmp_path / "c.pt")
    fresh = _sized(1.0)
    weight = fresh[1].weight
    training.restore(tmp_path / "c.pt", fresh, rng=False)
    assert fresh[1].weight is weight and weight.tolist() == [[5.0] * 2] * 2


# names ----------------------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    """Saves its square matrix transposed, under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        self.register_load_state_dict_pre_hook(Turned.turn)

    def turn(self, state: Any, prefix: str, *_: Any) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}inner.weight"] = state.pop(f"{prefix}old")
        state[f"{prefix}inner.weight"] = state[f"{prefix}inner.weight"].t()


@pytest.mark.parametrize("name", ["inner.weight", "old"])
def test_a_hook_may_turn_and_rename_what_was_saved(tmp_path: Path, name: str) -> None:
    saved = torch.arange(9.0).view(3, 3)
    tc.save(tmp_path / "c", {"model": {f"0.{name}": saved}})
    fresh = nn.Sequential(Turned())
    training.restore(tmp_path / "c", fresh, rng=False)
    assert torch.equal(fresh[0].inner.weight, saved.t())
    training.restore({"model": {f"0.{name}": saved}}, fresh, rng=False)
    assert torch.equal(fresh[0].inner.weight, saved.t()) and saved[0, 1] == 1


def test_names_that_a_module_misses_or_does_not_know_are_named_before_anything_changes(tmp_path: Path) -> None:
    fresh = nn.Sequential(nn.Linear(2, 2), Scaled(2, 2))
    before = copy.deepcopy(dict(fresh.state_dict()))
    state = dict(_sized(5.0).state_dict())
    for change, match in (({"1.more": torch.ones(2)}, "not here: model/1.more"), ({"1.bias": None}, "missing.*1.bias")):
        tc.save(tmp_path / match, {"model": {k: v for k, v in {**state, **change}.items() if v is not None}})
        with pytest.raises(tc.MismatchError, match=match):
            training.restore(tmp_path / match, fresh, rng=False)
        assert same_tensors(dict(fresh.state_dict()), before)
        report = training.restore(tmp_path / match, copy.deepcopy(fresh), rng=False, strict=False)
        assert report.missing + report.unexpected == (f"model/{next(iter(change))}",)


class Rooted(nn.Module):
    """With a `state_dict` and a `load_state_dict` of another form."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.step = nn.Linear(2, 2), 0

    def state_dict(self) -> Any:  # type: ignore[override]
        return {"net": self.net.state_dict(), "step": self.step}

    def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
        self.net.load_state_dict(state["net"])
        self.step = state["step"]


class Bare(nn.Module):
    """With a `state_dict` that takes no arguments, and torch's `load_state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.register_buffer("count", torch.tensor(0))

    def state_dict(self) -> Any:  # type: ignore[override]
        return super().state_dict()


@pytest.mark.parametrize("kind", [Rooted, Bare])
@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel], ids=["plain", "parallel"])
def test_a_state_dict_without_arguments_is_taken_as_it_is(tmp_path: Path, kind: Any, wrap: Any) -> None:
    model = kind()
    model.step = 5
    if kind is Rooted and wrap is nn.DataParallel:
        with pytest.raises(tc.TreeError, match=r"model: expected .*state_dict.*destination.*found .*Rooted"):
            training.state(wrap(model))
        return
    if wrap is nn.DataParallel:
        with pytest.raises(tc.TreeError, match=r"model: expected .*state_dict.*destination.*found .*Bare"):
            training.state(wrap(model))
        return
    optimizer = torch.optim.Adam(model.parameters())
    model.net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tc.save(tmp_path / "c", training.state(model, optimizer))
    fresh = kind()
    again = torch.optim.Adam(fresh.parameters())
    weight = fresh.net.weight
    training.restore(tmp_path / "c", fresh, again)
    assert fresh.net.weight is weight and torch.equal(weight, model.net.weight)
    assert same_tensors(again.state_dict(), optimizer.state_dict())
    assert kind is Bare or fresh.step == 5


def test_a_state_dict_without_arguments_may_hold_tensors_in_parts(tmp_path: Path) -> None:
    def make(value: float) -> nn.Module:
        model = Bare()
        model.register_buffer("table", torch.full((2, 2), value).to_sparse())
        return model

    tc.save(tmp_path / "c", training.state(make(3.0), rng=False))
    fresh = make(1.0)
    table = fresh.table
    training.restore(tmp_path / "c", fresh, rng=False)
    assert fresh.table is table and torch.equal(fresh.table.to_dense(), torch.full((2, 2), 3.0))


def test_a_submodule_whose_state_dict_takes_no_arguments_is_named(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeError, match=r"model/1: expected .*state_dict.*destination.*found .*Bare"):
        training.state(nn.Sequential(nn.Linear(2, 2), Bare()))


# ties and failures ----------------------------------------------------------------------------------------------------


class Rebuilding(Scaled):
    """As `Scaled`, but the state dict gets a new tensor."""

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].clone()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def _tied(*kinds: Any) -> nn.Module:
    layers = [kind(2, 2) for kind in kinds]
    for layer in layers:
        layer.weight = layers[0].weight
    nn.init.constant_(layers[0].weight, 5.0)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("saved", [Scaled, Older])
@pytest.mark.parametrize("kind", [Scaled, Rebuilding])
@pytest.mark.parametrize("order", ["plain first", "plain last", "several"])
def test_a_tied_weight_has_what_torch_gives_it(tmp_path: Path, saved: Any, kind: Any, order: str) -> None:
    def make(kind: Any) -> nn.Module:
        kinds = {"plain first": (nn.Linear, kind), "plain last": (kind, nn.Linear)}
        return _tied(*kinds.get(order, (kind, nn.Linear, kind, nn.Linear)))

    model, expected = make(saved), make(kind)
    for number, source in enumerate(_sources(tmp_path, model)):
        expected.load_state_dict(torch.load(tmp_path / "c.pt")["model"])
        fresh = make(kind)
        nn.init.zeros_(fresh[0].weight)
        training.restore(source, fresh, rng=False)
        assert fresh[0].weight is fresh[1].weight
        assert torch.equal(fresh[0].weight, expected[0].weight), number


class Failing(nn.Module):
    """Changes itself, and then fails."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("small", torch.randn(0))
        self.how, self.words, self.fails = how, ["old"], False

    def get_extra_state(self) -> Any:
        return {"words": self.words}

    def _change(self) -> None:
        self.words.append("new")
        self.more = 1
        self.small = torch.ones(4)
        raise ValueError("in the middle")

    def set_extra_state(self, state: Any) -> None:
        if self.fails and self.how == "extra state":
            self._change()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.fails and self.how == "method":
            self._change()


class Attached(nn.Linear):
    """Keeps scales as an attribute of its weight, as quantized layers do."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.weight.scales = torch.randn(2)  # type: ignore[attr-defined]
        self.fails = False

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scales"] = self.weight.scales

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.weight.scales.copy_(state.pop(f"{prefix}scales"))
        self.weight.more = 1  # type: ignore[attr-defined]
        super()._load_from_state_dict(state, prefix, *rest)
        if self.fails:
            raise ValueError("in the middle")


def test_what_hangs_on_a_parameter_is_put_back_too(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", training.state(model := Attached(), rng=False))
    fresh = Attached()
    fresh.fails = True
    before = copy.deepcopy(dict(fresh.state_dict()))
    with pytest.raises(tc.MismatchError, match=r"model: .*in the middle.*are as they were before"):
        training.restore(tmp_path / "c", fresh, rng=False)
    assert same_tensors(dict(fresh.state_dict()), before) and not hasattr(fresh.weight, "more")
    fresh.fails = False
    training.restore(tmp_path / "c", fresh, rng=False)
    assert same_tensors(dict(fresh.state_dict()), dict(model.state_dict()))


def test_tensors_too_large_to_keep_copies_of_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeckpt.training._module_loads.MOST_KEPT", 20)
    tc.save(tmp_path / "c", training.state(Attached(), rng=False))
    fresh = Attached()
    fresh.fails = True
    scales = fresh.weight.scales.clone()
    with pytest.raises(tc.MismatchError, match=r"in the middle. Changed, as no copies .*: model/weight"):
        training.restore(tmp_path / "c", fresh, rng=False)
    assert torch.equal(fresh.weight.scales, scales)


class FailingExtra(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        self.seen = state
        raise ValueError("in the middle")


@pytest.mark.parametrize("how", ["extra state", "method"])
@pytest.mark.parametrize("meta", [False, True], ids=["", "meta"])
def test_where_a_module_s_own_code_fails_nothing_is_changed(tmp_path: Path, how: str, meta: bool) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), Metric(), Failing(how), nn.Linear(2, 2))

    model = make()
    model[1].update(3.0)
    tc.save(tmp_path / "c", training.state(model, rng=False))
    with torch.device("meta" if meta else "cpu"):
        fresh = make()
    fresh[2].fails = True
    before, weight = copy.deepcopy(fresh.state_dict()), fresh[2].weight
    with pytest.raises(tc.MismatchError, match=r"model/2: .*ValueError: in the middle.*are as they were before"):
        training.restore(tmp_path / "c", fresh, rng=False)
    assert fresh[2].weight is weight and fresh[2].words == ["old"] and not hasattr(fresh[2], "more")
    assert all(p.is_meta == meta for p in fresh.parameters())
    if not meta:
        assert same_tensors(dict(fresh.state_dict()), dict(before))
    fresh[2].fails = False
    training.restore(tmp_path / "c", fresh, rng=False)
    assert same_tensors(dict(fresh.state_dict()), dict(model.state_dict()))


def test_extra_states_are_set_before_arrays_are_filled(tmp_path: Path) -> None:
    model, fresh = (nn.Sequential(nn.Linear(2, 2), FailingExtra(2, 2)) for _ in range(2))
    tc.save(tmp_path / "c", training.state(model, rng=False))
    before = copy.deepcopy(dict(fresh.state_dict()))
    with pytest.raises(tc.MismatchError, match=r"model/1._extra_state: .*in the middle.*are as they were before"):
        training.restore(tmp_path / "c", fresh, rng=False)
    assert same_tensors(dict(fresh.state_dict()), before) and not hasattr(fresh[1], "seen")


class Given(nn.Linear):
    """Gives extra state that it does not take back."""

    def get_extra_state(self) -> Any:
        return 1


def test_extra_state_that_is_not_taken_back_is_refused(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", training.state(Given(2, 2)))
    with pytest.raises(tc.MismatchError, match=r"model/_extra_state: expected a module that has set_extra_state"):
        training.restore(tmp_path / "c", Given(2, 2))


def test_another_dtype_is_refused_where_the_module_would_cast_it(tmp_path: Path) -> None:
    model, fresh = _sized(5.0).double(), _sized(1.0)
    model[0].float()
    tc.save(tmp_path / "c", training.state(model, rng=False))
    with pytest.raises(tc.MismatchError, match=r"model/1.(weight|bias): expected float32.*found float64"):
        training.restore(tmp_path / "c", fresh, rng=False)
    assert fresh[1].weight.unique().item() == 1.0
    training.restore(tmp_path / "c", fresh, rng=False, cast=True)
    assert fresh[1].weight.unique().item() == 5.0


def test_own_code_runs_once_and_sees_the_state_as_it_was_saved(tmp_path: Path) -> None:
    met: list[Any] = []

    class Seeing(nn.Linear):
        def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
            met.append({k: v.clone() for k, v in state.items()})
            assert all(not v.requires_grad for v in state.values())
            before = self.weight.detach().clone()
            super()._load_from_state_dict(state, prefix, *rest)
            assert not torch.equal(before, self.weight)

    model = nn.Sequential(nn.Linear(2, 2), Seeing(2, 2))
    tc.save(tmp_path / "c", training.state(model, rng=False))
    training.restore(tmp_path / "c", nn.Sequential(nn.Linear(2, 2), Seeing(2, 2)), rng=False)
    assert same_tensors(met, [dict(model[1].state_dict())])


def test_a_part_that_is_left_out_stays_as_it_is(tmp_path: Path) -> None:
    model, fresh = _measured(0, 1.0), _measured(1, 7.0)
    tc.save(tmp_path / "c", training.state(model, rng=False))
    training.restore(tmp_path / "c", fresh, rng=False, exclude="model/1.seen")
    assert fresh[1].seen[0].tolist() == [7.0] and fresh[1].total == 1 and fresh[1].best == 1.0
    assert OrderedDict is type(fresh.state_dict())


class Cached(nn.Linear):
    """Makes a table of its weight as it gets its extra state."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale, self.table = 2.0, torch.zeros(0)

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale, self.table = state, self.weight.detach() * state


@pytest.mark.parametrize("meta", [False, True], ids=["", "meta"])
def test_a_module_may_read_its_own_tensors_as_it_gets_its_extra_state(tmp_path: Path, meta: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Cached())
    for source in _sources(tmp_path, model):
        with torch.device("meta" if meta else "cpu"):
            fresh = nn.Sequential(nn.Linear(2, 2), Cached())
        report = training.restore(source, fresh, rng=False)
        assert torch.equal(fresh[1].table, model[1].weight * 2) and report.loaded == 4
        assert same_tensors(dict(fresh.state_dict()), dict(model.state_dict()))


def test_hooks_after_loading_run_where_all_tensors_are_of_modules_with_code_of_their_own(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", training.state(nn.Sequential(Scaled(2, 2)), rng=False))
    fresh, met = nn.Sequential(Scaled(2, 2)), list[Any]()
    fresh.register_load_state_dict_post_hook(lambda module, _: met.append(module))
    training.restore(tmp_path / "c", fresh, rng=False)
    assert met == [fresh]


class Counter:
    def __init__(self) -> None:
        self.count, self.values = 0, {"seen": [torch.zeros(2)]}

    def state_dict(self) -> Any:
        return {"count": self.count, "values": self.values}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]
        self.values["seen"][0].copy_(state["values"]["seen"][0])


class Sparse(nn.Linear):
    """With buffers that are made of other tensors, and an object in its extra state."""

    def __init__(self, value: float) -> None:
        super().__init__(2, 2)
        nn.init.constant_(self.weight, value)
        self.register_buffer("table", torch.full((2, 2), value).to_sparse())
        self.register_buffer("rows", torch.full((2, 2), value).to_sparse_csr())
        self.counter, self.fails = Counter(), False
        self.counter.count = int(value)
        self.counter.values["seen"][0].fill_(value)

    def get_extra_state(self) -> Any:
        return {"counter": self.counter}

    def set_extra_state(self, state: Any) -> None:
        self.counter = state["counter"]
        if self.fails:
            raise ValueError("in the middle")


class SparseByCode(Sparse):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", [Sparse, SparseByCode])
def test_tensors_in_parts_and_objects_of_modules_are_put_back_too(tmp_path: Path, kind: Any) -> None:
    tc.save(tmp_path / "c", training.state(nn.Sequential(kind(3.0)), rng=False))
    model, fresh = nn.Sequential(kind(3.0)), nn.Sequential(kind(1.0))
    (only,), table, counter = fresh, fresh[0].table, fresh[0].counter

    def state_of(model: nn.Module) -> Any:
        found = model[0].state_dict()  # type: ignore[index]
        own = found.pop("_extra_state")["counter"].state_dict()
        return {key: value.to_dense() for key, value in found.items()}, copy.deepcopy(own)

    before, only.fails = state_of(fresh), True
    with pytest.raises(tc.MismatchError, match=r"in the middle.*are as they were before"):
        training.restore(tmp_path / "c", fresh, rng=False)
    assert same_tensors(state_of(fresh), before) and only.table is table and only.counter is counter
    only.fails = False
    nn.init.constant_(model[0].bias, 7.0)
    tc.save(tmp_path / "c", training.state(model, rng=False), overwrite=True)
    training.restore(tmp_path / "c", fresh, rng=False)
    assert same_tensors(state_of(fresh), state_of(model)) and only.table is table and only.counter is counter


class Counting(nn.Module):
    """Has as many items as it loads, and a list of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("items", torch.zeros(0))
        self.seen: list[int] = []

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}seen"] = list(self.seen)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen += [number for number in state.pop(f"{prefix}seen") if number not in self.seen]
        self.items = torch.empty_like(state[f"{prefix}items"])
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("damaged", ["first weight", "queue", "moments"])
def test_a_manager_passes_a_damaged_checkpoint_over_after_load_code_has_run(tmp_path: Path, damaged: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(64, 64), Counting(), Cached())
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = make()
    states: dict[int, Any] = {}
    with tc.Manager(tmp_path) as manager:
        for step in (1, 2):
            model[1].items, model[1].seen = torch.full((step * 1000,), float(step)), [step]  # type: ignore[index]
            model[2].scale = float(step)  # type: ignore[index]
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            manager.save(step, training.state(model, optimizer, rng=False))
            manager.wait()
            states[step] = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    moments = states[2][1]["state"][0]["exp_avg_sq"]
    found = {"first weight": states[2][0]["0.weight"], "queue": states[2][0]["1.items"], "moments": moments}[damaged]
    [file] = (tmp_path / "step_00000002").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[data.index(found.numpy().tobytes()) + 5] ^= 0xFF
    file.write_bytes(data)
    fresh, again = make()
    with tc.Manager(tmp_path) as manager:
        report = manager.resume(fresh, again, rng=False)
    assert report is not None and report.step == 1 and len(report.passed_over) == 1
    assert same_tensors((dict(fresh.state_dict()), again.state_dict()), states[1])
    assert torch.equal(fresh[2].table, fresh[2].weight) and fresh[1].seen == [1]  # type: ignore[index]
