"""numpy arrays of ml_dtypes as leaves: every type, as arrays and scalars, on every way out and back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.thread_transport import ThreadTransport
from tests.helpers.world import errors_of, on_ranks
from treeckpt import rules as R
from treeckpt._core.sharding.dtypes import dtype_of, numpy_dtype
from treeckpt._inspect.numbers import element_texts
from treeckpt._io.storage.checkpoint import Checkpoint
from treeckpt._loading.compare import value_changes
from treeckpt.trees import _collectives

TYPES = [
    kind
    for name in dir(ml_dtypes)
    if isinstance(kind := getattr(ml_dtypes, name), type) and issubclass(kind, np.generic)
]
NAMES = [np.dtype(kind).name for kind in TYPES]
REAL = [kind for kind in TYPES if np.dtype(kind).kind != "W"]
SHARED = [name for name in NAMES if isinstance(getattr(torch, name, None), torch.dtype)]
"""What torch has too."""


def values(kind: Any, shape: tuple[int, ...] = (3, 4)) -> np.ndarray:
    """Elements of every kind that the type has: all the bit patterns of a small one, in turn."""
    dtype = np.dtype(kind)
    data = np.random.default_rng(7).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if "int" in dtype.name:  # what it holds, not what may stand in the bits above
        data = (np.arange(data.size) % (1 << int(dtype.name[-1]))).astype(np.uint8).reshape(data.shape)
    return np.ascontiguousarray(data).view(dtype)[..., 0]


def same(a: Any, b: np.ndarray) -> bool:
    return type(a) is np.ndarray and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def saved(tree: Any) -> tc.MemoryStore:
    store = tc.MemoryStore()
    tc.save(store, tree)
    assert tc.verify(store).ok
    return store


def test_every_type_is_tested() -> None:
    assert {"bfloat16", "float8_e4m3", "int4", "uint2", "float4_e2m1fn", "float6_e3m2fn"} <= set(NAMES)


@pytest.mark.parametrize("kind", TYPES, ids=NAMES)
@pytest.mark.parametrize("copy", [False, True])
def test_arrays_come_back_bit_for_bit(kind: Any, copy: bool) -> None:
    array = values(kind)
    tree = {
        "a": array, "b": np.ones(100), "turned": array.T, "every second": array[:, ::2], "scalar": values(kind, ()),
        "empty": values(kind, (0, 3)),
    }  # fmt: skip
    store = saved(tree)
    again = tc.load(store, {key: np.empty_like(value) for key, value in tree.items()}, read=tc.ReadOptions(copy=copy))
    abstract = tc.load(store, tc.abstract(tree), read=tc.ReadOptions(copy=copy))
    into = {key: np.empty_like(value) for key, value in tree.items()}
    tc.load_into(store, into)
    for loaded in (tc.load(store, read=tc.ReadOptions(copy=copy)), again, abstract, into):
        assert all(same(loaded[key], np.ascontiguousarray(value).reshape(value.shape)) for key, value in tree.items())
    spec = tc.ArraySpec((3, 4), kind, kind="numpy")
    assert spec == tc.ArraySpec((3, 4), np.dtype(kind), kind="numpy") and spec.dtype == np.dtype(kind).name
    assert same(tc.load(store, {"a": spec}, select="a", strict=False)["a"], array)


@pytest.mark.parametrize("kind", TYPES, ids=NAMES)
def test_arrays_are_mapped(tmp_path: Path, kind: Any) -> None:
    tc.save(tmp_path / "x", {"a": values(kind), "own": tc.PerRank(values(kind))})
    found = tc.load(tmp_path / "x", read=tc.ReadOptions(mmap=True))
    assert same(found["a"], values(kind)) and same(found["own"].value, values(kind))


@pytest.mark.parametrize("kind", TYPES, ids=NAMES)
def test_scalars_and_dtypes_are_values(kind: Any) -> None:
    scalar, dtype = values(kind)[1, 2], np.dtype(kind)
    found = tc.load(saved({"scalar": scalar, "dtype": dtype, "many": (kind(1), dtype)}))
    assert type(found["scalar"]) is kind and found["scalar"].tobytes() == scalar.tobytes()
    assert found["dtype"] == dtype and found["many"] == (kind(1), dtype)


@pytest.mark.parametrize("name", SHARED)
def test_a_tensor_loads_as_an_array_and_an_array_as_a_tensor(name: str) -> None:
    bits = values(getattr(ml_dtypes, name))
    raw = f"i{bits.itemsize}"
    tensor = torch.from_numpy(bits.view(raw).copy()).view(getattr(torch, name))
    other = torch.from_numpy(np.zeros((3, 4), raw)).view(getattr(torch, name))
    assert same(tc.load(saved({"x": tensor}), {"x": np.empty_like(bits)})["x"], bits)
    found = tc.load(saved({"x": bits}), {"x": other})["x"]
    assert found.dtype == tensor.dtype and torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    tc.load_into(saved({"x": bits}), {"x": other})
    assert torch.equal(other.view(torch.uint8), tensor.view(torch.uint8))
    spec = tc.ArraySpec((3, 4), name)
    assert torch.equal(tc.load(saved({"x": bits}), {"x": spec})["x"].view(torch.uint8), tensor.view(torch.uint8))
    array = np.empty_like(bits)
    tc.load_into(saved({"x": tensor}), {"x": array})
    assert same(array, bits)


@pytest.mark.parametrize("kind", TYPES, ids=NAMES)
@pytest.mark.parametrize("other", ["float32", "float64", "bfloat16", "float8_e8m0fnu", "int4", "int32"])
@pytest.mark.parametrize("into", ["numpy", "tensor"])
@pytest.mark.filterwarnings("ignore:Casting complex values", "ignore:ComplexHalf support")
def test_casts_from_and_to(kind: Any, other: str, into: str) -> None:
    """What is cast keeps its value, whichever library has the type."""
    dtype = numpy_dtype(other)
    ones = np.ones(5, kind)
    if np.dtype(kind).name in (other, "int1"):  # int1 holds no one
        return
    found = tc.load(saved({"x": ones}), {"x": tc.ArraySpec((5,), other, kind=into)}, cast=True)["x"]
    found = found if into == "numpy" else found.view(torch.uint8).numpy().view(dtype)
    assert found.tolist() == np.ones(5, kind).astype(np.complex128).real.astype(dtype).tolist()
    target = np.zeros(5, kind)
    tc.load_into(saved({"x": np.ones(5, dtype)}), {"x": target}, cast=True)
    assert target.tolist() == ones.tolist()


def test_a_cast_rounds_as_ml_dtypes_does() -> None:
    exact = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    for kind in REAL:
        if np.dtype(kind).name in ("float8_e8m0fnu",) or "int" in np.dtype(kind).name:
            continue
        found = tc.load(saved({"x": exact}), {"x": tc.ArraySpec((1000,), kind, kind="numpy")}, cast=True)["x"]
        assert same(found, exact.astype(kind))


def test_a_cast_that_nobody_can_make_is_refused_before_a_byte_is_written() -> None:
    tree = {"a": np.zeros(3), "x": np.zeros(3, ml_dtypes.bfloat16)}
    store = saved({"a": np.ones(3), "x": np.zeros(3, "V3")})
    with pytest.raises(tc.MismatchError, match=r"x: .*bfloat16"):
        tc.load_into(store, tree, cast=True)
    assert tree["a"].tolist() == [0, 0, 0]
    with pytest.raises(tc.MismatchError, match=r"x: .*float4_e2m1fn_x2"):
        tc.load(saved({"x": np.ones(3)}), {"x": tc.ArraySpec((3,), "float4_e2m1fn_x2")}, cast=True)


def test_pieces_of_several_ranks_come_back_in_other_cuts(tmp_path: Path) -> None:
    whole = values(ml_dtypes.float8_e4m3, (8, 6))

    def save(comm: Any) -> None:
        rows = tc.Sharded(whole[comm.rank * 4 : comm.rank * 4 + 4], whole.shape, (comm.rank * 4, 0))
        tc.save(tmp_path / "x", {"x": rows, "own": tc.PerRank(whole[comm.rank])}, comm=comm)

    assert errors_of(on_ranks(2, save)) == [None, None]
    assert same(tc.load(tmp_path / "x", select="x")["x"], whole)
    part = tc.Sharded(np.empty((8, 2), whole.dtype), whole.shape, (0, 3))
    assert same(tc.load(tmp_path / "x", {"x": part}, select="x")["x"].local, np.ascontiguousarray(whole[:, 3:5]))


def test_background_saves_carry_them(tmp_path: Path) -> None:
    tree = {name: values(kind) for name, kind in zip(NAMES, TYPES, strict=True)}
    tc.save_async(tmp_path / "x", tree).result()
    found = tc.load(tmp_path / "x")
    assert all(same(found[name], tree[name]) for name in NAMES)


def test_ties_and_views_stay_one_memory() -> None:
    base = values(ml_dtypes.bfloat16, (4, 4))
    found = tc.load(saved({"a": base, "same": base, "row": base[1]}))
    assert found["same"] is found["a"] and same(found["row"], base[1])
    assert np.shares_memory(found["row"].view("u2"), found["a"].view("u2"))
    bits = np.arange(4, dtype=np.uint8)
    both = {"raw": bits, "int4": bits.view(ml_dtypes.int4), "fp8": bits.view(ml_dtypes.float8_e4m3)}
    found = tc.load(saved(both))
    assert all(same(found[name], array) for name, array in both.items())


@pytest.mark.parametrize("share", [False, True])
def test_operations_on_trees_keep_the_type(*, share: bool) -> None:
    bits = np.arange(4, dtype=np.uint8)
    tree = {name: values(kind) for name, kind in zip(NAMES, TYPES, strict=True)}
    tree |= {"one": bits.view(ml_dtypes.int4), "other": bits.view(ml_dtypes.uint4)}
    found: Any = tc.trees.offload(tree, share=share)
    assert all(same(found[name], array) for name, array in tree.items())
    assert tc.trees.same_structure(found, tree)
    into: Any = tc.trees.empty_like(tree)
    tc.trees.copy_into(tree, into)
    assert all(same(into[name], array) for name, array in tree.items())


@pytest.mark.parametrize("kind", TYPES, ids=NAMES)
def test_arrays_are_gathered_and_scattered(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_collectives, "transport_of", lambda group: group)
    whole = values(kind, (4, 3))

    def act(comm: Any) -> None:
        rows = slice(comm.rank * 2, comm.rank * 2 + 2)
        tree, transport = {"x": tc.Sharded(whole[rows], whole.shape, (comm.rank * 2, 0))}, ThreadTransport(comm)
        found: Any = _collectives.gather(tree, group=transport, bucket_bytes=64)
        assert same(found["x"], whole)
        like = {"x": tc.Sharded(np.empty((2, 3), kind), whole.shape, (comm.rank * 2, 0))}
        dealt: Any = _collectives.distribute(
            {"x": whole} if not comm.rank else None,
            like,
            group=transport,
            src=0,
            bucket_bytes=64,
        )
        assert same(dealt["x"].local, whole[rows].copy())

    assert errors_of(on_ranks(2, act)) == [None, None]


def test_byte_swapped_arrays_come_back_in_native_order() -> None:
    for kind in TYPES:
        array = values(kind)
        swapped = array.astype(array.dtype.newbyteorder(">"))
        assert same(tc.load(saved({"x": swapped}))["x"], array)


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype("i4,f4"), np.dtype([("a", ml_dtypes.bfloat16)]), np.dtype([]), np.dtype(np.longdouble),
        np.dtype(np.clongdouble), np.dtypes.StringDType(), np.dtype("O"),
        np.dtype((np.int32, {"re": (np.int16, 0), "im": (np.int16, 2)})),
        np.dtype({"names": [], "formats": [], "itemsize": 8}), np.dtype((np.record, [("a", "i4")])),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_stored_exactly_is_refused_by_name(dtype: Any) -> None:
    store = tc.MemoryStore()
    array = np.zeros(2, dtype)
    with pytest.raises(tc.TreeError, match=r"layer/x: .*") as caught:
        tc.save(store, {"layer": {"x": array}})
    assert str(dtype) in str(caught.value) and not store.files
    with pytest.raises(tc.TreeError, match=r"layer/x: .*"):
        tc.save(store, {"layer": {"x": dtype}})


@pytest.mark.parametrize("text", ["S3", "U3", "V3"])
def test_what_has_shape_and_dtype_is_a_target_of_any_dtype(text: str) -> None:
    class Wanted:
        shape, dtype = (2,), np.dtype(text)

    array = np.array([b"abc", b"xyz"]).astype(text)
    assert same(tc.load(saved({"x": array}), {"x": Wanted()})["x"], array)


@pytest.mark.parametrize("kind", TYPES, ids=NAMES)
def test_elements_are_shown_and_compared(kind: Any) -> None:
    low = 2 if kind is ml_dtypes.float8_e8m0fnu else 0  # which holds no zero
    before, after = np.array([1, low, 1, 1]).astype(kind), np.array([1, low, low, 1]).astype(kind)
    texts = element_texts(before.view(np.uint8).reshape(4, -1), before.dtype.name)
    assert [complex(text) for text in texts] == before.astype(np.complex128).tolist()
    one, other = (Checkpoint(saved({"x": array})) for array in (before, after))
    [change] = value_changes(one, other)
    assert change.delta is not None
    gap = float(np.abs(before.astype(np.complex128) - after.astype(np.complex128)).max())
    assert (change.delta.compared, change.delta.changed, change.delta.max_abs) == (4, 1, gap)


def test_two_numbers_of_an_element_are_compared_one_by_one() -> None:
    one, other = torch.tensor([0x21, 0x43], dtype=torch.uint8), torch.tensor([0x21, 0x73], dtype=torch.uint8)
    sides = [Checkpoint(saved({"x": tensor.view(torch.float4_e2m1fn_x2)})) for tensor in (one, other)]
    [change] = value_changes(*sides)
    assert change.delta is not None
    assert (change.delta.elements, change.delta.changed, change.delta.max_abs) == (2, 1, 4.0)
    assert change.delta.mean_abs == 1.0


def test_a_table_has_slots_of_them_and_fills_them() -> None:
    ids, rows = np.array([5, 3]), values(ml_dtypes.float8_e5m2, (2, 4))
    store = saved({"emb": tc.KeyedTable(ids, {"rows": rows})})
    like = {"rows": tc.ArraySpec((0, 4), rows.dtype, kind="numpy"), "new": np.empty((0, 2), ml_dtypes.bfloat16)}
    table = tc.load(store, {"emb": tc.KeyedTable(ids[:0], like, fill={"new": 1.5})}, strict=False)["emb"]
    assert table.ids.tolist() == [3, 5] and same(table.slots["rows"], rows[::-1].copy())
    assert same(table.slots["new"], np.full((2, 2), 1.5, ml_dtypes.bfloat16))


def test_rules_cast_to_them_and_turn_them() -> None:
    store = saved({"x": np.ones((2, 3)), "fp8": values(ml_dtypes.float8_e4m3, (2, 3))})
    rules = [R.Cast("x", ml_dtypes.float4_e2m1fn), R.Permute("fp8", (1, 0))]
    found = tc.load(store, transforms=rules)
    assert same(found["x"], np.ones((2, 3), ml_dtypes.float4_e2m1fn))
    assert same(found["fp8"], values(ml_dtypes.float8_e4m3, (2, 3)).T.copy())
    with pytest.raises(tc.MismatchError, match=r"x: .*float4_e2m1fn_x2"):
        tc.load(store, transforms=R.Cast("x", "float4_e2m1fn_x2"), strict=False)


def test_pickled_arrays_are_converted(tmp_path: Path) -> None:
    tree = {name: values(kind) for name, kind in zip(NAMES, TYPES, strict=True)}
    tree |= {"scalar": ml_dtypes.bfloat16(2.5), "dtype": np.dtype(ml_dtypes.int4)}
    torch.save(tree, tmp_path / "x.pt")
    tc.convert.convert(tmp_path / "x.pt", tmp_path / "x")
    found = tc.load(tmp_path / "x")
    assert all(same(found[name], tree[name]) for name in NAMES)
    assert (found["scalar"], found["dtype"]) == (tree["scalar"], tree["dtype"])
    assert type(found["scalar"]) is ml_dtypes.bfloat16


def test_arrays_are_converted_to_what_others_have(tmp_path: Path) -> None:
    tree = {"bf": values(ml_dtypes.bfloat16), "fp8": np.ones(3, ml_dtypes.float8_e4m3)}
    tc.save(tmp_path / "x", tree)
    with pytest.raises(tc.TreeError, match=r"fp8: .*float8_e4m3"):
        tc.convert.to_safetensors(tmp_path / "x", tmp_path / "x.safetensors")
    tc.convert.to_torch_file(tmp_path / "x", tmp_path / "x.pt", dtype="float32")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["fp8"].tolist() == [1, 1, 1] and found["bf"].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_a_conjugate_view_of_half_complex_numbers_is_converted(tmp_path: Path) -> None:
    halves = torch.complex(torch.ones(2).half(), torch.full((2,), 2.0).half())
    torch.save({"x": halves.conj()}, tmp_path / "x.pt")
    tc.convert.convert(tmp_path / "x.pt", tmp_path / "x")
    assert tc.load(tmp_path / "x")["x"].to(torch.complex64).tolist() == [1 - 2j, 1 - 2j]


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
import numpy as np
import treeckpt as tc
"""


