"""Each command says what is true, with the exit code that a script needs."""

import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

import treeckpt as tc
from tests.crash.disks import fill, small_disk
from tests.helpers.corruption import flip
from tests.helpers.large import write_large_checkpoint
from tests.helpers.samples import FILES, gpt_state, write_checkpoint, write_mixed_run
from treeckpt._cli.command import EXIT_CODES
from treeckpt._cli.main import main, new_parser
from treeckpt._cli.runs import LEFT_OUT_FIRST
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._runs.verification import VerificationStore, this_user
from treeckpt_dashboard.web.server import _announce


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_mixed_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def cli(capsys):
    def call(*arguments, code=0):
        got = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert got == code, out + err
        assert "Traceback" not in err
        return out if code == 0 else out + err

    return call


def test_ls_lists_every_state(cli, run):
    lines = cli("ls", run).splitlines()
    assert lines[0].split()[:9] == ["name", "status", "step", "size", "leaves", "ranks", "saved", "age", "took"]
    assert lines[1].split()[:3] == ["step_00000600", "damaged", "600"]
    assert any(line.startswith("step_00000400: no index: the save failed") for line in lines)


def test_ls_shows_what_a_checkpoint_follows_its_metrics_pins_and_verification(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    manager = tc.Manager(tmp_path / "run", keep=None, background=False)
    for step in (1, 2, 3):
        manager.save(step, {"s": step})
    columns = ["name", "status", "step", "size", "leaves", "ranks", "saved", "age", "took", "after"]
    assert cli("ls", tmp_path / "run").splitlines()[0].split() == columns, "no column without a cell"
    manager.restore(step=1)
    manager.save(4, {"s": 4}, metrics=dict.fromkeys(("acc", "loss", "a", "b", "c"), 0.25), pin=True)
    manager.delete(2)
    cli("verify", tmp_path / "run" / "step_00000003")
    head, *rows = cli("ls", tmp_path / "run").splitlines()
    assert head.split() == [*columns, "verified", "pinned", "metrics"]
    cells = {row.split()[0]: [cell.strip() for cell in re.split("  +", row)] for row in rows}
    assert cells["step_00000004"][-4:] == ["1", "-", "yes", "a=0.25 acc=0.25 b=0.25 c=0.25 and 1 more"]
    assert cells["step_00000003"][1] == "complete, abandoned branch"
    assert cells["step_00000003"][-4:] == ["not here", "intact, just now", "-", "-"]
    assert cells["step_00000001"][-4:] == ["-", "-", "-", "-"]


def test_ls_calls_a_checkpoint_damaged_once_a_verification_has_found_that(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    tc.save(tmp_path / "step_00000001", {"w": np.arange(1000.0)}, step=1)
    [shard] = (tmp_path / "step_00000001").glob("shard-*")
    shard.write_bytes(flip(shard.read_bytes(), shard.stat().st_size - 9))
    assert cli("ls", tmp_path / "step_00000001").splitlines()[1].split()[:2] == ["step_00000001", "complete"]
    cli("verify", tmp_path / "step_00000001", code=1)
    lines = cli("ls", tmp_path / "step_00000001").splitlines()
    assert lines[1].split()[:2] == ["step_00000001", "damaged"] and "1 problem, just now" in lines[1]
    assert lines[2].startswith(f"step_00000001: {shard.name}: bytes ")
    [found] = json.loads(cli("ls", "--json", tmp_path / "step_00000001"))
    assert found["status"] == "damaged" and not found["intact"] and found["verification"]["total"] == 1
    assert cli("show", tmp_path / "step_00000001").startswith("status")
    shown = json.loads(cli("show", "--json", tmp_path / "step_00000001"))
    assert (shown["status"], shown["intact"]) == ("damaged", False)


def test_an_error_names_the_option_of_the_command_in_the_place_of_the_argument(cli, tmp_path):
    for name in ("a", "b"):
        tc.save(tmp_path / name, {"w": np.arange(3.0)})
    text = cli("rebuild-index", tmp_path / "a", code=1)
    assert "Pass --replace to make it anew" in text and "replace=" not in text
    assert "rebuild-index" not in text and "index.json made again" in cli("rebuild-index", "--replace", tmp_path / "a")
    assert "or pass --overwrite\n" in cli("convert", tmp_path / "a", tmp_path / "b", code=1)
    (tmp_path / "c.pt").touch()
    assert "pass overwrite=True (--overwrite)" in cli("convert", tmp_path / "a", tmp_path / "c.pt", code=1)


def test_an_unknown_option_shows_the_usage_of_its_command(run, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["gc", str(run), "--keep-steps", "1800"])
    text = capsys.readouterr().err
    assert text.startswith("usage: treeckpt gc ") and "--keep-last" in text
    assert text.endswith("treeckpt gc: error: unrecognized arguments: --keep-steps 1800\n")


def test_the_help_of_ls_says_what_each_column_means(cli, run, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["ls", "--help"])
    told = re.findall(r"^  ([a-z]+) {2,}\S", capsys.readouterr().out.partition("columns, ")[2], re.M)
    assert told == [*cli("ls", run).splitlines()[0].split()[:9], "shared", "after", "verified", "pinned", "metrics"]
    assert set(LEFT_OUT_FIRST) < set(told)


def test_a_narrow_terminal_shows_the_columns_that_tell_most(cli, run, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path))
    heads = {}
    for columns in ("60", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen := Terminal())
            cli("ls", run)
        heads[columns] = re.sub("\x1b[^m]*m", "", screen.getvalue()).splitlines()[0].split()
    assert set(heads["200"]) - set(heads["60"]) == {"leaves", "ranks", "took", "saved"}


def test_ls_above_several_runs_says_that_they_are_runs_and_how_each_is_listed(cli, tmp_path):
    for name in ("base", "big"):
        tc.Manager(tmp_path / name, background=False).save(10, {"s": 10})
    tc.Manager(tmp_path / "big", background=False).save(20, {"s": 20})
    (tmp_path / "notes").mkdir()
    lines = cli("ls", tmp_path).splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["base", "run"], ["big", "run"], ["notes", "foreign"]]
    assert lines[4:] == [
        f"base: a run of 1 step, which treeckpt ls {tmp_path / 'base'} lists",
        f"big: a run of 2 steps, which treeckpt ls {tmp_path / 'big'} lists",
    ]
    assert [line.split()[1] for line in cli("ls", tmp_path / "base", tmp_path).splitlines()[2:4]] == ["run", "run"]
    assert {one["status"] for one in json.loads(cli("ls", "--json", tmp_path))} == {"foreign"}


