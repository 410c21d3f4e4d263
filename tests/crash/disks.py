"""Small real file systems to fill up, to make read-only, or to have fail; for the superuser."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["failing_disk", "fill", "remount", "small_disk"]


def _mount(*arguments: str) -> str:
    """Why that can not be done here; "" if it is done."""
    if os.geteuid() or shutil.which("mount") is None:
        return "only the superuser mounts file systems"
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    return done.stderr.strip()


@contextlib.contextmanager
def _mounted(directory: Path, *arguments: str) -> Iterator[Path]:
    directory.mkdir()
    why = _mount(*arguments, str(directory))
    if why:
        pytest.skip(why)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True, capture_output=True)


@contextlib.contextmanager
def small_disk(directory: Path, nbytes: int) -> Iterator[Path]:
    """A file system of that size, in memory."""
    with _mounted(directory, "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs") as disk:
        yield disk


@contextlib.contextmanager
def failing_disk(directory: Path, nbytes: int) -> Iterator[Path]:
    """A file system that believes in ten times the room that its device has, so that writes fail at the device."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    with small_disk(directory.with_name(directory.name + "-device"), nbytes) as device:
        image = device / "image"
        with open(image, "wb") as file:
            file.truncate(10 * nbytes)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(image)], check=True, capture_output=True)
        with _mounted(directory, "-o", "loop", str(image)) as disk:
            yield disk


def remount(disk: Path, *, writable: bool) -> None:
    subprocess.run(["mount", "-o", f"remount,{'rw' if writable else 'ro'}", str(disk)], check=True, capture_output=True)


def fill(disk: Path, free: int) -> Path:
    """A file that leaves that many bytes, in whole pages."""
    found = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, found.f_bavail * found.f_frsize - free)))
    return filler
