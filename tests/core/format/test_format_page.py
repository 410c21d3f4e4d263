"""FORMAT.md says all that a reader needs: one that is written by it alone reads what `load` reads."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import treeckpt as tc
from tests.golden import content  # noqa: F401  (its classes are in the golden files)
from tests.helpers.changing_tables import ChangingTable
from tests.helpers.samples import gpt_state, write_checkpoint
from tests.helpers.second_reader import KINDS, column, read, value
from tests.helpers.strategies import Registered, same, trees
from tests.helpers.world import errors_of, on_ranks
from treeckpt._core.format import index as index_module
from treeckpt._core.format import records, shard_header
from treeckpt._core.sharding.dtypes import DTYPES
from treeckpt._core.tree import structure, value_codec

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "treeckpt/_core/format/FORMAT.md").read_text()
GOLDEN = ROOT / "tests/golden"


def plain(tree: Any) -> Any:
    """Returns what the second reader makes of something that `load` returns; an array becomes its shape and bytes."""
    if isinstance(tree, tc.PerRank):
        return tree
    if isinstance(tree, tc.KeyedTable):
        return {"ids": tree.ids, "slots": tree.slots, "scalars": tree.scalars}
    if isinstance(tree, (torch.Tensor, np.ndarray)):
        raw = tree.detach().contiguous().reshape(-1).view(torch.uint8).numpy() if torch.is_tensor(tree) else tree
        return tuple(tree.shape), raw.tobytes()
    if isinstance(tree, Registered):
        return {f"part {n}": part for n, part in enumerate(tree.parts)}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_asdict"):
        return tree._asdict()
    if type(tree).__name__ == "struct_time":
        return {key: getattr(tree, key) for key in tree.__match_args__}
    if isinstance(tree, (list, tuple, collections.deque)):
        return tuple(tree) if type(tree) is tuple else list(tree)
    return value(json.loads(msgspec.json.encode(value_codec.encode_value(tree, "value"))))


def assert_same(found: Any, loaded: Any, rank: int = 0) -> None:
    expected, found = plain(loaded), plain(found) if isinstance(found, np.ndarray) else found
    if isinstance(expected, tc.PerRank):
        assert_same(found[rank], expected.value, rank)
    elif isinstance(expected, dict):
        assert list(expected) == [key for key in found if key != "offsets" or not isinstance(loaded, tc.KeyedTable)]
        for key, child in expected.items():
            assert_same(found[key], child, rank)
    elif isinstance(expected, (list, tuple)) and not isinstance(loaded, (torch.Tensor, np.ndarray)):
        assert type(found) is type(expected) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, rank)
    else:
        assert same(found, expected), (found, expected)


@pytest.mark.parametrize("name", ["version_1", "version_1_tables", "version_1_ranges"])
def test_the_page_describes_the_golden_checkpoints(name: str) -> None:
    assert_same(read(GOLDEN / name), tc.load(GOLDEN / name, fallback=tc.Fallback(per_rank="take")))


def test_it_describes_tables_of_which_some_rows_are_written_again(tmp_path: Path) -> None:
    table = ChangingTable(200, buckets=4)
    for step in range(4):
        tc.save(tmp_path / f"{step}", {"emb": table.table()}, **({"base": tmp_path / f"{step - 1}"} if step else {}))
        expected = table.expected
        table.change(5, 3, 2)
    found = read(tmp_path / "3")["emb"]
    columns = (found["ids"], found["slots"]["embedding"], found["slots"]["count"])
    assert {i: (row, n) for i, row, n in zip(*(each.tolist() for each in columns), strict=True)} == expected
    assert found["scalars"] == {"step": 7}


def test_it_describes_meshes_parts_and_what_each_rank_has(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, gpt_state(layers=2, width=32), max_shard_bytes=100_000)
    assert len(list(tmp_path.glob("shard-*.001-of-*"))) > 1
    found = read(tmp_path)
    outcomes = on_ranks(4, lambda comm: assert_same(found, tc.load(tmp_path, comm=comm), comm.rank))
    assert errors_of(outcomes) == [None] * 4


def test_it_describes_ties_views_and_dtypes_of_torch(tmp_path: Path) -> None:
    weight = torch.arange(24.0).reshape(4, 6)
    dtypes = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.complex64, torch.int16, torch.bool]
    tree = {
        "kinds": {str(dtype): torch.ones(3, 5).to(dtype) for dtype in dtypes},
        "ties": {"w": weight, "same": weight, "part": weight[1:3, ::2], "turned": weight.T},
        "large": torch.rand(300, 300),
        "empty": torch.empty(0, 4),
    }
    tc.save(tmp_path / "ckpt", tree)
    assert_same(read(tmp_path / "ckpt"), tc.load(tmp_path / "ckpt"))


def test_it_describes_the_versions_of_modules(tmp_path: Path) -> None:
    state: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.ReLU()).state_dict()
    state.note = ["x"]
    tc.save(tmp_path / "ckpt", {"model": state, "plain": collections.OrderedDict(a=1)})
    assert_same(read(tmp_path / "ckpt"), tc.load(tmp_path / "ckpt"))
    index = json.loads((tmp_path / "ckpt/index.json").read_text())["index"]
    model, without = index["structure"][2]
    (names, values, numbers), others = model[1]
    found = {name: value(values[n]) for name, n in zip(names, column(numbers), strict=True)}
    assert found == state._metadata and value(others) == {"note": ["x"]}
    assert without == ["OrderedDict", None, ["a"], [None]]


@pytest.mark.parametrize("log", ["", "é\udc80" * 3000])
def test_it_describes_uneven_ranges_with_and_without_listed_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str
) -> None:
    monkeypatch.setattr(index_module, "MAX_PLAIN_NBYTES", 0)
    shapes = {"a": (7, 5), "b": (3, 4, 10), "half": (123,), "c": (64, 64)}
    whole = {k: np.arange(np.prod(s)).reshape(s).astype("f2" if k == "half" else "f4") for k, s in shapes.items()}

    def save(comm: Any) -> None:
        cuts = {name: np.linspace(0, array.size, comm.size + 1).astype(int) ** 1 for name, array in whole.items()}
        tree = {
            name: tc.Sharded(
                array.reshape(-1)[slice(*cuts[name][comm.rank :][:2])], array.shape, int(cuts[name][comm.rank])
            )
            for name, array in whole.items()
        }
        own = {
            "own": tc.PerRank(np.arange(5) + comm.rank),
            "text": tc.PerRank(f"{comm.rank}" * (5000 + comm.rank // 3)),
        }
        tc.save(tmp_path, {**tree, **own, "log": log}, comm=comm)

    assert errors_of(on_ranks(5, save)) == [None] * 5
    assert b'"ranges":{' in (tmp_path / "index.json").read_bytes()
    found = read(tmp_path)
    assert found["own"][4].tolist() == [4, 5, 6, 7, 8] and found["log"] == log
    assert {rank: len(text) for rank, text in found["text"].items()} == {0: 5000, 1: 5000, 2: 5000, 3: 5001, 4: 5001}
    assert tc.load(tmp_path, fallback=tc.Fallback(per_rank="take"))["log"] == log
    assert all(np.array_equal(found[name], array) for name, array in whole.items())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees(max_leaves=8))
def test_it_describes_every_container_and_key(tmp_path: Path, tree: Any) -> None:
    tc.save(tmp_path, tree, overwrite=True, namespace="treeckpt-tests")
    assert_same(read(tmp_path), tc.load(tmp_path, namespace="treeckpt-tests"))


def test_a_reader_by_the_page_notices_damage(tmp_path: Path) -> None:
    tc.save(tmp_path, {"w": np.arange(1000)})
    [shard] = tmp_path.glob("shard-*")
    sound = shard.read_bytes()
    for at in (20, len(sound) - 1):
        shard.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        with pytest.raises((AssertionError, ValueError)):
            read(tmp_path)


def test_the_page_names_every_key_kind_and_dtype() -> None:
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
    named = set(quoted) | {word for text in quoted for word in re.findall(r'"([\w.]+)"', text)}
    structs = [records.FileTable, index_module.RangeColumns, index_module.PackedIndex]
    words = {field for struct in structs for field in struct.__struct_fields__}
    words |= set(shard_header._ShardMetadata.__struct_fields__)  # pyright: ignore[reportPrivateUsage]
    words |= {kind.__struct_config__.tag for kind in structure.Node.__args__} - {"absent"}
    words |= {kind.__struct_config__.tag for kind in records.LeafRecord.__args__}
    words |= {kind for kind, _ in value_codec._ENCODERS.values()}  # pyright: ignore[reportPrivateUsage]
    words |= set(value_codec._DECODERS) | {"enum", "pickle"}  # pyright: ignore[reportPrivateUsage]
    assert words - named == set()
    patterns = [re.sub(r"\*", ".*", word) for word in named if "*" in word]
    numbered = re.compile(r"u?int\d+")
    dtypes = {d.name for d in DTYPES if not numbered.fullmatch(d.name)}
    assert [d for d in dtypes - named if not any(re.fullmatch(p, d) for p in patterns)] == []
    assert {d.tag for d in DTYPES if d.tag[0] not in "UI"} | {"U8", "U32", "I64"} <= named
    assert {str(shard_header.DATA_ALIGNMENT), f"{shard_header.BLOCK:,}"} <= set(re.findall(r"[\d,]+\d", PAGE))
    assert f"version {index_module.VERSION}" in PAGE and set(KINDS) <= named
