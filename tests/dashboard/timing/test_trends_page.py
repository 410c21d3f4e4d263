"""The page of trends over the steps of a run."""

import pytest

import treeckpt as tc
from tests.dashboard.helpers import page
from tests.helpers.dozen_runs import write_rolled_back
from tests.helpers.large import spans_of_ranks, write_timed
from tests.helpers.samples import START_NS, write_run
from treeckpt._core.format.timings import Span


def test_trends_are_the_complete_checkpoints_by_step(client, serve, tmp_path, run):
    [found] = client.get("/api/v1/runs").json()["runs"]
    page = client.get(f"/api/v1/runs/{found['id']}/trends").json()
    assert page["step"] == [100, 200, 700] and page["world"] == [4, 4, 4]
    newest = found["checkpoints"][0]
    assert page["ids"][-1] == newest["id"] and page["seconds"][-1] == page["blocked"][-1] == newest["seconds"]
    assert 1.2 < page["dedupe"][-1] < 2.5  # tp holds most of the state twice
    assert page["branch"] == [0, 0, 0] and page["created"] == sorted(page["created"])
    text = client.get(f"/runs/{found['id']}/trends").text
    assert f"diff?a={page['ids'][1]}&amp;b={page['ids'][2]}" in text
    empty = serve(tmp_path)
    [none] = empty.get("/api/v1/runs").json()["runs"]
    assert "no complete checkpoint" in empty.get(f"/runs/{none['id']}/trends").text
    assert client.get("/api/v1/runs/nothing/trends").status_code == 404


def test_trends_are_listed_100_at_a_time(serve, tmp_path):
    write_run(tmp_path, steps=tuple(range(1, 104)), tree={"x": 1}, world=1)
    client = serve(tmp_path)
    run = page(client).json()["run"]
    assert client.get(f"/api/v1/runs/{run['id']}/trends").json()["next"] == 100
    assert client.get(f"/runs/{run['id']}/trends?start=100").text.count("changes</a>") == 3


PHASES = {"plan": 10, "write": 40, "fsync": 20}


def spans_of(times, slow=(), phase="write"):
    """Returns the spans of 8 ranks: milliseconds of each phase, eight times as long in one phase on the slow ranks."""
    for rank in range(8):
        at = START_NS
        for name, milliseconds in times.items():
            end = at + (milliseconds + rank % 3) * 10**6 * (8 if rank in slow and name == phase else 1)
            yield Span(name, rank, at, end)
            at = end


@pytest.fixture
def trends(serve, tmp_path):
    """Answers of a dashboard over saves whose spans a function returns, four ranks on each host."""

    def make(count, spans):
        client = serve(write_timed(tmp_path / "run", count, spans, per_host=4))
        [run] = client.get("/api/v1/runs").json()["runs"]
        client.app.state.library.watches[run["id"]].refresh(wait=300)

        def ask(rest="", page=False, **params):
            at = f"/runs/{run['id']}/trends{rest}" if not rest.startswith("/checkpoints") else rest
            answer = client.get(at if page else f"/api/v1{at}", params=params)
            assert answer.status_code == 200, answer.text
            return answer.text if page else answer.json()

        return ask

    return make


def test_the_phases_of_each_save_are_stacked_to_its_duration(trends):
    ask = trends(30, lambda n: spans_of(PHASES | {"fsync": 20 + n}))
    bins = ask("/bins")
    assert bins["step"] == list(range(1, 31)) and set(bins["phases"]) == set(PHASES)
    heights = [sum(column) for column in zip(*bins["stack"], strict=True)]
    assert heights == pytest.approx(bins["seconds"], rel=0.02)
    fsync = bins["stack"][bins["phases"].index("fsync")]
    assert fsync == sorted(fsync) and fsync[-1] - fsync[0] == pytest.approx(0.029)
    page = ask()
    assert page["phase"][0] == "write" and page["phase"][-1] == "fsync" and page["timed"] == 30


