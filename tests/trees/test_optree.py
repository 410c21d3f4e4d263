"""What a program of optree has is taken: its structures, accessors, paths and registered nodes, and torch's nodes."""

from __future__ import annotations

import collections
import dataclasses
import operator
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optree
import optree.functools
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given

import treeckpt as tc
from tests.helpers.strategies import same, trees
from tests.helpers.world import on_ranks
from treeckpt._arrays.registry import decode, encode
from treeckpt._cli.main import main
from treeckpt._core.tree.treespec import KIND
from treeckpt._core.tree.value_codec import TypedValue

SPACE = "tests of optree"


class Moments(NamedTuple):
    mu: Any
    nu: Any


class Pair:
    """A node that optree knows in one namespace."""

    def __init__(self, first: Any, second: Any, name: Any = None) -> None:
        self.first, self.second, self.name = first, second, name


class Choosy(Pair):
    """A node that takes only numbers."""


class TorchPair(Pair):
    """A node that torch knows."""


class NamedTorchPair(Pair):
    """A node that torch knows, with the names of its children."""


class OddlyNamedTorchPair(Pair):
    """A node that torch knows, with names of a class of its own."""


class TorchConstant:
    """A value that torch keeps in the structures of trees."""

    def __eq__(self, other: object) -> bool:
        return type(other) is TorchConstant

    def __hash__(self) -> int:
        return 1


def _choosy(name: object, children: Any) -> Choosy:
    return Choosy(*(0 + child for child in children), name=name)


optree.register_pytree_node(
    Pair, lambda p: ((p.first, p.second), p.name), lambda name, c: Pair(*c, name=name), namespace=SPACE
)
optree.register_pytree_node(Choosy, lambda p: ((p.first, p.second), p.name), _choosy, namespace=SPACE)
torch_pytree.register_pytree_node(
    TorchPair,
    lambda p: ([p.first, p.second], p.name),
    lambda children, name: TorchPair(*children, name=name),
    serialized_type_name="tests.TorchPair",
)
torch_pytree.register_pytree_node(
    NamedTorchPair,
    lambda p: ([p.first, p.second], None),
    lambda children, _: NamedTorchPair(*children),
    serialized_type_name="tests.NamedTorchPair",
    flatten_with_keys_fn=lambda p: (
        [(torch_pytree.GetAttrKey("first"), p.first), (torch_pytree.GetAttrKey("second"), p.second)],
        None,
    ),
)
torch_pytree.register_pytree_node(
    OddlyNamedTorchPair,
    lambda p: ([p.first, p.second], None),
    lambda children, _: OddlyNamedTorchPair(*children),
    serialized_type_name="tests.OddlyNamedTorchPair",
    flatten_with_keys_fn=lambda p: ([(object(), p.first), (object(), p.second)], None),
)
torch_pytree.register_constant(TorchConstant)


