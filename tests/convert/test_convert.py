"""Which format, which part, what is lost: the options of convert, as functions and on the command line."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.background import files_open
from tests.helpers.training_trees import assert_same, training_tree
from tests.helpers.world import small_tree
from treeckpt._cli.main import main
from treeckpt.convert import _format_fit

convert, detect = tc.convert.convert, tc.convert.detect
ROOT = Path(__file__).parent.parent.parent


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    a: Any
    b: Any


def test_formats_are_found_by_looking(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "file")
    found = {"torch": tmp_path / "file", "paddle": ROOT / "tests/golden/paddle/two"}
    for to in ("treeckpt", "dcp", "safetensors"):
        found[to] = tmp_path / to
        convert(tmp_path / "file", tmp_path / to, to=to)
    assert {detect(path): path for path in found.values()} == found
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "readme.txt").write_text("hello")
    with pytest.raises(tc.FormatError, match=r"readme\.txt.*Known formats are treeckpt, torch"):
        detect(tmp_path / "other")
    with pytest.raises(tc.CheckpointNotFound):
        detect(tmp_path / "nothing")
    (tmp_path / "treeckpt" / "index.json").unlink()
    with pytest.raises(tc.CheckpointNotFound, match="1 shard of a save that never finished"):
        convert(tmp_path / "treeckpt", tmp_path / "new")


def test_no_conversion_leaves_a_file_open(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(300, 100), "n": 1}, tmp_path / "in.pt")
    tc.convert.convert(tmp_path / "in.pt", tmp_path / "one")
    for to in ("dcp", "safetensors", "torch"):
        tc.convert.convert(tmp_path / "one", tmp_path / to, to=to, lossy=True)
        tc.convert.convert(tmp_path / to, tmp_path / f"back from {to}")
    with pytest.raises(tc.CheckpointExists):
        tc.convert.convert(tmp_path / "one", tmp_path / "dcp", to="dcp")
    assert files_open(tmp_path) == []


def test_the_step_is_that_of_the_name_in_a_run_unless_it_is_given(tmp_path: Path) -> None:
    """A run would not trust a checkpoint that says another step than its name."""
    tc.save(tmp_path / "old" / "step_00000002", {"w": np.ones(2)}, step=2)
    source = tmp_path / "old" / "step_00000002"
    for name, step, found in (("step_00000007", None, 7), ("copy", None, 2), ("other", 5, 5)):
        convert(source, f"{tmp_path}/run/{name}/", step=step)
        assert tc.inspect(tmp_path / "run" / name).step == found
    assert tc.Manager(tmp_path / "run").steps() == [7]


def test_links_are_followed_as_the_cache_of_hugging_face_has_them(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "blob")
    (tmp_path / "linked.pt").symlink_to("blob")
    convert(tmp_path / "linked.pt", tmp_path / "hub", to="safetensors")
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "hub").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    convert(tmp_path / "snapshot", tmp_path / "one")
    assert torch.equal(tc.load(tmp_path / "one")["w"], torch.ones(2))


def test_parts_are_chosen_by_globs_and_by_a_path(tmp_path: Path) -> None:
    tree = training_tree()
    tc.save(tmp_path / "one", tree, step=9, custom_metadata={"by": "me"})
    convert(tmp_path / "one", tmp_path / "two", select=["model", "opt*/state/*/exp_avg"], exclude="*bias")
    back = tc.load(tmp_path / "two")
    assert list(back) == ["model", "optimizer"] and list(back["model"]) == ["0.weight", "1.weight"]
    assert {key for moments in back["optimizer"]["state"].values() for key in moments} == {"exp_avg"}
    index = tc.inspect(tmp_path / "two")
    assert index.step == 9 and index.metadata == {"by": "me"}
    convert(tmp_path / "one", tmp_path / "m.pt", subtree="optimizer/state/1")
    assert_same(torch.load(tmp_path / "m.pt"), tree["optimizer"]["state"][1])
    for wrong in ({"select": "modle"}, {"subtree": "model/2.weight"}, {"subtree": "step/x"}):
        with pytest.raises(tc.MismatchError, match=r"glob that names some leaf|expected a path of the tree"):
            convert(tmp_path / "one", tmp_path / "no", **wrong)


def test_containers_that_a_format_lacks_become_plain_ones_and_are_told(tmp_path: Path) -> None:
    tree = {
        "point": Point(torch.ones(2), 3),
        "record": Record(torch.zeros(2), [1]),
        "deque": collections.deque([1, torch.ones(1)], maxlen=3),
        "default": collections.defaultdict(list, a=1),
        "ordered": collections.OrderedDict(z=1, a=2),
    }
    tc.save(tmp_path / "one", tree)
    report = convert(tmp_path / "one", tmp_path / "f.pt")
    assert {(f.path, f.becomes) for f in report.notes} == {
        ("point", "a tuple"), ("record", "a dict"), ("deque", "a list"), ("default", "a dict")}  # fmt: skip
    back = torch.load(tmp_path / "f.pt")
    assert_same(back["point"], (torch.ones(2), 3))
    assert_same(back["record"], {"a": torch.zeros(2), "b": [1]})
    assert type(back["ordered"]) is collections.OrderedDict
    convert(tmp_path / "one", tmp_path / "two")
    same = tc.load(tmp_path / "two")
    assert type(same["point"]) is Point and type(same["record"]) is Record and same["deque"].maxlen == 3


def test_a_keyed_table_becomes_a_dict_of_its_arrays_where_there_are_none(tmp_path: Path) -> None:
    ids, rows = torch.tensor([-1, 12, 7]), torch.randn(3, 4)
    tc.save(tmp_path / "one", {"table": tc.KeyedTable(ids, {"embedding": rows})})
    report = convert(tmp_path / "one", tmp_path / "f.pt")
    assert ("table", "a dict") in [(f.path, f.becomes) for f in report.notes]
    assert not convert(tmp_path / "one", tmp_path / "two").notes
    plain, kept = torch.load(tmp_path / "f.pt")["table"], tc.load(tmp_path / "two")["table"]
    assert type(kept) is tc.KeyedTable
    for found_ids, slots in ((plain["ids"], plain["slots"]), (kept.ids, kept.slots)):
        found = dict(zip(found_ids.tolist(), slots["embedding"], strict=True))
        assert all(torch.equal(found[key], row) for key, row in zip(ids.tolist(), rows, strict=True))


def test_values_that_a_format_lacks_are_refused_with_their_path(tmp_path: Path) -> None:
    tree = {
        "when": datetime.date(2020, 1, 2),
        "times": np.array(["2020-01-01"], "M8[D]"),
        "n": np.int64(3),
        "w": np.ones(2),
    }
    tc.save(tmp_path / "one", tree)
    for to in ("torch", "dcp"):
        with pytest.raises(tc.TreeError, match=r"^when: .*datetime\.date.*and 1 more"):
            convert(tmp_path / "one", tmp_path / to, to=to)
        report = convert(tmp_path / "one", tmp_path / to, to=to, lossy=True)
        assert {f.path for f in report.losses} == {"when", "times"}
    back = torch.load(tmp_path / "torch")
    assert back["when"] is None and back["n"] == 3 and torch.equal(back["w"], torch.ones(2, dtype=torch.float64))


def test_state_of_each_ranks_own_becomes_a_dict_by_rank(tmp_path: Path) -> None:
    from tests.helpers.world import on_ranks

    on_ranks(3, lambda comm: tc.save(tmp_path / "one", small_tree(comm.rank, 3), comm=comm))
    for name in ("f.pt", "two"):
        report = convert(tmp_path / "one", tmp_path / name)
        assert (report.notes[0].path, report.notes[0].becomes) == ("own", "a dict by rank")
    expected = small_tree(0, 1)
    for back in (torch.load(tmp_path / "f.pt"), tc.load(tmp_path / "two")):
        assert list(back["own"]) == [0, 1, 2] and [back["own"][rank]["n"] for rank in range(3)] == [0, 1, 2]
        assert [back["own"][rank]["rng"].tolist() for rank in range(3)] == [[rank] * 9 for rank in range(3)]
        assert np.array_equal(np.asarray(back["pieces"]), expected["pieces"].local)
        assert np.asarray(back["tie"]).ctypes.data == np.asarray(back["shared"]).ctypes.data


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "hdf5"}, "one of treeckpt, torch"),
        ({"dtype": "int8"}, "one of float64, float32"),
        ({"memory": "1MiB"}, "at least"),
        ({"memory": 8 << 20, "to": "treeckpt"}, "at least"),
        ({"memory": "lots"}, "bytes, as"),
        ({"max_shard_size": "5 parsecs", "to": "dcp"}, "bytes, as"),
        ({"max_shard_size": "5GB", "to": "torch"}, "can have several files"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt")
    with pytest.raises(tc.MismatchError, match=message):
        convert(tmp_path / "in.pt", tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


def test_a_store_in_a_url_is_refused_for_foreign_formats(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt")
    with pytest.raises(tc.CheckpointError, match="a local path"):
        convert(tmp_path / "in.pt", "s3://bucket/model.safetensors")


def test_the_command_line_says_what_it_did_and_what_would_be_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tc.save(tmp_path / "one", {"model": {"w": torch.ones(20)}, "step": 3})
    one, hub = str(tmp_path / "one"), str(tmp_path / "hub")
    assert main(["convert", one, hub, "--to", "safetensors"]) == 1
    assert "step" in capsys.readouterr().err and not Path(hub).exists()
    assert main(["convert", one, hub, "--to", "safetensors", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "lost: step: a value, 3 becomes nothing" in said and "nothing written" in said and not Path(hub).exists()
    command = ["convert", one, hub, "--to", "safetensors", "--subtree", "model", "--dtype", "bfloat16", "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == ["model.safetensors"] and report["nbytes"] == 40 and report["format"] == "safetensors"
    assert main(["convert", hub, str(tmp_path / "back"), "--step", "5", "--memory", "64MiB"]) == 0
    assert "1 leaf, 40 B, safetensors to treeckpt" in capsys.readouterr().out
    assert tc.load(tmp_path / "back")["w"].dtype == torch.bfloat16 and tc.inspect(tmp_path / "back").step == 5
    assert main(["convert", str(tmp_path / "gone"), hub]) == 1


def test_arrays_come_in_without_torch(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(5), "l": [1, {"x": 2.5}]}, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "dcp", to="dcp")
    program = (
        "import sys, treeckpt as tc\n"
        "report = tc.convert.convert(*sys.argv[1:3])\n"
        "tc.convert.convert(sys.argv[2], sys.argv[3], lossy=True)\n"
        "tc.convert.convert(sys.argv[4], sys.argv[5])\n"
        "assert 'torch' not in sys.modules, 'nothing of it was needed'\n"
    )
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    arguments = [str(tmp_path / name) for name in ("in.pt", "one", "out.safetensors", "dcp", "three")]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, env=os.environ | {"PYTHONPATH": path})
    convert(tmp_path / "out.safetensors", tmp_path / "two")
    assert torch.equal(tc.load(tmp_path / "two")["w"], torch.arange(5))
    assert torch.equal(tc.load(tmp_path / "three")["w"], torch.arange(5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, "torch.bfloat16", "bfloat16"])
def test_a_dtype_of_torch_or_numpy_is_one_to_cast_to(tmp_path: Path, dtype: Any) -> None:
    tc.save(tmp_path / "one", {"a": torch.ones(3)})
    convert(tmp_path / "one", tmp_path / "two", dtype=dtype)
    assert tc.load(tmp_path / "two")["a"].dtype == torch.bfloat16
    convert(tmp_path / "two", tmp_path / "three", dtype=np.float64)
    assert tc.load(tmp_path / "three")["a"].dtype == torch.float64
    for odd in (float, torch.int32, "", np.int64):
        with pytest.raises(tc.MismatchError, match="dtype: expected"):
            convert(tmp_path / "one", tmp_path / "never", dtype=odd)


def test_the_report_counts_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"a": torch.ones(3), "b": torch.ones(2), "n": 1, "c": torch.ones(2, dtype=torch.complex128)}
    tc.save(tmp_path / "one", tree)
    report = convert(tmp_path / "one", tmp_path / "one.safetensors", lossy=True)
    assert (report.leaves, report.arrays, len(report.losses)) == (2, 2, 2)
    assert convert(tmp_path / "one", tmp_path / "two.safetensors", lossy=True, dry_run=True).leaves == 2
    assert convert(tmp_path / "one", tmp_path / "one.pt").leaves == 4
    main(["convert", "--lossy", str(tmp_path / "one"), str(tmp_path / "three.safetensors")])
    assert ": 2 leaves, 20 B" in capsys.readouterr().out
    tc.save(tmp_path / "odd", {"a": torch.ones(3), "when": np.array(["2020-01-01"], "M8[D]")})
    report = convert(tmp_path / "odd", tmp_path / "odd.pt", lossy=True)
    assert [str(loss) for loss in report.losses] == ["when: an array of datetime64[D] becomes None"]
    assert report.leaves == 2 and torch.load(tmp_path / "odd.pt")["when"] is None


def test_custom_metadata_that_a_format_does_not_hold_is_named(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"w": np.zeros(3)}, custom_metadata={"commit": "1f3a", "metrics": {"loss": 0.5}})
    report = tc.convert.convert(tmp_path / "c", tmp_path / "c.safetensors")
    gone = [str(note) for note in report.notes if "custom metadata" in str(note)]
    assert gone == ["metrics: custom metadata becomes no part of it"], "a text is kept"
    tc.convert.convert(tmp_path / "c", tmp_path / "d")
    assert tc.inspect(tmp_path / "d").metadata == tc.inspect(tmp_path / "c").metadata


@pytest.mark.parametrize("to", tc.convert.FORMATS)
def test_the_progress_of_a_conversion_with_ties_ends_where_all_is_read(tmp_path: Path, to: str) -> None:
    tied = torch.arange(50_000.0)
    torch.save({"a": tied, "tie": tied, "view": tied[100:40_000], "other": torch.ones(9)}, tmp_path / "s.pt")
    seen: list[tuple[int, int | None]] = []
    convert(tmp_path / "s.pt", tmp_path / "out", to=to, lossy=True, on_read=lambda *numbers: seen.append(numbers))
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("to", tc.convert.FORMATS)
def test_a_conversion_with_its_progress_takes_the_containers_that_it_takes_without(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_format_fit, "FREE_VIEW_NBYTES", 100)  # as for more bytes than are checked here
    array, table = np.arange(9.0), tc.KeyedTable(np.arange(10), {"rows": np.ones((10, 3))})
    tree = {"point": Point(array, array), "table": table, "own": tc.PerRank({"a": array})}
    tc.save(tmp_path / "source", tree)
    seen: list[int] = []
    first, second = (
        convert(tmp_path / "source", tmp_path / name, to=to, on_read=on_read)
        for name, on_read in (("first", None), ("second", lambda done, _: seen.append(done)))
    )
    assert seen and first.notes == second.notes and first.arrays == second.arrays


@pytest.mark.parametrize("to", tc.convert.FORMATS)
def test_small_arrays_are_read_many_at_a_time(tmp_path: Path, to: str) -> None:
    tree: dict[str, Any] = {f"w{n}": torch.full((64,), float(n)) for n in range(1500)}
    tree |= {"tie": tree["w7"], "large": torch.randn(300, 100), "half": torch.ones(3).half(), "empty": torch.ones(0, 2)}
    tc.save(tmp_path / "one", tree)
    reads: list[int] = []
    convert(tmp_path / "one", tmp_path / to, to=to, on_read=lambda done, _: reads.append(done))
    assert len(reads) < 100, "not one read for each array"
    back = tc.load(tmp_path / to)
    assert_same({name: back[name] for name in tree}, tree)


def test_of_many_small_arrays_the_damaged_one_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    tc.save(tmp_path / "one", {f"w{n}": torch.full((1 << 13,), float(n + 1)) for n in range(40)})
    [shard] = (tmp_path / "one").glob("shard*")
    data = bytearray(shard.read_bytes())
    data[data.index(torch.full((1 << 13,), 31.0).numpy().tobytes())] ^= 1
    shard.write_bytes(data)
    with pytest.raises(tc.CorruptError, match=r"^w24, w25, w26 .*checksum"):
        convert(tmp_path / "one", tmp_path / "new.pt")
    convert(tmp_path / "one", tmp_path / "new.pt", select=[f"w{n}" for n in range(10)])
    assert len(torch.load(tmp_path / "new.pt")) == 10
