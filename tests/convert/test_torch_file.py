"""Files of torch.save, both ways."""

from __future__ import annotations

import collections
import enum
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers.training_trees import assert_same, training_tree
from treeckpt._core.sharding.region import Region
from treeckpt._foreign.files import read_strided

convert = tc.convert.convert


def test_a_training_state_goes_there_and_back_bit_for_bit(tmp_path: Path) -> None:
    tree = training_tree()
    tc.save(tmp_path / "one", tree, step=7)
    report = tc.convert.to_torch_file(tmp_path / "one", tmp_path / "file.pt")
    assert not report.losses and not report.notes, str(report)
    assert_same(torch.load(tmp_path / "file.pt"), tree)  # weights_only
    assert_same(torch.load(tmp_path / "file.pt", mmap=True), tree)
    convert(tmp_path / "file.pt", tmp_path / "two")
    back = tc.load(tmp_path / "two")
    assert_same(back, tree)
    assert tc.inspect(tmp_path / "two").nbytes == tc.inspect(tmp_path / "one").nbytes, "ties and views are stored once"
    assert back["tie"].data_ptr() == back["model"]["0.weight"].data_ptr()


def test_what_torch_saved_is_read_with_its_ties_and_views(tmp_path: Path) -> None:
    tree = training_tree()
    base = torch.randn(6, 7)
    tree |= {"whole": base, "columns": base[:, 2:5], "turned": base.t(), "steps": base.view(-1)[3::4]}
    tree["channels"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tree["conjugate"] = torch.randn(4, dtype=torch.complex64).conj()
    tree["negative"] = torch.randn(4, dtype=torch.complex64).conj().imag
    torch.save(tree, tmp_path / "file.pt")
    convert(tmp_path / "file.pt", tmp_path / "one")
    back = tc.load(tmp_path / "one")
    assert_same(back, tree)
    assert back["columns"].data_ptr() == back["whole"].data_ptr() + 2 * 4
    again = tmp_path / "again.pt"
    convert(tmp_path / "file.pt", again)
    loaded = torch.load(again)
    assert_same(loaded, tree)
    assert loaded["turned"].untyped_storage().data_ptr() == loaded["whole"].untyped_storage().data_ptr()


def test_the_archive_is_a_sound_zip_file_with_aligned_data(tmp_path: Path) -> None:
    tc.save(tmp_path / "one", training_tree())
    convert(tmp_path / "one", tmp_path / "file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert archive.testzip() is None
        heads = {info.filename: info.header_offset for info in archive.infolist()}
    data = (tmp_path / "file.pt").read_bytes()
    for name, at in heads.items():
        extra = int.from_bytes(data[at + 28 : at + 30], "little")
        assert (at + 30 + len(name) + extra) % 64 == 0, name


def test_numpy_and_odd_containers_come_in(tmp_path: Path) -> None:
    tree = {
        "small": np.arange(5.0),
        "large": np.arange(30_000, dtype=">i4").reshape(100, 300),
        "turned": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "scalar": np.float32(2.5),
        "ordered": collections.OrderedDict(b=1, a=torch.ones(2)),
        "default": collections.defaultdict(list, {1: 2}),
        "counter": collections.Counter("aab"),
        "buffer": torch.nn.Buffer(torch.ones(3)),
        "frozen": frozenset((1, 2)),
        "state": torch.nn.Linear(2, 2).state_dict(),
    }
    for protocol in (2, 4, 5):
        torch.save(tree, tmp_path / f"{protocol}.pt", pickle_protocol=protocol)
        convert(tmp_path / f"{protocol}.pt", tmp_path / f"{protocol}")
        back = tc.load(tmp_path / f"{protocol}")
        for key in ("small", "large", "turned"):
            assert np.array_equal(back[key], tree[key]) and back[key].dtype == tree[key].dtype.newbyteorder("<")
        assert back["scalar"] == 2.5 and type(back["scalar"]) is np.float32
        for key in ("ordered", "default", "counter", "frozen"):
            assert type(back[key]) is type(tree[key]) and list(back[key]) == list(tree[key])
        assert tc.inspect(tmp_path / f"{protocol}").by_path["buffer"][0].spec.kind == "buffer"  # type: ignore[union-attr]
        assert torch.equal(back["state"]["weight"], tree["state"]["weight"])


class Settings:
    """A class that no reader knows."""

    def __init__(self) -> None:
        self.lr = 0.1


def test_an_object_is_named_with_its_path_and_can_be_left_out(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "args": [Settings()], "f": len}, tmp_path / "file.pt")
    with pytest.raises(tc.TreeError, match=r"args/0: .*Settings.*exclude='args/0'"):
        convert(tmp_path / "file.pt", tmp_path / "one")
    assert not (tmp_path / "one").exists()
    with pytest.raises(tc.TreeError, match=r"^f: .*the class or function .*len"):
        convert(tmp_path / "file.pt", tmp_path / "one", exclude="args")
    convert(tmp_path / "file.pt", tmp_path / "one", exclude=["args", "f"])
    assert list(tc.load(tmp_path / "one")) == ["w"]


class Outer:
    class Inner:
        """Looked up by getattr in older protocols."""


class Named:
    """Made with arguments by name."""

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"a": 1}

    def __new__(cls, *, a: int = 0) -> Named:
        return super().__new__(cls)


