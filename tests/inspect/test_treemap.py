"""Boxes add up, whichever way they are grouped, and there are never more than asked for."""

import pytest

from tests.helpers.indexes import index_of
from tests.helpers.samples import gpt_state, write_checkpoint
from treeckpt._core.format.byte_map import extents_in_file
from treeckpt._core.format.records import (
    AliasRecord,
    ArrayRecord,
    BoxChunks,
    GridChunks,
    NoChunks,
    PerRankArrays,
    ValueRecord,
    WholeChunk,
)
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._core.tree.structure import DictNode, PerRankNode
from treeckpt._inspect.outline import Outline, state_part
from treeckpt._inspect.treemap import treemap_of
from treeckpt.errors import MismatchError

WAYS = ["tree", "part", "rank", "file", "dtype"]


@pytest.fixture(scope="module")
def outline(tmp_path_factory):
    path = tmp_path_factory.mktemp("treemap") / "c"
    return Outline.of(write_checkpoint(path, gpt_state(layers=3), max_shard_bytes=200_000))


def groups(boxes):
    return {box.name: box.nbytes for box in boxes if box.parent == 0 and not box.more}


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("count", [10, 60, 20_000])
def test_children_add_up_to_their_parents(outline, by, count):
    boxes = treemap_of(outline, by, count=count)
    assert boxes[0].nbytes == outline.index.nbytes and len(boxes) <= count + (len(groups(boxes)) if by != "tree" else 0)
    inside = [0] * len(boxes)
    for at, box in enumerate(boxes[1:], 1):
        assert 0 <= box.parent < at and box.nbytes > 0
        inside[box.parent] += box.nbytes
    assert all(total in (0, box.nbytes) for total, box in zip(inside, boxes, strict=True))


def test_the_tree_of_one_node(outline):
    [node] = [row.node for row in outline.children() if row.key == "model"]
    boxes = treemap_of(outline, "tree", node=node)
    assert boxes[0].name == "model" and groups(boxes)["wte.weight"] == 1000 * 96 * 4
    assert outline.index.entries[boxes[1].leaf].path == "model/wte.weight"


def test_files_and_ranks_hold_what_their_extents_say(outline):
    index = outline.index
    sizes = [sum(e.stop - e.start for e in extents_in_file(index, file)) for file in index.file_list]
    assert len(sizes) > 8
    assert groups(treemap_of(outline, "file")) == {f"file {n}": size for n, size in enumerate(sizes)}
    ranks = {rank: sum(s for s, f in zip(sizes, index.file_list, strict=True) if f.rank == rank) for rank in range(4)}
    assert groups(treemap_of(outline, "rank")) == {f"rank {rank}": size for rank, size in ranks.items()}
    boxes = treemap_of(outline, "file")
    held = {(b.leaf, boxes[b.parent].name): b.nbytes for b in boxes if b.leaf >= 0}
    for extent in extents_in_file(index, index.file_list[3])[:20]:
        assert held[extent.leaf, "file 3"] >= extent.stop - extent.start


def test_parts_tell_moments_apart(outline):
    assert state_part("model/a.b") == "model" and state_part("optimizer/state/0/exp_avg") == "optimizer … exp_avg"
    found = groups(treemap_of(outline, "part"))
    assert found["optimizer … exp_avg"] == found["optimizer … exp_avg_sq"] and "model" in found


def test_dtypes(outline):
    assert set(groups(treemap_of(outline, "dtype"))) == {"float32", "bfloat16", "uint8"}


@pytest.mark.parametrize("by", WAYS)
def test_a_tree_without_arrays_is_one_empty_box(tmp_path, by):
    [box, *rest] = treemap_of(Outline.of(write_checkpoint(tmp_path / "c", {"a": 1})), by)
    assert box.nbytes == 0 and not rest


