"""The benchmark measures what it says, finds what it should, and refuses what it cannot do. No figure is asserted."""

import itertools
import json
import mmap
from typing import Any, get_args

import pytest
import torch

from tests.bench import speed
from tests.bench.plot import draw
from tests.bench.results import REMOTE_PHASES, AsyncTrial, summarize_all, summarize_async
from tests.bench.states import SCENARIOS
from tests.bench.targets import FAR, NEAR, compare_async_with_targets, compare_with_targets
from tests.helpers.background import until
from tests.helpers.bench_trials import trial
from treeckpt import _bench
from treeckpt._bench import measure, states
from treeckpt._bench.checkpointers import SyncCheckpointer, sync_files
from treeckpt._bench.measure import Meter, cached_fraction, drop_cache, fill_cache
from treeckpt._bench.results import LIMITS, BenchError, FrameworkSummary, Limit, Trial, print_frameworks, summarize
from treeckpt._bench.states import BenchTask, different_leaf, make_state, shapes_bytes, sum_bytes, touch
from treeckpt._cli.main import main as command_line

PHASES = tuple(LIMITS)


def one_of_each() -> list[Trial]:
    names = {scenario.name for scenario in SCENARIOS}
    everyone = ("treeckpt", "treeckpt dense", "treeckpt one rank", "dcp", "dcp-4", "safetensors")
    forms = ("treeckpt.dcp", "treeckpt.dcp storage")
    return [
        trial(who, phase, 1.0 if who in ("treeckpt", *forms) else 20.0, scenario=name)
        for name, who, phase in itertools.product(sorted(names), everyone + forms, PHASES)
    ] + [
        trial(who, phase, 1.0 if who == "treeckpt" else 20.0, scenario=link.scenario)
        for link, who, phase in itertools.product((FAR, NEAR), ("treeckpt", "fsspec DCP"), REMOTE_PHASES)
    ]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bench")
    only = [word for name in ("gpt2", "tiny", "slice") for word in ("--only", name)]
    place = ["--dir", str(folder / "work"), "--json", str(folder / "out.json"), "--plot", str(folder / "out.svg")]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other take most of the time
    try:
        assert speed.main(["--quick", "--scale", "0.006", "--repetitions", "1", *only, *place]) == 0
    finally:
        torch.set_num_threads(threads)
    assert list((folder / "work").iterdir()) == []
    assert "<svg" in (folder / "out.svg").read_text()
    return json.loads((folder / "out.json").read_text())


def test_a_run_has_a_trial_for_each_phase_of_each_contender(report):
    found = {(t["scenario"], t["contender"], t["phase"]) for t in report["trials"]}
    for scenario in ("gpt2", "tiny"):
        for contender in ("treeckpt", "torch.save", "safetensors", "dcp"):
            assert {(scenario, contender, phase) for phase in phases_of(contender)} <= found
        assert (scenario, "dcp-4", "save") in found
    assert {("slice", name, "load cold") for name in ("treeckpt", "torch.save", "safetensors")} <= found


def phases_of(contender: str) -> list[str]:
    """treeckpt alone can be told to compare everything first."""
    return [phase for phase in PHASES if contender == "treeckpt" or not phase.startswith("first")]


def test_trials_hold_what_was_measured(report):
    for one in report["trials"]:
        assert one["summed"] >= one["seconds"] > 0
        assert one["files_bytes"] >= one["nbytes"] > 0
        assert one["extra_rss"] >= 0 and 0 <= one["cached"] <= 1
    saves = [t for t in report["trials"] if (t["scenario"], t["phase"]) == ("gpt2", "save")]
    assert all(t["write_bytes"] >= t["nbytes"] for t in saves)


def test_warm_files_are_in_the_page_cache(report):
    assert {t["cached"] for t in report["trials"] if t["phase"].endswith("warm")} == {1.0}


