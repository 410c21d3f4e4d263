"""The disks of a node-local checkpoint come back in an index; a list that no save has written is refused."""

import msgspec
import pytest

from tests.helpers.indexes import index_of
from treeckpt._core.format.check_index import MAX_HOST
from treeckpt._core.format.files import parse_file_name, prepared_name
from treeckpt._core.format.index import decode_index, encode_index
from treeckpt._core.format.records import Disk, ValueRecord
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt.errors import FormatError

WORLD = 6
INDEX = index_of({"step": ValueRecord(7)}, [], files=[(rank, 0, 0, 0, 4096) for rank in range(WORLD)], world=WORLD)


def disks(*ranks, hosts="ab"):
    return tuple(Disk(host, encode_runs(each)) for host, each in zip(hosts, ranks, strict=False))


@pytest.mark.parametrize("found", [disks([0, 1, 2], [3, 4, 5]), disks([0, 2, 4], [1, 3, 5], hosts="aa")])
def test_disks_come_back_in_an_index(found):
    index = msgspec.structs.replace(INDEX, disks=found)
    assert decode_index(encode_index(index)) == index
    assert [disk.leader for disk in found] == [0, found[1].leader]


def test_an_index_of_one_disk_names_none():
    assert b"disks" not in encode_index(INDEX)


@pytest.mark.parametrize(
    "found",
    [
        disks(range(WORLD)),
        disks([0, 1, 2], [3, 4]),
        disks([0, 1, 2], [2, 3, 4]),
        disks([0, 1, 2], [3, 4, 6]),
        disks([3, 4, 5], [0, 1, 2]),
        disks([2, 1, 0], [3, 4, 5]),
        disks([], range(WORLD)),
        disks([0, 1, 2], [3, 4, 5], hosts=["a", "b" * (MAX_HOST + 1)]),
        (Disk("a", ((0, 1, 3),)), Disk("b", ((3, 1, 1 << 23),))),
    ],
)
def test_disks_that_no_save_has_written_are_refused(found):
    with pytest.raises(FormatError):
        decode_index(encode_index(msgspec.structs.replace(INDEX, disks=found)))


def test_disks_without_a_file_here_are_elsewhere():
    index = msgspec.structs.replace(INDEX, disks=disks([0, 1, 2], [3, 4, 5]))
    first, second = index.disks
    names = [file.name for file in index.file_list]
    assert [file.rank for file in index.disk_files(second)] == [3, 4, 5]
    assert index.disks_elsewhere(names) == ()
    assert index.disks_elsewhere(names[1:3]) == (second,)
    assert index.disks_elsewhere([]) == (first, second)


def test_the_prepared_index_has_a_name_of_its_save():
    found = parse_file_name(prepared_name(INDEX.save_id))
    assert found is not None and (found.kind, found.save_id) == ("prepared", INDEX.save_id)
