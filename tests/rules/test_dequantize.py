"""Float8 weights are loaded times their scales, block by block, as torch computes it; never without them by a cast."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import treeckpt as tc
from tests.helpers.layout_cases import Boxes, OnMesh, bits, on_ranks
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import Mesh, MeshLayout, Replicate, Shard
from treeckpt._core.sharding.region import Region

BLOCK = (128, 128)
RULE = tc.rules.Dequantize("*.weight", "*.weight_scale_inv", block=BLOCK)


def weights(shape: tuple[int, ...], *, dtype: torch.dtype = torch.float8_e4m3fn, seed: int = 0) -> torch.Tensor:
    """Every finite magnitude of a dtype of float8, in random order."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 30
    return drawn.to(dtype)


def scales(shape: tuple[int, ...], *, seed: int = 1) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) / 100 + 1e-4


def expanded(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, ...]) -> torch.Tensor:
    """The scale of each element."""
    for dim, (size, length) in enumerate(zip(shape, block, strict=True)):
        scale = scale.repeat_interleave(length, dim).narrow(dim, 0, size)
    return scale


def scaled(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, ...] = BLOCK) -> torch.Tensor:
    return weight.float() * expanded(scale.float(), tuple(weight.shape), block)


def grid(shape: tuple[int, ...], block: tuple[int, ...] = BLOCK) -> tuple[int, ...]:
    return tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=True))


