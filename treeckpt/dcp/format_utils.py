"""Checkpoints of DCP and of treeckpt from files of `torch.save`, and back: the names of
`torch.distributed.checkpoint.format_utils`.

    python -m treeckpt.dcp.format_utils dcp_to_torch DIRECTORY FILE      # or torch_to_dcp FILE DIRECTORY
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner as PlannerOfAll
from torch.distributed.checkpoint.format_utils import *  # pyright: ignore[reportWildcardImportFromLibrary]
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict as load_planned

from ._calls import save
from ._storage import DcpReader


def dcp_to_torch_save(dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]) -> None:
    """Writes all of a checkpoint, of treeckpt or of DCP, into a file of `torch.save`, whole in memory as DCP does.

    `treeckpt.convert.to_torch_file` streams it, and unpickles nothing.
    """
    state: dict[str, Any] = {}
    load_planned(state, storage_reader=DcpReader(dcp_checkpoint_dir), planner=PlannerOfAll(), no_dist=True)
    torch.save(state, torch_save_path)


def torch_save_to_dcp(torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]) -> None:
    """Saves the content of a file of `torch.save` as a checkpoint of treeckpt; unpickles it, as DCP does.

    `treeckpt.convert.to_treeckpt` streams it, and unpickles nothing.
    """
    save(torch.load(torch_save_path, weights_only=False), checkpoint_id=dcp_checkpoint_dir, no_dist=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Convert a checkpoint.")
    conversions = {"torch_to_dcp": torch_save_to_dcp, "dcp_to_torch": dcp_to_torch_save}
    parser.add_argument("mode", choices=conversions)
    parser.add_argument("src")
    parser.add_argument("dst")
    args = parser.parse_args()
    conversions[args.mode](args.src, args.dst)
