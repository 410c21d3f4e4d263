"""The pages of runs: a save appears and is followed, rows are filtered and sorted, a large index loads."""

import re
import time

import pytest

from tests.browser.helpers import OwnTime, expect_phone_width
from tests.dashboard.helpers import under_way
from tests.helpers.adapted import write_adapted
from tests.helpers.background import until
from tests.helpers.large import hold_readers, write_large_checkpoint, write_many
from tests.helpers.samples import gpt_state, write_checkpoint
from treeckpt_dashboard.runs import live
from treeckpt_dashboard.store import index_reader, watch

expect = pytest.importorskip("playwright.sync_api").expect


def test_a_save_appears_within_three_seconds_and_keeps_the_focus(watched, serve, tmp_path):
    write_many(tmp_path / "run", 3)
    page = watched(serve(tmp_path / "run"), clock=True)
    expect(page.get_by_role("button", name="Follow the newest")).to_have_attribute("aria-pressed", "true")
    link = page.get_by_role("link", name="step 200")
    link.focus()
    write_checkpoint(tmp_path / "run" / "step_00000400", gpt_state(layers=1), step=400)
    time.sleep(watch.FRESH)  # the server may have looked just before
    page.clock.run_for(3000 - watch.FRESH * 1000)
    expect(page.get_by_role("link", name="step 400")).to_be_visible()
    expect(page.locator("#news")).to_have_text("New: step 400")
    expect(page.locator(".tile", has_text="Newest step")).to_contain_text("400")
    expect(page.locator(":focus")).to_have_text("step 200")


def asked_by(page):
    """The places that the page's script asks from now on."""
    asked = []
    page.on("request", lambda request: asked.append(request.url) if request.resource_type == "fetch" else None)
    return asked


def test_nobody_asks_when_nobody_follows(watched, serve, tmp_path):
    write_many(tmp_path / "run", 2)
    page = watched(serve(tmp_path / "run"), clock=True)
    asked = asked_by(page)
    with page.expect_event("requestfinished", lambda request: request.resource_type == "fetch"):
        page.clock.run_for(3000)
    assert len(asked) == 1, "who follows asks"
    page.get_by_role("button", name="Follow the newest").click()
    expect(page).to_have_url(re.compile(r"follow=0"))
    page.clock.run_for(10_000)
    page.reload()
    assert len(asked) == 1
    expect(page.get_by_role("button", name="Follow the newest")).to_have_attribute("aria-pressed", "false")


def test_a_save_is_seen_beside_one_that_was_killed_whenever_it_comes(watched, serve, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "FRESH", 0.0)
    monkeypatch.setattr(live, "SPELL", 1e9)  # what does not change is a 304
    under_way(tmp_path / "run" / "step_00000300", [(500, "write")], world=1, now=time.time_ns() - 10**12)
    page = watched(serve(tmp_path / "run") + "/live", clock=True)
    expect(page.get_by_text("It hangs or was killed")).to_be_visible()
    asked = asked_by(page)
    page.clock.run_for(2000)
    assert until(lambda: page.wait_for_timeout(10) or len(asked) == 1), "as often as beside a save that lives"
    page.clock.pause_at(time.time() + 660)
    assert until(lambda: page.clock.run_for(2000) or len(asked) > 3), "it is still asked for"
    expect(page.locator("#news")).to_contain_text("Nothing new since ")
    under_way(tmp_path / "run" / "step_00000400", [(500, "write")], world=1)
    assert until(lambda: page.clock.run_for(2000) or page.locator(".saving").count() == 2)
    expect(page.locator(".saving").first).not_to_contain_text("It hangs")


def test_a_hidden_tab_does_not_ask_and_catches_up_when_it_is_seen(watched, serve, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "FRESH", 0.0)  # each request looks again
    write_many(tmp_path / "run", 2)
    page = watched(serve(tmp_path / "run"), clock=True)
    hide = """(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
                            document.dispatchEvent(new Event('visibilitychange')); }"""
    page.evaluate(hide, True)
    asked = asked_by(page)
    page.clock.run_for(10_000)
    write_checkpoint(tmp_path / "run" / "step_00000300", gpt_state(layers=1), step=300)
    page.evaluate(hide, False)
    page.clock.run_for(10)
    expect(page.get_by_role("link", name="step 300")).to_be_visible()
    assert len(asked) == 1


def test_a_save_under_way_is_watched_until_it_is_done(watched, serve, tmp_path):
    write_many(tmp_path / "run", 1)
    directory = tmp_path / "run" / "step_00000300"
    under_way(directory, [(500, "write"), (1000, "commit")], world=2)
    page = watched(serve(tmp_path / "run"))
    row = page.get_by_role("row").filter(has_text="step 300")
    expect(row).to_contain_text("75 %, being written")
    page.get_by_role("link", name="Live").click()
    expect(page.get_by_text("1 of 2 ranks wait for 0, still writing.")).to_be_visible()
    under_way(directory, [(1000, "commit"), (1000, "commit")], world=2)
    expect(page.get_by_text("the coordinator is to commit")).to_be_visible()
    for record in directory.glob("progress*"):
        record.unlink()
    expect(page.get_by_text("Nothing is being saved now")).to_be_visible()


