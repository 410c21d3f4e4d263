"""An index in a file answers as the index itself does, node by node and leaf by leaf."""

import shutil

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.large import large_index
from tests.helpers.samples import gpt_state, write_checkpoint, write_metrics
from treeckpt._core.format.byte_map import extents_in_file, layout_of, locate_chunks
from treeckpt._core.format.records import AliasRecord
from treeckpt._core.tree.containers import PerRank
from treeckpt._inspect.outline import Outline
from treeckpt._inspect.treemap import treemap_of
from treeckpt._loading.run_load import inspect as read_index
from treeckpt._runs.catalog import summarize_index
from treeckpt.errors import FormatError, MismatchError
from treeckpt_dashboard.store.outline_file import StoredOutline, write_outline


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The outline of an index in memory, and in a file."""
    folder = tmp_path_factory.mktemp("stored")
    tree = gpt_state(layers=4)
    tree |= {"odd": {"": 1, "~": 2, "a/b": 3, 7: PerRank({"x": [1, 2]}), "new\nline": (None, "é")}}
    index = write_checkpoint(folder / "c", tree)
    index = read_index(folder / "c")
    summary = write_outline(index, folder / "c.outline")
    assert summary == summarize_index(index)
    return Outline.of(index), StoredOutline(folder / "c.outline")


def test_a_metric_that_is_no_number_comes_back(tmp_path):
    write_metrics(tmp_path, {1: {"loss": np.nan, "best": np.inf}})
    summary = write_outline(read_index(tmp_path / "step_00000001"), tmp_path / "outline")
    back = StoredOutline(tmp_path / "outline").summary
    assert np.isnan(back.metrics["loss"]) and back.metrics["best"] == summary.metrics["best"] == np.inf


def names(outline):
    todo, found = [""], []
    while todo:
        found.append(todo.pop())
        todo += [row.node for row in outline.children(found[-1], count=1000)]
    return found


def test_every_node_reads_the_same(both):
    memory, stored = both
    everything = names(memory)
    assert names(stored) == everything and len(everything) > 200
    for name in everything:
        assert stored.row(name) == memory.row(name)
        assert stored.children(name, count=1000) == memory.children(name, count=1000)
        assert stored.children(name, start=1, count=2) == memory.children(name, start=1, count=2)
        assert stored.node_at(memory.row(name).path) == memory.node_at(memory.row(name).path)


def test_every_leaf_is_found_with_its_bytes(both):
    memory, stored = both
    assert len(stored.index.entries) == len(memory.index.entries)
    assert list(stored.index.entries) == list(memory.index.entries)
    assert list(stored.index.leaves) == list(memory.index.leaves)
    for leaf in memory.index.entries:
        assert stored.index.entries[leaf.number] == leaf
        assert locate_chunks(stored.index, leaf) == locate_chunks(memory.index, leaf)
        assert layout_of(stored.index, leaf) == layout_of(memory.index, leaf)
    for file in memory.index.file_list:
        assert extents_in_file(stored.index, file) == extents_in_file(memory.index, file)


def test_columns_and_paths_of_leaves_are_the_same(both):
    memory, stored = both
    for a, b in zip(stored.columns(), memory.columns(), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    assert memory.columns().nbytes.sum() == memory.index.nbytes and -1 in memory.columns().spec
    for numbers in ([], [3], range(len(memory.index.entries)), [70, 2, 2, 69]):
        assert list(stored.paths(numbers)) == [memory.index.entries[n].path for n in numbers]


@pytest.mark.parametrize("by", ["tree", "part", "rank", "file", "dtype"])
def test_treemaps_are_the_same(both, by):
    memory, stored = both
    for count in (9, 20_000):
        assert treemap_of(stored, by, count=count) == treemap_of(memory, by, count=count)


def test_maps_by_writer_and_part_decode_no_leaf(both, tmp_path, monkeypatch):
    memory, _ = both
    write_outline(memory.index, tmp_path / "t")
    stored = StoredOutline(tmp_path / "t")
    monkeypatch.setattr(type(stored.index.entries), "_read", lambda self, block: pytest.fail("a block is decoded"))
    for by in ("part", "rank", "file", "dtype"):
        assert treemap_of(stored, by) == treemap_of(memory, by)


def test_of_too_many_chunks_no_columns_are_kept(both, tmp_path, monkeypatch):
    memory, _ = both
    monkeypatch.setattr("treeckpt_dashboard.store.outline_file.MAX_CHUNKS", 3)
    write_outline(memory.index, tmp_path / "t")
    stored = StoredOutline(tmp_path / "t")
    assert stored.chunks() is None
    assert {box.leaf for box in treemap_of(stored, "rank")} == {-1}


def test_the_rest_of_the_index_is_the_same(both):
    memory, stored = both
    assert stored.index.structure == memory.index.structure
    for field in memory.index.__struct_fields__:
        if field != "leaves":
            assert getattr(stored.index, field) == getattr(memory.index, field)
    assert stored.summary == summarize_index(memory.index) and stored.index.nbytes == memory.index.nbytes


@pytest.mark.parametrize("word", ["A/B", "odd/a/b", "odd/a~1b", "a~1b", "/a/"])
def test_a_key_with_a_slash_or_tilde_is_found_as_it_is_typed_and_as_it_is_stored(both, word):
    for outline in both:
        assert [leaf.path for leaf in outline.search(word)[0]] == ["odd/a~1b"]
        assert "odd/~0" in [leaf.path for leaf in outline.search("odd/~")[0]]
        assert [leaf.path for leaf in outline.search("~0")[0]] == ["odd/~0"]
        assert outline.search("a/b zzz")[0] == outline.search("a.b")[0] == outline.search("a//b")[0] == []


WORDS = ["model", "layers.1", "QKV", "weight", "exp", "3", "~", "zzz", "line", "a/b", "ODD/A"]


@given(words=st.lists(st.sampled_from(WORDS), max_size=3), start=st.integers(0, 400), count=st.integers(1, 60))
def test_searches_find_the_same_leaves(both, words, start, count):
    memory, stored = both
    assert stored.search(" ".join(words), start=start, count=count) == memory.search(
        " ".join(words), start=start, count=count
    )


@pytest.mark.parametrize("name", ["9", "0.9999", "-1", "0..1", "²", "0.0.0", "99999999999", "x" * 2000])
def test_nodes_that_are_none_are_refused(both, name):
    for outline in both:
        with pytest.raises(MismatchError):
            outline.row(name)


def test_pages_past_the_end_are_empty(both):
    _, stored = both
    assert stored.children("", start=10**30) == [] and stored.search("model", start=10**30) == ([], None)
    assert stored.node_at("model/nothing") is None and stored.node_at("nothing/at/all") is None


def test_a_tree_that_is_one_leaf(tmp_path):
    write_checkpoint(tmp_path / "c", np.zeros((4, 4), np.float32))
    index = read_index(tmp_path / "c")
    write_outline(index, tmp_path / "t")
    stored = StoredOutline(tmp_path / "t")
    assert stored.row() == Outline.of(index).row() and stored.children() == [] and stored.node_at("") == stored.row()


def test_more_bytes_than_64_bits_hold_are_refused_and_leave_nothing(tmp_path):
    index = large_index(40)
    big = msgspec.structs.replace(index.specs[0], shape=(1 << 30, 1 << 29))
    bad = msgspec.structs.replace(index, specs=(big, index.specs[1]))
    with pytest.raises(FormatError, match="2\\*\\*63"):
        write_outline(bad, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_none_of_ours_are_refused(tmp_path):
    (tmp_path / "t").write_bytes(b"nothing" * 1000)
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        StoredOutline(tmp_path / "t")


def test_an_open_table_may_be_deleted(both, tmp_path):
    memory, _ = both
    write_outline(memory.index, tmp_path / "t")
    stored = StoredOutline(tmp_path / "t")
    shutil.rmtree(tmp_path)
    assert stored.children() == memory.children()


def test_ties_count_where_they_were_written(tmp_path):
    index = large_index(40)
    alias = AliasRecord(0, 0)
    tied = msgspec.structs.replace(index, leaves=(index.leaves[0], alias, *index.leaves[2:]))
    write_outline(tied, tmp_path / "t")
    rows = StoredOutline(tmp_path / "t").children("0", count=2)
    assert rows[0].nbytes == 64 * 64 * 4 and rows[1].nbytes == 0