def tree() -> dict[str, Any]:
    return {"opt": Moments(torch.ones(2), {"x/y": torch.zeros(3)}), "a": [1, None, (2,)], "w": torch.arange(4)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "c"
    tc.save(path, tree())
    return path


# structures as values ------------------------------------------------------------------------------------------------


def round_trip(path: Path, value: Any, **options: Any) -> Any:
    tc.save(path, {"value": value}, overwrite=True)
    return tc.load(path, **options)["value"]


SPECS = [
    optree.tree_structure(1),
    optree.tree_structure(None),
    optree.tree_structure({"b": [1, None], "a": (2, {})}),
    optree.tree_structure({"b": [1, None], "a": 2}, none_is_leaf=True),
    optree.tree_structure(collections.OrderedDict(z=1, a=collections.deque([1, 2], 3))),
    optree.tree_structure(collections.defaultdict(list, {3: 1, 1: 2})),
    optree.tree_structure(Moments(time.localtime(), [None])),
    optree.tree_structure([Pair(1, [2], ("meta", 1.5))], namespace=SPACE),
    optree.tree_structure({"no": "node of it"}, namespace=SPACE),
]


@pytest.mark.parametrize("treespec", SPECS, ids=str)
def test_a_treespec_comes_back_equal(tmp_path: Path, treespec: optree.PyTreeSpec) -> None:
    loaded = round_trip(tmp_path / "c", treespec)
    assert type(loaded) is optree.PyTreeSpec and loaded == treespec and hash(loaded) == hash(treespec)
    assert (str(loaded), loaded.namespace, loaded.none_is_leaf, loaded.paths()) == (
        str(treespec),
        treespec.namespace,
        treespec.none_is_leaf,
        treespec.paths(),
    )


@given(trees(per_rank=False, max_leaves=6))
def test_the_treespec_of_any_tree_comes_back_equal(value: Any) -> None:
    treespec = optree.tree_structure(value, namespace="treeckpt-tests")
    again = decode(encode(treespec, "", allow_pickle=False), "", allow_pickle=False)
    assert again == treespec
    numbers = list(range(treespec.num_leaves))
    assert same(treespec.unflatten(numbers), again.unflatten(numbers))  # dicts have their own order again  # type: ignore[attr-defined]


@pytest.mark.parametrize("namespace", ["", SPACE])
def test_a_treespec_with_dicts_in_their_own_order_comes_back_so(tmp_path: Path, namespace: str) -> None:
    everywhere = optree.registry.__dict__["__GLOBAL_NAMESPACE"]
    with optree.dict_insertion_ordered(True, namespace=namespace or everywhere):
        treespec = optree.tree_structure({"b": 1, "a": [2, 3]}, namespace=namespace)
    loaded = round_trip(tmp_path / "c", treespec)
    assert loaded == treespec and loaded.paths() == [("b",), ("a", 0), ("a", 1)]
    assert optree.tree_structure({"b": 1, "a": 2}).paths() == [("a",), ("b",)]  # the mode is as it was
    with optree.dict_insertion_ordered(True, namespace=namespace or everywhere):
        assert tc.load(tmp_path / "c")["value"] == treespec
        assert round_trip(tmp_path / "d", SPECS[2]).paths() == SPECS[2].paths()


def test_a_treespec_with_marks_as_nodes_comes_back(tmp_path: Path, marked: dict[str, Any]) -> None:
    marked["nested"] = tc.FromRank({"w": tc.PerRank([marked["parts"]])}, 3)
    treespec = optree.tree_structure(marked, namespace="treeckpt")
    loaded = round_trip(tmp_path / "c", treespec)
    assert loaded == treespec and str(loaded) == str(treespec)


def test_a_treespec_names_the_class_that_a_program_lacks(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"value": optree.tree_structure([Pair(1, 2)], namespace=SPACE)})
    entry = optree.unregister_pytree_node(Pair, namespace=SPACE)
    try:
        with pytest.raises(tc.MismatchError, match=r"value: .*Pair.*not registered.*Register it"):
            tc.load(tmp_path / "c")
    finally:
        optree.register_pytree_node(Pair, entry.flatten_func, entry.unflatten_func, namespace=SPACE)


def test_a_treespec_that_cannot_be_made_again_is_refused_before_it_is_saved(tmp_path: Path) -> None:
    treespec = optree.tree_structure({"a": [Choosy(1, 2)]}, namespace=SPACE)
    with pytest.raises(tc.TreeError, match=r"value: .*unflatten functions.*Choosy"):
        tc.save(tmp_path / "c", {"value": treespec})
    factory = optree.tree_structure([collections.defaultdict(lambda: 1, a=1)])
    with pytest.raises(tc.TreeError, match=r"value/0: .*default_factory"):
        tc.save(tmp_path / "c", {"value": factory})
    assert not (tmp_path / "c" / "index.json").exists()


@pytest.mark.parametrize(
    "items",
    [
        (),
        (False, ""),
        (False, "", True, "[", 0),
        (False, "", True, '["list",[null]]', 1),
        (False, "", True, '["list",[null]]', "x"),
        (False, "", True, '["list",' * 3000 + "null" + "]" * 3000),
        (False, "", True, '["dict",["a","b"],[null]]'),
        (False, "", True, '["absent",0,[]]'),
        (False, "", True, '["per_rank",[[[1,1]]],[null]]'),
        (False, "", True, '["custom","",0,[],[]]'),
        (False, "", True, '["custom","os:system",null,[],[]]'),
        (False, "treeckpt", True, '["custom","treeckpt._core.tree.treespec:MarkNode",["tuple",["PerRank"]],[],[]]'),
    ],
)
def test_a_hostile_treespec_is_refused(items: tuple[Any, ...]) -> None:
    with pytest.raises((tc.FormatError, tc.MismatchError), match=r"^here"):
        decode(TypedValue(KIND, items), "here", allow_pickle=False)


