"""Bytes that files claim are compared with those that are there, as `load` does, before a conversion writes one."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import treeckpt as tc
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.shard_header import sealed

FORMATS = {"treeckpt": "new", "torch": "new.pt", "dcp": "dcp", "safetensors": "new.safetensors"}


def _claiming(path: Path, shape: list[int]) -> Path:
    """A checkpoint whose index claims an array of another shape, with a seal that fits."""
    tc.save(path, {"w": np.zeros(1000, np.float32), "b": np.ones(3)})
    document: Any = msgspec.json.decode((path / INDEX_NAME).read_bytes())
    specs = document["index"]["specs"]
    found = next(
        n for n, spec in enumerate(specs) if (spec.get("shape") if isinstance(spec, dict) else spec[0]) == [1000]
    )
    if isinstance(specs[found], dict):
        specs[found]["shape"] = shape
    else:
        specs[found][0] = shape
    document = {"seal": "0" * 16} | {key: value for key, value in document.items() if key != "seal"}
    (path / INDEX_NAME).write_bytes(sealed(msgspec.json.encode(document)))
    return path


@pytest.mark.parametrize("to", FORMATS)
def test_more_bytes_than_the_files_hold_are_refused_before_a_byte_is_written(tmp_path: Path, to: str) -> None:
    path = _claiming(tmp_path / "ours", [1 << 22, 1 << 20])
    with pytest.raises(tc.CorruptError, match="bytes in all files") as loaded:
        tc.load(path)
    before, names = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, sorted(tmp_path.iterdir())
    for dry_run in (True, False):
        with pytest.raises(tc.CorruptError, match="bytes in all files") as converted:
            tc.convert.convert(path, tmp_path / FORMATS[to], to=to, dry_run=dry_run)
        assert converted.value.found == loaded.value.found
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kilobytes"
    assert sorted(tmp_path.iterdir()) == names


def test_what_is_left_out_is_not_counted(tmp_path: Path) -> None:
    path = _claiming(tmp_path / "ours", [1 << 42])
    assert tc.convert.convert(path, tmp_path / "part.pt", select="b").leaves == 1


def test_views_of_one_storage_are_counted_once_and_written_once(tmp_path: Path) -> None:
    base = torch.arange(1 << 20, dtype=torch.uint8)
    torch.save({f"v{n}": base[n:] for n in range(3_00)}, tmp_path / "views.pt")
    tc.convert.convert(tmp_path / "views.pt", tmp_path / "new")
    assert sum(file.stat().st_size for file in (tmp_path / "new").iterdir()) < 3 << 20
