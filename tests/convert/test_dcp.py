"""Directories of torch.distributed.checkpoint, both ways, with torch's own reader and writer on the other side."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorProperties

import treeckpt as tc
from tests.helpers.training_trees import assert_same, training_tree

convert, to_dcp = tc.convert.convert, tc.convert.to_dcp
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


def blank(tree: Any) -> Any:
    """A tree to load into: the same tensors with other contents, and no values."""
    if isinstance(tree, dict):
        return {key: blank(child) for key, child in tree.items()}
    if isinstance(tree, list):
        return [blank(child) for child in tree]
    return torch.zeros(tree.shape, dtype=tree.dtype) if isinstance(tree, torch.Tensor) else None


def plain(tree: dict[str, Any]) -> dict[str, Any]:
    """What DCP holds of a tree: no parameters."""
    return tree | {"parameter": tree["parameter"].detach()}


def test_dcp_loads_what_we_write_bit_for_bit(tmp_path: Path) -> None:
    tree = training_tree()
    tc.save(tmp_path / "one", tree)
    report = to_dcp(tmp_path / "one", tmp_path / "dcp", max_shard_size="20kB")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 1 and not report.losses
    assert {"tie", "view", "parameter"} <= {finding.path for finding in report.notes}
    state = blank(plain(tree)) | {"values": [None] * 9, "torch": [None] * 3}
    state["optimizer"]["param_groups"][0] = dict.fromkeys(tree["optimizer"]["param_groups"][0])
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert_same(state, plain(tree))


def test_what_dcp_wrote_comes_in_bit_for_bit(tmp_path: Path) -> None:
    tree = plain(training_tree())
    dcp.save(tree, checkpoint_id=tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "one")
    back = tc.load(tmp_path / "one")
    state = back["optimizer"].pop("state")
    expected = tree["optimizer"].pop("state")
    assert_same({int(key): value for key, value in state.items()}, expected)  # DCP itself makes keys text
    assert list(back) == list(tree) or set(back) == set(tree)
    assert_same({key: back[key] for key in tree}, tree)


def test_there_and_back_through_files_of_torch(tmp_path: Path) -> None:
    torch.save(
        {"a": {"w": torch.arange(12.0).view(3, 4)}, "l": [torch.ones(2), {"x": 1}], "s": "text"}, tmp_path / "a.pt"
    )
    to_dcp(tmp_path / "a.pt", tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "theirs.pt")
    convert(tmp_path / "dcp", tmp_path / "ours.pt")
    original = torch.load(tmp_path / "a.pt")
    assert_same(torch.load(tmp_path / "ours.pt"), original)
    assert_same(torch.load(tmp_path / "theirs.pt"), original)


def test_chunks_are_cut_and_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeckpt.convert._torch_write.CHUNK_NBYTES", 100)
    tree = {"w": torch.arange(7 * 11, dtype=torch.float64).view(7, 11), "v": torch.arange(5.0)}
    tc.save(tmp_path / "one", tree)
    to_dcp(tmp_path / "one", tmp_path / "dcp")
    entries = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert len(entries["w"].chunks) == 7 and len(entries["v"].chunks) == 1  # type: ignore[union-attr]
    state = blank(tree)
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert_same(state, tree)
    convert(tmp_path / "dcp", tmp_path / "two")
    assert_same(tc.load(tmp_path / "two"), tree)


def test_what_changes_its_form_is_told_and_what_cannot_be_is_refused(tmp_path: Path) -> None:
    tc.save(tmp_path / "one", {1: {"w": torch.ones(2)}, "empty": {}})
    report = to_dcp(tmp_path / "one", tmp_path / "dcp", dry_run=True)
    assert {(f.path, f.becomes) for f in report.notes} == {("1", "text"), ("empty", "nothing")}
    tc.save(tmp_path / "list", [torch.ones(2)])
    with pytest.raises(tc.TreeError, match="a dict at the root"):
        to_dcp(tmp_path / "list", tmp_path / "dcp")
    tc.save(tmp_path / "twice", {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}})
    with pytest.raises(tc.TreeError, match=r"which is that of a\.b too"):
        to_dcp(tmp_path / "twice", tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()


def _saved(tmp_path: Path) -> Path:
    dcp.save({"w": torch.arange(6.0).view(2, 3), "step": 3}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def _change(path: Path, change: Any) -> None:
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


class Anything:
    """A class that is none of the metadata's."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: setattr(m, "state_dict_metadata", {"w": Anything()}),
            "TensorStorageMetadata, found .*Anything",
        ),
        (lambda m: setattr(m, "storage_data", {}), "expected the place of"),
        (lambda m: setattr(m, "planner_data", {"w": ("w", ()), "step": ("step",)}), "expected the path of"),
        (lambda m: setattr(m, "planner_data", {"w": ("l", 10**12), "step": ("step",)}), "a list's positions"),
        (lambda m: setattr(m, "planner_data", {"w": ("a",), "step": ("a", "b")}), "a leaf, above"),
        (lambda m: m.state_dict_metadata["w"].chunks.clear(), "each element once"),
        (lambda m: m.state_dict_metadata["w"].chunks.extend(m.state_dict_metadata["w"].chunks), "each element once"),
        (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([2, 1 << 40])), "each element once"),
        (lambda m: [setattr(i, "length", 1 << 50) for i in m.storage_data.values()], "range of"),
        (
            lambda m: [setattr(i, "relative_path", "../x") for i in m.storage_data.values()],
            "a file, an offset and a length",
        ),
        (lambda m: [setattr(i, "relative_path", "gone") for i in m.storage_data.values()], "expected a file"),
        (lambda m: [setattr(i, "transform_descriptors", ["zstd"]) for i in m.storage_data.values()], "as they are"),
    ],
)
def test_metadata_that_lies_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = _saved(tmp_path)
    _change(path, change)
    with pytest.raises(tc.CheckpointError, match=message):
        convert(path, tmp_path / "one")
    assert not list(tmp_path.glob("one/index.json"))


