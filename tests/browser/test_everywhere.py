"""Every page works on a phone, in both schemes, with a screen reader, without scripts, and behind a proxy."""

import re

import pytest

from tests.browser.helpers import WIDE, expect_phone_width
from tests.dashboard.helpers import PAGES

expect = pytest.importorskip("playwright.sync_api").expect


def test_the_choice_of_colours_is_kept(watched, address):
    page = watched(address, color_scheme="light")
    button = page.get_by_role("button", name="Dark colours")
    expect(button).to_have_attribute("aria-pressed", "false")
    button.click()
    page.get_by_role("link", name="step 700").click()
    expect(page.locator("#treemap-text")).to_contain_text("areas")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 18, 25)"
    expect(page.get_by_role("button", name="Dark colours")).to_have_attribute("aria-pressed", "true")
    assert page.context.cookies() == []


PLACES = [
    "",
    "{c}?open=0_1",
    "{c}/leaves/0?peek=1&region=10:20",
    "{c}/files",
    "{c}/files/0",
    "{c}/sidecars/0",
    "{c}/reshard",
    "{c}/timing",
    "{c}/verify",
    "{c}/contents",
    "live",
    "usage?keep=last:1",
    "diff",
    "diff/changes",
    "api",
    "{r}",
    "{r}/trends",
    "{r}/first-nan",
    "{r}/failures",
]
"""An address of each page: of a checkpoint at `c`, of a run at `r`."""


def addresses(page, address, places=PLACES):
    checkpoint = page.get_by_role("link", name="step 200").get_attribute("href").removeprefix("../")
    run = page.url.removeprefix(f"{address}/")  # the page of a single run is shown at once
    return [f"{address}/{place.format(c=checkpoint, r=run)}" for place in places]


def test_every_page_has_a_place_here():
    parts = {"c": "checkpoints/{checkpoint_id}", "r": "runs/{run_id}"}
    shown = {"/" + re.sub(r"/[0-9]+", "/{number}", place.partition("?")[0].format(**parts)) for place in PLACES}
    assert shown == set(PAGES) - {"/metrics"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_a_phone_and_axe_finds_nothing_to_object_to(watched, address, accessible, scheme):
    """The pages are loaded at the width of a phone, and widened for axe.

    The dark ones differ from the light ones in nothing but colours: three of them tell.
    """
    page = watched(address, color_scheme=scheme)
    for place in addresses(page, address, PLACES if scheme == "light" else PLACES[:3]):
        page.set_viewport_size({"width": 390, "height": 844})
        page.goto(place)
        page.wait_for_load_state("networkidle")
        expect_phone_width(page)
        tables = (
            "[...document.querySelectorAll('table.cards')].filter((t) => t.scrollWidth > t.parentElement.clientWidth)"
        )
        assert page.evaluate(f"{tables}.length") == 0, place
        page.set_viewport_size(WIDE)
        assert page.locator("h1").count() == 1 and page.evaluate("document.documentElement.lang") == "en", place
        nameless = page.evaluate(
            """[...document.querySelectorAll("canvas, input:not([type=hidden]), select, button, a")].filter((e) =>
                !e.closest("[aria-hidden=true]") && !e.closest("[hidden]") &&
                !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)"""
        )
        assert nameless == [], place
        accessible(page, place, only=None if scheme == "light" else "color-contrast")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(14, 18, 25)") is (scheme == "dark")


def test_a_place_behind_a_proxys_path_works_as_well(watched, serve, run):
    address = serve(run, root_path="/proxy/8265")
    page = watched(f"{address}/proxy/8265/")
    page.get_by_role("link", name="step 700").click()
    page.get_by_role("treeitem", name=re.compile("^model ")).click()
    page.get_by_role("link", name="wte.weight", exact=True).click()
    expect(page.locator("#map-text")).to_contain_text("2 regions")
    assert "/proxy/8265/checkpoints/" in page.url


def test_without_scripts_the_pages_still_work(watched, address):
    page = watched(address, java_script_enabled=False)
    page.get_by_role("link", name="step 700").click()
    page.get_by_role("link", name="model", exact=True).click()
    page.get_by_role("link", name="wte.weight", exact=True).click()
    expect(page.get_by_role("row").filter(has_text=", 0:96]")).to_have_count(2)
