"""Bad input: each kind gets an error of ours that says path, expected, found and a hint; nothing is half done."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.world import (
    assert_equal,
    assert_holds,
    on_ranks,
    reseal,
    reseal_shard,
    shards_of,
    small_tree,
    whole_tree,
)
from treeckpt._core.format.index import INDEX_NAME, SHARING_VERSION, VERSION


class Unknown:
    def __init__(self, note: str = "") -> None:
        self.note = note

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown) and other.note == self.note

    __hash__ = None  # type: ignore[assignment]


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def says(error: BaseException, kind: type[tc.TreeckptError], *, path: str, hint: bool = True) -> None:
    assert type(error) is kind, repr(error)
    assert isinstance(error, tc.TreeckptError)
    assert path in error.path, error.path
    assert error.expected and error.found, str(error)
    assert error.hint or not hint, f"no hint: {error}"
    assert len(str(error)) < 2000


# save -----------------------------------------------------------------------------------------------------------------
def _cycle() -> Any:
    tree: dict[str, Any] = {"a": []}
    tree["a"].append(tree)
    return tree


def _deep() -> Any:
    tree: Any = 1
    for _ in range(5000):
        tree = [tree]
    return tree


class Meta(torch.Tensor):
    pass


BAD_TREES: dict[str, tuple[Callable[[], Any], type[tc.TreeckptError], str]] = {
    "unknown leaf": (lambda: {"a": [1, {"b": Unknown()}]}, tc.TreeError, "a/1/b"),
    "function": (lambda: {"f": len}, tc.TreeError, "f"),
    "lambda": (lambda: {"f": lambda: 0}, tc.TreeError, "f"),
    "class": (lambda: {"f": int}, tc.TreeError, "f"),
    "generator": (lambda: {"g": (i for i in ())}, tc.TreeError, "g"),
    "file": (lambda: {"g": memoryview(b"x")}, tc.TreeError, "g"),
    "bad key": (lambda: {"a": {Unknown: 1}}, tc.TreeError, "a"),
    "bad key in a tuple": (lambda: {"a": {(1, frozenset()): 1}}, tc.TreeError, "a"),
    "nan key": (lambda: {"a": {float("nan"): 1}}, tc.TreeError, "a"),
    "cycle": (_cycle, tc.TreeError, "a/0"),
    "too deep": (_deep, tc.TreeError, "0/0"),
    "meta tensor": (lambda: {"m": {"w": torch.empty(3, device="meta")}}, tc.TreeError, "m/w"),
    "object array": (lambda: {"w": np.array([object()])}, tc.TreeError, "w"),
    "structured array": (lambda: {"w": np.zeros(3, "i4,f8")}, tc.TreeError, "w"),
    "tensor subclass": (lambda: {"w": torch.eye(3).as_subclass(type("Own", (torch.Tensor,), {}))}, tc.TreeError, "w"),
    "abstract leaf": (lambda: {"w": tc.ArraySpec((3,), "float32")}, tc.TreeError, "w"),
    "ellipsis leaf": (lambda: {"w": ...}, tc.TreeError, "w"),
    "piece outside": (lambda: {"w": tc.Sharded(np.ones(3), (4,), (2,))}, tc.LayoutError, "w"),
    "piece with a gap": (lambda: {"w": tc.Sharded(np.ones(3), (4,), (0,))}, tc.LayoutError, "w"),
    "piece of other rank": (lambda: {"w": tc.Sharded(np.ones(3), (3, 1), (0, 0))}, tc.LayoutError, "w"),
    "negative offset": (lambda: {"w": tc.Sharded(np.ones(3), (3,), (-1,))}, tc.LayoutError, "w"),
    "value in Sharded": (lambda: {"w": tc.Sharded(5, (3,), (0,))}, tc.TreeError, "w"),
}


@pytest.mark.parametrize("name", BAD_TREES)
def test_trees_that_cannot_be_saved(tmp_path: Path, name: str) -> None:
    make, kind, path = BAD_TREES[name]
    with pytest.raises(tc.TreeckptError) as caught:
        tc.save(tmp_path / "c", make())
    says(caught.value, kind, path=path)
    left = [p.name for p in tmp_path.rglob("*") if not p.is_dir() and not p.name.startswith("timings.")]
    assert not left


def test_metadata_that_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeError) as caught:
        tc.save(tmp_path / "c", {"v": 1}, custom_metadata={"who": Unknown()})
    says(caught.value, tc.TreeError, path="custom_metadata/who")
    assert not (tmp_path / "c").exists()


def test_a_checkpoint_that_exists_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", whole_tree(seed=1))
    before = {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()}
    with pytest.raises(tc.CheckpointExists) as caught:
        tc.save(tmp_path / "c", whole_tree(seed=2))
    says(caught.value, tc.CheckpointExists, path=str(tmp_path / "c"))
    assert "overwrite=True" in caught.value.hint
    assert {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()} == before
    tc.save(tmp_path / "c", whole_tree(seed=3), overwrite=True)
    assert_holds(tmp_path / "c", seed=3)
    assert not set(before) - {INDEX_NAME} & {p.name for p in (tmp_path / "c").iterdir()}, "the old files are gone"


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "file", tmp_path / "file" / "c", tmp_path / "loop" / "c", Path("/proc/nothing/c")):
        with pytest.raises(tc.CheckpointError) as caught:
            tc.save(path, {"w": np.ones(3)})
        says(caught.value, tc.CheckpointError, path=str(path))
    with pytest.raises(tc.CheckpointError):
        tc.save(tmp_path / ("x" * 300), {"w": np.ones(3)})
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "call",
    [
        lambda path: tc.save({"a": 1}, path),
        lambda path: tc.save_async({"a": 1}, path),
        lambda path: tc.load({"a": 1}, path),
        lambda path: tc.load_into({"a": 1}, path),
        lambda path: tc.inspect(None),
        lambda path: tc.verify(5),
    ],
)
def test_what_is_no_path_is_told_where_the_path_stands(tmp_path: Path, call: Any) -> None:
    with pytest.raises(
        tc.CheckpointError, match=r"path: expected a path.*found (dict|NoneType|int)\. The path comes first"
    ):
        call(tmp_path / "c")


def test_what_is_no_comm_is_named(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeckptError, match=r"comm: expected a process group of torch.distributed.*found 'gloo'"):
        tc.save(tmp_path / "c", {"a": 1}, comm="gloo")


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind the superuser")
def test_a_directory_without_permission(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir(mode=0o500)
    with pytest.raises(tc.CheckpointError) as caught:
        tc.save(tmp_path / "c", {"w": np.ones(3)})
    says(caught.value, tc.CheckpointError, path=str(tmp_path / "c"), hint=False)


# load: what is wanted is not what was saved ---------------------------------------------------------------------------
@pytest.fixture
def path(tmp_path: Path) -> Path:
    tree = {"w": torch.arange(6.0).reshape(2, 3), "n": np.arange(4), "v": 7, "pair": (1, "a")}
    tc.save(tmp_path / "c", tree | {"s": {"x": torch.ones(2)}})
    return tmp_path / "c"


def like(**changes: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {"w": torch.full((2, 3), 9.0), "n": np.full(4, 9), "v": 9, "pair": (1, "a")}
    tree |= {"s": {"x": torch.full((2,), 9.0)}} | changes
    return {key: value for key, value in tree.items() if value is not None}


WRONG: dict[str, tuple[Callable[[], Any], str, str]] = {
    "missing key": (lambda: like(extra=torch.ones(1)), "extra", "1 missing in the checkpoint: extra"),
    "unexpected key": (lambda: like(v=None), "v", "1 not asked for: v"),
    "missing and unexpected": (lambda: like(v=None, u=1), "u", "missing in the checkpoint: u; 1 not asked for: v"),
    "key in another place": (lambda: like(s=[torch.ones(2)]), "s/0", "missing"),
    "shape": (lambda: like(w=torch.ones(3, 2)), "w", "(2, 3)"),
    "broadcastable shape": (lambda: like(w=torch.ones(1, 3)), "w", "(2, 3)"),
    "rank": (lambda: like(w=torch.ones(6)), "w", "(2, 3)"),
    "shape of numpy": (lambda: like(n=np.ones(5, np.int64)), "n", "(4,)"),
    "shape of a spec": (lambda: like(w=tc.ArraySpec((2, 4), "float32")), "w", "(2, 3)"),
    "dtype": (lambda: like(w=torch.ones(2, 3, dtype=torch.float64)), "w", "float32"),
    "float to int": (lambda: like(w=torch.ones(2, 3, dtype=torch.int8)), "w", "float32"),
    "dtype of numpy": (lambda: like(n=np.ones(4, np.int32)), "n", "int64"),
    "array for a value": (lambda: like(v=torch.ones(1)), "v", "7"),
    "value for an array": (lambda: like(w=3.0), "w", "an array in the checkpoint"),
    "value for a numpy array": (lambda: like(n="text"), "n", "an array in the checkpoint"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("into", [False, True], ids=["load", "load_into"])
def test_targets_that_do_not_fit(path: Path, name: str, into: bool) -> None:
    make, leaf, found = WRONG[name]
    target = make()
    with pytest.raises(tc.MismatchError) as caught:
        tc.load_into(path, target) if into else tc.load(path, target)
    says(caught.value, tc.MismatchError, path=leaf, hint=False)
    assert found in str(caught.value)
    untouched(target, make())


def untouched(found: Any, expected: Any) -> None:
    assert [(k, _plain(v)) for k, v in _items(found)] == [(k, _plain(v)) for k, v in _items(expected)]


def _plain(leaf: Any) -> Any:
    return (str(leaf.dtype), leaf.tolist()) if hasattr(leaf, "tolist") else repr(leaf)


def _items(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [item for key, value in tree.items() for item in _items(value, f"{prefix}/{key}")]
    if isinstance(tree, (list, tuple)):
        return [item for key, value in enumerate(tree) for item in _items(value, f"{prefix}/{key}")]
    return [(prefix, tree)]


def test_many_missing_keys_are_counted_not_listed(path: Path) -> None:
    with pytest.raises(tc.MismatchError, match=r"200 missing .* and 195 more"):
        tc.load(path, like(**{f"extra{n}": 1 for n in range(200)}))


def test_without_strict_differences_are_reported(path: Path) -> None:
    reports: list[tc.LoadReport] = []
    tree = tc.load(path, like(v=None, extra=torch.ones(1)), strict=False, on_report=reports.append)
    assert reports[0].missing == ("extra",) and reports[0].unexpected == ("v",)
    assert tree["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and tree["extra"].tolist() == [1] and "v" not in tree
    target = like(v=None, extra=torch.ones(1))
    report = tc.load_into(path, target, strict=False)
    assert (report.missing, report.unexpected) == (("extra",), ("v",)) and target["w"][1, 2] == 5
    with pytest.raises(tc.MismatchError):
        tc.load(path, like(w=torch.ones(1), extra=1), strict=False)


def test_casts_happen_only_on_request(path: Path) -> None:
    target = like(w=torch.ones(2, 3, dtype=torch.bfloat16), n=np.zeros(4, np.float32))
    tc.load_into(path, target, cast=True)
    assert target["w"].dtype == torch.bfloat16 and target["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert target["n"].dtype == np.float32 and target["n"].tolist() == [0, 1, 2, 3]


def test_values_beside_arrays_in_tuples_are_refused_before_anything_is_filled(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", like(pair=(1, torch.ones(1))))
    target = like(pair=(2, torch.full((1,), 9.0)))
    with pytest.raises(tc.MismatchError) as caught:
        tc.load_into(tmp_path / "c", target)
    says(caught.value, tc.MismatchError, path="pair/0")
    untouched(target, like(pair=(2, torch.full((1,), 9.0))))
    assert tc.load(tmp_path / "c", target)["pair"] == (1, torch.ones(1))


def test_values_in_a_tuple_at_the_root_are_refused(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", (1, "a"))
    with pytest.raises(tc.MismatchError, match=r"in a container that can change.*\(1, 'a'\)"):
        tc.load_into(tmp_path / "c", (2, "a"))


def test_a_target_that_cannot_be_written_is_refused_before_anything_is_filled(path: Path) -> None:
    frozen = np.full(4, 9)
    frozen.flags.writeable = False
    expanded = torch.full((1,), 9.0).expand(2, 3)
    for changes in ({"n": frozen}, {"w": expanded}, {"w": torch.empty(2, 3, device="meta")}):
        target = like(**changes)
        with pytest.raises(tc.TreeckptError) as caught:
            tc.load_into(path, target)
        assert caught.value.path in ("n", "w") and caught.value.expected
        assert target["s"]["x"].tolist() == [9, 9]


def test_a_trainable_leaf_is_filled_in_place(path: Path) -> None:
    weight = torch.nn.Parameter(torch.full((2, 3), 9.0))
    tc.load_into(path, like(w=weight))
    assert weight.tolist() == [[0, 1, 2], [3, 4, 5]] and weight.requires_grad


@dataclasses.dataclass
class Config:
    width: int


Point = collections.namedtuple("Point", "x y")


def test_classes_that_are_gone_or_changed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tc.save(tmp_path / "c", {"config": Config(3)})
    with monkeypatch.context() as patch:
        patch.delitem(globals(), "Config")
        with pytest.raises(tc.MismatchError) as caught:
            tc.load(tmp_path / "c")
        says(caught.value, tc.MismatchError, path="config")
        assert "Config" in str(caught.value)
    other = dataclasses.make_dataclass("Config", ["height"])
    monkeypatch.setitem(globals(), "Config", other)
    with pytest.raises(tc.MismatchError, match="config"):
        tc.load(tmp_path / "c")


def test_pickles_need_the_word_twice(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeError, match="allow_pickle=True"):
        tc.save(tmp_path / "c", {"u": Unknown("x"), "w": np.ones(2)})
    tc.save(tmp_path / "c", {"u": Unknown("x"), "w": np.ones(2)}, allow_pickle=True)
    for act in (lambda: tc.load(tmp_path / "c"), lambda: tc.load_into(tmp_path / "c", {"u": 1, "w": np.zeros(2)})):
        with pytest.raises(tc.MismatchError) as caught:
            act()
        says(caught.value, tc.MismatchError, path="u")
        assert "allow_pickle=True" in caught.value.hint
    assert tc.load(tmp_path / "c", allow_pickle=True)["u"] == Unknown("x")
    assert tc.load(tmp_path / "c", select="w")["w"].tolist() == [1, 1]


def test_nothing_runs_while_a_pickle_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    tc.save(tmp_path / "c", {"e": Evil(str(mark))}, allow_pickle=True)
    with pytest.raises(tc.MismatchError):
        tc.load(tmp_path / "c")
    tc.inspect(tmp_path / "c")
    assert tc.verify(tmp_path / "c").ok
    assert not mark.exists()
    tc.load(tmp_path / "c", allow_pickle=True)
    assert mark.exists()


def test_a_pickle_that_does_not_load_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tc.save(tmp_path / "c", {"u": Unknown("x")}, allow_pickle=True)
    for error in (ImportError("no module named gone"), EOFError(), pickle.UnpicklingError("odd"), RuntimeError("x")):

        def loads(data: bytes, error: Exception = error) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(pickle, "loads", loads)
            with pytest.raises(tc.MismatchError) as caught:
                tc.load(tmp_path / "c", allow_pickle=True)
            says(caught.value, tc.MismatchError, path="u")


# load: the state of the files -----------------------------------------------------------------------------------------
@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""
    assert all(o.error is None for o in on_ranks(2, lambda c: tc.save(tmp_path / "c", small_tree(c.rank, 2), comm=c)))
    return tmp_path / "c"


def load_fails(
    path: Path, kind: type[tc.TreeckptError], *, name: str, hint: bool = True, verify: Any = True
) -> tc.TreeckptError:
    """Loading, with and without a target, fails alike, and leaves the target as it was."""
    target = whole_tree(seed=9)
    for act in (
        lambda: tc.load(path, fallback=tc.Fallback(per_rank="take")),
        lambda: tc.load(path, whole_tree(), fallback=tc.Fallback(per_rank="take")),
        lambda: tc.load_into(path, target, read=tc.ReadOptions(verify=verify), fallback=tc.Fallback(per_rank="take")),
    ):
        with pytest.raises(tc.TreeckptError) as caught:
            act()
        says(caught.value, kind, path=name, hint=hint)
    assert_equal(target, whole_tree(seed=9))
    return caught.value


@pytest.mark.parametrize("what", ["nothing", "empty directory", "file", "partial"])
def test_there_is_no_checkpoint(tmp_path: Path, saved: Path, what: str) -> None:
    path = tmp_path / what
    if what == "empty directory":
        path.mkdir()
    elif what == "file":
        path.write_bytes(b"x")
    elif what == "partial":
        os.unlink(saved / INDEX_NAME)
        path = saved
    for act in (tc.load, tc.inspect, tc.verify, lambda p: tc.load_into(p, {})):
        with pytest.raises(tc.CheckpointNotFound) as caught:
            act(path)
        says(caught.value, tc.CheckpointNotFound, path=str(path))
        assert ("2 shards of a save that never finished" in caught.value.found) == (what == "partial")


def test_a_truncated_shard(saved: Path) -> None:
    for name, cut in ((shards_of(saved)[1], 1), (shards_of(saved)[0], 5000), (shards_of(saved)[0], None)):
        data = name.read_bytes()
        name.write_bytes(data[: len(data) - cut] if cut else b"")
        error = load_fails(saved, tc.CorruptError, name=name.name)
        assert f"{len(data)} bytes" in error.expected
        name.write_bytes(data)
    assert_equal(tc.load(saved, fallback=tc.Fallback(per_rank="take")), whole_tree())


def test_a_grown_shard(saved: Path) -> None:
    with shards_of(saved)[1].open("ab") as file:
        file.write(b"\x00")
    load_fails(saved, tc.CorruptError, name=shards_of(saved)[1].name)


def test_a_missing_shard(saved: Path) -> None:
    gone = shards_of(saved)[0]
    os.unlink(gone)
    error = load_fails(saved, tc.CorruptError, name=gone.name)
    assert "no such file" in error.found
    assert not tc.verify(saved).ok


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_in_the_data_names_leaf_and_bytes(saved: Path) -> None:
    shard = shards_of(saved)[0]
    flip(shard, shard.stat().st_size - 3)
    error = load_fails(saved, tc.CorruptError, name=shard.name, verify="first")
    assert "changed bytes in " in error.found and ":" in error.path
    assert not tc.verify(saved).ok and shard.name in str(tc.verify(saved))


def test_a_flipped_byte_in_the_header(saved: Path) -> None:
    for at in (0, 9, 500, 4095):
        shard = shards_of(saved)[1]
        flip(shard, at)
        load_fails(saved, tc.CorruptError, name=shard.name, hint=at > 8)
        flip(shard, at)


def test_a_flipped_byte_in_the_index(saved: Path) -> None:
    for at in (2, 12, 100, (saved / INDEX_NAME).stat().st_size - 1):
        flip(saved / INDEX_NAME, at)
        load_fails(saved, tc.CorruptError, name=INDEX_NAME)
        with pytest.raises(tc.CorruptError, match=INDEX_NAME):
            tc.inspect(saved)
        flip(saved / INDEX_NAME, at)


def test_a_flipped_byte_in_the_timings_harms_no_load(saved: Path) -> None:
    (timings,) = saved.glob("timings.*")
    flip(timings, 100)
    assert_equal(tc.load(saved, fallback=tc.Fallback(per_rank="take")), whole_tree())
    report = tc.verify(saved)
    assert [problem.file for problem in report.problems] == [timings.name]


def test_files_of_another_step_are_refused(tmp_path: Path, saved: Path) -> None:
    other = tmp_path / "other"
    on_ranks(2, lambda c: tc.save(other, small_tree(c.rank, 2), comm=c, step=7))
    for mine, theirs in zip(shards_of(saved), shards_of(other), strict=True):
        data = mine.read_bytes()
        assert mine.stat().st_size == theirs.stat().st_size
        mine.write_bytes(theirs.read_bytes())
        error = load_fails(saved, tc.CorruptError, name=mine.name)
        assert f"save {tc.inspect(other).save_id}" in error.found and "another save" in error.hint
        mine.write_bytes(data)
    (mine,), (theirs,) = saved.glob("timings.*"), other.glob("timings.*")
    mine.write_bytes(theirs.read_bytes())
    assert [problem.file for problem in tc.verify(saved).problems] == [mine.name]
    (saved / INDEX_NAME).write_bytes((other / INDEX_NAME).read_bytes())
    load_fails(saved, tc.CorruptError, name=f"{tc.inspect(other).save_id}.safetensors")


def test_shards_of_other_ranks_are_refused(saved: Path) -> None:
    first, second = shards_of(saved)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    load_fails(saved, tc.CorruptError, name="shard-0000")


def test_unknown_versions_are_refused_by_name(saved: Path) -> None:
    reseal(saved, lambda document: document.update(version=SHARING_VERSION + 1))
    error = load_fails(saved, tc.FormatError, name=INDEX_NAME)
    assert f"index version {VERSION}" in error.expected and f"version {SHARING_VERSION + 1}" in error.found
    reseal(saved, lambda document: document.update(version=SHARING_VERSION))  # which needs references
    load_fails(saved, tc.FormatError, name=INDEX_NAME)
    reseal(saved, lambda document: document.update(version=1, format="other"))
    load_fails(saved, tc.FormatError, name=INDEX_NAME)
    reseal(saved, lambda document: document.update(format="treeckpt"))
    reseal_shard(shards_of(saved)[0], lambda header: header["__metadata__"].update(version="3"))
    error = load_fails(saved, tc.FormatError, name=shards_of(saved)[0].name)
    assert "version 1" in error.expected and "version 3" in error.found


def test_unknown_fields_of_the_index_are_refused_by_name(saved: Path) -> None:
    reseal(saved, lambda document: document["index"].update(encryption="rot13"))
    error = load_fails(saved, tc.FormatError, name=INDEX_NAME, hint=False)
    assert "encryption" in error.found


def test_errors_survive_processes(tmp_path: Path) -> None:
    with pytest.raises(tc.CheckpointNotFound) as caught:
        tc.load(tmp_path / "none")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is tc.CheckpointNotFound and str(again) == str(caught.value)
    assert (again.path, again.hint) == (caught.value.path, caught.value.hint)


def test_paths_may_be_relative_and_of_any_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "with space", "ünïcode", pathlib.PurePosixPath("pure"), "a/b/../c"):
        tc.save(name, {"v": 1})
        assert tc.load(name) == {"v": 1}
