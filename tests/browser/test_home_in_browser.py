"""The list of runs, the search that Ctrl-K opens, and what a run can be resumed from, in a browser."""

import re
import time

import pytest

import treeckpt as tc
from tests.browser.helpers import SCHEMES, copied, expect_phone_width
from tests.helpers.killed_saves import leave_killed
from tests.helpers.large import write_many
from tests.helpers.samples import write_metrics

expect = pytest.importorskip("playwright.sync_api").expect
HOSTILE = "<img src=x onerror=alert(1)>\u202e"


@pytest.fixture(scope="module")
def place(serve_module, tmp_path_factory):
    """Forty runs: one is late, one has a hostile name."""
    root = tmp_path_factory.mktemp("forty")
    for n in range(38):
        write_many(root / f"run-{n:02d}", 3, metrics=lambda step: {"loss": 300 / step})
    late = write_many(root / "late", 6, start_ns=time.time_ns() - 26 * 60 * 10**9)
    runs = [late, write_metrics(root / HOSTILE, {7: {"loss": 1.0}}), *sorted(root.glob("run-*"))]
    return serve_module(*runs, cache=root / "cache")


def test_which_step_can_i_resume_from_takes_no_click(watched, serve, tmp_path):
    run = write_metrics(tmp_path / "run", {100: {"loss": 2.0}, 200: {"loss": 1.0}, 300: {"loss": 3.0}})
    page = watched(serve(run, cache=tmp_path / "cache"), permissions=["clipboard-read", "clipboard-write"])
    panel = page.get_by_role("region", name="Resume from")
    rows = panel.get_by_role("listitem")
    expect(rows.nth(0)).to_contain_text("300")
    panel.get_by_role("button", name="lowest loss").click()  # no policy says which way is better
    expect(page).to_have_url(re.compile("best=loss%3Amin"))
    expect(rows.nth(1)).to_contain_text("200")
    assert all(row.bounding_box()["y"] < 600 for row in rows.all()), "nobody has to scroll"
    text = copied(panel.get_by_role("button", name="Copy Manager, Best"))
    assert (
        text == f"import treeckpt as tc\nmanager = tc.Manager('{run}', keep=None)\nstate = manager.restore(step=200)\n"
    )
    panel.get_by_role("button", name="CLI", exact=True).click()
    expect(page).to_have_url(re.compile("snippet=command"))
    command = copied(panel.get_by_role("button", name="Copy CLI, Newest good"))
    assert command == f"treeckpt verify {run / 'step_00000300'}\n"
    page.reload()
    expect(panel.get_by_role("button", name="Copy CLI, Newest good")).to_be_visible()
    expect(panel.get_by_role("button", name=re.compile("Copy Manager"))).to_have_count(0)
    panel.get_by_role("button", name="Verify the newest good").click()
    expect(page.get_by_text("Every checksum")).to_be_visible()
    page.goto(page.url.partition("/checkpoints")[0])
    expect(rows.nth(1)).to_contain_text("300")


def test_whether_a_run_trains_is_seen_at_once(watched, place):
    page = watched(place)
    row = page.locator("table.home tbody tr", has=page.get_by_role("link", name="late", exact=True))
    expect(row.get_by_role("cell").filter(has_text="min ago")).to_contain_text("late")
    expect(page.locator("table.home tbody tr", has_text="run-07")).to_contain_text("ended")


def test_failed_saves_have_a_page_and_a_run_without_any_says_so(watched, serve, tmp_path):
    run, fine = tmp_path / "run", write_metrics(tmp_path / "fine", {1: {"loss": 1.0}})
    leave_killed(run)
    with pytest.raises(tc.TreeError), tc.Manager(run, background=False) as manager:
        manager.save("tuned", {HOSTILE: object()})
    page = watched(serve(run, fine, cache=tmp_path / "cache"))
    expect(page.get_by_text("Still loading")).to_have_count(0)
    page.get_by_role("link", name="run", exact=True).click()
    page.get_by_role("link", name="More →").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Failed and killed saves of run")
    expect(page.locator(".failures tbody tr")).to_have_count(2)
    page.goto(page.url.partition("/runs/")[0])
    page.get_by_role("link", name="fine", exact=True).click()
    expect(page.get_by_role("link", name="No failed saves known, 7 days")).to_be_visible()


