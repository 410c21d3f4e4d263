"""Hypothesis profiles: no deadlines, which shared machines miss; `--hypothesis-profile=thorough` looks much longer."""

import pytest
from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("suite", deadline=None, max_examples=60, suppress_health_check=SLOW)
settings.register_profile("thorough", deadline=None, max_examples=2000, suppress_health_check=SLOW)
settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory):
    """The dashboard's cache, of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        patch.setenv("TREECKPT_CACHE", str(directory))
        yield directory
