"""Vendored files are those of the list, with versions and licences; pages fetch few bytes."""

import gzip
import hashlib
import re
from pathlib import Path
from urllib.parse import urljoin

import pytest

STATIC = Path(__file__).parents[3] / "dashboard" / "static"
VENDOR = STATIC / "vendor"


def test_the_list_names_every_file_with_its_checksum():
    lines = (VENDOR / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split() for line in lines)}
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in VENDOR.iterdir() if p.name != "SHA256SUMS"}
    assert listed == found


def test_every_library_has_a_version_in_its_name_and_a_licence():
    for path in VENDOR.glob("*.js"):
        match = re.fullmatch(r"([a-z0-9-]+?)-\d+\.\d+\.\d+(\.min)?\.js", path.name)
        assert match, path.name
        licence = (VENDOR / f"{match[1]}-LICENSE").read_text()
        assert "Copyright" in licence


def test_all_that_a_browser_may_fetch_is_at_most_200_kb_compressed():
    files = [p for p in STATIC.rglob("*") if p.suffix in (".js", ".css", ".svg")]
    assert sum(len(gzip.compress(p.read_bytes())) for p in files) <= 200_000


@pytest.mark.parametrize("count", [1, 2])
def test_the_first_page_fetches_at_most_60_kb_compressed(serve, run, count):
    """The page of a single run, or the list of runs, with all that its scripts import."""
    client = serve(*[run, run / "step_00000700"][:count])
    page = client.get("/")
    todo = [f"/static/{name}" for name in re.findall(r'(?:href|src)="\.{1,2}/static/([^"]+)"', page.text)]
    seen = {}
    while todo:
        path = todo.pop()
        if path not in seen:
            text = client.get(path).text
            seen[path] = len(gzip.compress(text.encode()))
            todo += [urljoin(path, name) for name in re.findall(r'(?:from|import) "(\.[^"]+)"', text)]
    assert sum(seen.values()) + len(gzip.compress(page.content)) <= 60_000 and len(seen) >= 3