def test_show_prints_a_treespec_also_without_its_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tc.save(tmp_path / "c", {"value": optree.tree_structure([Pair(1, 2)], namespace=SPACE), "other": SPECS[2]})
    assert main(["show", str(tmp_path / "c")]) == 0
    assert "other" in capsys.readouterr().out
    entry = optree.unregister_pytree_node(Pair, namespace=SPACE)
    try:
        assert main(["show", str(tmp_path / "c")]) == 0 and "value" in capsys.readouterr().out
    finally:
        optree.register_pytree_node(Pair, entry.flatten_func, entry.unflatten_func, namespace=SPACE)


# structures as targets -----------------------------------------------------------------------------------------------


class Other(NamedTuple):
    mu: Any
    nu: Any


@dataclasses.dataclass
class Position:
    epoch: int
    order: Any


def test_a_treespec_names_what_is_loaded_and_its_containers(saved: Path) -> None:
    treespec = optree.tree_structure(tree(), none_is_leaf=True)
    loaded = tc.load(saved, treespec)
    assert optree.tree_structure(loaded, none_is_leaf=True) == treespec and list(loaded) == list(tree())
    assert loaded["a"] == [1, None, (2,)] and torch.equal(loaded["w"], torch.arange(4))
    same_leaves = tc.load(saved, tc.abstract(tree(), treespec=True))
    assert optree.tree_structure(same_leaves, none_is_leaf=True) == treespec
    other = {"opt": Other(0, 0), "a": collections.deque([0, None, [0]]), "w": 0}
    loaded = tc.load(saved, optree.tree_structure(other))
    assert type(loaded["opt"]) is Other and loaded["a"] == collections.deque([1, None, [2]])
    assert list(loaded["opt"].nu) == ["x/y"]  # one leaf of the structure, a container in the checkpoint


def test_a_treespec_names_what_it_lacks_and_what_the_checkpoint_lacks(saved: Path) -> None:
    treespec = optree.tree_structure({"w": 0, "new": [0, 0]})
    with pytest.raises(tc.MismatchError, match=r"2 missing.*new/0, new/1; 5 not asked for: opt/mu"):
        tc.load(saved, treespec)
    with pytest.raises(tc.MismatchError, match=r"new/0"):
        tc.load(saved, treespec, strict="missing")
    reports: list[tc.LoadReport] = []
    loaded = tc.load(saved, treespec, strict=False, on_report=reports.append)
    assert loaded["new"] == [..., ...] and torch.equal(loaded["w"], torch.arange(4))
    assert reports[0].missing == ("new/0", "new/1") and reports[0].nbytes == 32  # only what is wanted is read
    part = tc.load(saved, optree.tree_structure(tree()), select="a")
    assert part["a"] == [1, None, (2,)] and part["opt"] == Moments(..., {"x/y": ...}) and part["w"] is ...


def test_what_optree_takes_as_a_leaf_comes_as_it_was_saved(tmp_path: Path) -> None:
    w = torch.ones(3)
    table = tc.KeyedTable(np.array([1, 2, 3]), {"rows": np.arange(6).reshape(3, 2)}, buckets=2)
    state = {
        "a": w, "b": w, "view": torch.nn.Parameter(w), "sparse": torch.eye(2).to_sparse(), "table": table,
        "position": Position(3, [torch.zeros(1)]), "text": "x" * 9000, "own": tc.PerRank({"seed": 1}),
        "best": tc.FromRank([4]), "counter": collections.Counter(a=2), "spec": optree.tree_structure([1]),
    }  # fmt: skip
    tc.save(tmp_path / "c", state)
    for namespace in ("", "treeckpt"):
        loaded = tc.load(tmp_path / "c", optree.tree_structure(state, namespace=namespace))
        assert loaded["a"] is loaded["b"] and loaded["view"].data_ptr() == loaded["a"].data_ptr()
        assert torch.equal(loaded["sparse"].to_dense(), torch.eye(2)) and sorted(loaded["table"].ids.tolist()) == [
            1,
            2,
            3,
        ]
        assert type(loaded["position"]) is Position and loaded["position"].order[0].tolist() == [0]
        assert loaded["own"] == tc.PerRank({"seed": 1}) and loaded["best"] == [4]
        assert (loaded["text"], loaded["counter"], loaded["spec"]) == (state["text"], state["counter"], state["spec"])
    whole = tc.load(tmp_path / "c", optree.treespec_leaf())
    assert list(whole) == list(state)


