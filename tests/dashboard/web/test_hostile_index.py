"""An index with a valid seal may say anything: whatever it says, every page answers, soon, and opens nothing else."""

import os
import threading

import msgspec
import numpy as np
import pytest
from starlette.testclient import TestClient

import treeckpt_dashboard
from tests.dashboard.helpers import checkpoint_pages
from tests.helpers.samples import write_checkpoint
from treeckpt._core.format.files import Progress, encode_progress, progress_name
from treeckpt._core.format.index import INDEX_NAME, encode_index
from treeckpt._core.format.records import AliasRecord, ValueRecord
from treeckpt._core.format.timings import Span, Timings, encode_timings, timings_name
from treeckpt._core.tree.structure import DictNode, ListNode
from treeckpt._core.tree.value_codec import TypedValue
from treeckpt_dashboard.web import security
from treeckpt_dashboard.web.app import create_app

replace = msgspec.structs.replace
PAGES = ("?q=a", *checkpoint_pages(0, 1))


def nested(depth):
    node = None
    for _ in range(depth):
        node = ListNode((node,))
    return node


def spec(index, **fields):
    return replace(index, specs=(replace(index.specs[0], **fields), *index.specs[1:]))


def leaf(index, at, record):
    return replace(index, leaves=(*index.leaves[:at], record, *index.leaves[at + 1 :]))


def named(index, name):
    return replace(index, structure=DictNode((name, "b"), (None, None)), leaves=(ValueRecord(1), ValueRecord(2)))


HOSTILE = {
    "a save id that is a path": lambda i: replace(i, save_id="../../../../etc/passwd"),
    "an absolute save id": lambda i: replace(i, save_id="/etc/passwd"),
    "a world of nobody": lambda i: replace(i, world=0),
    "a world of everybody": lambda i: replace(i, world=1 << 40),
    "a step of 400 digits": lambda i: replace(i, step=10**400),
    "a time of 400 digits": lambda i: replace(i, created_ns=10**400),
    "a time before all": lambda i: replace(i, created_ns=-(1 << 61)),
    "too many dimensions": lambda i: spec(i, shape=(1,) * 65),
    "more bytes than there are": lambda i: spec(i, shape=(1 << 40, 1 << 40)),
    "a negative size": lambda i: spec(i, shape=(-1, 5)),
    "no such dtype": lambda i: spec(i, dtype="../float32"),
    "a spec of nobody": lambda i: leaf(i, 0, replace(i.leaves[0], spec=10**9)),
    "a tie to itself": lambda i: leaf(i, 1, AliasRecord(0, 1)),
    "ties in a circle": lambda i: leaf(leaf(i, 0, AliasRecord(0, 1)), 1, AliasRecord(0, 0)),
    "a tie to nowhere": lambda i: leaf(i, 1, AliasRecord(0, -1)),
    "a million files": lambda i: replace(i, files=replace(i.files, rank=((0, 0, 1 << 24),))),
    "files past counting": lambda i: replace(i, files=replace(i.files, rank=((0, 0, 1 << 60),))),
    "files of nobody": lambda i: replace(i, files=replace(i.files, rank=((99, 0, 4),))),
    "a tree too deep": lambda i: replace(i, structure=nested(101), leaves=(ValueRecord(1),)),
    "a tree much too deep": lambda i: replace(i, structure=nested(250), leaves=(ValueRecord(1),)),
    "a name of a megabyte": lambda i: named(i, "a" * (1 << 20)),
    "a name that is a path": lambda i: named(i, "../../etc/passwd"),
    "a value too deep": lambda i: leaf(i, 0, ValueRecord(deep_value(150))),
    "a value of a class": lambda i: leaf(
        i, 0, ValueRecord(TypedValue("pickle", ("gASVJAAAAAAAAACMBXBvc2l4lIwGc3lzdGVt",)))
    ),
    "metadata of a kind unknown": lambda i: replace(i, metadata={"x" * 100_000: TypedValue("os.system", ("id",))}),
    "metrics that are none": lambda i: replace(i, metadata={"metrics": deep_value(150)}),
    "fewer leaves than the tree has": lambda i: replace(i, leaves=i.leaves[:3]),
}


