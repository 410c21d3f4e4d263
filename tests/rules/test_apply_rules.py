"""Load rules: what is loaded is what the rules make of what was saved, whatever cut it before and cuts it after.

The oracle does with whole tensors what the rules say. Threads are the ranks, as in `tests.helpers.layout_cases`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch.distributed.tensor import DTensor

import treeckpt as tc
from tests.helpers import layout_cases
from tests.helpers.strategies import encode_runs
from treeckpt import rules as R
from treeckpt._core.format.shard_header import BLOCK
from treeckpt._core.sharding.placements import Mesh, MeshLayout, Shard
from treeckpt._core.sharding.region import Region

Tensors = dict[str, torch.Tensor]


# the oracle -----------------------------------------------------------------------------------------------------------
def _pieces(tensor: torch.Tensor, rule: R.Split) -> list[torch.Tensor]:
    sizes = rule.sizes or (1,) * len(rule.into)
    unit = tensor.shape[rule.axis] // (sum(sizes) * rule.groups)
    groups = tensor.chunk(rule.groups, rule.axis) if tensor.shape[rule.axis] else [tensor] * rule.groups
    cut = [group.split([unit * size for size in sizes], rule.axis) for group in groups]
    return [torch.cat([group[k] for group in cut], rule.axis) for k in range(len(sizes))]


def _joined(tensors: list[torch.Tensor], axis: int, groups: int) -> torch.Tensor:
    lengths = [t.shape[axis] // groups for t in tensors]
    found = [t.narrow(axis, g * n, n) for g in range(groups) for t, n in zip(tensors, lengths, strict=True)]
    return torch.cat(found, axis)


def apply(tensors: Tensors, rule: R.Rule) -> Tensors:
    """One rule, of names without patterns, on whole tensors."""
    left = dict(tensors)
    if isinstance(rule, R.Split):
        return dict(zip(rule.into, _pieces(left.pop(rule.source), rule), strict=True)) | left
    if isinstance(rule, R.Concat):
        given_ = [left.pop(name) for name in rule.sources]
        return left | {rule.target: _joined(given_, rule.axis, rule.groups)}
    if isinstance(rule, R.Permute):
        tensor = left.pop(rule.source)
        axes = rule.axes or tuple(reversed(range(tensor.ndim)))
        return left | {rule.target or rule.source: tensor.permute(axes)}
    if isinstance(rule, R.Stack):
        return left | {rule.target: torch.stack([left.pop(name) for name in rule.sources], rule.axis)}
    if isinstance(rule, R.Unstack):
        rows = left.pop(rule.source).unbind(rule.axis)
        return left | dict(zip(rule.into, rows, strict=True))
    if isinstance(rule, R.Cast):
        return left | {rule.source: left[rule.source].to(getattr(torch, rule.dtype))}
    assert isinstance(rule, R.Rename)
    return {rule.target if name == rule.source else name: tensor for name, tensor in left.items()}


@st.composite
def _rule(draw: DrawFn, tensors: Tensors, number: int) -> R.Rule | None:
    """A rule that can be applied to one or some of these, and undone."""
    name = draw(st.sampled_from(sorted(tensors)))
    tensor, kind = (
        tensors[name],
        draw(st.sampled_from(["split", "concat", "permute", "stack", "unstack", "cast", "name"])),
    )
    axis = draw(st.integers(0, tensor.ndim - 1)) if tensor.ndim else 0
    new = [f"n{number}.{i}" for i in range(9)]
    if kind == "split" and tensor.ndim:
        length = tensor.shape[axis]
        groups = draw(st.sampled_from([g for g in range(1, 5) if length % g == 0]))
        cut = draw(st.integers(0, length // groups))
        sizes = (cut, length // groups - cut) if length else None
        return R.Split(name, (new[0], new[1]), axis, sizes, groups)
    alike = [n for n, t in tensors.items() if t.dtype == tensor.dtype and t.ndim == tensor.ndim]
    if kind == "concat" and tensor.ndim:
        rest = [*tensor.shape[:axis], *tensor.shape[axis + 1 :]]
        fit = [n for n in alike if [*tensors[n].shape[:axis], *tensors[n].shape[axis + 1 :]] == rest]
        groups = math.gcd(*(tensors[n].shape[axis] for n in fit)) or 1
        return R.Concat(tuple(draw(st.permutations(fit))), new[0], axis, draw(st.sampled_from([1, groups])))
    if kind == "stack":
        fit = [n for n in alike if tensors[n].shape == tensor.shape]
        return R.Stack(tuple(draw(st.permutations(fit))), new[0], draw(st.integers(0, tensor.ndim)))
    if kind == "unstack" and tensor.ndim and 0 < tensor.shape[axis] < 9:
        return R.Unstack(name, tuple(new[: tensor.shape[axis]]), axis)
    if kind == "permute":
        return R.Permute(name, draw(st.one_of(st.none(), st.permutations(range(tensor.ndim)).map(tuple))), new[0])
    if kind == "cast" and tensor.dtype is torch.float32:
        return R.Cast(name, "float64")
    return R.Rename(name, new[0])


@given(st.data())
def test_rules_and_then_their_inverse_are_the_identity_under_resharding(data: st.DataObject) -> None:
    worlds = [data.draw(st.integers(1, 3)) for _ in range(3)]
    full: Tensors = {}
    for i in range(data.draw(st.integers(1, 3))):
        shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=3)))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
        full[f"a{i}"] = (torch.arange(math.prod(shape)).view(shape) + 100 * i).to(dtype)
    rules: list[R.Rule] = []
    expected = full
    for number in range(data.draw(st.integers(1, 4))):
        if (rule := data.draw(_rule(expected, number))) is not None:
            rules.append(rule)
            # in C order, also where a dimension of one element makes that hard to see
            made = apply(expected, rule).items()
            expected = {name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for name, tensor in made}
    first, second = tc.MemoryStore(), tc.MemoryStore()
    cut = {n: data.draw(layout_cases.placed(tuple(t.shape), worlds[0], t.dtype, saved=True)) for n, t in full.items()}
    layout_cases.on_ranks(worlds[0], lambda comm: tc.save(first, _cut(full, cut, comm.rank), comm=comm))
    whole = tc.load(first, transforms=R.decode(R.encode(rules)))
    assert whole.keys() == expected.keys()
    for name, tensor in expected.items():
        assert layout_cases.bits(whole[name]) == layout_cases.bits(tensor), name

    cut = {
        n: data.draw(layout_cases.placed(tuple(t.shape), worlds[1], t.dtype, saved=False)) for n, t in expected.items()
    }

    def move(comm: Any) -> Any:
        mine = _cut(expected, cut, comm.rank)
        blank = _cut({name: torch.zeros_like(tensor) for name, tensor in expected.items()}, cut, comm.rank)
        for made in (tc.load(first, blank, transforms=rules, comm=comm), blank):
            if made is blank:
                tc.load_into(first, blank, transforms=rules, comm=comm)
            for name, leaf in mine.items():
                assert layout_cases.bits(made[name]) == layout_cases.bits(leaf), f"{name} on rank {comm.rank}"
        return blank

    moved = layout_cases.on_ranks(worlds[1], move)
    layout_cases.on_ranks(worlds[1], lambda comm: tc.save(second, moved[comm.rank], comm=comm))
    back = R.inverse(rules, tc.inspect(first))
    cut = {n: data.draw(layout_cases.placed(tuple(t.shape), worlds[2], t.dtype, saved=False)) for n, t in full.items()}

    def check(comm: Any) -> None:
        mine = _cut(full, cut, comm.rank)
        made = tc.load(second, mine, transforms=back, comm=comm)
        assert all(layout_cases.bits(made[name]) == layout_cases.bits(leaf) for name, leaf in mine.items())

    layout_cases.on_ranks(worlds[2], check)


def _cut(full: Tensors, how: dict[str, Any], rank: int) -> dict[str, Any]:
    leaves = {name: how[name].cut(tensor, rank) for name, tensor in full.items()}
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}


# which bytes are read -------------------------------------------------------------------------------------------------
HEADS, GROUPS, SIZE, HIDDEN = 16, 8, 64, 512
QKV = R.split_qkv("qkv", ("q", "k", "v"), heads=HEADS, kv_heads=GROUPS)


def _fused() -> torch.Tensor:
    rows = (HEADS + 2 * GROUPS) * SIZE
    return torch.arange(rows * HIDDEN, dtype=torch.float32).view(rows, HIDDEN)


def _split(fused: torch.Tensor) -> Tensors:
    shared = fused.view(GROUPS, HEADS // GROUPS + 2, SIZE, HIDDEN)
    q, k, v = shared[:, :-2], shared[:, -2], shared[:, -1]
    return {"q": q.reshape(-1, HIDDEN), "k": k.reshape(-1, HIDDEN), "v": v.reshape(-1, HIDDEN)}


@pytest.mark.parametrize("names", [("q", "k", "v"), ("k",), ("q",)])
def test_a_fused_projection_is_loaded_into_tensor_parallel_shards_from_their_bytes_alone(
    names: tuple[str, ...],
) -> None:
    """Each rank of two reads half of what it wants: the rows of its heads, and no other rank's."""
    store, fused = tc.MemoryStore(), _fused()
    tc.save(store, {"qkv": fused, "other": torch.ones(1 << 20)})
    expected = _split(fused)
    mesh = Mesh((2,), encode_runs([0, 1]))
    how = layout_cases.OnMesh(MeshLayout(mesh, (Shard(0),)))

    def load(comm: Any) -> None:
        like: dict[str, Any] = {name: how.cut(torch.zeros_like(expected[name]), comm.rank) for name in names}
        reports: list[tc.LoadReport] = []
        found = tc.load(store, like, transforms=QKV, select=names, comm=comm, on_report=reports.append)
        for name in names:
            assert isinstance(found[name], DTensor)
            assert torch.equal(found[name].to_local(), how.cut(expected[name], comm.rank).to_local())
        needed = sum(expected[name].nbytes for name in names) // 2
        stretches = 1 if len(names) == 3 else GROUPS // 2
        assert reports[0].nbytes == needed
        assert reports[0].read_nbytes <= 1.05 * needed + 2 * BLOCK * stretches

    layout_cases.on_ranks(2, load)


