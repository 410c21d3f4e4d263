"""The page of a run in a bucket: while it is read, once it is read, and where the store refuses."""

import threading

import pytest

from tests.browser.helpers import SCHEMES
from tests.helpers.far_s3 import far_s3_server, put_many
from treeckpt._io.storage.object_store import ObjectRun
from treeckpt_dashboard.store import watch

expect = pytest.importorskip("playwright.sync_api").expect
COUNT, FIRST = 30, 10
"""Checkpoints of the run, and those that are read before it is listed."""


@pytest.fixture(scope="module")
def server():
    with far_s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def url(server):
    return put_many(server, COUNT)


@pytest.fixture
def reached(server, monkeypatch):
    """The server, which the dashboard finds by the environment."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_first_rows_appear_while_the_rest_is_read(
    watched, serve, tmp_path, reached, url, accessible, monkeypatch, scheme
):
    gate, folders = threading.Event(), ObjectRun.folders
    monkeypatch.setattr(watch, "ENOUGH", FIRST)
    # the listing of the whole run waits; directories can be listed one by one
    monkeypatch.setattr(ObjectRun, "folders", lambda run: folders(run) if gate.wait(120) else [])
    reached.set(latency=0.04)
    page = watched(serve(url, cache=tmp_path), color_scheme=scheme)
    expect(page.get_by_role("row").filter(has_text="step 3,000")).to_be_visible()
    expect(page.get_by_text("Still loading: 10 of 30 directories are looked at")).to_be_visible()
    accessible(page, f"loading, {scheme}")
    gate.set()
    expect(page.locator(".tile", has_text="Checkpoints")).to_contain_text("30")
    expect(page.get_by_text("Still loading")).to_have_count(0)
    expect(page.locator("tr[data-id]")).to_have_count(COUNT)
    expect(page.locator("tr.fresh")).to_have_count(0)
    accessible(page, f"loaded, {scheme}")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_store_that_refuses_is_said_to(watched, serve, tmp_path, reached, url, accessible, scheme):
    reached.set(rules=[{"match": "list-type", "do": "reset", "times": 1000}])
    page = watched(serve(url, cache=tmp_path), color_scheme=scheme)
    expect(page.get_by_role("alert")).to_contain_text(f"This run cannot be read now: {url}")
    expect(page.get_by_text("Still loading")).to_have_count(0)
    expect(page.locator(".tile")).to_have_count(0)
    accessible(page, f"refused, {scheme}")
    reached.set()
    expect(page.get_by_role("row").filter(has_text="step 3,000")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
