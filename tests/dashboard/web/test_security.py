"""Clients can only read what the dashboard was given, and a hostile checkpoint cannot harm its reader."""

import base64
import hashlib
import re

import numpy as np
import pytest

from tests.dashboard.helpers import checkpoint_pages
from tests.helpers.samples import gpt_state, write_checkpoint
from treeckpt_dashboard.web.security import HEADERS, host_name
from treeckpt_dashboard.web.server import ServeError, is_loopback
from treeckpt_dashboard.web.server import serve as start

TOKEN = "a-long-enough-token"


def pages_of(client):
    [run] = client.get("/api/v1/runs").json()["runs"]
    for checkpoint in run["checkpoints"]:
        at = f"/checkpoints/{checkpoint['id']}"
        for rest in ("?q=a", *checkpoint_pages(*range(4))):
            yield at + rest
            if "?" not in rest:
                yield f"/api/v1{at}{rest}"


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.", "", "127.0.0.1:x", "127.0.0.1@evil", "[::1]x", "[::1"],
)
def test_other_hosts_are_refused_on_every_method(client, host):
    for method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS"):
        assert client.request(method, "/", headers={"host": host}).status_code == 400


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:1", "localhost:8265", "LOCALHOST", "[::1]:9"])
def test_loopback_names_are_answered(client, host):
    assert client.get("/", headers={"host": host}).status_code == 200


def test_two_host_headers_are_refused(client):
    assert client.get("/", headers=[("host", "127.0.0.1"), ("host", "127.0.0.1")]).status_code == 400


def test_an_allowed_host_with_a_port_is_only_that_port(serve, run):
    client = serve(run, allowed_hosts={"name.example:8443"})
    assert client.get("/", headers={"host": "name.example:8443"}).status_code == 200
    assert client.get("/", headers={"host": "name.example"}).status_code == 400


def test_host_names_are_parsed_strictly():
    assert host_name("[::1]:80") == ("[::1]", "80") and host_name("A") == ("a", "")
    for bad in ("", ":80", "a:b", "[::1]80", "a:²"):
        with pytest.raises(ValueError):
            host_name(bad)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
def test_only_get_and_head(client, ids, method):
    for path in ("/", "/api/v1/runs", f"/checkpoints/{ids['step_00000100']}", "/static/style.css", "/nothing"):
        response = client.request(method, path)
        assert response.status_code == 405 and response.headers["allow"] == "GET, HEAD"


def test_refusals_under_api_are_json_as_all_its_errors(client, serve, run):
    foreign = {"host": "name.example"}
    for status, response in (
        (405, client.post("/api/v1/runs")),
        (405, serve(run, root_path="/a").post("/a/api/v1/runs")),
        (400, client.get("/api/v1/runs", headers=foreign)),
        (401, serve(run, token=TOKEN).get("/api/v1/runs")),
    ):
        assert response.status_code == status and response.headers["content-type"] == "application/json"
        assert response.json().keys() == {"error"}
    assert client.get("/", headers=foreign).headers["content-type"].startswith("text/plain")
    browser = serve(run, token=TOKEN).get("/api/v1/runs", headers={"accept": "text/html,*/*;q=0.8"})
    assert browser.status_code == 401 and "<form" in browser.text


def test_head_has_the_headers_of_get_and_no_body(client):
    for path in ("/", "/api/v1/runs", "/static/style.css"):
        head, get = client.head(path), client.get(path)
        assert (
            head.status_code == 200
            and head.content == b""
            and head.headers["content-type"] == get.headers["content-type"]
        )


def test_every_answer_carries_the_headers(client, ids):
    for path in ("/", "/api/v1/runs", "/nothing", "/api/v1/nothing", "/static/tree.js", f"/checkpoints/{ids['logs']}"):
        response = client.get(path)
        for name, value in HEADERS.items():
            assert response.headers[name] == value, (path, name)
        assert "access-control-allow-origin" not in response.headers
    assert client.post("/").headers["content-security-policy"] == HEADERS["Content-Security-Policy"]


