"""The outline of an index: each node with what is below it, their numbers, and searches for leaves."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers.indexes import index_of
from tests.helpers.large import large_index
from tests.helpers.samples import write_checkpoint
from treeckpt._core.format.byte_map import extents_in_file, locate_chunks
from treeckpt._core.format.records import AliasRecord, ArrayRecord, PerRankArrays, ValueRecord, WholeChunk
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import Mesh, MeshLayout, Replicate, Shard
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._core.tree.structure import DictNode, ListNode, PerRankNode
from treeckpt._inspect.outline import Outline
from treeckpt.errors import MismatchError


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("c") / "c", max_shard_bytes=500_000)


def test_every_nodes_bytes_are_the_sum_of_its_childrens(index):
    outline, todo, leaves = Outline.of(index), [""], 0
    while todo:
        row = outline.row(todo.pop())
        children = outline.children(row.node, count=1 << 20)
        assert outline.node_at(row.path) == row
        if row.kind == "leaf":
            leaves += 1
        else:
            assert (sum(c.nbytes for c in children), sum(c.leaves for c in children)) == (row.nbytes, row.leaves)
        todo += [c.node for c in children]
    assert leaves == len(index.leaves) and outline.row().nbytes == index.nbytes


def test_nodes_that_are_not_there(index):
    outline = Outline.of(index)
    for name in ("9", "0.9999", "x", "0..1", "-1", "0.0.0"):
        with pytest.raises(MismatchError):
            outline.row(name)
    assert outline.node_at("model/nothing") is None and outline.node_at("model/wte.weight/x") is None


def test_searches_go_on_where_they_stopped(index):
    outline = Outline.of(index)
    every = [leaf for leaf in index.entries if "mlp" in leaf.path and "weight" in leaf.path.lower()]
    found, start, searches = [], 0, 0
    while start is not None:
        some, start = outline.search("WEIGHT mlp", start=start, count=5)
        found, searches = found + some, searches + 1
        assert 0 < len(some) <= 5
    assert found == every and searches == -(-len(every) // 5) > 1
    assert outline.search("mlp weight", count=len(every)) == (every, None)
    assert outline.search("mlp weight", start=every[-1].number) == (every[-1:], None)
    assert outline.search("no such leaf") == ([], None)


def test_a_search_disregards_case_also_beside_keys_with_line_feeds(tmp_path):
    tc.save(tmp_path / "c", {"Layer": 1, "Line\nFeed": 2})
    outline = Outline.of(tc.inspect(tmp_path / "c"))
    for words, path in (("layer", "Layer"), ("LAYER", "Layer"), ("line feed", "Line\nFeed"), ("feed", "Line\nFeed")):
        assert [leaf.path for leaf in outline.search(words)[0]] == [path]


def test_children_are_listed_from_any_position(index):
    outline = Outline.of(index)
    every = outline.children("0", count=1000)
    assert len(every) > 10 and outline.children("0", start=3, count=4) == every[3:7]
    assert outline.children("0", start=len(every) - 1) == every[-1:] and outline.children("0.0") == []


def test_replicas_are_held_by_each_of_their_ranks():
    ranks = encode_runs(range(6))
    layouts = (
        MeshLayout(Mesh((2, 3), ranks), (Replicate(), Shard(0))),
        MeshLayout(Mesh((2, 3), ranks), (Replicate(), Replicate())),
    )
    own = PerRankNode((encode_runs([1, 4]),), (None,))
    structure = DictNode(("halves", "whole", "pieces", "tie", "value", "own"), (None,) * 5 + (own,))
    chunk = WholeChunk(0, 0)
    records = {
        "halves": ArrayRecord(0, 0, chunk), "whole": ArrayRecord(0, 1, chunk), "pieces": ArrayRecord(0, -1, chunk),
        "tie": AliasRecord(0, 0), "value": ValueRecord(1), "own": PerRankArrays(1, ((0, 8, 2),)),
    }  # fmt: skip
    specs = [ArraySpec((6,), "uint8"), ArraySpec((100,), "uint8")]
    index = index_of(records, specs, structure=structure, layouts=layouts, world=6)
    assert index.held_nbytes == 2 * 6 + 6 * 6 + 6 + 2 * 100


def test_extents_are_the_inverse_of_located_chunks(index):
    assert len(index.file_list) > 4  # a size limit was given: ranks have several files
    by_file = {(f.name, e.leaf, e.region, e.start, e.stop) for f in index.file_list for e in extents_in_file(index, f)}
    by_leaf = {(c.file.name, n, c.region, c.start, c.stop) for n, leaf in enumerate(index.entries)
               for c in locate_chunks(index, leaf) if c.stop > c.start}  # fmt: skip
    assert by_file == by_leaf


@settings(max_examples=30)
@given(st.recursive(st.none(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers(), inner,
                    max_size=4), max_leaves=30))  # fmt: skip
def test_any_tree_is_numbered_so_that_children_stand_side_by_side(shape):
    def build(node):
        if node is None:
            return None
        if isinstance(node, list):
            return ListNode(tuple(build(child) for child in node))
        return DictNode(tuple(node), tuple(build(child) for child in node.values()))

    count = sum(1 for _ in _leaves(shape))
    index = msgspec.structs.replace(large_index(4), structure=build(shape), leaves=(ValueRecord(1),) * count)
    outline = Outline.of(index)
    following = [1]  # numbers of nodes in the order of their parents

    def check(row, part, first):
        children = [] if part is None else list(part.values()) if isinstance(part, dict) else part
        keys = list(part) if isinstance(part, dict) else range(len(children))
        leaves = [len(list(_leaves(child))) for child in children]
        assert (row.first, row.leaves, row.children) == (first, sum(leaves) if part is not None else 1, len(children))
        assert row.kind == ("leaf" if part is None else "dict" if isinstance(part, dict) else "list")
        rows = outline.children(row.node, count=1000)
        assert [(one.key, one.node) for one in rows] == [
            (str(key), f"{row.node}.{at}" if row.node else str(at)) for at, key in enumerate(keys)
        ]
        assert [one.number for one in rows] == list(range(following[0], following[0] + len(rows)))
        following[0] += len(rows)
        return [
            (one, child, first + sum(leaves[:at])) for at, (one, child) in enumerate(zip(rows, children, strict=True))
        ]

    waiting = [(outline.row(), shape, 0)]
    while waiting:
        waiting += check(*waiting.pop(0))
    for number in range(count):
        *above, leaf = outline.way_to_leaf(number)
        assert (leaf.kind, leaf.first) == ("leaf", number) and above == outline.way(leaf.node)[:-1]


def _leaves(shape):
    if shape is None:
        yield shape
    else:
        for child in shape.values() if isinstance(shape, dict) else shape:
            yield from _leaves(child)