def test_a_column_of_a_stack_of_transposed_layers_is_read_from_its_rows() -> None:
    """Layers stacked and turned: a shard along the last axis is a row range of each saved layer."""
    store = tc.MemoryStore()
    layers = [torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024) + i for i in range(3)]
    tc.save(store, {"layers": layers})
    spec = tc.ArraySpec((3, 1024, 1024), "float32", (Region((0, 0, 512), (3, 1024, 256)),))
    reports: list[tc.LoadReport] = []
    rules = [R.Permute("layers/$L"), R.Stack("layers/$L", "w")]
    found = tc.load(store, {"w": spec}, transforms=rules, on_report=reports.append)["w"]
    assert torch.equal(found, torch.stack(layers).mT[:, :, 512:768])
    assert reports[0].read_nbytes <= 1.05 * found.nbytes + 2 * BLOCK * 3


def test_a_split_along_the_first_axis_is_a_view_of_what_was_read() -> None:
    """Nothing is copied: the pieces lie in one stretch of memory, in the order of the file."""
    store, fused = tc.MemoryStore(), torch.arange(96.0).view(12, 8)
    tc.save(store, {"w": fused})
    found = tc.load(store, transforms=R.Split("w", ("a", "b"), sizes=(1, 2)))
    assert torch.equal(found["a"], fused[:4]) and torch.equal(found["b"], fused[4:])
    assert found["b"].data_ptr() - found["a"].data_ptr() == found["a"].nbytes