def test_a_range_of_steps_is_shown_alone(trends):
    ask = trends(12, lambda n: spans_of(PHASES))
    assert ask("/bins", low=4, high=6)["step"] == [4, 5, 6]
    assert ask("/bins", low=13)["saves"] == 0 and ask("/bins", low=13)["ids"] == []
    assert ask("/bins", high=2)["counts"] == [1, 1]


def test_a_slow_rank_stays_visible_in_a_bin_of_many_saves(trends, monkeypatch):
    monkeypatch.setattr("treeckpt_dashboard.timing.trends.BINS", 4)
    ask = trends(20, lambda n: spans_of(PHASES, slow=[5] * (n == 13)))
    bins = ask("/bins")
    assert (bins["counts"], bins["first"], bins["last"]) == ([5] * 4, [1, 6, 11, 16], [5, 10, 15, 20])
    assert bins["step"][2] == 13 and bins["ids"][2] == ask()["ids"][12]
    assert bins["longest"][2] > 2 * bins["longest"][0]
    lost = [[n * bins["unit"] for n in column] for column in bins["lost"]]
    assert max(range(8), key=lambda rank: lost[2][rank]) == 5 and lost[2][5] == pytest.approx(7 * 0.042, rel=0.02)
    assert bins["work"][2][5] * bins["unit"] == pytest.approx(0.012 + 8 * 0.042 + 0.022, rel=0.01)
    assert bins["most_lost"] == max(bins["lost"][2]) and max(lost[1]) < 0.01 < lost[2][5] / 10


def test_saves_of_other_numbers_of_ranks_share_a_heat_map(trends):
    bins = trends(3, lambda n: spans_of_ranks([2, 300, 8][n - 1], phases=["write"]))("/bins")
    assert bins["world"] == 300 and bins["block"] == 2 and [len(column) for column in bins["work"]] == [150] * 3
    assert bins["work"][0][0] > 0 and set(bins["work"][0][1:]) == {-1}


def test_hosts_are_listed_with_their_ranks_that_were_slow_again_and_again(trends):
    ask = trends(30, lambda n: spans_of(PHASES, slow=[5] if n % 2 else [2] * (n == 10), phase="fsync"))
    first, second = ask()["hosts"]
    assert (first["host"], first["saves"], first["recent"], first["of"]) == ("node1", 15, 10, 20)
    [rank] = first["ranks"]
    assert (rank["rank"], rank["saves"], rank["worst"], rank["phase"], rank["step"]) == (5, 15, 15, "fsync", 29)
    assert rank["times"] == pytest.approx(8, rel=0.1)
    assert (second["host"], second["saves"], second["recent"]) == ("node0", 1, 0)
    assert ask()["slow"][:4] == [5, None, 5, None]


def test_a_sentence_says_since_when_saves_take_longer_in_which_phase_and_on_which_ranks(trends):
    ask = trends(60, lambda n: spans_of(PHASES | {"fsync": 220 if n > 40 else 20}, slow=[5] * (n > 58)))
    text = ask()["text"]
    assert text.startswith("Since step 41 (2025-06-15 ") and " UTC) saves take 276 ms in the median, " in text
    assert "3.6 x the 40 saves before (76 ms)." in text
    assert "Of the phases, fsync changed the most, from 22 ms to 222 ms, on all 8 ranks." in text
    assert text.endswith("Rank 5 (host node1) stood out in 2 of the last 20.")


def test_a_change_on_one_rank_names_it_and_its_host(trends):
    ask = trends(60, lambda n: spans_of(PHASES, slow=[5] * (n > 51), phase="fsync"))
    text = ask()["text"]
    assert text.startswith("Since step 52 ") and "fsync changed the most" in text
    assert ", on rank 5 (host node1). Rank 5 (host node1) stood out in 9 of the last 20." in text