def test_too_few_properties_of_a_tensor_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _saved(tmp_path)
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (torch.float32,))
    _change(path, lambda metadata: None)
    with pytest.raises(tc.FormatError, match="expected a tensor's properties"):
        convert(path, tmp_path / "one")


def test_a_missing_or_short_file_is_named(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    data = path / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:1000])
    with pytest.raises(tc.CorruptError, match=r"__0_0\.distcp"):
        convert(path, tmp_path / "one")
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:100])
    with pytest.raises(tc.CorruptError, match="whole pickle"):
        convert(path, tmp_path / "one")


def _alike() -> dict[str, torch.Tensor]:
    """Tensors whose archives have one size: of other shapes, strides and dtypes among equal ones."""
    shapes = [(8, 8), (8, 8), (4, 16), (8, 8), (16, 4), (4, 16)]
    tensors = {f"w{n}": torch.randn(shape) + n for n, shape in enumerate(shapes)}
    return tensors | {"i": torch.arange(64, dtype=torch.int32).view(8, 8), "t": torch.randn(8, 8).t()}


def test_chunks_whose_archives_have_one_size_are_told_apart(tmp_path: Path) -> None:
    tensors = _alike()
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "one.pt")
    for found in (tc.load(tmp_path / "dcp"), torch.load(tmp_path / "one.pt")):
        assert_same({name: tensor.contiguous() for name, tensor in found.items()},
                    {name: tensor.contiguous() for name, tensor in tensors.items()})  # fmt: skip


@pytest.mark.parametrize("where", ["elements", "pickle"])
def test_a_changed_byte_in_one_of_many_archives_of_one_size_is_found(tmp_path: Path, where: str) -> None:
    tensors = {f"w{n}": torch.full((8, 8), float(n)) for n in range(1, 6)}
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp")
    [file] = (tmp_path / "dcp").glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.index(tensors["w4"].numpy().tobytes())
    if where == "pickle":
        at = data.rindex(b"_rebuild_tensor_v2", 0, at)
    data[at] ^= 1
    file.write_bytes(data)
    for call in (tc.load, lambda path: convert(path, tmp_path / "new")):
        with pytest.raises(tc.CorruptError, match="CRC-32"):
            call(tmp_path / "dcp")