def test_a_treespec_gives_each_rank_what_is_its_own(tmp_path: Path) -> None:
    def own(rank: int) -> dict[str, Any]:
        return {"a": tc.PerRank(np.full(rank + 1, rank)), "b": tc.PerRank({"x": [rank] * (rank + 1)})}

    on_ranks(2, lambda comm: tc.save(tmp_path / "c", own(comm.rank), comm=comm))
    for namespace in ("", "treeckpt"):
        treespecs = [optree.tree_structure(own(rank), namespace=namespace) for rank in range(2)]
        outcomes = on_ranks(2, lambda comm, specs=treespecs: tc.load(tmp_path / "c", specs[comm.rank], comm=comm))
        for rank, outcome in enumerate(outcomes):
            assert outcome.error is None and outcome.value["a"].value.tolist() == [rank] * (rank + 1)
            assert outcome.value["b"].value == {"x": [rank] * (rank + 1)}


def test_names_of_one_array_are_one_object_of_an_abstract_target(tmp_path: Path) -> None:
    w = torch.ones(3)
    tc.save(tmp_path / "c", {"a": w, "b": [w]})
    loaded = tc.load(tmp_path / "c", tc.load_abstract(tmp_path / "c"))
    assert loaded["a"] is loaded["b"][0]


def test_a_treespec_with_nodes_of_a_namespace_is_a_target(tmp_path: Path) -> None:
    value = {"p": Pair(torch.ones(2), [3])}
    tc.save(tmp_path / "c", value, namespace=SPACE)
    loaded = tc.load(tmp_path / "c", optree.tree_structure(value, namespace=SPACE))
    assert type(loaded["p"]) is Pair and loaded["p"].second == [3]
    loaded = tc.load(tmp_path / "c", tc.abstract(value, treespec=True, namespace=SPACE), namespace=SPACE)
    assert type(loaded["p"]) is Pair


def test_a_treespec_is_a_target_in_several_checkpoints_and_after_renames(saved: Path, tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"w": torch.zeros(2), "new": {"x": 1}})
    treespec = optree.tree_structure({"w": 0, "a": 0, "opt": 0, "new": 0})
    loaded = tc.load([saved, tmp_path / "c"], treespec)
    assert torch.equal(loaded["w"], torch.zeros(2)) and loaded["new"] == {"x": 1} and loaded["a"] == [1, None, (2,)]
    renamed = tc.load(saved, optree.tree_structure({"v": 0}), rename={"w": "v"}, strict="missing")
    assert torch.equal(renamed["v"], torch.arange(4))


def test_a_treespec_without_the_shape_of_a_piece_is_refused(tmp_path: Path, marked: dict[str, Any]) -> None:
    tc.save(tmp_path / "c", marked)
    with pytest.raises(tc.MismatchError, match=r"Sharded without arrays.*Pass like="):
        tc.load(tmp_path / "c", optree.tree_structure(marked, namespace="treeckpt"))
    assert tc.load(tmp_path / "c", optree.tree_structure(marked))["w"].tolist() == [[1, 1]]


def test_a_treespec_cannot_be_filled(saved: Path) -> None:
    with pytest.raises(tc.MismatchError, match=r"tree: .* found an optree.PyTreeSpec, which has none. treeckpt.load "):
        tc.load_into(saved, optree.tree_structure({"w": 1}))


def test_a_run_is_restored_by_a_treespec(tmp_path: Path) -> None:
    manager = tc.Manager(tmp_path / "run", background=False)
    manager.save(1, tree())
    assert manager.restore(optree.tree_structure(tree()))["a"] == [1, None, (2,)]


