"""Saving and loading on one process: trees come back exactly, cheaply, and any safetensors reader opens the shards."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import math
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
from safetensors import safe_open

import treeckpt as tc
from treeckpt._io.storage.checkpoint import read_timings


class Point(NamedTuple):
    x: Any
    y: Any


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    width: int
    weights: Any
    note: str = dataclasses.field(default="", init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


class Pair:
    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


optree.register_pytree_node(Pair, lambda p: ((p.a, p.b), "meta"), lambda _, c: Pair(*c), namespace="roundtrip")


def size_of(directory: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


def test_containers_come_back_with_their_types_order_and_keys(tmp_path: pathlib.Path) -> None:
    tree = {
        "z": [1, (2, [3.5, None])],
        "a": collections.OrderedDict([("q", 1), ("b", 2)]),
        7: {True: "x", None: "y", (1, "k"): "z", b"b": 0, -3: 1, 2.5: 2},
        "7": "text, not a number",
        "": {},
        "empty": [[], (), {}, collections.OrderedDict()],
        "a/b~c": {"d.e": {"f": 1}, "d": {"e.f": 2}},
        "default": collections.defaultdict(list, {"k": [1]}),
        "deque": collections.deque([1, 2], maxlen=3),
        "point": Point(1, (2,)),
        "config": Config(3, np.arange(3)),
        "frozen": Frozen([1]),
        "unicode": {"ключ": "значение", "🔑": 1},
    }
    tree["config"].note = "set after init"
    tc.save(tmp_path / "c", tree)
    back = tc.load(tmp_path / "c")
    assert list(back) == list(tree)
    weights = back["config"].weights
    assert isinstance(weights, np.ndarray) and weights.tolist() == [0, 1, 2]
    back["config"].weights = tree["config"].weights
    assert back == tree
    assert type(back["a"]) is collections.OrderedDict and list(back["a"]) == ["q", "b"]
    assert back["default"].default_factory is list and back["deque"].maxlen == 3
    assert type(back["point"]) is Point and type(back["frozen"]) is Frozen
    assert [type(key) for key in back[7]] == [type(key) for key in tree[7]]


def test_values_come_back_with_their_types(tmp_path: pathlib.Path) -> None:
    values = [
        True, 0, -1, 2**70, 1.0, -0.0, math.inf, 1 + 2j, "s", "\ud800", b"\x00", bytearray(b"x"), None, ...,
        {1, 2}, frozenset({"a"}), range(1, 9, 2), slice(None, 3), datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
        datetime.timedelta(days=1, microseconds=3), pathlib.PurePosixPath("a/b"), Colour.RED, np.float32(1.5),
        np.int8(-3), np.dtype("float16"), torch.Size([1, 2]), torch.bfloat16, torch.device("cuda", 1),
    ]  # fmt: skip
    tc.save(tmp_path / "c", {"values": values[:13], "more": values[14:]})
    back = tc.load(tmp_path / "c")
    back = [*back["values"], ..., *back["more"]]
    assert [type(v) for v in back] == [type(v) for v in values]
    assert back == values
    assert math.copysign(1, back[5]) == -1
    tc.save(tmp_path / "nan", {"nan": math.nan})
    assert math.isnan(tc.load(tmp_path / "nan")["nan"])


def test_a_bare_leaf_is_a_tree(tmp_path: pathlib.Path) -> None:
    tc.save(tmp_path / "array", torch.arange(5))
    tc.save(tmp_path / "value", 5)
    assert torch.equal(tc.load(tmp_path / "array"), torch.arange(5))
    assert tc.load(tmp_path / "value") == 5


def test_registered_nodes_come_back(tmp_path: pathlib.Path) -> None:
    tc.save(tmp_path / "c", {"pair": Pair(1, torch.ones(2))}, namespace="roundtrip")
    pair = tc.load(tmp_path / "c", namespace="roundtrip")["pair"]
    assert type(pair) is Pair and pair.a == 1 and pair.b.tolist() == [1, 1]


def test_ties_parameters_and_requires_grad_come_back(tmp_path: pathlib.Path) -> None:
    weight = torch.nn.Parameter(torch.randn(40, 30))
    frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
    tree = {
        "w": weight,
        "tied": weight,
        "transposed": weight.detach().t(),
        "row": weight.detach()[7],
        "frozen": frozen,
        "leaf": torch.randn(2, requires_grad=True),
    }
    report = tc.save(tmp_path / "c", tree)
    assert report.nbytes == (40 * 30 + 3 + 2) * 4, "the bytes of a storage are written once"
    back = tc.load(tmp_path / "c")
    assert back["tied"] is back["w"] and type(back["w"]) is torch.nn.Parameter and back["w"].requires_grad
    assert back["transposed"].data_ptr() == back["w"].data_ptr()
    with torch.no_grad():
        back["w"][7] = 0
    assert not back["row"].any() and not back["transposed"][:, 7].any()
    assert type(back["frozen"]) is torch.nn.Parameter and not back["frozen"].requires_grad
    assert back["leaf"].requires_grad and type(back["leaf"]) is torch.Tensor


def test_a_view_writes_its_own_bytes_only(tmp_path: pathlib.Path) -> None:
    big = torch.zeros(10_000_000)
    tc.save(tmp_path / "c", {"few": big[5:15], "strided": big[::1_000_000]})
    assert size_of(tmp_path / "c") < 64 << 10


def test_every_shard_opens_with_the_safetensors_library(tmp_path: pathlib.Path) -> None:
    tree = {
        "bf16": torch.randn(7, 9, dtype=torch.bfloat16),
        "nested": {"f32": torch.randn(100, 100), "i64": torch.arange(5), "none": torch.empty(0, 3)},
        "bool": torch.tensor([True, False]),
        "f8": torch.randn(16).to(torch.float8_e5m2),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "at@sign": torch.ones(1),
        "__metadata__": torch.ones(2),
    }
    tc.save(tmp_path / "c", tree)
    (shard,) = (tmp_path / "c").glob("*.safetensors")
    with safe_open(shard, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    assert torch.equal(found["bf16"], tree["bf16"]) and torch.equal(found["nested/f32"], tree["nested"]["f32"])
    assert torch.equal(found["bool"], tree["bool"]) and found["nested/none"].shape == (0, 3)
    assert torch.equal(found["f8"].view(torch.uint8), tree["f8"].view(torch.uint8))
    assert found["scalar"].item() == 3 and found["at@sign@"].item() == 1 and len(found["__metadata__@"]) == 2


def test_arrays_are_aligned_in_the_file(tmp_path: pathlib.Path) -> None:
    tree = [torch.zeros(3, dtype=torch.uint8), torch.zeros(1024), torch.zeros(16), torch.zeros(1), torch.zeros(2048)]
    tc.save(tmp_path / "c", tree)
    index = tc.inspect(tmp_path / "c")
    (file,) = index.file_list
    assert file.header % 4096 == 0
    starts = [index.chunks_of(leaf)[0].start for leaf in index.entries]
    assert starts[1] % 4096 == 0 and starts[4] % 4096 == 0 and starts[2] % 64 == 0 and starts[3] % 4 == 0


@pytest.mark.parametrize("leaf", [torch.ones(1), 5], ids=["tensors", "ints"])
def test_twenty_thousand_small_leaves_take_under_four_megabytes(tmp_path: pathlib.Path, leaf: Any) -> None:
    tree = {f"layer.{i}.scale": leaf * 1 for i in range(20_000)}
    tc.save(tmp_path / "c", tree)
    assert size_of(tmp_path / "c") < 4_000_000
    assert tc.load(tmp_path / "c") == tree


def test_bytes_on_disk_stay_near_the_unique_bytes(tmp_path: pathlib.Path) -> None:
    shared = torch.randn(1000, 1000)
    tree = {f"layer{i}": {"w": torch.randn(300, 300), "shared": shared} for i in range(10)}
    tc.save(tmp_path / "c", tree)
    unique = 4_000_000 + 10 * 360_000
    assert size_of(tmp_path / "c") <= 1.01 * unique + (64 << 10)


def test_max_shard_bytes_splits_files(tmp_path: pathlib.Path) -> None:
    tree = {f"k{i}": torch.full((1000,), float(i)) for i in range(20)}
    report = tc.save(tmp_path / "c", tree, max_shard_bytes=10_000)
    assert len(report.files) == 10
    back = tc.load(tmp_path / "c")
    assert all(torch.equal(back[key], tree[key]) for key in tree)
    index = tc.inspect(tmp_path / "c")
    os.unlink(tmp_path / "c" / "index.json")
    assert tc.rebuild_index(tmp_path / "c") == index
    assert tc.verify(tmp_path / "c").ok


def test_a_lost_index_is_rebuilt_equal(tmp_path: pathlib.Path) -> None:
    shared = torch.randn(4, 4)
    tree = {"a": shared, "b": [shared.t(), Point(1, torch.empty(0))], "own": tc.PerRank({"seed": 5, "s": shared + 1})}
    tc.save(tmp_path / "c", tree, step=3, custom_metadata={"loss": 0.5})
    index = tc.inspect(tmp_path / "c")
    os.unlink(tmp_path / "c" / "index.json")
    with pytest.raises(tc.CheckpointNotFound, match="1 shard of"):
        tc.load(tmp_path / "c")
    assert tc.rebuild_index(tmp_path / "c") == index == tc.inspect(tmp_path / "c")
    assert index.step == 3 and index.metadata == {"loss": 0.5}


def test_select_loads_a_part(tmp_path: pathlib.Path) -> None:
    tc.save(tmp_path / "c", {"model": {"w": torch.ones(2), "b": torch.zeros(2)}, "step": 3})
    back = tc.load(tmp_path / "c", select=["model/w", "step"])
    assert back["model"]["w"].tolist() == [1, 1] and back["model"]["b"] is ... and back["step"] == 3
    assert tc.load(tmp_path / "c", select="model")["step"] is ...


def test_like_says_what_is_wanted(tmp_path: pathlib.Path) -> None:
    tree = {"w": torch.arange(6.0).reshape(2, 3), "n": np.arange(3), "v": 7, "skip": torch.ones(9)}
    tc.save(tmp_path / "c", tree)
    like = {"w": torch.empty(2, 3, device="meta"), "n": tc.ArraySpec((3,), "int64"), "v": 0, "skip": ...}
    back = tc.load(tmp_path / "c", like)
    assert torch.equal(back["w"], tree["w"]) and back["n"].tolist() == [0, 1, 2] and back["v"] == 7
    assert back["skip"] is ... and isinstance(back["n"], torch.Tensor)
    part = tc.ArraySpec((2, 3), "float32", regions=(tc.Region((1, 1), (1, 2)),))
    assert tc.load(tmp_path / "c", {"w": part}, strict=False)["w"].tolist() == [[4, 5]]


def test_like_may_have_its_keys_in_another_order(tmp_path: pathlib.Path) -> None:
    tc.save(tmp_path / "c", {"b": {"y": np.arange(3), "x": 2}, "a": np.ones(2)})
    like = {"a": np.zeros(2), "b": {"x": 0, "y": np.zeros(3, np.int64)}}
    found = tc.load(tmp_path / "c", like)
    tc.load_into(tmp_path / "c", like)
    for tree in (found, like):
        assert [*tree, *tree["b"]] == ["a", "b", "x", "y"]
        assert tree["a"].tolist() == [1, 1] and tree["b"]["x"] == 2 and tree["b"]["y"].tolist() == [0, 1, 2]


def test_like_of_another_dtype_needs_cast(tmp_path: pathlib.Path) -> None:
    tc.save(tmp_path / "c", {"w": torch.arange(4.0)})
    with pytest.raises(tc.MismatchError, match="w: expected bfloat16, found float32"):
        tc.load(tmp_path / "c", {"w": torch.empty(4, dtype=torch.bfloat16)})
    back = tc.load(tmp_path / "c", {"w": torch.empty(4, dtype=torch.bfloat16)}, cast=True)
    assert back["w"].dtype == torch.bfloat16 and back["w"].tolist() == [0, 1, 2, 3]


def test_load_into_fills_arrays_and_values_in_place(tmp_path: pathlib.Path) -> None:
    tc.save(tmp_path / "c", {"w": torch.arange(6.0).reshape(3, 2), "opt": [{"lr": 0.5}, (1, 2)]})
    weight = torch.zeros(2, 3)
    tree = {"w": weight.t(), "opt": [{"lr": 0.0}, (1, 2)]}
    report = tc.load_into(tmp_path / "c", tree)
    assert weight.tolist() == [[0, 2, 4], [1, 3, 5]] and tree["opt"] == [{"lr": 0.5}, (1, 2)]
    assert report.loaded == 4 and report.nbytes == 24 and not report.missing


def test_copies_have_memory_of_their_own(tmp_path: pathlib.Path) -> None:
    tc.save(tmp_path / "c", {"a": torch.zeros(100), "b": torch.zeros(100)})
    back = tc.load(tmp_path / "c", read=tc.ReadOptions(copy=True))
    back["a"].untyped_storage().resize_(0)
    assert not back["b"].any()


def test_mapped_arrays_are_read_when_touched_and_never_written_back(tmp_path: pathlib.Path) -> None:
    tree = {f"k{i}": torch.full((100_000,), float(i)) for i in range(5)}
    tc.save(tmp_path / "c", tree)
    reports: list[tc.LoadReport] = []
    back = tc.load(tmp_path / "c", read=tc.ReadOptions(mmap=True), on_report=reports.append)
    assert reports[0].read_nbytes == 0 and all(torch.equal(back[key], tree[key]) for key in tree)
    back["k1"].zero_()
    assert torch.equal(tc.load(tmp_path / "c")["k1"], tree["k1"]) and tc.verify(tmp_path / "c").ok


def test_saving_leaves_storages_as_they_were(tmp_path: pathlib.Path) -> None:
    tensor = torch.arange(100)
    tc.save(tmp_path / "c", {"a": tensor})
    tensor.untyped_storage().resize_(0)  # as FSDP frees gathered parameters
    assert tc.load(tmp_path / "c")["a"].tolist() == list(range(100))


def test_abstract_describes_without_data() -> None:
    specs = tc.abstract({"w": torch.ones(2, 3, dtype=torch.float16), "v": 3, "m": torch.empty(4, device="meta")})
    assert specs["w"] == tc.ArraySpec((2, 3), "float16") and specs["v"] == 3 and specs["m"].shape == (4,)


def test_timings_record_every_phase(tmp_path: pathlib.Path) -> None:
    report = tc.save(tmp_path / "c", {"w": torch.ones(1000)}, step=9)
    timings = read_timings(tc.LocalStore(tmp_path / "c"), report.save_id)
    assert timings is not None and timings.step == 9 and timings.error is None
    names = [span.name for span in timings.spans]
    expected = {"save", "flatten", "plan", "agree", "write", "hash", "fsync", "gather", "publish"}
    assert expected <= set(names)
    (write,) = [span for span in timings.spans if span.name == "write"]
    assert write.nbytes >= 4000 and write.stop_ns >= write.start_ns
    assert all(span.parent < i for i, span in enumerate(timings.spans))


def test_memory_stores_hold_checkpoints_too() -> None:
    store = tc.MemoryStore()
    tc.save(store, {"w": torch.arange(5)})
    assert tc.load(store)["w"].tolist() == [0, 1, 2, 3, 4] and tc.verify(store).ok


def test_reading_an_index_imports_no_torch(tmp_path: pathlib.Path) -> None:
    tc.save(tmp_path / "c", {"w": torch.ones(3), "v": 1})
    code = (
        "import sys, treeckpt as tc\n"
        f"index = tc.inspect({str(tmp_path / 'c')!r})\n"
        f"assert tc.verify({str(tmp_path / 'c')!r}).ok\n"
        "assert len(index.entries) == 2 and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
