"""Boxes add up, whichever way they are grouped, and there are never more than asked for."""

import pytest

from tests.helpers.samples import gpt_state, write_checkpoint
from treeckpt.core.analysis.outline import Outline
from treeckpt.core.analysis.treemap import state_part, treemap_of
from treeckpt.core.format.byte_map import extents_in_file

WAYS = ["tree", "part", "rank", "file", "dtype"]


@pytest.fixture(scope="module")
def outline(tmp_path_factory):
    path = tmp_path_factory.mktemp("treemap") / "c"
    return Outline(write_checkpoint(path, gpt_state(layers=3), max_shard_bytes=200_000))


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
    [box, *rest] = treemap_of(Outline(write_checkpoint(tmp_path / "c", {"a": 1})), by)
    assert box.nbytes == 0 and not rest