def test_mapped_arrays_stay_mapped_where_rules_only_cut_them_and_are_copied_where_they_turn_them(
    tmp_path: Path,
) -> None:
    fused = torch.arange(1 << 16, dtype=torch.float32).view(256, 256)
    tc.save(tmp_path, {"w": fused, "t": fused + 1})
    reports: list[tc.LoadReport] = []
    rules = [R.Rename("t", "u"), R.Split("w", ("a", "b")), R.Permute("u")]
    found = tc.load(tmp_path, transforms=rules, read=tc.ReadOptions(mmap=True), on_report=reports.append)
    assert torch.equal(torch.cat([found["a"], found["b"]]), fused) and torch.equal(found["u"], (fused + 1).T)
    assert reports[0].read_nbytes == fused.nbytes, "only the one that is turned"


# what it works with ---------------------------------------------------------------------------------------------------
def test_the_tree_without_like_has_the_new_names_and_the_old_containers() -> None:
    tied = np.arange(6.0).reshape(2, 3)
    tree = {
        "model": {"layers": [{"w": np.ones(2)}, {"w": np.zeros(2)}], "head": tied, "embed": tied},
        "pair": (1, {}),
        "step": 3,
        "own": tc.PerRank({"seed": 7, "state": np.arange(3)}),
        "gone": np.ones(1),
    }
    store = tc.MemoryStore()
    tc.save(store, tree)
    reports: list[tc.LoadReport] = []
    found = tc.load(
        store,
        rename={"model/layers": "net/blocks", "own": "rng"},
        transforms=[R.Drop("gone"), R.Copy("step", "also"), R.Fill("new", 2, (2,), "int32")],
        on_report=reports.append,
    )
    assert list(found) == ["net", "model", "pair", "step", "also", "rng", "new"]
    assert [layer["w"].tolist() for layer in found["net"]["blocks"]] == [[1, 1], [0, 0]]
    assert found["model"]["head"] is found["model"]["embed"] and found["pair"] == (1, {})
    assert found["rng"].value["seed"] == 7 and found["rng"].value["state"].tolist() == [0, 1, 2]
    assert (found["step"], found["also"]) == (3, 3) and found["new"].tolist() == [2, 2]
    assert reports[0].dropped == ("gone",)
    assert ("model/layers/0/w", "net/blocks/0/w") in reports[0].renamed
    assert not reports[0].missing and not reports[0].unexpected


