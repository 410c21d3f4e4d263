"""The page of the API lists every address with its parameters, and every page links to its JSON."""

import re

from tests.dashboard.helpers import PAGES
from treeckpt_dashboard.web.api_page import type_text


def test_the_page_lists_every_address_of_the_schema_with_every_parameter(client):
    paths = client.get("/api/v1/openapi.json").json()["paths"]
    html = client.get("/api").text
    shown = {one["path"]: one for one in client.get("/api/v1/api").json()["endpoints"]}
    assert shown.keys() == paths.keys()
    for path, methods in paths.items():
        assert path in html
        assert [one["name"] for one in shown[path]["parameters"]] == [
            one["name"] for one in methods["get"].get("parameters", [])
        ]
        assert shown[path]["text"] and shown[path]["result"], path


def test_the_schema_says_what_fields_of_a_timing_mean(client):
    schemas = client.get("/api/v1/openapi.json").json()["components"]["schemas"]
    for name, fields in {
        "TimingPage": ("slowest", "slowdown", "blocked", "rate"),
        "RankRow": ("busy", "slowdown", "blocked", "nbytes"),
        "PhaseRow": ("slowest", "waiting"),
        "CheckpointRow": ("status",),
        "VerificationRow": ("ok", "by"),
    }.items():
        for field in fields:
            assert schemas[name]["properties"][field].get("description"), f"{name}.{field}"


def test_what_an_answer_looks_like_while_an_index_is_read_is_told(client):
    document = client.get("/api/v1/openapi.json").json()
    for about in document["paths"].values():
        assert about["get"]["responses"]["202"]["content"]["application/json"]["schema"]["$ref"].endswith("/Loading")
    assert "progress in the field <code>loading</code>" in client.get("/api").text


def test_an_address_that_the_api_does_not_have_is_told_where_all_are_listed(client):
    for path in ("/api/v1", "/api/v1/run"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert answer.json() == {"error": "There is no such address: the page /api lists all."}


def test_types_are_described_in_words():
    assert type_text({"type": "integer", "minimum": 0, "maximum": 64}) == "integer from 0 to 64"
    assert type_text({"anyOf": [{"type": "string", "maxLength": 1000}, {"type": "null"}]}) == (
        "string of length up to 1,000 or null"
    )
    assert type_text({"enum": ["npy", "safetensors"], "type": "string"}) == '"npy" or "safetensors"'
    assert type_text({"type": "array", "items": {"$ref": "#/components/schemas/LeafPage"}}) == "array of LeafPage"


def test_every_page_links_to_its_json_with_its_query(client, ids):
    [run] = client.get("/api/v1/runs").json()["runs"]
    query = "start=1&q=%22%3E"
    names = {"run_id": run["id"], "checkpoint_id": ids["step_00000700"], "number": 0}
    for path in set(PAGES) - {"/", "/metrics"}:  # of one run alone, `/` leads to its page
        other = f"b={names['checkpoint_id']}&" if "diff" in path else ""  # such a page chooses the first one itself
        page = client.get(f"{path.format(**names)}?{other}{query}").text
        [link] = re.findall(r'<a href="([^"]*)">This page as JSON', page)
        assert link.endswith("start=1&amp;q=%22%3E"), link
        answer = client.get("/" + link.replace("../", "").removeprefix("./").replace("&amp;", "&"))
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/json", path