# paths ---------------------------------------------------------------------------------------------------------------


def chosen(path: Path, **options: Any) -> list[str]:
    loaded: list[str] = []
    tc.load(path, on_report=lambda report: loaded.append(str(report.loaded)), **options)
    leaves = tc.inspect(path).by_path
    return [name for name in leaves if _at(tc.load(path, **options), name) is not ...]


def _at(node: Any, path: str) -> Any:
    for key in tc.path_keys(path):
        if node is ...:
            return ...
        node = getattr(node, str(key)) if isinstance(node, Moments) else node[key]
    return node


def test_the_paths_of_optree_mean_the_leaves_that_they_name(saved: Path) -> None:
    accessors, paths = optree.tree_accessors(tree()), optree.tree_paths(tree())
    assert ("opt", 0) in paths  # a number, where the path has a name
    for accessor, path in zip(accessors, paths, strict=True):
        name = tc.path_text(accessor)
        assert chosen(saved, select=[path]) == chosen(saved, select=accessor) == chosen(saved, select=name) == [name]
    assert "opt/mu" not in chosen(saved, exclude=[("opt", 0)])
    with pytest.raises(tc.MismatchError, match="opt/2"):
        tc.load(saved, select=[("opt", 2)])  # a namedtuple of two fields


def test_every_call_that_takes_a_path_takes_those_of_optree(saved: Path, tmp_path: Path) -> None:
    accessor = next(a for a in optree.tree_accessors(tree()) if tc.path_text(a) == "opt/mu")
    for one in (accessor, [("opt", 0)], "opt/0"):
        assert tc.load(saved, select=one)["opt"].mu is not ...
        assert tc.load_abstract(saved, select=one)["opt"].mu.shape == (2,)
        assert tc.load_async(saved, select=one).result()["opt"].mu is not ...
        assert tc.load(tc.From(saved, select=one))["opt"].mu is not ...
        into = tree()
        into["opt"].mu.zero_()
        tc.load_into(saved, into, select=one)
        assert torch.equal(into["opt"].mu, torch.ones(2))
    assert torch.equal(tc.load(saved, rename={accessor: ("new", "a/b")})["new"]["a/b"], torch.ones(2))
    for one in (accessor[:1], ("opt",), "opt"):
        tc.convert.convert(saved, tmp_path / "c", subtree=one, overwrite=True)
        assert torch.equal(tc.load(tmp_path / "c").mu, torch.ones(2))
    tc.convert.convert(saved, tmp_path / "c", select=accessor, exclude=[("opt", 1)], overwrite=True)
    manager = tc.Manager(tmp_path / "run", background=False)
    manager.save(1, tree())
    assert manager.restore(select=[("opt", 1)])["opt"].mu is ...
    into = tree()
    manager.restore(into=into, select=accessor)


def test_rules_take_paths_of_optree(saved: Path) -> None:
    accessor = next(a for a in optree.tree_accessors(tree()) if tc.path_text(a) == "w")
    rules = tc.rules
    assert rules.Rename(accessor, ("new", "a/b")) == rules.Rename("w", "new/a~1b")
    assert rules.Split(accessor, [("parts", 0), accessor]) == rules.Split("w", ("parts/0", "w"))
    assert rules.Concat(accessor, "x") == rules.Concat("w", "x") == rules.Concat(["w"], "x")
    parts = tc.load(saved, transforms=[rules.Split(accessor, ("left", "right"), axis=0), rules.Drop(("a", 0))])
    assert (parts["left"].tolist(), parts["right"].tolist()) == ([0, 1], [2, 3])
    for one in (("opt", 0), "opt/0"):
        assert torch.equal(tc.load(saved, rename={one: "new"})["new"], torch.ones(2))
        moved = tc.load(saved, transforms=[rules.Rename(("w",), ("w", "old")), rules.Copy(one, "new")])
        assert torch.equal(moved["new"], moved["opt"].mu)
    exchanged = tc.load(saved, rename={"w": ("opt", 0), ("opt", 0): "w"})
    assert (exchanged["opt"].mu.tolist(), exchanged["w"].tolist()) == ([0, 1, 2, 3], [1, 1])
    with pytest.raises(tc.MismatchError, match="Rename"):
        rules.Rename(("a", object()), "b")


