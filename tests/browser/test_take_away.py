"""Leaves, tables, pictures and links are taken away; keys have a help; the page that asks for a token has a style."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.browser.helpers import SCHEMES, copied, expect_phone_width
from tests.helpers.samples import gpt_state

expect = pytest.importorskip("playwright.sync_api").expect
TOKEN = "a-long-enough-token"


@pytest.fixture
def leaf(watched, step_700):
    """The page of a leaf of step 700."""
    page = watched(step_700, permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("treeitem", name=re.compile("^model ")).click()
    page.get_by_role("link", name="wte.weight", exact=True).click()
    expect(page.locator("#map-text")).to_contain_text("2 regions")
    return page


def download(page, link):
    with page.expect_download() as started:
        link.click()
    assert started.value.failure() is None
    return Path(started.value.path()), started.value.suggested_filename


def test_a_leaf_a_region_of_it_its_table_and_its_picture_are_downloaded(leaf):
    expected = gpt_state(seed=700)["model"]["wte.weight"]
    path, name = download(leaf, leaf.get_by_role("link", name=".npy"))
    assert name == "model.wte.weight.npy"
    np.testing.assert_array_equal(np.load(path), expected)
    path, _ = download(leaf, leaf.get_by_role("link", name="Table as CSV"))
    assert [row["region"] for row in csv.DictReader(path.read_text().splitlines())] == [
        "[0:500, 0:96]",
        "[500:1000, 0:96]",
    ]
    path, name = download(leaf, leaf.get_by_role("button", name="Shard map as PNG"))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and name.endswith("Shard_map.png")
    leaf.get_by_role("textbox", name="Region").fill("10:20")
    leaf.keyboard.press("Enter")
    path, _ = download(leaf, leaf.get_by_role("link", name=".npy"))
    np.testing.assert_array_equal(np.load(path), expected[10:20])


def test_the_link_and_the_json_of_a_page_are_those_of_what_it_shows(leaf):
    leaf.get_by_role("button", name="by file").click()
    assert copied(leaf.get_by_role("button", name="Copy link")) == leaf.url and "by=file" in leaf.url
    leaf.get_by_role("link", name="This page as JSON").click()
    leaf.wait_for_url(re.compile(r"/api/v1/"))
    assert json.loads(leaf.locator("body").inner_text())["path"] == "model/wte.weight"


def test_the_page_of_a_leaf_keeps_its_tabs_and_its_view(leaf):
    assert leaf.get_by_role("navigation", name="Parts of the checkpoint").get_by_role("link").count() >= 6
    leaf.get_by_role("button", name="by file").click()
    leaf.keyboard.press("]")
    expect(leaf.locator("h1")).to_have_text("wpe.weight")
    expect(leaf.get_by_role("button", name="by file")).to_have_attribute("aria-pressed", "true")
    leaf.keyboard.press("[")
    expect(leaf.locator("h1")).to_have_text("wte.weight")
    tree = leaf.get_by_role("navigation", name="Parts of the checkpoint").get_by_role("link", name="Tree")
    expect(tree).to_have_attribute(
        "href", re.compile("open=")
    )  # the script of the page sets it, after the text is there
    tree.click()
    expect(leaf.get_by_role("link", name="wte.weight", exact=True)).to_be_visible()  # the tree is as open as it was


def test_the_keys_of_a_page_are_shown_on_a_question_mark_and_not_while_typing(watched, step_700, accessible):
    page = watched(step_700)
    expect(page.locator("#treemap-text")).to_contain_text("areas")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    expect(dialog).to_contain_text("searches paths")
    accessible(page, "the keys")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.get_by_role("button", name="Keys").click()
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()
    page.keyboard.press("/")
    page.keyboard.type("what?")
    expect(dialog).to_be_hidden()
    expect(page.get_by_label("Search paths")).to_have_value("what?")


def test_the_first_tab_skips_to_the_content(page):
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport(ratio=1)
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()


def test_the_smallest_area_of_a_treemap_has_its_name_under_the_pointer(watched, step_700):
    page = watched(step_700)
    expect(page.locator("#treemap-text")).to_contain_text("areas")
    page.locator("#treemap-canvas").focus()
    page.keyboard.press("End")
    smallest = page.locator("#treemap-text").inner_text()
    box = page.locator("#treemap-canvas").bounding_box()
    page.mouse.move(box["x"] + 30, box["y"] + 60)
    tip = page.locator("#treemap .tip")
    expect(tip).to_be_visible()
    assert tip.inner_text() == page.locator("#treemap-text").inner_text() != smallest
    page.locator("summary", has_text="Areas as a table").click()
    expect(page.locator("#treemap-table tbody tr").nth(150)).to_be_attached()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_token_is_asked_once_on_a_styled_page_and_leaves_the_address(serve, run, chromium, accessible, scheme):
    address = serve(run, token=TOKEN)
    context = chromium.new_context(viewport={"width": 390, "height": 700}, color_scheme=scheme)
    page = context.new_page()
    assert page.goto(address).status == 401
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(245, 246, 249)" if scheme == "light" else "rgb(14, 18, 25)")
    accessible(page, "the token's page", only=None if scheme == "light" else "color-contrast")
    page.get_by_label("Token").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("not the token")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("heading", name="gpt")).to_be_visible()
    assert "token" not in page.url
    expect_phone_width(page)
    page.get_by_role("link", name="step 700").click()
    expect(page.get_by_role("treeitem")).to_have_count(5)
    context.close()
