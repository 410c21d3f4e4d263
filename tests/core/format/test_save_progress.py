from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt.core.format.save_progress import (
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
    ],
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="a name"):
        decode_progress(data, "a name")


def test_the_fraction_of_nothing_is_all() -> None:
    assert record(planned=0, written=0).fraction == 1.0
    assert record().fraction == 0.25