class Colour(enum.Enum):
    RED = 1


class Subclass(torch.Tensor):
    """A tensor of another class."""


STATE = np.random.default_rng(0).bit_generator.state
HARMLESS: dict[str, Any] = {
    "defaultdict of int": collections.defaultdict(int, a=1),
    "defaultdict of str": collections.defaultdict(str, a=[1]),
    "defaultdict of OrderedDict": collections.defaultdict(collections.OrderedDict),
    "defaultdict": collections.defaultdict(None, {1: 2}),
    "deque": collections.deque([1, [2], (3,)]),
    "short deque": collections.deque([1, 2, 3], maxlen=2),
    "empty deque": collections.deque(maxlen=3),
    "range": range(1, 9, 2),
    "slice": slice(1, None),
    "set of numpy": {np.int64(1)},
    "set of dtypes": {torch.float32},
    "set of bytes": {b"x" * 9000},
    "sets in a set": frozenset((frozenset((1,)), (1, "a"))),
    "bytearray": bytearray(b"y" * 9000),
    "times": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "durations": np.array([3, 4], "m8[25us]"),
    "duration": np.timedelta64(3, "s"),
    "time dtype": np.dtype("m8[h]"),
    "generator of numpy": STATE,
    "keys": {1: 1, (1, "a"): 2, None: 3, 2.5: 4, b"a": 5, "a/b~": 7},
}  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("name", HARMLESS)
def test_ordinary_values_come_in_as_they_are(tmp_path: Path, name: str, protocol: int) -> None:
    value = HARMLESS[name]
    torch.save({"v": value, "w": torch.ones(2)}, tmp_path / "file.pt", pickle_protocol=protocol)
    convert(tmp_path / "file.pt", tmp_path / "one")
    found = tc.load(tmp_path / "one")["v"]
    assert type(found) is type(value) and repr(found) == repr(value)
    if isinstance(value, collections.defaultdict):
        assert found.default_factory is value.default_factory


def _unheld() -> dict[str, Any]:
    """Values that no checkpoint holds, with what an error says of each."""
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    return {
        "_rebuild_qtensor": quantised,
        r"collections\.defaultdict \(a defaultdict of": collections.defaultdict(Settings, a=torch.ones(2)),
        "Named|functools.partial": Named(),
        "Inner|getattr": Outer.Inner(),
        "Subclass": torch.ones(2).as_subclass(Subclass),
        "a storage of float32|a storage of bytes": torch.ones(2).untyped_storage(),
        "a numpy dtype 'O": np.array([1, None], dtype=object),
        "with fields": np.zeros(2, [("a", "i4"), ("b", "f8")]),
        "float128|longdouble": np.ones(2, np.longdouble),
        r"a set of|re\._compile": {re.compile("a")},
        "a dict with a key of .*int64|a dict with a key": {np.int64(1): 2},
        "a dict with a key of .*Lazy": {torch.ones(2): 1},
        "an OrderedDict with a key|a OrderedDict with a key": collections.OrderedDict({Colour.RED: 1}),
        "a dict with a key of builtins:frozenset": {frozenset((1,)): 2},
        "_rebuild_nested_tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "_rebuild_meta_tensor_no_storage": torch.ones(2, device="meta"),
    }


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("number", range(16))
def test_a_value_that_cannot_be_held_is_refused_by_leaf_and_can_be_left_out(
    tmp_path: Path, number: int, protocol: int
) -> None:
    message, value = list(_unheld().items())[number]
    torch.save({"a": [1, {"v": value}], "w": torch.ones(2)}, tmp_path / "file.pt", pickle_protocol=protocol)
    with pytest.raises(tc.TreeError, match=rf"^a/1/v: .*({message}).*exclude='a/1/v'"):
        convert(tmp_path / "file.pt", tmp_path / "one")
    convert(tmp_path / "file.pt", tmp_path / "one", exclude="a/1/v")
    assert tc.load(tmp_path / "one")["a"] == [1, {}]


def test_an_element_that_cannot_be_read_leaves_the_others_where_they_are(tmp_path: Path) -> None:
    torch.save({"l": [1, Settings(), {"x": torch.ones(1), "y": len}], "t": (len, 2)}, tmp_path / "file.pt")
    report = convert(tmp_path / "file.pt", tmp_path / "one", exclude=["l/1", "l/2/y", "t/0"])
    found = tc.load(tmp_path / "one")
    assert found["l"][:2] == [1, None] and list(found["l"][2]) == ["x"] and found["t"] == (None, 2)
    assert [note.path for note in report.notes] == ["l/1", "t/0"]


