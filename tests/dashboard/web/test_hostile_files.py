"""Files of other programs that are no honest ones: read apart, with limits, while all other pages answer."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import numpy as safetensors_numpy

from tests.dashboard.helpers import client_of, get_when_read
from tests.dashboard.helpers import page as run_page
from tests.helpers.large import hold_readers
from tests.helpers.mutations import mutated
from tests.helpers.pickle_bombs import BOMBS, write_bomb
from tests.helpers.samples import gpt_state, write_checkpoint
from treeckpt_dashboard.store import index_reader, jobs

COUNT = int(os.environ.get("TREECKPT_MUTATED_PAGES", "48"))
FIRST = int(os.environ.get("TREECKPT_MUTATED_FIRST", "0"))


def test_a_file_is_read_by_another_process_while_pages_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(index_reader, "REQUEST_WAIT_SECONDS", 0.0)
    go_on = hold_readers(monkeypatch, tmp_path / "go on")
    (tmp_path / "run").mkdir()
    write_bomb(tmp_path / "run" / "bomb.pt", BOMBS["a tuple of tuples in a set"])
    safetensors_numpy.save_file({"a": np.ones(3)}, tmp_path / "run" / "good.safetensors")
    torch.save({"w": torch.ones(3)}, tmp_path / "run" / "good.pt")
    write_checkpoint(tmp_path / "run" / "step_00000001", gpt_state(layers=1), step=1)
    client = client_of(tmp_path / "run", tmp_path / "cache")
    found = {row["name"]: row["id"] for row in run_page(client).json()["run"]["checkpoints"]}
    for name in ("bomb.pt", "good.pt"):
        assert client.get(f"/api/v1/checkpoints/{found[name]}/tree").status_code == 202
        assert "Still loading" in client.get(f"/checkpoints/{found[name]}").text
    assert client.get("/").status_code == 200
    assert client.get(f"/checkpoints/{found['step_00000001']}").status_code == 200
    go_on()
    bomb, _ = get_when_read(client, f"/api/v1/checkpoints/{found['bomb.pt']}/tree")
    assert bomb.status_code >= 400 and "No program writes such" in bomb.json()["error"]
    assert "No program writes such" in client.get(f"/checkpoints/{found['bomb.pt']}").text
    good, _ = get_when_read(client, f"/api/v1/checkpoints/{found['good.pt']}/tree")
    assert good.status_code == 200 and good.json()["node"]["leaves"] == 1


@pytest.mark.parametrize(
    ("limit", "value"), [("MEMORY", 16 << 20), pytest.param("FOREIGN_SECONDS", 0, marks=pytest.mark.slow)]
)
def test_what_takes_more_than_its_limits_says_what_to_do(tmp_path, monkeypatch, limit, value):
    program = jobs.PROGRAM.replace(
        "sys.exit", f"from treeckpt_dashboard.store import index_reader\nindex_reader.{limit} = {value}\nsys.exit"
    )
    monkeypatch.setattr(jobs, "PROGRAM", program)
    torch.save({n: (n, [n], {n: str(n)}) for n in range(60_000)}, tmp_path / "large.pt")
    client = client_of(tmp_path / "large.pt", tmp_path / "cache")
    [found] = run_page(client).json()["run"]["checkpoints"]
    answer, _ = get_when_read(client, f"/api/v1/checkpoints/{found['id']}/tree")
    assert answer.status_code >= 400 and "treeckpt show" in answer.json()["error"]


class Server:
    """A server in a process of its own."""

    def __init__(self, run, cache):
        command = [sys.executable, "-m", "treeckpt._cli.main", "dashboard", str(run), "--port", "0", "--json"]
        environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[3]
        )
        self.url = json.loads(self.process.stdout.readline())["url"].rstrip("/")

    def get(self, path):
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=120) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def close(self):
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()


def _latencies(server, path, done, kept):
    while not done.is_set():
        begin = time.monotonic()
        assert server.get(path)[0] == 200
        kept.append(time.monotonic() - begin)
        time.sleep(0.02)


@pytest.mark.slow
def test_a_real_server_answers_while_bombs_and_changed_files_are_read(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for number, what in enumerate(BOMBS):
        if number % 6 == 0:
            write_bomb(run / f"bomb{number}.pt", BOMBS[what])
    (tmp_path / "made").mkdir()
    for number in range(FIRST, FIRST + COUNT):
        name, path = mutated(tmp_path / "made", number)
        path.rename(run / (f"step_{number:08d}" if name == "ours" else f"m{number}{path.suffix}"))
    server = Server(run, tmp_path / "cache")
    done, idle, busy = threading.Event(), [], []
    try:
        [one] = json.loads(server.get("/api/v1/runs")[1])["runs"]
        for _ in range(20):
            begin = time.monotonic()
            server.get("/")
            idle.append(time.monotonic() - begin)
        at = [f"/runs/{one['id']}", "/", "/api/v1/runs"]
        threads = [threading.Thread(target=_latencies, args=(server, path, done, busy)) for path in at]
        for thread in threads:
            thread.start()
        statuses = {}
        rows = json.loads(server.get(f"/api/v1/runs/{one['id']}")[1])["run"]["checkpoints"]
        for row in rows:
            where = f"/checkpoints/{row['id']}"
            for rest in ("/tree", "/leaves", "/leaves/0", "/leaves/0/peek", "/treemap"):
                status, body = server.get(f"/api/v1{where}{rest}")
                while status == 202:
                    time.sleep(0.1)
                    status, body = server.get(f"/api/v1{where}{rest}")
                assert status < 500, (row["name"], rest, status, body[:400])
                statuses[status] = statuses.get(status, 0) + 1
            status, body = server.get(where)
            assert status < 500, (row["name"], status, body[-400:])
    finally:
        done.set()
        for thread in threads:
            thread.join()
        server.close()
    middle = sorted(busy)[len(busy) // 2]
    print(f"{len(rows)} checkpoints, {statuses}; idle at worst {max(idle):.3f} s")
    print(f"meanwhile {len(busy)} pages, at worst {max(busy):.3f} s, median {middle:.3f} s")
    assert statuses[200] > 10 and len(statuses) > 1
    assert max(busy) < max(1.0, 20 * max(idle)), "no page waits for the files"
