"""Tensors that are made of others are saved as these: subclasses that wrap tensors, sparse and nested tensors."""

from __future__ import annotations

import dataclasses
import enum
import subprocess
import sys
import textwrap
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import treeckpt as tc
from tests.helpers.world import LONG, errors_of, on_ranks
from treeckpt._io.comm.comm import thread_comms

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse .* tensor support is in beta", "ignore:.*nested tensors.*:UserWarning"
)


class Rounding(enum.Enum):
    UP = 1
    DOWN = 2


class Granularity(NamedTuple):
    block: int
    axis: int | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    granularity: Granularity
    rounding: Rounding = Rounding.UP


class Scaled(torch.Tensor):
    """A tensor of codes, and a scale a row; its context holds what contexts of quantised tensors hold."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, options: Any) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, options: Any) -> None:
        self.codes, self.scale, self.options = codes, scale, options

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"options": self.options, "like": torch.bfloat16, "size": self.shape}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"], context["options"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes, args[0].scale, args[0].options)
        raise NotImplementedError(func)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Scaled({self.codes}, {self.scale})"


def scaled(seed: int = 0, rows: int = 4, **options: Any) -> Scaled:
    own = torch.Generator().manual_seed(seed)  # ranks that are threads share the one of the process
    found = Options(Granularity(32), **options)
    codes = torch.randint(0, 200, (rows, 3), dtype=torch.uint8, generator=own)
    return Scaled(codes, torch.rand(rows, generator=own), found)


def nested(layout: torch.layout, seed: int = 0) -> torch.Tensor:
    own = torch.Generator().manual_seed(seed)
    return torch.nested.nested_tensor([torch.randn(n, 3, generator=own) for n in (2, 4)], layout=layout)


def members(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense content of a sparse or nested tensor."""
    return list(tensor.detach().unbind()) if tensor.is_nested else [tensor.detach().to_dense()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Scaled):
        return type(b) is Scaled and torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)
    alike = a.layout is b.layout and type(a) is type(b) and a.requires_grad == b.requires_grad
    return alike and all(torch.equal(x, y) for x, y in zip(members(a), members(b), strict=True))


OF_LAYOUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": torch.Tensor.to_sparse,
    "hybrid": lambda dense: dense.to_sparse(1),
    "uncoalesced": lambda dense: torch.sparse_coo_tensor(
        [[1, 1], [0, 0]], [1.0, 2.0], dense.shape, check_invariants=True
    ),
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
    "no elements": lambda dense: (dense * 0).to_sparse(),
}


def saved(tree: Any, **options: Any) -> tc.MemoryStore:
    store = tc.MemoryStore()
    tc.save(store, tree, **options)
    return store


# subclasses -----------------------------------------------------------------------------------------------------------
def test_a_subclass_comes_back_with_its_context() -> None:
    tensor = scaled(rounding=Rounding.DOWN)
    loaded = tc.load(saved({"w": tensor, "plain": torch.ones(2)}))["w"]
    assert same(tensor, loaded)
    assert loaded.options == tensor.options
    assert type(loaded.options.granularity) is Granularity


def test_the_parts_are_leaves_of_a_checkpoint() -> None:
    index = tc.inspect(saved({"w": scaled()}))
    assert [leaf.path for leaf in index.entries] == ["w/codes", "w/scale"]


def test_a_parameter_stays_one() -> None:
    store = saved({"w": nn.Parameter(scaled()), "frozen": nn.Parameter(scaled(), requires_grad=False)})
    for loaded in (tc.load(store), tc.load(store, like=tc.load(store))):
        assert isinstance(loaded["w"], nn.Parameter)
        assert loaded["w"].requires_grad
        assert isinstance(loaded["frozen"], nn.Parameter)
        assert not loaded["frozen"].requires_grad


def test_a_live_tensor_is_filled_in_place() -> None:
    store, target = saved({"w": scaled(0), "step": 3}), {"w": nn.Parameter(scaled(1)), "step": 0}
    live, codes = target["w"], target["w"].codes
    report = tc.load_into(store, target)
    assert target["w"] is live
    assert live.codes is codes
    assert target["step"] == 3
    assert same(scaled(0), live.detach())
    assert report.loaded == 3


def test_what_like_says_decides_the_kind() -> None:
    store = saved({"w": scaled()})
    assert isinstance(tc.load(store, like={"w": nn.Parameter(scaled(1))})["w"], nn.Parameter)
    assert same(scaled(), tc.load(store, like=tc.abstract({"w": scaled(1)}))["w"])
    assert tc.load(store, like={"w": ...})["w"] is ...


def test_one_tensor_at_two_places_stays_one() -> None:
    tensor = scaled()
    store = saved({"a": tensor, "b": [tensor]})
    assert len(tc.inspect(store).entries) == 4
    loaded = tc.load(store)
    assert loaded["a"] is loaded["b"][0]
    loaded = tc.load(store, like={"a": tensor, "b": [tensor]})
    assert loaded["a"] is loaded["b"][0]


