"""Reads over plain HTTP go from sockets by presigned URLs, and end as those of obstore do where something is wrong."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.far_s3 import FarS3
from tests.helpers.s3 import MIB, QUICK, array, same
from treeckpt.io.storage.bucket import RangeResponse
from treeckpt.io.storage.object_store import open_bucket
from treeckpt.io.storage.obstore import ObstoreBucket
from treeckpt.io.storage.presigned_reads import AnswerError, PresignedReader, can_presign

BY_OBSTORE: dict[str, Any] = {"client_options": {"timeout": "60s"}}
"""Options with which obstore reads."""
ENDPOINT = "http://10.0.0.1:9000"


@pytest.fixture
def far(server: FarS3) -> FarS3:
    server.set(presigned="honoured", rate=0.0)
    return server


def presigned_reader(bucket: ObstoreBucket) -> PresignedReader:
    """The reader of a bucket that is near enough to have one."""
    reader = bucket._presigned  # pyright: ignore[reportPrivateUsage]
    assert reader is not None
    return reader


@pytest.fixture
def bucket(far: FarS3) -> ObstoreBucket:
    """A bucket with an object of 4 MB under the key `k`."""
    found, _ = open_bucket("s3://bucket", far.options())
    assert isinstance(found, ObstoreBucket)
    far.put("k", bytes(range(250)) * 16_000)
    return found


def all_of(response: RangeResponse) -> bytes:
    """The body of an answer, read to its end."""
    found = b""
    while len(piece := response.body.read()):
        found += piece
    response.body.close()
    return found


def data(reader: PresignedReader, start: int, nbytes: int, *, key: str = "k") -> bytes:
    response = reader.get(key, start, nbytes)
    assert response is not None
    return all_of(response)


# when ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("endpoint", "options", "client", "environment"),
    [
        ("https://10.0.0.1:9000", {}, {}, {}),
        ("", {}, {}, {}),
        (ENDPOINT, {"skip_signature": True}, {}, {}),
        (ENDPOINT, {"aws_request_payer": True}, {}, {}),
        (ENDPOINT, {"AWS_SSE_CUSTOMER_KEY_BASE64": "x"}, {}, {}),
        (ENDPOINT, {}, {"timeout": "60s"}, {}),
        (ENDPOINT, {}, {"default_headers": {"x": "y"}}, {}),
        (ENDPOINT, {}, {}, {"AWS_SKIP_SIGNATURE": "true"}),
        (ENDPOINT, {}, {}, {"AWS_REQUEST_PAYER": "true"}),
        (ENDPOINT, {}, {}, {"http_proxy": "http://10.0.0.2:3128"}),
        (ENDPOINT, {}, {}, {"all_proxy": "http://10.0.0.2:3128"}),
    ],
)
def test_obstore_reads_where_a_presigned_url_does_not_say_all(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, options: Any, client: Any, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not can_presign(endpoint, options, client)


@pytest.mark.parametrize("environment", [{}, {"http_proxy": "http://10.0.0.2:3128", "no_proxy": "10.0.0.1"}])
def test_plain_http_with_keys_alone_is_read_from_sockets(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = {"endpoint": ENDPOINT, "aws_access_key_id": "k", "AWS_SECRET_ACCESS_KEY": "s", "region": "r"}
    assert can_presign(ENDPOINT, options, {"allow_http": True})


@pytest.mark.parametrize(("options", "presigned"), [({}, {True}), (BY_OBSTORE, {False})])
def test_the_data_of_a_load_is_read_that_way(far: FarS3, options: dict[str, Any], presigned: set[bool]) -> None:
    store, tree = far.store(**options), {"w": array(30), "strange name@é+d": array(10)}
    tc.save(store, tree)
    far.set()
    assert same(store, tree)
    assert {row["presigned"] for row in far.gets(".safetensors")} == presigned


def test_names_with_any_character_are_read(far: FarS3, bucket: ObstoreBucket) -> None:
    key = "a b/c@é+d%2F=&?.bin"
    bucket.put(key, b"0123456789", replace=True)
    assert data(presigned_reader(bucket), 2, 5, key=key) == b"23456"


def test_a_store_that_refuses_presigned_urls_is_read_by_obstore_and_asked_so_no_more(far: FarS3) -> None:
    store, tree = far.store(), {"w": array(30)}
    tc.save(store, tree)
    far.set(presigned="refused")
    assert same(store, tree)
    far.set(presigned="refused")
    assert same(store, tree)
    assert not any(row["presigned"] for row in far.log())


# what comes back ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("start", "nbytes"), [(0, 1), (7, 300), (3_999_990, 10), (0, 4_000_000), (3_999_990, 20), (0, 1 << 30)]
)
def test_a_range_is_what_the_object_has_of_it(bucket: ObstoreBucket, start: int, nbytes: int) -> None:
    reader = presigned_reader(bucket)
    assert data(reader, start, nbytes) == (bytes(range(250)) * 16_000)[start : start + nbytes]
    response = reader.get("k", start, nbytes)
    assert response is not None and response.size == 4_000_000 and len(all_of(response)) > 0


def test_an_object_that_is_not_there_or_too_short_is_as_for_obstore(bucket: ObstoreBucket) -> None:
    with pytest.raises(FileNotFoundError):
        bucket.fetch("none", 0, 10)
    behind = bucket.fetch("k", 5_000_000, 10)
    assert behind.size == 4_000_000 and not all_of(behind)
    assert presigned_reader(bucket), "neither says anything about presigned URLs"


@pytest.mark.parametrize("options", [{}, BY_OBSTORE], ids=["sockets", "obstore"])
@pytest.mark.parametrize("kind", ["503", "429", "500", "reset", "lost", "stall"])
def test_what_fails_for_a_moment_is_repeated(far: FarS3, options: dict[str, Any], kind: str) -> None:
    store, tree = far.store(**QUICK, **options), {"w": array(24)}
    tc.save(store, tree)
    far.set(rules=[{"match": "^GET .*safetensors bytes", "do": kind, "times": 2, "seconds": 0.2}])
    assert same(store, tree)


@pytest.mark.parametrize("options", [{}, BY_OBSTORE], ids=["sockets", "obstore"])
@pytest.mark.parametrize("kind", ["shifted", "short", "whole", "flipped"])
def test_an_answer_to_another_request_is_an_error_and_nothing_is_loaded(
    far: FarS3, options: dict[str, Any], kind: str
) -> None:
    store, tree = far.store(**QUICK, **options), {"w": array(24)}
    tc.save(store, tree)
    far.set(rules=[{"match": "^GET .*safetensors bytes=[1-9]", "do": kind, "times": 1000}])
    with pytest.raises(tc.TreeckptError, match="changed bytes" if kind == "flipped" else "proxy and the endpoint"):
        tc.load(store)


# connections ----------------------------------------------------------------------------------------------------------
def test_a_connection_is_used_again_and_replaced_where_it_has_ended_meanwhile(bucket: ObstoreBucket) -> None:
    reader = presigned_reader(bucket)
    idle = reader._idle  # pyright: ignore[reportPrivateUsage]
    first = data(reader, 0, 100)
    (connection,) = idle
    assert data(reader, 0, 100) == first and idle == [connection]
    connection.sock.shutdown(socket.SHUT_RDWR)
    assert data(reader, 0, 100) == first and idle != [connection]


def test_an_answer_that_is_not_read_to_its_end_leaves_no_connection(bucket: ObstoreBucket) -> None:
    reader = presigned_reader(bucket)
    response = reader.get("k", 0, 4_000_000)
    assert response is not None and len(response.body.read())
    response.body.close()
    assert reader._idle == []  # pyright: ignore[reportPrivateUsage]


def test_a_body_that_ends_early_is_an_error_after_what_has_arrived(far: FarS3, bucket: ObstoreBucket) -> None:
    far.set(rules=[{"match": "^GET /bucket/k bytes", "do": "reset"}])
    response = presigned_reader(bucket).get("k", 0, 4_000_000)
    assert response is not None
    with pytest.raises(AnswerError, match="connection"):
        all_of(response)
    response.body.close()


def test_nobody_at_the_endpoint_is_an_error_that_names_it(far: FarS3) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    bucket, _ = open_bucket("s3://bucket", far.options(endpoint=f"http://127.0.0.1:{port}"))
    with pytest.raises(tc.StoreError, match="ConnectionRefused") as raised:
        bucket.fetch("k", 0, 10)
    assert bucket.judge(raised.value).temporary


def test_a_forked_process_reads_over_connections_of_its_own(far: FarS3, bucket: ObstoreBucket) -> None:
    program = f"""
import os, sys
from treeckpt.io.storage.bucket import RangeResponse
from treeckpt.io.storage.object_store import open_bucket
bucket, _ = open_bucket("s3://bucket", {far.options()!r})
reader = bucket._presigned
def read(start):
    body = reader.get("k", start, 250).body
    data = bytes(body.read())
    body.close()
    return data
want = bytes(range(250))
assert read(0) == want
child = os.fork()
seen = {{read(250 * n) for n in range(100)}}
if not child:
    os._exit(seen != {{want}})
sys.exit(os.waitpid(child, 0)[1] != 0 or seen != {{want}})
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0


def test_a_load_that_is_given_up_closes_its_connections(far: FarS3) -> None:
    store = far.store(**QUICK)
    tc.save(store, {"w": array(64)})
    far.set(rate=400e6)
    with pytest.raises(tc.TreeckptError):
        tc.load_into(store, {"w": np.empty(64 * MIB // 8, np.int32)})
    assert same(store, {"w": array(64)})
