"""The charts of timing: the slow rank is found, many ranks are zoomed into, steps are compared and followed."""

import re

import httpx
import pytest

import treeckpt as tc
from tests.browser.helpers import SCHEMES, at_the_end, expect_colours, expect_phone_width
from tests.helpers.dozen_runs import write_rolled_back
from tests.helpers.large import write_timed
from tests.helpers.samples import START_NS, write_checkpoint
from treeckpt._core.format.timings import BLOCKING, Host, Span, Timings, encode_timings, timings_name
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._report import report

expect = pytest.importorskip("playwright.sync_api").expect
WORLD = 400
SLOW = 287


@pytest.fixture(scope="module")
def timing(serve_module, tmp_path_factory):
    """The address of the timing of a background save of 400 ranks, of which one writes three times as long."""
    run = tmp_path_factory.mktemp("many") / "wide"
    index = write_checkpoint(run / "step_00000001", {"x": 1}, step=1, world=WORLD)
    spans = []
    for rank in range(WORLD):
        wrote = START_NS + (300 if rank == SLOW else 90 + rank % 7) * 10**6
        spans += [
            Span("save", rank, START_NS, START_NS + 4 * 10**8), Span("write", rank, START_NS, wrote, 64, 0),
            Span("gather", rank, wrote, START_NS + 4 * 10**8, 0, 0),
            Span(BLOCKING, rank, START_NS, START_NS + 5 * 10**7, 0, 0),
        ]  # fmt: skip
    hosts = tuple(Host(f"node{n}", encode_runs(range(8 * n, 8 * n + 8))) for n in range(WORLD // 8))
    timings = Timings(index.save_id, 1, WORLD, tuple(spans), None, hosts)
    (run / "step_00000001" / timings_name(index.save_id)).write_bytes(encode_timings(timings))
    address = serve_module(run)
    [found] = httpx.get(f"{address}/api/v1/runs", timeout=60).json()["runs"]
    return f"{address}/checkpoints/{found['checkpoints'][0]['id']}/timing"


@pytest.fixture
def wide(watched, timing):
    page = watched(timing)
    expect(page.locator("#waterfall-about")).to_contain_text("400 ranks")
    return page


def test_the_slow_rank_among_many_is_one_key_away(wide):
    expect(wide.locator(".tile", has_text="Training blocked")).to_contain_text("50 ms")
    wide.get_by_role("button", name="slowest first").click()
    wide.locator("#waterfall-canvas").focus()
    wide.keyboard.press("ArrowDown")
    expect(wide.locator("#waterfall-text")).to_contain_text(f"rank {SLOW} · active time 300 ms · straggler")
    wide.keyboard.press("Enter")  # into its spans
    expect(wide).to_have_url(re.compile(r"r=0-24.*order=slow|order=slow.*r=0-24"))
    wide.keyboard.press("ArrowRight")
    wide.keyboard.press("ArrowRight")
    expect(wide.locator("#waterfall-text")).to_contain_text(f"rank {SLOW} · write · 300 ms, from 0 ms on")
    # the table says the same, and leads there
    wide.get_by_role("region", name="Stragglers").get_by_role("link", name=f"rank {SLOW}").first.click()
    expect(wide).to_have_url(re.compile(r"[?&]r=279-295"))
    expect(wide.get_by_role("region", name="Ranks", exact=True)).to_contain_text(f"rank {SLOW} slowest")


def test_a_part_is_zoomed_into_by_dragging_and_its_address_leads_back(wide):
    box = wide.locator("#waterfall-canvas").bounding_box()
    wide.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 330)
    wide.mouse.down()
    wide.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 365, steps=4)
    wide.mouse.up()
    expect(wide.locator("#waterfall-about")).to_have_text("")
    expect(wide).to_have_url(re.compile(r"(?=.*t=[\d.]+-[\d.]+)(?=.*r=2\d\d-\d+)"))
    address = wide.url
    wide.goto(address)
    expect(wide.locator("#zoom-reset")).to_be_enabled()
    expect(wide).to_have_url(address)
    wide.locator("#zoom-reset").click()
    expect(wide.locator("#waterfall-about")).to_contain_text("400 ranks")
    expect(wide).not_to_have_url(re.compile("t="))


