"""`install` puts treeckpt's storage where programs take DCP's by name, and `uninstall` takes it back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
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


def test_overwrite_is_taken_from_its_place_among_dcps_arguments(installed: None, tmp_path: Path) -> None:
    dcp.save({"n": 1}, checkpoint_id=tmp_path)
    writer = dcp.FileSystemWriter(tmp_path, True, True, 1, 10_000_000, False, False)  # noqa: FBT003
    with pytest.raises(CheckpointException, match="already exists"):
        dcp.save({"n": 2}, storage_writer=writer)
    assert tc.load(tmp_path) == {"n": 1}


@pytest.mark.parametrize(
    ("storage", "misspelt"), [(treeckpt.dcp.Writer, "overwrit"), (treeckpt.dcp.Reader, "allow_pickles")]
)
def test_an_argument_that_dcps_storage_does_not_have_is_refused(storage: Any, misspelt: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=misspelt):
        storage(tmp_path, **{misspelt: False})
