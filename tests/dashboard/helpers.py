"""Requests and records that several test modules of the dashboard share."""

import time

from starlette.testclient import TestClient

from treeckpt._core.format.files import Progress, encode_progress, progress_name
from treeckpt_dashboard.web.app import ROOMS, create_app

PAGES = [route.path for room in ROOMS for route in room.pages]
"""The path of every page, with the names of its parameters."""


def checkpoint_pages(*numbers):
    """Returns what follows a checkpoint's path in those of its pages; of one leaf or shard, for each of the numbers."""
    at = "/checkpoints/{checkpoint_id}"
    rests = [path.removeprefix(at) for path in PAGES if path.startswith(at)]
    return list(dict.fromkeys(rest.format(number=number) for rest in rests for number in numbers))


def number_of(client, newest, path):
    """Returns the number of the leaf with a path."""
    found = client.get(f"{newest}/search", params={"q": path}).json()["rows"]
    return next(row["leaf"] for row in found if row["path"] == path)


def page(client, query=""):
    """Requests the first run of a dashboard, once its first scan has ended."""
    [run] = client.get("/api/v1/runs").json()["runs"]
    client.app.state.library.watches[run["id"]].refresh(wait=300)
    return client.get(f"/api/v1/runs/{run['id']}{query}")


def steps(answer):
    """Returns the steps of the rows of an answer about a run."""
    return [row["step"] for row in answer.json()["run"]["checkpoints"]]


SAVE = "00000000000000ff"


def under_way(directory, ranks, *, planned=1000, world=4, now=None):
    """Writes progress records of the ranks of a save: (bytes written, phase) of each."""
    directory.mkdir(parents=True, exist_ok=True)
    now = now or time.time_ns()
    for rank, (written, phase) in enumerate(ranks):
        record = Progress(SAVE, rank, world, 7, phase, written, planned, now - 10 * 10**9, now)
        (directory / progress_name(rank, SAVE)).write_bytes(encode_progress(record))


def get_when_read(client, path, timeout=300):
    """Requests until the status is not 202; returns that answer, and the progress of those before it."""
    before, end = [], time.monotonic() + timeout
    while (answer := client.get(path)).status_code == 202:
        assert time.monotonic() < end
        before.append(answer.json()["loading"])
        time.sleep(0.05)
    return answer, before


def client_of(run, cache):
    """Returns a client of a dashboard with a cache directory of its own."""
    return TestClient(create_app([run], cache=cache), base_url="http://127.0.0.1:8265")


def usage_when_made(client, **params):
    """Requests the usage until all directories are read and all plans are made."""
    end = time.monotonic() + 300
    while not (usage := client.get("/api/v1/usage", params=params).json())["complete"]:
        assert time.monotonic() < end
    return usage
