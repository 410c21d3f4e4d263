"""Plain data of the core cannot be changed, so that threads and caches may share it."""

import dataclasses
import importlib
import inspect
import pkgutil

import msgspec

import treeckpt._core

BUILDERS = {"FlattenedContainer"}
"""Passed from one function to another and kept by none."""


def test_structs_and_dataclasses_are_frozen():
    changing = set()
    for module in pkgutil.walk_packages(treeckpt._core.__path__, "treeckpt._core."):
        for name, kind in vars(importlib.import_module(module.name)).items():
            if not inspect.isclass(kind) or kind.__module__ != module.name or name.startswith("_"):
                continue
            frozen = kind.__struct_config__.frozen if issubclass(kind, msgspec.Struct) else True
            if dataclasses.is_dataclass(kind):
                frozen = kind.__dataclass_params__.frozen
            if not frozen:
                changing.add(name)
    assert changing == BUILDERS
