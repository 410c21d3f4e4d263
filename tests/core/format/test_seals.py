"""A seal is the checksum of its document, stands near its beginning, and any other document is refused."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.format.shard_header import check_no_zeros, check_seal, sealed
from treeckpt.errors import CorruptError

OPEN = b'{"seal":"0000000000000000","x":"'


@given(st.text(alphabet="abc0", max_size=40))
def test_a_sealed_document_passes_and_holds_its_checksum(text):
    document = OPEN + text.encode() + b'"}'
    found = sealed(document)
    check_seal(found, "f")
    check_seal(bytearray(found), "f")
    check_seal(memoryview(found), "f")
    assert found == b'{"seal":"%016x",' % xxhash.xxh3_64_intdigest(document) + document[27:]


@given(st.data())
def test_any_changed_byte_breaks_the_seal(data):
    found = bytearray(sealed(OPEN + b'y"}'))
    at = data.draw(st.integers(0, len(found) - 1))
    found[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptError, match="run/f"):
        check_seal(found, "run/f")


def test_an_error_has_both_seals_as_text_whatever_bytes_are_there():
    found = sealed(OPEN + b'y"}')
    for stored, text in [(b"0" * 16, "0" * 16), (b"\xff\n\0" + b"0" * 13, r"\xff\x0a\x00" + "0" * 13)]:
        with pytest.raises(CorruptError) as caught:
            check_seal(found.replace(found[9:25], stored), "f")
        assert (caught.value.expected, caught.value.found) == (
            f"seal {text}",
            f"{found[9:25].decode()} for bytes 0:{len(found)}",
        )


def test_only_the_first_seal_is_filled_in():
    twice = sealed(OPEN + b'"seal":"0000000000000000"')
    assert twice.endswith(b'"seal":"0000000000000000"')
    check_seal(twice, "f")


def test_a_seal_begins_within_the_first_256_bytes():
    check_seal(sealed(b" " * 248 + b'"seal":"0000000000000000"'), "f")
    with pytest.raises(CorruptError, match="no seal in bytes 0:256"):
        check_seal(sealed(b" " * 249 + b'"seal":"0000000000000000"'), "f")


def test_a_document_without_a_seal_is_refused_with_a_hint():
    with pytest.raises(CorruptError) as caught:
        check_seal(b"{}", "run/f", hint="Look elsewhere")
    assert (caught.value.path, caught.value.found, caught.value.hint) == (
        "run/f",
        "no seal in bytes 0:2",
        "Look elsewhere",
    )


def test_a_broken_seal_is_shown_beside_the_right_one():
    good = sealed(OPEN + b'"}')
    with pytest.raises(CorruptError) as caught:
        check_seal(OPEN + b'"}', "run/f")
    assert "0000000000000000" in str(caught.value.expected)
    assert good[9:25].decode() in caught.value.found and f"bytes 0:{len(good)}" in caught.value.found


@pytest.mark.parametrize(("part", "at", "where"), [(b"\0", 0, 0), (b"ab\0c\0", 10, 12), (b"a\0", 7, 8)])
def test_a_zero_byte_is_refused_by_its_offset(part, at, where):
    with pytest.raises(CorruptError, match=f"a zero at byte {where}$|a zero at byte {where}\\b"):
        check_no_zeros(part, at, "f")


def test_text_has_no_zeros():
    check_no_zeros(b"", 0, "f")
    check_no_zeros(b'{"x":0}', 5, "f")