def test_a_file_or_a_mistyped_path_in_place_of_a_run_is_told_with_what_there_is(cli, tmp_path, monkeypatch):
    tc.Manager(tmp_path / "runs" / "base", background=False).save(10, {"s": 10})
    (tmp_path / "notes.txt").write_text("no checkpoint")
    monkeypatch.chdir(tmp_path)
    for command in ("ls", "gc", "dashboard"):
        text = cli(command, "notes.txt", code=2)
        assert "notes.txt: no such directory: it is a file of no known format. Check the path" in text
        text = cli(command, "rnus/base", code=2)
        assert f"rnus/base: no such directory. Check the path: near to it is {tmp_path / 'runs/base'}." in text


def test_ls_as_json(cli, run):
    found = json.loads(cli("ls", "--json", run))
    assert [f["status"] for f in found].count("complete") == 2
    assert {"name", "path", "step", "save_id", "world", "leaves", "nbytes", "created_ns", "seconds"} <= found[0].keys()


def test_show_gives_the_tree_with_sizes(cli, run):
    text = cli("show", run / "step_00000200")
    assert "model" in text and "optimizer" in text and "array float32 [64, 32]" in text


def test_show_of_a_node_and_of_leaves(cli, run):
    assert "exp_avg_sq" in cli("show", run / "step_00000200", "optimizer/state/0")
    array = cli("show", run / "step_00000200", "model/wte.weight")
    assert "float32" in array and "dp: Shard(0), tp: Replicate" in array and ".safetensors" in array
    assert "'cosine'" in cli("show", run / "step_00000200", "scheduler/name")
    assert "one for each of 4 ranks" in cli("show", run / "step_00000200", "rng/~rank*")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("model/wte.wieght", "model/wte.weight"),
        ("modle", "model"),
        ("optimiser/state/0", "optimizer/state/0"),
        ("wte.weight", "model/wte.weight"),
    ],
)
def test_show_of_a_path_that_is_not_there_names_those_that_are_like_it(cli, run, wrong, right):
    found = cli("show", run / "step_00000200", wrong, code=2).splitlines()
    assert found[0].startswith(f"treeckpt: {wrong}: no such path in") and f"  there is {right}" in found[1:]