def test_a_subclass_of_subclasses() -> None:
    outer = Scaled(scaled(0), torch.rand(2), None)
    loaded = tc.load(saved([outer]))[0]
    assert same(loaded.codes, scaled(0))
    target = Scaled(scaled(1), torch.rand(2), None)
    tc.load_into(saved([outer]), [target])
    assert same(target.codes, scaled(0))
    assert torch.equal(target.scale, outer.scale)


def test_another_context_class_or_shape_is_refused_before_anything_changes() -> None:
    store = saved({"first": torch.ones(3), "w": scaled(0)})
    for other in (
        scaled(1, rounding=Rounding.DOWN),
        scaled(1, rows=5),
        torch.zeros(4, 3).to_sparse(),
        torch.zeros(4, 3),
    ):
        target = {"first": torch.zeros(3), "w": other}
        for strict in (True, False):
            with pytest.raises(tc.MismatchError, match="w: "):
                tc.load_into(store, target, strict=strict)
        with pytest.raises(tc.MismatchError, match="w: "):
            tc.load(store, like=target)
        assert target["first"].sum() == 0
    with pytest.raises(tc.MismatchError, match=r"w: .*found a plain one"):
        tc.load_into(saved({"w": torch.zeros(4, 3)}), {"w": scaled(0)}, strict=False)


def test_a_context_that_cannot_be_stored_is_refused_by_path() -> None:
    tensor = Scaled(torch.ones(2, 2), torch.ones(2), lambda: None)
    with pytest.raises(tc.TreeError, match=r"layers/0.*plain values beside its tensors"):
        tc.save(tc.MemoryStore(), {"layers": [tensor]})