def test_saves_that_take_as_long_as_ever_are_said_to(trends):
    assert trends(12, lambda n: spans_of(PHASES))()["text"] == "All 12 saves took about as long, 76 ms in the median."


def test_a_save_after_a_change_is_told_beside_those_since_then_and_those_before(trends):
    ask = trends(60, lambda n: spans_of(PHASES | {"fsync": 220 if n > 40 else 20}))
    ids = ask()["ids"]
    told = ask(f"/checkpoints/{ids[59]}/timing")["diagnosis"]
    assert told.startswith(
        "As long as the last ones: 1 x the median of the 19 saves before it, 276 ms; since step 41 (2025-"
    )
    assert "UTC) saves take longer, 3.6 x the 76 ms before; " in told
    assert told.endswith("of it is fsync on all 8 ranks alike, 220 ms to 222 ms.")
    told = ask(f"/checkpoints/{ids[40]}/timing")["diagnosis"]
    assert told.startswith("3.6 x the median of the 40 saves before it, 76 ms; ")


def test_the_saves_of_abandoned_branches_are_apart(serve, tmp_path):
    client = serve(write_rolled_back(tmp_path / "run", range(2, 22, 2), 10, range(11, 22, 2)))
    [run] = client.get("/api/v1/runs").json()["runs"]
    page = client.get(f"/api/v1/runs/{run['id']}/trends").json()
    assert page["step"] == [*range(2, 22, 2), *range(11, 22, 2)] and page["present"] == page["timed"] == 11
    assert page["branch"] == [0] * 5 + [1] * 5 + [0] * 6 and page["created"] == sorted(page["created"])
    bins = client.get(f"/api/v1/runs/{run['id']}/trends/bins").json()
    assert sorted(bins["step"]) == bins["step"] == [2, 4, 6, 8, 10, *range(11, 22, 2)]
    assert "5 of them on abandoned branches" in client.get(f"/runs/{run['id']}/trends").text


def test_bins_hold_as_many_saves_but_for_one(trends, monkeypatch):
    monkeypatch.setattr("treeckpt_dashboard.timing.trends.BINS", 4)
    assert sorted(trends(21, lambda n: spans_of(PHASES))("/bins")["counts"]) == [5, 5, 5, 6]


def test_the_timing_of_a_save_says_whether_it_is_a_trend(trends):
    ask = trends(40, lambda n: spans_of(PHASES, slow=[5] if 10 < n < 36 else [1] if n == 38 else []))
    ids = ask()["ids"]
    texts = {n: ask(f"/checkpoints/{ids[n - 1]}/timing")["trend"] for n in (2, 11, 13, 35, 38)}
    assert texts[2] == ""
    assert texts[11] == "Not a trend: rank 5 (host node1) stood out in 0 of the 10 saves before."
    assert texts[13] == "It happens at times: rank 5 (host node1) stood out in 2 of the 12 saves before."
    assert texts[35] == "A trend: rank 5 (host node1) stood out in 20 of the 20 saves before."
    assert texts[38] == "Not a trend: rank 1 (host node0) stood out in 0 of the 20 saves before."


def test_a_phase_that_was_slow_on_all_ranks_is_a_trend_if_it_was_before(trends):
    ask = trends(30, lambda n: spans_of(PHASES | {"fsync": 500 if n in (8, 20, 24, 29, 30) else 20}))
    ids = ask()["ids"]
    texts = {n: ask(f"/checkpoints/{ids[n - 1]}/timing")["trend"] for n in (7, 8, 30)}
    assert texts[7] == ""
    assert texts[8] == "Not a trend: fsync took about as long in 0 of the 7 saves before."
    assert texts[30] == "It happens at times: fsync took about as long in 3 of the 20 saves before."


def test_hostile_names_of_phases_and_hosts_are_escaped(trends):
    hostile = "<b>write\u202e"
    ask = trends(5, lambda n: spans_of({"plan": 10, hostile: 40}, slow=[5], phase=hostile))
    text = ask(page=True)
    assert "&lt;b&gt;write\\u202e" in text and "<b>write" not in text and "\u202e" not in text
    assert "<b>write\\u202e" in ask("/bins")["phases"] and "<b>write\\u202e" in ask()["phase"]


