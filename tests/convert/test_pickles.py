"""Pickles as data: nothing runs, nothing is believed, and what honest programs write comes out as it is."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers.foreign_files import file_window
from treeckpt._foreign.pickle_reader import UnbuiltObject, read_pickle
from treeckpt._foreign.pickle_values import PLAIN, build_tree

MARK = "treeckpt_was_here"


def read(path: Path, data: bytes) -> Any:
    file = path / "data.pkl"
    file.unlink(missing_ok=True)  # where it is there, some file systems write what replaces it to the disk at once
    file.write_bytes(data)
    window = file_window(file)
    return build_tree(read_pickle(window, PLAIN), window.label)


def archive(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None) -> Path:
    """A file of torch.save with a pickle of one's own."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        for key, data in (storages or {}).items():
            file.writestr(f"archive/data/{key}", data)
        file.writestr("archive/version", b"3\n")
    return path


PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False) | st.frozensets(st.integers(), max_size=3) | st.sets(st.text(), max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), below, max_size=3)
    | st.tuples(below, below),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(value=PLAIN_VALUES, protocol=st.integers(0, 5))
def test_plain_values_come_back_from_any_protocol(value: Any, protocol: int, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp()
    found = read(path, pickle.dumps(value, protocol))
    assert found == value and type(found) is type(value)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=60), at=st.integers(0, 200))
def test_no_bytes_do_worse_than_an_error_of_ours(data: bytes, at: int, tmp_path_factory: Any) -> None:
    good = pickle.dumps({"a": [1, (2.5, "x")], "b": {b"y"}, "c": UnbuiltObject("x", ())}, 4)
    for document in (data, good[:at] + data + good[at + len(data) :]):
        try:
            read(tmp_path_factory.getbasetemp(), document)
        except tc.TreeckptError as error:
            assert str(error)


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, how: Any) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return self.how


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


TOUCH = f"touch {MARK}"
TEXT = b"X" + struct.pack("<I", len(TOUCH)) + TOUCH.encode()


def _bomb() -> bytes:
    node: Any = []
    for _ in range(60):
        node = [node, node]  # 2 ** 60 leaves in a few hundred bytes
    return pickle.dumps(node)


HOSTILE = {
    "a bomb": _bomb(),
    "a bomb in a call": pickle.dumps(Runs((os.system, (pickle.loads(_bomb()),)))),
    "a call": pickle.dumps(Runs((os.system, (TOUCH,)))),
    "an evaluation": pickle.dumps(Runs((eval, (f"__import__('os').system('{TOUCH}')",)))),
    "an old call": b"(S'" + TOUCH.encode() + b"'\nios\nsystem\n.",
    "another old call": b"(" + _global("os", "system") + b"S'" + TOUCH.encode() + b"'\no.",
    "a new object": b"\x80\x02" + _global("subprocess", "Popen") + TEXT + b"\x85\x81.",
    "a new object with names": b"\x80\x04" + _global("subprocess", "Popen") + TEXT + b"\x85}\x92.",
    "a state": b"\x80\x02" + _global("os", "system") + b"}X\x05\x00\x00\x00__d__K\x01sb.",
    "a state of a constructor": b"\x80\x02"
    + _global("collections", "OrderedDict")
    + b")R}X\x01\x00\x00\x00aK\x01s\x86b.",
    "a name of a builtin": b"\x80\x02" + _global("builtins", "getattr") + _global("os", "system") + TEXT + b"\x86R.",
    "a call of a called thing": b"\x80\x02" + _global("builtins", "getattr") + b"))\x86R" + TEXT + b"\x85R.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02" + TEXT + b"Q.",
    "a buffer from elsewhere": b"\x80\x05\x97.",
    "too little on the stack": b"\x80\x02R.",
    "a forgotten memo": b"\x80\x02h\x07.",
    "a call of a value": b"\x80\x02K\x01)R.",
    "an odd dict": b"\x80\x02}(K\x01u.",
    "a key that is a list": b"\x80\x02}]K\x01s.",
    "many bytes of a number": pickle.dumps(Runs((bytes, (1 << 40,)))),
    "bytes of nothing": pickle.dumps(Runs((bytearray, (1 << 40,)))),
    "a range as a set": pickle.dumps(Runs((set, (range(1 << 40),)))),
    "a defaultdict of a call": pickle.dumps(Runs((__import__("collections").defaultdict, (os.system,)))),
    "a numpy array of objects": b"\x80\x02" + _global("numpy", "dtype") + b"X\x01\x00\x00\x00O\x89\x88\x87R.",
    "no end": b"\x80\x02K\x01",
    "nothing": b"",
    "text": b"hello",
    "long bytes that are not there": b"\x80\x04B\xff\xff\xff\x7f",
    "longer bytes that are not there": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60),
    "a long number that is not there": b"\x80\x02\x8b\xff\xff\xff\x7f",
    "long text that is not there": b"\x80\x04X\xff\xff\xff\x7f",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_runs_nothing_and_takes_no_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "bomb" not in name:  # many small steps, and watching each takes long
        tracemalloc.start()
    try:
        with pytest.raises((tc.CheckpointError, tc.TreeError)):
            read(tmp_path, HOSTILE[name])
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    file = archive(tmp_path / "file.pt", HOSTILE[name])
    with pytest.raises((tc.CheckpointError, tc.TreeError)):
        tc.convert.convert(file, tmp_path / "one")
    dcp = tmp_path / "dcp"
    dcp.mkdir()
    (dcp / ".metadata").write_bytes(HOSTILE[name])
    paddle = tmp_path / "paddle"
    paddle.mkdir()
    (paddle / "0.metadata").write_bytes(HOSTILE[name])
    for path in (dcp, paddle):
        with pytest.raises((tc.CheckpointError, tc.TreeError)):
            tc.convert.convert(path, tmp_path / "one")
    assert not (tmp_path / MARK).exists() and not (tmp_path / "one").exists()


