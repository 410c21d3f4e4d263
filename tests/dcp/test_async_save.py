"""`treeckpt.dcp.async_save`: futures, both kinds of writer, asynchronous stagers, and failures."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import treeckpt as tc
import treeckpt.dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("kind", AsyncCheckpointerType)
def test_the_future_ends_with_the_save(kind: AsyncCheckpointerType, tmp_path: Path) -> None:
    state = {"a": torch.ones(100), "n": 3}
    future = treeckpt.dcp.async_save(state, checkpoint_id=tmp_path / "one", async_checkpointer_type=kind)
    assert isinstance(future, concurrent.futures.Future)
    state["a"].zero_()  # it is copied
    assert list(future.result().state_dict_metadata) == ["a", "n"]
    assert tc.load(tmp_path / "one")["a"].sum() == 100


def test_the_storage_serves_a_background_save_of_dcp(tmp_path: Path) -> None:
    future = dcp.async_save({"a": torch.ones(100), "n": 3}, storage_writer=treeckpt.dcp.Writer(tmp_path / "one"))
    future.result()
    assert tc.load(tmp_path / "one")["a"].sum() == 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_storage_serves_a_process_of_dcp(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        writer = treeckpt.dcp.Writer(tmp_path / "one")
        state, kind = {"a": torch.ones(100), "n": 3}, AsyncCheckpointerType.PROCESS
        dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind).result()
    finally:
        dist.destroy_process_group()
    assert tc.load(tmp_path / "one")["a"].sum() == 100


def test_a_stager_that_stages_asynchronously_gives_both_futures(tmp_path: Path) -> None:
    stager = DefaultStager(StagingOptions(False, False, True, False))
    try:
        response = treeckpt.dcp.async_save({"a": torch.ones(9)}, checkpoint_id=tmp_path / "one", async_stager=stager)
    finally:
        stager.close()
    response.staging_completion.result()
    response.upload_completion.result()
    assert tc.load(tmp_path / "one")["a"].sum() == 9


class OwnStager:
    """A stager that a program has written itself, by the protocol `AsyncStager`."""

    should_synchronize_after_execute = True

    def __init__(self) -> None:
        self.staged: list[object] = []

    def stage(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.staged.append(state_dict)
        return {name: tensor.clone() for name, tensor in state_dict.items()}

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("make_stager", [BlockingAsyncStager, OwnStager])
def test_stagers_of_dcp_and_of_a_program_are_taken(make_stager: Any, tmp_path: Path) -> None:
    """pytorch-dcp-docs, lines 124-137."""
    state, stager = {"a": torch.ones(100)}, make_stager()
    future = treeckpt.dcp.async_save(state, checkpoint_id=tmp_path / "one", async_stager=stager)
    state["a"].zero_()
    future.result()
    assert tc.load(tmp_path / "one")["a"].sum() == 100
    assert not isinstance(stager, OwnStager) or stager.staged == [state]


def test_a_failure_in_the_background_is_the_futures(tmp_path: Path) -> None:
    path = tmp_path / "one"
    state = {"a": torch.ones(1 << 20)}
    future = treeckpt.dcp.async_save(state, checkpoint_id=path, storage_writer=_Broken(path))
    with pytest.raises(CheckpointException, match="marker"):
        future.result()
    treeckpt.dcp.async_save(state, checkpoint_id=path).result()  # it does not poison the next one


class _Broken(treeckpt.dcp.Writer):
    def publish_markers(self, rank: int) -> None:
        raise tc.CheckpointError("marker", expected="a disk", found="none")