# exact maps of small indexes ------------------------------------------------------------------------------------------
def outline_of(leaves, *, structure=None, files=None, world=2):
    """An outline of arrays of bytes, by path their number of bytes, or the record and the spec."""
    specs, records = [], {}
    for path, found in leaves.items():
        record, spec = found if isinstance(found, tuple) else (WholeChunk(0, 0), ArraySpec((found,), "uint8"))
        specs.append(spec)
        records[path] = record if isinstance(record, ValueRecord | PerRankArrays | AliasRecord) else ArrayRecord(
            len(specs) - 1, -1, record
        )  # fmt: skip
    more = {} if structure is None else {"structure": structure}
    return Outline.of(index_of(records, specs, world=world, **({} if files is None else {"files": files}), **more))


def drawn(boxes):
    return [(box.parent, box.name, box.nbytes, box.leaf, box.more) for box in boxes]


def nested(*counts):
    """A dict of dicts a, b, ... with that many leaves each."""
    names = "abcdef"[: len(counts)]
    return DictNode(tuple(names), tuple(DictNode(tuple(range(n)), (None,) * n) for n in counts))


def test_a_map_of_a_tree_shows_the_largest_first_and_each_after_its_parent():
    outline = outline_of({"0": 1, "1": 2, "2": 30, "3": 4}, structure=nested(2, 2))
    assert drawn(treemap_of(outline, "tree")) == [
        (-1, "", 37, -1, 0), (0, "b", 34, -1, 0), (0, "a", 3, -1, 0), (1, "0", 30, 2, 0), (1, "1", 4, 3, 0),
        (2, "1", 2, 1, 0), (2, "0", 1, 0, 0),
    ]  # fmt: skip
    assert [box.node for box in treemap_of(outline, "tree")] == ["", "1", "0", "1.0", "1.1", "0.1", "0.0"]


def test_a_map_of_one_leaf_is_that_leaf():
    outline = outline_of({"0": 1, "1": 2}, structure=nested(2))
    assert drawn(treemap_of(outline, "tree", node="0.1")) == [(-1, "1", 2, 1, 0)]
    assert drawn(treemap_of(outline, "tree", node="0"))[0] == (-1, "a", 3, -1, 0)


@pytest.mark.parametrize(
    ("count", "rest"),
    [
        (3, [(0, "w9", 10, 9, 0), (0, "", 45, -1, 9)]),
        (4, [(0, "w9", 10, 9, 0), (0, "w8", 9, 8, 0), (0, "", 36, -1, 8)]),
        (2, []),
        (1, []),
    ],
)
def test_boxes_beyond_the_limit_are_one_box_of_their_parent(count, rest):
    outline = outline_of({f"w{n}": n + 1 for n in range(10)})
    assert drawn(treemap_of(outline, "tree", count=count)) == [(-1, "", 55, -1, 0), *rest]


@pytest.mark.parametrize("by", ["tree", "part", "dtype", "rank"])
def test_many_small_leaves_are_ranges_of_which_none_is_the_largest_box_by_far(by):
    sizes = {f"w{n:04d}": 100 for n in range(2000)} | {f"big{n}": 1000 * n for n in range(1, 5)}
    boxes = treemap_of(outline_of(sizes), by, count=600)
    parent = 0 if by in ("tree", "part") else 1
    inside = [box for box in boxes[1:] if box.parent == parent]
    assert sum(box.nbytes for box in inside) == sum(sizes.values()) and len(boxes) <= 600
    ranges = [box for box in inside if box.more]
    assert all(" … " in box.name for box in ranges) and len(ranges) > 20
    assert max(box.nbytes for box in ranges) <= max(box.nbytes for box in inside if not box.more)


def test_a_range_of_small_nodes_has_a_map_of_its_own():
    outline = outline_of({f"w{n:04d}": 100 for n in range(2000)})
    box = treemap_of(outline, "tree", count=100)[1]
    inner = treemap_of(outline, "tree", node=box.node, count=100)
    assert (inner[0].nbytes, inner[0].node) == (box.nbytes, box.node) and sum(b.nbytes for b in inner[1:]) == box.nbytes
    assert inner[1].leaf >= 0 and len(inner) == box.more + 1
    for wrong in (":", ":a-b", ":5", "a:1-2", ":5-5", ":9-2", ":999999-1000000"):
        with pytest.raises(MismatchError):
            treemap_of(outline, "tree", node=wrong)


