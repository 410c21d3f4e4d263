"""What tests of object stores share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.far_s3 import FarS3, far_s3_server
from tests.helpers.s3 import MIB
from treeckpt._io.storage import object_store, obstore


@pytest.fixture(scope="module")
def server() -> Iterator[FarS3]:
    """A server of a file's own, for its settings."""
    with far_s3_server() as server:
        yield server


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files from 1 MiB on go out in parts, the smallest that S3 takes."""
    monkeypatch.setattr(object_store, "SINGLE_PUT_LIMIT", MIB)
    monkeypatch.setattr(obstore, "PART", 5 * MIB)
