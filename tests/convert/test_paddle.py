"""Directories of paddle.distributed.save_state_dict, written by Paddle itself (tests/golden/write_paddle.py)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.golden.write_paddle import expected, nested

convert = tc.convert.convert
GOLDEN = Path(__file__).parent.parent / "golden" / "paddle"


def assert_is(found: torch.Tensor, array: Any) -> None:
    wanted = np.asarray(array)
    assert str(found.dtype) == f"torch.{wanted.dtype}" and found.numpy().tobytes() == wanted.tobytes()


def test_pieces_of_two_ranks_are_put_together(tmp_path: Path) -> None:
    report = convert(GOLDEN / "two", tmp_path / "one")
    assert report.source_format == "paddle" and not report.losses
    back, wanted = tc.load(tmp_path / "one"), expected()
    assert sorted(back) == sorted(wanted)
    assert back["flat"].dtype == torch.bfloat16 and tuple(back["flat"].shape) == (7, 3)
    assert_is(back.pop("flat").float(), wanted.pop("flat"))
    for name, array in wanted.items():
        assert_is(back[name], array)


def test_nested_keys_and_dtypes_come_as_they_were(tmp_path: Path) -> None:
    convert(GOLDEN / "one" / "0.metadata", tmp_path / "one.pt")
    back = torch.load(tmp_path / "one.pt")
    assert back.pop("brain").tolist() == [1.5, -2.0]
    wanted = nested()
    assert sorted(back) == sorted(wanted) and list(back["model"]) == list(wanted["model"])
    for key, value in wanted.items():
        for name, array in value.items() if isinstance(value, dict) else [(None, value)]:
            assert_is(back[key] if name is None else back[key][name], array)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "two", tmp_path / "copy"))


def test_a_missing_file_or_another_save_beside_it_is_named(copy: Path, tmp_path: Path) -> None:
    shutil.copy(copy / "0.metadata", copy / "10.metadata")
    with pytest.raises(tc.FormatError, match=r"0\.metadata, 10\.metadata.*Name the metadata file"):
        convert(copy, tmp_path / "one")
    convert(copy / "0.metadata", tmp_path / "named")
    (copy / "10.metadata").unlink()
    (copy / "1_0.distcp").unlink()
    with pytest.raises(tc.CorruptError, match=r"1_0\.distcp"):
        convert(copy, tmp_path / "one")
    (copy / "0.metadata").unlink()
    with pytest.raises(tc.CheckpointError):
        convert(copy, tmp_path / "one")
    assert not (tmp_path / "one" / "index.json").exists()


@pytest.mark.parametrize(
    ("name", "before", "after", "message"),
    [
        ("0.metadata", b"LocalTensorMetadata", b"LocalTensorMetadatb", "Paddle's LocalTensorMetadata"),
        ("0.metadata", b"float64", b"float32", "of float32, found one of float64"),
        ("1_0.distcp", b"numpy._core", b"nympy._core", "nympy"),
        ("1_0.distcp", b"columns", b"columnz", "columns: .*expected an array of 12 elements"),
    ],
)
def test_files_that_lie_are_refused(
    copy: Path, tmp_path: Path, name: str, before: bytes, after: bytes, message: str
) -> None:
    data = (copy / name).read_bytes()
    assert before in data
    (copy / name).write_bytes(data.replace(before, after))
    with pytest.raises(tc.TreeckptError, match=message):
        convert(copy, tmp_path / "one")
    assert not (tmp_path / "one" / "index.json").exists()
