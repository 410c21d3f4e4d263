"""treeckpt: saves any tree of training state from any number of ranks, and loads it into any other layout.

    import treeckpt as tc

    tc.save("run/step_00000100", {"model": model.state_dict(), "step": 100})
    state = tc.load("run/step_00000100")

Importing it, reading an index and the command line import no torch.

`make docs` renders these pages: `treeckpt.training`, `treeckpt.convert`, `treeckpt.dcp`, `treeckpt.trees`, load rules
(`treeckpt.rules`), retention policies (`treeckpt.policy`), names of the hub
(`treeckpt.integrations.transformers`), errors (`treeckpt.errors`), and the format of files (`treeckpt._core.format`).

The examples in docstrings are run by the tests, each in an empty directory after these lines:

    >>> import numpy as np
    >>> import torch
    >>> import treeckpt as tc
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> report = tc.save("run/step_00000100", {"model": model.state_dict(), "step": 100})

The package, from top to bottom; imports only go down, and each package says in its first lines where to start. Names
without an underscore are public, with what stands in their `__all__`:

    _cli  _bench  demo  _report         commands, benchmark, example job, HTML reports
    dcp  convert  integrations          the interface of torch.distributed.checkpoint | other formats | other libraries
    _runs  training  trees              Manager and retention; models and optimizers as trees; operations on trees
    testing                             the suite that every store passes, for stores of one's own
    _api  stores                        save, load, inspect, exists, verify and others | stores of files
    _saving | _loading                  tree to committed checkpoint | bytes to tree, verify, repair
    rules  _foreign                     load rules | files of other programs, read in place
    _arrays | _io                       an adapter for each array library | comm (ranks), storage (files, objects)
    reports                             what calls return
    _inspect  policy                    outlines, differences, statistics, timings, retention as pure functions
    _core                               pure data: tree, sharding, planning, format
    errors | _threads                   all exceptions | threads, and work without them
"""

import importlib
import importlib.metadata
from typing import Any

from . import policy, rules, trees
from ._api import abstract, load, load_abstract, load_async, load_into, prewarm, save, save_async
from ._arrays.sharded import Sharded
from ._arrays.typed_leaves import TreeLeaf, plan_writes, tree_flatten, tree_unflatten
from ._core.format.records import Index
from ._core.public_names import publish
from ._core.sharding.region import Region
from ._core.tree.containers import FromRank, PerRank
from ._core.tree.keyed_table import KeyedTable
from ._core.tree.paths import path_keys, path_text
from ._core.tree.spec import ArraySpec
from ._io.comm.comm import comm
from ._io.storage.local_store import LocalStore
from ._io.storage.object_store import ObjectRun, ObjectStore
from ._io.storage.store import MemoryStore
from ._loading.background import PendingLoad
from ._loading.options import Fallback, ReadOptions
from ._loading.overlay import Bank, From
from ._loading.run_load import exists, inspect, read_file, rebuild_index, verify
from ._runs.manager import Manager
from ._runs.removal import delete
from ._runs.restore import OpenedStep
from ._saving.options import BackgroundOptions
from ._saving.session import Pending
from .errors import (
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    CorruptError,
    FormatError,
    LayoutError,
    MismatchError,
    RankError,
    StoreError,
    TreeckptError,
    TreeError,
)
from .reports import LoadReport, SaveReport, VerifyReport

__all__ = [
    "ArraySpec",
    "BackgroundOptions",
    "Bank",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointNotFound",
    "CorruptError",
    "Fallback",
    "FormatError",
    "From",
    "FromRank",
    "Index",
    "KeyedTable",
    "LayoutError",
    "LoadReport",
    "LocalStore",
    "Manager",
    "MemoryStore",
    "MismatchError",
    "ObjectRun",
    "ObjectStore",
    "OpenedStep",
    "Pending",
    "PendingLoad",
    "PerRank",
    "RankError",
    "ReadOptions",
    "Region",
    "SaveReport",
    "Sharded",
    "StoreError",
    "TreeError",
    "TreeLeaf",
    "TreeckptError",
    "VerifyReport",
    "abstract",
    "comm",
    "delete",
    "exists",
    "inspect",
    "load",
    "load_abstract",
    "load_async",
    "load_into",
    "path_keys",
    "path_text",
    "plan_writes",
    "policy",
    "prewarm",
    "read_file",
    "rebuild_index",
    "rules",
    "save",
    "save_async",
    "tree_flatten",
    "tree_unflatten",
    "trees",
    "verify",
]
publish(__name__, __all__, globals())


def __getattr__(name: str) -> Any:
    """Modules that not every program needs, and `__version__`: read when first asked for."""
    if name == "__version__":
        return importlib.metadata.version("treeckpt")
    if name in ("training", "convert", "dcp", "arrays", "stores"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
