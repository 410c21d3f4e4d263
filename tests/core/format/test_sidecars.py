"""The list of sidecar files in an index comes back; a list that no save has written is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.format.files import (
    MAX_SIDECAR_NBYTES,
    MAX_SIDECARS,
    Sidecar,
    alike_names,
    checksum,
    is_sidecar_name,
    parse_stored_name,
    stored_name,
)
from treeckpt._core.format.index import decode_index, encode_index
from treeckpt._core.format.records import FileTable, Index, ValueRecord
from treeckpt.errors import FormatError

ID = "0123456789abcdef"
ROWS = ((0,),)
INDEX = Index(ID, 1, 0, 1, None, (), (), (ValueRecord(1),), FileTable(ROWS, ROWS, ROWS, ROWS, ROWS), {"note": "mine"})
ONE = Sidecar("config.json", 2, checksum(b"{}"))
names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,127}", fullmatch=True)


@given(st.lists(names, unique_by=str.lower, min_size=1, max_size=5), st.binary())
def test_lists_come_back_in_an_index(found, data):
    sidecars = tuple(Sidecar(name, len(data), checksum(data)) for name in found)
    index = msgspec.structs.replace(INDEX, sidecars=sidecars)
    assert decode_index(encode_index(index)) == index


@given(names)
def test_names_are_told_from_stored_names(name):
    assert is_sidecar_name(name) and parse_stored_name(stored_name(ID, name)) == (ID, name)


@given(st.text())
def test_a_name_is_plain_or_refused(name):
    assert not is_sidecar_name(name) or (not set(name) & set("/\\\0 \n") and name[0] != "." and name.isascii())


@pytest.mark.parametrize(
    "change",
    [{"name": "../config.json"}, {"name": ""}, {"nbytes": -1}, {"nbytes": MAX_SIDECAR_NBYTES + 1}, {"xxh3": "0"}],
)
def test_a_list_that_no_save_has_written_is_refused(change):
    for sidecars in ((msgspec.structs.replace(ONE, **change),), (ONE, ONE), tuple(_many(MAX_SIDECARS + 1))):
        with pytest.raises(FormatError, match="names, sizes and checksums of sidecar files"):
            decode_index(encode_index(msgspec.structs.replace(INDEX, sidecars=sidecars)))


def _many(count):
    return (msgspec.structs.replace(ONE, name=f"{n}.json") for n in range(count))


def test_names_that_differ_only_in_case_are_found():
    assert alike_names(["a", "b", "A"]) == ["A"]