def test_what_lies_below_a_node_is_lifted_to_the_root_and_a_leaf_only_where_it_is_alone() -> None:
    store = tc.MemoryStore("c")
    tc.save(store, {"model": {"w": np.arange(3), "n": [1, 2]}, "step": 5})
    for names in ({"model": ""}, {"model/*": "*"}):
        found = tc.load(store, rename=names, exclude="step")
        assert found["w"].tolist() == [0, 1, 2] and found["n"] == [1, 2] and found["step"] is ...
    assert tc.load(store, transforms=["model/n -> _", "step -> _", R.Rename("model/w", "")]).tolist() == [0, 1, 2]
    with pytest.raises(tc.MismatchError, match="a leaf, or leaves below it"):
        tc.load(store, rename={"step": ""})


@pytest.mark.parametrize("name", ["/", "a//b", "/a", "a/"])
def test_a_new_name_with_empty_steps_is_refused(name: str) -> None:
    store = tc.MemoryStore("c")
    tc.save(store, {"w": np.arange(3), "step": 5})
    with pytest.raises(tc.MismatchError, match="without empty steps"):
        tc.load(store, rename={"w": name})
    assert tc.load(store, rename={"w": "~s/w"})[""]["w"].tolist() == [0, 1, 2]


def test_a_tie_that_rules_turn_on_both_ends_is_one_array_still() -> None:
    store, tied = tc.MemoryStore(), torch.arange(6.0).view(2, 3)
    tc.save(store, {"a": tied, "b": tied, "c": tied.clone()})
    found = tc.load(store, transforms=R.Permute("*"))
    assert found["a"] is found["b"] and found["c"] is not found["a"]
    assert torch.equal(found["a"], tied.T)
    found = tc.load(store, transforms=R.Permute("a"))
    assert torch.equal(found["a"], tied.T) and torch.equal(found["b"], tied)


def test_a_view_of_another_array_can_be_split_and_turned() -> None:
    store, base = tc.MemoryStore(), torch.arange(24.0).view(4, 6)
    tc.save(store, {"base": base, "view": base[1:3, ::2]})
    found = tc.load(store, transforms=[R.Split("view", ("top", "low")), R.Permute("top")])
    assert torch.equal(found["top"], base[1:2, ::2].T) and torch.equal(found["low"], base[2:3, ::2])


def test_each_ranks_own_leaves_are_renamed_and_split_as_their_own() -> None:
    store = tc.MemoryStore()
    layout_cases.on_ranks(2, lambda c: tc.save(store, {"own": tc.PerRank({"w": np.arange(4) + 10 * c.rank})}, comm=c))
    rules = [R.Rename("own/~rank*/w", "mine/~rank*/w"), R.Split("mine/~rank*/w", ("mine/~rank*/a", "mine/~rank*/b"))]

    def load(comm: Any) -> Any:
        return tc.load(store, transforms=rules, comm=comm)["mine"].value

    found = layout_cases.on_ranks(2, load)
    assert [{k: v.tolist() for k, v in one.items()} for one in found] == [
        {"a": [0, 1], "b": [2, 3]},
        {"a": [10, 11], "b": [12, 13]},
    ]