def test_a_run_computes_the_bars_of_its_scenarios(report):
    assert report["format"] == "treeckpt._bench/4"
    states = {(bar["scenario"], bar["text"]): bar["state"] for bar in report["bars"]}
    for (scenario, text), state in states.items():
        if scenario in ("gpt2", "tiny", "slice"):
            assert state in ("ok", "short"), text
        if scenario in ("one", "reshard", "replicated", "host-2"):
            assert state == "not measured", text


@pytest.mark.slow
def test_ranks_that_load_the_same_are_measured_beside_one_of_them(tmp_path):
    out = tmp_path / "out.json"
    options = ["--scale", "0.02", "--repetitions", "1", "--only", "host-2", "--dir", str(tmp_path), "--json", str(out)]
    assert speed.main(options) == 0
    report = json.loads(out.read_text())
    sizes = {t["contender"]: t["nbytes"] for t in report["trials"] if t["phase"] == "load cold"}
    assert sizes["treeckpt"] == sizes["dcp"] == 2 * sizes["treeckpt one rank"]
    assert all(bar["state"] != "not measured" for bar in report["bars"] if bar["scenario"] == "host-2")


@pytest.mark.parametrize("name", ["reshard", pytest.param("replicated", marks=pytest.mark.slow)])
def test_ranks_are_measured_together(name, tmp_path):
    out = tmp_path / "out.json"
    options = ["--scale", "0.002", "--repetitions", "1", "--only", name, "--dir", str(tmp_path), "--json", str(out)]
    assert speed.main([*options, "--contender", "treeckpt"]) == 0
    trials = json.loads(out.read_text())["trials"]
    assert {(t["contender"], t["phase"]) for t in trials} == {("treeckpt", phase) for phase in phases_of("treeckpt")}
    assert {t["ranks"] for t in trials} == {2}


def test_tables_are_measured_beside_dense_tensors_of_the_same_bytes(tmp_path):
    out = tmp_path / "out.json"
    options = ["--scale", "0.0005", "--repetitions", "1", "--dir", str(tmp_path), "--json", str(out)]
    assert speed.main([*options, "--only", "table"]) == 0
    report = json.loads(out.read_text())
    assert {t["nbytes"] for t in report["trials"]} == {5000 * (3 * 64 + 8)}
    assert {t["contender"] for t in report["trials"]} == {"treeckpt", "treeckpt dense"}
    assert all(bar["state"] != "not measured" for bar in report["bars"] if bar["scenario"] == "table")