def test_all_boxes_that_fit_are_shown():
    outline = outline_of({f"w{n}": n + 1 for n in range(3)})
    for count in (5, 6, 100):
        assert [box.name for box in treemap_of(outline, "tree", count=count)] == ["", "w2", "w1", "w0"]
    assert [box.name for box in treemap_of(outline, "tree", count=4)] == ["", "w2", "w1", ""]


def test_what_is_smaller_than_a_pixel_is_merged():
    outline = outline_of({"large": 399_999, "small": 1})
    assert drawn(treemap_of(outline, "tree"))[1:] == [(0, "large", 399_999, 0, 0), (0, "", 1, -1, 1)]
    outline = outline_of({"large": 399_998, "small": 1})
    assert drawn(treemap_of(outline, "tree"))[1:] == [(0, "large", 399_998, 0, 0), (0, "small", 1, 1, 0)]
    for size, shown in ((399_999, True), (400_000, False)):
        boxes = drawn(treemap_of(outline_of({"large": size, "small": 1}), "dtype"))
        assert boxes[:3] == [(-1, "", size + 1, -1, 0), (0, "uint8", size + 1, -1, 0), (1, "large", size, 0, 0)]
        assert boxes[3:] == ([(1, "small", 1, 1, 0)] if shown else [(1, "", 1, -1, 1)])


def test_leaves_without_bytes_are_no_boxes():
    outline = outline_of({"e": 0, "v": (ValueRecord(1), ArraySpec((), "int8")), "w": 5})
    for by in ("dtype", "part"):
        name = "uint8" if by == "dtype" else "w"
        assert drawn(treemap_of(outline, by)) == [(-1, "", 5, -1, 0), (0, name, 5, -1, 0), (1, "w", 5, 2, 0)]


