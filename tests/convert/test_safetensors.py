"""safetensors both ways, as the library and Hugging Face have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model

import treeckpt as tc
from tests.helpers.training_trees import assert_same, training_tree

convert, to_safetensors = tc.convert.convert, tc.convert.to_safetensors


def model_tree() -> dict[str, Any]:
    return training_tree()["model"]


def test_a_file_is_what_the_library_reads(tmp_path: Path) -> None:
    tree = model_tree()
    tree |= {
        "half": torch.randn(5).bfloat16(),
        "flags": torch.tensor([True]),
        "eight": torch.ones(3).to(torch.float8_e5m2),
    }
    tc.save(tmp_path / "one", {"model": tree, "step": 3})
    report = to_safetensors(tmp_path / "one", tmp_path / "model.safetensors", subtree="model")
    assert report.files == ("model.safetensors",) and not report.losses
    found = load_file(tmp_path / "model.safetensors")
    assert_same({name: found[name] for name in tree}, tree)
    convert(tmp_path / "model.safetensors", tmp_path / "two")
    back = tc.load(tmp_path / "two")
    assert_same({name: back[name] for name in tree}, tree)


def test_what_the_library_wrote_comes_in_with_its_metadata_and_goes_out_again(tmp_path: Path) -> None:
    tree = model_tree()
    save_file(tree, tmp_path / "in.safetensors", {"format": "pt", "licence": "none"})
    convert(tmp_path / "in.safetensors", tmp_path / "one")
    assert tc.inspect(tmp_path / "one").metadata == {"licence": "none"}
    to_safetensors(tmp_path / "one", tmp_path / "out.safetensors")
    size = int.from_bytes((tmp_path / "out.safetensors").read_bytes()[:8], "little")
    header = json.loads((tmp_path / "out.safetensors").read_bytes()[8 : 8 + size])
    assert header["__metadata__"] == {"format": "pt", "licence": "none"}
    assert_same(load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "in.safetensors"))


class Tied(torch.nn.Module):
    """An embedding and a head that are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_written_once_as_save_model_does(tmp_path: Path) -> None:
    model = Tied()
    tc.save(tmp_path / "one", model.state_dict())
    report = to_safetensors(tmp_path / "one", tmp_path / "ours.safetensors")
    assert len(load_file(tmp_path / "ours.safetensors")) == 1
    text = "head.weight: a tie of embedding.weight becomes a name in the file's metadata, no tensor"
    assert text in map(str, report.notes) and not report.losses
    other = Tied()
    load_model(other, tmp_path / "ours.safetensors")
    assert torch.equal(other.head.weight, model.head.weight)
    save_model(model, str(tmp_path / "theirs.safetensors"))
    for name in ("ours", "theirs"):
        convert(tmp_path / f"{name}.safetensors", tmp_path / name)
        back = tc.load(tmp_path / name)
        assert sorted(back) == ["embedding.weight", "head.weight"]
        assert back["head.weight"].data_ptr() == back["embedding.weight"].data_ptr()