def test_saves_that_take_longer_again_and_again_are_not_called_as_long_as_the_others(trends):
    text = trends(60, lambda n: spans_of(PHASES, slow=[5] * (n % 3 == 0), phase="fsync"))()["text"]
    assert text.startswith(
        "40 of 60 saves took about as long, 76 ms in the median. 20 others took longer, the first of"
    )
    assert "them step 3 (2025-06-15 15:09:40 UTC): 230 ms in the median, 3 x as long. Of the phases, fsync" in text
    assert "changed the most, from 22 ms to 176 ms, on rank 5 (host node1). Rank 5" in text
    told = trends(60, lambda n: spans_of(PHASES, slow=[5] * (n == 17), phase="fsync"))()["text"]
    assert told.startswith("59 of 60 saves took about as long, 76 ms in the median. Step 17 (2025-06-15 15:23:40 UTC) ")
    assert " alone took 230 ms, 3 x as long. Of the phases, fsync changed the most" in told


def test_a_change_on_all_ranks_of_a_host_names_the_host(trends):
    text = trends(40, lambda n: spans_of(PHASES, slow=range(4, 8) if n > 20 else [], phase="fsync"))()["text"]
    assert text.startswith("Since step 21 ") and text.endswith(", on all 4 ranks of host node1.")


def test_time_that_is_noise_is_pale_on_the_scale_of_lost_time(trends):
    bins = trends(6, lambda n: spans_of(PHASES))("/bins")
    assert bins["most_lost"] * bins["unit"] == pytest.approx(0.01, rel=0.01)  # no rank lost more than 3 ms
    slow = trends(6, lambda n: spans_of(PHASES, slow=[5] * (n == 2), phase="fsync"))("/bins")
    assert slow["most_lost"] * slow["unit"] == pytest.approx(7 * 0.022, rel=0.03)
    assert slow["most_lost"] == max(map(max, slow["lost"]))


def test_tables_figures_and_csv_are_of_the_steps_that_are_shown(trends):
    ask = trends(30, lambda n: spans_of(PHASES | {"fsync": 220 if n > 20 else 20}))
    page = ask(low=6, high=20)
    assert page["step"] == list(range(6, 21)) and page["total"] == 30
    rows = {row["name"]: row for row in page["durations"]}
    assert rows["duration"]["p50"] == rows["duration"]["longest"] == pytest.approx(0.076)
    whole = {row["name"]: row for row in ask()["durations"]}
    assert [whole["fsync"][key] for key in ("p50", "p95", "longest")] == pytest.approx([0.022, 0.222, 0.222])
    assert page["text"] == ask()["text"], "since when saves are slow is of all of them"
    text = ask(page=True, low=6, high=20)
    assert "step 20</a>" in text and "step 21</a>" not in text and "between 6 and 20" in text
    assert "2025-06-15 15:12:40 UTC" in text and "as of <span data-as-of>" in text


def test_a_client_that_polls_trends_gets_what_is_new_alone(serve, tmp_path):
    with tc.Manager(tmp_path / "run", keep=None, background=False) as manager:
        manager.save(1, {"x": 1})
        client = serve(tmp_path / "run")
        [run] = client.get("/api/v1/runs").json()["runs"]
        first = client.get(f"/runs/{run['id']}/trends")
        headers = {"If-None-Match": first.headers["etag"]}
        assert client.get(f"/runs/{run['id']}/trends", headers=headers).status_code == 304
        manager.save(2, {"x": 2})
        client.app.state.library.watches[run["id"]]._fresh_until = None
        later = client.get(f"/runs/{run['id']}/trends", headers=headers)
    assert later.status_code == 200 and "step 2</a>" in later.text and "step 2</a>" not in first.text
