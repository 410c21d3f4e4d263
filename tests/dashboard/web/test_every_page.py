"""Every page answers as HTML, with relative links, and never with an error of the server."""

import re

import numpy as np

from tests.dashboard.helpers import PAGES, checkpoint_pages
from tests.helpers.samples import write_run
from treeckpt._core.tree.containers import PerRank

MANY = "shards|files|leaves|ranks|checkpoints|arrays|problems|rows|saves|steps|elements|directories|runs"


def test_every_page_answers_as_html(client, ids):
    [run] = client.get("/api/v1/runs").json()["runs"]
    at = f"/checkpoints/{ids['step_00000700']}"
    paths = [path.format(run_id=run["id"], checkpoint_id=ids["step_00000700"], number=0) for path in PAGES]
    for path in (*paths, f"{at}?node=0", f"{at}?q=qkv"):
        if path == "/metrics":
            continue
        page = client.get(path)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html"), path
        assert "<script>" not in page.text and "style=" not in page.text and "http://" not in page.text


def test_addresses_are_relative_at_every_depth_and_work_under_a_root_path(run, serve):
    from urllib.parse import urljoin

    client = serve(run, root_path="/proxy/8265")
    [found] = client.get("/api/v1/runs").json()["runs"]
    at = f"checkpoints/{found['checkpoints'][0]['id']}"
    answered = set()
    for path in ("", f"runs/{found['id']}", *(at + rest for rest in checkpoint_pages(0))):
        for prefix in ("/", "/proxy/8265/"):  # a proxy may take its prefix off, or not
            page = client.get(prefix + path)
            assert page.status_code == 200
            for link in re.findall(r'(?:href|src)="([^"#?]+)', page.text):
                assert not link.startswith("/"), link
                target = urljoin(str(page.url), link)  # of a single run, that of its own page
                assert target.startswith(f"http://127.0.0.1:8265{prefix}"), (prefix, path, link)
                assert target in answered or client.get(target).status_code == 200, (prefix, path, link)
                answered.add(target)


def test_the_schema_lists_every_api_route_and_nothing_else(client):
    schema = client.get("/api/v1/openapi.json").json()
    assert all(path.startswith("/api/v1/") for path in schema["paths"])
    shown = {path.removeprefix("/api/v1") for path in schema["paths"]}
    assert set(PAGES) - {"/", "/metrics"} <= shown, "a page without its JSON"
    assert all(set(methods) == {"get"} for methods in schema["paths"].values())
    assert client.get("/docs").status_code == 404 and client.get("/redoc").status_code == 404


def test_no_question_is_answered_with_an_error_of_the_server(asked):
    odd = ["", "-1", "0", "1e9", "9" * 18, "'", "\u202e", "a/../b", "*" * 400, "0.0.0", ",", ":"]
    for value in odd:
        for rest, name in [
            ("/reshard", "mesh"), ("/reshard", "place"), ("/treemap", "node"), ("/folds", "node"), ("/leaves", "q"),
            ("/leaves", "larger"), ("/leaves/0/peek", "at"), ("/leaves/0/peek", "rows"), ("/leaves/0", "region"),
            ("/files/0/checksums", "start"), ("/snippet", "path"),
        ]:  # fmt: skip
            response = asked.client.get(f"/api/v1{asked.page}{rest}", params={name: value})
            assert response.status_code in (200, 404, 422), (rest, name, value)


def test_one_of_a_thing_is_in_the_singular(serve, tmp_path):
    write_run(tmp_path / "run", steps=(1,), tree={"w": np.zeros(1), "own": PerRank({"w": np.zeros(1)})}, world=1)
    client = serve(tmp_path / "run")
    [run] = client.get("/api/v1/runs").json()["runs"]
    checkpoint = run["checkpoints"][0]["id"]
    reshard = f"/checkpoints/{checkpoint}/reshard?mesh=2&place=other:%20Shard(0)"
    paths = [path.format(run_id=run["id"], checkpoint_id=checkpoint, number=0) for path in PAGES if path != "/metrics"]
    for path in (*paths, reshard, f"/diff?a={checkpoint}&b={checkpoint}", f"/runs/{run['id']}?q=no"):
        text = " ".join(re.sub(r"<[^>]*>", " ", client.get(path).text).split())
        said = re.findall(rf"\b1(?: complete| other)? (?:{MANY})\b", text)
        assert not said, (path, said)