def hub(path: Path, shapes: dict[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Writes a directory as a model of blocks of float8 has it on a hub; returns the weights in float32."""
    path.mkdir()
    tensors: dict[str, torch.Tensor] = {"norm.weight": torch.ones(4, dtype=torch.bfloat16)}
    found: dict[str, torch.Tensor] = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        weight, scale = weights(shape, seed=seed), scales(grid(shape), seed=seed + 50)
        tensors |= {f"{name}.weight": weight, f"{name}.weight_scale_inv": scale}
        found[f"{name}.weight"] = scaled(weight, scale)
    save_file(tensors, path / "model.safetensors")
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(256, 384), (300, 500), (1, 129), (128, 1), (64, 64)])
def test_weights_of_a_hub_are_scaled_block_by_block(tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype) -> None:
    [(name, expected)] = hub(tmp_path / "hub", {"l": shape}).items()
    found = tc.load(tmp_path / "hub", transforms=RULE)
    assert list(found) == ["norm.weight", name] or list(found) == [name, "norm.weight"]
    assert torch.equal(found[name], expected) and found["norm.weight"].dtype == torch.bfloat16
    like = {name: torch.empty(shape, dtype=dtype), "norm.weight": ...}
    assert bits(tc.load(tmp_path / "hub", like, transforms=RULE, cast=True)[name]) == bits(expected.to(dtype))
    into = {name: torch.zeros(shape, dtype=dtype)}
    tc.load_into(tmp_path / "hub", into, transforms=RULE, cast=True, strict="missing")
    assert bits(into[name]) == bits(expected.to(dtype))
    named = str(dtype).removeprefix("torch.")
    text = f'*.weight, *.weight_scale_inv -> *.weight, dequantize, block="[128, 128]", dtype="{named}"'
    assert bits(tc.load(tmp_path / "hub", transforms=text)[name]) == bits(expected.to(dtype))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_part_of_an_array_in_any_layout_has_its_own_scales(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=3), label="shape"))
    block = tuple(data.draw(st.integers(1, 9), label="block") for _ in shape)
    weight, scale = weights(shape), scales(grid(shape, block))
    store = tc.MemoryStore()
    layout = MeshLayout(
        Mesh((2,), encode_runs(range(2)), ("x",)), (data.draw(st.sampled_from([Shard(0), Replicate()]), label="saved"),)
    )
    on_ranks(2, lambda comm: tc.save(store, {"w": OnMesh(layout).cut(weight, comm.rank), "w_scale": scale}, comm=comm))
    expected = scaled(weight, scale, block)
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    part = Region(offset, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))
    rule = tc.rules.Dequantize("w", "w_scale", block=block)
    wanted = tc.ArraySpec(shape, "float32", regions=(part,), kind="tensor")
    axes = tuple(data.draw(st.permutations(range(len(shape))), label="axes"))
    found = tc.load(store, {"w": wanted}, transforms=rule, fallback=tc.Fallback(per_rank="take"))["w"]
    found = found.local if isinstance(found, tc.Sharded) else found
    assert torch.equal(torch.as_tensor(found), expected[part.slices()])
    turned = tc.load(store, transforms=[rule, tc.rules.Permute("w", axes)])["w"]
    assert torch.equal(turned, expected.permute(axes))


@pytest.mark.parametrize("dim", [0, 1])
def test_each_rank_reads_the_scales_of_its_part_alone(tmp_path: Path, dim: int) -> None:
    shape = (1000, 1300)
    [expected] = hub(tmp_path / "hub", {"l": shape}).values()
    layout = MeshLayout(Mesh((4,), encode_runs(range(4)), ("x",)), (Shard(dim),))
    like = torch.zeros(shape, dtype=torch.bfloat16)
    reports: dict[int, tc.LoadReport] = {}

    def load(comm: Any) -> Any:
        tree = {"l.weight": OnMesh(layout).cut(like, comm.rank), "norm.weight": ...}
        reports[comm.rank] = tc.load_into(tmp_path / "hub", tree, transforms=RULE, cast=True, comm=comm)
        return tree["l.weight"]

    for rank, found in enumerate(on_ranks(4, load)):
        assert bits(found) == bits(OnMesh(layout).cut(expected.bfloat16(), rank))
        here = found.to_local().shape
        blocks = grid(tuple(here)) if rank == 0 else tuple(n + 1 for n in grid(tuple(here)))
        assert here.numel() < reports[rank].nbytes <= here.numel() + 4 * math.prod(blocks)


SCHEMES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, tuple[int, ...]]] = {
    # shapes of the weight and its scales, the block of the rule, and the elements that share a scale
    "tensor": ((5, 7), (), None, (5, 7)),
    "tensor, of one element": ((5, 7), (1,), None, (5, 7)),
    "tensor, of one row": ((5, 7), (1, 1), None, (5, 7)),
    "channel": ((5, 7), (5, 1), None, (1, 7)),
    "channel, of one dimension": ((5, 7), (5,), None, (1, 7)),
    "column": ((5, 7), (1, 7), None, (5, 1)),
    "group": ((5, 8), (5, 2), (1, 4), (1, 4)),
    "experts in blocks": ((3, 5, 7), (3, 3, 4), (2, 2), (1, 2, 2)),
    "experts": ((3, 5, 7), (3, 1, 1), None, (1, 5, 7)),
    "experts, of one dimension": ((3, 5, 7), (3,), None, (1, 5, 7)),
    "vector": ((9,), (3,), (4,), (4,)),
    "number": ((), (), None, ()),
    "nothing": ((0, 7), (0, 1), None, (1, 7)),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_scales_of_each_shape_and_dtype(name: str, kind: torch.dtype, dtype: torch.dtype) -> None:
    shape, of, block, shared = SCHEMES[name]
    weight, scale = weights(shape, dtype=dtype), scales(of).to(kind)
    store = tc.MemoryStore()
    tc.save(store, {"a": {"w": weight, "w_scale": scale}})
    rule = tc.rules.Dequantize("a/w", "a/w_scale", block=block)
    whole = scale.float()
    if len(of) < len(shape):
        whole = whole.reshape(*of, *(1,) * (len(shape) - len(of)))
    assert torch.equal(tc.load(store, transforms=rule)["a"]["w"], scaled(weight, whole, shared))


def test_scaled_arrays_are_renamed_joined_and_cut_as_others(tmp_path: Path) -> None:
    found = hub(tmp_path / "hub", {f"e.{i}.{name}": (200, 140) for i in range(3) for name in ("up", "gate")})
    rules = [
        RULE,
        tc.rules.Stack("e.$I.up.weight", "ups"),
        tc.rules.Concat("e.$I.gate.weight", "gates"),
        tc.rules.Split("gates", ("first", "second"), axis=1),
        tc.rules.Slice("second", 150, 420),
        tc.rules.Cast("first", "float16"),
    ]
    tree = tc.load(tmp_path / "hub", transforms=rules)
    gates = torch.cat([found[f"e.{i}.gate.weight"] for i in range(3)])
    assert torch.equal(tree["ups"], torch.stack([found[f"e.{i}.up.weight"] for i in range(3)]))
    assert torch.equal(tree["first"], gates[:, :70].half()) and torch.equal(tree["second"], gates[150:420, 70:])
    renamed = tc.load(tmp_path / "hub", rename={"e.*": "m/*"}, transforms=RULE)["m"]
    assert torch.equal(renamed["0.up.weight"], found["e.0.up.weight"])
    plain = tc.rules.decode(tc.rules.encode(rules))
    assert plain == tuple(rules)
    with pytest.raises(tc.MismatchError, match="rules that can be undone"):
        tc.rules.inverse(RULE, tc.inspect(tmp_path / "hub"))


CAST: dict[str, Callable[[Path, Any], Any]] = {
    "load": lambda path, like: tc.load(path, like, cast=True, strict="missing"),
    "numpy": lambda path, like: tc.load(path, {"l.weight": np.zeros((300, 500), "f")}, cast=True, strict=False),
    "load_into": lambda path, like: tc.load_into(path, like, cast=True, strict=False),
    "renamed": lambda path, like: tc.load(
        path, {"m": {"weight": like["l.weight"]}}, rename={"l.*": "m/*"}, cast=True, strict="missing"
    ),
    "bank": lambda path, like: tc.load([path], like, cast=True, strict="missing"),
    "selected": lambda path, like: tc.load(path, like, cast=True, select="l.weight"),
    "joined": lambda path, like: tc.load(
        path,
        {"l": torch.zeros(600, 500)},
        transforms=[tc.rules.Copy("l.weight", "again"), tc.rules.Concat(("l.weight", "again"), "l")],
        cast=True,
        strict="missing",
    ),
    "restore": lambda path, like: tc.training.restore(path, net(), under="model", cast=True),
    "restore, missing": lambda path, like: tc.training.restore(
        path, net("meta"), under="model", cast=True, strict="missing"
    ),
    "restore, tree": lambda path, like: tc.training.restore({"model": tc.load(path)}, net(), cast=True, strict=False),
    "convert": lambda path, like: tc.convert.convert(path, path.parent / "out", dtype="bfloat16"),
}


def net(device: str = "cpu") -> torch.nn.Module:
    with torch.device(device):
        return torch.nn.ModuleDict(
            {"l": torch.nn.Linear(500, 300, bias=False), "norm": torch.nn.LayerNorm(4, bias=False)}
        ).bfloat16()


@pytest.mark.parametrize("how", CAST)
def test_a_cast_without_the_scales_is_refused_by_name_before_anything_changes(tmp_path: Path, how: str) -> None:
    hub(tmp_path / "hub", {"l": (300, 500)})
    like = {"l.weight": torch.zeros(300, 500, dtype=torch.bfloat16)}
    with pytest.raises(
        tc.MismatchError, match=r"^(model/)?(l|m).*: expected float8_e4m3fn.*weight_scale_inv.*Dequantize\('\*.weight'"
    ):
        CAST[how](tmp_path / "hub", like)
    assert not like["l.weight"].any()


def test_float8_is_cast_where_no_scales_are_beside_it_and_where_a_rule_says_so(tmp_path: Path) -> None:
    weight = weights((3, 4))
    tc.save(tmp_path / "c", {"w": weight, "scaled": weight, "scaled_scale": scales((3, 1))})
    like = {"w": torch.zeros(3, 4), "scaled": torch.zeros(3, 4)}
    found = tc.load(tmp_path / "c", like, transforms=tc.rules.Cast("scaled", "float32"), cast=True, strict="missing")
    assert torch.equal(found["w"], weight.float()) and torch.equal(found["scaled"], weight.float())
    same = tc.load(tmp_path / "c", {"w": ..., "scaled": weight, "scaled_scale": torch.zeros(3, 1)}, cast=True)
    assert bits(same["scaled"]) == bits(weight)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_is_restored_from_a_hub_directory_of_float8(tmp_path: Path, device: str) -> None:
    found = hub(tmp_path / "hub", {"l": (300, 500)})
    model = net(device)
    report = tc.training.restore(tmp_path / "hub", model, under="model", transforms=RULE, cast=True)
    assert torch.equal(model.state_dict()["l.weight"], found["l.weight"].bfloat16())
    assert report.loaded == 2 and report.missing == report.unexpected == ()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    tc.save(tmp_path / "c", tc.training.state(model, optimizer, rng=False))
    tree = tc.load(tmp_path / "c")
    tree["model"] |= {"l.weight": weights((300, 500)), "l.weight_scale_inv": scales(grid((300, 500)))}
    tc.save(tmp_path / "f", tree)
    rule = tc.rules.Dequantize("model/*.weight", "model/*.weight_scale_inv", block=BLOCK, dtype="bfloat16")
    tc.training.restore(tmp_path / "f", model, optimizer, transforms=rule, rng=False)
    expected = scaled(tree["model"]["l.weight"], tree["model"]["l.weight_scale_inv"]).bfloat16()
    assert torch.equal(model.state_dict()["l.weight"], expected)


def test_a_conversion_scales_too(tmp_path: Path) -> None:
    found = hub(tmp_path / "hub", {"l": (300, 500)})
    tc.convert.convert(tmp_path / "hub", tmp_path / "ours", transforms=RULE, dtype="bfloat16")
    tc.convert.convert(tmp_path / "hub", tmp_path / "as it is")
    tc.convert.convert(tmp_path / "as it is", tmp_path / "file.pt", transforms=RULE)
    assert torch.equal(tc.load(tmp_path / "ours")["l.weight"], found["l.weight"].bfloat16())
    assert torch.equal(torch.load(tmp_path / "file.pt")["l.weight"], found["l.weight"])


def test_damaged_scales_are_found(tmp_path: Path) -> None:
    tree = {"l.weight": weights((300, 500)), "l.weight_scale_inv": scales(grid((300, 500))), "n": torch.ones(1)}
    tc.save(tmp_path / "c", tree)
    index = tc.inspect(tmp_path / "c")
    [chunk] = index.chunks_of(index.by_path["l.weight_scale_inv"][0])
    _, at = index.locate(chunk.rank, chunk.start, chunk.start + 8, "l.weight_scale_inv")
    [shard] = (tmp_path / "c").glob("*.safetensors")
    with shard.open("r+b") as file:
        file.seek(at)
        file.write(b"damaged!")
    into = {"l.weight": torch.zeros(300, 500), "n": torch.zeros(1)}
    with pytest.raises(tc.CorruptError):
        tc.load_into(tmp_path / "c", into, transforms=RULE)
    assert not into["l.weight"].any() and not into["n"].any()
    found = tc.load(tmp_path / "c", transforms=RULE, fallback=tc.Fallback(on_corrupt="skip"))
    assert found["l.weight"] is ...


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "another block": ({}, tc.rules.Dequantize("w", "w_scale", block=(64, 64)), r"w: .*block of \(64, 64\).*\(3, 4\)"),
    "no block": ({}, tc.rules.Dequantize("w", "w_scale"), "w: .*one index along.*weight_block_size"),
    "blocks of more dimensions": ({}, tc.rules.Dequantize("w", "w_scale", block=(1, 128, 128)), "w: .*block of"),
    "a block of nothing": ({}, tc.rules.Dequantize("w", "w_scale", block=(0, 128)), "w: .*block of"),
    "integers": ({"w_scale": torch.ones(3, 4, dtype=torch.uint8)}, None, "scales of floating point.*uint8"),
    "a value": ({"w_scale": 0.5}, None, "an array.*a value"),
    "no weights": ({}, tc.rules.Dequantize("v", "w_scale", block=BLOCK), "v beside it.*no such leaf"),
    "no scales": ({}, tc.rules.Dequantize("w", "w_scales", block=BLOCK), "no such leaf"),
    "cut before": ({}, [tc.rules.Slice("w", 1, 300), tc.rules.Dequantize("w", "w_scale")], "as they were saved"),
    "cast before": ({}, [tc.rules.Cast("w", "float32"), tc.rules.Dequantize("w", "w_scale")], "as they were saved"),
    "a dtype of a wrong name": ({}, tc.rules.Dequantize("w", "w_scale", block=BLOCK, dtype="bf"), "bf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    tree, rule, words = REFUSED[name]
    store = tc.MemoryStore()
    tc.save(store, {"w": weights((300, 500)), "w_scale": scales((3, 4))} | tree)
    with pytest.raises(tc.TreeckptError, match=words):
        tc.load(store, transforms=rule or tc.rules.Dequantize("w", "w_scale", block=BLOCK))


@pytest.mark.parametrize(
    "text",
    ["a, b -> a, b, dequantize", "a -> a, dequantize", "a, b -> c, dequantize", 'a, b -> a, dequantize, block="8"'],
)
def test_a_statement_that_does_not_scale_is_refused(text: str) -> None:
    with pytest.raises(tc.FormatError, match=r"dequantize|block"):
        tc.rules.parse(text)


@pytest.mark.slow
def test_transformers_computes_the_same() -> None:
    library: Any = pytest.importorskip("transformers.integrations.finegrained_fp8")
    formula = library.Fp8Dequantize(None)
    for shape in ((256, 384), (128, 128), (512, 128)):
        weight, scale = weights(shape), scales(grid(shape))
        store = tc.MemoryStore()
        tc.save(store, {"w": weight, "w_scale_inv": scale})
        for dtype in (torch.float32, torch.bfloat16):
            rule = tc.rules.Dequantize("w", "w_scale_inv", block=BLOCK, dtype=str(dtype))
            assert bits(tc.load(store, transforms=rule)["w"]) == bits(formula._dequantize_one(weight, scale, dtype))


@pytest.mark.parametrize("as_numpy", [False, True])
def test_boxes_of_ranks_are_scaled(tmp_path: Path, as_numpy: bool) -> None:
    shape = (300, 500)
    [expected] = hub(tmp_path / "hub", {"l": shape}).values()
    layout = Boxes((Region((0, 0), (130, 500)), Region((130, 129), (170, 371))), as_numpy)

    def load(comm: Any) -> Any:
        like = {"l.weight": layout.cut(torch.zeros(shape), comm.rank), "norm.weight": ...}
        return tc.load(tmp_path / "hub", like, transforms=RULE, comm=comm)["l.weight"]

    for rank, found in enumerate(on_ranks(2, load)):
        assert bits(found) == bits(layout.cut(expected, rank))
