"""Files of other programs are read in place: the same trees as after a conversion, no scratch copy, errors as there."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import treeckpt as tc
from tests.helpers.hfai_parts import trained, write_parts
from tests.helpers.torch_storages import STORAGE_TREES, W, flip_in_file
from tests.helpers.training_trees import assert_same, training_tree
from tests.helpers.world import on_ranks
from treeckpt._cli.main import main

convert = tc.convert.convert
GOLDEN = Path(__file__).parents[1] / "golden"


def _torch(path: Path) -> Path:
    tree = training_tree()
    base = torch.randn(6, 7)
    tree |= {"whole": base, "columns": base[:, 2:5], "turned": base.t(), "steps": base.view(-1)[3::4]}
    tree |= {
        "alone": torch.randn(40, 50).t(),
        "rows": torch.randn(90, 9)[3:70:4],
        "numpy": np.arange(6.0).reshape(2, 3),
    }
    tree["channels"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tree["conjugate"] = torch.randn(4, dtype=torch.complex64).conj()
    tree["wide"] = torch.ones(3).expand(5, 3)
    torch.save(tree, path / "file.pt")
    return path / "file.pt"


def _safetensors(path: Path) -> Path:
    save_file({"a.w": W, "a.b": torch.ones(7).bfloat16(), "e": torch.empty(0, 3)}, path / "m.safetensors", {"by": "us"})
    return path / "m.safetensors"


def _hub(path: Path) -> Path:
    tc.save(path / "ours", {"a": {"w": W, "b": torch.ones(5)}, "c": torch.arange(9)})
    tc.convert.to_safetensors(path / "ours", path / "hub", max_shard_size="700KB")
    assert len(list((path / "hub").glob("*.safetensors"))) > 1
    return path / "hub"


def _dcp(path: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = {"model": {"w": W.clone(), "t": torch.randn(40, 50).t()}, "n": 5, "list": [torch.ones(2), "text"]}
        dcp.save(tree, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def _parts(path: Path) -> Path:
    model, optimizer = trained(0)
    write_parts(path / "parts", {"model": [model], "optimizer": [optimizer]}, {"epoch": 3}, 3)
    return path / "parts"


def _paddle(path: Path) -> Path:
    shutil.copytree(GOLDEN / "paddle" / "two", path / "paddle")
    return path / "paddle"


FORMATS: dict[str, Callable[[Path], Path]] = {
    "torch": _torch,
    "safetensors": _safetensors,
    "hub": _hub,
    "dcp": _dcp,
    "hfai": _parts,
    "paddle": _paddle,
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_tree_is_loaded_in_place_as_after_a_conversion(tmp_path: Path, name: str) -> None:
    source = FORMATS[name](tmp_path)
    convert(source, tmp_path / "converted")
    expected, index = tc.load(tmp_path / "converted"), tc.inspect(tmp_path / "converted")
    before = sorted(tmp_path.rglob("*"))
    for options in ({}, {"copy": True, "memory": 1 << 20}, {"mmap": True}, {"verify": False}):
        assert_same(tc.load(source, read=tc.ReadOptions(**options)), expected)
    here = tc.inspect(source)
    assert here.structure == index.structure and here.custom_metadata == index.custom_metadata
    specs = {path: (leaf.spec and (leaf.spec.shape, leaf.spec.dtype)) for path, [leaf] in index.by_path.items()}
    assert {path: (leaf.spec and (leaf.spec.shape, leaf.spec.dtype)) for path, [leaf] in here.by_path.items()} == specs
    target = tc.load(source, read=tc.ReadOptions(copy=True))
    arrays = [leaf for leaf in _tensors(target) if leaf.numel() and leaf.dtype.is_floating_point and leaf.is_leaf]
    with torch.no_grad():
        for tensor in arrays:
            tensor.zero_()
    for verify in (True, "first"):
        tc.load_into(source, target, read=tc.ReadOptions(verify=verify))
        assert_same(target, expected)
    assert main(["show", str(source)]) == 0 and main(["show", str(source), "--json"]) == 0
    for path in list(here.by_path)[:3]:
        assert main(["show", str(source), path, "--json"]) == 0
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"


def _tensors(tree: Any) -> list[torch.Tensor]:
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tree] if isinstance(tree, torch.Tensor) else [leaf for child in children for leaf in _tensors(child)]


def test_ties_and_views_in_a_file_stay_what_they_are(tmp_path: Path) -> None:
    back = tc.load(_torch(tmp_path))
    assert back["tie"].data_ptr() == back["model"]["0.weight"].data_ptr()
    assert back["columns"].data_ptr() == back["whole"].data_ptr() + 2 * 4


@pytest.mark.parametrize("name", ["torch", "safetensors", "hub", "dcp", "hfai"])
def test_ranks_read_their_parts_by_rules_and_layouts(tmp_path: Path, name: str) -> None:
    """Halves of rows under new names, in another dtype; each rank reads little more than its half."""
    source = FORMATS[name](tmp_path)
    path, whole = next((p, leaf) for p, leaf in _named(tc.load(source)) if leaf.ndim == 2)
    sizes = (whole.shape[0] // 2, whole.shape[0] - whole.shape[0] // 2)
    rules = [tc.rules.Split(path, ("first", "second"), 0, sizes)]

    def load(comm: Any) -> Any:
        key = ("first", "second")[comm.rank]
        part = torch.empty(sizes[comm.rank], whole.shape[1], dtype=torch.float64)
        tree = {key: part}
        report = tc.load_into(source, tree, transforms=rules, strict="missing", cast=True, comm=comm)
        assert report.read_nbytes <= part.numel() * 4 + (32 << 10), report
        small = whole.numel() < 2000  # a page of it is all of it
        assert small or report.unverified_nbytes == part.numel() * 4, "of a part there is no checksum"
        return part

    parts = [outcome.value for outcome in on_ranks(2, load)]
    assert torch.equal(torch.cat(parts), whole.double())


def _named(tree: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        return [(path, tree)] if tree.dtype == torch.float32 else []
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return [found for key, child in pairs for found in _named(child, f"{path}/{key}" if path else str(key))]


def test_several_sources_of_several_formats_win_over_one_another(tmp_path: Path) -> None:
    torch.save({"w": W, "b": torch.zeros(3)}, tmp_path / "base.pt")
    save_file({"b": torch.ones(3)}, tmp_path / "tuned.safetensors")
    found = tc.load([tmp_path / "base.pt", tmp_path / "tuned.safetensors"])
    assert torch.equal(found["w"], W) and torch.equal(found["b"], torch.ones(3))


# checksums ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", STORAGE_TREES)
def test_a_changed_bit_is_named_by_the_crc_of_what_was_read_whole(tmp_path: Path, name: str) -> None:
    torch.save(STORAGE_TREES[name], tmp_path / "file.pt")
    reports: list[tc.LoadReport] = []
    assert_same(tc.load(tmp_path / "file.pt", on_report=reports.append), STORAGE_TREES[name])
    assert not reports[0].unverified_nbytes
    flip_in_file(tmp_path / "file.pt", W)
    tc.load(tmp_path / "file.pt", select="n")
    with pytest.raises(
        tc.CorruptError, match=r"(a|model/[wv]): .*file\.pt: expected CRC-32 .* of the entry 'file/data/"
    ):
        tc.load(tmp_path / "file.pt")
    if name not in ("transposed", "parts"):  # what is no range of the file is compared in any case
        tc.load(tmp_path / "file.pt", read=tc.ReadOptions(verify=False))
    target = {"model": {key: torch.zeros_like(value) for key, value in STORAGE_TREES[name]["model"].items()}}
    with pytest.raises(tc.CorruptError, match="CRC-32"):
        tc.load_into(tmp_path / "file.pt", target, strict="missing", read=tc.ReadOptions(verify="first"))
    assert not any(tensor.any() for tensor in target["model"].values())


def test_a_report_says_what_was_compared_with_no_checksum(tmp_path: Path) -> None:
    reports: list[tc.LoadReport] = []
    tc.load(_safetensors(tmp_path), on_report=reports.append)
    tc.load(_dcp(tmp_path), on_report=reports.append)
    tc.load(tmp_path / "dcp", on_report=reports.append, read=tc.ReadOptions(verify=False))
    tc.save(tmp_path / "ours", {"w": W})
    tc.load(tmp_path / "ours", on_report=reports.append)
    flat, dcp, unverified, ours = reports
    assert flat.unverified_nbytes == flat.nbytes and "compared with no checksum" in str(flat)
    assert dcp.unverified_nbytes == ours.unverified_nbytes == 0 and "no checksum" not in str(dcp)
    assert unverified.unverified_nbytes == unverified.nbytes


# what cannot be read --------------------------------------------------------------------------------------------------
class _Settings:
    """An object that only its own code could make."""


def test_an_object_is_an_error_where_it_is_asked_for_and_no_other_place(tmp_path: Path) -> None:
    torch.save({"args": [_Settings(), 3], "f": len, "w": W}, tmp_path / "file.pt")
    with pytest.raises(tc.TreeError, match=r"args/0: .*_Settings.*exclude='args/0'"):
        tc.load(tmp_path / "file.pt")
    assert torch.equal(tc.load(tmp_path / "file.pt", select="w")["w"], W)
    assert tc.load(tmp_path / "file.pt", exclude=("args/0", "f"))["args"] == [..., 3]
    target = {"w": torch.zeros_like(W)}
    tc.load_into(tmp_path / "file.pt", target, strict="missing")
    assert torch.equal(target["w"], W)
    assert main(["show", str(tmp_path / "file.pt")]) == 0


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("hello, there")
    with pytest.raises(tc.CheckpointNotFound, match="Check the path"):
        tc.load(tmp_path / "text.pt")
    torch.save({"w": W}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(tc.CheckpointNotFound, match="bare pickle"):
        tc.load(tmp_path / "old.pt")
    _safetensors(tmp_path)
    data = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(data[:-9])
    with pytest.raises(tc.CorruptError, match=r"m\.safetensors"):
        tc.load(tmp_path / "m.safetensors")
    with pytest.raises(tc.CheckpointNotFound):
        tc.load(tmp_path / "missing.pt")


def test_what_needs_our_own_checksums_says_so(tmp_path: Path) -> None:
    source = _safetensors(tmp_path)
    for act in (tc.verify, tc.rebuild_index, lambda path: tc.verify(path, repair=True)):
        with pytest.raises(tc.FormatError, match=r"expected a checkpoint of treeckpt.*found a safetensors file"):
            act(source)
    with pytest.raises(tc.FormatError, match="expected a checkpoint of treeckpt"):
        tc.load(source, fallback=tc.Fallback(on_corrupt="skip"))


def test_a_tensor_that_shows_few_bytes_over_and_over_takes_no_memory(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 29)}, tmp_path / "file.pt")
    with pytest.raises(tc.CorruptError, match=r"2147483648 bytes of arrays"):
        tc.load(tmp_path / "file.pt")
    entry = {"dtype": "F32", "shape": [1 << 20], "data_offsets": [0, 4 << 20]}
    head = json.dumps({f"t{n}": entry for n in range(100)}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(4 << 20))
    with pytest.raises(tc.CorruptError, match="'t1' to begin at byte 4194304"):
        tc.load(tmp_path / "m.safetensors")


def test_memory_is_that_of_the_destination_and_of_buffers(tmp_path: Path) -> None:
    """A file of 80 MB into memory that is there: 8 MiB of buffers, whatever the format."""
    big = {"a": torch.zeros(40_000, 500), "b": torch.zeros(50, 10_000).t()}
    torch.save({"a": big["a"], "b": big["b"]}, tmp_path / "file.pt")
    save_file({"a": big["a"]}, tmp_path / "m.safetensors")
    for name, keys in (("m.safetensors", "a"), ("file.pt", "ab")):
        target = {key: big[key] for key in keys}
        before, peak, done = _resident(), [0], threading.Event()

        def watch(peak: list[int] = peak, done: threading.Event = done) -> None:
            while not done.wait(0.001):
                peak[0] = max(peak[0], _resident())

        thread = threading.Thread(target=watch)
        thread.start()
        tc.load_into(tmp_path / name, target, read=tc.ReadOptions(memory=8 << 20))
        done.set()
        thread.join()
        assert peak[0] - before < 40 << 20, name


def _resident() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024
