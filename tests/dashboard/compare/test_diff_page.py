"""The page of the difference of two checkpoints: by index, by checksums, and element by element on demand."""

import numpy as np
import pytest

from tests.helpers.large import write_many
from tests.helpers.samples import write_checkpoint
from treeckpt_dashboard.compare.diff import MAX_READ

BIG = np.arange(5 * 65_536, dtype=np.float32)  # whole blocks of checksums, which no neighbour shares


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    run = tmp_path_factory.mktemp("two") / "run"
    changed = BIG.copy()
    changed[200_000] += 2
    before = {"big": BIG, "same": BIG[::-1].copy(), "small": np.zeros(4), "old": 1, "<b>": 1, "shape": np.zeros(3)}
    after = {"big": changed, "same": before["same"], "small": np.ones(4), "new": 1, "<b>": 2, "shape": np.zeros(5)}
    for step, tree in ((1, before), (2, after)):
        write_checkpoint(run / f"step_{step:08d}", tree, step=step, world=1, layouts=lambda path, array: None)
    return run


@pytest.fixture(scope="module")
def asked(two):
    from starlette.testclient import TestClient

    from treeckpt_dashboard.web.app import create_app

    client = TestClient(create_app([two]), base_url="http://127.0.0.1:8265")
    [run] = client.get("/api/v1/runs").json()["runs"]
    b, a = (c["id"] for c in run["checkpoints"])

    def ask(path="/api/v1/diff", **query):
        return client.get(path, params={"a": a, "b": b, **query})

    return ask


def told(answer):
    return {(row["path"], row["what"]): row["verdict"] for row in answer.json()["rows"]}


def test_structure_comes_first_then_contents_by_their_checksums(asked):
    answer = asked()
    assert told(answer) == {
        ("<b>", "value"): "", ("new", "added"): "", ("old", "removed"): "", ("shape", "shape"): "",
        ("big", "content"): "changed", ("small", "content"): "changed",
    }  # fmt: skip
    page = answer.json()
    assert page["counts"] == {"value": 1, "added": 1, "removed": 1, "shape": 1} and page["arrays"] == 3
    assert page["known"] == {"changed": 2, "equal": 1} and page["next"] is None