def test_groups_are_by_size_with_the_smallest_as_one():
    sizes = {"int8": 3, "uint8": 9, "bool": 1, "float16": 10, "int16": 4}
    outline = outline_of({
        name: (WholeChunk(0, 0), ArraySpec((n if name[-1] != "6" else n // 2,), name)) for name, n in sizes.items()
    })  # fmt: skip
    order = ["float16", "uint8", "int16", "int8", "bool"]
    every = drawn(treemap_of(outline, "dtype"))
    assert [(name, n) for parent, name, n, _, _ in every if parent == 0] == [(name, sizes[name]) for name in order]
    assert [(parent, name) for parent, name, *_ in every[6:]] == [(n, name) for n, name in enumerate(order, 1)]
    few = drawn(treemap_of(outline, "dtype", count=4))
    assert few[:4] == [(-1, "", 27, -1, 0), (0, "float16", 10, -1, 0), (0, "uint8", 9, -1, 0), (0, "", 8, -1, 3)]
    assert drawn(treemap_of(outline, "dtype", count=1))[1:3] == [(0, "float16", 10, -1, 0), (0, "", 17, -1, 4)]


def test_leaves_of_a_group_beyond_the_limit_are_one_box_of_it():
    outline = outline_of({"a/x": 5, "a/y": 4, "b/x": 3, "b/e": 0, "b/y": 2})
    found = drawn(treemap_of(outline, "dtype", count=5))
    assert found[0] == (-1, "", 14, -1, 0) and found[1] == (0, "uint8", 14, -1, 0)
    shown = [box for box in found[2:] if box[3] >= 0]
    assert [n for _, _, n, _, _ in shown] == [5, 4] and found[-1] == (1, "", 5, -1, 2)


GRID = GridChunks((((0, 3, 2), (5,)), ((0, 2, 2),)), ((0,), (1,)), ((16,), (40,)))
BOXES = BoxChunks((((0, 1, 2),),), (((1,), (3,)),), ((1, 0, 2),), ((8,), (30,)))
PLACED = {
    "grid": (GRID, ArraySpec((5, 2), "int16")), "boxes": (BOXES, ArraySpec((4,), "int32")),
    "whole": (WholeChunk(0, 0), ArraySpec((7,), "uint8")),
    "tie": (AliasRecord(0, 0), ArraySpec((5, 2), "int16")), "none": (NoChunks(), ArraySpec((7,), "uint8")),
}  # fmt: skip


def test_each_rank_has_the_bytes_of_its_chunks():
    """Rank 0 wrote 12 bytes of the grid and 7 of the whole array, rank 1 all else: 8 of the grid and both boxes."""
    assert drawn(treemap_of(outline_of(PLACED), "rank")) == [
        (-1, "", 43, -1, 0), (0, "rank 1", 24, -1, 0), (0, "rank 0", 19, -1, 0), (1, "boxes", 16, 1, 0),
        (2, "grid", 12, 0, 0), (1, "grid", 8, 0, 0), (2, "whole", 7, 2, 0),
    ]  # fmt: skip


def test_each_file_has_the_bytes_that_begin_in_it():
    files = [(0, 0, 0, 16, 0), (0, 1, 16, 20, 0), (1, 0, 0, 30, 0), (1, 1, 30, 30, 0)]
    assert drawn(treemap_of(outline_of(PLACED, files=files), "file")) == [
        (-1, "", 43, -1, 0), (0, "file 3", 20, -1, 0), (0, "file 1", 12, -1, 0), (0, "file 0", 7, -1, 0),
        (0, "file 2", 4, -1, 0), (2, "grid", 12, 0, 0), (1, "boxes", 12, 1, 0), (1, "grid", 8, 0, 0),
        (3, "whole", 7, 2, 0), (4, "boxes", 4, 1, 0),
    ]  # fmt: skip


def test_an_array_of_each_rank_is_in_all_their_files():
    structure = DictNode(("own",), (PerRankNode((((0, 2, 2),),), (None,)),))
    leaves = {"own": (PerRankArrays(0, ((0, 8, 2),)), ArraySpec((2,), "int32"))}
    outline = outline_of(leaves, structure=structure, files=[(n, 0, 0, 64, 0) for n in range(3)], world=3)
    assert drawn(treemap_of(outline, "rank")) == [
        (-1, "", 16, -1, 0), (0, "rank 0", 8, -1, 0), (0, "rank 2", 8, -1, 0), (1, "own/~rank*", 8, 0, 0),
        (2, "own/~rank*", 8, 0, 0),
    ]  # fmt: skip
    assert [name for _, name, *_ in drawn(treemap_of(outline, "file"))[1:3]] == ["file 0", "file 2"]
    assert drawn(treemap_of(outline, "dtype"))[1] == (0, "int32", 16, -1, 0)


def test_with_millions_of_chunks_ranks_and_files_are_shown_without_leaves():
    """Then only the table of files is used, whatever the chunks are."""
    count = 4_000_001
    chunks = BoxChunks((((0, 0, count),),), (((1, 0, count),),), ((0, 0, count),), ((0, 0, count),))
    files = [(0, 0, 0, 60, 0), (0, 1, 60, 4, 0), (1, 0, 0, 7, 0)]
    many = outline_of({"w": (chunks, ArraySpec((count,), "uint8"))}, files=files)
    assert drawn(treemap_of(many, "rank")) == [(-1, "", 71, -1, 0), (0, "rank 0", 64, -1, 0), (0, "rank 1", 7, -1, 0)]
    assert drawn(treemap_of(many, "file"))[1:] == [
        (0, "file 0", 60, -1, 0), (0, "file 2", 7, -1, 0), (0, "file 1", 4, -1, 0),
    ]  # fmt: skip
