"""Paths through the pages, with the pointer, with keys alone, on a phone, and in a hostile checkpoint."""

import re

import numpy as np
import pytest

import treeckpt as tc
from tests.browser.helpers import copied, expect_colours
from tests.helpers.samples import write_checkpoint

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture
def page(watched, step_700):
    """The page of step 700."""
    return watched(step_700)


def test_from_the_runs_to_who_holds_a_region(watched, address):
    page = watched(address)
    expect(page.get_by_role("heading", name="gpt")).to_be_visible()
    page.get_by_role("link", name="step 700").click()
    expect(page.get_by_role("heading", name="Step 700")).to_be_visible()
    page.get_by_role("treeitem", name=re.compile("^model ")).click()
    page.get_by_role("treeitem", name=re.compile(r"^layers\.0\.\.5 ?×6 ")).click()
    page.get_by_role("treeitem", name=re.compile(r"^layers\.0 ")).click()
    page.get_by_role("link", name="mlp.proj.weight", exact=True).click()
    expect(page.get_by_role("heading", name="layers.0.mlp.proj.weight")).to_be_visible()
    expect(page.locator("#map-text")).to_contain_text("4 regions")
    expect_colours(page, "#map-canvas", 4)
    box = page.locator("#map-canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + box["height"] * 0.75)
    expect(page.locator("#map-text")).to_contain_text("[48:96, 192:384] written by rank 3")
    # the table says the same
    row = page.get_by_role("row").filter(has_text="[48:96, 192:384]")
    expect(row).to_contain_text("rank 3")
    row.get_by_role("link").click()
    expect(page.get_by_role("heading", name="Shard of rank 3")).to_be_visible()


def test_the_slow_rank_of_the_newest_save(page):
    page.get_by_role("link", name="Timing").click()
    expect(page.get_by_text("rank 2", exact=False).first).to_be_visible()
    expect(page.locator(".tile", has_text="Slowest rank")).to_contain_text("rank 2")
    expect(page.locator("#phase-legend")).to_contain_text("write")
    expect_colours(page, "#waterfall-canvas", 6)
    page.locator("#waterfall-canvas").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#waterfall-text")).to_contain_text("rank 0 · save")
    page.keyboard.press("End")
    expect(page.locator("#waterfall-text")).to_contain_text("rank 3 · gather")


def test_files_are_drawn_as_they_come_into_view(page):
    page.get_by_role("link", name="Files").click()
    expect(page.locator("#strip-legend")).to_contain_text("optimizer")
    # 300 is the width of a canvas that was not drawn; to wait for a script of ours would need eval, which is forbidden
    expect(page.locator("canvas.strip").first).not_to_have_js_property("width", 300)
    expect_colours(page, "canvas.strip >> nth=0", 3)


def test_the_tree_opens_and_walks_by_keys_alone(watched, address):
    page = watched(address)
    page.get_by_role("link", name="step 700").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("treeitem")).to_have_count(5)
    for _ in range(40):  # the tree is one stop of the tab key
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('role')") == "tree":
            break
    focused = page.locator("[role=treeitem][aria-selected=true]")
    expect(focused).to_contain_text("model")
    tree = page.get_by_role("tree")
    expect(tree).to_have_attribute("aria-activedescendant", focused.get_attribute("id"))
    page.keyboard.press("j")
    expect(focused).to_contain_text("optimizer")
    page.keyboard.press("k")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    expect(focused).to_have_attribute("aria-expanded", "true")
    expect(page.get_by_role("treeitem")).to_have_count(7)
    page.keyboard.press("ArrowRight")
    expect(focused).to_have_attribute("aria-level", "2")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(focused).to_have_attribute("aria-expanded", "false")
    page.keyboard.press("End")
    expect(focused).to_contain_text("rng")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("treeitem", name=re.compile("wte.weight"))).to_be_visible()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="wte.weight")).to_be_visible()