def run_without(*blocked: str, code: str) -> str:
    """What a program prints that cannot import some packages."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(blocked=blocked) + code], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_without_ml_dtypes_an_error_names_the_dtype_and_the_package(tmp_path: Path) -> None:
    tc.save(tmp_path / "x", {"layer": {"w": values(ml_dtypes.float8_e4m3)}, "plain": np.ones(3)})
    tc.save(tmp_path / "v", {"n": ml_dtypes.bfloat16(1.5)})
    tc.save(tmp_path / "t", {"w": torch.ones(3, dtype=torch.bfloat16)})
    code = f"""
for path, like in (("x", None), ("x", {{"layer": {{"w": tc.ArraySpec((3, 4), "float8_e4m3", kind="numpy")}}}}),
                   ("v", None)):
    try:
        tc.load({str(tmp_path)!r} + "/" + path, like, strict=False)
    except tc.TreeckptError as error:
        print(error)
print(tc.load({str(tmp_path / "x")!r}, select="plain")["plain"], tc.verify({str(tmp_path / "x")!r}).ok)
print(tc.load({str(tmp_path / "t")!r})["w"].dtype)
print(tc.load({str(tmp_path / "t")!r}, {{"w": tc.ArraySpec((3,), "float32")}}, cast=True)["w"].tolist())
"""
    lines = run_without("ml_dtypes", code=code).splitlines()
    assert all("ml_dtypes" in line and "float8_e4m3" in line and "layer/w" in line for line in lines[:2]), lines
    assert "ml_dtypes" in lines[2] and "bfloat16" in lines[2]
    assert lines[3:] == ["[1. 1. 1.] True", "torch.bfloat16", "[1.0, 1.0, 1.0]"]


def test_without_torch_tensors_load_into_arrays_of_ml_dtypes(tmp_path: Path) -> None:
    tc.save(tmp_path / "t", {"w": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)})
    code = f"""
import ml_dtypes
where = {str(tmp_path / "t")!r}
print(tc.load(where, {{"w": np.zeros(2, ml_dtypes.bfloat16)}})["w"].tolist())
print(tc.load(where, {{"w": tc.ArraySpec((2,), "float32", kind="numpy")}}, cast=True)["w"].tolist())
try:
    tc.load(where)
except tc.MismatchError as error:
    print(error)
"""
    lines = run_without("torch", code=code).splitlines()
    assert lines[:2] == ["[1.5, -2.0]", "[1.5, -2.0]"] and "no torch in this environment" in lines[2]


def test_importing_treeckpt_imports_no_ml_dtypes() -> None:
    assert run_without(code="print('ml_dtypes' in sys.modules)").strip() == "False"


def test_the_names_are_those_of_the_table() -> None:
    for kind in TYPES:
        dtype = dtype_of(np.dtype(kind).name)
        assert dtype.itemsize == np.dtype(kind).itemsize and numpy_dtype(dtype.name) == np.dtype(kind)
