"""Every page works on a phone, in both schemes, with a screen reader, without scripts, and behind a proxy."""

import re

import httpx
import numpy as np
import pytest

from tests.browser.helpers import WIDE, expect_phone_width
from tests.dashboard.helpers import PAGES
from tests.helpers.background import until
from tests.helpers.samples import gpt_state, write_checkpoint, write_metrics
from treeckpt._core.tree.value_codec import encode_value

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
    "overlay",
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


LONG = "m" * 2000
"""A name without a place to break a line."""
ODD = "\u05e9\u05dc\u05d5\u05dd \u202egnp.exe \u2066 \U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f525 " * 20
"""A name from right to left, with characters that reorder others, and emoji."""


@pytest.fixture(scope="session")
def odd_address(serve_session, run, tmp_path_factory):
    """A dashboard of runs with names, metrics, leaves and metadata of any length and script, and many leaves."""
    at = tmp_path_factory.mktemp("odd")
    small = {"layers": 1, "width": 32, "vocabulary": 64}
    for step in (100, 200):
        tree = gpt_state(**small, seed=step) | {LONG: np.ones(64), ODD: {"a" * 900: np.ones(64)}, "text": "x" * 3000}
        metrics = encode_value({"loss": 1 / step, LONG: 1.0, ODD: 2.0}, "metrics")
        metadata = {"metrics": metrics, "note": "y" * 2000, LONG: "k", ODD: ODD}
        write_checkpoint(at / ("r" * 240) / f"step_{step:08d}", tree, step=step, metadata=metadata)
    write_checkpoint(at / ("r" * 240) / ("n" * 250), gpt_state(**small), step=None)
    values = {step: {"loss": 1 / step, "accuracy": 0.1} for step in range(100, 6100, 100)}
    write_metrics(at / "\u05e9\u05dc\u05d5\u05dd \U0001f525", values)
    return serve_session(run, *sorted(at.iterdir()))


BLANK = """[...document.querySelectorAll(".card, .tile, .note")]
    .filter((e) => e.checkVisibility() && !e.innerText.trim()).map((e) => e.outerHTML.slice(0, 200))"""
"""The parts of a page that show nothing."""
OUTSIDE = """[...document.querySelectorAll(".card, .tile, .note")].flatMap((card) => {
    const edge = card.getBoundingClientRect().right + 1;
    const cut = (e) => { for (let q = e; q !== card.parentElement; q = q.parentElement)
        if (getComputedStyle(q).overflowX !== "visible") return true; return false; };
    return [...card.querySelectorAll("*")].filter((e) => !e.closest("svg, .sr") && e.getBoundingClientRect().width &&
        e.getBoundingClientRect().right > edge && !cut(e)).slice(0, 1).map((e) => e.outerHTML.slice(0, 200)); })"""
"""What stands out of its card."""
UNEXPLAINED = """[...document.querySelectorAll(".card")].filter((card) => card.querySelector(
    "#treemap-canvas, #map-canvas, canvas.strip, #matrix-canvas, #balance-chart canvas") &&
    card.querySelector("canvas").checkVisibility() && !card.querySelector(".legend li"))
    .map((card) => card.innerText.slice(0, 80))"""
"""Pictures of bytes whose colours no legend tells."""
NAMELESS = """[...document.querySelectorAll("canvas, input:not([type=hidden]), select, button, a")].filter((e) =>
    !e.closest("[aria-hidden=true]") && !e.closest("[hidden]") &&
    !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_a_phone_and_axe_finds_nothing_to_object_to(watched, address, accessible, scheme):
    """The pages are loaded at the width of a phone, and widened for axe.

    The dark ones differ from the light ones in nothing but colours: three of them tell.
    """
    page = watched(address, color_scheme=scheme)
    for place in addresses(page, address, PLACES if scheme == "light" else PLACES[:3]):
        look_at(page, place)
        assert page.locator("h1").count() == 1 and page.evaluate("document.documentElement.lang") == "en", place
        assert page.evaluate(NAMELESS) == [], place
        accessible(page, place, only=None if scheme == "light" else "color-contrast")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(14, 18, 25)") is (scheme == "dark")


def look_at(page, place):
    """Opens a page at the width of a phone, then wide: nothing is wider, or out of its card, blank or unexplained."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(place)
    page.wait_for_load_state("networkidle")
    expect_phone_width(page)
    tables = "[...document.querySelectorAll('table.cards')].filter((t) => t.scrollWidth > t.parentElement.clientWidth)"
    assert page.evaluate(f"{tables}.length") == 0, place
    assert page.evaluate(OUTSIDE) == [], place
    page.set_viewport_size(WIDE)
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDE["width"], place
    assert until(lambda: page.evaluate(OUTSIDE) == [] == page.evaluate(BLANK)), place
    assert until(lambda: page.evaluate(UNEXPLAINED) == []), place
    assert page.evaluate("document.querySelector('noscript').textContent").startswith("<p"), place