def test_the_policy_is_the_strict_one():
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


def test_no_page_nor_script_makes_html_from_text():
    from pathlib import Path

    import treeckpt_dashboard

    folder = Path(treeckpt_dashboard.__file__).parent
    for file in (folder / "static").glob("*.js"):
        text = file.read_text()
        assert text.startswith("// @ts-check"), file
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|https?://(?!www\.w3)", text
        )
    for file in (folder / "templates").glob("*.html"):
        text = file.read_text()
        assert not re.search(
            r"\|\s*safe|tojson|autoescape false|<script(?! (type=\"module\" )?src=)|\son\w+=|style=|https?://", text
        ), file


# the token ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(serve, run):
    return serve(run, token=TOKEN)


def test_without_the_token_nothing_is_shown(guarded, ids):
    for path in ("/", "/api/v1/runs", "/api/v1/openapi.json", "/static/style.css", f"/checkpoints/{ids['logs']}", "/x"):
        response = guarded.get(path)
        assert response.status_code == 401 and "gpt" not in response.text, path
    assert guarded.get("/", params={"token": TOKEN + "x"}).status_code == 401
    assert guarded.get("/", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert guarded.get("/", headers={"authorization": "Bearer ÿ".encode("latin-1")}).status_code == 401


def test_a_token_beyond_ascii_is_taken_as_utf_8(serve, run):
    guarded = serve(run, token="sécret ключ")
    for given, status in (("sécret ключ".encode(), 200), ("sécret".encode("latin-1"), 401), (b"s\xff", 401)):
        assert guarded.get("/api/v1/runs", headers={"authorization": b"Bearer " + given}).status_code == status


def test_the_page_that_asks_for_the_token_allows_only_its_own_style_and_says_when_a_token_is_wrong(guarded):
    page = guarded.get("/")
    [style] = re.findall(r"<style>(.*)</style>", page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert page.headers["content-security-policy"] == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
    )
    assert "not the token" not in page.text
    wrong = guarded.get("/", params={"token": "<b>x"})
    assert "not the token" in wrong.text and "<b>" not in wrong.text


def test_the_token_becomes_a_cookie_that_scripts_cannot_read(guarded):
    welcome = guarded.get("/", params={"token": TOKEN, "start": "1"})
    assert welcome.status_code == 200 and "gpt" not in welcome.text
    cookie = welcome.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
    assert TOKEN not in welcome.text and "./?start=1" in welcome.text
    assert welcome.headers["cache-control"] == "no-store"
    assert guarded.get("/").status_code == 200


def test_programs_give_the_token_as_a_header(guarded):
    assert guarded.get("/api/v1/runs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_a_wrong_cookie_is_refused(guarded):
    name = guarded.get("/", params={"token": TOKEN}).headers["set-cookie"].split("=")[0]
    guarded.cookies.clear()
    assert guarded.get("/", headers={"cookie": f"{name}={TOKEN}"}).status_code == 401


def test_the_host_is_checked_before_the_token(guarded):
    assert guarded.get("/", params={"token": TOKEN}, headers={"host": "evil.example"}).status_code == 400


def test_addresses_beyond_loopback_need_a_token(run):
    for host in ("0.0.0.0", "192.0.2.1", "::", "example.com"):
        assert not is_loopback(host)
        with pytest.raises(ServeError, match="token"):
            start([run], host=host)
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    with pytest.raises(ServeError, match="characters"):
        start([run], token="short")


# ids and paths -------------------------------------------------------------------------------------------------------

HOSTILE_IDS = [
    "%2e%2e", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "step_00000100", "%00", "0" * 5000, "'; --", "%2e%2e/logs"
]  # fmt: skip


@pytest.mark.parametrize("bad", HOSTILE_IDS)
def test_ids_that_no_scan_made_lead_nowhere(client, bad):
    for path in (f"/runs/{bad}", f"/checkpoints/{bad}", f"/checkpoints/{bad}/files", f"/checkpoints/{bad}/leaves/0"):
        for prefix in ("", "/api/v1"):
            assert client.get(prefix + path).status_code in (404, 422)


@pytest.mark.parametrize(
    "bad", ["../../pyproject.toml", "..%2f..%2fapp.py", "%2e%2e/app.py", "....//app.py", "/etc/passwd"]
)
def test_static_files_stay_inside_their_folder(client, bad):
    assert client.get(f"/static/{bad}").status_code == 404


@pytest.mark.parametrize(
    "query",
    ["start=-1", "start=1e9", "start=" + "9" * 40, "node=" + "0." * 600, "node=-1", "node=0..1", "node=²",
     "node=99999999999", "node=../..", "q=" + "a" * 600],
)  # fmt: skip
def test_odd_queries_are_never_a_500(client, ids, query):
    at = f"checkpoints/{ids['step_00000700']}"
    for path in (
        f"/{at}?{query}",
        f"/api/v1/{at}/tree?{query}",
        f"/api/v1/{at}/search?q=a&{query}",
        f"/{at}/leaves/0?{query}",
    ):
        assert client.get(path).status_code in (200, 404, 422), path


@pytest.mark.parametrize(
    "query", ["y=-1", "x=65", "at=1,2,x", "at=,,,", "at=" + "9" * 30, "at=" + "1," * 999, "y=0&x=0"]
)
def test_odd_map_queries_are_never_a_500(client, ids, query):
    at = f"/api/v1/checkpoints/{ids['step_00000700']}/leaves/0/map?{query}"
    assert client.get(at).status_code in (200, 422)


@pytest.mark.parametrize("number", ["-1", "99999999", "x", "9" * 30])
def test_numbers_of_nothing_are_a_404(client, ids, number):
    at = f"/checkpoints/{ids['step_00000700']}"
    for path in (
        f"{at}/leaves/{number}",
        f"/api/v1{at}/leaves/{number}/map",
        f"{at}/files/{number}",
        f"/api/v1{at}/files/{number}/strip",
    ):
        assert client.get(path).status_code in (404, 422)


def test_a_link_that_takes_a_checkpoints_place_is_not_followed(serve, tmp_path):
    write_checkpoint(tmp_path / "outside", gpt_state(layers=1))
    write_checkpoint(tmp_path / "run" / "step_00000001", gpt_state(layers=1), step=1)
    client = serve(tmp_path / "run")
    [run] = client.get("/api/v1/runs").json()["runs"]
    at = f"/checkpoints/{run['checkpoints'][0]['id']}"
    assert client.get(at).status_code == 200
    (tmp_path / "run" / "step_00000001").rename(tmp_path / "aside")
    (tmp_path / "run" / "step_00000001").symlink_to(tmp_path / "outside")
    assert client.get(f"/api/v1{at}").json()["checkpoint"]["status"] == "foreign"
    assert client.get(f"/api/v1{at}/tree").status_code == 404 and "model" not in client.get(at).text
    assert client.get(f"/api/v1{at}/timing").json()["spans"] == []


# hostile text -------------------------------------------------------------------------------------------------------

SCRIPT = "<script>alert(1)</script>"
QUOTES = "\"' onmouseover=alert(1) x="
BIDI = "a\u202egnp.exe\u2066\u200b\x1b[31m\x00"
FORMULA, RESULT = "{{'kqz'*3}}", "kqzkqzkqz"
"""What a template engine would compute, and its result: no time, size or id on a page contains it."""


@pytest.fixture
def hostile(serve, tmp_path):
    name = "step_<img src=x onerror=alert(1)>\u202e"
    tree = {SCRIPT: np.zeros((2, 2), np.float32), QUOTES: SCRIPT, BIDI: BIDI, "a": {FORMULA: f"${FORMULA[1:-1]}"}}
    files = {f"{n}.txt": text.encode() for n, text in enumerate((SCRIPT, QUOTES, BIDI, FORMULA))}
    write_checkpoint(tmp_path / "run" / name, tree, metadata={SCRIPT: QUOTES, BIDI: SCRIPT}, error=SCRIPT, files=files)
    return serve(tmp_path / "run")


def test_hostile_text_is_text_on_every_page(hostile):
    for path in ["/", *pages_of(hostile)]:
        response = hostile.get(path)
        assert response.status_code == 200, path
        if response.headers["content-type"].startswith("text/html"):
            text = response.text
            assert "<script>" not in text and "<img src=x" not in text and RESULT not in text
            assert not re.search(r"\sonmouseover=alert\(1\)\sx=(?!&)\"", text)
            assert not re.search("[\u202e\u2066\u200b\x1b\x00]", text)
    assert "\\u202e" in hostile.get("/").text


def test_json_keeps_paths_as_stored(hostile):
    [run] = hostile.get("/api/v1/runs").json()["runs"]
    rows = hostile.get(f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}/tree").json()["rows"]
    assert [row["key"] for row in rows][2] == BIDI


def test_directories_with_names_that_are_no_unicode_are_listed(serve, tmp_path):
    import os

    write_checkpoint(tmp_path / "run" / "step_00000001", {"a": 1}, step=1)
    os.rename(os.fsencode(tmp_path / "run" / "step_00000001"), os.fsencode(tmp_path / "run") + b"/step_\xff\xfe")
    client = serve(tmp_path / "run")
    assert "step_\\udcff" in client.get("/").text
    assert all(client.get(path).status_code in (200, 404) for path in pages_of(client))


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "garbage", "deep", "timings"])
def test_damaged_files_never_break_a_page(serve, tmp_path, damage):
    from treeckpt._core.format.index import INDEX_NAME
    from treeckpt._core.format.timings import timings_name

    index = write_checkpoint(tmp_path / "run" / "step_00000001", gpt_state(layers=1), step=1)
    write_checkpoint(tmp_path / "run" / "step_00000002", gpt_state(layers=1), step=2)
    file = tmp_path / "run" / "step_00000001" / (timings_name(index.save_id) if damage == "timings" else INDEX_NAME)
    data = file.read_bytes()
    file.write_bytes({
        "truncate": data[: len(data) // 2], "flip": data.replace(b"float32", b"float33"), "empty": b"",
        "garbage": bytes(range(256)) * 64, "deep": b"[" * 200_000, "timings": data[:-9],
    }[damage])  # fmt: skip
    client = serve(tmp_path / "run")
    assert all(client.get(path).status_code in (200, 404) for path in pages_of(client))
    assert "step 2" in client.get("/").text


def test_an_index_with_hostile_columns_never_breaks_a_page(serve, tmp_path):
    """A sealed index may still claim bytes and ranks that are nowhere."""
    import msgspec

    from treeckpt._core.format.index import INDEX_NAME, encode_index

    directory = tmp_path / "run" / "step_00000001"
    index = write_checkpoint(directory, gpt_state(layers=1), step=1)
    record = index.leaves[0]
    for chunks in (
        msgspec.structs.replace(record.chunks, start=((1 << 60, 0, 2),)),
        msgspec.structs.replace(record.chunks, rank=((-5, 0, 2),)),
        msgspec.structs.replace(record.chunks, rank=((1 << 62, 0, 2),)),
    ):
        bad = msgspec.structs.replace(index, leaves=(msgspec.structs.replace(record, chunks=chunks), *index.leaves[1:]))
        (directory / INDEX_NAME).write_bytes(encode_index(bad))
        client = serve(tmp_path / "run")
        for path in [*pages_of(client)]:
            assert client.get(path).status_code in (200, 404), path