def test_filters_and_orders_are_in_the_address(watched, serve, tmp_path):
    page = watched(serve(write_many(tmp_path / "run", 120)))
    page.get_by_label("Find").fill("step_00011")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("row")).to_have_count(11)  # and the header
    page.get_by_label("Find").fill("")
    page.get_by_label("Retained by").fill("every:6000")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("a multiple of 6000 steps")).to_have_count(2)
    page.get_by_role("link", name="Duration").click()
    expect(page).to_have_url(re.compile(r"sort=-time.*keep=every"))
    expect(page.get_by_role("columnheader", name="Duration")).to_have_attribute("aria-sort", "descending")
    page.get_by_role("link", name="next").click()
    expect(page.get_by_role("row")).to_have_count(21)
    page.get_by_role("link", name="Usage").click()
    page.get_by_label("Policies to try").fill("last:2")
    page.get_by_role("button", name="Preview").click()
    expect(page.locator(".tile", has_text="Would be freed")).to_contain_text("118 directories")


def test_a_large_index_shows_that_it_is_loading_and_then_its_tree(watched, serve, tmp_path, monkeypatch):
    monkeypatch.setattr(index_reader, "LARGE_INDEX_NBYTES", 25_000)
    go_on = hold_readers(monkeypatch, tmp_path / "go on")
    write_large_checkpoint(tmp_path / "run" / "step_00000005", leaves=5_000, step=5)
    page = watched(serve(tmp_path / "run"))
    expect(
        page.get_by_text("Still loading").or_(page.get_by_role("row").filter(has_text="reading")).first
    ).to_be_visible()
    go_on()
    page.get_by_role("link", name="step 5").click()
    expect(page.get_by_role("treeitem")).to_have_count(2)
    page.get_by_label("Search paths").fill("layers.7. qkv")
    expect(page.get_by_role("treeitem")).to_have_count(1)


@pytest.mark.slow  # test_everywhere shows it of the light ones, and of one dark one
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_these_pages_fit_a_phone_too(watched, address, scheme):
    page = watched(address, color_scheme=scheme)
    page.set_viewport_size({"width": 390, "height": 844})
    for place in ("", "live", "usage?keep=last:1"):
        page.goto(f"{address}/{place}")
        page.wait_for_load_state("load")
        expect_phone_width(page)
        assert page.locator("h1").count() == 1


@pytest.mark.slow  # test_questions asks it each time, in as many clicks and seconds
def test_what_a_run_takes_in_a_week_under_other_policies_takes_two_clicks_and_five_seconds(watched, serve, tmp_path):
    write_many(tmp_path / "run", 30, start_ns=time.time_ns() - 30 * 60 * 10**9)
    page = watched(serve(tmp_path / "run"))
    clock = OwnTime()
    page.get_by_role("link", name="Usage").click()
    page.get_by_label("Policies to try").fill("last:10")
    page.get_by_role("button", name="Preview").click()
    row = page.get_by_role("row").filter(has_text="as typed above")
    expect(row).to_contain_text("last:10")
    expect(row).to_contain_text("none")
    assert clock.seconds() < 5
    expect(page).to_have_url(re.compile(r"keep=last"))
    expect(page.get_by_role("row").filter(has_text="Nothing deleted")).to_contain_text("per day")
    # what a clean-up would do is shown once it is planned, on its own
    expect(page.get_by_role("region", name="Will be pruned of run")).to_contain_text("step_00000100", timeout=60_000)


def test_own_and_shared_bytes_are_said_where_one_looks_for_bytes(watched, serve, tmp_path, accessible):
    write_adapted(tmp_path / "run", 3)
    page = watched(serve(tmp_path / "run"))
    row = page.get_by_role("row").filter(has_text="step 3")
    expect(row).to_contain_text("3.61 MB 3.6 MB shared")
    expect(page.get_by_role("row").filter(has_text="step 1")).not_to_contain_text("shared")
    row.get_by_role("link", name="step 3").click()
    tile = page.locator(".tile", has_text="Arrays")
    expect(tile).to_contain_text("12 kB own, 3.6 MB shared with step_00000001")
    accessible(page, "a checkpoint that shares files")
    page.go_back()
    page.get_by_role("link", name="step 1").click()
    tile = page.locator(".tile", has_text="On disk")
    expect(tile).to_contain_text("3.6 MB of it freed only with step_00000002 and 1 more")
    page.set_viewport_size({"width": 390, "height": 844})
    expect_phone_width(page)
    page.go_back()
    page.wait_for_load_state("load")
    expect_phone_width(page)
