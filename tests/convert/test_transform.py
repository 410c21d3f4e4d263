"""Rules in a conversion: new names and layouts, of any source, whatever the order in which arrays are read."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import treeckpt as tc

R = tc.rules


def _state() -> dict[str, Any]:
    shared = torch.randn(6, 4)
    fused = torch.arange(48.0).view(12, 4)
    return {"embed": shared, "head": shared, "h.0.qkv": fused, "h.1.qkv": fused + 100, "skip": torch.ones(3)}


RULES = [
    R.split_qkv("layers.$L.qkv", ("layers.$L.q", "layers.$L.k", "layers.$L.v"), heads=4, kv_heads=1),
    R.Drop("skip"),
]


def _convert_from(kind: str, tmp_path: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    tc.save(tmp_path / "ours", {"model": state, "step": 3})
    source, at = tmp_path / "ours", {"subtree": "model"}
    if kind == "torch":
        source = tmp_path / "old.pt"
        torch.save({"model": state, "step": 3}, source)
    elif kind == "safetensors":
        tc.convert.to_safetensors(tmp_path / "ours", tmp_path / "hub", subtree="model")
        source, at = tmp_path / "hub", {}
    elif kind == "dcp":
        tc.convert.to_dcp(tmp_path / "ours", tmp_path / "dcp")
        source = tmp_path / "dcp"
    tc.convert.to_safetensors(source, tmp_path / "new.safetensors", **at, **options)
    return load_file(tmp_path / "new.safetensors")


@pytest.mark.parametrize("kind", ["treeckpt", "torch", "safetensors", "dcp"])
def test_names_and_layouts_change_whatever_the_source(tmp_path: Path, kind: str) -> None:
    state = _state()
    found = _convert_from(kind, tmp_path, state, rename={"h.*": "layers.*"}, transforms=RULES, memory="4MiB")
    ties = {"embed"} if kind in ("treeckpt", "torch", "safetensors") else {"embed", "head"}
    assert found.keys() == ties | {f"layers.{i}.{w}" for i in (0, 1) for w in "qkv"}
    assert torch.equal(found["embed"], state["embed"])
    for i in (0, 1):
        q, k, v = state[f"h.{i}.qkv"].split([8, 2, 2])
        for name, part in (("q", q), ("k", k), ("v", v)):
            assert torch.equal(found[f"layers.{i}.{name}"], part)


def test_the_rules_of_a_conversion_give_what_those_of_a_load_give(tmp_path: Path) -> None:
    rules = [*RULES, "h.$L -> _, optional", R.Fill("new", 2, (2, 2), "int64"), R.Cast("layers.*", "float16")]
    names = {"h.*": "layers.*", "embed": "x.embed"}
    tc.save(tmp_path / "ours", _state() | {"list": [torch.ones(2), 5], "step": 7})
    tc.convert.convert(tmp_path / "ours", tmp_path / "new", rename=names, transforms=rules)
    a, b = tc.load(tmp_path / "new"), tc.load(tmp_path / "ours", rename=names, transforms=rules)
    assert tc.abstract(a) == tc.abstract(b) and a["list"][1] == 5 and a["step"] == 7
    arrays = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(a.values(), b.values(), strict=True)
              if isinstance(x, torch.Tensor)]  # fmt: skip
    assert len(arrays) >= 9 and all(torch.equal(x, y) for x, y in arrays)
    assert a["x.embed"].data_ptr() == a["head"].data_ptr()


@pytest.mark.parametrize("kind", ["treeckpt", "torch", "safetensors", "dcp"])
def test_select_and_exclude_see_the_names_below_the_subtree_after_the_rules_as_those_of_a_load_do(
    tmp_path: Path, kind: str
) -> None:
    names = {"h.*": "layers.*"}
    options = {"select": ["layers.*", "head"], "exclude": "layers.*.v", "rename": names, "transforms": RULES}
    found = _convert_from(kind, tmp_path, _state(), dtype="float16", **options)
    assert found.keys() == {"head"} | {f"layers.{i}.{w}" for i in (0, 1) for w in "qk"}
    tc.save(tmp_path / "alone", _state())
    loaded = tc.load(tmp_path / "alone", **options)
    assert found.keys() == {name for name, leaf in loaded.items() if leaf is not ...}
    with pytest.raises(tc.MismatchError, match=r"h\.0\.qkv.*a glob that names some leaf"):
        tc.convert.convert(tmp_path / "alone", tmp_path / "no", rename=names, select="h.0.qkv")


def test_a_part_of_a_chunk_of_dcp_is_compared_with_its_checksum(tmp_path: Path) -> None:
    tc.save(tmp_path / "ours", {"w": torch.arange(4096.0)})
    tc.convert.to_dcp(tmp_path / "ours", tmp_path / "dcp")
    half = R.Split("w", ("a", "_"))
    tc.convert.to_safetensors(tmp_path / "dcp", tmp_path / "new.safetensors", transforms=half)
    assert torch.equal(load_file(tmp_path / "new.safetensors")["a"], torch.arange(2048.0))
    [data_file] = (tmp_path / "dcp").glob("*.distcp")
    data = bytearray(data_file.read_bytes())
    data[data.index(np.arange(4096, dtype=np.float32).tobytes()) + 4 * 4000] ^= 1  # in the half that is dropped
    data_file.write_bytes(data)
    with pytest.raises(tc.CorruptError, match="CRC-32"):
        tc.convert.to_safetensors(tmp_path / "dcp", tmp_path / "hub", transforms=half)


def test_what_cannot_be_read_is_left_out_by_its_name_after_the_rules(tmp_path: Path) -> None:
    torch.save({"m": {"w": torch.ones(2), "code": _state}}, tmp_path / "old.pt")
    names = {"*": "net.*"}
    with pytest.raises(tc.TreeError, match=r"^net\.code: .*exclude='net\.code'"):
        tc.convert.convert(tmp_path / "old.pt", tmp_path / "new", subtree="m", rename=names)
    tc.convert.convert(tmp_path / "old.pt", tmp_path / "new", subtree="m", rename=names, exclude="net.code")
    assert list(tc.load(tmp_path / "new")) == ["net.w"]


def test_a_part_of_an_archives_entry_is_compared_with_its_checksum(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(4096.0)}, tmp_path / "old.pt")
    with zipfile.ZipFile(tmp_path / "old.pt") as archive:
        [entry] = [info for info in archive.infolist() if info.filename.endswith("data/0")]
    data = bytearray((tmp_path / "old.pt").read_bytes())
    at = data.index(np.arange(4096, dtype=np.float32).tobytes())
    assert entry.file_size == 4 * 4096
    data[at + 4 * 4000] ^= 1  # in the half that is dropped
    (tmp_path / "old.pt").write_bytes(data)
    with pytest.raises(tc.CorruptError, match="CRC-32"):
        tc.convert.to_safetensors(tmp_path / "old.pt", tmp_path / "hub", transforms=R.Split("w", ("a", "_")))
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize("rule", [R.Keep("head"), R.Fill("more")])
def test_rules_that_take_something_of_a_target_are_refused(tmp_path: Path, rule: Any) -> None:
    tc.save(tmp_path / "ours", _state())
    with pytest.raises(tc.MismatchError, match="expected rules that need no target"):
        tc.convert.convert(tmp_path / "ours", tmp_path / "new", transforms=rule)


def published_permutation(w: torch.Tensor, heads: int) -> torch.Tensor:
    """As convert_llama_weights_to_hf.py of transformers 4 has it."""
    rows, columns = w.shape
    return w.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3))
def test_the_rotary_rules_are_the_published_permutation_and_undo_it(heads: int, pairs: int, columns: int) -> None:
    w = torch.arange(2 * heads * pairs * columns).view(-1, columns)
    store, sizes = tc.MemoryStore(), {"heads": heads, "head_dim": 2 * pairs}
    tc.save(store, {"layers.7.wq": w, "layers.7.bias": w[:, 0].clone()})
    there = [
        *R.rotary_halves("layers.$L.wq", "model.layers.$L.q_proj", **sizes),
        *R.rotary_halves("layers.$L.bias", "layers.$L.bias", **sizes),
    ]
    found = tc.load(store, transforms=there)
    assert torch.equal(found["model.layers.7.q_proj"], published_permutation(w, heads))
    assert torch.equal(found["layers.7.bias"], published_permutation(w, heads)[:, 0])
    back = [*there, *R.rotary_pairs("model.layers.$L.q_proj", "layers.$L.wq", **sizes)]
    assert torch.equal(tc.load(store, transforms=back)["layers.7.wq"], w)
    undone = R.inverse(there[:2], {"layers.7.wq": tc.ArraySpec(tuple(w.shape), "int64")})
    assert torch.equal(tc.load(store, transforms=[*there[:2], *undone])["layers.7.wq"], w)


@pytest.mark.parametrize(("heads", "head_dim"), [(0, 8), (4, 7), (4, 0)])
def test_heads_that_have_no_pairs_are_refused(heads: int, head_dim: int) -> None:
    with pytest.raises(tc.TreeckptError, match="heads of an even length"):
        R.rotary_halves("q", "q", heads=heads, head_dim=head_dim)
