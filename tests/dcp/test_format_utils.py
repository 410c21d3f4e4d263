"""`treeckpt.dcp.format_utils`: files of torch.save from checkpoints and back, without `install`.

pytorch-dcp-docs, lines 349-365.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import format_utils as of_torch

import treeckpt as tc
import treeckpt.dcp as dcp
from treeckpt.dcp.format_utils import dcp_to_torch_save, torch_save_to_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Setting:
    """A value that is pickled."""

    def __init__(self, size: int) -> None:
        self.size = size


def state() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "list": [1, 2], "setting": Setting(3)}


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert list(map(str, found)) == list(map(str, expected))
        for one, other in zip(found.values(), expected.values(), strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected) and found.dtype == expected.dtype
    elif isinstance(expected, Setting):
        assert found.size == expected.size
    else:
        assert found == expected


@pytest.mark.parametrize("module", [torch_dcp, dcp], ids=["torch", "treeckpt"])
def test_a_checkpoint_becomes_a_file_of_torch_save_as_dcp_makes_it(module: Any, tmp_path: Path) -> None:
    torch_dcp.save(saved := state(), checkpoint_id=tmp_path / "of torch", no_dist=True)
    of_torch.dcp_to_torch_save(tmp_path / "of torch", tmp_path / "expected.pt")
    module.save(saved, checkpoint_id=tmp_path / "one", no_dist=True)
    dcp_to_torch_save(tmp_path / "one", tmp_path / "one.pt")
    expected = torch.load(tmp_path / "expected.pt", weights_only=False)
    assert_same(torch.load(tmp_path / "one.pt", weights_only=False), expected)


def test_a_file_of_torch_save_becomes_a_checkpoint(tmp_path: Path) -> None:
    torch.save(saved := state(), tmp_path / "one.pt")
    torch_save_to_dcp(tmp_path / "one.pt", tmp_path / "one")
    assert_same(tc.load(tmp_path / "one", allow_pickle=True), saved)


def test_the_module_is_a_program_as_that_of_torch_is(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "one", no_dist=True)
    program = [sys.executable, "-W", "ignore", "-m", "treeckpt.dcp.format_utils", "dcp_to_torch"]
    subprocess.run([*program, tmp_path / "one", tmp_path / "one.pt"], check=True)
    assert torch.load(tmp_path / "one.pt")["w"].tolist() == [1, 1, 1]


def test_the_older_calls_take_the_storages(tmp_path: Path) -> None:
    """pytorch-dcp-docs, lines 101 and 114: `save_state_dict` and `load_state_dict`, which torch calls deprecated."""
    with pytest.warns(FutureWarning):
        dcp.state_dict_saver.save_state_dict({"w": torch.ones(3)}, dcp.Writer(tmp_path / "one"), no_dist=True)
    target = {"w": torch.zeros(3)}
    with pytest.warns(FutureWarning):
        dcp.state_dict_loader.load_state_dict(target, dcp.Reader(tmp_path / "one"), no_dist=True)
    assert target["w"].tolist() == [1, 1, 1]