def test_containers_that_hold_each_other_over_and_over_are_refused(tmp_path: Path) -> None:
    node = pickle.loads(_bomb())
    loop: list[Any] = []
    loop.append(loop)
    for bomb in (node, loop, {"a": (loop, node)}):
        with pytest.raises(tc.FormatError, match="over and over"):
            read(tmp_path, pickle.dumps(bomb))


def _storage(kind: bytes, size: int, key: str = "0") -> bytes:
    name = key.encode()
    return (
        b"(X\x07\x00\x00\x00storage" + kind + b"X" + struct.pack("<I", len(name)) + name
        + b"X\x03\x00\x00\x00cpu\x8a\x09" + size.to_bytes(9, "little", signed=True) + b"tQ"
    )  # fmt: skip


def _number(value: int) -> bytes:
    return b"\x8a\x0a" + value.to_bytes(10, "little", signed=True)


def _tensor(size: int, offset: int, shape: int, stride: int, *, kind: str = "FloatStorage", key: str = "0") -> bytes:
    rest = _number(offset) + _number(shape) + b"\x85" + _number(stride) + b"\x85\x89}t"
    function = _global("torch._utils", "_rebuild_tensor_v2")
    return b"\x80\x02" + function + b"(" + _storage(_global("torch", kind), size, key) + rest + b"R."


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (_tensor(1 << 60, 0, 2, 1), "range of"),
        (_tensor(-1, 0, 2, 1), "a storage '0' of -1"),
        (_tensor(4, 0, 1 << 61, 1), "in a storage of 4"),
        (_tensor(4, 3, 2, 1), "2 elements from 3 on in a storage of 4"),
        (_tensor(4, -1, 2, 1), "a tensor of shape"),
        (_tensor(4, 0, -2, 1), "a tensor of shape"),
        (_tensor(4, 0, 2, -1), "a tensor of shape"),
        (_tensor(4, 0, 1 << 50, 0), "over 1 elements"),
        (_tensor(4, 0, 2, 1, key="1"), "not in the file"),
        (_tensor(4, 0, 2, 1, key="../0"), "not in the file"),
    ],
)
def test_tensors_that_do_not_lie_in_their_storage_are_refused(tmp_path: Path, pickled: bytes, message: str) -> None:
    file = archive(tmp_path / "file.pt", pickled, {"0": bytes(16)})
    with pytest.raises(tc.CheckpointError, match=message):
        tc.convert.convert(file, tmp_path / "one")
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("kind", ["QInt8Storage", "load"])
def test_tensors_over_what_is_no_storage_are_refused_by_leaf(tmp_path: Path, kind: str) -> None:
    file = archive(tmp_path / "file.pt", _tensor(4, 0, 2, 1, kind=kind), {"0": bytes(16)})
    with pytest.raises(tc.TreeError, match=rf"a tensor over <torch\.{kind}>"):
        tc.convert.convert(file, tmp_path / "one")


def test_an_honest_tensor_of_this_kind_is_read(tmp_path: Path) -> None:
    file = archive(tmp_path / "file.pt", _tensor(4, 1, 2, 2), {"0": struct.pack("<4f", 1, 2, 3, 4)})
    tc.convert.convert(file, tmp_path / "one")
    assert torch.equal(tc.load(tmp_path / "one"), torch.tensor([2.0, 4.0]))


def test_odd_escapes_of_old_pickles_raise_no_warning(tmp_path: Path) -> None:
    """pytest makes errors of warnings; found by fuzzing."""
    assert read(tmp_path, b"S'\\q'\n.") == "\\q"