def test_files_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(tc.FormatError, match=r"bare pickle, as torch before 1\.6"):
        convert(tmp_path / "old.pt", tmp_path / "one")
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as archive:
        archive.writestr("m/data.pkl", b"")
        archive.writestr("m/constants.pkl", b"")
    with pytest.raises(tc.FormatError, match="TorchScript"):
        convert(tmp_path / "script.pt", tmp_path / "one")
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data.pkl", b"x" * 1000)
    with pytest.raises(tc.FormatError, match="packed"):
        convert(tmp_path / "packed.pt", tmp_path / "one")
    begins = "begins with the bytes 68 65 6c 6c 6f 20 77 6f 72"
    for name, data, found in (("text.pt", b"hello world", begins), ("empty.pt", b"", "begins with nothing")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(tc.FormatError, match=found):
            convert(tmp_path / name, tmp_path / "one")
    with pytest.raises(tc.CheckpointNotFound):
        convert(tmp_path / "nothing.pt", tmp_path / "one")
    torch.save({"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, tmp_path / "nested.pt")
    with pytest.raises(tc.TreeError, match=r"n: .*_rebuild_nested_tensor"):
        convert(tmp_path / "nested.pt", tmp_path / "one")


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")
def test_sparse_tensors_of_every_layout_are_read(tmp_path: Path) -> None:
    dense = torch.eye(4)
    dense[0, 3] = 7.0
    tree: dict[str, Any] = {
        "coo": dense.to_sparse(),
        "twice": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (4, 4), check_invariants=True),
        "hybrid": torch.ones(3, 4).to_sparse(1),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((2, 2)),
        "parameter": torch.nn.Parameter(dense.to_sparse()),
        "buffer": torch.nn.Buffer(dense.to_sparse()),
    }
    tree["tie"] = tree["coo"]
    torch.save(tree, tmp_path / "file.pt")
    assert not convert(tmp_path / "file.pt", tmp_path / "ours").losses
    for name in ("file.pt", "ours"):
        found = tc.load(tmp_path / name)
        for key, value in tree.items():
            assert type(found[key]) is type(value) and found[key].layout is value.layout, key
            assert torch.equal(found[key].to_dense(), value.to_dense()) and found[key].dtype == value.dtype, key
        assert [found[key].is_coalesced() for key in ("coo", "twice")] == [True, False]
        assert found["tie"] is found["coo"]


def test_sparse_tensors_whose_parts_do_not_fit_are_refused(tmp_path: Path) -> None:
    off = torch.sparse_coo_tensor([[9]], [1.0], (4,), check_invariants=False)
    torch.save({"s": off}, tmp_path / "off.pt")
    with pytest.raises(tc.TreeckptError, match=r"s: expected parts of which torch:sparse_coo makes a tensor"):
        tc.load(tmp_path / "off.pt")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_box_of_any_strided_array_is_what_numpy_says(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(0, 4))
    shape = tuple(data.draw(st.integers(1, 40)) for _ in range(ndim))
    order = data.draw(st.permutations(range(ndim)))
    steps = [0] * ndim
    reach = 1
    for d in order:
        steps[d] = 0 if data.draw(st.integers(0, 5)) == 0 else reach * data.draw(st.integers(1, 3))
        reach = max(reach, steps[d] * shape[d])
    offset = data.draw(st.integers(0, 5))
    memory = np.arange(offset + 1 + sum((n - 1) * s for n, s in zip(shape, steps, strict=True)), dtype=np.uint32)
    low = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Region(low, tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, low, strict=True)))
    reads: list[int] = []

    def flat(start: int, count: int) -> np.ndarray:
        assert start >= 0 and start + count <= len(memory)
        reads.append(count)
        return memory[start : start + count]

    found = read_strided(flat, 4, offset, tuple(steps), box)
    whole = np.lib.stride_tricks.as_strided(memory[offset:], shape, [4 * s for s in steps])
    assert np.array_equal(found, whole[box.slices()])
    if box.size and all(steps):
        assert all(count <= max(1024, 2 * box.size) for count in reads), "little more than is wanted"


def test_a_whole_module_is_refused_with_what_works(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(
        tc.TreeError, match=r"Linear.*save plain values; of a module or optimizer, its state_dict"
    ) as bad:
        convert(tmp_path / "module.pt", tmp_path / "out")
    assert "exclude" not in str(bad.value) and not (tmp_path / "out").exists()
    torch.save({"model": torch.nn.Linear(2, 2), "epoch": 3}, tmp_path / "nested.pt")
    with pytest.raises(tc.TreeError, match=r"^model: .*exclude='model'.*its state_dict"):
        convert(tmp_path / "nested.pt", tmp_path / "out")
    convert(tmp_path / "nested.pt", tmp_path / "out", exclude="model")
    assert tc.load(tmp_path / "out") == {"epoch": 3}