def test_casts_of_rules_and_casts_of_targets_follow_each_other() -> None:
    store, w = tc.MemoryStore(), torch.tensor([1 / 3, 2.5, -7])
    tc.save(store, {"w": w, "n": torch.arange(3)})
    like = {"w": torch.empty(3), "n": np.empty(3, np.int64)}
    with pytest.raises(tc.MismatchError, match="bfloat16"):
        tc.load(store, like, transforms=R.Cast("w", "bfloat16"))
    found = tc.load(store, like, transforms=R.Cast("*", "bfloat16", "float32"), cast=True)
    assert torch.equal(found["w"], w.bfloat16().float()) and found["n"].tolist() == [0, 1, 2]


def test_fills_take_shape_and_dtype_of_what_is_wanted() -> None:
    store = tc.MemoryStore()
    tc.save(store, {"w": torch.ones(4, 2)})
    like = {"w": torch.zeros(6, 2), "bias": torch.empty(3, dtype=torch.bfloat16), "n": np.empty(2, np.int8)}
    rules = [R.Fill("bias", 0.5), R.Fill("n", 3), R.Fill("pad", -1.0, (2, 2)), R.Concat(("w", "pad"), "w")]
    found = tc.load(store, like, transforms=rules)
    assert torch.equal(found["w"], torch.cat([torch.ones(4, 2), -torch.ones(2, 2)]))
    assert found["bias"].tolist() == [0.5] * 3 and found["bias"].dtype is torch.bfloat16
    assert found["n"].tolist() == [3, 3] and found["n"].dtype == np.int8
    tc.load_into(store, like, transforms=rules)
    assert like["bias"].tolist() == [0.5] * 3 and torch.equal(like["w"], found["w"])
    with pytest.raises(tc.MismatchError, match="no like to take it from"):
        tc.load(store, transforms=rules)


def test_a_fill_of_another_shape_than_is_wanted_is_refused() -> None:
    store = tc.MemoryStore()
    tc.save(store, {"w": torch.ones(4)})
    like = {"w": torch.zeros(4), "pad": {"a": torch.full((4,), 9.0)}}
    for load in (tc.load, tc.load_into):
        with pytest.raises(tc.MismatchError, match=r"pad/a: expected shape \(4,\), found \(2,\)"):
            load(store, like, transforms=R.Fill("pad/*", -1.0, (2,)))
    assert like["pad"]["a"].tolist() == [9] * 4


def test_what_is_kept_stays_as_it_is_whatever_was_saved() -> None:
    store = tc.MemoryStore()
    tc.save(store, {"w": torch.ones(2), "head": {"w": torch.ones(3)}})
    mine = {"w": torch.zeros(2), "head": {"w": torch.zeros(5), "b": torch.zeros(1)}}
    report = tc.load_into(store, mine, transforms=R.Keep("head"))
    assert mine["w"].tolist() == [1, 1] and mine["head"]["w"].tolist() == [0] * 5
    assert report.dropped == ("head/w",) and not report.missing


@pytest.mark.parametrize("verify", [True, False, "first", "stream"])
def test_trees_are_filled_in_place_under_every_way_to_verify(verify: Any) -> None:
    store, fused = tc.MemoryStore(), torch.arange(48.0).view(12, 4)
    tc.save(store, {"w": fused})
    mine = {"a": torch.zeros(4, 4), "b": torch.zeros(8, 4)}
    tc.load_into(store, mine, transforms=R.Split("w", ("a", "b"), sizes=(1, 2)), read=tc.ReadOptions(verify=verify))
    assert torch.equal(torch.cat([mine["a"], mine["b"]]), fused)


def test_a_leaf_that_does_not_fit_is_refused_with_the_rules_that_led_to_it_and_nothing_is_changed() -> None:
    store = tc.MemoryStore()
    tc.save(store, {"h.0.qkv": torch.ones(6, 2)})
    rules = [R.Rename("h.$L.*", "l.${L+1}.*"), R.Split("l.$L.qkv", ("l.$L.q", "l.$L.k", "l.$L.v"))]
    mine = {"l.1.q": torch.zeros(2, 2), "l.1.k": torch.zeros(2, 2), "l.1.v": torch.zeros(2, 3)}
    with pytest.raises(tc.MismatchError) as caught:
        tc.load_into(store, mine, transforms=rules)
    assert caught.value.path == "l.1.v"
    chain = "h.0.qkv -(1: rename h.$L.* -> l.${L+1}.*)-> l.1.qkv -(2: split l.$L.qkv -> l.$L.q, l.$L.k, l.$L.v)-> l.1.v"
    assert chain in str(caught.value)
    assert mine["l.1.q"].tolist() == [[0, 0], [0, 0]]


