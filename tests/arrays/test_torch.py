"""Torch tensors as leaves, in one process: dtypes, views, kinds, ties, devices, and what is refused."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Buffer, Parameter

import treeckpt as tc
from treeckpt._arrays.torch import dtype_name, torch_dtype
from treeckpt._core.format.records import AliasRecord, ArrayRecord

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
BITS = {getattr(torch, name) for name in ("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")}
STORED = [dtype for dtype in DTYPES if dtype not in QUANTISED | BITS]


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bytes: every bit pattern is to survive, NaN payloads too."""
    nbytes = math.prod(shape) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, nbytes, np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What makes two tensors the same to the last bit."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.dtype, tuple(plain.shape), plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return type(a) is type(b) and a.requires_grad == b.requires_grad and bits(a) == bits(b)


def roundtrip(tree: Any, **options: Any) -> Any:
    store = tc.MemoryStore()
    tc.save(store, tree)
    assert tc.verify(store).ok
    return tc.load(store, **options)


def refused(leaf: object) -> str:
    """The text of the error that a leaf meets when it is saved."""
    store = tc.MemoryStore()
    with pytest.raises(tc.TreeError) as caught:
        tc.save(store, {"layer": {"w": leaf}})
    assert caught.value.path == "layer/w"
    assert caught.value.hint
    assert not store.files
    return str(caught.value)


