"""What ranks compare of each other's arrays on every save: those of up to 64 KiB as a whole, larger ones by samples."""

import msgspec
import numpy as np
import pytest

from treeckpt._arrays.describe import content_digests, describe_tree, piece_digests
from treeckpt._arrays.digests import SMALL_LEAF_NBYTES
from treeckpt._core.planning.rank_trees import piece_key
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import Mesh, MeshLayout, Replicate, Shard
from treeckpt._core.sharding.region import Region
from treeckpt._core.tree.keyed_table import KeyedTable

SMALL = SMALL_LEAF_NBYTES // 4


@pytest.mark.parametrize("dtype", ["float32", "int16", "uint8"])
def test_replicas_of_up_to_64_kib_are_compared_always_and_larger_ones_unless_they_are_trusted(dtype):
    elements = SMALL_LEAF_NBYTES // np.dtype(dtype).itemsize
    tree = {"small": np.zeros(elements, dtype), "large": np.zeros(elements + 1, dtype), "empty": np.zeros(0, dtype)}
    described = describe_tree(tree, rank=0)
    assert content_digests(described, False).keys() == {"small", "empty"}
    assert content_digests(described, "sample").keys() == content_digests(described, True).keys() == tree.keys()


def test_pieces_of_a_mesh_count_by_themselves_not_by_their_array():
    described = describe_tree({"small": np.zeros((SMALL,), "f4"), "large": np.zeros((SMALL + 1,), "f4")}, rank=0)
    layout = MeshLayout(Mesh((2, 2), encode_runs(range(4))), (Replicate(), Shard(0)))
    leaves = tuple(msgspec.structs.replace(leaf, layout=layout) for leaf in described.inventory.leaves)
    inventory = msgspec.structs.replace(described.inventory, leaves=leaves)
    described = msgspec.structs.replace(described, inventory=inventory)
    small, large = (piece_key(name, Region.whole((SMALL + more,))) for name, more in (("small", 0), ("large", 1)))
    assert [group.keys() for group in piece_digests(described, False, world=4)] == [{small}]
    for compare in ("sample", True):
        assert [group.keys() for group in piece_digests(described, compare, world=4)] == [{small, large}]


def test_slots_of_a_table_count_by_the_rows_of_this_rank_and_ids_always():
    rows = SMALL + 1
    slots = {"one": np.zeros((rows, 1), "f4"), "half": np.zeros((rows, 1), "f2")}
    described = describe_tree({"t": KeyedTable(np.arange(rows), slots)}, rank=0, tables=True)
    compared = {key.split("\0")[0].rpartition("/")[2] for key in content_digests(described, False)}
    assert "half" in compared and "one" not in compared and "ids" in compared
    for compare in ("sample", True):
        assert "one" in {key.split("\0")[0].rpartition("/")[2] for key in content_digests(described, compare)}