@pytest.mark.slow
def test_frameworks_are_measured_beside_their_own_checkpoints(tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--scale", "0.1", "--repetitions", "1", "--dir", str(tmp_path / "work"), "--json", str(out)]
    only = [word for name in ("transformers", "accelerate", "ray") for word in ("--contender", name)]
    assert _bench.main([*options, "--only", "frameworks", *only]) == 0
    report, said = json.loads(out.read_text()), capsys.readouterr().out
    names = {row["framework"] for row in report["frameworks"]}
    assert {"transformers", "accelerate"} <= names and ("ray" in names or "not installed: ray" in said)
    assert all(0 < row["blocked"] < row["durable"] for row in report["frameworks"])
    assert report["trials"] == [] and list((tmp_path / "work").iterdir()) == []


def test_a_framework_has_reached_its_bars_if_both_are(capsys):
    fields = {"framework": "f", "saves": 1, "own_blocked": 1.0, "own_durable": 1.0}
    pairs = ((0.5, 1.2), (0.6, 1.0), (0.1, 1.3))
    rows = [FrameworkSummary(**fields, blocked=blocked, durable=durable) for blocked, durable in pairs]
    assert [row.state for row in rows] == ["ok", "short", "short"]
    print_frameworks(rows, ["g"])
    assert "not installed: g" in capsys.readouterr().out


def test_ratios_are_of_the_trial_and_of_the_limit_beside_it():
    slow_disk = trial(seconds=2.0, limits={"W": 500.0})
    assert slow_disk.ratio == 1.0
    assert trial(limits={}).ratio is None
    [row] = summarize([slow_disk, trial(seconds=1.0), trial(seconds=4.0)])
    assert (row.seconds, row.fastest, row.slowest, row.ratio, row.ratio_low) == (2.0, 1.0, 4.0, 1.0, 0.25)


def test_every_bar_is_computed_from_a_full_run():
    bars = compare_with_targets(summarize_all(one_of_each()))
    assert {bar.state for bar in bars} == {"ok"}
    assert {bar.state for bar in compare_with_targets([])} == {"not measured"}


def stay(contender: str, blocked: float = 1.0, **changes: Any) -> AsyncTrial:
    fields: dict[str, Any] = {"scenario": "async", "contender": contender, "repetition": 1, "nbytes": 1000}
    fields |= {"blocked": blocked, "durable": 2.0, "copy_rate": 1000.0, "interference": 0.1 * blocked}
    return AsyncTrial(**{**fields, "gap": None, "idle_gap": None, **changes})


def test_saves_in_the_background_are_judged_by_the_warm_ones():
    first = [stay("treeckpt", 2.0, repetition=0, interference=0.9), stay("dcp thread", 9.0, repetition=0)]
    warm = [stay("treeckpt"), stay("dcp thread", 4.0), stay("treeckpt lazy", 0.05), stay("torch_checkpointing", 1.5)]
    ticks = [stay("treeckpt", scenario="async-tiny", copy_rate=None, interference=None, gap=0.002, idle_gap=0.001)]
    through = [stay("treeckpt.dcp thread", 0.5, scenario="dcp-async"), stay("dcp thread", scenario="dcp-async")]
    fields = {"scenario": "device-async", "interference": 0.01}
    there = [stay("treeckpt", 1.1, **fields), stay("treeckpt lazy", 0.15, **fields)]
    rows = summarize_async([*warm, *first, *ticks, *through, *there])
    assert (rows[0].contender, rows[0].first, rows[0].blocked, rows[0].stall) == ("treeckpt", 2.0, 1.0, 1.0)
    bars = compare_async_with_targets(rows)
    assert {bar.state for bar in bars} == {"ok"}
    assert [round(bar.figure or 0, 3) for bar in bars] == [
        *(4.0, 1.5, 2.0, 1.0, 0.05, 0.1, 4.0, 2.0, 0.5),
        *(0.909, 0.15, 0.01),
    ]
    assert {bar.state for bar in compare_async_with_targets([])} == {"not measured"}
    slow = summarize_async([stay("treeckpt", 3.0), stay("dcp thread", 4.0)])
    assert {bar.state for bar in compare_async_with_targets(slow)} == {"short", "ok", "not measured"}


@pytest.mark.parametrize("name", [pytest.param("async", marks=pytest.mark.slow), "async-tiny"])
def test_saves_in_the_background_are_measured_beside_steps_or_ticks(name, tmp_path):
    out = tmp_path / "out.json"
    options = ["--scale", "0.002", "--repetitions", "1", "--only", name, "--dir", str(tmp_path), "--json", str(out)]
    options += [] if name == "async" else ["--contender", "treeckpt"]
    assert speed.main(options) == 0
    found = json.loads(out.read_text())
    names = {"treeckpt", "treeckpt lazy"} | ({"dcp thread", "dcp process"} if name == "async" else set())
    assert {(s["contender"], s["repetition"]) for s in found["stays"]} >= set(itertools.product(names, (0, 1)))
    for one in found["stays"]:
        assert 0 < one["blocked"] < one["durable"] and one["nbytes"] > 0
        assert (one["gap"] is None) == (name == "async") == (one["interference"] is not None)
    assert {row["contender"] for row in found["stay_rows"]} >= names
    assert found["trials"] == found["rows"] == []


def test_a_state_on_a_device_is_measured_beside_copies_to_and_from_there(tmp_path, capsys):
    options = ["--device", "cpu", "--scale", "0.006", "--repetitions", "1", "--only", "device", "--json", "-"]
    options += ["--contender", "treeckpt", "--contender", "torch.save"]
    assert speed.main([*options, "--dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert "the smaller of the disk and the copy" in err, "with JSON on stdout tables go to stderr"
    contenders = {"treeckpt", "torch.save"}
    assert {(t["scenario"], t["contender"]) for t in report["trials"]} == {("device", name) for name in contenders}
    for one in report["trials"]:
        limits = one["limits"]
        copied = limits["D2H" if one["phase"] == "save" else "H2D"]
        assert copied > 0 and all(rate <= copied for name, rate in limits.items() if name[0] in "WRp")
    assert {bar["state"] for bar in report["bars"] if bar["scenario"] == "device"} <= {"ok", "short"}


@pytest.mark.slow
def test_every_library_is_measured_from_and_to_a_device_and_beside_steps_there(tmp_path):
    out = tmp_path / "out.json"
    options = ["--device", "cpu", "--scale", "0.01", "--repetitions", "1"]
    assert speed.main([*options, "--dir", str(tmp_path), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert {t["contender"] for t in found["trials"]} == {"treeckpt", "torch.save", "safetensors", "dcp"}
    assert {"treeckpt", "treeckpt lazy", "dcp thread"} <= {one["contender"] for one in found["stays"]}
    assert all(one["copy_rate"] > 0 and one["interference"] is not None for one in found["stays"])
    assert {bar["state"] for bar in found["bars"] if bar["scenario"].startswith("device")} <= {"ok", "short"}


@pytest.mark.parametrize(
    "options", ["--device cuda:99", "--device nowhere", "--only device", "--device cpu --only tiny"]
)
def test_a_device_that_is_not_here_or_not_named_is_wrong_use(options, tmp_path, capsys):
    assert speed.main([*options.split(), "--dir", str(tmp_path)]) == 2
    assert "--device" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_bar_that_is_missed_is_short():
    slow = [trial(limits={"W": 2000.0}), trial("dcp", seconds=2.9), trial("dcp-4", seconds=2.0)]
    states = {bar.text: bar.state for bar in compare_with_targets(summarize(slow)) if bar.scenario == "gpt2"}
    assert states["save, rate / W"] == "short"
    assert states["save, times faster than dcp"] == "short"
    assert states["save, times faster than dcp-4"] == "ok"


def test_strict_fails_where_a_bar_is_missed(tmp_path, monkeypatch):
    for limit, code in ((1.0, 0), (1e9, 1)):
        trials = [trial(limits={"W": limit})]
        monkeypatch.setattr(speed, "run_tasks", lambda *_, trials=trials: (trials, [], False))
        assert speed.main(["--strict", "--scale", "0.01", "--only", "gpt2", "--dir", str(tmp_path)]) == code


def test_a_scenario_that_fails_does_not_lose_the_others(tmp_path, monkeypatch, capsys):
    run = speed.run_task

    def fail_one(task):
        if task.name == "slice":
            raise BenchError("a contender gave up")
        return run(task)

    monkeypatch.setattr(speed, "run_task", fail_one)
    only = [word for name in ("slice", "tiny") for word in ("--only", name)]
    options = ["--scale", "0.001", "--repetitions", "1", "--contender", "treeckpt", "--dir", str(tmp_path)]
    assert speed.main([*options, *only, "--json", str(tmp_path / "out.json")]) == 1
    assert "slice: a contender gave up" in capsys.readouterr().err
    report = json.loads((tmp_path / "out.json").read_bytes())
    assert {row["scenario"] for row in report["rows"]} == {"tiny"}


def test_no_room_is_said_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_bench, "MARGIN", 1 << 60)
    assert speed.main(["--scale", "0.01", "--dir", str(tmp_path)]) == 1
    assert "of free space, found" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_contender_that_gives_back_something_else_is_caught(tmp_path):
    class Wrong(SyncCheckpointer):
        name, kinds = "wrong", ("save", "load")

        def prepare(self, state):
            return state

        def save(self, directory, prepared):
            (directory / "file").write_bytes(b"x")

        def load(self, directory, like):
            return {name: leaf + 1 for name, leaf in like.items()}

        def load_into(self, directory, state):
            raise AssertionError("not asked for")

    task = BenchTask("tiny", str(tmp_path), scale=0.001, repetitions=1)
    with pytest.raises(BenchError, match=r"wrong: tiny: leaf\.00000 came back changed"):
        list(measure.run_alone(task, [Wrong()]))


def test_turns_go_forwards_and_backwards():
    assert "".join(f"{r}{c}" for r, c in BenchTask("tiny", "", 1, 3).turns("abc")) == "0a0b0c1c1b1a2a2b2c"


def test_full_sizes_are_those_that_are_told():
    sizes = {s.name: s.shapes(1) for s in SCENARIOS}
    assert len(sizes["gpt2"]) == 592 and round(shapes_bytes(sizes["gpt2"]) / 1e9, 2) == 1.49
    assert len(sizes["tiny"]) == 20_000 and shapes_bytes(sizes["tiny"]) == 80_000
    assert all(round(shapes_bytes(sizes[f"host-{n}"]) / 1e6) == 498 for n in (2, 4, 8))
    assert shapes_bytes(sizes["one"]) == 2e9 and shapes_bytes(sizes["slice"]) == 512e6
    assert {s.name for s in states.SCENARIOS} == set(_bench.NAMES)


def test_states_come_out_the_same_and_differences_are_seen():
    shapes = {"a": (3, 5), "b": (), "c": (20_001,)}
    state, again = (make_state(shapes) for _ in range(2))
    assert different_leaf(state, again) is None
    assert sum_bytes(state) == sum_bytes(again) != 0 and touch(state) == touch(again)
    again["c"][-1] += 1
    assert different_leaf(state, again) == "c"
    assert different_leaf(state, {"a": state["a"]}) in ("b", "c")


def test_the_meter_sees_memory_that_came_and_went():
    with Meter() as meter:
        with mmap.mmap(-1, 16 << 20) as memory:  # pages of its own: an allocator may have some at hand already
            memory.write(b"1" * len(memory))
        usage = meter.lap()
    assert 12 << 20 <= usage.extra_rss < 100 << 20
    assert usage.seconds > 0


def test_the_page_cache_can_be_filled_and_dropped(tmp_path):
    (tmp_path / "file").write_bytes(bytes(mmap.PAGESIZE * 10 + 1))
    sync_files(tmp_path)

    def dropped() -> float:
        drop_cache(tmp_path)
        return cached_fraction(tmp_path)

    assert until(lambda: dropped() in (0.0, 1.0))  # some file systems, tmpfs among them, have no place but the cache
    fill_cache(tmp_path)
    assert cached_fraction(tmp_path) == 1.0


def test_raw_limits_are_measured_and_leave_no_file(tmp_path):
    limits = measure.RawLimits(tmp_path / "raw.bin", 0)
    assert all(limits.measure(name) > 0 for name in get_args(Limit))
    assert (tmp_path / "raw.bin").read_bytes()[:8] == bytes(8)
    limits.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_picture_is_drawn_from_what_there_is(tmp_path):
    draw(summarize_all(one_of_each()), tmp_path / "all.svg")
    assert "Save, 2 equal ranks" in (tmp_path / "all.svg").read_text()
    draw(summarize([trial()]), tmp_path / "one.png")
    with pytest.raises(ValueError, match="nothing to draw"):
        draw([], tmp_path / "none.svg")


def test_it_is_a_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        command_line(["bench", "--help"])
    assert stopped.value.code == 0
    assert "--repetitions" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        command_line(["bench", "--only", "everything"])
    assert stopped.value.code == 2


def test_the_command_measures_what_a_user_compares(tmp_path, capsys):
    options = ["--scale", "0.001", "--repetitions", "1", "--only", "tiny", "--dir", str(tmp_path), "--json", "-"]
    assert command_line(["bench", *options]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["format"] == "treeckpt._bench/4" and report["machine"]["packages"]["treeckpt"]
    assert {t["contender"] for t in report["trials"]} == {"treeckpt", "torch.save", "safetensors", "dcp", "dcp-4"}
    assert [row["phase"] for row in report["rows"] if row["contender"] == "treeckpt"] == list(PHASES)
    assert "20,000 tensors of one element" in err and list(tmp_path.iterdir()) == []
