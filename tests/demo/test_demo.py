"""The demo tells the truth: equal when it is, a failure when it is not, and nothing left running."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import treeckpt as tc
from treeckpt import demo
from treeckpt.demo.launch import JobFailed, follow, run_job, worker_environment
from treeckpt.demo.model import batch, read_text, row_start
from treeckpt.demo.tasks import Resume, Resumed, Saved, Train, Trained, compare_runs, differing, largest_gap
from treeckpt_dashboard.web import server

TEXT = np.arange(1000, dtype=np.uint64).astype(np.uint8)


# data -------------------------------------------------------------------------------------------------------------


def test_batch_is_a_function_of_its_arguments():
    first = batch(TEXT, 7, seed=1, rows=range(8), length=16)
    assert first.shape == (8, 17)
    assert first.dtype == np.int64
    np.testing.assert_array_equal(first, batch(TEXT, 7, seed=1, rows=range(8), length=16))


def test_each_step_seed_and_row_reads_another_place():
    starts = {row_start(seed, step, row, stop=10**9) for seed in (0, 1) for step in range(5) for row in range(8)}
    assert len(starts) == 2 * 5 * 8


def test_places_never_change():
    assert [row_start(0, step, 3, stop=1_000_000) for step in (1, 2, 3)] == [525, 511536, 59989]


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_ranks_together_read_the_global_batch(parts):
    whole = batch(TEXT, 3, seed=0, rows=range(8), length=16)
    share = 8 // parts
    pieces = [batch(TEXT, 3, seed=0, rows=range(p * share, (p + 1) * share), length=16) for p in range(parts)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_rows_are_parts_of_the_text():
    for row in batch(TEXT, 1, seed=0, rows=range(20), length=16):
        assert row.astype(np.uint8).tobytes() in TEXT.tobytes()


def test_text_too_short_for_a_row_is_refused():
    with pytest.raises(ValueError, match="more than 16 bytes, got 16"):
        batch(TEXT[:16], 1, seed=0, rows=range(1), length=16)


def test_text_is_the_standard_librarys_own_source():
    text = read_text(nbytes=200_000)
    assert len(text) == 200_000
    assert b"def " in text.tobytes()


def test_text_joins_files_by_name_and_stops(tmp_path):
    (tmp_path / "b.py").write_text("BBBB")
    (tmp_path / "a.py").write_text("AAAA")
    assert read_text(tmp_path, nbytes=6).tobytes() == b"AAAABB"


def test_folder_without_sources_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected Python sources"):
        read_text(tmp_path)


# report -----------------------------------------------------------------------------------------------------------

TASK = Resume("run", "tp", step=3, stop=4, earlier=(2,))
SAVES = (Saved(2, 10, 0.1, {"a": "1", "b": "2"}), Saved(3, 10, 0.1, {"a": "3", "b": "4"}))
TRAINED = Trained(SAVES, (4.0, 3.0, 2.0, 1.0))
EQUAL = {step.step: (step.digests, step.digests) for step in SAVES}


def test_equal_leaves_and_losses_pass():
    verdict = compare_runs(TRAINED, Resumed(10, 0.1, EQUAL, (1.00001,)), TASK)
    assert verdict.ok
    assert verdict.complaints() == []
    assert (verdict.leaves, verdict.different) == (8, ())
    assert verdict.gap == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("digests", "complaint"),
    [
        (EQUAL | {3: ({"a": "3", "b": "4"}, {"a": "3", "b": "wrong"})}, "step 3 b on rank 1"),
        (EQUAL | {3: ({"a": "3"}, {"a": "3", "b": "4"})}, "step 3 b on rank 0"),
        (EQUAL | {2: ({"a": "1", "b": "2"},)}, "step 2: 1 rank answered"),
        ({3: EQUAL[3]}, "step 2: 0 ranks answered"),
    ],
    ids=["one rank's leaf differs", "a leaf is missing", "a rank is missing", "a checkpoint is missing"],
)
def test_what_is_not_equal_is_named(digests, complaint):
    verdict = compare_runs(TRAINED, Resumed(10, 0.1, digests, (1.0,)), TASK)
    assert not verdict.ok
    assert verdict.complaints() == [f"tensor parallel: not as saved: {complaint}"]


def test_losses_that_drift_fail():
    verdict = compare_runs(TRAINED, Resumed(10, 0.1, EQUAL, (1.001,)), TASK)
    assert not verdict.ok
    assert "losses expected within 0.0001, found a gap of 0.001" in verdict.complaints()[0]


def test_differing_names_both_sides():
    assert differing({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("expected", "found", "gap"),
    [
        ([2.0, 4.0], [2.0, 4.0], 0.0),
        ([2.0, 4.0], [2.2, 4.0], 0.1),
        ([2.0], [2.0, 4.0], math.inf),
        ([], [], math.inf),
        ([2.0, 2.0], [math.nan, 2.0], math.inf),
        ([math.nan, 2.0], [2.0, 2.0], math.inf),
    ],
)
def test_largest_gap_is_relative_and_never_lenient(expected, found, gap):
    assert largest_gap(expected, found) == pytest.approx(gap)


def test_table_fits_into_80_columns():
    digests = {step: ranks * 1 for step, ranks in EQUAL.items()}
    verdict = compare_runs(TRAINED, Resumed(23_190_000, 0.1, digests, (1.00001,)), TASK)
    saves = [Saved(1000, 23_190_000, 12.123, {})]
    console = Console(width=80)
    with console.capture() as captured:
        console.print(demo.build_table(saves, "hsdp", [verdict]))
    for word in ("ranks", "bit-equal", "loss gap", "save 1000", "FSDP2, 2x2 mesh", "23.2", "12.123", "8/8", "1.0e-05"):
        assert word in captured.get()


# launch -----------------------------------------------------------------------------------------------------------


def test_follow_reports_steps_and_keeps_the_last_words():
    steps: list[int] = []
    said = follow(["@step 1\n", "noise\n", "@step 2\n"], steps.append)
    assert (steps, said) == ([1, 2], "noise")


def test_follow_stops_where_torchrun_sums_up():
    lines = ["terminate called\n", "E1121 torch/distributed/elastic/api.py] failed (exitcode: -6)\n", "====\n"]
    assert follow(lines, lambda step: None).splitlines() == [line.rstrip() for line in lines[:2]]


def test_follow_prefers_the_rank_that_failed_first():
    said = follow(["@error 2 the cause\n", "@error 0 a peer is gone\n", "noise\n"], lambda step: None)
    assert said == "[rank 2] the cause"


def test_workers_see_one_thread_and_no_torchrun_above():
    environment = worker_environment({"RANK": "3", "TORCHELASTIC_RUN_ID": "x", "PATH": "p", "OMP_NUM_THREADS": "9"})
    assert environment.keys() >= {"PATH", "OMP_NUM_THREADS"}
    assert environment["OMP_NUM_THREADS"] == "1"
    assert not environment.keys() & {"RANK", "TORCHELASTIC_RUN_ID"}


def test_a_job_that_fails_says_why(tmp_path):
    with pytest.raises(JobFailed, match=r"failed with exit code 1[\s\S]*\[rank 0\].*CheckpointNotFound"):
        run_job(Resume(str(tmp_path), "plain", 1, 2), lambda step: None, environment=os.environ)


def test_a_job_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(JobFailed, match=r"not done after 0 s"):
        run_job(Train(str(tmp_path), "plain", (), 10_000), lambda step: None, environment=os.environ, patience=0.1)


# main -------------------------------------------------------------------------------------------------------------


def test_comparisons_are_json_and_all_else_goes_to_the_error_stream(tmp_path, monkeypatch, capsys):
    verdict = compare_runs(TRAINED, Resumed(10, 0.1, EQUAL, (1.0,)), TASK)

    def jobs(console, run, steps):
        console.print("the table")
        return [verdict]

    monkeypatch.setattr(demo, "run_jobs", jobs)
    assert demo.main(["--run", str(tmp_path / "run"), "--no-serve", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["run"] == str(tmp_path / "run") and found["ok"] and found["comparisons"][0]["leaves"] == 8
    assert "the table" in err and "bit for bit" in err


def test_torch_missing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert demo.main(["--no-serve"]) == 2
    assert "pip install 'treeckpt[torch]'" in capsys.readouterr().err


def test_directory_in_use_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert demo.main(["--run", str(tmp_path), "--no-serve"]) == 2
    assert "expected a new or empty directory" in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["3", "-1", "many"])
def test_too_few_steps_are_refused(steps, capsys):
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--steps", steps])
    assert "--steps" in capsys.readouterr().err


def test_default_run_is_a_new_directory_below_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = demo.prepare_run(None), demo.prepare_run(None)
    assert first != second
    assert first.parent == second.parent == tmp_path / "demo-runs"


def test_a_taken_port_is_replaced_by_a_free_one(tmp_path, monkeypatch):
    ports: list[int | None] = []

    def serve(runs, *, port=None, started=None):
        ports.append(port)
        if port is None:
            raise server.ServeError("taken")
        return 0

    monkeypatch.setattr(server, "serve", serve)
    assert demo.serve(tmp_path, Console(stderr=True)) == 0
    assert ports == [None, 0]


def test_dashboard_missing_is_said(tmp_path, monkeypatch, capsys):
    for name in ("treeckpt_dashboard", "treeckpt_dashboard.web"):
        monkeypatch.setitem(sys.modules, name, None)
    assert demo.serve(tmp_path, Console(stderr=True, soft_wrap=True)) == 2
    assert "pip install 'treeckpt[dashboard]'" in capsys.readouterr().err


def test_importing_the_demo_imports_no_torch():
    code = "import sys, treeckpt.demo; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


# the whole of it --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run of 4 steps, the fewest."""
    run = tmp_path_factory.mktemp("demo") / "run"
    command = [sys.executable, "-m", "treeckpt.demo", "--run", str(run), "--steps", "4", "--no-serve"]
    environment = os.environ | {"COLUMNS": "80"}
    return run, subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)


