"""The order of an array's dimensions in memory: kept by saves, given back by loads and copies as torch.save does."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from treeckpt._core.format.index import decode_index

BASE = torch.arange(24.0).reshape(2, 3, 4)
CHANNELS_LAST: Any = {"memory_format": torch.channels_last}
DENSE: dict[str, Any] = {
    "in C order": BASE.clone(),
    "by columns": torch.arange(12.0).reshape(3, 4).t(),
    "permuted": BASE.clone().permute(2, 0, 1),
    "channels last": torch.randn(2, 3, 4, 5).to(**CHANNELS_LAST),
    "channels last of one channel": torch.randn(4, 1, 3, 3).to(**CHANNELS_LAST),
    "channels last of one pixel": torch.randn(4, 5, 1, 1).to(**CHANNELS_LAST),
    "channels last in three dimensions": torch.randn(2, 3, 2, 2, 4).to(memory_format=torch.channels_last_3d),
    "a column on its side": torch.arange(4.0).reshape(4, 1).t(),
    "bfloat16": torch.randn(3, 4).bfloat16().t(),
    "float8": torch.randn(3, 4).to(torch.float8_e4m3fn).t(),
    "complex": torch.randn(3, 4, dtype=torch.complex64).t(),
    "a parameter": torch.nn.Parameter(torch.randn(3, 4).t()),
    "Fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "big-endian Fortran": np.asfortranarray(np.arange(12, dtype=">i4").reshape(3, 4)),
    "numpy without dimensions": np.array(3.0),
}


def strides(array: Any) -> tuple[int, ...]:
    return array.stride() if isinstance(array, torch.Tensor) else tuple(n // array.itemsize for n in array.strides)


def as_torch(tree: Any) -> Any:
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    bits = [one.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for one in (a, b)]
    return torch.equal(*bits)


LOADS: dict[str, Any] = {
    "as saved": lambda path, tree: tc.load(path),
    "copies": lambda path, tree: tc.load(path, read=tc.ReadOptions(copy=True)),
    "like arrays": lambda path, tree: tc.load(path, tree),
    "like specs": lambda path, tree: tc.load(path, tc.abstract(tree)),
    "like the saved specs": lambda path, tree: tc.load(path, tc.load_abstract(path)),
    "like arrays on meta": lambda path, tree: tc.load(
        path, {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in tree.items()}
    ),
    "with a rule": lambda path, tree: {
        name.removeprefix("x."): leaf for name, leaf in tc.load(path, rename={"*": "x.*"}).items()
    },
    "copied": lambda path, tree: tc.trees.offload(tc.load(path)),
    "empty": lambda path, tree: tc.trees.empty_like(tree),
}


@pytest.mark.parametrize("how", LOADS)
@pytest.mark.parametrize("background", [False, True])
def test_dense_arrays_come_back_in_the_order_of_torch_save(how: str, background: bool, tmp_path: Path) -> None:
    tree = dict(DENSE)
    if background:
        tc.save_async(tmp_path / "a", tree).result()
    else:
        tc.save(tmp_path / "a", tree)
    found = LOADS[how](tmp_path / "a", tree)
    for name, expected in as_torch(tree).items():
        assert strides(found[name]) == strides(expected), name
        assert how == "empty" or same(found[name], expected), name


def test_what_is_not_dense_is_loaded_in_c_order(tmp_path: Path) -> None:
    tree = {
        "slice": torch.randn(4, 6).t()[1:3],
        "row": torch.randn(3, 1).expand(3, 4),
        "empty": torch.empty(3, 0).t(),
    }
    tc.save(tmp_path / "a", tree)
    for name, found in tc.load(tmp_path / "a").items():
        assert found.is_contiguous()
        assert torch.equal(found, tree[name])


def test_like_decides_the_order(tmp_path: Path) -> None:
    weight = torch.randn(2, 3, 4, 5)
    tc.save(tmp_path / "plain", {"w": weight})
    tc.save(tmp_path / "last", {"w": weight.to(**CHANNELS_LAST)})
    for path in (tmp_path / "plain", tmp_path / "last"):
        last = tc.load(path, {"w": torch.empty_like(weight, **CHANNELS_LAST)})["w"]
        assert torch.equal(last, weight)
        assert last.is_contiguous(**CHANNELS_LAST)
        assert tc.load(path, {"w": torch.empty_like(weight)})["w"].is_contiguous()
        assert tc.load(path, {"w": tc.ArraySpec(weight.shape, weight.dtype)})["w"].is_contiguous()
        spec = tc.ArraySpec(weight.shape, weight.dtype, order=(3, 2, 1, 0))
        assert tc.load(path, {"w": spec})["w"].stride() == (1, 2, 6, 24)
        part = tc.ArraySpec(weight.shape, weight.dtype, (tc.Region((0, 1, 0, 0), (2, 2, 4, 5)),), order=(0, 2, 3, 1))
        found = tc.load(path, {"w": part})["w"]
        assert torch.equal(found, weight[:, 1:])
        assert found.is_contiguous(**CHANNELS_LAST)


def test_an_order_that_is_none_of_the_dimensions_is_refused() -> None:
    for order in ((0,), (0, 0), (0, 2), (1.5, 0), 3):
        with pytest.raises(tc.MismatchError, match="order"):
            tc.ArraySpec((2, 3), "float32", order=order)  # pyright: ignore[reportArgumentType]
    assert tc.ArraySpec((2, 3), "float32", order=(0, 1)) == tc.ArraySpec((2, 3), "float32")


def test_an_index_with_another_order_is_refused(tmp_path: Path) -> None:
    tc.save(tmp_path / "a", {"w": torch.randn(3, 4).t()})
    data = (tmp_path / "a" / "index.json").read_bytes()
    assert b'"order":[1,0]' in data
    from treeckpt._core.format.shard_header import sealed

    plain = data.replace(data[data.index(b'"seal":"') + 8 :][:16], b"0" * 16, 1)
    for bad in (b"[1,1]", b"[1]", b"[0,7]"):
        with pytest.raises(tc.FormatError):
            decode_index(sealed(plain.replace(b"[1,0]", bad)))


def test_bytes_in_files_stay_in_c_order(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    weight = torch.randn(3, 4).t()
    tc.save(tmp_path / "a", {"w": weight})
    [shard] = (tmp_path / "a").glob("*.safetensors")
    assert np.array_equal(load_file(shard)["w"], weight.numpy())


def test_mapped_arrays_are_in_c_order(tmp_path: Path) -> None:
    tree = {**DENSE, "tie": torch.nn.Parameter(DENSE["by columns"])}
    tc.save(tmp_path / "a", tree)
    found = tc.load(tmp_path / "a", read=tc.ReadOptions(mmap=True))
    for name, leaf in found.items():
        assert same(leaf, tree[name]), name
    assert found["by columns"].is_contiguous()
    assert found["tie"].data_ptr() == found["by columns"].data_ptr()


def test_ties_and_views_of_permuted_arrays_share_memory_again(tmp_path: Path) -> None:
    base, columns, order = torch.randn(4, 6), torch.randn(3, 5).t(), np.asfortranarray(np.arange(6.0).reshape(2, 3))
    tree = {
        "base": base, "view": base.t(), "part": base[1:].t(),
        "columns": columns, "again": columns, "alias": torch.nn.Parameter(columns), "array": order, "same": order[:],
    }  # fmt: skip
    tc.save(tmp_path / "a", tree)
    found = tc.load(tmp_path / "a")
    for name, leaf in tree.items():
        assert same(found[name], leaf) and strides(found[name]) == strides(leaf), name
    assert found["view"].data_ptr() == found["base"].data_ptr()
    assert found["again"] is found["columns"]
    assert found["alias"].data_ptr() == found["columns"].data_ptr()
    assert np.shares_memory(found["array"], found["same"])
    alone = tc.load(tmp_path / "a", select=("view", "alias"))
    assert alone["view"].stride() == base.t().stride()
    assert alone["alias"].stride() == columns.stride()


@pytest.mark.parametrize("cast", [False, True])
def test_pieces_and_casts_keep_the_order(cast: bool, tmp_path: Path) -> None:
    columns = torch.randn(3, 4).t()
    piece = tc.Sharded([columns[:2].t().clone().t(), columns[2:].t().clone().t()], (4, 3), [(0, 0), (2, 0)])
    tc.save(tmp_path / "a", {"piece": piece, "flat": tc.Sharded(torch.randn(12), (4, 3), 0)})
    found = tc.load(tmp_path / "a")
    assert torch.equal(found["piece"], columns) and found["piece"].stride() == (1, 4)
    assert found["flat"].is_contiguous()
    like = {"piece": tc.ArraySpec((4, 3), "float64" if cast else "float32", order=(1, 0)), "flat": ...}
    assert tc.load(tmp_path / "a", like, cast=cast)["piece"].stride() == (1, 4)
    assert [part.stride() for part in tc.load(tmp_path / "a", {"piece": piece, "flat": ...})["piece"].locals] == [
        (1, 2)
    ] * 2


def test_files_of_torch_save_are_read_and_written_in_their_order(tmp_path: Path) -> None:
    from treeckpt.convert import convert

    tree = {name: leaf for name, leaf in DENSE.items() if isinstance(leaf, torch.Tensor)}
    tree |= {"tie": tree["by columns"], "view": tree["in C order"][1]}
    torch.save(tree, tmp_path / "a.pt")
    expected = torch.load(tmp_path / "a.pt", weights_only=True)
    convert(tmp_path / "a.pt", tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b.pt")
    written = torch.load(tmp_path / "b.pt", weights_only=True)
    for found in (tc.load(tmp_path / "a.pt"), tc.load(tmp_path / "a"), written):
        for name, leaf in expected.items():
            assert same(found[name], leaf) and found[name].stride() == leaf.stride(), name
    assert written["tie"].data_ptr() == written["by columns"].data_ptr()


def test_show_prints_the_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from treeckpt._cli.main import main

    tc.save(tmp_path / "a", {"w": torch.randn(2, 3, 4, 5).to(**CHANNELS_LAST)})
    main(["show", str(tmp_path / "a"), "w"])
    assert "dimensions 0, 2, 3, 1, from the outermost to the innermost" in capsys.readouterr().out
