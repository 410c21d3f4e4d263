"""Changed bytes: every region of every file, changed in every way, is found; and a lost index comes back equal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.corruption import CHANGES, TREES, drop, flip, swap, zero
from tests.helpers.world import assert_equal, assert_holds, errors_of, on_ranks, small_tree, whole_tree
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.shard_header import BLOCK, parse_shard_name

WORLD = 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of two ranks; every test leaves it as it was."""
    path = tmp_path_factory.mktemp("corruption") / "c"
    assert errors_of(on_ranks(WORLD, lambda c: tc.save(path, small_tree(c.rank, WORLD), comm=c))) == [None] * WORLD
    yield path
    assert_holds(path, seed=0)


def places(nbytes: int, header: int) -> list[int]:
    """Where to change a file: its borders densely, the rest in steps."""
    borders = [*range(40), *range(header - 3, header + 3), *range(nbytes - 8, nbytes)]
    steps = range(0, nbytes, max(1, nbytes // 60))
    return sorted({at for at in (*borders, *steps) if 0 <= at < nbytes})


def found(path: Path, name: str) -> list[str]:
    """What finds the change: loading everything, and verifying; each by an error of ours that names the file."""
    finders: list[str] = []
    try:
        tree = tc.load(path, fallback=tc.Fallback(per_rank="take"))
    except tc.CheckpointError as error:
        assert name in str(error) and error.expected and error.found, str(error)
        finders.append("load")
    else:
        assert_equal(tree, whole_tree())  # a change that a load does not find does not change what is loaded
    try:
        report = tc.verify(path)
    except tc.CheckpointError as error:
        assert name in str(error)
        finders.append("verify")
    else:
        if not report.ok:
            assert name in str(report)
            finders.append("verify")
    return finders


@pytest.mark.parametrize(
    "change",
    # of those that keep the length one is enough each time
    [pytest.param(c, id=c.__name__, marks=[pytest.mark.slow] if c in (zero, swap, drop) else []) for c in CHANGES],
)
def test_every_change_of_every_file_is_found(saved: Path, change: Callable[[bytes, int], bytes]) -> None:
    files = sorted(saved.iterdir())
    assert len(files) == WORLD + 2
    for file in files:
        data = file.read_bytes()
        header = 4096 if parse_shard_name(file.name) else 200
        tried = 0
        for at in places(len(data), header):
            changed = change(data, at)
            if changed == data:
                continue
            file.write_bytes(changed)
            finders = found(saved, file.name)
            assert "verify" in finders, f"{change.__name__} at {at} of {file.name}"
            if not file.name.startswith("timings."):
                assert "load" in finders, f"{change.__name__} at {at} of {file.name}"
            tried += 1
        file.write_bytes(data)
        assert tried > 20, file.name


def test_a_change_in_each_block_names_its_leaf(tmp_path: Path) -> None:
    tree = {f"layer{n}": np.arange(BLOCK // 8 + n * 512, dtype=np.int64) for n in range(4)}
    (name,) = tc.save(tmp_path / "c", tree).files
    file = tmp_path / "c" / name
    data, index = file.read_bytes(), tc.inspect(tmp_path / "c")
    for leaf in index.entries:
        (chunk,) = index.chunks_of(leaf)
        _, start = index.locate(chunk.rank, chunk.start, chunk.start + 8, leaf.path)
        for at in (start, start + tree[leaf.path].nbytes - 1):
            file.write_bytes(flip(data, at))
            with pytest.raises(tc.CorruptError) as caught:
                tc.load(tmp_path / "c")
            assert leaf.path in caught.value.path and name in caught.value.path
            low, _, high = caught.value.found.partition("changed bytes in ")[2].split(" ")[0].partition(":")
            assert int(low) <= at < int(high)
            others = [key for key in tree if key not in caught.value.path]
            kept = tc.load(tmp_path / "c", select=others)
            assert all(np.array_equal(kept[key], tree[key]) for key in others), "the rest can still be had"
    file.write_bytes(data)


def test_without_verification_changed_bytes_come_through_and_nothing_else_breaks(tmp_path: Path) -> None:
    (name,) = tc.save(tmp_path / "c", {"w": np.zeros(1000, np.uint8)}).files
    file = tmp_path / "c" / name
    file.write_bytes(flip(file.read_bytes(), file.stat().st_size - 1))
    assert tc.load(tmp_path / "c", read=tc.ReadOptions(verify=False))["w"].any()


# rebuilding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 100], ids=["whole", "split"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", TREES)
def test_a_lost_index_is_rebuilt_equal(tmp_path: Path, name: str, world: int, limit: int | None) -> None:
    path, make = tmp_path / "c", TREES[name]
    outcomes = on_ranks(
        world,
        lambda c: tc.save(
            path, make(c.rank, world), comm=c, step=9, max_shard_bytes=limit, custom_metadata={"loss": 0.5, "t": (1, 2)}
        ),
    )
    assert errors_of(outcomes) == [None] * world
    index, data = tc.inspect(path), (path / INDEX_NAME).read_bytes()
    assert tc.verify(path).ok, str(tc.verify(path))
    os.unlink(path / INDEX_NAME)
    with pytest.raises(tc.CheckpointNotFound, match=f"{len(index.file_list)} shards? of a save that never finished"):
        tc.load(path)
    assert tc.rebuild_index(path) == index == tc.inspect(path)
    assert (path / INDEX_NAME).read_bytes() == data
    assert tc.verify(path).ok
    if limit == 100 and name == "sharded":
        assert len(index.file_list) > world, "the limit splits files"


def test_an_index_is_rebuilt_over_another_only_on_request(saved: Path) -> None:
    with pytest.raises(tc.CheckpointExists, match="replace=True"):
        tc.rebuild_index(saved)
    before = (saved / INDEX_NAME).read_bytes()
    (saved / INDEX_NAME).write_bytes(b"broken")
    tc.rebuild_index(saved, replace=True)
    assert (saved / INDEX_NAME).read_bytes() == before


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_without_shards_there_is_nothing_to_rebuild(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(tc.CheckpointNotFound) as caught:
        tc.rebuild_index(tmp_path / name)
    assert caught.value.expected == "shards" and caught.value.hint
    assert not (tmp_path / "nothing").exists()


def test_an_index_is_not_rebuilt_from_shards_that_are_not_whole(saved: Path) -> None:
    index = (saved / INDEX_NAME).read_bytes()
    os.unlink(saved / INDEX_NAME)
    for file in sorted(saved.glob("*.safetensors")):
        data = file.read_bytes()
        for change in (b"", data[:-1], data[:100], flip(data, 2000), bytes(len(data)), None):
            if change is None:
                os.unlink(file)
            else:
                file.write_bytes(change)
            with pytest.raises(tc.CheckpointError):
                tc.rebuild_index(saved)
            assert not (saved / INDEX_NAME).exists()
        file.write_bytes(data)
    (saved / INDEX_NAME).write_bytes(index)


def test_rebuilding_takes_the_newest_whole_save(tmp_path: Path) -> None:
    """Torn shards of a later save, and whole ones of an earlier, lie beside it."""
    for seed, path in enumerate(("old", "new", "torn")):
        tc.save(tmp_path / path, whole_tree(seed=seed))
    new = tmp_path / "new"
    index = tc.inspect(new)
    (old,) = (tmp_path / "old").glob("*.safetensors")
    (new / old.name).write_bytes(old.read_bytes())
    (torn,) = (tmp_path / "torn").glob("*.safetensors")
    for data in (torn.read_bytes()[:-1], b"", bytes(10_000), torn.read_bytes().replace(b"treeckpt", b"stranger", 1)):
        (new / torn.name).write_bytes(data)
        os.unlink(new / INDEX_NAME)
        assert tc.rebuild_index(new) == index
        assert_equal(tc.load(new), whole_tree(seed=1))
    (new / torn.name).write_bytes(torn.read_bytes())
    assert tc.rebuild_index(new, replace=True) == index, "that of the save which was committed"
    os.unlink(new / INDEX_NAME)
    assert tc.rebuild_index(new) == tc.inspect(tmp_path / "torn")


def test_foreign_files_are_no_shards(saved: Path) -> None:
    names = ["model.safetensors", "shard-00000-of-00001.safetensors", "index.json.bak", "notes"]
    for name in names:
        (saved / name).write_bytes(b"mine")
    assert tc.rebuild_index(saved, replace=True) == tc.inspect(saved)
    assert_holds(saved, seed=0)
    for name in names:
        os.unlink(saved / name)