def test_without_the_class_a_dict_of_the_parts_comes_back(tmp_path: Path) -> None:
    tc.save(tmp_path / "a", {"w": scaled(), "s": torch.eye(3).to_sparse()})
    program = f"""
        import treeckpt as tc
        reports = []
        tree = tc.load({str(tmp_path / "a")!r}, on_report=reports.append)
        assert list(tree["w"]) == ["codes", "scale"], tree
        assert tree["w"]["codes"].shape == (4, 3)
        assert tree["s"].is_sparse
        (path, name), = reports[0].in_parts
        assert path == "w" and name.endswith(":Scaled"), name
        assert "Scaled" in str(reports[0])
        import sys
        assert not any(name.startswith("tests") for name in sys.modules)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, cwd="/")
    assert run.returncode == 0, run.stderr


def test_a_class_that_lost_its_methods_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    store = saved({"w": scaled()})
    monkeypatch.setattr(sys.modules[__name__], "Scaled", Options)
    assert set(tc.load(store)["w"]) == {"codes", "scale"}


def test_parts_that_are_left_out_are_not_joined() -> None:
    store = saved({"w": scaled(), "v": scaled(1), "x": 1})
    assert tc.load(store, select="x") == {"w": ..., "v": ..., "x": 1}
    assert set(tc.load(store, exclude="w/scale", strict=False)["w"]) == {"codes", "scale"}


def test_a_renamed_tensor_is_one() -> None:
    loaded = tc.load(saved({"a": {"w": scaled()}}), rename={"a": "b"})
    assert same(loaded["b"]["w"], scaled())


def test_objects_with_such_state_are_saved_and_filled() -> None:
    class Holder:
        def __init__(self, seed: int) -> None:
            self.state = {"moment": scaled(seed), "step": seed}

        def state_dict(self) -> Any:
            return dict(self.state)

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    store, holder = saved({"it": Holder(3)}), Holder(1)
    live = holder.state["moment"]
    tc.load_into(store, {"it": holder})
    assert holder.state["moment"] is live
    assert holder.state["step"] == 3
    assert same(live, scaled(3))


# sparse and nested tensors --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", OF_LAYOUT)
def test_sparse_tensors_come_back(layout: str) -> None:
    dense = torch.eye(4) * torch.arange(1.0, 5.0)
    tensor = OF_LAYOUT[layout](dense)
    tree = {"s": tensor, "p": nn.Parameter(tensor.clone())}
    store = saved(tree)
    for loaded in (tc.load(store), tc.load(store, like=tree), tc.load(store, like=tc.abstract(tree))):
        assert same(tensor, loaded["s"])
        assert same(tree["p"], loaded["p"])
        assert tensor.layout is not torch.sparse_coo or loaded["s"].is_coalesced() == tensor.is_coalesced()


@pytest.mark.parametrize("layout", OF_LAYOUT)
def test_a_sparse_tensor_takes_what_has_other_elements(layout: str) -> None:
    dense = torch.eye(4) * torch.arange(1.0, 5.0)
    store = saved({"s": OF_LAYOUT[layout](dense), "x": 2})
    other = OF_LAYOUT[layout](torch.ones(4, 4))
    for target in (other, nn.Parameter(other.clone())):
        tree = {"s": target, "x": 0}
        tc.load_into(store, tree)
        assert tree["s"] is target
        assert torch.equal(target.detach().to_dense(), OF_LAYOUT[layout](dense).to_dense())
        assert tree["x"] == 2


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_come_back(layout: torch.layout) -> None:
    tree = {"n": nested(layout), "p": nn.Parameter(nested(layout))}
    store = saved(tree)
    for loaded in (tc.load(store), tc.load(store, like=tree)):
        assert same(tree["n"], loaded["n"])
        assert isinstance(loaded["p"], nn.Parameter)
        assert all(torch.equal(a, b) for a, b in zip(members(tree["p"]), members(loaded["p"]), strict=True))
    target = {"n": nested(layout, 1)}
    live = target["n"]
    tc.load_into(store, target, strict=False)
    assert target["n"] is live
    assert same(live, tree["n"])


def test_what_has_another_shape_or_layout_is_refused_before_anything_changes() -> None:
    store = saved({"a": torch.ones(2), "s": torch.eye(3).to_sparse()})
    for other in (torch.eye(4).to_sparse(), torch.eye(3).to_sparse_csr(), torch.eye(3).double().to_sparse()):
        target = {"a": torch.zeros(2), "s": other}
        with pytest.raises(tc.MismatchError, match="s: expected"):
            tc.load_into(store, target)
        assert target["a"].sum() == 0


def test_modules_with_sparse_tensors(tmp_path: Path) -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.eye(3).to_sparse())
    tc.save(tmp_path / "a", {"m": module, "x": torch.ones(1)})
    other = nn.Module()
    other.register_buffer("mask", torch.zeros(3, 3).to_sparse())
    tc.load_into(tmp_path / "a", {"m": other, "x": torch.zeros(1)})
    assert torch.equal(other.mask.to_dense(), torch.eye(3))


@pytest.mark.parametrize("layout", ["coo", "csr", "nested"])
def test_indices_outside_of_a_tensor_are_refused(layout: str) -> None:
    """A damaged or hostile file must not make a tensor whose operators read other memory."""
    tensor = nested(torch.strided) if layout == "nested" else OF_LAYOUT[layout](torch.eye(3))
    taken = tc.abstract({"s": tensor})["s"]
    parts = {key: torch.full(spec.shape, 1 << 40, dtype=torch.int64) for key, spec in taken.parts.items()}
    parts["values"] = torch.ones(taken.parts["values"].shape)
    with pytest.raises(tc.MismatchError, match="s: "):
        taken.with_parts(list(parts.values()))


def test_trees_of_such_tensors() -> None:
    tree = {"w": scaled(0), "s": torch.eye(3).to_sparse()}
    into = {"w": scaled(1), "s": torch.zeros(3, 3).to_sparse()}
    tc.trees.copy_into(tree, into)
    assert same(into["w"], tree["w"])
    assert same(into["s"], tree["s"])
    names = tc.trees.flatten_names(tree)
    assert list(names) == ["w.codes", "w.scale", "s.indices", "s.values"]
    assert same(tc.trees.unflatten_names(names, tree)["w"], tree["w"])


@pytest.mark.parametrize("layout", [*OF_LAYOUT, "nested", "jagged"])
def test_an_empty_tree_has_sparse_and_nested_tensors_of_the_same_places(layout: str) -> None:
    nests = {"nested": torch.strided, "jagged": torch.jagged}
    tensor = nested(nests[layout]) if layout in nests else OF_LAYOUT[layout](torch.eye(4))
    given = {"s": [tensor], "own": tc.PerRank(tensor)}
    made = tc.trees.empty_like(given)
    assert [part.shape for part in members(made["s"][0])] == [part.shape for part in members(tensor)]
    assert made["s"][0] is not tensor
    tc.trees.copy_into(given, made)
    assert same(made["s"][0], tensor)
    assert same(made["own"].value, tensor)
    with pytest.raises(tc.TreeError, match=r"s/0/.*a leaf with data"):
        tc.trees.empty_like(tc.abstract({"s": [tensor]}))


def test_a_class_in_a_context_that_is_not_here_gives_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = saved({"w": scaled()})
    for name in ("Options", "Rounding", "Granularity"):
        with monkeypatch.context() as patch:
            patch.delattr(sys.modules[__name__], name)
            reports: list[tc.LoadReport] = []
            assert set(tc.load(store, on_report=reports.append)["w"]) == {"codes", "scale"}
            assert [path for path, _ in reports[0].in_parts] == ["w"]


def test_an_object_of_a_context_whose_class_has_other_fields_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = saved({"w": scaled()})
    monkeypatch.setattr(sys.modules[__name__], "Granularity", NamedTuple("Granularity", [("rows", int)]))
    with pytest.raises(tc.MismatchError, match=r"w: expected the fields block, axis .*found rows"):
        tc.load(store)


@dataclasses.dataclass
class Chained:
    inner: Any = None


def test_deep_contexts_take_time_by_their_size() -> None:
    context: Any = None
    for _ in range(40):
        context = Chained(context)
    loaded = tc.load(saved({"w": Scaled(torch.ones(2, 2), torch.ones(2), context)}))["w"]
    assert loaded.options == context


def test_a_context_that_contains_itself_is_refused() -> None:
    context = Chained()
    context.inner = context
    with pytest.raises(tc.TreeError, match="contains itself"):
        saved({"w": Scaled(torch.ones(2, 2), torch.ones(2), context)})


def test_a_report_counts_the_bytes_of_tensors_that_are_loaded_as_saved() -> None:
    store = saved({"s": torch.eye(3).to_sparse()})
    report = tc.load_into(store, {"s": torch.zeros(3, 3).to_sparse()}, read=tc.ReadOptions(verify=False))
    assert report.nbytes == report.unverified_nbytes == 2 * 3 * 8 + 3 * 4
    assert report.read_nbytes >= report.nbytes


def test_ranks_that_differ_in_containers_or_contexts_alone_get_their_own_back() -> None:
    store, comms = tc.MemoryStore(), thread_comms(2, timeout=LONG)

    def own(rank: int) -> dict[str, Any]:
        versions = OrderedDict(w=torch.ones(2))
        vars(versions)["_metadata"] = OrderedDict({"": {"version": 1 + rank}})
        lengths = ((2, 4), (3, 3))[rank]
        jagged = torch.nested.nested_tensor([torch.ones(n, 3) for n in lengths], layout=torch.jagged)
        return {
            "queue": deque([1, 2], maxlen=3 + rank),
            "empty": [{}, []][rank],
            "versions": versions,
            "w": scaled(rank, rounding=Rounding.UP if rank else Rounding.DOWN),
            "jagged": jagged,
        }

    def check(comm: Any) -> None:
        tree = {"own": tc.PerRank(own(comm.rank))}
        tc.save(store, tree, comm=comm)
        found, expected = tc.load(store, comm=comm)["own"].value, own(comm.rank)
        assert found["queue"] == expected["queue"] and found["queue"].maxlen == expected["queue"].maxlen
        assert found["empty"] == expected["empty"]
        assert found["versions"]._metadata == expected["versions"]._metadata
        assert all(same(found[key], expected[key]) for key in ("w", "jagged"))

    assert errors_of(on_ranks(comms, check)) == [None, None]


@pytest.mark.parametrize("shapes", [[(0, 5)], [(0, 5), (0, 3)], [(2, 0, 7), (1, 2, 3)], [()]])
def test_nested_tensors_with_empty_members_come_back(shapes: list[tuple[int, ...]]) -> None:
    tensor = torch.nested.nested_tensor([torch.ones(shape) for shape in shapes])
    assert same(tc.load(saved({"n": tensor}))["n"], tensor)


def test_places_of_members_that_overflow_are_refused() -> None:
    tensor = torch.nested.nested_tensor([torch.ones(4, 4)])
    taken = tc.abstract({"n": tensor})["n"]
    parts = {"sizes": tensor._nested_tensor_size(), "strides": tensor._nested_tensor_strides()}
    parts = {"values": tensor.values(), **parts, "offsets": tensor._nested_tensor_storage_offsets()}
    assert isinstance(taken.with_parts(list(parts.values())), torch.Tensor)
    parts["strides"] = torch.tensor([[(1 << 62) // 3 * 4, 1 << 62]])
    with pytest.raises(tc.MismatchError, match="inside of the values"):
        taken.with_parts(list(parts.values()))


class Counting:
    """An object whose state holds a sparse tensor; it counts how often it is asked for its state."""

    def __init__(self) -> None:
        self.asked, self.mask = 0, torch.eye(3).to_sparse()

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"mask": self.mask, "w": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mask = state["mask"]


def test_an_object_with_a_sparse_tensor_is_asked_for_its_state_once() -> None:
    """A state_dict may be a collective of several ranks, which not all of them would call again."""
    saving, filled, like, store = Counting(), Counting(), Counting(), tc.MemoryStore()
    tc.save(store, {"o": saving, "s": torch.eye(2).to_sparse()})
    tc.load(store, {"o": like, "s": torch.eye(2).to_sparse()})
    tc.load_into(store, {"o": filled, "s": torch.zeros(2, 2).to_sparse()})
    assert [one.asked for one in (saving, like, filled)] == [1, 1, 1]