def test_search_is_in_the_address_and_comes_back(page):
    expect(page.get_by_role("treeitem")).to_have_count(5)
    page.keyboard.press("/")
    page.keyboard.type("layers.1 qkv")
    expect(page.get_by_role("treeitem")).to_have_count(2)
    expect(page).to_have_url(re.compile(r"\?q=layers\.1\+qkv"))
    page.reload()
    expect(page.get_by_role("treeitem")).to_have_count(2)
    expect(page.get_by_label("Search paths")).to_have_value("layers.1 qkv")
    page.get_by_label("Search paths").press("Escape")
    expect(page.get_by_role("treeitem")).to_have_count(5)
    page.get_by_label("Search paths").fill("nothing like it")
    expect(page.locator("#tree-state")).to_contain_text("No leaf fits")


def test_a_wide_node_has_only_the_rows_in_view(watched, serve, tmp_path):
    write_checkpoint(tmp_path / "step_00000001", {f"k{n:04d}": n for n in range(2500)}, step=1)
    page = watched(serve(tmp_path))
    page.get_by_role("link", name="step 1").click()
    rows = page.get_by_role("treeitem")
    expect(rows.first).to_contain_text("k0000")
    assert rows.count() < 60
    page.get_by_role("tree").focus()
    page.keyboard.press("End")
    expect(page.locator("[aria-selected=true]")).to_contain_text("k2499")
    assert rows.count() < 60 and rows.last.get_attribute("aria-posinset") == "2500"
    page.get_by_role("tree").evaluate("(tree) => { tree.scrollTop = 32 * 1200; }")
    expect(page.get_by_role("treeitem", name=re.compile("^k1203 "))).to_be_visible()


def test_what_is_open_is_in_the_address_and_comes_back(page):
    page.get_by_role("treeitem", name=re.compile("^model ")).click()
    page.get_by_role("treeitem", name=re.compile(r"^layers\.0\.\.5")).click()
    page.get_by_role("treeitem", name=re.compile(r"^layers\.4 ")).click()
    expect(page).to_have_url(re.compile("open=0_0-2_0-2-4$"))
    page.reload()
    expect(page.get_by_role("treeitem", name=re.compile(r"^attention\.qkv\.weight "))).to_be_visible()


def test_leaves_are_filtered_by_dtype_and_size(page):
    expect(page.get_by_label("Dtype").get_by_role("option")).to_have_count(4)
    page.get_by_label("Dtype").select_option("bfloat16")
    expect(page.get_by_role("treeitem")).to_have_count(1)
    page.get_by_label("Dtype").select_option("")
    page.get_by_label("Size", exact=True).select_option("1000000")
    expect(page.locator("#tree-state")).to_contain_text("No leaf fits")
    page.get_by_label("Size", exact=True).select_option("")
    expect(page.get_by_role("treeitem")).to_have_count(5)


def test_a_path_and_the_line_that_loads_it_are_copied(watched, step_700):
    page = watched(
        step_700, clock=True, permissions=["clipboard-read", "clipboard-write"]
    )  # "Copied" goes by its clock
    page.get_by_role("treeitem", name=re.compile("^model ")).click()
    page.locator("#picked").get_by_role("button", name="Copy path").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "model"
    page.get_by_role("link", name="wte.weight", exact=True).click()
    page.get_by_role("button", name="Copy load snippet").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert "select=['model/wte.weight'], fallback=tc.Fallback(per_rank='take'))" in page.evaluate(
        "navigator.clipboard.readText()"
    )