def test_memory_that_numpy_cannot_address_is_filled_turned_and_cut_too() -> None:
    store, w = tc.MemoryStore(), torch.arange(24.0).view(4, 6).to(torch.complex64) * 1j
    tc.save(store, {"w": w, "s": w[0, :2]})
    like = {"a": torch.zeros(6, 2, dtype=torch.complex64).conj(), "b": torch.zeros(2, 6, dtype=torch.complex64).conj()}
    like |= {f"s.{i}": torch.zeros((), dtype=torch.complex64).conj() for i in range(2)}
    tc.load_into(store, like, transforms=[R.Split("w", ("a", "b")), R.Permute("a"), R.Unstack("s", "s.$I")])
    assert torch.equal(like["a"], w[:2].T) and torch.equal(like["b"], w[2:])
    assert [like[f"s.{i}"].item() for i in range(2)] == w[0, :2].tolist()


def test_dropping_one_of_two_ties_names_that_one() -> None:
    store, tied = tc.MemoryStore(), torch.ones(2)
    tc.save(store, {"a": tied, "b": tied})
    for name, other in (("a", "b"), ("b", "a")):
        reports: list[tc.LoadReport] = []
        found = tc.load(store, transforms=R.Drop(name), on_report=reports.append)
        assert list(found) == [other] and found[other].tolist() == [1, 1] and reports[0].dropped == (name,)


def test_keyed_tables_are_renamed_whole_and_their_slots_are_cast() -> None:
    store, ids = tc.MemoryStore(), np.array([5, -1, 2**52], np.int64)
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    tc.save(store, {"emb": tc.KeyedTable(ids, {"w": rows}), "x": 1})
    found = tc.load(store, rename={"emb": "tables/user"})["tables"]["user"]
    assert isinstance(found, tc.KeyedTable) and found.slots["w"].shape == (3, 2)
    wanted = {"w": tc.ArraySpec((0, 2), "float64", kind="numpy")}
    like = {"user": tc.KeyedTable(ids[:0], wanted, owned=tc.KeyedTable.share(0, 1)), "x": 0}
    rules = [R.Rename("emb", "user"), R.Cast("user/slots/w", "float64")]
    mine = tc.load(store, like, transforms=rules)["user"]
    by_id = dict(zip(mine.ids.tolist(), mine.slots["w"].tolist(), strict=True))
    assert by_id == dict(zip(ids.tolist(), rows.astype(float).tolist(), strict=True))
    assert mine.slots["w"].dtype == np.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, "torch.bfloat16", "bfloat16"])
def test_a_cast_takes_a_dtype_of_any_library(tmp_path: Path, dtype: Any) -> None:
    tc.save(tmp_path / "one", {"a": torch.ones(3), "n": torch.arange(3)})
    rule = tc.rules.Cast("a", dtype, of=np.float32)
    assert tc.load(tmp_path / "one", transforms=rule)["a"].dtype == torch.bfloat16
    assert tc.rules.decode(tc.rules.encode((rule,))) == (rule,) == (tc.rules.Cast("a", "bfloat16", "float32"),)
    with pytest.raises(tc.MismatchError, match="expected the name of a dtype"):
        tc.rules.Cast("a", float)  # type: ignore[arg-type]


def test_a_target_takes_a_dtype_of_any_library(tmp_path: Path) -> None:
    tc.save(tmp_path / "one", {"a": torch.ones(2)})
    for dtype in (torch.float32, np.float32, np.dtype("f4")):
        found = tc.load(tmp_path / "one", {"a": tc.ArraySpec([2], dtype)})  # type: ignore[arg-type]
        assert torch.equal(found["a"], torch.ones(2))


@pytest.mark.parametrize("rename", [lambda path: path, "ab", ["ab"], 3, {"a": None}, [("a", "b", "c")], {1: "b"}])
def test_what_is_no_renaming_is_refused_by_name(tmp_path: Path, rename: Any) -> None:
    tc.save(tmp_path / "one", {"a": torch.ones(2)})
    with pytest.raises(tc.TreeckptError, match=r'^rename: expected patterns and new names, as \{"h'):
        tc.load(tmp_path / "one", rename=rename)
    with pytest.raises(tc.TreeckptError, match=r"^rename: expected"):
        tc.load_into(tmp_path / "one", {"b": torch.ones(2)}, rename=rename)
