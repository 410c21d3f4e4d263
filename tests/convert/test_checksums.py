"""The CRC-32s of torch.save's archives: damage is named, whoever reads what part of an entry in which order."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers.foreign_files import file_window
from tests.helpers.torch_storages import STORAGE_TREES, W, flip_in_file
from treeckpt._foreign.checksums import EntryChecksum, combine_crcs

convert = tc.convert.convert


@pytest.fixture
def plain_crcs() -> Iterator[None]:
    """torch.save computes no CRC-32s meanwhile."""
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize("to", ["treeckpt", "torch", "dcp", "safetensors"])
@pytest.mark.parametrize("name", STORAGE_TREES)
def test_a_changed_bit_of_a_storage_is_named_and_nothing_is_written(tmp_path: Path, name: str, to: str) -> None:
    torch.save(STORAGE_TREES[name], tmp_path / "file.pt")
    convert(tmp_path / "file.pt", tmp_path / "sound", to=to)
    flip_in_file(tmp_path / "file.pt", W)
    with pytest.raises(
        tc.CorruptError, match=r"(a|model/[wv]): .*file\.pt: expected CRC-32 .* of the entry 'file/data/"
    ):
        convert(tmp_path / "file.pt", tmp_path / "out", to=to)
    assert not (tmp_path / "out" / "index.json").exists()
    assert to == "treeckpt" or not (tmp_path / "out").exists()
    convert(tmp_path / "file.pt", tmp_path / "rest", to=to, exclude=["a", "model"])


def test_the_path_in_the_error_can_be_left_out(tmp_path: Path) -> None:
    torch.save({"model": {"w": W, "b": torch.ones(3)}, "half": torch.ones(4).half()}, tmp_path / "file.pt")
    flip_in_file(tmp_path / "file.pt", W, 7)
    with pytest.raises(tc.CorruptError, match=r"^w: .*exclude='w'"):
        convert(tmp_path / "file.pt", tmp_path / "one", subtree="model", dtype="bfloat16")
    convert(tmp_path / "file.pt", tmp_path / "two", subtree="model", dtype="bfloat16", exclude="w")
    assert list(tc.load(tmp_path / "two")) == ["b"]


def test_a_changed_pickle_is_named_before_it_is_read(tmp_path: Path) -> None:
    torch.save({"text": "something to be found", "w": W}, tmp_path / "file.pt")
    data = (tmp_path / "file.pt").read_bytes()
    (tmp_path / "file.pt").write_bytes(data.replace(b"something to be", b"something to me"))
    with pytest.raises(tc.CorruptError, match=r"CRC-32 .* of the entry 'file/data\.pkl'"):
        convert(tmp_path / "file.pt", tmp_path / "one")


def test_files_without_checksums_are_read(tmp_path: Path, plain_crcs: None) -> None:
    torch.save({"w": W, "v": W[3:]}, tmp_path / "file.pt")
    with torch.serialization.skip_data():
        torch.save({"w": W}, tmp_path / "blank.pt")
    convert(tmp_path / "file.pt", tmp_path / "one")
    assert torch.equal(tc.load(tmp_path / "one")["v"], W[3:])
    torch.serialization.set_crc32_options(True)
    with torch.serialization.skip_data():
        torch.save({"w": W}, tmp_path / "skipped.pt")
    convert(tmp_path / "skipped.pt", tmp_path / "two")
    assert tc.load(tmp_path / "two")["w"].shape == W.shape


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
def test_a_changed_bit_of_a_chunk_in_a_dcp_directory_is_named(tmp_path: Path) -> None:
    dcp.save({"model": {"w": W}, "other": torch.ones(3), "values": [1, "x"]}, checkpoint_id=tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "sound")
    [file] = (tmp_path / "dcp").glob("*.distcp")
    flip_in_file(file, W)
    with pytest.raises(tc.CorruptError, match=r"model\.w: .*__0_0\.distcp: expected CRC-32"):
        convert(tmp_path / "dcp", tmp_path / "one")
    assert not (tmp_path / "one" / "index.json").exists()
    convert(tmp_path / "dcp", tmp_path / "two", exclude="model/w")
    assert torch.equal(tc.load(tmp_path / "two")["other"], torch.ones(3))


def test_our_own_files_of_torch_are_checked_too(tmp_path: Path) -> None:
    tc.save(tmp_path / "one", {"w": W})
    convert(tmp_path / "one", tmp_path / "file.pt")
    convert(tmp_path / "file.pt", tmp_path / "two")
    shutil.rmtree(tmp_path / "two")
    flip_in_file(tmp_path / "file.pt", W, 0)
    with pytest.raises(tc.CorruptError, match="CRC-32"):
        convert(tmp_path / "file.pt", tmp_path / "two")


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_crcs_of_parts_are_put_together(parts: list[bytes]) -> None:
    assert combine_crcs((len(part), zlib.crc32(part)) for part in parts) == zlib.crc32(b"".join(parts))


@settings(max_examples=60, deadline=None)
@given(reads=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 40)), max_size=8), wrong=st.integers(0, 1))
def test_an_entry_is_compared_once_all_of_it_was_read(
    reads: list[tuple[int, int]], wrong: int, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "entry.bin"
    contents = bytes(range(40))
    path.write_bytes(contents)
    entry = EntryChecksum(file_window(path), zlib.crc32(contents) ^ wrong, "entry")
    entry.read_whole = True
    left = set(range(40))
    for low, count in [*reads, (0, 40)]:
        count = min(count, 40 - low)
        left -= set(range(low, low + count))
        if wrong and not left:
            with pytest.raises(tc.CorruptError, match="CRC-32"):
                entry.read(low, count)
            break
        assert np.array_equal(entry.read(low, count), np.arange(low, low + count))