def test_what_differs_beside_the_leaves_is_named(serve, tmp_path):
    for step, note in ((1, "a"), (2, "b")):
        metadata = {"<b>note</b>": note} | {f"{n:03}": step for n in range(100)}
        write_checkpoint(tmp_path / f"step_{step:08d}", {"x": 1}, step=step, world=1, metadata=metadata)
    client = serve(tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    b, a = (c["id"] for c in run["checkpoints"])
    found = client.get("/api/v1/diff", params={"a": a, "b": b}).json()
    first = {"name": "custom metadata 000", "what": "changed", "before": "1", "after": "2"}
    assert (found["beside"][0], len(found["beside"]), found["beside_differ"], found["beside_more"]) == (
        first,
        100,
        101,
        2,
    )
    html = client.get("/diff", params={"a": a, "b": b}).text
    assert "101 of 102 differ" in html and "and 2 more, which" in html
    assert '<span class="what changed">changed</span></td><th scope="row">custom metadata 000</th>' in html
    same = client.get("/api/v1/diff", params={"a": a, "b": a}).json()
    assert same["beside_differ"] == 0 and {row["what"] for row in same["beside"]} == {"same"}
    assert "nothing differs" in client.get("/diff", params={"a": a, "b": a}).text


def test_rows_can_be_filtered_by_kind_and_by_words(asked):
    assert set(told(asked(show="structure"))) == {("<b>", "value"), ("new", "added"), ("old", "removed"),
                                                  ("shape", "shape")}  # fmt: skip
    assert told(asked(show="equal")) == {("same", "content"): "equal"}
    assert told(asked(q="BI")) == {("big", "content"): "changed"}
    assert told(asked(show="all", q="nothing")) == {}
    assert asked(show="strange").status_code == 422


def test_contents_are_measured_on_demand(asked):
    rows = {row["path"]: row for row in asked(show="content", read="true").json()["rows"]}
    assert {path: row["verdict"] for path, row in rows.items()} == {"big": "changed", "small": "changed"}
    assert (rows["big"]["delta"]["changed"], rows["big"]["delta"]["max_abs"]) == (1, 2.0)
    delta = asked("/api/v1/diff/values", pair=rows["big"]["pair"]).json()
    assert (delta["path"], delta["changed"], delta["elements"]) == ("big", 1, BIG.size)
    assert asked("/api/v1/diff/values", pair=99).status_code == 404
    assert "1</dd>" in asked("/diff", pair=rows["big"]["pair"]).text


def test_a_page_of_differences_goes_on_where_the_last_one_ended(tmp_path, serve):
    for step in (1, 2):
        write_checkpoint(tmp_path / f"step_{step:08d}", {f"k{n:03d}": step for n in range(130)}, step=step)
    client = serve(tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    b, a = (c["id"] for c in run["checkpoints"])
    first = client.get("/api/v1/diff", params={"a": a, "b": b}).json()
    rest = client.get("/api/v1/diff", params={"a": a, "b": b, "start": first["next"]}).json()
    assert (len(first["rows"]), len(rest["rows"]), rest["next"]) == (100, 30, None)


def test_one_side_alone_is_compared_with_the_step_before(asked, serve, two):
    client = serve(two)
    [run] = client.get("/api/v1/runs").json()["runs"]
    newest, oldest = (c["id"] for c in run["checkpoints"])
    assert "From step 1 to step 2" in client.get(f"/diff?b={newest}").text
    assert "Compare two checkpoints" in client.get(f"/diff?b={oldest}").text
    text = asked("/diff").text
    assert "&lt;b&gt;" in text and "<b>" not in text


def test_any_two_steps_are_compared_by_their_numbers_and_the_nearest_ones_are_named(serve, tmp_path):
    runs = [write_many(tmp_path / name, 300) for name in ("one", "two")]
    client = serve(*runs)
    one, two = client.get("/api/v1/runs").json()["runs"]
    for watch in client.app.state.library.watches.values():
        watch.refresh(wait=300)

    def typed(a, b, run=one):
        return client.get("/diff", params={"run_a": one["id"], "step_a": a, "run_b": run["id"], "step_b": b})

    for a, b in (("1,700", "29900"), ("step_00001700", "step 29_900")):
        found = typed(a, b)
        assert "From step 1,700 to step 29,900" in found.text and found.url.params.keys() == {"a", "b"}
    assert "From step 300 of one to step 400 of two" in typed("300", "400", two).text
    text = typed("1750", "x").text
    assert "one has no step 1,750 that can be compared. The nearest are" in text
    assert 'name="step_a" value="1700"' in text and 'name="step_a" value="1800"' in text
    assert "one has no checkpoint &#39;x&#39;. The newest are" in text and 'value="30000"' in text
    assert 'name="step_a" value="30000"' in typed("99999999", "100").text, "beyond the last there is one nearest step"
    assert typed("9" * 30, "100").status_code == 200 and typed("1", "1", {"id": "none"}).status_code == 404


def test_two_rows_that_are_ticked_are_compared_and_the_one_saved_first_is_before(serve, two):
    client = serve(two)
    [run] = client.get("/api/v1/runs").json()["runs"]
    newest, oldest = (c["id"] for c in run["checkpoints"])
    for pick in ([newest, oldest], [oldest, newest]):
        form = {"run_a": run["id"], "run_b": run["id"], "step_a": "", "step_b": "", "pick": pick}
        assert "From step 1 to step 2" in client.get("/diff", params=form).text
    alone = client.get("/diff", params={"run_a": run["id"], "run_b": run["id"], "pick": [oldest]}).text
    assert "Two checkpoints are compared, and 1 is ticked." in alone and 'name="step_b" value="1"' in alone
    text = client.get(f"/runs/{run['id']}?pick={oldest}&sort=oldest&q=000002").text
    assert f'<input type="hidden" form="ticks" name="pick" value="{oldest}">' in text, "it is filtered out"
    assert text.count(f"&amp;pick={oldest}") > 3, "the links to other orders and pages keep the ticks"


def test_the_tabs_of_the_checkpoint_stay_and_name_the_page(asked):
    text = asked("/diff").text
    tabs = text.partition('aria-label="Parts of the checkpoint"')[2].partition("</nav>")[0]
    assert ">Tree</a>" in tabs and 'aria-current="page">Diff</a>' in tabs and tabs.count("aria-current") == 1


def test_what_cannot_be_browsed_cannot_be_compared_and_damage_is_said(client, ids, tmp_path, serve):
    bad = client.get("/api/v1/diff", params={"a": ids["step_00000300"], "b": ids["step_00000700"]})
    assert bad.status_code == 404 and "partial" in bad.json()["error"]
    assert client.get("/diff?a=nothing&b=nothing").status_code == 404
    cut = client.get("/api/v1/diff", params={"a": ids["step_00000600"], "b": ids["step_00000200"], "show": "content"})
    assert "unreadable" in {row["verdict"] for row in cut.json()["rows"]}
    pair = next(row["pair"] for row in cut.json()["rows"] if row["verdict"] == "unreadable")
    page = client.get("/diff", params={"a": ids["step_00000600"], "b": ids["step_00000200"], "pair": pair})
    assert page.status_code == 200 and "cannot be compared" in page.text


def test_one_page_reads_no_more_than_its_cap(two, monkeypatch):
    from treeckpt_dashboard.compare import diff
    from treeckpt_dashboard.store.library import Library

    assert MAX_READ == 64 << 20
    library = Library([two])
    (b, _), (a, _) = library.checkpoints(library.runs[0])
    comparisons = diff.Comparisons(library)
    monkeypatch.setattr(diff, "MAX_READ", 4000)
    both = diff.open_pair(library.checkpoint(a), library.checkpoint(b))
    page = diff.diff_page(comparisons, both, show="content", q="", start=0, number=0, read=True)
    assert page.delta.compared == 500 and page.delta.elements == BIG.size
    assert {row.path: row.delta is not None for row in page.rows} == {"big": False, "small": True}
    first = comparisons.compare(*(library.checkpoint(i) for i in (a, b)))
    assert first is comparisons.compare(*(library.checkpoint(i) for i in (a, b)))
    assert len(first.a.store.readers) == 0
