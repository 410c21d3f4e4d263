"""`install` puts treeckpt's storage where programs take DCP's by name, and `uninstall` takes it back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, _storage_utils, filesystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader as Reader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter as Writer
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import treeckpt as tc
import treeckpt.dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def installed() -> Iterator[None]:
    before = dcp.FileSystemWriter
    treeckpt.dcp.install(marker=True)
    try:
        yield
    finally:
        treeckpt.dcp.uninstall()
    assert dcp.FileSystemWriter is filesystem.FileSystemWriter is before


def test_dcp_saves_and_loads_with_treeckpt(installed: None, tmp_path: Path) -> None:
    path = tmp_path / "one"
    for options in ({"checkpoint_id": path}, {"storage_writer": dcp.FileSystemWriter(path, thread_count=4)}):
        dcp.save({"model": {"w": torch.ones(3)}, "n": 1}, **options)
        assert tc.load(path)["model"]["w"].tolist() == [1, 1, 1]
        assert (path / ".metadata").exists() and (path / "__0_0.distcp").exists()
    target = {"model": {"w": torch.zeros(3)}}
    dcp.load(target, storage_reader=filesystem.FileSystemReader(path))
    assert target["model"]["w"].tolist() == [1, 1, 1]


def test_tools_of_dcp_that_name_the_reader_read_treeckpts_format(installed: None, tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3)}, "n": [1, 2]}, checkpoint_id=tmp_path / "one")
    dcp_to_torch_save(tmp_path / "one", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt")
    assert found["model"]["w"].tolist() == [1, 1, 1] and found["n"] == [1, 2]


def test_options_that_would_change_the_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeckptError, match="extensions"):
        treeckpt.dcp.Writer(tmp_path, _extensions=[object()])


def bases(cls: Any) -> tuple[type, ...]:
    return cls.__bases__


class FileCheckingReader(FileSystemReader):
    """As in frameworks that check a file before they read of it."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        places = [self.storage_data[item.storage_index] for item in plan.items]
        assert all((Path(self.path) / place.relative_path).exists() for place in places)
        return super().read_data(plan, planner)


def test_all_names_that_this_module_has_imported_are_changed_and_told(caplog: pytest.LogCaptureFixture) -> None:
    before = Reader, Writer
    with caplog.at_level(logging.INFO, "treeckpt"):
        changed = treeckpt.dcp.install()
    try:
        assert changed[__name__] == ["FileCheckingReader", "FileSystemReader", "Reader", "Writer"]
        assert Writer is treeckpt.dcp.Writer and Reader is treeckpt.dcp.Reader is FileSystemReader
        [logged] = [record.getMessage() for record in caplog.records]
        assert f"{__name__}: FileCheckingReader, FileSystemReader, Reader, Writer" in logged
        assert treeckpt.dcp.install() == changed  # nothing that it could miss
    finally:
        treeckpt.dcp.uninstall()
    assert (Reader, Writer) == before and bases(FileCheckingReader) == (filesystem.FileSystemReader,)
    assert treeckpt.dcp.Writer not in vars(filesystem).values()


def test_storages_of_fsspec_and_derived_classes_save_and_load_with_treeckpt(installed: None, tmp_path: Path) -> None:
    url, target = f"file://{tmp_path}/one", {"w": torch.zeros(3), "n": 0}
    dcp.save({"w": torch.ones(3), "n": 1}, storage_writer=Writer(url, thread_count=2, sync_files=False))
    assert tc.load(tmp_path / "one")["n"] == 1
    for reader in (Reader(url), FileCheckingReader(tmp_path / "one")):
        target["w"].zero_()
        dcp.load(target, storage_reader=reader)
        assert target["w"].tolist() == [1, 1, 1] and target["n"] == 1


def test_what_fsspec_has_saved_still_loads(tmp_path: Path) -> None:
    url, target = f"memory://{tmp_path}/one", {"w": torch.zeros(3)}
    dcp.save({"w": torch.ones(3)}, storage_writer=Writer(url))
    treeckpt.dcp.install()
    try:
        dcp.load(target, storage_reader=Reader(url))
    finally:
        treeckpt.dcp.uninstall()
    assert target["w"].tolist() == [1, 1, 1]


def test_it_raises_where_dcp_has_the_storage_of_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherWriter(filesystem.FileSystemWriter):
        pass

    monkeypatch.setattr(_storage_utils, "FileSystemWriter", OtherWriter)
    before = dict(vars(filesystem))
    with pytest.raises(
        tc.TreeckptError, match=r"_storage_utils.FileSystemWriter: .* found .*OtherWriter.*Call install"
    ):
        treeckpt.dcp.install()
    assert dict(vars(filesystem)) == before and bases(OtherWriter) == (filesystem.FileSystemWriter,)