def test_demo_finds_everything_equal(finished):
    _, done = finished
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "Every leaf came back bit for bit" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.strip().startswith(("save", "load"))]
    table = [row for row in rows if row[1].isdigit() and row[2].isdigit()]
    assert [(row[0], row[1], row[2]) for row in table] == [
        *(("save", f"{step}", "4") for step in (1, 2, 3)),
        ("load", "3", "2"),
        ("load", "3", "1"),
    ]
    for row in table[3:]:
        equal, of = row[-2].split("/")
        assert equal == of
        assert int(of) > 600
        assert float(row[-1]) < 1e-4


def test_demo_leaves_whole_checkpoints(finished):
    run, _ = finished
    for step in (1, 2, 3):
        path = run / f"step_{step:08d}"
        index = tc.inspect(path)
        assert (index.step, index.world) == (step, 4)
        assert len(index.leaves) > 300
        assert index.nbytes > 20_000_000
        assert tc.verify(path).ok


def test_demo_keeps_torchs_own_digests_beside_the_checkpoints(finished):
    run, _ = finished
    trained = json.loads((run / ".demo" / "train.json").read_bytes())
    digests = trained["saves"][-1]["digests"]
    assert len(set(digests.values())) > 150
    assert digests["model/embedding.weight"] != trained["saves"][0]["digests"]["model/embedding.weight"]
    assert digests.keys() == tc.inspect(run / "step_00000003").by_path.keys()


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_ending_the_demo_ends_its_workers(tmp_path, number):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "treeckpt.demo", "--run", str(run), "--steps", "100000", "--no-serve"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: len(workers_of(run)) == 5)  # torchrun's agent and its ranks
        process.send_signal(number)
        process.wait(300)
    until(lambda: not workers_of(run))


def until(condition, *, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.1)


def workers_of(run: Path) -> list[str]:
    """The processes with a task of this run on their command line."""
    found: list[str] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_text()
        except OSError:
            continue
        if str(run) in command and "treeckpt.demo.train" in command:
            found.append(command)
    return found
