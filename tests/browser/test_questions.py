"""What people ask of their runs is answered from the home page by at most three clicks, in five seconds, and right.

Each answer is compared with what the runs were written with. `-s` prints the clicks and seconds of each, from the
opening of the home page until the test has seen the answer. They are those of the clock on an idle machine, and those
of the processors on a busy one (`OwnTime`), which therefore fails none.
"""

import re
import time
from statistics import median

import numpy as np
import pytest

import treeckpt as tc
from tests.browser.helpers import OwnTime, at_the_end, copied
from tests.dashboard.helpers import under_way
from tests.helpers.dozen_runs import NAN_INDEX, NAN_LEAF, NAN_STEP, SLOW_SINCE, STEPS, write_dozen
from tests.helpers.killed_saves import leave_killed
from tests.helpers.large import write_many
from tests.helpers.samples import gpt_state, write_metrics
from treeckpt._cli.main import main
from treeckpt._core.columns import bytes_column
from treeckpt._core.text import bytes_text

expect = pytest.importorskip("playwright.sync_api").expect
CLICKS, SECONDS = 3, 5.0
"""The most clicks and seconds of an answer."""
HOSTILE = "<img src=x onerror=alert(1)>\u202e"
SAVES = 30
"""Checkpoints of the run that grows, one a minute."""