def deep_value(depth):
    value = 1
    for _ in range(depth):
        value = TypedValue("list", (value,))
    return value


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run of one good checkpoint and every hostile one, being served; and the ids by name."""
    run = tmp_path_factory.mktemp("hostile") / "run"
    tree = {"a": np.zeros((8, 8), np.float32), "b": np.zeros((8, 8), np.float32), "c": 1}
    write_checkpoint(run / "step_00000099", tree, step=99)
    for step, change in enumerate(HOSTILE.values()):
        directory = run / f"step_{step:08d}"
        index = write_checkpoint(directory, tree, step=step)
        (directory / INDEX_NAME).write_bytes(encode_index(change(index)))
    client = TestClient(create_app([run]), base_url="http://127.0.0.1")
    [found] = client.get("/api/v1/runs").json()["runs"]
    return client, found


@pytest.mark.parametrize("what", HOSTILE)
def test_pages_of_a_hostile_index_answer(hostile, what):
    client, run = hostile
    name = f"step_{list(HOSTILE).index(what):08d}"
    at = next(f"checkpoints/{row['id']}" for row in run["checkpoints"] if row["name"] == name)
    for page in PAGES:
        for prefix in ("/", "/api/v1/"):
            answer = client.get(f"{prefix}{at}{page}")
            assert answer.status_code in (200, 404), page
            assert len(answer.content) < 1_000_000 and "root:x:" not in answer.text


def test_good_checkpoints_are_shown_beside_hostile_ones(hostile):
    client, run = hostile
    assert len(run["checkpoints"]) == len(HOSTILE) + 1
    rows = {row["name"]: row for row in run["checkpoints"]}
    assert rows["step_00000099"]["status"] == "complete"
    assert sum(row["status"] == "damaged" for row in rows.values()) >= 16
    for place in ("/", f"/runs/{run['id']}?sort=-bytes", "/live", "/usage?keep=last:1", "/metrics"):
        assert client.get(place).status_code == 200, place
    everything = client.get(f"/api/v1/checkpoints/{rows['step_00000099']['id']}/tree").json()["rows"]
    assert [row["key"] for row in everything] == ["a", "b", "c"]


@pytest.mark.parametrize("name", [INDEX_NAME, "timings", "shard", "progress"])
def test_pipes_in_the_place_of_files_do_not_hang(tmp_path, name):
    directory = tmp_path / "run" / "step_00000001"
    index = write_checkpoint(directory, {"a": np.zeros(4, np.float32)}, step=1)
    names = {"timings": timings_name(index.save_id), "shard": index.file_list[0].name,
             "progress": progress_name(0, index.save_id)}  # fmt: skip
    path = directory / names.get(name, name)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    client = TestClient(create_app([tmp_path / "run"]), base_url="http://127.0.0.1")
    done = []

    def ask():
        [run] = client.get("/api/v1/runs").json()["runs"]
        at = f"checkpoints/{run['checkpoints'][0]['id']}"
        done.append([client.get(f"/{at}{page}").status_code for page in PAGES])

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(300)
    assert done and set(done[0]) <= {200, 404}


def test_hostile_records_beside_an_index_never_break_a_page(tmp_path):
    directory = tmp_path / "run" / "step_00000001"
    index = write_checkpoint(directory, {"a": np.zeros(4, np.float32)}, step=1)
    huge = 10**400
    spans = (Span("save", 0, -huge, huge), Span("write", 0, 0, 1, huge, 99), Span("write", 5, 5, 1, -1, -7))
    (directory / timings_name(index.save_id)).write_bytes(
        encode_timings(Timings(index.save_id, 1, 1 << 24, spans, "\u202e<script>"))
    )
    for rank, number in enumerate((huge, -1, 1 << 61)):
        record = Progress(index.save_id, rank, 9, 1, "write", number, number, 0, number)
        (directory / progress_name(rank, index.save_id)).write_bytes(encode_progress(record))
    client = TestClient(create_app([tmp_path / "run"]), base_url="http://127.0.0.1")
    [run] = client.get("/api/v1/runs").json()["runs"]
    for place in (
        "/",
        "/live",
        "/usage",
        "/metrics",
        *(f"/checkpoints/{run['checkpoints'][0]['id']}{p}" for p in PAGES),
    ):
        answer = client.get(place)
        assert answer.status_code in (200, 404), place
        assert "<script>alert" not in answer.text and "\u202e" not in answer.text


def test_no_file_of_the_dashboard_runs_what_a_checkpoint_says():
    import ast
    from pathlib import Path

    banned = {"pickle", "marshal", "shelve", "dill", "yaml", "importlib", "code", "ctypes"}
    for file in Path(treeckpt_dashboard.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name.split(".")[0] for alias in node.names} | {(getattr(node, "module", "") or "")}
                assert not names & banned, file
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), file


def test_the_pages_of_the_framework_that_load_from_elsewhere_are_off(tmp_path):
    client = TestClient(create_app([tmp_path]), base_url="http://127.0.0.1")
    for path in ("/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"):
        assert client.get(path).status_code == 404


def test_an_answer_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(security, "TIMEOUT", 0.2)
    app, gate = create_app([tmp_path]), threading.Event()
    app.state.library.checkpoints = lambda *a, **k: gate.wait(300) and []
    client = TestClient(app, base_url="http://127.0.0.1")
    answer = client.get("/api/v1/live")
    gate.set()
    assert answer.status_code == 503 and "too long" in answer.text and answer.headers["retry-after"] == "30"
    assert "content-security-policy" in answer.headers


def test_no_page_holds_more_rows_than_a_browser_draws(tmp_path):
    tree = {f"k{n:04d}": np.zeros(2, np.float32) for n in range(1200)}
    write_checkpoint(tmp_path / "run" / "step_00000001", tree, step=1)
    client = TestClient(create_app([tmp_path / "run"]), base_url="http://127.0.0.1")
    [run] = client.get("/api/v1/runs").json()["runs"]
    at = f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}"
    for page, key in (("/tree", "rows"), ("/search?q=k", "rows"), ("/files/0", "rows")):
        found = client.get(at + page).json()
        assert len(found[key]) == 100 and found["next"] == 100
