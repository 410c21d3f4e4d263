"""Imported first by each adapted test of PyTorch, in every process of it: puts the form under test in place of DCP.

The environment's DCP_FORM is "dcp" (nothing is changed), "treeckpt.dcp" (the functions are treeckpt's, as after
`import treeckpt.dcp as dcp`) or "storage" (DCP's functions on treeckpt's storage, as after `treeckpt.dcp.install()`).
"""

import multiprocessing
import os

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal import common_fsdp
from torch.testing._internal.common_distributed import MultiProcessTestCase


def _fork_processes(self):
    self._start_processes(multiprocessing.get_context("fork").Process)


MultiProcessTestCase._spawn_processes = _fork_processes  # importing torch takes each rank seconds

_fsdp = FullyShardedDataParallel.__init__


def _fsdp_on_cpu(self, *args, **kwargs):
    _fsdp(self, *args, **{"device_id": torch.device("cpu")} | kwargs)


FullyShardedDataParallel.__init__ = _fsdp_on_cpu  # by default it asks for an accelerator

common_fsdp.FSDPTest._run = classmethod(common_fsdp.FSDPTestMixin._run.__func__)  # asks for no GPU

FORM = os.environ.get("DCP_FORM", "dcp")

if FORM != "dcp":
    import treeckpt.dcp

    treeckpt.dcp.install()
if FORM == "treeckpt.dcp":
    # PyTorch's tests make different random data on each rank, of which DCP takes the first
    def _first_wins(function):
        def call(*args, **kwargs):
            return function(*args, on_conflict="rank0", **kwargs)

        return call

    for module, names in (
        (dcp, ("save", "async_save", "load")),
        (state_dict_saver, ("save", "async_save")),
        (state_dict_loader, ("load",)),
    ):
        for name in names:
            function = getattr(treeckpt.dcp, name)
            setattr(module, name, function if name == "load" else _first_wins(function))
