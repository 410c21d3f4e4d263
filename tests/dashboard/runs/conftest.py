"""Runs that the tests of run pages share."""

import pytest

from tests.helpers.large import write_many


@pytest.fixture(scope="session")
def many(tmp_path_factory):
    """250 small checkpoints, steps 100 to 25,000."""
    return write_many(tmp_path_factory.mktemp("many") / "run", 250)
