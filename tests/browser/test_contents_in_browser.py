"""What is in the arrays, in a browser: NaN anywhere, one array over the steps, and what changed most."""

import re

import numpy as np
import pytest

from tests.browser.helpers import expect_colours, expect_phone_width
from tests.helpers.samples import write_checkpoint
from treeckpt._cli.main import main

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three steps: one layer grows fast, and the last step has a NaN."""
    run = tmp_path_factory.mktemp("trained") / "run"
    random = np.random.default_rng(0)
    tree = {
        f"layers.{n}.{part}": random.standard_normal((48, 64)).astype(np.float32) for n in range(4) for part in "qkv"
    }
    for step in (1, 2, 3):
        tree = {
            path: (array * (2 if path == "layers.2.k" else 1.01)).astype(np.float32) for path, array in tree.items()
        }
        tree["head"] = np.ones(5, np.float32)
        if step == 3:
            tree["layers.1.v"][3, 4] = np.nan
        write_checkpoint(run / f"step_{step:08d}", {"model": tree, "step": step}, step=step)
    return run


@pytest.fixture
def address(serve, trained, tmp_path, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    for step in (1, 2):
        assert main(["verify", "--statistics", str(trained / f"step_{step:08d}")]) == 0
    return serve(trained, cache=tmp_path / "cache")


def test_one_click_tells_whether_a_nan_is_anywhere(watched, address, accessible):
    page = watched(address)
    page.get_by_role("link", name="step 3").click()
    page.get_by_role("button", name="Look for NaN").click()
    rows = page.get_by_role("region", name="Statistics of arrays").locator("tbody tr")
    expect(rows.first).to_contain_text("1 NaN")
    expect(rows.first.get_by_role("link")).to_have_text("model/layers.1.v")
    expect(rows.nth(1)).to_contain_text("× that of like arrays")
    accessible(page, "contents")
    page.get_by_role("link", name="Tree", exact=True).click()
    expect(page.locator(".tile", has_text="NaN or Inf")).to_contain_text("in 1 array")
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_role("link", name="in 1 array").click()
    expect(rows.first).to_contain_text("1 NaN")
    expect_phone_width(page)


def test_the_first_nan_of_a_run_is_one_click_away(watched, address, accessible):
    page = watched(address)
    page.get_by_role("button", name="Find the first NaN").click()
    expect(page.get_by_text("Step 3 is the first with NaN: none of the 2 steps before it has any.")).to_be_visible()
    row = page.get_by_role("region", name="First NaN: arrays").locator("tbody tr")
    expect(row).to_contain_text("[3, 4]")
    expect(row).to_contain_text("byte")
    accessible(page, "the first NaN")
    page.set_viewport_size({"width": 390, "height": 844})
    expect_phone_width(page)
    row.get_by_role("link", name="model/layers.1.v").click()
    expect(page.get_by_text("First NaN at [3, 4]")).to_be_visible()
    page.get_by_role("link", name="run", exact=True).click()
    expect(page.get_by_role("link", name=re.compile("^Newest good: 2"))).to_be_visible()


def test_an_array_is_drawn_over_the_steps(watched, address, accessible):
    page = watched(address)
    page.get_by_role("link", name="step 2").click()
    page.get_by_role("link", name="Contents").click()
    page.get_by_role("link", name="layers.2.k").click()
    expect(page.locator("#steps-text")).to_contain_text("2 steps; 1 other checkpoint has no statistics yet")
    expect_colours(page, "#steps-chart canvas", 2)
    page.get_by_role("button", name="std", exact=True).click()
    page.locator("#steps-chart").focus()
    page.keyboard.press("End")
    expect(page.locator("#steps-text")).to_contain_text("step 2 · std")
    expect(page).to_have_url(re.compile("measure=deviation"))
    page.get_by_text("Steps as a table").click()
    expect(page.get_by_role("region", name="This array over steps").locator("tbody tr")).to_have_count(2)
    page.get_by_role("button", name="Whole array").click()
    expect(page.locator("#peek-legend")).to_contain_text("0")
    expect_colours(page, "#peek-image", 20)
    page.locator("#peek-image").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#peek-cell")).to_contain_text("row 0, column 0 · about")
    accessible(page, "a leaf over steps")
    page.set_viewport_size({"width": 390, "height": 844})
    expect_phone_width(page)
    page.locator("#steps-chart").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="step_00000001")).to_be_visible()


def test_what_changed_most_is_two_clicks_away(watched, address, accessible):
    page = watched(address)
    page.get_by_role("link", name="step 2").click()
    page.get_by_role("link", name="Diff").click()
    page.get_by_role("button", name="What changed most").click()
    rows = page.get_by_role("region", name="What changed most").locator("tbody tr")
    expect(rows.first).to_contain_text("model/layers.2.k")
    expect(rows.first).to_contain_text("100 %")
    accessible(page, "what changed most")
    page.get_by_role("link", name="layers", exact=True).click()
    expect(rows.first.get_by_role("link")).to_have_text("model/layers.2")
    page.set_viewport_size({"width": 390, "height": 844})
    expect_phone_width(page)
