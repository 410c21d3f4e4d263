"""Describes the machine on which the benchmark ran, without anything that identifies it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import msgspec

from .._io.process import usable_cpus

PACKAGES = (
    "treeckpt",
    "torch",
    "numpy",
    "safetensors",
    "obstore",
    "s3fs",
    "s3torchconnector",
    "orbax-checkpoint",
    "jax",
    "torch_checkpointing",
)


class Machine(msgspec.Struct, frozen=True):
    """The facts about a machine that figures depend on."""

    cpus: int
    memory: int
    """Bytes."""
    system: str
    python: str
    packages: dict[str, str]
    """The versions of the installed packages."""


def describe_machine() -> Machine:
    """Describes this machine."""
    packages: dict[str, str] = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return Machine(
        cpus=usable_cpus(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        packages=packages,
    )