def test_the_rows_of_a_table_are_chosen_by_a_path_of_optree(tmp_path: Path) -> None:
    table = tc.KeyedTable(np.array([1, 2, 3]), {"rows": np.arange(6).reshape(3, 2)}, buckets=2)
    tc.save(tmp_path / "c", {"emb": [table]})
    accessor = optree.tree_accessors({"emb": [0]})[0]
    assert tc.load(tmp_path / "c", ids={accessor: [2]})["emb"][0].ids.tolist() == [2]
    assert tc.load(tmp_path / "c", ids={("emb", 0): [3]})["emb"][0].ids.tolist() == [3]
    tc.save(tmp_path / "named", Moments(1, table))
    assert tc.load(tmp_path / "named", ids={(1,): [3]}).nu.ids.tolist() == [3]


def test_training_state_is_restored_by_a_path_of_optree(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    tc.save(tmp_path / "c", tc.training.state(model, extra={"m": Moments(1, 2)}))
    accessor = next(a for a in optree.tree_accessors({"model": {"weight": 0, "bias": 0}}) if a.path[1] == "bias")
    report = tc.training.restore(tmp_path / "c", model, select=accessor, strict=False)
    assert report.loaded == 1
    named = {"old": {"weight": torch.ones(1, 2), "bias": torch.ones(1)}}
    tc.save(tmp_path / "d", named)
    whole = optree.tree_accessors({"old": 0})[0]
    tc.training.restore(tmp_path / "d", model, rename={whole: ("model",)}, from_root=True)
    assert model.weight.tolist() == [[1, 1]]
    tc.save(tmp_path / "e", {"weight": torch.zeros(1, 2), "bias": torch.ones(1)})
    tc.training.restore(tmp_path / "e", model, under=optree.tree_accessors({"model": 0})[0])
    assert model.weight.tolist() == [[0, 0]]
    assert set(tc.training.state(model, select=[accessor], rng=False)["model"]) == {"bias"}


# nodes ---------------------------------------------------------------------------------------------------------------


def test_a_partial_of_optree_comes_back_with_its_function(tmp_path: Path) -> None:
    function = optree.functools.partial(torch.add, torch.ones(2), alpha=2)
    path = tmp_path / "c"
    tc.save(path, {"f": function, "g": optree.functools.partial(operator.neg)})
    assert set(tc.inspect(path).by_path) == {"f/args/0", "f/keywords/alpha"}
    like = {"f": optree.functools.partial(torch.add, torch.zeros(2), alpha=0), "g": optree.functools.partial(len)}
    for loaded in (tc.load(path, allow_pickle=True), tc.load(path, like)):
        assert type(loaded["f"]) is optree.functools.partial
        assert loaded["f"](torch.zeros(2)).tolist() == [1, 1] if loaded["f"].keywords["alpha"] == 1 else True
        assert loaded["f"].func is torch.add and loaded["f"].keywords == {"alpha": 2}
        assert torch.equal(loaded["f"].args[0], torch.ones(2))
    assert tc.load(path, allow_pickle=True)["g"](3) == -3


def test_a_function_that_a_checkpoint_names_is_not_taken_from_it_unasked(tmp_path: Path) -> None:
    import os

    tc.save(tmp_path / "c", {"f": optree.functools.partial(os.system, "true"), "w": 1})
    with pytest.raises(tc.MismatchError, match=r"f: .*found the function posix:system.*like="):
        tc.load(tmp_path / "c")
    assert tc.load(tmp_path / "c", select="w") == {"f": ..., "w": 1}


def test_a_function_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeError, match=r"f: .*<lambda>"):
        tc.save(tmp_path / "c", {"f": optree.functools.partial(lambda x: x, 1)})


def test_nodes_of_a_namespace_come_back(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"p": Pair(torch.ones(2), [3], "n")}, namespace=SPACE)
    loaded = tc.load(tmp_path / "c", namespace=SPACE)["p"]
    assert type(loaded) is Pair and (loaded.first.tolist(), loaded.second, loaded.name) == ([1, 1], [3], "n")
    with pytest.raises(tc.MismatchError, match=r"p: .*not registered.*namespace"):
        tc.load(tmp_path / "c")