def test_the_heat_map_is_walked_by_keys_and_regrouped_by_host(wide):
    wide.get_by_role("link", name="by host").click()
    canvas = wide.locator("#heat-canvas")
    expect(wide.locator("#heat-low")).to_have_text("lost to the median rank: 0")
    expect(wide.locator("#heat-high")).to_have_text("207 ms")
    expect(wide.locator("#heat-legend")).to_have_text("waiting for other ranks")
    expect_colours(wide, "#heat-canvas", 5)
    canvas.focus()
    wide.keyboard.press("Home")
    for _ in range(SLOW // 8):
        wide.keyboard.press("ArrowDown")
    expect(wide.locator("#heat-text")).to_contain_text(
        f"node{SLOW // 8} · write · 300 ms, 207 ms lost to the median rank"
    )
    expect(wide.locator("#heat-text")).to_contain_text(f"at most: rank {SLOW}")
    box = canvas.bounding_box()
    wide.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 60)
    expect(wide.locator("#heat .tip")).to_contain_text("write")
    wide.get_by_role("button", name="duration", exact=True).click()
    expect(wide).to_have_url(re.compile("scale=duration"))
    expect(wide.locator("#heat-high")).to_have_text("300 ms")


def test_of_large_pictures_no_more_is_drawn_than_is_seen(wide):
    """4096 x 500 cells, and 16,384 ranks of 12 spans; how long it takes, `make bench-dashboard` measures."""
    lines, bands, cells = wide.evaluate(
        """async () => {
            const base = document.body.dataset.base + "static";
            const { matrixImage, pooled } = await import(`${base}/heat_grid.js`);
            const { bandsOf, edgesOf, orderOf } = await import(`${base}/waterfall_layout.js`);
            let cells = 0;
            const column = (c) => Array.from({ length: 4096 }, (_, r) => (r * 500 + c) % 97);
            const columns = Array.from({ length: 500 }, (_, c) => column(c));
            const sheet = matrixImage(pooled(columns, 460), (n) => { cells += 1; return n / 97; });
            const ranks = Array.from({ length: 16384 }, (_, n) => n), n = ranks.length * 12;
            const data = {
                ranks, counts: ranks.map(() => 12), busy: ranks.map((r) => r % 97), lane: new Array(n).fill(1),
                start: Array.from({ length: n }, (_, s) => (s % 12) * 100), length: new Array(n).fill(90),
            };
            const view = { t0: 0, t1: 1200, r0: 0, r1: 16384 };
            const { bands } = bandsOf(data, edgesOf(data), orderOf(data, "slow"), view);
            return [sheet.height, bands.length, cells];
        }"""
    )
    assert (lines, bands, cells) == (460, 460, 460 * 500)


def test_a_step_of_the_trends_leads_to_its_waterfall(page):
    page.get_by_role("link", name="Trends over steps").click()
    expect(page.get_by_role("heading", name="Trends of gpt")).to_be_visible()
    chart = page.get_by_role("img", name=re.compile("^Duration by step"))
    over = chart.locator(".u-over")
    expect(over).to_be_visible()
    chart.focus()
    page.keyboard.press("Home")
    expect(page.locator("#trends-text")).to_contain_text("step 100 ·")
    page.keyboard.press("End")
    expect(page.locator("#trends-text")).to_contain_text("step 700 ·")
    box = over.bounding_box()
    over.click(position={"x": box["width"] - 3, "y": box["height"] / 2})
    expect(page.get_by_role("heading", name="Step 700")).to_be_visible()
    expect(page.locator("#phase-legend")).to_contain_text("write")
    page.go_back()
    expect(page.locator(".u-over")).to_have_count(5)
    page.get_by_role("img", name=re.compile("^Rate")).focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Step 100")).to_be_visible()


SAVES = 60


@pytest.fixture(scope="module")
def trending(serve_module, tmp_path_factory):
    """The address of a run of 60 saves of 16 ranks: rank 11 is slow in fsync in each third save and in the last two."""

    def spans_of(n):
        for rank in range(16):
            slow = rank == 11 and (n % 3 == 0 or n > 58)
            fsync = (800 if n == SAVES else 90) if slow else 10 + rank % 3
            for name, start, stop in (("write", 0, 40), ("fsync", 40, 40 + fsync)):
                yield Span(name, rank, START_NS + start * 10**6, START_NS + stop * 10**6, 64)

    return serve_module(write_timed(tmp_path_factory.mktemp("trending") / "run", SAVES, spans_of))


def test_why_a_save_was_slow_which_rank_which_phase_and_whether_it_is_a_trend_takes_two_clicks(watched, trending):
    page = watched(trending)
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="step 60", exact=True))
    row.get_by_role("link", name="840 ms").click()  # the first: why, which rank, which phase
    told = page.locator(".diagnosis")
    expect(told).to_contain_text("16 x the median of the 59 saves before it")
    expect(told).to_contain_text("95 % of it is fsync on rank 11 (host node1)")
    expect(told).to_contain_text("It happens at times: rank 11 (host node1) stood out in 7 of the 20 saves before.")
    told.get_by_role("link", name="Trends of the run").click()  # the second: what it looked like before
    expect(page.locator(".diagnosis")).to_contain_text("Rank 11 (host node1) stood out in 8 of the last 20.")
    region = page.get_by_role("region", name="Hosts and ranks that were stragglers")
    slow = region.get_by_role("row").filter(has_text="rank 11")
    expect(slow).to_contain_text("fsync")
    expect(slow.get_by_role("link", name="step 60")).to_be_visible()
    expect(page.locator("#bins-about")).to_have_text("60 saves")
    expect_colours(page, "#ranks-canvas", 5)


