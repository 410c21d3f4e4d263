"""The outline of an index: each node with what is below it, the nodes as one table, and searches for leaves."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.large import large_index
from tests.helpers.samples import write_checkpoint
from treeckpt.core.analysis.outline import IndexOutline, node_records
from treeckpt.core.format.byte_map import extents_in_file, locate_chunks
from treeckpt.core.format.records import ValueRecord
from treeckpt.core.tree.structure import DictNode, ListNode
from treeckpt.errors import MismatchError


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("c") / "c", max_shard_bytes=500_000)


def test_every_nodes_bytes_are_the_sum_of_its_childrens(index):
    outline, todo, leaves = IndexOutline(index), [""], 0
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
    outline = IndexOutline(index)
    for name in ("9", "0.9999", "x", "0..1", "-1", "0.0.0"):
        with pytest.raises(MismatchError):
            outline.row(name)
    assert outline.node_at("model/nothing") is None and outline.node_at("model/wte.weight/x") is None


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
    nodes, outline = list(node_records(index)), IndexOutline(index)

    def walk(number, name):
        key, kind, cls, child, children, first, leaves, nbytes = nodes[number]
        row = outline.row(name)
        assert (key, kind, cls, children, first, leaves, nbytes) == (
            row.key, row.kind, row.cls, row.children, row.first, row.leaves, row.nbytes,
        )  # fmt: skip
        assert kind != "leaf" or child == 0
        return 1 + sum(walk(child + n, f"{name}.{n}" if name else str(n)) for n in range(children))

    assert walk(0, "") == len(nodes)


def _leaves(shape):
    if shape is None:
        yield shape
    else:
        for child in shape.values() if isinstance(shape, dict) else shape:
            yield from _leaves(child)
