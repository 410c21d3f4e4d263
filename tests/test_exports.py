"""The public names, and what is imported for them."""

from __future__ import annotations

import importlib
import importlib.metadata
import pickle
import pkgutil
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch.distributed.checkpoint

import treeckpt as tc
from treeckpt import reports
from treeckpt._inspect.deletion import CleanReport

NAMES = [
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


def test_the_public_names_are_these() -> None:
    assert sorted(tc.__all__) == tc.__all__ == NAMES
    assert all(hasattr(tc, name) for name in NAMES)


PUBLIC_MODULES = {
    "arrays": ["register"],
    "convert": [
        "FORMATS",
        "SOURCES",
        "ConvertReport",
        "Finding",
        "SourceFiles",
        "WrittenArray",
        "convert",
        "detect",
        "register",
        "to_dcp",
        "to_safetensors",
        "to_torch_file",
        "to_treeckpt",
    ],
    "dcp": ["Reader", "Writer", "async_save", "install", "load", "save", "uninstall"],
    "errors": [
        "CheckpointError",
        "CheckpointExists",
        "CheckpointNotFound",
        "CorruptError",
        "FormatError",
        "LayoutError",
        "MismatchError",
        "RankError",
        "StoreError",
        "TreeError",
        "TreeckptError",
    ],
    "integrations.accelerate": ["TreeckptAccelerator"],
    "integrations.lightning": ["TreeckptDDP", "TreeckptIO", "TreeckptModelParallel", "install"],
    "integrations.peft": ["AdaLoraRanks", "export", "peft_state"],
    "integrations.ray": ["manager", "report", "restore"],
    "integrations.torchtitan": ["TreeckptManager"],
    "integrations.transformers": ["TreeckptMixin", "TreeckptTrainer", "hub_rules", "module_rules"],
    "policy": ["All", "Best", "EveryPeriod", "EverySteps", "Last", "Policy", "StepInfo", "Steps", "Total", "kept"],
    "reports": ["Leftover", "LoadReport", "SaveReport", "VerifyReport"],
    "rules": [
        "Carried",
        "Cast",
        "Concat",
        "Copy",
        "Dequantize",
        "Drop",
        "Fill",
        "Keep",
        "Permute",
        "Rename",
        "Renames",
        "Rule",
        "Slice",
        "Split",
        "Stack",
        "Unstack",
        "as_rules",
        "carried",
        "decode",
        "encode",
        "fuse_ffn",
        "fuse_qkv",
        "inverse",
        "parse",
        "rotary_halves",
        "rotary_pairs",
        "split_ffn",
        "split_qkv",
    ],
    "stores": [
        "DirectoryEntry",
        "LocalRun",
        "LocalStore",
        "MemoryStore",
        "ObjectRun",
        "ObjectStore",
        "RunStore",
        "Store",
        "StoreTraits",
        "VersionTag",
        "Writer",
        "register",
    ],
    "testing": ["StoreSuite", "read_range", "thread_comms", "write_file"],
    "training": [
        "Guard",
        "Merge",
        "Policy",
        "RestoreReport",
        "guard",
        "load",
        "restore",
        "rng_state",
        "save",
        "set_rng_state",
        "state",
    ],
    "trees": [
        "Sameness",
        "broadcast",
        "copy_into",
        "distribute",
        "empty_like",
        "flatten_names",
        "gather",
        "offload",
        "same_structure",
        "unflatten_names",
    ],
}


def public_module(name: str) -> types.ModuleType:
    """Imports a module; skips the test where the framework that it is for is not installed."""
    if name.startswith("treeckpt.integrations."):
        pytest.importorskip(name.rpartition(".")[2])
    return importlib.import_module(name)


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_the_names_of_public_modules_are_these(name: str) -> None:
    module = public_module(f"treeckpt.{name}")
    assert module.__all__ == PUBLIC_MODULES[name]
    assert all(hasattr(module, one) for one in module.__all__)


MODULES_OF_DCP = [
    found.name for found in pkgutil.iter_modules(torch.distributed.checkpoint.__path__) if found.name[0] != "_"
]
OWN_NAMES_OF_DCP = {
    "filesystem": {"FileSystemReader", "FileSystemWriter"},
    "format_utils": {"dcp_to_torch_save", "torch_save_to_dcp"},
    "state_dict_loader": {"load"},
    "state_dict_saver": {"async_save", "save"},
}
"""The names of torch's modules that are treeckpt's own here."""


@pytest.mark.parametrize("name", MODULES_OF_DCP)
def test_modules_of_dcp_have_the_names_of_torch(name: str) -> None:
    """pytorch-dcp-docs, lines 164-399: each module that the documents name."""
    torch_module = importlib.import_module(f"torch.distributed.checkpoint.{name}")
    if name == "resharding":  # it has private names alone
        assert torch_module.__all__ == []
        return
    ours = importlib.import_module(f"treeckpt.dcp.{name}")
    replaced = {one for one in torch_module.__all__ if getattr(ours, one) is not getattr(torch_module, one)}
    assert replaced == OWN_NAMES_OF_DCP.get(name, set())
    assert all(getattr(ours, one).__module__.startswith("treeckpt.dcp") for one in replaced)


def test_every_public_name_says_what_it_is() -> None:
    assert tc.__doc__ and all(getattr(tc, name).__doc__ for name in NAMES)
    assert tc.Manager.count.__doc__ and "step" in tc.Manager.count.__doc__


def test_the_version_is_that_of_the_distribution() -> None:
    assert tc.__version__ == importlib.metadata.version("treeckpt")


NO_TORCH = """
import sys
import types
import typing
class NoTorch:
    def find_spec(name, path, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTorch)
"""


def test_the_fields_of_public_structs_are_in_their_docstrings() -> None:
    modules = tc, tc.training, tc.convert, tc.policy, tc.rules, reports
    found = {one for module in modules for one in vars(module).values() if isinstance(one, type)} | {CleanReport}
    structs = {one for one in found if issubclass(one, msgspec.Struct)}
    assert {tc.SaveReport, tc.training.RestoreReport, tc.rules.Rename, tc.ArraySpec, reports.Problem} < structs
    missing: list[str] = []
    for struct in structs:
        text = "\n".join(base.__doc__ or "" for base in struct.__mro__ if base not in (msgspec.Struct, object))
        told = {name for names in re.findall(r"^ {8}(\w+(?:, \w+)*): ", text, re.M) for name in names.split(", ")}
        told |= {word for part in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", part)}
        missing += [f"{struct.__name__}.{name}" for name in struct.__struct_fields__ if name not in told]
    assert missing == []


def test_what_needs_torch_says_so_where_it_is_not_installed(tmp_path: Path) -> None:
    with tc.Manager(tmp_path, background=False) as manager:
        manager.save(1, {"w": np.arange(5)})
    calls = {
        "import treeckpt.dcp": "dcp",
        "import treeckpt.training": "training",
        "treeckpt.training.state": "training",
        "treeckpt.Manager(path, background=False).resume(None)": "training",
    }
    program = f"{NO_TORCH}import treeckpt\npath = {str(tmp_path)!r}\ntreeckpt.load(path + '/step_00000001')\n"
    program += "".join(f"try:\n    {call}\nexcept ImportError as error:\n    print(error)\n" for call in calls)
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        f"treeckpt.{name} needs torch, which is not installed: pip install 'treeckpt[torch]'" for name in calls.values()
    ]


@pytest.mark.parametrize(
    "code",
    [
        "import treeckpt as tc",
        "tc.inspect(path)",
        "assert tc.verify(path).ok",
        "tc.load(path); tc.load_into(path, tc.load(path, read=tc.ReadOptions(copy=True)))",
        "tc.save(path, {'w': np.ones(3), 'v': 1}, overwrite=True)",
        "os.unlink(path + '/index.json'); tc.rebuild_index(path)",
        "tc.abstract({'w': np.ones(3)})",
        "import treeckpt._cli.main, treeckpt._runs.catalog",
        "try: tc.load(path + '/none')\nexcept tc.CheckpointNotFound: pass",
    ],
    ids=["import", "inspect", "verify", "load", "save", "rebuild_index", "abstract", "cli", "error"],
)
def test_without_tensors_no_torch_is_imported(tmp_path: Path, code: str) -> None:
    tc.save(tmp_path / "c", {"w": np.arange(5), "v": [1, "x"]})
    program = (
        f"import os, sys\nimport numpy as np\nimport treeckpt as tc\npath = {str(tmp_path / 'c')!r}\n{code}\n"
        "loaded = [name for name in ('torch', 'jax', 'fastapi') if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=300)


def test_a_pickled_report_names_no_private_module(tmp_path: Path) -> None:
    report = tc.save(tmp_path / "c", {"w": np.ones(3)})
    assert report.spans and b"treeckpt._" not in pickle.dumps(report)
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize("name", ["treeckpt", *(f"treeckpt.{one}" for one in PUBLIC_MODULES)])
def test_public_classes_and_functions_name_public_modules_where_they_can_be_found(name: str) -> None:
    module = public_module(name)
    for public in module.__all__:
        one = getattr(module, public)
        if isinstance(one, (type, types.FunctionType)):
            assert one.__module__.startswith("treeckpt") and "._" not in one.__module__, one
            assert pickle.loads(pickle.dumps(one)) is one
            assert not isinstance(one, type) or typing.get_type_hints(one) is not None
