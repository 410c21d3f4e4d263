"""numpy arrays as leaves: dtypes, byte orders, strings and times, views, ties, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc


def filled(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """An array of random bytes."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 256, count, np.uint8)
    return data.view(dtype).reshape(shape) if count else np.empty(shape, dtype)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal to the last bit, in native byte order."""
    native = b.astype(b.dtype.newbyteorder("="))
    return type(a) is np.ndarray and a.dtype == native.dtype and a.shape == b.shape and a.tobytes() == native.tobytes()


def saved(tree: Any) -> tc.MemoryStore:
    store = tc.MemoryStore()
    tc.save(store, tree)
    assert tc.verify(store).ok
    return store


def refused(leaf: object) -> str:
    store = tc.MemoryStore()
    with pytest.raises(tc.TreeError) as caught:
        tc.save(store, {"layer": [leaf]})
    assert caught.value.path == "layer/0"
    assert caught.value.hint
    assert not store.files
    return str(caught.value)


NUMBERS = ["?", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8", "c8", "c16"]
OTHERS = ["S1", "S13", "V1", "V24", "M8[ns]", "m8[us]", "M8[D]", "m8[25s]", "m8", "M8"]


@pytest.mark.parametrize("dtype", [*NUMBERS, *OTHERS])
def test_every_dtype_comes_back_bit_for_bit(dtype: str) -> None:
    tree = {"matrix": filled((5, 7), dtype), "scalar": filled((), dtype, 1), "empty": filled((0, 3), dtype)}
    store = saved(tree)
    loaded = tc.load(store)
    again = tc.load(store, {key: np.empty_like(value) for key, value in tree.items()}, read=tc.ReadOptions(copy=True))
    into = {key: np.empty_like(value) for key, value in tree.items()}
    tc.load_into(store, into)
    for key, value in tree.items():
        assert same(loaded[key], value)
        assert same(again[key], value)
        assert same(into[key], value)


@pytest.mark.parametrize("dtype", [">i2", ">u4", ">i8", ">f2", ">f4", ">f8", ">c8", ">c16", ">M8[s]", ">m8[ms]"])
@pytest.mark.parametrize("shape", [(4, 6), (), (0, 2), (1,)])
def test_big_endian_arrays_come_back_in_native_order(dtype: str, shape: tuple[int, ...]) -> None:
    array = filled(shape, dtype)
    assert same(tc.load(saved({"x": array}))["x"], array)
    assert same(tc.load(saved({"x": array.T[..., None][::-1]}))["x"], array.T[..., None][::-1])


def test_strings_come_back() -> None:
    tree = {
        "text": np.array(["a", "größer", "", "日本語"]),
        "big": np.array(["ab", "é"], dtype=">U5"),
        "bytes": np.array([b"a", b"bc\0d", b""]),
        "one": np.array("x"),
        "none": np.empty((0,), "U3"),
        "grid": np.array([["a", "bb"], ["ccc", "d"]]).T,
    }
    loaded = tc.load(saved(tree))
    for key, value in tree.items():
        assert same(loaded[key], value), key
        assert (loaded[key] == value).all(), key


def test_times_keep_their_unit_and_nat() -> None:
    tree = {
        "days": np.array(["2026-01-01", "NaT", "1969-12-31"], dtype="M8[D]"),
        "spans": np.array([1, -5, np.timedelta64("NaT")], dtype="m8[h]"),
        "multiples": np.arange(4).astype("m8[15m]"),
    }
    loaded = tc.load(saved(tree))
    for key, value in tree.items():
        assert loaded[key].dtype == value.dtype
        assert same(loaded[key], value)


def test_memmap_is_saved_as_an_array(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "data", np.float32, "w+", shape=(6, 5))
    mapped[:] = filled((6, 5), "f4")
    loaded = tc.load(saved({"x": mapped, "part": mapped[2:4, ::2]}))
    assert same(loaded["x"], np.asarray(mapped))
    assert (loaded["part"].tobytes()) == mapped[2:4, ::2].tobytes()
    target = np.memmap(tmp_path / "other", np.float32, "w+", shape=(6, 5))
    tc.load_into(saved({"x": mapped}), {"x": target})
    assert target.tobytes() == mapped.tobytes()


BASE = filled((6, 8), "f8")
VIEWS = {
    "transposed": BASE.T,
    "strided": BASE[::2, 1::3],
    "reversed": BASE[::-1, ::-2],
    "row": BASE[3],
    "cell": BASE[2, 3, ...],
    "broadcast": np.broadcast_to(BASE[0], (3, 8)),
    "fortran": np.asfortranarray(BASE),
    "empty": BASE[2:2],
    "window": np.lib.stride_tricks.sliding_window_view(BASE[0], 3),
    "halves": BASE.view("f4")[:, 1::2],
    "field": np.zeros(5, [("a", "i4"), ("b", "f8")])["b"],
    "new axis": BASE[:, None, :],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_saved_as_they_look(name: str) -> None:
    assert same(tc.load(saved({"x": VIEWS[name]}))["x"], VIEWS[name])


@pytest.mark.parametrize("name", [n for n in VIEWS if n not in ("broadcast", "window")])
def test_views_are_filled_in_place(name: str) -> None:
    view = VIEWS[name].copy(order="K") if name != "field" else np.zeros(5, [("a", "i4"), ("b", "f8")])["b"]
    if name in ("strided", "reversed"):
        view = np.zeros((6, 8))[::2, 1::3] if name == "strided" else np.zeros((6, 8))[::-1, ::-2]
    value = filled(view.shape, view.dtype, 5)
    tc.load_into(saved({"x": value}), {"x": view})
    assert same(view, value)


@pytest.mark.parametrize("name", ["broadcast", "window"])
def test_read_only_and_overlapping_targets_are_refused(name: str) -> None:
    store = saved({"x": VIEWS[name]})
    with pytest.raises(tc.MismatchError, match="read-only"):
        tc.load_into(store, {"x": VIEWS[name]})
    base = np.zeros(64)
    overlapping = np.lib.stride_tricks.as_strided(base, VIEWS[name].shape, (8, 8), writeable=True)
    with pytest.raises(tc.MismatchError, match="memory for each element"):
        tc.load_into(store, {"x": overlapping})
    assert not base.any()


def test_views_of_one_base_share_memory_again() -> None:
    tree = {"row": BASE[3], "base": BASE, "t": BASE.T, "again": BASE, "some": BASE[::2, ::3]}
    store = saved(tree)
    assert sum(file.nbytes for file in tc.inspect(store).file_list) == BASE.nbytes
    loaded = tc.load(store)
    for key, value in tree.items():
        assert same(loaded[key], value), key
        assert np.shares_memory(loaded[key], loaded["base"]), key
    assert loaded["again"] is loaded["base"]


def test_an_array_and_a_tensor_on_one_memory_stay_what_they_are() -> None:
    torch = pytest.importorskip("torch")
    array = filled((4, 4), "f4")
    tree = {"numpy": array, "torch": torch.from_numpy(array)}
    loaded = tc.load(saved(tree))
    assert same(loaded["numpy"], array)
    assert isinstance(loaded["torch"], torch.Tensor)
    assert loaded["torch"].numpy().tobytes() == array.tobytes()


def test_scalars_are_values() -> None:
    tree = [np.float32(0.1), np.int64(-5), np.bool_(True), np.complex64(1 + 2j), np.datetime64("2026"), np.str_("a")]
    loaded = tc.load(saved(tree))
    assert [type(x) for x in loaded] == [type(x) for x in tree]
    assert loaded == tree


def test_arrays_and_tensors_load_as_each_other() -> None:
    torch = pytest.importorskip("torch")
    store = saved({"n": filled((3,), "i4"), "t": torch.arange(4.0), "b": torch.arange(4.0).bfloat16()})
    like = {"n": torch.empty(3, dtype=torch.int32), "t": np.empty(4, np.float32), "b": ...}
    loaded = tc.load(store, like)
    assert loaded["n"].numpy().tobytes() == filled((3,), "i4").tobytes()
    assert loaded["t"].tolist() == [0, 1, 2, 3]
    with pytest.raises(tc.MismatchError, match="b: expected float32, found bfloat16"):
        tc.load(store, {**like, "b": np.empty(4, np.float32)})


def test_cast_converts_as_numpy_does() -> None:
    store = saved({"x": np.array([1.7, -2.5, 300.0])})
    assert tc.load(store, {"x": np.empty(3, np.float32)}, cast=True)["x"].tolist() == [np.float32(1.7), -2.5, 300]
    assert tc.load(store, {"x": np.empty(3, np.int64)}, cast=True)["x"].tolist() == [1, -2, 300]


def test_a_spec_with_regions_loads_these_only() -> None:
    store = saved({"x": BASE})

    def load(*regions: tc.Region) -> np.ndarray:
        return tc.load(store, {"x": tc.ArraySpec((6, 8), "float64", regions, kind="numpy")})["x"]

    assert same(load(tc.Region((1, 2), (2, 3))), BASE[1:3, 2:5].copy())
    assert same(load(tc.Region((1, 0), (1, 8)), tc.Region((4, 0), (1, 8))), BASE[[1, 4]])
    assert same(load(tc.Region((0, 6), (1, 2)), tc.Region((1, 0), (2, 8))), BASE.reshape(-1)[6:24].copy())


def test_sharded_takes_arrays() -> None:
    store = tc.MemoryStore()
    tc.save(store, {"x": tc.Sharded(BASE, [6, 8], [0, 0]), "y": tc.Sharded(BASE.reshape(-1), (6, 8), 0)})
    loaded = tc.load(store)
    assert same(loaded["x"], BASE)
    assert same(loaded["y"], BASE)
    piece = tc.Sharded(np.zeros(10), (6, 8), np.int64(5))
    tc.load_into(store, {"x": piece}, strict=False)
    assert piece.local.tobytes() == BASE.reshape(-1)[5:15].tobytes()


# refusals -------------------------------------------------------------------------------------------------------------
def test_dtypes_without_portable_bytes_are_refused() -> None:
    assert "object" in refused(np.array([{}, None], dtype=object))
    assert "one array per field" in refused(np.zeros(3, [("a", "i4"), ("b", "f8")]))
    assert "float128" in refused(np.zeros(3, np.longdouble)) or np.longdouble(0).itemsize == 8
    assert refused(np.zeros(3, [("a", "i4")]).view(np.recarray))
    assert "StringDType" in refused(np.array(["a", "bc"], dtype=np.dtypes.StringDType()))


def test_subclasses_are_refused_by_name() -> None:
    assert "MaskedArray" in refused(np.ma.masked_array([1, 2], [True, False]))

    class Tagged(np.ndarray):
        pass

    assert "Tagged" in refused(BASE.view(Tagged))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3)])
def test_arrays_of_any_shape_are_cast(shape: tuple[int, ...]) -> None:
    store = tc.MemoryStore()
    saved = np.full(shape, 1.5, np.float32)
    tc.save(store, {"a": saved})
    target = np.zeros(shape, np.float64)
    tc.load_into(store, {"a": target}, cast=True)
    made = tc.load(store, {"a": np.zeros(shape, np.float16)}, cast=True)["a"]
    assert target.shape == made.shape == shape and made.dtype == np.float16
    assert np.array_equal(target, saved) and np.array_equal(made, saved)