SHOWN = {
    "row": np.arange(2000),
    "rows": np.arange(3_000_000).reshape(5000, 600) / 8,
    "deep": np.arange(2 * 9 * 8 * 7 * 300, dtype=np.int16).reshape(2, 1, 9, 8, 7, 300),
    "small": np.array([[1.5, np.nan], [np.inf, 0]]),
    "text": np.array(["a", "bc"]),
    "scalar": np.array(2.5),
    "none": np.zeros((0, 3)),
}


def test_show_of_an_array_prints_it_as_numpy_does_after_bounded_reads(cli, tmp_path):
    tc.save(tmp_path / "c", SHOWN)
    for name, array in SHOWN.items():
        out = cli("show", tmp_path / "c", name)
        found = json.loads(cli("show", tmp_path / "c", name, "--json"))["values"]
        if not array.size:
            assert found is None and "values" not in out
            continue
        shown = array[0, 0] if name == "deep" else array
        text = np.array2string(shown, edgeitems=3, threshold=1000, max_line_width=100)
        assert text in out and found["text"] == text and "match their checksums" in out
        assert found["at"] == ([0, 0] if name == "deep" else []) and found["elements"] == array.size
        assert found["read"] < 9_500_000, "of 24 MB: 4 MiB, and four corners in blocks of 256 KiB"
    out = cli("show", tmp_path / "c", "rows")
    assert "of the first 523,800 of 3,000,000 elements: minimum 0, maximum 65474.9" in out
    assert "minimum 0, maximum 1.5, mean 0.75, deviation 0.75, norm 1.5, 1 NaN, 1 infinite, 1 zero" in cli(
        "show", tmp_path / "c", "small"
    )


def test_show_prints_values_of_other_programs_files_and_of_one_rank(cli, run, tmp_path):
    save_file({"w": SHOWN["rows"]}, tmp_path / "x.safetensors")
    out = cli("show", tmp_path / "x.safetensors", "w")
    assert np.array2string(SHOWN["rows"], edgeitems=3, max_line_width=100) in out
    assert "not compared with checksums" in out
    out = cli("show", run / "step_00000200", "rng/~rank*")
    assert re.search("^values .* of rank 0$", out, re.M)


def test_show_says_which_bytes_are_damaged_beside_what_it_knows(cli, tmp_path):
    index = write_checkpoint(tmp_path / "c", gpt_state(layers=1))
    [name] = {file.name for file in index.file_list if file.rank == 0}
    with open(tmp_path / "c" / name, "r+b") as file:
        file.truncate(5000)
    text = cli("show", tmp_path / "c", "model/wte.weight", code=1)
    assert "dp: Shard(0)" in text and "treeckpt: " in text and name in text and "bytes" in text


def test_show_of_many_leaves_names_the_upper_levels_and_how_many_are_left_out(cli, tmp_path):
    write_large_checkpoint(tmp_path / "c", leaves=8000)
    text = cli("show", tmp_path / "c")
    assert re.search(r"^model +dict +2000", text, re.M) and re.search(r"^optimizer +dict +6000", text, re.M)
    assert "and 1003 more of these levels; name a PATH to see what is below it" in text
    assert json.loads(cli("show", tmp_path / "c", "--json"))["left_out"] == 1003


def test_rows_of_show_as_json_have_these_fields(cli, run):
    rows = json.loads(cli("show", "--json", run / "step_00000200"))["rows"]
    fields = ["node", "key", "path", "kind", "cls", "children", "first", "leaves", "nbytes"]
    assert rows and all(list(row) == fields for row in rows)


def test_show_of_a_leaf_as_json_gives_every_chunk(cli, run):
    found = json.loads(cli("show", "--json", run / "step_00000200", "model/wte.weight"))
    assert sum(c["stop"] - c["start"] for c in found["chunks"]) == 64 * 32 * 4


def test_show_with_rules_previews_names_and_shapes_and_how_they_come_about(cli, run, tmp_path):
    file = tmp_path / "rules"
    file.write_text("model/wte.weight -> model/a, model/b, axis=0\nmodel/a^T -> model/a\nscheduler -> _\n")
    text = cli("show", "--rules", file, run / "step_00000200", "model")
    row = next(line for line in text.splitlines() if line.startswith("model/a "))
    assert "model/wte.weight -(1: split model/wte.weight -> model/a, model/b)->" in row
    assert "dropped  scheduler/name" in text
    file.write_text('["model/wte.weight -> tokens", {"rule": "cast", "source": "tokens", "dtype": "float16"}]')
    whole = json.loads(cli("show", "--json", run / "step_00000200", "model/wte.weight"))["spec"]
    [leaf] = json.loads(cli("show", "--json", "--rules", file, run / "step_00000200", "tokens"))["leaves"]
    assert (leaf["dtype"], leaf["shape"]) == ("float16", whole["shape"])
    file.write_text("[{}]")
    assert "expected a list of rules" in cli("show", "--rules", file, run / "step_00000200", code=1)
    assert "a file of rules" in cli("show", "--rules", tmp_path / "none", run / "step_00000200", code=1)