def test_shards_by_size_with_an_index_in_dtypes_of_choice(tmp_path: Path) -> None:
    tree = model_tree() | {"tie": None, "ids": torch.arange(10)}
    tree["tie"] = tree["0.weight"]
    tc.save(tmp_path / "one", tree)
    report = to_safetensors(tmp_path / "one", tmp_path / "hub", dtype="bfloat16", max_shard_size="2.5kB")
    shards = sorted((tmp_path / "hub").glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert set(report.files) == {path.name for path in (tmp_path / "hub").iterdir()}
    index = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for path in shards:
        tensors = load_file(path)
        assert all(index["weight_map"][name] == path.name for name in tensors)
        found |= tensors
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert sorted(found) == sorted(index["weight_map"]) and "tie" not in found
    for name, tensor in found.items():
        assert torch.equal(tensor, tree[name] if name == "ids" else tree[name].bfloat16()), name
    convert(tmp_path / "hub", tmp_path / "two")
    back = tc.load(tmp_path / "two")
    assert torch.equal(back["tie"], tree["tie"].bfloat16()) and sorted(back) == sorted(tree)


def test_a_shard_that_is_missing_is_named_also_without_an_index(tmp_path: Path) -> None:
    tc.save(tmp_path / "one", model_tree())
    to_safetensors(tmp_path / "one", tmp_path / "hub", max_shard_size="2.5kB")
    first, *_, last = sorted((tmp_path / "hub").glob("*.safetensors"))
    (tmp_path / "hub" / "model.safetensors.index.json").unlink()
    assert sorted(tc.load(tmp_path / "hub")) == sorted(model_tree())
    last.unlink()
    for call in (tc.load, tc.inspect, lambda path: convert(path, tmp_path / "two")):
        with pytest.raises(tc.CorruptError, match=rf"{last.name}: expected \d files"):
            call(tmp_path / "hub")
    assert tc.load(first), "one file by itself is what it is"


def test_a_cast_never_makes_infinity(tmp_path: Path) -> None:
    tc.save(tmp_path / "one", {"w": torch.tensor([1e5, float("inf")]), "v": torch.tensor([float("inf"), 3.0])})
    with pytest.raises(tc.TreeckptError, match=r"w: expected values up to 65504.*found 100000"):
        to_safetensors(tmp_path / "one", tmp_path / "m.safetensors", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    to_safetensors(tmp_path / "one", tmp_path / "m.safetensors", dtype="float16", exclude="w")
    assert load_file(tmp_path / "m.safetensors")["v"].tolist() == [float("inf"), 3.0]


def test_what_it_cannot_hold_is_said_before_anything_is_written(tmp_path: Path) -> None:
    tree = training_tree()
    tc.save(tmp_path / "one", tree)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(tc.TreeError, match=r"a value, .* more leaves like it.*lossy=True"):
        to_safetensors(tmp_path / "one", tmp_path / "hub")
    with pytest.raises(tc.TreeError, match=r"^complex: .*complex128"):
        to_safetensors(tmp_path / "one", tmp_path / "hub", select="complex")
    report = to_safetensors(tmp_path / "one", tmp_path / "hub", dry_run=True)
    assert {"step", "complex", "values/3", "torch/1", "pair/1"} <= {finding.path for finding in report.losses}
    assert sorted(tmp_path.iterdir()) == before
    to_safetensors(tmp_path / "one", tmp_path / "hub", lossy=True)
    found = load_file(tmp_path / "hub" / "model.safetensors")
    assert torch.equal(found["optimizer.state.0.exp_avg"], tree["optimizer"]["state"][0]["exp_avg"])
    assert torch.equal(found["view"], tree["view"]) and "complex" not in found


def test_a_tied_tensor_of_a_dtype_that_safetensors_lacks_is_lost_under_each_name(tmp_path: Path) -> None:
    lost = torch.ones(3, dtype=torch.complex128)
    torch.save({"a": lost, "b": lost, "w": torch.ones(2)}, tmp_path / "in.pt")
    report = to_safetensors(tmp_path / "in.pt", tmp_path / "out.safetensors", lossy=True)
    assert [finding.path for finding in report.losses] == ["a", "b"] and report.leaves == 1
    assert list(load_file(tmp_path / "out.safetensors")) == ["w"]


def test_names_that_would_be_one_are_refused(tmp_path: Path) -> None:
    tc.save(tmp_path / "one", {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}})
    with pytest.raises(tc.TreeError, match=r"a/b.*which is that of a\.b too"):
        to_safetensors(tmp_path / "one", tmp_path / "hub")
    tc.save(tmp_path / "none", {"step": 3})
    with pytest.raises(tc.TreeError, match="expected arrays to write"):
        to_safetensors(tmp_path / "none", tmp_path / "hub", lossy=True)


def _file(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((1 << 40).to_bytes(8, "little") + b"{" * 50, "header of at most"),
        ((1 << 20).to_bytes(8, "little") + b"{}", "range of 1048576 bytes"),
        (_file(b"{]"), "safetensors file"),
        (_file({"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}), "range of"),
        (_file({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, bytes(8)), "8 bytes for shape"),
        (_file({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}, bytes(8)), "for shape"),
        (_file({"w": {"dtype": "Q9", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "not known"),
        (_file({"w": 3}), "safetensors file"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(tc.CheckpointError, match=message):
        convert(tmp_path / "m.safetensors", tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    save_file({"w": torch.ones(2)}, hub / "a.safetensors")
    save_file({"w": torch.ones(2)}, hub / "b.safetensors")
    with pytest.raises(tc.FormatError, match="each tensor once"):
        convert(hub, tmp_path / "one")
    for places, message in (
        ({"w": "a.safetensors", "v": "a.safetensors"}, "the tensor 'v'"),
        ({"w": "c.safetensors"}, "no such file"),
        ({"w": "../a.safetensors"}, "beside the index"),
    ):
        (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        with pytest.raises(tc.CheckpointError, match=message):
            convert(hub, tmp_path / "one")
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    convert(hub, tmp_path / "one")
    assert torch.equal(tc.load(tmp_path / "one")["w"], torch.ones(2))
