"""safetensors both ways, as the library and Hugging Face have them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
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


def _of(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


_ONE = json.dumps(_of("F32", [1], 0, 4)).encode()
FILES = {
    "two 4-bit values a byte": _file({"w": _of("F4", [3, 4], 0, 6)}, bytes(range(6))),
    "an odd number of 4-bit values": _file({"w": _of("F4", [2, 3], 0, 3)}, bytes(3)),
    "half a byte": _file({"w": _of("F4", [], 0, 1)}, bytes(1)),
    **{kind: _file({"w": _of(kind, [4], 0, 4)}, b"8<@H") for kind in ("F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0")},
    "6-bit values": _file({"w": _of("F6_E2M3", [4], 0, 3)}, bytes(3)),
    "a name twice": _file(b'{"w": %s, "w": %s}' % (_ONE, json.dumps(_of("F32", [1], 4, 8)).encode()), bytes(8)),
    "a name twice for the same bytes": _file(b'{"w": %s, "w": %s}' % (_ONE, _ONE), bytes(4)),
    "metadata twice": _file(b'{"__metadata__": {"a": "1"}, "w": %s, "__metadata__": {"a": "2"}}' % _ONE, bytes(4)),
    "a key of metadata twice": _file(b'{"__metadata__": {"a": "1", "a": "2"}, "w": %s}' % _ONE, bytes(4)),
    "a field of a tensor twice": _file(b'{"w": %s}' % _ONE.replace(b"{", b'{"dtype": "I32", '), bytes(4)),
    "a field of a tensor twice, with metadata": _file(
        b'{"__metadata__": {"a": "1"}, "w": %s}' % _ONE.replace(b"{", b'{"shape": [1], '), bytes(4)
    ),
    "metadata of the names of fields": _file(
        {"__metadata__": {"dtype": "1", "shape": "dtype"}, "w": _of("F32", [1], 0, 4)}, bytes(4)
    ),
    "a tensor that is no object": _file(b'{"w": 1, "v": ["dtype", "dtype", "dtype"]}', bytes(4)),
    "metadata about itself": _file({"__metadata__": {"__metadata__": "1"}, "w": _of("F32", [1], 0, 4)}, bytes(4)),
    "no metadata": _file({"__metadata__": None, "w": _of("F32", [1], 0, 4)}, bytes(4)),
    "a tensor called __metadata__": _file({"__metadata__": _of("F32", [1], 0, 4)}, bytes(4)),
    "metadata that is a tensor's name": _file({"__metadata__": {"best": "w"}, "w": _of("F32", [1], 0, 4)}, bytes(4)),
    "tensors that overlap": _file({"a": _of("F32", [2], 0, 8), "b": _of("F32", [2], 4, 12)}, bytes(12)),
    "two tensors of the same bytes": _file({"a": _of("F32", [2], 0, 8), "b": _of("F32", [2], 0, 8)}, bytes(8)),
    "a gap": _file({"a": _of("F32", [1], 0, 4), "b": _of("F32", [1], 8, 12)}, bytes(12)),
    "bytes before the first": _file({"a": _of("F32", [1], 4, 8)}, bytes(8)),
    "bytes behind the last": _file({"a": _of("F32", [1], 0, 4)}, bytes(8)),
    "bytes without a tensor": _file({}, bytes(3)),
    "no tensor": _file({}),
    "empty tensors between others": _file(
        {"a": _of("F32", [0], 0, 0), "b": _of("F32", [1], 0, 4), "c": _of("F32", [0], 4, 4)}, bytes(4)
    ),
    "an empty tensor inside another": _file({"b": _of("F32", [2], 0, 8), "c": _of("F32", [0], 4, 4)}, bytes(8)),
    "any order": _file({"b": _of("F32", [1], 4, 8), "a": _of("F32", [1], 0, 4)}, bytes(range(8))),
    "spaces before the header": _file(b'  {"w": %s}' % _ONE, bytes(4)),
    "another field": _file(b'{"w": %s}' % _ONE.replace(b"{", b'{"x": 1, '), bytes(4)),
    "less than a length": bytes(3),
    "a header past the limit": (100_000_001).to_bytes(8, "little") + b"{}",
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_as_the_library_reads_it_and_refused_where_it_refuses(tmp_path: Path, name: str) -> None:
    place = tmp_path / "m.safetensors"
    place.write_bytes(FILES[name])
    try:
        expected = load_file(place)
    except SafetensorError:
        with pytest.raises(tc.CheckpointError, match=r"m\.safetensors: expected"):
            tc.load(place)
        return
    found = tc.load(place)
    assert sorted(found) == sorted(expected)
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8))
    with safe_open(place, "pt") as file:
        assert tc.inspect(place).metadata == (file.metadata() or {})


def test_all_dtypes_that_torch_and_the_library_have_are_written_as_the_library_writes_them(tmp_path: Path) -> None:
    kinds = ("float4_e2m1fn_x2", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    tree = {kind: torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(getattr(torch, kind)) for kind in kinds}
    tree |= {kind: torch.ones(3, dtype=getattr(torch, kind)) for kind in ("uint16", "uint32", "uint64", "complex64")}
    tc.save(tmp_path / "one", tree)
    to_safetensors(tmp_path / "one", tmp_path / "ours.safetensors")
    save_file(tree, tmp_path / "theirs.safetensors")
    for name in ("ours", "theirs"):
        found, read = load_file(tmp_path / f"{name}.safetensors"), tc.load(tmp_path / f"{name}.safetensors")
        for kind, tensor in tree.items():
            for back in (found[kind], read[kind]):
                assert back.dtype == tensor.dtype and torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    scalar = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(())
    tc.save(tmp_path / "two", {"half": scalar})
    with pytest.raises(tc.TreeError, match=r"half: .*float4_e2m1fn_x2 without a dimension"):
        to_safetensors(tmp_path / "two", tmp_path / "two.safetensors")


def test_an_array_under_the_name_of_the_files_own_metadata_is_refused(tmp_path: Path) -> None:
    """The library writes such a file, which nobody can read."""
    tc.save(
        tmp_path / "one", {"__metadata__": torch.ones(2), "w": torch.ones(3), "inner": {"__metadata__": torch.ones(1)}}
    )
    with pytest.raises(tc.TreeError, match=r"__metadata__: .* a name that the file has for its own metadata"):
        to_safetensors(tmp_path / "one", tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()
    to_safetensors(tmp_path / "one", tmp_path / "m.safetensors", lossy=True)
    assert sorted(load_file(tmp_path / "m.safetensors")) == ["inner.__metadata__", "w"]


def test_a_header_that_no_reader_takes_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tc.save(tmp_path / "one", {"w" * 50: torch.ones(2)}, custom_metadata={"a": "x" * 100_000_000})
    with pytest.raises(tc.TreeError, match=r"at most 100000000 bytes in a file, .*found 1000\d+ bytes"):
        to_safetensors(tmp_path / "one", tmp_path / "hub")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_ties_of_any_names_come_back_and_other_metadata_stays_what_it_is(tmp_path: Path) -> None:
    w, v = torch.ones(3), torch.zeros(2)
    about = {"best": "w", "last.epoch": "block.v", "format": "mine", "note.v": "w"}
    tc.save(tmp_path / "one", {"w": w, "tied": w, "block": {"v": v, "again": v}}, custom_metadata=about | {"steps": 3})
    report = to_safetensors(tmp_path / "one", tmp_path / "m.safetensors")
    assert [note.path for note in report.notes if "metadata becomes" in str(note)] == ["format", "steps"]
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        kept = file.metadata()
        assert sorted(file.keys()) == ["block.v", "w"] and kept.pop("format") == "pt"
    assert sorted(kept) == ["best", "last.epoch", "note.v", "treeckpt.ties"]
    back = tc.load(tmp_path / "m.safetensors")
    assert sorted(back) == ["block.again", "block.v", "tied", "w"]
    assert (
        back["tied"].data_ptr() == back["w"].data_ptr() and back["block.again"].data_ptr() == back["block.v"].data_ptr()
    )
    assert tc.inspect(tmp_path / "m.safetensors").metadata == {
        key: about[key] for key in ("best", "last.epoch", "note.v")
    }
    for ties in ("no JSON", '{"x": "none"}', '{"w": "v"}', "[]"):
        save_file({"w": w, "v": v}, tmp_path / "bad.safetensors", {"treeckpt.ties": ties})
        with pytest.raises(tc.FormatError, match="a safetensors file"):
            tc.load(tmp_path / "bad.safetensors")


def test_a_directory_gives_what_transformers_loads_and_the_log_names_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`from_pretrained` takes `model.safetensors` where there is one, before any index."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    for number in (1, 2):
        save_file({f"old{number}": torch.ones(2)}, tmp_path / f"model-{number:05d}-of-00002.safetensors")
    places = {f"old{number}": f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    beside = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    with caplog.at_level(logging.WARNING, "treeckpt"):
        assert list(tc.load(tmp_path)) == ["w"]
    assert all(name in caplog.text for name in beside)
    report = convert(tmp_path, tmp_path / "new", dry_run=True)
    assert [note.path for note in report.notes if "no part" in note.becomes] == beside
    for stale in ("{", json.dumps({"weight_map": {"gone": "model.safetensors"}})):
        index.write_text(stale)
        assert list(tc.load(tmp_path)) == ["w"] and index.name in caplog.messages[-1]
        caplog.clear()
    index.unlink()
    assert list(tc.load(tmp_path)) == ["w"]
    (tmp_path / "model.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": places}))
    assert sorted(tc.load(tmp_path)) == ["old1", "old2"]