def test_show_of_an_unknown_path_is_a_usage_error_with_a_suggestion(cli, run):
    assert "model/wte.weight" in cli("show", run / "step_00000200", "modle/wte.weight", code=2)


@pytest.mark.parametrize("name", ["step_00000300", "step_00000500", "logs", "nowhere"])
def test_bad_checkpoints_are_one_message_and_code_1(cli, run, name):
    text = cli("show", run / name, code=1)
    assert text.startswith("treeckpt: ") and name in text


@pytest.mark.parametrize(
    "command", ["verify --repair", "verify --statistics", "show", "trace --out t", "rebuild-index", "diff b"]
)
def test_a_run_in_the_place_of_a_checkpoint_is_wrong_use_that_names_one(cli, run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    text = cli(*command.split(), run, code=2)
    assert f"{run}: a run, not a checkpoint" in text and str(run / "step_00000600") in text and f"ls {run}" in text
    assert not list(tmp_path.iterdir())


def test_a_trace_of_nothing_does_not_say_that_it_is_complete(cli, run, tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        assert "expected a checkpoint, found none. Check the path" in cli("trace", path, "--out", "t", code=1)
    write_checkpoint(tmp_path / "whole", 1)
    for name in tmp_path.glob("whole/timings.*"):
        name.unlink()
    assert "it is still complete" in cli("trace", tmp_path / "whole", "--out", "t", code=1)
    (tmp_path / "whole" / INDEX_NAME).unlink()
    assert "none, and no index" in cli("trace", tmp_path / "whole", "--out", "t", code=1)


def test_verify_tells_intact_from_changed(cli, run, tmp_path):
    assert "intact" in cli("verify", run / "step_00000100")
    assert "the file ends at byte" in cli("verify", run / "step_00000600", code=1)
    index = write_checkpoint(tmp_path / "c", gpt_state(layers=1))
    shard = tmp_path / "c" / index.file_list[0].name
    data = bytearray(shard.read_bytes())
    data[-10] ^= 1
    shard.write_bytes(data)
    report = json.loads(cli("verify", "--json", tmp_path / "c", code=1))
    assert report["ok"] is False and shard.name in json.dumps(report)


def test_verify_of_a_run_prints_a_line_for_each_checkpoint_newest_first(cli, run, tmp_path, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    lines = cli("verify", run, code=1).splitlines()
    newest = [600, 500, 200, 100]
    assert [line.partition(":")[0] for line in lines[:4]] == [str(run / f"step_{step:08d}") for step in newest]
    assert "2 problems; shard-" in lines[0] and "1 problem; index.json: " in lines[1]
    assert lines[2].endswith(": intact") and lines[3].endswith(": intact")
    copies = [f"  {name}, a copy of the file that was saved, is missing: a clean-up makes it again" for name in FILES]
    assert lines[4:6] == copies, "the run was written without them"
    assert lines[6] == "not verified, as they have no index: step_00000400, step_00000300"
    assert lines[7].startswith("  step_00000400: no index: the save failed: ")
    assert f"treeckpt verify {run / 'step_00000300'} --repair" in lines[8] and len(lines) == 9
    found = json.loads(cli("verify", "--json", run, code=1))
    assert [one["ok"] for one in found[:4]] == [False, False, True, True]
    assert [one["report"]["path"] for one in found[:4]] == [str(run / f"step_{step:08d}") for step in newest]
    assert found[4:] == [
        {"ok": None, "path": str(run / f"step_{step:08d}"), "not_verified": "no index"} for step in (400, 300)
    ]
    verified = {one["step"]: one["verification"] for one in json.loads(cli("ls", "--json", run))}
    assert verified[200]["complete"] and not verified[200]["problems"]
    for step in (1, 2):
        write_checkpoint(tmp_path / "good" / f"step_{step:08d}", {"a": step}, step=step)
    assert len(cli("verify", tmp_path / "good").splitlines()) == 2


def test_verify_of_a_run_leaves_out_no_checkpoint_of_another_name_and_names_links(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    for name in ("step_00000001", "step_5", "best"):
        write_checkpoint(run / name, gpt_state(layers=1), step=1)
    (run / "logs").mkdir()
    (run / "step_00000007").symlink_to(run / "best")
    lines = cli("verify", run).splitlines()
    assert {Path(line.partition(":")[0]).name for line in lines[:3]} == {"step_00000001", "step_5", "best"}
    assert lines[3:] == ["not verified, as they are symbolic links: step_00000007"]
    [link] = [one for one in json.loads(cli("verify", "--json", run)) if "not_verified" in one]
    assert link == {"ok": None, "path": str(run / "step_00000007"), "not_verified": "symbolic link"}
    shard = next((run / "best").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "; shard-" in cli("verify", run, code=1)
    assert main(["verify", "--json", str(run)]) == 1


def test_a_checkpoint_at_the_path_of_a_run_hides_no_step(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    for path in (run, run / "step_00000001", run / "step_00000002"):
        write_checkpoint(path, gpt_state(layers=1), step=int(path.name[-1]) if path != run else None)
    assert [line.split()[0] for line in cli("ls", run).splitlines()[1:]] == ["step_00000002", "step_00000001", "run"]
    shard = next((run / "step_00000002").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    found = cli("verify", run, code=1)
    assert "; shard-" in found and found.count(": intact") == 2


def test_verify_of_a_run_goes_on_where_a_checkpoint_is_deleted_meanwhile(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    for step in (1, 2):
        write_checkpoint(tmp_path / "run" / f"step_{step:08d}", {"a": step}, step=step)
    record = VerificationStore.record

    def record_and_delete(*arguments, **options):
        failed = record(*arguments, **options)
        shutil.rmtree(tmp_path / "run" / "step_00000001", ignore_errors=True)
        return failed

    monkeypatch.setattr(VerificationStore, "record", record_and_delete)
    lines = cli("verify", tmp_path / "run").splitlines()
    assert lines[0].endswith(": intact") and lines[1:] == [
        "not verified, as they were deleted meanwhile: step_00000001"
    ]


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    path = tmp_path_factory.mktemp("named") / "c"
    write_checkpoint(path, {"é שלום 😀": 1, "arrays": [np.zeros(1)] * 2000})
    return path


def run_process(*arguments, **options):
    command = [sys.executable, "-m", "treeckpt._cli.main", *map(str, arguments)]
    return subprocess.run(command, check=False, stderr=subprocess.PIPE, timeout=300, **options)


@pytest.mark.parametrize("what", [(), ("--structure",), ("--json",)])
def test_a_reader_that_closes_the_pipe_early_is_no_error(named, what):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = run_process("show", named, *what, stdout=closed)
    assert (done.returncode, done.stderr) == (0, b"")


def test_characters_that_the_output_cannot_encode_are_escaped(named):
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    text = run_process("show", named, "--depth", 1, stdout=subprocess.PIPE, env=env)
    assert (text.returncode, text.stderr) == (0, b"") and rb"\xe9 \u05e9" in text.stdout
    found = run_process("show", named, "--structure", "--json", stdout=subprocess.PIPE, env=env)
    assert found.returncode == 0 and found.stdout.isascii(), found.stderr
    assert "é שלום 😀" in [row["path"] for row in json.loads(found.stdout)]


def test_diff_names_what_differs_beside_the_leaves(cli, tmp_path):
    tree = {"w": (np.zeros(3),)}
    tc.save(tmp_path / "a", tree, custom_metadata={"commit": "1f", "x": 1}, files={"t.json": b"1", "same": b"s"})
    tc.save(tmp_path / "b", tree, custom_metadata={"commit": "2e", "x": 1}, files={"t.json": b"2", "same": b"s"})
    tc.save(tmp_path / "c", {"w": [np.zeros(3)]}, custom_metadata={"commit": "1f", "x": 1})
    for more in ((), ("--values",)):
        head, commit, file, *_ = cli("diff", *more, tmp_path / "a", tmp_path / "b").splitlines()
        assert head.split() == ["what", "beside", "the", "leaves", "before", "after"]
        assert commit.split() == ["changed", "custom", "metadata", "commit", "'1f'", "'2e'"]
        assert file.startswith("changed  sidecar file t.json") and file.count("1 B, xxh3 ") == 2
        found = json.loads(cli("diff", "--json", *more, tmp_path / "a", tmp_path / "b"))
        assert found["changes"] == [] and found["also"] == ["custom metadata commit", "sidecar file t.json"]
        _, *lines = cli("diff", *more, tmp_path / "a", tmp_path / "c").splitlines()
        assert [line.split("  ")[:2] for line in lines[:2]] == [
            ["removed", "sidecar file same"], ["removed", "sidecar file t.json"],
        ]  # fmt: skip
        assert lines[2].startswith("changed  containers, by kind")
        assert "beside" not in cli("diff", *more, tmp_path / "a", tmp_path / "a")


def test_numbers_that_json_lacks_are_named_in_it_and_not_taken_for_none(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    metrics = {"loss": math.nan, "high": math.inf, "low": -math.inf, "lr": 0.5}
    with tc.Manager(tmp_path / "run", background=False) as manager:
        manager.save(1, {"gone": np.full(3, np.nan), "big": np.full(2, 1.5e308)}, metrics=metrics)
    [row] = json.loads(cli("ls", "--json", tmp_path / "run"))
    assert row["metrics"] == {"loss": "NaN", "high": "Infinity", "low": "-Infinity", "lr": 0.5}
    path = tmp_path / "run" / "step_00000001"
    rows = {one["path"]: one for one in json.loads(cli("verify", "--statistics", "--json", path))["statistics"]}
    assert rows["big"]["norm"] == "Infinity" and rows["big"]["high"] == 1.5e308
    assert [rows["gone"][name] for name in ("norm", "mean", "deviation", "low", "high")] == [None] * 5
    [line] = [line for line in cli("verify", "--statistics", path).splitlines() if line.startswith("gone")]
    assert line.split() == ["gone", "3", "NaN", "3", "0", "-", "-", "-", "-", "-"]


def test_diff(cli, run):
    text = cli("diff", run / "step_00000100", run / "step_00000200")
    assert "scheduler/last_epoch" in text and "int 100" in text and "int 200" in text
    assert json.loads(cli("diff", "--json", run / "step_00000100", run / "step_00000100"))["changes"] == []


def test_json_of_diff_tells_a_difference_that_overflows_from_one_that_there_is_not(cli, tmp_path):
    for name, number in (("a", -1.5e308), ("b", 1.5e308)):
        tree = {"over": np.array([number]), "gone": np.array([math.copysign(np.inf, number)]), "text": np.array([name])}
        tc.save(tmp_path / name, tree)
    values = json.loads(cli("diff", "--json", "--values", tmp_path / "a", tmp_path / "b"))["values"]
    found = {row["path"]: row["delta"] for row in values}
    assert [found["over"][name] for name in ("max_abs", "mean_abs", "change", "before")] == ["Infinity"] * 3 + [1.5e308]
    assert (found["gone"]["max_abs"], found["gone"]["not_finite"]) == (None, 1)
    assert (found["text"]["max_abs"], found["text"]["not_finite"], found["text"]["changed"]) == (None, 0, 1)


def test_rebuild_index(cli, tmp_path):
    index = write_checkpoint(tmp_path / "c", gpt_state(layers=1), publish=False)
    assert "made again" in cli("rebuild-index", tmp_path / "c")
    assert (tmp_path / "c" / INDEX_NAME).exists()
    assert index.save_id in cli("show", tmp_path / "c")
    assert "replace" in cli("rebuild-index", tmp_path / "c", code=1)
    cli("rebuild-index", "--replace", tmp_path / "c")


def test_one_of_a_thing_is_in_the_singular(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    run, hub = tmp_path / "run", tmp_path / "hub"
    hub.mkdir()
    save_file({"w": np.zeros(1)}, hub / "model.safetensors")
    saved = tc.Manager(run, keep=None, background=False).save(1, {"w": np.zeros(1)})
    step = Path(saved.path)
    tc.save(tmp_path / "own", tc.PerRank({"w": np.zeros(1), "value": 7}))
    texts = [cli("show", step), cli("show", hub), cli("verify", step), cli("verify", run), cli("gc", run)]
    texts += [cli("show", tmp_path / "own", leaf) for leaf in ("~rank*/w", "~rank*/value")]
    texts += [cli("show", tmp_path / "own", "--structure"), cli("convert", step, tmp_path / "out", "--to", "torch")]
    (step / INDEX_NAME).unlink()
    texts += [cli("rebuild-index", step), str(tc.verify(step)), tc.inspect(step)._repr_html_()]
    texts += [str(tc.load_into(step, {"w": np.ones(1)})), str(tc.convert.convert(step, tmp_path / "again", to="torch"))]
    assert "in 1 shard" in texts[0] and "in 1 file\n" in texts[1] and "1 shard, 8 B" in texts[2]
    for text in texts:
        assert not re.search(r"\b1 (shards|files|leaves|ranks|checkpoints|arrays|problems|pieces|spans)\b", text), text


def test_hostile_names_cannot_steer_the_terminal(cli, tmp_path):
    write_checkpoint(tmp_path / "step_00000001", {"a\x1b[2J\u202e": 1, "b": "x\x1b]0;t\x07"})
    for text in (cli("show", tmp_path / "step_00000001"), cli("ls", tmp_path)):
        assert "\x1b" not in text and "\u202e" not in text and "\x07" not in text


@pytest.mark.parametrize("arguments", [["ls", "/nowhere"], ["dashboard", "/nowhere"]])
def test_a_run_that_is_not_there_is_a_usage_error(cli, arguments):
    assert "no such directory" in cli(*arguments, code=2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ls", "--keep", "last:3"], "--keep goes with --usage"),
        (["ls", "--days", "3"], "--days goes with --failures"),
        (["ls", "--usage", "--metric", "loss"], "not allowed with"),
        (["ls", "--failures", "--usage"], "not allowed with"),
        (["show", "--names", "dp"], "--names goes with --mesh"),
        (["show", "--place", "*: Shard(0)"], "--place goes with --mesh"),
        (["show", "--stats", "--mesh", "2"], "not allowed with"),
        (["show", "--id", "7", "--structure"], "not allowed with"),
    ],
)
def test_options_that_would_be_ignored_are_usage_errors(run, capsys, arguments, text):
    try:
        code = main([*arguments, str(run)])
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and text in capsys.readouterr().err


def test_a_path_that_would_be_ignored_is_a_usage_error(cli, run):
    assert "takes no PATH" in cli("show", run, "model", "--stats", code=2)
    assert "takes no PATH" in cli("show", run / "step_00000200", "model", "--mesh", "2", code=2)


def test_usage_of_a_directory_of_runs_is_that_of_each_run(cli, tmp_path):
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name / "step_00000001", step=1)
    rows = json.loads(cli("ls", "--usage", "--json", tmp_path))
    assert [row["run"] for row in rows] == [str(tmp_path / name) for name in ("a", "b")]
    assert all(row["checkpoints"] == 1 and row["nbytes"] for row in rows)
    assert "1 checkpoint" in cli("ls", "--usage", tmp_path)


def test_unknown_commands_are_usage_errors(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2


def test_alone_it_shows_every_command_and_the_exit_codes(cli, capsys):
    shown = cli()
    for name, parser in new_parser()._subparsers._group_actions[0].choices.items():
        assert EXIT_CODES in parser.format_help(), name
        assert name in ("demo", "bench", "completion") or "--json" in parser.format_help(), name
    with pytest.raises(SystemExit, match="0"):
        main(["verify", "--help"])
    assert EXIT_CODES in capsys.readouterr().out
    commands = (
        "ls show verify diff rebuild-index flatten gc rm pin unpin convert report trace dashboard demo bench completion"
    )
    assert re.findall(r"^    ([a-z][a-z-]+)\b", shown, re.M) == commands.split() and "exit codes:" in shown


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["sh"], "show"),
        (["verify", "--rep"], "--repair"),
        (["convert", "--to", ""], "treeckpt torch dcp safetensors"),
        (["completion", "z"], "zsh"),
        (["ls", "--j"], "--json"),
        (["ls", "ru"], ""),
    ],
)
def test_a_shell_completes_commands_options_and_choices(cli, typed, offered):
    script, words = cli("completion", "bash"), " ".join(map(shlex.quote, ["treeckpt", *typed]))
    assert cli("completion", "zsh").endswith(f"bashcompinit\n{script}")
    ask = f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _treeckpt; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (offered, "")


@pytest.mark.parametrize(("command", "target"), [("report", "--html"), ("trace", "--out")])
def test_an_export_onto_a_full_disk_is_one_message_and_leaves_nothing(cli, run, tmp_path, command, target):
    with small_disk(tmp_path / "disk", 1 << 16) as disk:
        filler = fill(disk, 0)
        text = cli(command, run / "step_00000100", target, disk / "file", code=1)
        assert re.search(rf"^treeckpt: {disk}/file: expected files that can be written, found .*No space left", text)
        assert "Free space on the disk, or save elsewhere" in text and list(disk.iterdir()) == [filler]


def test_an_error_of_the_system_is_one_message(cli, run, tmp_path):
    text = cli("report", run, "--html", tmp_path / "no" / "x.html", code=1)
    assert "No such file or directory" in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("command", "target", "keys"),
    [("report", "--html", {"file", "nbytes"}), ("trace", "--out", {"file", "spans", "late_call", "clocks"})],
)
def test_what_an_export_wrote_as_json(cli, run, tmp_path, command, target, keys):
    found = json.loads(cli(command, run / "step_00000100", target, tmp_path / "file", "--json"))
    assert found["file"] == str(tmp_path / "file") and set(found) == keys


def test_dashboard_prints_its_address_as_json(run):
    command = [sys.executable, "-m", "treeckpt", "dashboard", str(run), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        found = json.loads(process.stdout.readline())
        assert (
            found["pid"] == process.pid
            and httpx.get(found["url"], timeout=60, follow_redirects=True).status_code == 200
        )
    finally:
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=300)[0] == ""


def test_dashboard_beyond_loopback_demands_a_token(cli, run):
    assert "--token" in cli("dashboard", run, "--host", "0.0.0.0", code=2)


def test_dashboard_takes_a_file_of_another_program_and_no_other_file(cli, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "notes.txt").write_text("no checkpoint")
    assert "--token" in cli("dashboard", tmp_path / "model.safetensors", "--host", "0.0.0.0", code=2)
    assert "no such directory" in cli("dashboard", tmp_path / "notes.txt", "--host", "0.0.0.0", code=2)


def test_dashboard_refuses_options_without_sense(cli, run):
    assert "no policy" in cli("dashboard", run, "--keep", "last:none", code=2)
    assert "inside the run" in cli("dashboard", run, "--cache", run / "cache", code=2)
    assert not (run / "cache").exists()


@pytest.mark.parametrize("error", [KeyError("uid not found: 4711"), ImportError("no module pwd")])
def test_dashboard_and_verify_name_a_user_without_a_name_by_number(monkeypatch, capsys, error):
    def fail():
        raise error

    monkeypatch.setattr("getpass.getuser", fail)
    _announce("http://127.0.0.1:8265/", "127.0.0.1", 8265)
    assert f" {os.getuid()}@" in capsys.readouterr().out and this_user("x").startswith(f"{os.getuid()}@")


def test_dashboard_on_a_port_in_use_names_the_option_for_a_free_one(run, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["dashboard", str(run), "--port", str(port)]) == 2
    text = capsys.readouterr().err
    assert f"127.0.0.1:{port} cannot be listened on" in text and "--port 0 takes a free one" in text


def test_dashboard_serves_on_a_free_port_and_says_where(run):
    command = [sys.executable, "-m", "treeckpt", "dashboard", str(run), "--port", "0", "--token", "0123456789abcdef"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        first, second = process.stdout.readline(), process.stdout.readline()
        address = first.removeprefix("treeckpt dashboard: ").strip()
        port = address.split(":")[2].split("/")[0]
        assert f"ssh -L {port}:127.0.0.1:{port} " in second
        assert httpx.get(address.partition("?")[0], timeout=60).status_code == 401
        assert httpx.get(address, timeout=60).status_code == 200
    finally:
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and "Traceback" not in rest and "0123456789abcdef" not in rest


def test_neither_the_command_line_nor_the_dashboard_imports_torch(run):
    code = f"""
import sys
from treeckpt._cli.command import EXIT_CODES
from treeckpt._cli.main import main, new_parser
one, two = {str(run / "step_00000100")!r}, {str(run / "step_00000200")!r}
for command in (["ls", {str(run)!r}], ["show", one], ["verify", one], ["diff", one, two]):
    assert main(command) == 0
from treeckpt_dashboard.web.app import create_app
from treeckpt_dashboard.store.library import Library
from treeckpt_dashboard.runs import model
from treeckpt_dashboard.web import server
create_app([{str(run)!r}])
library = Library([{str(run)!r}])
assert library.checkpoints(library.runs[0], wait=300) and model.runs_page(library).runs
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away_is_no_error(run):
    done = subprocess.run(
        f"{sys.executable} -m treeckpt show {run / 'step_00000100'} | head -1",
        shell=True, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("before", [None, "", "0", "1"])
def test_an_option_for_one_command_leaves_the_environment_as_it_was(tmp_path, monkeypatch, before):
    tc.save(tmp_path / "step_00000001", {"n": 1}, step=1)
    monkeypatch.delenv("TREECKPT_FOLLOW_LINKS", raising=False)
    if before is not None:
        monkeypatch.setenv("TREECKPT_FOLLOW_LINKS", before)
    assert main(["show", str(tmp_path / "step_00000001"), "--follow-links"]) == 0
    assert os.environ.get("TREECKPT_FOLLOW_LINKS") == before