@pytest.fixture
def trends(watched, trending):
    page = watched(trending)
    page.get_by_role("link", name="Trends over steps").click()
    expect(page.locator("#bins-about")).to_have_text("60 saves")
    expect(page.locator("#phases-legend")).to_contain_text("fsync")
    return page


def test_phases_and_ranks_of_all_saves_are_walked_by_keys_and_lead_to_a_save(trends):
    trends.get_by_role("button", name="logarithmic").click()  # phases apart, not one on the other
    expect(trends).to_have_url(re.compile("axis=log"))
    shown = "step 60: 840 ms · fsync 800 ms · write 40 ms"
    at_the_end(trends.locator("#phases-chart"), trends.locator("#phases-text"), shown)
    trends.locator("#ranks-canvas").focus()
    for key in ("Home", "ArrowRight", "ArrowRight", *["ArrowDown"] * 11):
        trends.keyboard.press(key)
    expect(trends.locator("#ranks-text")).to_have_text("step 3 · rank 11 · 130 ms, 79 ms lost to the median rank")
    trends.get_by_role("button", name="duration", exact=True).click()
    expect(trends.locator("#heat-high")).to_have_text("840 ms")
    expect(trends).to_have_url(re.compile("work=duration"))
    trends.locator("#ranks-canvas").focus()
    trends.keyboard.press("Enter")
    expect(trends.get_by_role("heading", name="Step 3", exact=True)).to_be_visible()


def test_a_range_of_steps_is_dragged_and_its_address_leads_back(trends):
    over = trends.locator("#phases-chart .u-over")
    box = over.bounding_box()
    trends.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
    trends.mouse.down()
    trends.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 60, steps=4)
    trends.mouse.up()
    expect(trends).to_have_url(re.compile(r"low=\d+.*high=\d+"))
    shown = trends.locator("#bins-about")
    expect(shown).to_have_text(re.compile(r"^1[67] saves$"))
    text = shown.inner_text()
    table = trends.get_by_role("region", name="Steps", exact=True).locator("tbody tr")
    expect(table).to_have_count(int(text.split()[0]))  # the tables follow
    expect(trends.locator("#durations thead")).to_contain_text(text)
    trends.goto(trends.url)
    expect(trends.locator("#bins-about")).to_have_text(text)
    trends.get_by_role("button", name="all steps").click()
    expect(trends.locator("#bins-about")).to_have_text("60 saves")
    trends.get_by_role("button", name="last 20").click()
    expect(trends.locator("#bins-about")).to_have_text("20 saves")
    trends.locator("#phases-chart .u-over").dblclick(position={"x": 300, "y": 3})
    expect(trends).not_to_have_url(re.compile("low="))


def test_two_steps_are_compared(page):
    page.get_by_role("link", name="step 200").click()
    page.get_by_role("link", name="Diff", exact=True).click()
    expect(page.get_by_role("heading", name="From step 100 to step 200")).to_be_visible()
    row = page.get_by_role("row").filter(has_text="scheduler/last_epoch")
    expect(row).to_contain_text("int 100")
    expect(row).to_contain_text("int 200")
    page.get_by_label("Search paths").fill("wte")
    page.get_by_role("button", name="Search").click()
    page.get_by_role("link", name="Compare the numbers of model/wte.weight").click()
    expect(page.locator(".delta")).to_contain_text("2,048of 2,048")
    page.get_by_role("link", name="close").click()
    page.get_by_role("link", name="Read what the checksums cannot tell").click()
    expect(page.get_by_role("row").filter(has_text="model/wte.weight")).to_contain_text("2,048 of 2,048 differ")
    page.get_by_role("group", name="To").get_by_label("Step").fill("700")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("heading", name="From step 100 to step 700")).to_be_visible()
    expect(page.locator(".tile", has_text="Shape")).to_be_visible()
    page.get_by_role("link", name="structure").click()
    expect(page.get_by_role("row").filter(has_text="added").first).to_be_visible()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pages_of_time_fit_a_phone_and_follow_the_scheme(watched, address, scheme):
    page = watched(address, color_scheme=scheme)
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_role("link", name="Trends over steps").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Trends")
    page.wait_for_load_state("networkidle")
    expect_phone_width(page)
    page.get_by_role("link", name="changes").last.click()
    expect(page.get_by_role("heading", name="From step 200 to step 700")).to_be_visible()
    expect_phone_width(page)