def test_an_enum_beside_the_children_of_a_node_comes_back(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", [Pair(1, 2, optree.PyTreeKind.DICT)], namespace=SPACE)
    assert tc.load(tmp_path / "c", namespace=SPACE)[0].name is optree.PyTreeKind.DICT


def test_nodes_of_torch_come_back(tmp_path: Path) -> None:
    saved = {"t": TorchPair(torch.ones(2), {"x": 3}, ("n", 1)), "n": NamedTorchPair(1, torch.zeros(1))}
    tc.save(tmp_path / "c", saved)
    assert set(tc.inspect(tmp_path / "c").by_path) == {"t/0", "t/1/x", "n/first", "n/second"}
    for loaded in (tc.load(tmp_path / "c"), tc.load(tmp_path / "c", saved)):
        assert type(loaded["t"]) is TorchPair and type(loaded["n"]) is NamedTorchPair
        assert (loaded["t"].first.tolist(), loaded["t"].second, loaded["t"].name) == ([1, 1], {"x": 3}, ("n", 1))
    saved["t"].first.zero_()
    tc.load_into(tmp_path / "c", saved)
    assert saved["t"].first.tolist() == [1, 1]
    odd = round_trip(tmp_path / "d", OddlyNamedTorchPair(1, [2]))
    assert type(odd) is OddlyNamedTorchPair and (odd.first, odd.second) == (1, [2])
    fx = torch.fx.immutable_collections.immutable_list([torch.ones(1), 2])
    assert type(round_trip(tmp_path / "d", fx)) is type(fx)


def test_what_torch_keeps_as_a_constant_stays_a_leaf(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeError, match=r"value: .*TorchConstant"):
        tc.save(tmp_path / "c", {"value": TorchConstant()})
    tc.save(tmp_path / "c", {"value": TorchConstant()}, allow_pickle=True)
    assert type(tc.load(tmp_path / "c", allow_pickle=True)["value"]) is TorchConstant


@pytest.fixture
def marked() -> Iterator[dict[str, Any]]:
    box = tc.Sharded(np.ones((1, 2)), (1, 2), (0, 0))
    several = tc.Sharded([np.ones(1), np.ones(2)], (3,), [(0,), (1,)])
    yield {
        "own": tc.PerRank({"x": 1}),
        "best": tc.FromRank([2], 0),
        "w": box,
        "parts": several,
        "flat": tc.Sharded(np.ones(3), (3,), 0),
    }


def test_a_map_of_optree_passes_through_the_marks(marked: dict[str, Any]) -> None:
    doubled: Any = optree.tree_map(lambda x: x * 2, marked, namespace="treeckpt")
    assert doubled["own"] == tc.PerRank({"x": 2}) and doubled["best"] == tc.FromRank([4], 0)
    assert (doubled["w"].offset, doubled["w"].local.tolist()) == ((0, 0), [[2, 2]])
    assert (doubled["flat"].offset, doubled["flat"].global_shape) == (0, (3,))
    assert doubled["parts"].several and [part.tolist() for part in doubled["parts"].locals] == [[2], [2, 2]]
    assert optree.tree_leaves(marked) != optree.tree_leaves(marked, namespace="treeckpt")


def test_marks_are_saved_alike_in_every_namespace(tmp_path: Path, marked: dict[str, Any]) -> None:
    tc.save(tmp_path / "a", marked)
    tc.save(tmp_path / "b", marked, namespace="treeckpt")
    index, other = tc.inspect(tmp_path / "a"), tc.inspect(tmp_path / "b")
    assert index.structure == other.structure and set(index.by_path) == set(other.by_path)
    leaves = optree.tree_leaves(marked, namespace="treeckpt")
    for accessor, leaf in zip(optree.tree_accessors(marked, namespace="treeckpt"), leaves, strict=True):
        assert accessor(marked) is leaf and repr(accessor)
        tc.load(tmp_path / "a", select=accessor)
    assert tc.load(tmp_path / "a", select=[("own", "value", "x")])["own"].value == {"x": 1}