def test_code_of_a_block_of_a_region_and_of_a_rank_is_copied_and_runs_as_it_is(watched, step_700, run):
    """Each in three clicks from a page of the checkpoint; the arrays are those of a load of all."""
    page = watched(step_700, permissions=["clipboard-read", "clipboard-write"])
    codes = []

    page.get_by_role("treeitem", name=re.compile("^model ")).click()
    page.get_by_role("treeitem", name=re.compile(r"^layers\.0\.\.5 ?×6 ")).click()
    page.get_by_label("block", exact=True).fill("2")
    codes.append(copied(page.locator("#picked").get_by_role("button", name="Copy load snippet")))
    page.get_by_role("link", name="wte.weight", exact=True).click()
    expect(page.locator("#map-text")).to_contain_text("2 regions")
    box = page.locator("#map-canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.7)
    page.mouse.up()
    expect(page.get_by_role("button", name=re.compile(r"^Copy load snippet of [0-9]+:[0-9]+, "))).to_be_visible()
    dragged = page.get_by_label("Region", exact=True).input_value()
    page.get_by_role("button", name=f"Peek {dragged}").click()
    expect(page.locator("#peek-text")).to_contain_text(f"[{dragged}]")
    codes.append(copied(page.get_by_role("button", name=re.compile("^Copy load snippet of "))))
    page.get_by_role("link", name="Reshard").click()
    expect(page.locator(".tile", has_text="Ranks")).to_contain_text("4")
    codes.append(
        copied(page.get_by_role("row", name=re.compile("^rank 3 ")).get_by_role("button", name="Copy the code"))
    )
    whole = tc.load(run / "step_00000700", fallback=tc.Fallback(per_rank="take"))["model"]
    made = [{}, {}, {}]
    for code, names in zip(codes, made, strict=True):
        exec(code, names)
    block = {name: array for name, array in made[0]["tree"]["model"].items() if array is not ...}
    assert block and all(name.startswith("layers.2.") for name in block)
    assert all(np.array_equal(array, whole[name]) for name, array in block.items())
    rows, columns = (slice(*map(int, part.split(":"))) for part in dragged.split(", "))
    assert np.array_equal(made[1]["array"], whole["wte.weight"][rows, columns])
    own = made[2]["tree"]["model"]
    assert np.array_equal(own["wte.weight"], whole["wte.weight"][500:]) and own.keys() == whole.keys()


@pytest.mark.slow  # test_questions finds a row each time
def test_the_row_of_an_id_of_a_table(watched, serve, tmp_path):
    tc.save(tmp_path / "step_00000001", {"emb": tc.KeyedTable(np.array([7, -1]), {"w": np.ones((2, 3))})})
    page = watched(serve(tmp_path))
    page.get_by_role("link", name="step 1").click()
    page.get_by_label("Search paths").fill("emb/ids")
    page.get_by_role("treeitem").get_by_role("link").click()
    page.get_by_label("Id", exact=True).fill(f"{(1 << 64) - 1}")
    page.get_by_role("button", name="Find").click()
    expect(page.get_by_role("status").filter(has_text="is in row")).to_contain_text("is in row 1 of 2, bucket 65,535")
    expect(page.get_by_role("region", name="Slots of the row")).to_contain_text("1, 1, 1")
    page.get_by_label("Id", exact=True).fill("8")
    page.get_by_role("button", name="Find").click()
    expect(page.get_by_text("is not in the table")).to_be_visible()


@pytest.mark.slow  # test_questions asks for rows each time
def test_who_holds_rows_100_to_200_of_a_weight(page):
    expect(page.get_by_role("treeitem")).to_have_count(5)
    page.get_by_label("Search paths").fill("model/wte")
    page.get_by_role("treeitem").get_by_role("link").click()
    expect(page.locator("#map-text")).to_contain_text("2 regions")
    page.get_by_label("Region", exact=True).fill("100:200")
    page.get_by_label("Region", exact=True).press("Enter")
    rows = page.get_by_role("region", name="Chunks").locator("tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("rank 0")
    expect(rows).to_contain_text("0, 1")
    expect(page).to_have_url(re.compile(r"\?region=100%3A200$"))


def test_values_are_read_when_they_are_asked_for(page):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_role("treeitem", name=re.compile("^model ")).click()
    page.get_by_role("link", name="wte.weight", exact=True).click()
    expect(page.locator("#map-text")).to_contain_text("2 regions")
    assert not any("/leaves/" in url and "/peek" in url for url in asked)
    page.get_by_label("rows", exact=True).fill("3")
    page.get_by_label("columns", exact=True).fill("5")
    page.get_by_role("button", name="Peek").click()
    expect(page.locator("#peek-text")).to_contain_text("[0:3, 0:5] · 15 elements, 60 B")
    expect(page.locator("#peek-text")).to_contain_text("checksums match")
    expect(page.get_by_role("region", name="First values").locator("tbody tr")).to_have_count(3)
    expect(page.locator("#peek-numbers")).to_contain_text("NaN0")
    expect_colours(page, "#peek-chart canvas", 2)
    page.locator("#peek-chart").focus()
    page.keyboard.press("End")
    expect(page.locator("#peek-bin")).to_contain_text("1 value from")
    page.reload()
    expect(page.locator("#peek-text")).to_contain_text("[0:3, 0:5] · 15 elements")


def test_the_treemap_leads_to_what_is_large(page):
    expect(page.locator("#treemap-text")).to_contain_text("areas")
    expect_colours(page, "#treemap-canvas", 5)
    page.get_by_role("button", name="part", exact=True).click()
    expect(page).to_have_url(re.compile(r"map=part"))
    page.reload()
    expect(page.get_by_role("button", name="part", exact=True)).to_have_attribute("aria-pressed", "true")
    page.locator("summary", has_text="Areas as a table").click()
    expect(page.get_by_role("region", name="Areas")).to_contain_text("optimizer … exp_avg_sq")
    page.locator("#treemap-canvas").focus()
    page.keyboard.press("Home")
    expect(page.locator("#treemap-text")).to_contain_text("384 kB")
    page.keyboard.press("Enter")
    expect(page.locator("#map-text")).to_contain_text("regions")


def test_a_target_is_typed_and_previewed(page):
    page.get_by_role("link", name="Reshard").click()
    page.get_by_label("Mesh").fill("2x3")
    page.get_by_label("Names").fill("dp,tp")
    page.get_by_label("Placements").fill("*.bias: Replicate, Replicate\n*: Shard(0), Replicate")
    page.get_by_role("button", name="Preview").click()
    expect(page.locator(".tile", has_text="Ranks")).to_contain_text("6")
    rows = page.get_by_role("region", name="Ranks of the target").locator("tbody tr")
    expect(rows).to_have_count(6)
    expect(rows.nth(4)).to_contain_text("dp 1, tp 1")
    expect_colours(page, "#matrix-canvas", 4)
    page.locator("#matrix-canvas").focus()
    page.keyboard.press("Home")
    expect(page.locator("#matrix-text")).to_contain_text("rank 0 reads")
    page.reload()
    expect(rows).to_have_count(6)
    expect(page.get_by_label("Placements")).to_have_value("*.bias: Replicate, Replicate\n*: Shard(0), Replicate\n")
    page.get_by_label("Placements").fill("*: Nonsense")
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("status")).to_contain_text("Nonsense")
    page.get_by_role("link", name="one rank").click()
    expect(rows).to_have_count(1)


def test_one_click_tells_whether_a_checkpoint_is_intact_and_every_page_shows_it(watched, serve, tmp_path, accessible):
    path = tmp_path / "run" / "step_00000700"
    index = write_checkpoint(path, step=700)
    page = watched(serve(tmp_path / "run", cache=tmp_path / "cache"))
    page.get_by_role("link", name="step 700").click()
    expect(page.get_by_text("contents not verified")).to_be_visible()
    page.get_by_role("button", name="Verify").click()
    expect(page.get_by_text("Every checksum of all 4 shards matches")).to_be_visible()
    page.get_by_role("link", name="Files").click()
    expect(page.locator(".shard").get_by_text("intact", exact=True)).to_have_count(4)
    expect(page.locator("#balance-text")).to_contain_text("4 ranks")
    page.locator("#balance-chart").focus()
    page.keyboard.press("End")
    expect(page.locator("#balance-text")).to_contain_text("rank 3 wrote")
    shard = path / index.file_list[1].name
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    page.get_by_role("button", name="Verify again").click()
    expect(page.get_by_role("table")).to_contain_text("they differ from their checksum")
    accessible(page, "a damaged checkpoint")
    page.get_by_role("link", name="Files").click()
    name = page.locator(".shard").filter(has_text="damaged").locator("h3")
    assert name.bounding_box()["height"] < 60, "the message leaves room for the file's name"
    expect(page.locator(".shard").get_by_text("intact", exact=True)).to_have_count(3)
    expect(page.locator("#strip-legend")).to_contain_text("damaged")
    page.get_by_role("link", name="Tree", exact=True).click()
    harmed = page.get_by_role("treeitem").filter(has_text="damaged")
    expect(harmed.first).to_contain_text("6 damaged")
    harmed.first.click()
    expect(harmed).not_to_have_count(1)
    page.get_by_role("button", name="rank", exact=True).click()
    expect(page.locator("#treemap-legend")).to_contain_text("damaged leaf")
    page.get_by_role("link", name="All damage").click()
    page.get_by_role("region", name="What is damaged").get_by_role("link", name="model/").first.click()
    expect(page.get_by_text("This leaf is damaged.")).to_be_visible()
    expect(page.locator("#map-legend")).to_contain_text("damaged: bytes differ or are missing")
    expect(page.locator("#map-text")).to_contain_text("1 region is damaged")
    expect(page.get_by_role("region", name="Chunks").locator("tbody tr").filter(has_text="damaged")).to_have_count(1)
    accessible(page, "a damaged leaf")


def test_three_dimensions_have_axis_pickers(page):
    expect(page.get_by_role("treeitem")).to_have_count(5)
    page.get_by_label("Search paths").fill("model/mask")
    page.get_by_role("treeitem").get_by_role("link").click()
    expect(page.locator("#map-text")).to_contain_text("1 region")
    page.get_by_label("vertical").select_option("0")
    expect(page.locator("#map-text")).to_contain_text("2 regions · vertical: dim 0")
    page.get_by_label("dim 1 at").fill("3")
    expect(page.locator("#map-text")).to_contain_text("2 regions")
    page.get_by_role("button", name="by file").click()
    expect(page.locator("#map-legend")).to_contain_text("file 0")
    page.locator("#map-canvas").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#map-text")).to_contain_text("[0:2, 3, 0:6] written by rank 0, held by 2 ranks")


def test_bad_directories_say_what_they_are(watched, address):
    page = watched(address)
    for name in ("step 600", "step 500", "step 400", "step 300", "logs"):
        page.get_by_role("link", name=name).click()
        expect(page.get_by_role("heading", level=1)).to_contain_text(re.compile(name, re.IGNORECASE))
        expect(page.get_by_role("status").first).to_contain_text(re.compile("damaged|no index|no checkpoint"))
        page.go_back()


def test_hostile_names_and_values_stay_text(watched, serve, tmp_path):
    attack = "<img src=x onerror=document.title='owned'>"
    tree = {attack: np.zeros((4, 4), np.float32), "a\u202eb": attack, "c": {"\x00": 1}}
    write_checkpoint(tmp_path / f"step_{attack.replace('/', '')}", tree, step=1, metadata={attack: attack})
    page = watched(serve(tmp_path))
    page.get_by_role("link", name="step 1").click()
    expect(page.get_by_role("treeitem")).to_have_count(3)
    expect(page.get_by_role("tree")).to_contain_text("a\\u202eb")
    expect(page.get_by_role("tree")).to_contain_text(attack)
    page.get_by_role("link", name=attack, exact=True).click()
    expect(page.get_by_role("heading", name=attack)).to_be_visible()
    assert page.locator("main img").count() == 0 and "owned" not in page.title().replace(attack, "")
