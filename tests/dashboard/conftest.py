"""A real application over real checkpoints, asked through httpx."""

import pytest
from starlette.testclient import TestClient

from tests.samples import write_checkpoint, write_mixed_run
from treeckpt_dashboard.app import create_app


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Good, partial, corrupt and foreign directories, and a larger checkpoint on a 2x2 mesh as the newest."""
    run = write_mixed_run(tmp_path_factory.mktemp("runs") / "gpt")
    write_checkpoint(run / "step_00000700", step=700, metadata={"note": "warm-up done", "seed": 7})
    return run


@pytest.fixture(scope="session")
def client(run):
    return TestClient(create_app([run]), base_url="http://127.0.0.1:8265")


@pytest.fixture(scope="session")
def ids(client):
    """Ids of checkpoints by name."""
    [found] = client.get("/api/v1/runs").json()["runs"]
    return {c["name"]: c["id"] for c in found["checkpoints"]}


@pytest.fixture
def serve():
    def make(*runs, **options):
        return TestClient(create_app(runs, **options), base_url="http://127.0.0.1:8265")

    return make