def test_a_report_opens_from_a_file_and_its_tree_is_searched(chromium, run, tmp_path):
    report(run, tmp_path / "report.html")
    context, troubles = chromium.new_context(), []
    page = context.new_page()
    page.on("console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda r: troubles.append(r.url) if not r.url.startswith("file:") else None)
    page.goto((tmp_path / "report.html").as_uri())
    page.get_by_label("Search paths").fill("layers.1 qkv.weight")
    leaves = page.locator("#tree .leaf:visible")
    expect(leaves).to_have_count(1)
    expect(leaves).to_contain_text("layers.1.attention.qkv.weight")
    context.close()
    assert troubles == []


def test_trends_by_time_have_the_abandoned_branch_apart_and_mark_what_is_no_number(watched, serve, tmp_path):
    loss = {step: 1 / step for step in range(2, 11)} | {11: float("nan")}
    run = write_rolled_back(tmp_path / "run", range(2, 12, 2), 6, range(7, 12, 2), loss.__getitem__)
    page = watched(serve(run))
    page.get_by_role("link", name="Trends over steps").click()
    expect(page.get_by_text("2 of them on abandoned branches")).to_be_visible()
    expect(page.locator("#phases-legend")).to_contain_text("publish")  # the script has drawn, and listens
    page.get_by_role("button", name="by time").click()
    expect(page).to_have_url(re.compile("along=time"))
    chart, told = page.get_by_role("img", name=re.compile("^loss")), page.locator("#trends-text")
    chart.focus()
    page.keyboard.press("Home")
    expect(told).to_contain_text(re.compile("step 2 · .* UTC · .* · loss 0.5"))
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(told).to_contain_text("step 8 · abandoned branch")
    page.keyboard.press("End")
    expect(told).to_contain_text("loss NaN")
    page.get_by_role("button", name="by step").click()
    expect(page).not_to_have_url(re.compile("along=time"))
    expect(told).to_contain_text("loss NaN")  # the cursor stays on its save
    expect_colours(page, "[data-metric] canvas", 4)


def test_trends_take_in_a_save_that_is_made_while_they_are_open(watched, serve, tmp_path):
    with tc.Manager(tmp_path / "run", keep=None, background=False) as manager:
        page = watched(serve(tmp_path / "run"))
        page.get_by_role("link", name="Trends over steps").click()
        expect(page.get_by_text("There is no complete checkpoint with a step yet.")).to_be_visible()
        manager.save(1, {"x": 1}, metrics={"loss": 1.0})
        expect(page.locator("#bins-about")).to_have_text("1 save")
        expect(page.get_by_role("img", name=re.compile("^loss"))).to_be_visible()
        page.evaluate("window.kept = true")
        at_the_end(page.get_by_role("img", name=re.compile("^loss")), page.locator("#trends-text"), "step 1")
        manager.save(2, {"x": 2}, metrics={"loss": 0.5})
        expect(page.locator("#bins-about")).to_have_text("2 saves")
        expect(page.get_by_role("region", name="Steps", exact=True).get_by_role("link", name="step 2")).to_be_visible()
        expect(page.locator("#trends-text")).to_contain_text("step 1")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#trends-text")).to_contain_text("step 2")
        assert page.evaluate("window.kept"), "nothing was loaded again but what has changed"
    as_of = page.locator("[data-as-of]")
    expect(as_of).to_have_text(re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$"))
    before = as_of.inner_text()
    expect(as_of).not_to_have_text(before)


def test_a_phase_has_one_colour_and_marks_of_an_axis_have_the_digits_that_tell_them_apart(trends):
    paints, others, texts = trends.evaluate(
        """async () => {
            const base = document.body.dataset.base + "static";
            const { paintOf } = await import(`${base}/phases.js`);
            const { bytesText, secondsText } = await import(`${base}/dom.js`);
            const known = ["fsync", "hash", "write", "plan", "flatten", "publish", "stage", "write files", "late call"];
            const texts = [
                bytesText(12.5, 3), bytesText(12.5), bytesText(7500, 4), secondsText(0.0075, 3),
                secondsText(100.5), secondsText(112.5, 5), secondsText(7260),
            ];
            return [known.map((name) => paintOf(name, false)), [paintOf("x", false), paintOf("x", true)], texts];
        }"""
    )
    assert len(set(paints)) == len(paints) and others[0] not in paints and others[1] < 0
    assert texts == ["12.5 B", "13 B", "7.5 kB", "7.5 ms", "1 min 41 s", "1 min 52.5 s", "2 h 1 min"]