def test_forty_runs_fit_a_screen_and_are_filtered_as_one_types(watched, place):
    page = watched(place, clock=True)
    page.set_viewport_size({"width": 1440, "height": 900})
    rows = page.locator("table.home tbody tr")
    expect(rows).to_have_count(40)
    expect(page.get_by_text("Still loading")).to_have_count(0)
    last = rows.last.bounding_box()
    assert last["y"] + last["height"] <= 900
    expect(rows.first).to_contain_text("late")
    expect(rows.nth(1)).to_contain_text("<img src=x onerror=alert(1)>\\u202e")
    page.get_by_label("Filter runs").fill("run-1")
    page.clock.run_for(200)
    expect(rows).to_have_count(10)
    expect(page).to_have_url(re.compile(r"\?q=run-1$"))
    expect(page.locator("#news")).to_have_text("")
    page.get_by_label("Filter runs").fill("none such")
    page.clock.run_for(200)
    expect(page.get_by_text("None of the 40 runs matches")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Filter runs")).to_have_value("none such")


def test_any_run_step_or_leaf_is_reached_by_keys_alone(watched, place):
    page = watched(place)
    page.keyboard.press("Control+k")
    field = page.get_by_role("combobox", name="A run, a step or a leaf")
    expect(field).to_be_focused()
    expect(page.get_by_role("dialog").get_by_role("option").first).to_contain_text("late")
    page.keyboard.type("late step_0000060")  # no number alone: the path of a run may have it
    chosen = page.get_by_role("dialog").get_by_role("option", selected=True)
    expect(chosen).to_contain_text("step 600")
    expect(field).to_have_attribute("aria-activedescendant", chosen.get_attribute("id"))
    field.fill("late qkv")
    expect(page.get_by_role("group", name="Leaves").get_by_role("option").first).to_contain_text("attention.qkv")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("dialog").get_by_role("option").last).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("attention.qkv")
    page.get_by_role("button", name="Go to a run, a step or a leaf").click()
    field.fill("step_00000100")
    expect(page.get_by_role("dialog").get_by_role("option").first).to_contain_text("step 100")
    page.get_by_role("dialog").get_by_role("option").filter(has_text="late").click()
    expect(page.get_by_role("heading", name="Step 100")).to_be_visible()
    expect(page.get_by_role("button", name="Go to a run, a step or a leaf")).to_be_visible()
    page.wait_for_load_state("load")  # its scripts take keys
    page.keyboard.press("Control+k")
    page.keyboard.type("late step_00000300")
    page.keyboard.press("Enter")  # before the list has followed
    expect(page.get_by_role("heading", name="Step 300")).to_be_visible()
    page.wait_for_load_state("load")
    page.keyboard.press("Control+k")
    expect(field).to_be_focused()
    page.keyboard.press("Escape")
    expect(field).to_be_hidden()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_these_pages_are_accessible_and_fit_a_phone(watched, place, accessible, scheme):
    page = watched(place, color_scheme=scheme)
    expect(page.get_by_text("Still loading")).to_have_count(0)
    accessible(page, f"home, {scheme}")
    page.keyboard.press("Control+k")
    page.keyboard.type("step")
    expect(page.get_by_role("dialog").get_by_role("option")).not_to_have_count(0)
    accessible(page, f"search, {scheme}")
    page.keyboard.press("Escape")
    page.get_by_role("link", name="late").click()
    expect(page.get_by_role("region", name="Resume from")).to_contain_text("usually every 60 s")
    accessible(page, f"late, {scheme}")
    page.set_viewport_size({"width": 390, "height": 844})
    for part in (page.url, place):
        page.goto(part)
        page.wait_for_load_state("load")
        expect_phone_width(page)
