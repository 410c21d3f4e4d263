"""A format from outside is read and written as those of this package are: the .npz files of numpy, and a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.world import on_ranks
from treeckpt._foreign import foreign_checkpoint
from treeckpt._io.storage import foreign_formats
from treeckpt.convert import _conversion, _register


def read_npz(files: Any) -> dict[str, np.ndarray]:
    with files.open(files.names[0]) as file, np.load(file) as arrays:
        return dict(arrays)


def write_npz(arrays: Any, file: Any) -> None:
    np.savez(file, **arrays)


def is_folder(names: frozenset[str]) -> bool:
    return "tree.json" in names


def read_folder(files: Any) -> Any:
    """One array a file, of float32, and values in tree.json."""
    with files.open("tree.json") as file:
        tree = json.load(file)
    for name, shape in tree.pop("shapes").items():
        if files.path is not None:
            tree[name] = np.memmap(files.path / f"{name}.raw", "float32", mode="r", shape=tuple(shape))
        else:
            with files.open(f"{name}.raw") as file:
                tree[name] = np.frombuffer(file.read(), "float32").reshape(shape)
    return tree


@pytest.fixture(autouse=True)
def formats() -> Iterator[None]:
    """The two formats, until the test ends."""
    tables: list[Any] = [foreign_formats._FORMATS, foreign_checkpoint.READERS, _register._registered]
    tables += [_conversion.WRITTEN]
    before = [dict(table) for table in tables]
    lists = (tc.convert.SOURCES, list(tc.convert.SOURCES)), (tc.convert.FORMATS, list(tc.convert.FORMATS))
    tc.convert.register("npz", suffix=".npz", read=read_npz, write=write_npz)
    tc.convert.register("folder", directory=is_folder, read=read_folder)
    yield
    for table, known in zip(tables, before, strict=True):
        table.clear()
        table.update(known)
    for names, known in lists:
        names[:] = known


TREE = {"w": np.arange(12, dtype="float32").reshape(3, 4), "b": np.ones(2)}


def test_files_of_numpy_are_loaded_restored_and_converted(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", **TREE)
    assert tc.convert.detect(tmp_path / "c.npz") == "npz"
    found = tc.load(tmp_path / "c.npz")
    assert all(np.array_equal(found[name], array) for name, array in TREE.items())
    assert tc.load(tmp_path / "c.npz", {"w": tc.ArraySpec((3, 4), "float32")}, strict="missing")["w"].shape == (3, 4)
    np.savez(tmp_path / "model.npz", weight=np.full((2, 4), 3, "float32"), bias=np.zeros(2, "float32"))
    model = torch.nn.Linear(4, 2)
    tc.training.restore(tmp_path / "model.npz", model, under="model")
    assert model.weight.tolist() == [[3.0] * 4] * 2
    report = tc.convert.convert(tmp_path / "c.npz", tmp_path / "new")
    assert report.source_format == "npz" and tc.load(tmp_path / "new")["b"].tolist() == [1, 1]


def test_checkpoints_are_written_as_files_of_numpy(tmp_path: Path) -> None:
    tree = {"model": {"w": torch.arange(6.0).reshape(2, 3), "h": torch.ones(2, dtype=torch.bfloat16)}, "step": 1}
    tc.save(tmp_path / "c", tree)
    with pytest.raises(tc.TreeError, match=r"step: .*expected what npz holds: arrays by name"):
        tc.convert.convert(tmp_path / "c", tmp_path / "c.npz")
    report = tc.convert.convert(tmp_path / "c", tmp_path / "c.npz", lossy=True)
    assert (report.format, report.leaves, report.files) == ("npz", 2, ("c.npz",))
    with np.load(tmp_path / "c.npz") as arrays:
        assert arrays["model.w"].tolist() == [[0, 1, 2], [3, 4, 5]] and set(arrays) == {"model.w", "model.h"}
    with pytest.raises(tc.CheckpointExists):
        tc.convert.convert(tmp_path / "c", tmp_path / "c.npz", lossy=True)
    tc.convert.convert(tmp_path / "c", tmp_path / "c.npz", select="model/w", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "c.npz"]


def test_ranks_write_a_file_together(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", TREE)
    done = on_ranks(2, lambda comm: tc.convert.convert(tmp_path / "c", tmp_path / "c.npz", comm=comm).written_nbytes)
    assert [one.value for one in done] == [64, 0]
    assert tc.load(tmp_path / "c.npz")["w"][2].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_directories_of_a_format_are_read_wherever_they_are(tmp_path: Path, place: str) -> None:
    files = {"tree.json": b'{"shapes": {"w": [3, 4]}, "step": 7}', "w.raw": TREE["w"].tobytes()}
    store: Any = tc.MemoryStore()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        store.publish(name, data, replace=False)
    found = tc.load(tmp_path if place == "disk" else store)
    assert found["step"] == 7 and np.array_equal(found["w"], TREE["w"])


def test_what_a_reader_or_writer_does_wrong_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(b"PK\3\4 no archive")
    with pytest.raises(tc.FormatError, match=r"bad\.npz: expected a checkpoint of format npz, found BadZipFile"):
        tc.load(tmp_path / "bad.npz")
    tc.convert.register("tensors", suffix=".tensors", read=lambda files: {"w": torch.ones(2)})
    (tmp_path / "a.tensors").touch()
    with pytest.raises(tc.FormatError, match=r"w: .*expected arrays of numpy from the reader of tensors"):
        tc.load(tmp_path / "a.tensors")
    tc.convert.register("none", suffix=".none", write=lambda arrays, file: None)
    tc.save(tmp_path / "c", TREE)
    with pytest.raises(tc.TreeError, match="expected the writer of none to write every array, found 2"):
        tc.convert.convert(tmp_path / "c", tmp_path / "c.none")
    assert not list(tmp_path.glob("*.none*"))


@pytest.mark.parametrize("suffix", [".pt", ".npz.old", "arrays"])
def test_a_destination_is_of_the_format_that_was_registered_last_for_the_end_of_its_name(
    tmp_path: Path, suffix: str
) -> None:
    tc.save(tmp_path / "c", TREE)
    tc.convert.register("other", suffix=suffix, read=read_npz, write=write_npz)
    assert tc.convert.convert(tmp_path / "c", tmp_path / f"a.b{suffix}").format == "other"
    assert tc.convert.detect(tmp_path / f"a.b{suffix}") == "other"
    assert tc.convert.convert(tmp_path / "c", tmp_path / "a.pth").format == "torch"


def test_a_dry_run_to_a_place_that_is_taken_is_refused_as_for_other_files(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", TREE)
    dry = tc.convert.convert(tmp_path / "c", tmp_path / "c.npz", dry_run=True)
    assert (dry.files, dry.written_nbytes) == (("c.npz",), 0) and not (tmp_path / "c.npz").exists()
    tc.convert.convert(tmp_path / "c", tmp_path / "c.npz")
    with pytest.raises(tc.CheckpointExists):
        tc.convert.convert(tmp_path / "c", tmp_path / "c.npz", dry_run=True)
    assert tc.convert.convert(tmp_path / "c", tmp_path / "c.npz", dry_run=True, overwrite=True).dry_run


def test_a_name_that_is_taken_is_refused_and_one_that_is_registered_again_is_not() -> None:
    tc.convert.register("npz", suffix=".npz", read=read_npz, write=write_npz)
    for name, options in (
        ("npz", {"suffix": ".npz", "read": read_folder}),
        ("torch", {"suffix": ".x", "read": read_npz}),
        ("treeckpt", {"suffix": ".x", "write": write_npz}),
        ("A b", {"suffix": ".x", "read": read_npz}),
        ("mine", {}),
        ("mine", {"read": read_npz}),
        ("mine", {"suffix": ".x", "write": "w"}),
    ):
        with pytest.raises(tc.TreeckptError, match="register: expected"):
            tc.convert.register(name, **options)
    assert set(tc.convert.SOURCES) > {"npz", "folder", "torch"} and "npz" in tc.convert.FORMATS
