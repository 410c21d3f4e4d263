"""Settings that tests of the store share."""

import pytest

from treeckpt_dashboard.store import index_reader


@pytest.fixture
def low_bar(monkeypatch):
    """Makes an index of a few thousand leaves a large one."""
    monkeypatch.setattr(index_reader, "LARGE_INDEX_NBYTES", 200_000)
