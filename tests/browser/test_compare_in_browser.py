"""Runs compared by their metrics, and checkpoints by their steps, in a browser."""

import re

import pytest

from tests.browser.helpers import SCHEMES, OwnTime, expect_colours, expect_phone_width, pixels_of
from tests.helpers.dozen_runs import write_rolled_back
from tests.helpers.large import write_many
from tests.helpers.samples import write_metrics

expect = pytest.importorskip("playwright.sync_api").expect
SECONDS = 5.0
"""In which each question is answered."""


@pytest.fixture(scope="module")
def place(serve_module, tmp_path_factory):
    """Six runs, of which `run-4` has the lowest loss; the last one has 600 checkpoints."""
    root = tmp_path_factory.mktemp("six")
    best = [3.0, 2.5, 2.0, 1.5, 0.5, 1.0]
    for n, low in enumerate(best):
        values = lambda step, low=low: {"loss": low + 100 / step, "accuracy": 1 - low / 10}  # noqa: E731
        write_many(root / f"run-{n}", 600 if n == 5 else 8, metrics=values)
    return serve_module(*sorted(root.glob("run-*")), cache=root / "cache")


@pytest.fixture
def runs(watched, place):
    page = watched(f"{place}/?metric=loss&metric=accuracy")
    expect(page.get_by_text("Still loading")).to_have_count(0)
    return page


def test_which_of_six_runs_is_best_takes_one_click(runs):
    clock = OwnTime()
    runs.get_by_role("link", name="The best is the lowest loss").click()
    row = runs.get_by_role("row").filter(has_text="best").filter(has_text="run-4")
    expect(row).to_contain_text("0.6250 at 800")
    assert clock.seconds() < SECONDS
    expect(runs.get_by_role("row").nth(1)).to_contain_text("run-4")
    expect(runs).to_have_url(re.compile(r"best=loss%3Amin.*sort=best%3Aloss"))
    expect(runs.get_by_role("columnheader", name="lowest loss")).to_have_attribute("aria-sort", "ascending")
    runs.get_by_role("link", name="accuracy").first.click()
    expect(runs.get_by_role("row").nth(1)).to_contain_text("run-4")
    expect(runs).to_have_url(re.compile(r"sort=-last%3Aaccuracy"))


