"""Hypothesis profiles: no deadlines, which shared machines miss; `--hypothesis-profile=thorough` looks much longer.

And the S3 server, one for all tests of a process that ask for it.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.s3 import S3, s3_server

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("suite", deadline=None, max_examples=60, suppress_health_check=SLOW)
settings.register_profile("thorough", deadline=None, max_examples=2000, suppress_health_check=SLOW)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_process: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """A server without rules, which the environment names."""
    s3_process.rules()
    for name, value in s3_process.environment().items():
        monkeypatch.setenv(name, value)
    return s3_process


@pytest.fixture(params=["s3", "memory"])
def far_run(request: pytest.FixtureRequest, s3: S3, tmp_path: Path) -> str:
    """The URL of a run that is no directory."""
    return s3.url() if request.param == "s3" else f"memory://{tmp_path}/run"