class Person:
    """Counts what a person does on a page: a click is one, a field that is typed into and sent is one."""

    def __init__(self, page):
        self.page, self.clicks = page, 0

    def click(self, *found, **how):
        """Clicks a locator, or what has a role and a name, once the scripts of the page have run."""
        self.page.wait_for_load_state("load")
        (found[0] if len(found) == 1 else self.page.get_by_role(found[0], name=found[1], **how).first).click()
        self.clicks += 1

    def type(self, field, text):
        field.fill(text)
        field.press("Enter")
        self.clicks += 1

    def go_to(self, text):
        """Types into what Ctrl-K opens, and opens the first that is found."""
        self.page.keyboard.press("Control+k")
        self.page.keyboard.type(text)
        found = self.page.get_by_role("dialog", name="Go to").get_by_role("option")
        expect(found.first).to_contain_text(text.split()[0])
        self.page.keyboard.press("Enter")
        self.clicks += 1

    def see(self, *texts, at):
        """The text of an element has each of these."""
        for text in texts:
            expect(at).to_contain_text(text)

    def copied(self, button):
        """The text that a button copies."""
        return copied(button, self.click)

    def row(self, name):
        """The row that is called so from its beginning on."""
        return self.page.get_by_role("row", name=re.compile(rf"^(Compare {name} )?{name}\b"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The dozen by name, runs that grow, are late or failed, a killed save; one run was verified by the command."""
    folder = tmp_path_factory.mktemp("questions")
    runs = write_dozen(folder)
    runs["growing"] = write_many(folder / "growing", SAVES, start_ns=time.time_ns() - SAVES * 60 * 10**9)
    runs["late"] = write_many(folder / "late", 6, start_ns=time.time_ns() - 26 * 60 * 10**9)
    runs["failing"] = write_metrics(folder / "failing", {1: {}})
    leave_killed(runs["failing"])
    with pytest.raises(tc.TreeError), tc.Manager(runs["failing"], background=False) as manager:
        manager.save("tuned", {HOSTILE: object()})
    under_way(runs["killed"] / "step_00000300", [(500, "write")], world=1, now=time.time_ns() - 10**12)
    main(["verify", str(runs["damaged"])])
    return runs


@pytest.fixture(scope="module")
def home(serve_module, runs):
    return serve_module(runs["healthy"].parent)


@pytest.fixture(scope="module")
def answered():
    """Clicks and seconds of each answer, which are printed at the end."""
    answered = {}
    yield answered
    print("\nclicks  seconds")
    for name, (clicks, seconds) in answered.items():
        print(f"{clicks:6}  {seconds:7.2f}  {name.removeprefix('test_').replace('_', ' ')}")
    print(f"median  {median(seconds for _, seconds in answered.values()):7.2f}")


@pytest.fixture
def person(watched, home, answered, request):
    """A person on the home page, whose answer takes as long as the test."""
    clock = OwnTime()
    person = Person(watched(home, permissions=["clipboard-read", "clipboard-write"]))
    yield person
    answered[request.node.name] = person.clicks, seconds = person.clicks, clock.seconds()
    assert 0 < person.clicks <= CLICKS
    assert seconds <= SECONDS


@pytest.mark.parametrize(
    ("name", "step", "passed_over"),
    [
        ("nan", NAN_STEP - 10, [f"step {step} loss is NaN" for step in STEPS if step >= NAN_STEP]),
        ("damaged", 40, ["step 60 damaged: shard-00000-of-00001", "differ from their checksum", "step 50 damaged: ",
                         "is missing"]),
        ("rolled_back", 45, ["steps 35 to 45", "resumed from step 30", "3 of them abandoned"]),
    ],
)  # fmt: skip
def test_from_which_step_can_a_run_be_resumed_and_what_was_passed_over(person, name, step, passed_over):
    person.click("link", name, exact=True)
    resume = person.page.get_by_role("region", name="Resume from")
    expect(resume.get_by_role("link", name=f"Newest good: {step}", exact=True)).to_be_visible()
    person.see(*passed_over, at=resume)
    if name == "nan":
        person.see(f"manager.restore(step={step})", at=resume)


def test_which_checkpoints_are_intact_and_which_are_damaged(person):
    person.click("link", "damaged", exact=True)
    found = {10: "intact", 20: "intact", 30: "partial", 40: "intact", 50: "damaged", 60: "damaged"}
    for step, state in found.items():
        person.see(state, at=person.row(f"step {step}"))
    person.see("3complete", "2damaged", "3 known to be intact; 1 partial", at=person.page.locator(".tile").first)


def test_a_verification_is_started_where_none_was_made(person):
    person.click("link", "healthy", exact=True)
    person.see("none known to be intact", at=person.page.locator(".tile").first)
    person.click("button", "Verify the newest good")
    expect(person.page.get_by_role("heading", name="Step 60")).to_be_visible()
    expect(person.page.locator(".head .intact")).to_have_text("intact")


@pytest.mark.parametrize(("name", "rank"), [("slow_rank", "rank 2"), ("slow_disk", "none")])
def test_which_rank_is_slow_in_a_save_and_that_none_is_blamed_for_a_slow_disk(person, name, rank):
    person.click("link", name, exact=True)
    person.click("link", "275 ms")
    expect(person.page.locator(".diagnosis")).to_contain_text(
        "As long as the last ones: 1 x the median of the 19 saves"
    )
    person.see(
        f"since step {SLOW_SINCE} (2025-06-15 15:47:40 UTC)",
        "80 % of it is fsync on rank 2 (host node1)" if name == "slow_rank" else "80 % of it is fsync on all 4 ranks",
        at=person.page.locator(".diagnosis"),
    )
    person.see(rank, at=person.page.locator(".tile", has_text="Slowest rank"))
    phases = person.page.get_by_role("region", name="Phases", exact=True)
    slowest = phases.get_by_role("row", name=re.compile("^fsync ")).get_by_role("cell").nth(3)
    expect(slowest).to_have_text("–" if name == "slow_disk" else "rank 2")


@pytest.mark.parametrize(("name", "ranks"), [("slow_rank", "on rank 2 (host node1)"), ("slow_disk", "on all 4 ranks")])
def test_since_when_saves_are_slow_and_why_and_on_which_ranks(person, name, ranks):
    person.click("link", name, exact=True)
    person.click("link", "Trends over steps")
    person.see(
        f"Since step {SLOW_SINCE} (2025-06-15 15:47:40 UTC)", "3.7 x the 40 saves before (75 ms)",
        "fsync changed the most, from 20 ms to 220 ms", ranks, at=person.page.locator(".diagnosis"),
    )  # fmt: skip
    stragglers = person.page.get_by_role("region", name="Hosts and ranks that were stragglers")
    person.see("rank 2" if name == "slow_rank" else "No rank stood out in any save.", at=stragglers)


def test_steps_are_seen_by_time(person):
    person.click("link", "slow_rank", exact=True)
    person.click("link", "Trends over steps")
    expect(person.page.locator("#phases-legend")).to_contain_text("fsync")  # the charts are drawn
    person.click("button", "by time")
    expect(person.page).to_have_url(re.compile("along=time"))
    chart = person.page.get_by_role("img", name=re.compile("^Duration by step"))
    at_the_end(chart, person.page.locator("#trends-text"), "step 60")
    person.see("2025-06-15 16:06:40 UTC", at=person.page.locator("#trends-text"))


def test_which_rows_of_a_leaf_lie_in_which_file_and_on_which_rank(person, runs):
    person.go_to("wte.weight mesh")
    person.type(person.page.get_by_role("textbox", name="Region"), "600:700")
    row = person.page.get_by_role("row").filter(has_text="[500:1000, 0:96]")
    person.see("rank 2", "2, 3", "shard-00002-of-00004", at=row)
    start, stop = map(int, re.search(r"(\d+):(\d+)", row.get_by_role("cell").nth(3).inner_text()).groups())
    [shard] = (runs["mesh"] / "step_00000200").glob("shard-00002-*")
    expected = gpt_state(seed=200)["model"]["wte.weight"][600:700]
    assert shard.read_bytes()[start:stop] == expected.tobytes()


def test_what_differs_between_two_steps(person):
    person.click("link", "healthy", exact=True)
    person.page.get_by_label("Compare step", exact=True).fill("20")
    person.type(person.page.get_by_label("with step"), "30")
    rows = person.page.get_by_role("region", name="Differences", exact=True).locator("tbody tr")
    expect(rows).to_have_count(7)
    person.see(
        "value", "int 20", "int 30", at=rows.filter(has=person.page.get_by_role("link", name="step", exact=True))
    )
    expect(rows.filter(has_text="content changed")).to_have_count(6)
    person.see("1differs", at=person.page.locator(".tile", has_text="Value"))
    metadata = person.page.get_by_role("region", name="Metadata that differs")
    person.see("metrics/loss", "0.05", "0.0333", "metrics/accuracy", "0.95", "0.9666", at=metadata)


def test_how_many_bytes_each_rank_loads_in_another_layout(person):
    person.click(person.row("mesh").get_by_role("link", name="200"))
    person.click("link", "Reshard")
    person.click("link", "FSDP over 8")
    arrays = [array for path, array in arrays_of(gpt_state(seed=200)) if not path.startswith("rng")]
    holds = sum(array.nbytes for array in arrays if not array.ndim)
    holds += sum(array[: -(-len(array) // 8)].nbytes for array in arrays if array.ndim)
    row = person.row("rank 0")
    person.see(bytes_text(holds), at=row.get_by_role("cell").nth(0))
    holds, reads = (row.get_by_role("cell").nth(n).inner_text() for n in (0, 1))
    assert float(reads.split()[0]) > float(holds.split()[0]), "whole checksummed blocks are read"
    expect(person.page.get_by_role("button", name="Copy the code")).to_have_count(8)


def arrays_of(tree, path=""):
    """The arrays of a tree of dicts, and their paths."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from arrays_of(value, f"{path}/{key}" if path else str(key))
    elif isinstance(array := getattr(tree, "bits", tree), np.ndarray):
        yield path, array


def test_in_which_step_and_leaf_and_where_the_first_nan_is(person):
    person.click("link", "nan", exact=True)
    person.click("button", "Find the first NaN")
    first = f"Step {NAN_STEP} is the first with NaN: none of the 3 steps before it has any."
    expect(person.page.get_by_text(first)).to_be_visible()
    row = person.page.get_by_role("region", name="First NaN: arrays").locator("tbody tr")
    expect(row).to_have_count(1)
    person.see(NAN_LEAF, str(list(NAN_INDEX)), at=row)


def test_how_much_disk_a_run_takes_in_a_week_under_a_policy(person, runs):
    person.click("link", "Usage")
    person.type(person.page.get_by_label("Policies to try"), "last:10")
    run = person.page.locator("details").filter(has_text="growing")
    each = sum(path.stat().st_size for path in (runs["growing"] / "step_00000100").iterdir())
    person.see(f"{bytes_text(10 * each)} in a week", at=run.locator("summary"))
    person.click(run.locator("summary"))
    kept, all_of_them, per_day = 10 * each, (SAVES + 7 * 24 * 60) * each, 24 * 60 * each
    size = bytes_column([kept, all_of_them])
    person.see("last:10", size(kept), "none", at=run.get_by_role("row").filter(has_text="as typed above"))
    rest = run.get_by_role("row").filter(has_text="Nothing deleted")
    person.see(bytes_text(per_day), at=rest)
    week = rest.get_by_role("cell").nth(0).inner_text().removesuffix(" MB")
    assert float(week) == pytest.approx(all_of_them / 1e6, rel=1e-3), "saves differ by a few bytes"


def test_which_run_is_best_by_its_loss(person):
    person.click("link", "The best is the lowest loss")
    first = person.page.get_by_role("row").nth(1)
    person.see("healthy", "0.016667 at 60", "best", at=first)
    person.see("rolled_back", "0.022222 at 45", at=person.page.get_by_role("row").nth(2))


def test_code_that_loads_rows_of_a_leaf_runs(person):
    person.go_to("wte.weight mesh")
    person.type(person.page.get_by_role("textbox", name="Region"), "100:200")
    code = person.copied(person.page.get_by_role("button", name="Copy load snippet"))
    array = executed(code)["array"]
    expected = gpt_state(seed=200)["model"]["wte.weight"][100:200]
    np.testing.assert_array_equal(array, expected)


def test_code_that_loads_what_a_rank_had_runs(person):
    person.click(person.row("mesh").get_by_role("link", name="200"))
    person.click("link", "Reshard")
    code = person.copied(person.row("rank 3").get_by_role("button", name="Copy the code"))
    tree = executed(code)["tree"]
    np.testing.assert_array_equal(tree["model"]["wte.weight"], gpt_state(seed=200)["model"]["wte.weight"][500:])


def test_code_that_loads_a_block_of_a_model_runs(person):
    person.click(person.row("mesh").get_by_role("link", name="200"))
    person.type(person.page.get_by_label("Search paths"), "model layers.2.")
    code = person.copied(person.page.get_by_role("button", name="Copy load snippet of all that is found"))
    model = {name: array for name, array in executed(code)["tree"]["model"].items() if array is not ...}
    expected = {n: array for n, array in gpt_state(seed=200)["model"].items() if n.startswith("layers.2.")}
    assert model.keys() == expected.keys() != set()
    for name, array in expected.items():
        np.testing.assert_array_equal(model[name], array)


def test_what_failed_in_the_last_week(person):
    person.click("link", "failing", exact=True)
    rows = person.page.get_by_role("region", name="Failed and killed saves, last week").locator("tbody tr")
    expect(rows).to_have_count(2)
    person.see("TreeError", "<img src=x onerror=alert(1)>\\u202e", at=rows.nth(0))
    person.see("The save was killed after 5 s", at=rows.nth(1))


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("healthy", r"Finished at .* UTC, after the save of step 60\."),
        ("growing", r"Alive: a save is in progress, usually every 60 s\."),
        ("late", r"Late by \d+ min \d+ s: the last save of step 600 was begun at .* UTC, usually every 60 s"),
    ],
)
def test_whether_a_run_is_finished_alive_or_late(person, runs, name, state):
    if name == "growing":
        under_way(runs[name] / "step_00003100", [(750, "write")], world=1)
    person.click("link", name, exact=True)
    said = person.page.get_by_role("region", name="Resume from").get_by_role("status")
    expect(said).to_have_text(re.compile(rf"^{state}"))


