"""Saves and loads through treeckpt.dcp log the events that DCP logs, in its logger; the logger `treeckpt` has all.

pytorch-dcp-docs, lines 394-399.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException

import treeckpt as tc
import treeckpt.dcp as dcp
from treeckpt.dcp.logger import _dcp_logger

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Kept(logging.Handler):
    """Keeps the messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(dict(record.msg))  # DCP changes the dict later


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    _dcp_logger.addHandler(handler)
    yield handler
    _dcp_logger.removeHandler(handler)


def calls(kept: Kept) -> list[tuple[str, str]]:
    """The events of whole calls, as (function, event); DCP has further ones of their steps."""
    found = [(message["func_name"], message["event"]) for message in kept.messages]
    kept.messages.clear()
    return [each for each in found if each[0] in ("save", "load", "async_save")]


@pytest.mark.parametrize("module", [torch_dcp, dcp], ids=["torch", "treeckpt"])
def test_calls_log_their_begin_and_end(module: Any, tmp_path: Path, kept: Kept) -> None:
    path, state = str(tmp_path / "one"), {"w": torch.ones(3)}
    module.save(state, checkpoint_id=path, no_dist=True)
    assert {message["checkpoint_id"] for message in kept.messages if message["func_name"] == "save"} == {path}
    assert calls(kept) == [("save", "start"), ("save", "end")]
    module.load(state, checkpoint_id=path, no_dist=True)
    assert calls(kept) == [("load", "start"), ("load", "end")]
    module.async_save(state, checkpoint_id=tmp_path / "two", no_dist=True).result()
    assert sorted(calls(kept)) == [(name, event) for name in ("async_save", "save") for event in ("end", "start")]


@pytest.mark.parametrize("module", [torch_dcp, dcp], ids=["torch", "treeckpt"])
def test_a_call_that_fails_logs_its_error(module: Any, tmp_path: Path, kept: Kept) -> None:
    module.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "one", no_dist=True)
    calls(kept)
    with pytest.raises(CheckpointException):
        module.load({"other": torch.ones(3)}, checkpoint_id=tmp_path / "one", no_dist=True)
    assert "Missing key in checkpoint state_dict: other" in kept.messages[-1]["error"]
    assert calls(kept) == [("load", "start"), ("load", "exception")]


class Broken(dcp.Writer):
    """A storage whose saves fail at their end."""

    def publish_markers(self, rank: int) -> None:
        raise tc.CheckpointError("marker", expected="a disk", found="none")


def test_a_background_save_that_fails_logs_its_error(tmp_path: Path, kept: Kept) -> None:
    path = tmp_path / "one"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    calls(kept)
    writer = dcp.Writer(path)
    future = dcp.async_save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    future.result()
    # the save may end before the call that has begun it
    assert sorted(calls(kept)) == [(name, event) for name in ("async_save", "save") for event in ("end", "start")]
    path.joinpath("index.json").unlink()
    for each in path.iterdir():
        each.unlink()
    path.rmdir()
    path.write_bytes(b"a file in the place of the directory")
    with pytest.raises(CheckpointException):
        dcp.async_save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True).result()
    assert calls(kept) == [("async_save", "start"), ("async_save", "exception")]
    with pytest.raises(CheckpointException, match="marker"):
        dcp.async_save({"w": torch.ones(3)}, storage_writer=Broken(tmp_path / "two"), no_dist=True).result()
    events = [("async_save", "end"), ("async_save", "start"), ("save", "exception"), ("save", "start")]
    assert sorted(calls(kept)) == events


def test_a_call_that_goes_through_dcp_logs_its_events_once(tmp_path: Path, kept: Kept) -> None:
    class Planner(torch_dcp.DefaultSavePlanner):
        pass

    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "one", planner=Planner(), no_dist=True)
    assert calls(kept) == [("save", "start"), ("save", "end")]


def test_the_logger_of_treeckpt_has_each_save_and_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "one"
    with caplog.at_level(logging.DEBUG, "treeckpt"):
        tc.save(path, {"w": torch.ones(3)})
        tc.save_async(path, {"w": torch.ones(3)}, overwrite=True).result()
        tc.load(path)
        tc.load_into(path, {"w": torch.ones(3)})
    found = [record.getMessage().splitlines()[0].partition("  ")[0] for record in caplog.records]
    begun, saved, loaded = f"saving to {path}, rank 0 of 1", f"saved {path}", f"loaded {path}"
    assert found == [begun, saved, begun, saved, loaded, loaded]