def test_names_of_any_length_and_script_stay_in_their_cards(watched, odd_address, accessible):
    runs = httpx.get(f"{odd_address}/api/v1/runs", timeout=60).json()["runs"]
    run = next(each for each in runs if each["name"].startswith("rrr"))
    at = {each["name"]: f"checkpoints/{each['id']}" for each in run["checkpoints"]}
    newest = at["step_00000200"]
    [leaf] = httpx.get(f"{odd_address}/api/v1/{newest}/leaves", params={"q": "m" * 400}, timeout=60).json()["rows"]
    pair = f"a={at['step_00000100'].rpartition('/')[2]}&b={newest.rpartition('/')[2]}"
    own = [newest + rest for rest in ("", f"/leaves/{leaf['leaf']}", "/files", "/files/0", "/reshard", "/timing")]
    places = ["", "usage", f"runs/{run['id']}", f"runs/{run['id']}/trends", f"diff?{pair}", at["n" * 250], *own]
    page = watched(odd_address)
    for place in places:
        look_at(page, f"{odd_address}/{place}")
    accessible(page, "the last of them")


def test_a_name_that_its_cell_cuts_is_read_in_full_by_pointing_at_it(watched, serve, tmp_path):
    name = "validation/" + "m" * 60
    page = watched(serve(write_metrics(tmp_path / "run", {step: {"loss": 1 / step, name: 1.0} for step in (1, 2)})))
    short, long = (page.locator("thead th", has_text=text) for text in ("loss", "validation"))
    short.hover()
    long.hover()
    expect(long).to_have_attribute("title", name)
    assert short.get_attribute("title") is None


def test_sixty_checkpoints_fit_three_thousand_pixels_of_a_phone(watched, odd_address):
    page = watched(odd_address)
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_role("link", name="\U0001f525").first.click()
    expect(page.locator("tr[data-id]")).to_have_count(60)
    assert until(lambda: page.evaluate("document.documentElement.scrollHeight") <= 3000), "once its style is there"
    expect(page.locator("tr").get_by_role("link", name="step 6,000")).to_be_visible()


def test_a_button_takes_clicks_once_the_scripts_of_its_page_have_run(new_page, address):
    page, held = new_page(), []
    page.goto(address)
    page.route(re.compile(r"/static/foot\.js"), lambda route: held.append(route))
    page.get_by_role("link", name="Trends over steps").click(no_wait_after=True)
    button = page.get_by_role("button", name="by time")
    expect(button).to_have_css("pointer-events", "none")
    assert until(lambda: page.wait_for_timeout(10) or held), "its script is asked for"
    held.pop().continue_()
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    page.context.close()


def test_a_card_says_what_it_could_not_fetch_and_tries_again(new_page, address):
    page = new_page()
    page.route(re.compile(r"/treemap\?"), lambda route: route.fulfill(status=500, json={"error": "the disk is gone"}))
    page.goto(address)
    page.get_by_role("link", name="step 700").click()
    expect(page.locator("#treemap-text")).to_contain_text("could not be drawn: the disk is gone")
    page.unroute(re.compile(r"/treemap\?"))
    page.locator("#treemap-text").get_by_role("button", name="Try again").click()
    expect(page.locator("#treemap-text")).to_contain_text("areas")
    page.context.close()


def test_a_printed_page_has_its_content_in_light_colours_and_no_controls(watched, address):
    page = watched(address, color_scheme="dark")
    page.emulate_media(media="print")
    try:
        assert (
            page.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor") == "rgb(255, 255, 255)"
        )
        expect(page.locator("header.top")).to_be_hidden()
        expect(page.get_by_role("button")).to_have_count(0)
        cut = "[...document.querySelectorAll('.scroll')].map((e) => getComputedStyle(e).overflowX)"
        assert set(page.evaluate(cut)) == {"visible"}
        expect(page.get_by_role("link", name="step 700")).to_be_visible()
    finally:
        page.emulate_media(media="screen")


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
    # a browser that is told to run no scripts after its start does not show it
    assert "Scripts are off" in page.locator("noscript").text_content()
