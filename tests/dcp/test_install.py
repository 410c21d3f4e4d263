"""`install` puts treeckpt's storage where programs take DCP's by name, and `uninstall` takes it back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
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
        assert (path / ".metadata").exists()
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