def executed(code):
    """The names that code leaves, after it ran as it is."""
    names = {}
    exec(compile(code, "copied", "exec"), names)
    return names


def test_the_link_of_a_view_opens_the_same_view(person, new_page):
    person.go_to("wte.weight mesh")
    person.click("button", "by file")
    expect(person.page.get_by_role("button", name="by file")).to_have_attribute("aria-pressed", "true")
    link = person.copied(person.page.get_by_role("button", name="Copy link"))
    other = new_page()
    other.goto(link)
    expect(other.get_by_role("heading", level=1)).to_have_text("wte.weight")
    expect(other.get_by_role("button", name="by file")).to_have_attribute("aria-pressed", "true")
    expect(other.locator("#map-legend")).to_contain_text("file 2")
    other.context.close()


def test_a_leaf_among_20000_is_found(person):
    person.go_to("layers.61.attention.qkv wide")
    expect(person.page.get_by_role("heading", level=1)).to_contain_text("layers.61.attention.qkv")


def test_a_save_under_way_is_shown_beside_a_killed_one(person, runs):
    person.click("link", "Live")
    expect(person.page.get_by_text("It hangs or was killed").first).to_be_visible()
    under_way(runs["killed"] / "step_00000400", [(750, "write")], world=1)
    saves = person.page.locator(".saving").filter(has=person.page.get_by_role("link", name="killed", exact=True))
    expect(saves).to_have_count(2)
    person.see("750 B", "of 1 kB", at=saves.first)
    expect(saves.first).not_to_contain_text("It hangs")
    person.see("It hangs or was killed", at=saves.last)


def test_in_which_row_of_a_table_an_id_is(person, runs):
    person.go_to("emb/ids")
    person.type(person.page.get_by_role("textbox", name="Id"), "7")
    found = person.page.get_by_role("region", name="Row of an id")
    person.see("Id 7 is in row 3 of 6", "10, 11, 12, 13", at=found)  # the values of its row of step 2
    start, stop = map(int, re.search(r"bytes (\d+):(\d+)", found.inner_text()).groups())
    [shard] = (runs["tables"] / "step_00000002").glob("*.safetensors")
    assert shard.read_bytes()[start:stop] == (7).to_bytes(8, "little")
