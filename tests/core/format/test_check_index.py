"""The checks are told what may still be missing; the rest of their tests changes real indexes, in test_index."""

import msgspec
import pytest

from tests.helpers.saves import small
from treeckpt.core.format.check_index import check_index
from treeckpt.core.format.chunks import WholeChunk
from treeckpt.core.format.index import encode_manifest
from treeckpt.core.format.records import ArrayRecord, Index
from treeckpt.errors import FormatError


def test_a_good_index_passes():
    check_index(small().index, "index.json")


def test_a_manifest_passes_as_such_only():
    manifest = msgspec.json.decode(encode_manifest(small().index), type=Index)
    check_index(manifest, "shard", manifest=True)
    with pytest.raises(FormatError):
        check_index(manifest, "index.json")


def test_errors_name_the_leaf_or_the_file():
    index = small().index
    with pytest.raises(FormatError) as caught:
        check_index(msgspec.structs.replace(index, world=0), "run/index.json")
    assert caught.value.path == "run/index.json"
    broken = (msgspec.structs.replace(index.leaves[0], spec=99), *index.leaves[1:])
    with pytest.raises(FormatError) as caught:
        check_index(msgspec.structs.replace(index, leaves=broken), "run/index.json")
    assert caught.value.path == "grid"


def test_a_bad_record_is_found_among_good_ones_that_are_alike():
    index = small().index
    for leaf in index.entries:
        if not isinstance(leaf.record, ArrayRecord):
            continue
        for change in (
            {"spec": len(index.specs)},
            {"layout": len(index.layouts)},
            {"chunks": WholeChunk(index.world, 0)},
        ):
            broken = list(index.leaves)
            broken[leaf.number] = msgspec.structs.replace(leaf.record, **change)
            with pytest.raises(FormatError) as caught:
                check_index(msgspec.structs.replace(index, leaves=tuple(broken)), "index.json")
            assert caught.value.path == leaf.path