def test_runs_with_the_same_values_are_both_seen_in_an_overlay(watched, serve, tmp_path):
    falling = {step: {"loss": 5.0 - step} for step in range(1, 5)}
    made = [write_metrics(tmp_path / name, falling) for name in ("first", "same")]
    loss = {1: 4.0, 2: 2.0, 3: 1.0, 4: 0.5, 5: 3.0}
    made.append(write_rolled_back(tmp_path / "other", range(1, 5), 2, [5], loss.__getitem__))
    page = watched(serve(*made, cache=tmp_path / "cache"))
    expect(page.get_by_text("Still loading")).to_have_count(0)
    for name in ("first", "same", "other"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("button", name="Compare ticked").click()
    legend = page.locator("#overlay-legend li")
    expect(legend).to_have_text(["first", "same", "other", "abandoned branches"])
    expect(page.locator("#overlay-about")).to_contain_text("first, same: lines that lie on each other, in turns.")
    chart = "#overlay .chart canvas >> nth=0"
    expect_colours(page, chart, 3)
    first, same, other = (pixels_of(page, chart, f"--c{n}") for n in range(3))
    assert 0.5 < first / same < 2 and min(first, same) > other / 4, "each has its share of the line, not the last all"
    signs = [pixels_of(page, f"#overlay-legend canvas >> nth={n}", f"--c{n}") for n in range(3)]
    assert signs[0] < signs[2] > signs[1] and min(signs) > 0, "the legend has the dashes"
    assert pixels_of(page, "#overlay-legend canvas >> nth=3", "--dim") > 0


def test_ticked_runs_are_laid_over_each_other_by_step_and_by_time(runs, accessible):
    for name in ("run-1", "run-5"):
        runs.get_by_label(f"Compare {name}").check()
    expect(runs).to_have_url(re.compile(r"&run=\w+&run=\w+$"))
    expect(runs.locator("[data-count]")).to_have_text("2")
    runs.reload()
    expect(runs.get_by_label("Compare run-5")).to_be_checked()
    runs.get_by_role("button", name="Compare ticked").click()
    expect(runs.get_by_role("heading", name="Metrics of 2 runs")).to_be_visible()
    expect(runs.locator("#overlay-legend")).to_contain_text("run-1")
    expect(runs.locator("#overlay-about")).to_contain_text("Of 1,216 values the lowest and the highest of each bin")
    expect_colours(runs, "#overlay .chart canvas >> nth=0", 3)
    runs.locator(".chart").first.focus()
    runs.keyboard.press("ArrowRight")
    expect(runs.locator("#overlay-text")).to_contain_text(
        "step 100 · run-1 at step 100: loss 3.5, accuracy 0.75 · run-5"
    )
    runs.get_by_role("button", name="by time").click()
    expect(runs).to_have_url(re.compile("along=time"))
    expect(runs.locator("#overlay-text")).to_have_text(re.compile("UTC · run-1 at step 100: .*"))  # the cursor stays
    accessible(runs, "the overlay")
    runs.set_viewport_size({"width": 390, "height": 844})
    expect_phone_width(runs)
    runs.locator(".chart").first.focus()
    runs.keyboard.press("Home")
    expect(runs.locator("#overlay-text")).to_contain_text("run-1 at step 100: loss 3.5, accuracy 0.75")
    runs.keyboard.press("Enter")
    expect(runs.get_by_role("heading", name="Step 100", exact=True)).to_be_visible()


def test_any_two_of_600_steps_are_compared_by_typing_and_by_ticks(runs):
    runs.get_by_role("link", name="run-5").click()
    runs.get_by_label("Compare step", exact=True).fill("1700")
    runs.get_by_label("with step").fill("50,050")
    runs.get_by_label("with step").press("Enter")
    expect(runs.get_by_role("alert")).to_contain_text("run-5 has no step 50,050 that can be compared. The nearest are")
    runs.get_by_role("button", name="step 50,000").click()
    expect(runs.get_by_role("heading", name="From step 1,700 to step 50,000")).to_be_visible()
    expect(runs.get_by_role("region", name="Metadata that differs")).to_contain_text("custom metadata metrics/loss")
    expect(runs.get_by_role("link", name="Diff", exact=True)).to_have_attribute("aria-current", "page")
    runs.get_by_role("link", name="run-5").first.click()
    runs.get_by_label("Compare step 60,000").check()
    runs.get_by_role("link", name="next").click()
    runs.get_by_label("Compare step 49,900").check()
    runs.get_by_role("button", name="Compare", exact=True).click()
    expect(runs.get_by_role("heading", name="From step 49,900 to step 60,000")).to_be_visible()


def test_what_a_search_finds_is_walked_through_and_opened_by_keys(runs):
    runs.get_by_role("link", name="run-0").click()
    runs.get_by_role("link", name="step 800").first.click()
    field = runs.get_by_label("Search paths")
    expect(runs.get_by_role("treeitem")).to_have_count(2)
    field.press("ArrowDown")  # in the whole tree too
    expect(runs.get_by_role("treeitem").first).to_have_attribute("aria-selected", "true")
    field.fill("model")
    expect(runs.locator("#tree-state")).to_contain_text("leaves")
    field.press("ArrowDown")
    field.press("ArrowDown")
    hit = runs.get_by_role("treeitem", selected=True)
    expect(field).to_have_attribute("aria-activedescendant", hit.get_attribute("id"))
    expect(field).to_be_focused()
    name = runs.get_by_role("treeitem").nth(1).get_by_role("link").text_content()
    field.press("Escape")
    expect(field).to_have_value("")
    field.fill("model")
    expect(runs.locator("#tree-state")).to_contain_text("leaves")
    field.press("ArrowDown")
    field.press("ArrowDown")
    field.press("Enter")
    expect(runs.get_by_role("heading", level=1)).to_contain_text(name.rpartition("/")[2])


def test_follow_says_what_it_does(runs):
    runs.get_by_role("link", name="run-0").click()
    button = runs.get_by_role("button", name="Follow the newest")
    expect(button).to_have_accessible_description("new checkpoints appear in the list")
    button.click()
    expect(button).to_have_accessible_description("stands still: nothing new is shown")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_these_pages_are_accessible_and_fit_a_phone(watched, place, accessible, scheme):
    page = watched(f"{place}/?best=loss:min", color_scheme=scheme)
    expect(page.get_by_text("Still loading")).to_have_count(0)
    page.get_by_text("Metrics and order").click()
    page.locator("select[name=sort]").select_option("-bytes")
    accessible(page, f"the table of runs, {scheme}")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("row").nth(1)).to_contain_text("run-5")
    address = page.url
    page.get_by_role("link", name="run-0").click()
    accessible(page, f"a run, {scheme}")
    page.get_by_label("Compare step", exact=True).fill("200")
    page.get_by_label("with step").fill("800")
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.get_by_role("heading", name="From step 200")).to_be_visible()
    accessible(page, f"differences, {scheme}")
    page.set_viewport_size({"width": 390, "height": 844})
    expect_phone_width(page)
    page.goto(address)
    expect_phone_width(page)
