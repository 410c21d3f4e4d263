"""The application over real checkpoints, requested through httpx."""

import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal
from starlette.testclient import TestClient

from tests.helpers.samples import FILES, BFloat16, mesh_layout, write_checkpoint, write_mixed_run
from treeckpt._core.tree.containers import PerRank
from treeckpt._loading.run_load import inspect as read_index
from treeckpt_dashboard.store import index_reader
from treeckpt_dashboard.web.app import create_app


@pytest.fixture(scope="session", autouse=True)
def one_event_loop():
    """Answers all requests of test clients on one event loop: to start one for each takes as long as most answers."""
    with start_blocking_portal() as portal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(TestClient, "portal", portal)
        yield


@pytest.fixture(scope="session", autouse=True)
def pages_of_foreign_trees_wait():
    """Has a request wait until another program's files are read, however long the machine takes to start a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_reader, "REQUEST_WAIT_SECONDS", 300)
        yield


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Good, partial, damaged and foreign directories, and a larger checkpoint on a 2x2 mesh as the newest."""
    run = write_mixed_run(tmp_path_factory.mktemp("runs") / "gpt")
    write_checkpoint(run / "step_00000700", step=700, metadata={"note": "warm-up done", "seed": 7}, files=FILES)
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


@pytest.fixture(scope="session")
def newest(ids):
    return f"/api/v1/checkpoints/{ids['step_00000700']}"


@pytest.fixture(scope="session")
def index(run):
    return read_index(run / "step_00000700")


@pytest.fixture(scope="session")
def tree():
    random = np.random.default_rng(3)
    blocks = {f"h.{n}.{k}": random.standard_normal((8, 16)).astype(np.float32) for n in range(3) for k in ("w", "b")}
    odd = np.array([[1, np.nan, np.inf], [-2, 0, 0]], np.float32)
    half = BFloat16(np.array([[0x3F80, 0xC000]], np.uint16))
    return {
        "model": blocks,
        "odd": odd,
        "half": half,
        "deep": np.arange(4 * 5 * 6).reshape(4, 5, 6),
        "empty": np.zeros((0, 3)),
        "n": 7,
        "it's [x]*": np.ones(3),
        "rng": PerRank(np.arange(9, dtype=np.uint8)),
    }


@pytest.fixture(scope="session")
def path(tree, tmp_path_factory):
    path = tmp_path_factory.mktemp("contents") / "step_00000001"
    write_checkpoint(path, tree, step=1, layouts=mesh_layout)
    return path


@pytest.fixture
def asked(serve, path):
    """Asks for a part of the checkpoint's JSON; a path of the tree stands for its leaf."""
    client = serve(path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    at = f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}"
    rows = client.get(f"{at}/leaves").json()["rows"]
    numbers = {row["path"]: row["leaf"] for row in rows}

    def ask(rest, leaf=None, status=200, **params):
        place = f"{at}/leaves/{numbers[leaf]}{rest}" if leaf is not None else f"{at}{rest}"
        response = client.get(place, params=params)
        assert response.status_code == status, response.text
        return response.json()

    ask.client, ask.page = client, at.removeprefix("/api/v1")
    return ask
