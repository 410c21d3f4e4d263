"""Numbers that a writer of one version and a reader of another must agree on: to change one changes the format."""

from treeckpt._core.format import check_index, files, index, lineage, shard_header, timings
from treeckpt._core.format import index as index_module
from treeckpt._core.planning import save_plan
from treeckpt._core.sharding import int_runs, region
from treeckpt._core.tree import keyed_table, structure, value_codec


def test_versions_stay():
    assert (index.VERSION, shard_header.VERSION, timings.VERSION) == (1, 1, 1)


def test_the_order_of_entries_stays():
    """The starts of chunks of an index of ranges follow from it."""
    assert (save_plan.PAGE_SIZE, save_plan.CACHE_LINE, save_plan.ORDER_CLASSES) == (4096, 64, 7)
    sizes = {(4096, 1): 0, (8192, 2): 0, (0, 4): 0, (64, 1): 1, (4032, 1): 1, (4160, 8): 1}
    aligned = {(16, 16): 2, (48, 32): 2, (8, 8): 3, (12, 4): 4, (12, 12): 4, (6, 2): 5, (3, 1): 6, (3, 3): 6}
    for (nbytes, align), number in (sizes | aligned).items():
        assert save_plan.order_class(nbytes, align) == number


def test_sizes_of_headers_and_documents_stay():
    assert (shard_header.BLOCK, shard_header.DATA_ALIGNMENT) == (256 << 10, 4096)
    assert (shard_header.MAX_HEADER, shard_header.MAX_BLOCK, index.MAX_INDEX) == (1 << 30, 64 << 20, 1 << 30)
    assert (files.MAX_PROGRESS, files.MAX_STEP) == (4096, 10**18 - 1)


def test_bounds_of_numbers_stay():
    assert (shard_header.MAX_WORLD, shard_header.MAX_NBYTES, region.MAX_NDIM) == (1 << 24, 1 << 62, 64)
    assert (int_runs.MAX_LENGTH, int_runs.MAX_VALUE) == (1 << 24, 1 << 62)
    assert (timings.MAX_TIME, timings.MAX_PARTIAL_WORLD, lineage.MAX_SEQUENCE) == (1 << 62, 1 << 18, 1 << 62)
    assert (check_index.MAX_FILES, check_index.MAX_ALIAS_RANKS, check_index.MAX_BOX_NUMBERS) == (
        1 << 20,
        1 << 22,
        1 << 22,
    )
    assert (index_module.MAX_NUMBERS, index_module.MAX_PER_RANK, index_module.NUMBERS_PER_BYTE) == (
        1 << 17,
        1 << 20,
        2,
    )


def test_depths_of_trees_and_values_stay():
    assert (structure.MAX_DEPTH, value_codec.MAX_VALUE_DEPTH) == (200, 100)
    assert (structure.USUAL_PATH_LENGTH, structure.MAX_EXTRA_PATH_CHARS) == (1024, 1 << 25)
    assert (structure.MAX_SHARED, value_codec.MAX_COLLISIONS) == (32, 64)


def test_buckets_of_tables_stay():
    assert (keyed_table.DEFAULT_BUCKETS, keyed_table.MAX_BUCKETS) == (65_536, 1 << 24)
