from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.format.files import (
    MAX_PROGRESS,
    Owner,
    Progress,
    decode_progress,
    encode_progress,
    parse_progress_name,
    progress_name,
)
from treeckpt.errors import FormatError

ID = "0123456789abcdef"
counts = st.integers(0, 1 << 60)


def record(**changes: object) -> Progress:
    return msgspec.structs.replace(Progress(ID, 1, 4, 100, "write", 30, 120, 5, 9), **changes)


@given(
    st.builds(
        Progress,
        st.from_regex(r"\A[0-9a-f]{16}\Z"),
        st.integers(0, 99),
        st.integers(100, 1 << 24),
        st.none() | st.integers(-(1 << 63) + 1, (1 << 63) - 1),
        st.sampled_from(["write", "commit"]),
        *[counts] * 4,
    )
)
def test_a_record_comes_back(progress: Progress) -> None:
    assert decode_progress(encode_progress(progress), "name") == progress
    assert 0 <= progress.fraction <= 1


@given(st.integers(0, 10**9 - 1), st.from_regex(r"\A[0-9a-f]{16}\Z"))
def test_names_come_back(rank: int, save_id: str) -> None:
    assert parse_progress_name(progress_name(rank, save_id)) == (rank, save_id)


@pytest.mark.parametrize("name", ["", "progress-1.x.json", f"progress-00001.{ID}.json.tmp", f"shard-00001.{ID}.json"])
def test_other_names_are_none_of_ours(name: str) -> None:
    assert parse_progress_name(name) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff",
        b"x" * 5000,
        b"[" * 4000,
        encode_progress(record(save_id="../../../etc/pwd")),
        encode_progress(record(rank=4)),
        encode_progress(record(written=-1)),
        encode_progress(record(world=1 << 40)),
        encode_progress(record()).replace(b'"write"', b'"dance"'),
        encode_progress(record()).replace(b'"rank"', b'"runk"'),
        encode_progress(record()).replace(b'{"save_id"', b'{"more":1,"save_id"'),
    ],
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="a name"):
        decode_progress(data, "a name")


def test_the_fraction_of_nothing_is_all() -> None:
    assert record(planned=0, written=0).fraction == 1.0
    assert record().fraction == 0.25


def is_refused(data: bytes) -> bool:
    try:
        decode_progress(data, "name")
    except FormatError:
        return True
    return False


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"rank": 0}, {"rank": -1}),
        ({"rank": 3}, {"rank": 4}),
        ({"world": 1 << 24}, {"world": (1 << 24) + 1}),
        ({"written": 0, "planned": 0}, {"planned": -1}),
        ({"written": (1 << 62) - 1}, {"written": 1 << 62}),
        ({"planned": (1 << 62) - 1}, {"planned": 1 << 62}),
        ({"started_ns": 1 - (1 << 62)}, {"started_ns": -(1 << 62)}),
        ({"updated_ns": (1 << 62) - 1}, {"updated_ns": 1 << 62}),
        ({"alive_ns": (1 << 62) - 1}, {"alive_ns": 1 << 62}),
        ({"step": (1 << 63) - 1}, {"step": 1 << 63}),
        ({"step": 1 - (1 << 63)}, {"step": -(1 << 63)}),
        ({"step": None}, {"save_id": "A" * 16}),
    ],
)
def test_numbers_of_a_record_have_limits(good: dict[str, object], bad: dict[str, object]) -> None:
    assert not is_refused(encode_progress(record(**good))) and is_refused(encode_progress(record(**bad)))


def test_a_record_has_at_most_4096_bytes() -> None:
    data = encode_progress(record())
    assert MAX_PROGRESS == 4096
    assert not is_refused(data.ljust(4096)) and is_refused(data.ljust(4097))


def test_a_process_is_told_apart_by_all_that_is_known_of_it() -> None:
    owners = [Owner("a", 1), Owner("b", 1), Owner("a", 2), Owner("a", 1, "x"), Owner("a", 1, "", 5)]
    tags = [owner.tag for owner in owners]
    assert len(set(tags)) == len(owners) and all(len(tag) == 8 and int(tag, 16) >= 0 for tag in tags)
    assert Owner("a", 1).tag == tags[0]


def test_the_fraction_is_at_most_all() -> None:
    assert record(planned=10, written=15).fraction == 1.0 and record(planned=1, written=0).fraction == 0.0
