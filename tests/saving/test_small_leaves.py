"""Small arrays take short ways through a save and a load; each is held against the way that every other array takes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Buffer, Parameter

import treeckpt as tc
from tests.helpers.world import on_ranks
from treeckpt._arrays import describe
from treeckpt._arrays import torch as torch_leaves
from treeckpt._arrays.base import ArraySource, HostArray, HostMemory
from treeckpt._loading import plan, read_batch

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.int16)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of few elements: whole ones, windows, transposes, scalars, empty ones, parameters, buffers."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    base = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))).to(dtype)
    if base.ndim and draw(st.booleans()):
        base = base[draw(st.integers(0, base.shape[0])) :]
    if base.ndim > 1 and draw(st.booleans()):
        base = base.transpose(0, 1)
    floats = dtype in (torch.float32, torch.bfloat16)
    kind = draw(st.sampled_from(("tensor", "parameter", "buffer", "grad") if floats else ("tensor", "buffer")))
    if kind == "grad":
        return base.clone().requires_grad_()
    return Parameter(base) if kind == "parameter" else Buffer(base) if kind == "buffer" else base


def seen(source: ArraySource) -> Any:
    """All that a save learns of a tensor, its bytes included."""
    [piece] = source.pieces
    box = piece.region.slices()
    return source.spec, source.layout, piece.region, source.storage, piece.data.read(box).tobytes()


@given(tensors())
def test_a_common_tensor_is_described_as_any_other(tensor: torch.Tensor) -> None:
    short = (
        torch_leaves.source(tensor, "x", 0),
        torch_leaves.target(tensor, "x", 0),
        torch_leaves.abstract(tensor, "x", 0),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_leaves, "is_plain", lambda leaf: False)
        long = (
            torch_leaves.source(tensor, "x", 0),
            torch_leaves.target(tensor, "x", 0),
            torch_leaves.abstract(tensor, "x", 0),
        )
    assert short[0] is not None and long[0] is not None and short[1] is not None and long[1] is not None
    assert seen(short[0]) == seen(long[0])
    assert short[2] == long[2] == short[1].spec == long[1].spec
    [mine], [other] = short[1].pieces, long[1].pieces
    assert mine.region == other.region
    before = tensor.detach().clone()
    box, data = mine.region.slices(), np.array(seen(long[0])[4])
    if tensor.numel():
        raw = np.frombuffer(data.tobytes(), np.uint8)
        fresh = (raw ^ 1).view(f"V{tensor.dtype.itemsize}").reshape(mine.region.shape)
        values = fresh.view(_raw(tensor.dtype.itemsize))
        other.data.write(box, values)
        by_other = tensor.detach().clone()
        tensor.detach().copy_(before)
        mine.data.write(box, values)
        assert _bits(tensor) == _bits(by_other) != _bits(before)


def _raw(itemsize: int) -> np.dtype[Any]:
    from treeckpt._arrays.base import raw_dtype

    return raw_dtype(itemsize)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_only_tensors_that_are_there_in_one_piece_are_known_by_address() -> None:
    for tensor in (torch.zeros(0), torch.zeros(3, 2).T, torch.zeros(4)[::2]):
        assert torch_leaves.plain_memory(tensor, torch_leaves.plain_info(tensor)) is None
    imaginary = torch.zeros(1, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg() and torch_leaves.plain_memory(imaginary, torch_leaves.plain_info(imaginary)) is None
    cut = torch.zeros(8)
    cut.untyped_storage().resize_(16)
    assert torch_leaves.plain_memory(cut, torch_leaves.plain_info(cut)) is None


def test_memory_outlives_the_tensor_that_showed_it() -> None:
    tensor = torch.arange(4, dtype=torch.float32)
    memory = torch_leaves.plain_memory(tensor, torch_leaves.plain_info(tensor))
    assert memory is not None
    tensor.data = torch.zeros(4)
    del tensor
    gc.collect()
    torch.full((64, 4), 7.0)  # may take memory that was let go of
    assert memory.array.view("f4").tolist() == [0, 1, 2, 3]
    assert memory.tobytes() == np.arange(4, dtype="f4").tobytes()


def test_a_save_leaves_storage_resizable() -> None:
    tensors = {"small": torch.ones(3), "scalar": torch.tensor(1), "large": torch.ones(100_000)}
    tc.save(tc.MemoryStore(), tensors)
    for tensor in tensors.values():
        tensor.untyped_storage().resize_(2 * tensor.nbytes)


# saves and loads ---------------------------------------------------------------------------------------------------


def mixed(seed: int) -> dict[str, Any]:
    """Small and large arrays of several dtypes and libraries, strided ones, ties, values."""
    draw = torch.Generator().manual_seed(seed)
    state: dict[Any, Any] = {
        number: {
            "step": torch.tensor(float(number + seed)),
            "exp_avg": torch.rand(1 + number * 7 % 300, generator=draw),
            "half": torch.rand(number % 5, 3, generator=draw).bfloat16(),
            "count": np.arange(number % 9) + seed,
            "window": torch.rand(8, 4, generator=draw)[:, 1],
        }
        for number in range(60)
    }
    state["large"] = torch.rand(40_000, generator=draw)
    state["tie"] = state[3]["exp_avg"]
    return {"state": state, "lr": 0.1 * seed, "names": ["a", "b"]}


def texts(tree: Any) -> list[tuple[str, str]]:
    from treeckpt._core.tree.flatten import flatten

    return [(path, f"{leaf!r} {getattr(leaf, 'dtype', '')}") for path, leaf in flatten(tree)[1]]


@pytest.mark.parametrize("limit", [None, 5000, 200])
def test_small_arrays_are_filled_as_large_ones_are(tmp_path: Path, limit: int | None) -> None:
    saved = mixed(1)
    options = {} if limit is None else {"max_shard_bytes": limit}
    tc.save(tmp_path / "x", saved, **options)
    short, long = mixed(2), mixed(2)
    report = tc.load_into(tmp_path / "x", short)
    with pytest.MonkeyPatch.context() as patch:  # nothing is one run of bytes: box by box
        for module in (plan, read_batch):
            patch.setattr(module, "HostMemory", type("NoMemory", (), {}))
        other = tc.load_into(tmp_path / "x", long)
    assert texts(short) == texts(long) == texts(saved)
    assert (report.nbytes, report.loaded) == (other.nbytes, other.loaded)
    assert texts(tc.load(tmp_path / "x", read=tc.ReadOptions(copy=True))) == texts(saved)
    assert texts(tc.load(tmp_path / "x")) == texts(saved)


def test_a_part_of_many_small_arrays_is_filled_alone(tmp_path: Path) -> None:
    saved, tree = mixed(1), mixed(2)
    tc.save(tmp_path / "x", saved)
    tc.load_into(tmp_path / "x", tree, select=("state/1*/exp_avg",))
    asked = {path for path, _ in texts(saved) if path.startswith("state/1") and path.endswith("/exp_avg")}
    assert len(asked) == 11
    untouched = dict(texts(mixed(2)))
    expected = [(path, text if path in asked else untouched[path]) for path, text in texts(saved)]
    assert texts(tree) == expected


def test_changed_bytes_are_found_before_a_small_array_is_filled(tmp_path: Path) -> None:
    tc.save(tmp_path / "x", mixed(1))
    [shard] = (tmp_path / "x").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    tree = mixed(2)
    with pytest.raises(tc.CorruptError):
        tc.load_into(tmp_path / "x", tree)
    assert texts(tree) == texts(mixed(2))


def test_small_arrays_straddle_the_borders_of_buffers() -> None:
    draw = torch.Generator().manual_seed(0)
    saved = {f"{number}": torch.rand(15_999 - number, generator=draw) for number in range(300)}
    store = tc.MemoryStore()
    tc.save(store, saved)
    found: Any = tc.load(store)
    assert sum(tensor.nbytes for tensor in saved.values()) > 16 << 20
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


def test_nothing_changed_leaves_every_container_and_leaf_in_place(tmp_path: Path) -> None:
    tree = {"t": (torch.ones(2), 3, "x"), "l": [1.5, None, torch.zeros(1)]}
    tc.save(tmp_path / "x", tree)
    before = tree["t"], tree["l"], tree["t"][0], tree["l"][2]
    tree["t"][0].zero_()  # pyright: ignore[reportAttributeAccessIssue]
    tc.load_into(tmp_path / "x", tree)
    assert (tree["t"], tree["l"]) == before[:2] and tree["t"] is before[0] and tree["l"] is before[1]
    assert tree["t"][0].tolist() == [1, 1]  # pyright: ignore[reportAttributeAccessIssue]


# ranks --------------------------------------------------------------------------------------------------------------


@given(tensors())
def test_a_small_array_known_by_address_has_the_digest_of_its_elements(tensor: torch.Tensor) -> None:
    found = describe.content_digests(describe.describe_tree({"x": tensor}, rank=0), "sample")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_leaves, "is_plain", lambda leaf: False)
        brought = describe.describe_tree({"x": tensor}, rank=0)
        assert not isinstance(brought.sources["x"].pieces[0].data, HostMemory)
        assert found == describe.content_digests(brought, "sample")


def test_many_small_leaves_of_two_ranks_come_back_and_a_difference_is_named(tmp_path: Path) -> None:
    def state(number: int, rank: int) -> dict[str, Any]:
        return {f"leaf.{i}": torch.tensor([float(i + (rank if i == number else 0))]) for i in range(2000)}

    outcomes = on_ranks(2, lambda comm: tc.save(tmp_path / "x", state(-1, comm.rank), comm=comm))
    assert [outcome.error for outcome in outcomes] == [None, None]
    trees = [{name: torch.zeros(1) for name in state(-1, 0)} for _ in range(2)]
    outcomes = on_ranks(2, lambda comm: tc.load_into(tmp_path / "x", trees[comm.rank], comm=comm))
    assert [outcome.error for outcome in outcomes] == [None, None]
    for tree in trees:
        assert [tensor.item() for tensor in tree.values()] == list(range(2000))
    outcomes = on_ranks(2, lambda comm: tc.save(tmp_path / "y", state(1234, comm.rank), comm=comm))
    assert all("leaf.1234" in str(outcome.error) for outcome in outcomes)


def test_host_memory_reads_and_writes_as_an_array_does() -> None:
    base = np.arange(12, dtype="<u4").reshape(3, 4)
    memory, array = HostMemory(base.ctypes.data, (3, 4), 4, base), HostArray(base)
    box = (slice(1, 3), slice(0, 2))
    assert memory.read(box).tolist() == array.read(box).tolist()
    memory.write(box, np.zeros((2, 2), "<u4"))
    assert base[box].sum() == 0 and base.sum() == 66 - 4 - 5 - 8 - 9