# dtypes ---------------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    tree = {"matrix": filled((5, 7), dtype), "scalar": filled((), dtype, 1), "empty": filled((0, 3), dtype)}
    store = tc.MemoryStore()
    tc.save(store, tree)
    loaded = tc.load(store)
    again = tc.load(
        store, {key: torch.empty_like(value) for key, value in tree.items()}, read=tc.ReadOptions(copy=True)
    )
    into = {key: torch.empty_like(value) for key, value in tree.items()}
    tc.load_into(store, into)
    for key, value in tree.items():
        assert same(loaded[key], value)
        assert same(again[key], value)
        assert same(into[key], value)


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_every_dtype_has_one_name(dtype: torch.dtype) -> None:
    assert torch_dtype(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("dtype", sorted(BITS, key=str), ids=str)
def test_bit_dtypes_are_refused(dtype: torch.dtype) -> None:
    assert str(dtype) in refused(torch.empty(4, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quant.*:UserWarning", "ignore:.*qint.*:UserWarning")
def test_quantised_tensors_are_refused(dtype: torch.dtype) -> None:
    text = refused(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, dtype))
    assert "quantised" in text
    assert "int_repr" in text


# views and memory -----------------------------------------------------------------------------------------------------
VIEWS: dict[str, torch.Tensor] = {
    "transposed": filled((4, 6), torch.float32).t(),
    "strided": filled((9, 8), torch.bfloat16)[::2, 1::3],
    "inner": filled((6, 6, 6), torch.float64)[1:4, 2:3, ::5],
    "expanded": filled((1, 5), torch.int32).expand(4, 5),
    "expanded scalar": filled((), torch.int64).expand(3, 2),
    "conjugate": filled((3, 4), torch.complex64).conj(),
    "conjugate double": torch.randn(3, 4, dtype=torch.complex128).conj().t(),
    "negative": torch.randn(5, dtype=torch.complex64).conj().imag,
    "negative double": torch.randn(2, 5, dtype=torch.complex128).conj().imag[:, ::2],
    "real part": torch.randn(5, dtype=torch.complex64).real,
    "channels last": filled((2, 3, 4, 5), torch.float16).contiguous(memory_format=torch.channels_last),
    "permuted": filled((2, 3, 4), torch.uint8).permute(2, 0, 1),
    "empty slice": filled((4, 4), torch.float32)[2:2],
    "0-dim of a vector": filled((9,), torch.float32)[4],
    "overlapping": filled((10,), torch.float32).as_strided((4, 4), (2, 1)),
    "of other dtype": filled((8,), torch.float32).view(torch.int16),
    "unfolded": filled((12,), torch.float32).unfold(0, 4, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_saved_as_they_look(name: str) -> None:
    view = VIEWS[name]
    loaded = roundtrip({"w": view})["w"]
    assert bits(loaded) == bits(view)
    assert not loaded.is_conj()
    assert not loaded.is_neg()


@pytest.mark.parametrize("name", [n for n in VIEWS if "expanded" not in n and n not in ("overlapping", "unfolded")])
def test_views_are_filled_in_place(name: str) -> None:
    saved = filled(tuple(VIEWS[name].shape), VIEWS[name].dtype, 7)
    if saved.is_floating_point() or saved.is_complex():
        saved = torch.randn(saved.shape, dtype=torch.float64).to(saved.dtype)
    view = VIEWS[name].clone(memory_format=torch.preserve_format)
    base = torch.zeros(VIEWS[name].untyped_storage().nbytes(), dtype=torch.uint8)
    if not (VIEWS[name].is_conj() or VIEWS[name].is_neg()):
        view = base.view(VIEWS[name].dtype).as_strided(
            VIEWS[name].shape, VIEWS[name].stride(), VIEWS[name].storage_offset()
        )
    store = tc.MemoryStore()
    tc.save(store, [saved])
    tc.load_into(store, [view])
    assert bits(view) == bits(saved)


def test_conjugate_and_negative_views_are_filled_through() -> None:
    store = tc.MemoryStore()
    saved = {"conj": torch.randn(4, dtype=torch.complex64), "neg": torch.randn(4)}
    tc.save(store, saved)
    base = torch.zeros(4, dtype=torch.complex64)
    other = torch.zeros(4, dtype=torch.complex64)
    tc.load_into(store, {"conj": base.conj(), "neg": other.conj().imag})
    assert torch.equal(base, saved["conj"].conj().resolve_conj())
    assert torch.equal(other.imag, -saved["neg"])


@pytest.mark.parametrize("name", ["expanded", "expanded scalar", "overlapping", "unfolded"])
def test_a_target_whose_elements_share_memory_is_refused(name: str) -> None:
    store = tc.MemoryStore()
    tc.save(store, {"w": VIEWS[name]})
    with pytest.raises(tc.MismatchError, match="memory for each element"):
        tc.load_into(store, {"w": VIEWS[name].as_strided(VIEWS[name].shape, VIEWS[name].stride())})


def test_a_view_of_a_large_storage_writes_its_bytes_only() -> None:
    store = tc.MemoryStore()
    tc.save(store, {"w": torch.zeros(1 << 22)[1000:1010]})
    assert sum(map(len, store.files.values())) < 16 << 10


# kinds ----------------------------------------------------------------------------------------------------------------
def test_kinds_and_requires_grad_come_back() -> None:
    tree = {
        "parameter": Parameter(torch.randn(3)),
        "frozen": Parameter(torch.randn(3), requires_grad=False),
        "integer": Parameter(torch.arange(3), requires_grad=False),
        "wanted": torch.randn(3, requires_grad=True),
        "plain": torch.randn(3),
        "buffer": Buffer(torch.randn(3)),
        "result": (torch.randn(3, requires_grad=True) * 2),
    }
    loaded = roundtrip(tree)
    for key, value in tree.items():
        assert type(loaded[key]) is type(value), key
        assert loaded[key].requires_grad == value.requires_grad, key
        assert bits(loaded[key]) == bits(value), key
        assert loaded[key].is_leaf, key
    assert isinstance(loaded["buffer"], Buffer)
    assert not isinstance(loaded["plain"], Buffer)


def test_like_decides_the_kind() -> None:
    store = tc.MemoryStore()
    tc.save(store, {"w": Parameter(torch.randn(3))})
    assert type(tc.load(store, {"w": torch.empty(3)})["w"]) is torch.Tensor
    like = {"w": Parameter(torch.empty(3), requires_grad=False)}
    loaded = tc.load(store, like)["w"]
    assert type(loaded) is Parameter
    assert not loaded.requires_grad
    spec = tc.load(store, {"w": tc.ArraySpec((3,), "float32", requires_grad=True)})["w"]
    assert type(spec) is torch.Tensor
    assert spec.requires_grad


def test_load_into_a_module_keeps_its_parameters() -> None:
    torch.manual_seed(0)
    trained, fresh = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    store = tc.MemoryStore()
    tc.save(store, dict(trained.named_parameters()))
    before = dict(fresh.named_parameters())
    tc.load_into(store, dict(fresh.named_parameters()))
    assert all(before[name] is parameter for name, parameter in fresh.named_parameters())
    assert torch.equal(fresh.weight, trained.weight)
    assert fresh.weight.requires_grad


@pytest.mark.parametrize("how", ["load_into", "compared first", "cast", "copy_into", "restore"])
def test_filling_what_a_backward_still_needs_makes_it_fail_instead_of_wrong(how: str, tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 1, bias=False)
    saved = {"weight": torch.full((1, 3), 5.0, dtype=torch.float64 if how == "cast" else torch.float32)}
    loss = (module.weight * module.weight).sum()
    path = tmp_path / "step"
    tc.save(path, {"model": saved} if how == "restore" else saved)
    if how == "copy_into":
        tc.trees.copy_into(saved, dict(module.named_parameters()))
    elif how == "restore":
        tc.training.restore(path, module, rng=False)
    else:
        tc.load_into(
            path, module, cast=how == "cast", read=tc.ReadOptions(verify="first" if how == "compared first" else True)
        )
    assert module.weight.tolist() == [[5.0] * 3]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_load_that_is_refused_leaves_the_backward_as_it_was(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    tc.save(tmp_path / "step", {"w": torch.ones(4)})
    loss = (weight * weight).sum()
    with pytest.raises(tc.MismatchError):
        tc.load_into(tmp_path / "step", {"w": weight})
    loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [2.0] * 3


def test_torch_values_keep_their_types() -> None:
    devices = [torch.device("cuda", 3), torch.device("cpu")]
    layouts = [torch.strided, torch.sparse_coo, torch.channels_last]
    tree = [torch.Size([2, 3]), torch.Size([]), torch.float16, torch.__version__, *devices, *layouts]
    loaded = roundtrip(tree)
    assert loaded == tree
    assert [type(x) for x in loaded] == [type(x) for x in tree]


# ties -----------------------------------------------------------------------------------------------------------------
def written(store: tc.MemoryStore) -> int:
    return sum(file.nbytes for file in tc.inspect(store).file_list)


def test_tied_parameters_are_written_once_and_come_back_as_one() -> None:
    weight = Parameter(torch.randn(64, 32))
    store = tc.MemoryStore()
    tc.save(store, {"wte": weight, "head": weight, "data": weight.data, "detached": weight.detach()})
    assert written(store) == weight.nbytes
    loaded = tc.load(store)
    assert loaded["head"] is loaded["wte"]
    assert loaded["data"].data_ptr() == loaded["wte"].data_ptr()
    assert type(loaded["data"]) is torch.Tensor
    assert loaded["data"] is loaded["detached"] or loaded["detached"].data_ptr() == loaded["wte"].data_ptr()


def test_views_of_one_base_share_memory_again() -> None:
    base = torch.randn(8, 6)
    tree = {
        "row": base[3], "base": base, "transpose": base.t(), "corner": base[2:5, ::2], "flat": base.view(-1),
        "cell": base[1, 1], "column": base[:, 4], "diagonal": base.diagonal(), "expanded": base[0].expand(3, 6),
    }  # fmt: skip
    store = tc.MemoryStore()
    tc.save(store, tree)
    assert written(store) == base.nbytes
    loaded = tc.load(store)
    storage = loaded["base"].untyped_storage().data_ptr()
    for key, value in tree.items():
        assert bits(loaded[key]) == bits(value), key
        assert loaded[key].untyped_storage().data_ptr() == storage, key
        assert loaded[key].stride() == value.stride() or key in ("cell",), key
    loaded["base"].zero_()
    assert not any(value.any() for value in loaded.values())


def test_overlapping_windows_without_a_base_are_saved_as_they_look() -> None:
    base = torch.randn(20)
    tree = {"a": base[0:12], "b": base[8:20], "c": base[9:11], "d": base[::3], "e": base[10:].view(2, 5).t()}
    loaded = roundtrip(tree)
    for key, value in tree.items():
        assert bits(loaded[key]) == bits(value), key


def test_memory_seen_as_two_dtypes_is_saved_as_both() -> None:
    base = torch.randn(16)
    tree = {"a": base, "b": base.view(torch.int32), "c": base.view(torch.uint8)[3:9]}
    loaded = roundtrip(tree)
    for key, value in tree.items():
        assert same(loaded[key], value), key


def test_neighbours_in_one_storage_are_no_ties() -> None:
    base = torch.randn(100)
    store = tc.MemoryStore()
    tc.save(store, list(base.split(7)))
    index = tc.inspect(store)
    assert all(isinstance(leaf, ArrayRecord) for leaf in index.leaves)


def test_a_view_can_be_loaded_without_its_base() -> None:
    base = torch.randn(8, 6)
    store = tc.MemoryStore()
    tc.save(store, {"base": base, "row": base[3], "t": base.t()})
    assert isinstance(tc.inspect(store).leaves[1], AliasRecord)
    loaded = tc.load(store, {"row": torch.empty(6), "t": torch.empty(6, 8)}, strict=False)
    assert torch.equal(loaded["row"], base[3])
    assert torch.equal(loaded["t"], base.t())
    picked = tc.load(store, select="row")
    assert torch.equal(picked["row"], base[3])
    assert picked["base"] is ...


def test_conjugate_of_a_saved_tensor_is_saved_as_it_looks() -> None:
    base = torch.randn(8, dtype=torch.complex64)
    tree = {"a": base, "b": base.conj(), "c": base.conj().imag, "d": base.real}
    loaded = roundtrip(tree)
    for key, value in tree.items():
        assert bits(loaded[key]) == bits(value), key


def test_like_with_one_tensor_twice_gives_one_tensor_twice() -> None:
    weight = torch.randn(5)
    store = tc.MemoryStore()
    tc.save(store, {"a": weight, "b": weight})
    wanted = torch.empty(5)
    loaded = tc.load(store, {"a": wanted, "b": wanted})
    assert loaded["a"] is loaded["b"]
    apart = tc.load(store, {"a": torch.empty(5), "b": torch.empty(5)})
    assert apart["a"] is not apart["b"]
    assert torch.equal(apart["b"], weight)


# optimizers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adafactor", "LBFGS"])
def test_optimizer_state_dicts_come_back(kind: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2))
    options = {"momentum": 0.9} if kind == "SGD" else {"amsgrad": True} if kind == "AdamW" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 5)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    state = optimizer.state_dict()
    loaded = roundtrip(state)
    assert_equal(loaded, state)
    getattr(torch.optim, kind)(model.parameters(), **options).load_state_dict(loaded)


def assert_equal(a: Any, b: Any, path: str = "") -> None:
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert same(a, b), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_equal(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, (list, tuple, collections.deque)):
        assert len(a) == len(b), path
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{path}/{n}")
    else:
        assert a == b or (a != a and b != b), path


# devices --------------------------------------------------------------------------------------------------------------
def test_device_moves_without_touching_the_source() -> None:
    store = tc.MemoryStore()
    tree = {"w": torch.randn(3), "n": np.arange(3)}
    tc.save(store, tree)
    for device in ("cpu", "original", None, lambda where: where):
        assert same(tc.load(store, device=device)["w"], tree["w"])
        assert same(tc.load(store, {"w": torch.empty(3), "n": np.empty(3, np.int64)}, device=device)["w"], tree["w"])
        on_meta = {"w": torch.empty(3, device="meta"), "n": np.empty(3, np.int64)}
        assert same(tc.load(store, on_meta, device=device)["w"], tree["w"])


def test_a_device_that_is_not_here_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    tc.save(tmp_path / "one", {"w": torch.ones(3)})
    for shard in (tmp_path / "one").glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")  # reading it would be another error
    for device in ("cuda:63", "xpu:63", "nonsense", torch.device("cuda", 63)):
        for like in (None, {"w": torch.empty(3)}):
            with pytest.raises(tc.MismatchError, match=r"^device: expected a device of torch .* found '.*', with cpu"):
                tc.load(tmp_path / "one", like, device=device)
    with pytest.raises(tc.MismatchError, match=r"found 'cuda:63', with cpu"):
        tc.load(tmp_path / "one", {"w": tc.ArraySpec((3,), "float32", device="cuda:63")})


def test_loading_onto_the_meta_device_is_refused() -> None:
    store = tc.MemoryStore()
    tc.save(store, {"w": torch.randn(3)})
    with pytest.raises(tc.MismatchError, match="meta"):
        tc.load(store, device="meta")
    with pytest.raises(tc.MismatchError, match="meta"):
        tc.load(store, {"w": torch.empty(3)}, device="meta")
    with pytest.raises(tc.MismatchError, match="meta"):
        tc.load_into(store, {"w": torch.empty(3, device="meta")})


def test_a_meta_module_is_materialised_by_load() -> None:
    with torch.device("meta"):
        module = torch.nn.Linear(3, 4)
    store = tc.MemoryStore()
    real = torch.nn.Linear(3, 4)
    tc.save(store, real.state_dict())
    module.load_state_dict(tc.load(store, module.state_dict()), assign=True)
    assert torch.equal(module.weight, real.weight)
    assert module.weight.device.type == "cpu"


def test_load_is_functional() -> None:
    store = tc.MemoryStore()
    tc.save(store, {"w": torch.ones(3), "s": [1]})
    like = {"w": torch.zeros(3), "s": [2]}
    loaded = tc.load(store, like)
    assert torch.equal(like["w"], torch.zeros(3))
    assert like["s"] == [2]
    assert torch.equal(loaded["w"], torch.ones(3))
    assert loaded["s"] == [1]


def test_cast_converts_as_torch_does() -> None:
    store = tc.MemoryStore()
    tree = {"a": torch.randn(5, 4), "b": torch.randn(3).bfloat16(), "c": torch.arange(5)}
    tc.save(store, tree)
    like = {"a": torch.empty(5, 4).bfloat16(), "b": torch.empty(3), "c": torch.empty(5, dtype=torch.float8_e4m3fn)}
    with pytest.raises(tc.MismatchError, match="cast=True"):
        tc.load(store, like)
    loaded = tc.load(store, like, cast=True)
    for key, value in tree.items():
        assert bits(loaded[key]) == bits(value.to(like[key].dtype))


# refusals -------------------------------------------------------------------------------------------------------------
def test_tensors_without_data_are_refused() -> None:
    text = refused(torch.empty(3, device="meta"))
    assert "meta device" in text
    assert "Materialise" in text
    assert "not initialised" in refused(torch.nn.LazyLinear(3).weight)
    assert "like=" in refused(tc.ArraySpec((3,), "float32"))


def partitioned(parameter: Parameter) -> Parameter:
    """Leaves of a parameter what ZeRO-3 does; tests/training/test_deepspeed.py has DeepSpeed itself do it."""
    parameter.ds_shape, parameter.ds_tensor = parameter.shape, parameter.detach().flatten().clone()  # type: ignore[attr-defined]
    parameter.data = torch.empty(0)
    return parameter


def test_a_parameter_that_zero_3_has_partitioned_is_refused_by_name() -> None:
    text = refused(partitioned(Parameter(torch.ones(3, 5))))
    assert "of shape (3, 5), which DeepSpeed ZeRO-3 has partitioned" in text and "GatheredParameters" in text
    store = tc.MemoryStore()
    tc.save(store, {"w": torch.ones(3, 5), "none": torch.empty(0)})
    with pytest.raises(tc.TreeckptError, match=r"w: .*DeepSpeed ZeRO-3"):
        tc.load_into(store, {"w": partitioned(Parameter(torch.ones(3, 5))), "none": torch.empty(0)})


class Tagged(torch.Tensor):
    """A subclass that torch lets through everywhere."""


class Scaled(Parameter):
    """A subclass of Parameter."""


def test_subclasses_are_refused_by_name() -> None:
    assert "Tagged" in refused(torch.randn(3).as_subclass(Tagged))
    assert "Scaled" in refused(Scaled(torch.randn(3)))


def test_resized_storage_is_refused() -> None:
    tensor = torch.randn(100)
    tensor.untyped_storage().resize_(0)
    assert "storage" in refused(tensor)
    store = tc.MemoryStore()
    tc.save(store, {"w": torch.randn(100)})
    with pytest.raises(tc.MismatchError, match="memory"):
        tc.load_into(store, {"w": tensor})


def test_shape_and_dtype_mismatches_are_told_apart() -> None:
    store = tc.MemoryStore()
    tc.save(store, {"layer": {"w": torch.randn(3, 4)}, "n": 1})
    with pytest.raises(tc.MismatchError, match=r"layer/w: expected shape \(4, 3\)"):
        tc.load(store, {"layer": {"w": torch.empty(4, 3)}, "n": 0})
    with pytest.raises(tc.MismatchError, match="layer/w: expected float64"):
        tc.load(store, {"layer": {"w": torch.empty(3, 4, dtype=torch.float64)}, "n": 0})
    with pytest.raises(tc.MismatchError, match="n: expected an array"):
        tc.load(store, {"layer": {"w": torch.empty(3, 4)}, "n": torch.empty(3)})
    with pytest.raises(tc.MismatchError, match="layer/w: expected a value, found an array"):
        tc.load(store, {"layer": {"w": 3}, "n": 0})


# pieces ---------------------------------------------------------------------------------------------------------------
def test_a_spec_with_regions_loads_these_only() -> None:
    full = torch.arange(24.0).reshape(4, 6)
    store = tc.MemoryStore()
    tc.save(store, {"w": full})

    def load(*regions: tc.Region) -> torch.Tensor:
        return tc.load(store, {"w": tc.ArraySpec((4, 6), "float32", regions)})["w"]

    assert torch.equal(load(tc.Region((1, 2), (2, 3))), full[1:3, 2:5])
    rows = load(tc.Region((0, 0), (1, 6)), tc.Region((2, 0), (1, 6)))
    assert torch.equal(rows, full[[0, 2]])
    grid = load(*(tc.Region((r, c), (1, 2)) for r in (0, 3) for c in (0, 4)))
    assert torch.equal(grid, full[[0, 3]][:, [0, 1, 4, 5]])
    assert torch.equal(load(tc.Region((0, 4), (1, 2)), tc.Region((1, 0), (1, 3))), full.flatten()[4:9])
    assert load(tc.Region((4, 0), (0, 6))).shape == (0, 6)
    assert load().numel() == 0


def test_flat_pieces_of_one_process_load_as_they_were_cut() -> None:
    full = torch.arange(24.0).reshape(4, 6)
    store = tc.MemoryStore()
    tc.save(store, {"w": full})
    for start, stop in [(0, 24), (5, 5), (3, 4), (5, 17), (6, 18), (4, 24)]:
        piece = tc.Sharded(torch.empty(stop - start), (4, 6), start)
        assert torch.equal(tc.load(store, {"w": piece})["w"].local, full.flatten()[start:stop])
        tc.load_into(store, {"w": piece})
        assert torch.equal(piece.local, full.flatten()[start:stop])
        strided = tc.Sharded(torch.zeros(2 * (stop - start))[::2], (4, 6), start)
        tc.load_into(store, {"w": strided})
        assert torch.equal(strided.local, full.flatten()[start:stop])


@pytest.mark.parametrize(
    "offset", [-1, 20, (0,), (3, 0), (-1, 0), (0, 0, 0), np.int64(20), torch.Size([3, 0])], ids=str
)
def test_a_piece_outside_of_its_array_is_refused(offset: Any) -> None:
    local = torch.zeros(6) if isinstance(offset, (int, np.integer)) else torch.zeros(2, 6)
    with pytest.raises(tc.LayoutError, match=r"w: expected a .*piece inside"):
        tc.save(tc.MemoryStore(), {"w": tc.Sharded(local, (4, 6), offset)})


def test_pieces_that_leave_a_gap_are_refused() -> None:
    with pytest.raises(tc.LayoutError, match=r"no rank holds offset \(2, 0\)"):
        tc.save(tc.MemoryStore(), {"w": tc.Sharded(torch.zeros(2, 6), (4, 6), (0, 0))})


@pytest.mark.parametrize("local", [3, "x", None, [torch.ones(2)]], ids=str)
def test_sharded_takes_arrays_only(local: Any) -> None:
    with pytest.raises(tc.TreeError, match="w: expected an array in Sharded"):
        tc.save(tc.MemoryStore(), {"w": tc.Sharded(local, (4, 6), 0)})


def test_abstract_says_what_a_tree_is() -> None:
    full = torch.randn(4, 6)
    tree = {
        "w": Parameter(full), "n": np.arange(3), "v": 5, "p": tc.Sharded(full, (4, 6), (0, 0)),
        "f": tc.Sharded(torch.randn(24), (4, 6), 0), "m": torch.empty(2, device="meta"),
    }  # fmt: skip
    spec = tc.abstract(tree)
    assert spec["w"] == tc.ArraySpec((4, 6), "float32", requires_grad=True, kind="parameter")
    assert spec["n"] == tc.ArraySpec((3,), "int64", kind="numpy")
    assert spec["v"] == 5
    assert spec["p"].regions == (tc.Region((0, 0), (4, 6)),)
    assert spec["m"] == tc.ArraySpec((2,), "float32")
    store = tc.MemoryStore()
    tc.save(store, {**tree, "m": torch.ones(2)})
    loaded = tc.load(store, spec)
    assert same(loaded["w"], tree["w"])
    assert torch.equal(loaded["p"], full)
    assert torch.equal(loaded["f"].flatten(), tree["f"].local)
