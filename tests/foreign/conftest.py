"""What tests of hostile files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.limited_reads import LimitedReads, limited_reads


@pytest.fixture(scope="session")
def limited() -> Iterator[LimitedReads]:
    """A process that reads files in forks with limits."""
    with limited_reads() as reads:
        yield reads
