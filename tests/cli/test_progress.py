"""Commands that may take long show a bar on a terminal; elsewhere, and with --json, nothing unless it is asked for."""

import io
import json
import re
import sys

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.samples import gpt_state, write_checkpoint
from treeckpt._cli.main import main
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.text import bytes_text
from treeckpt._runs import progress_bar

COMMANDS = [
    ("reading", "ls", "RUN"),
    ("reading the index", "show", "RUN/step_00000001"),
    ("verifying", "verify", "RUN/step_00000001"),
    ("verifying", "verify", "RUN/step_00000001", "--repair"),
    ("verifying 1 checkpoint", "verify", "RUN"),
    ("comparing", "diff", "RUN/step_00000001", "RUN/step_00000001", "--values"),
    ("deleting", "gc", "RUN", "--keep-last", "1"),
    ("applying the rules", "show", "RUN/step_00000001", "--rules", "RUN.rules"),
    ("reading values", "show", "RUN/step_00000001", "model/wte.weight"),
    ("reading the shards", "rebuild-index", "RUN/step_00000001", "--replace"),
    ("converting", "convert", "RUN/step_00000001", "RUN-converted", "--to", "treeckpt", "--overwrite"),
    ("reading", "report", "RUN", "--html", "RUN.html"),
    ("reading", "report", "RUN/step_00000001", "--html", "RUN.html"),
    ("writing the spans of ranks", "trace", "RUN/step_00000001", "--out", "RUN.json"),
]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def run(tmp_path):
    write_checkpoint(tmp_path / "run" / "step_00000001", gpt_state(layers=1), step=1)
    (tmp_path / "run.rules").write_text("model/* -> m/*")
    return tmp_path / "run"


@pytest.fixture
def errors_of(run, monkeypatch):
    """Runs a command whose bar has no patience; returns what it writes to a stream of errors."""
    monkeypatch.setattr(progress_bar, "BAR_DELAY_SECONDS", 0)

    def call(stream, *command):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            assert main([part.replace("RUN", str(run)) for part in command]) == 0
        return stream.getvalue()

    return call


@pytest.mark.parametrize(("text", "command"), [(text, command) for text, *command in COMMANDS])
def test_a_command_shows_a_bar_on_a_terminal_only(errors_of, capsys, text, command):
    assert text in errors_of(Terminal(), *command)
    assert errors_of(io.StringIO(), *command) == ""
    capsys.readouterr()
    assert errors_of(Terminal(), *command, "--json") == ""
    json.loads(capsys.readouterr().out)
    lines = errors_of(io.StringIO(), *command, "--json", "--progress").splitlines()
    assert any(line.startswith(text) for line in lines), lines
    assert all(re.fullmatch(r".+: .+/s, (.+ left|after .+)", line) for line in lines), lines
    json.loads(capsys.readouterr().out)


def test_a_comparison_of_values_knows_how_much_it_has_to_read(run, capsys, errors_of):
    for step, added in ((2, 0), (3, 1), (4, 0)):
        tc.save(run / f"step_{step:08d}", {"a": np.arange(100_000.0) + added}, step=step)

    def lines(other):
        return errors_of(io.StringIO(), "diff", "RUN/step_00000002", other, "--values", "--progress").splitlines()

    assert re.match(r"comparing: (1\.6\d? MB) of \1, ", lines("RUN/step_00000003")[-1]), "a of both, and headers"
    assert re.match(r"comparing: (\S+ kB) of \1, ", lines("RUN/step_00000004")[-1]), "headers alone"


def test_a_comparison_counts_an_array_that_each_rank_has_of_its_own_once_for_each(run, capsys, errors_of):
    for step in (2, 3):
        write_checkpoint(run / f"step_{step:08d}", {"own": tc.PerRank(np.full(100_000, step))}, world=3, step=step)
    command = ("diff", "RUN/step_00000002", "RUN/step_00000003", "--values", "--progress")
    assert re.match(r"comparing: (4\.8\d? MB) of \1, ", errors_of(io.StringIO(), *command).splitlines()[-1])


@pytest.mark.parametrize("kind", ["treeckpt", "torch", "dcp", "safetensors"])
def test_a_conversion_knows_how_much_it_has_to_read(run, capsys, errors_of, kind):
    source = run.parent / ("of.safetensors" if kind == "safetensors" else "of")
    tc.save(run / "step_00000002", {"a": np.arange(300_000.0), "b": {"c": np.arange(100_000.0)}}, step=2)
    tc.convert.convert(run / "step_00000002", source, to=kind)
    for select, read in (((), r"3\.2"), (("--select", "a"), r"2\.4")):
        command = ("convert", f"{source}", f"RUN-{len(select)}", "--to", "treeckpt", *select, "--progress")
        lines = errors_of(io.StringIO(), *command).splitlines()
        assert re.match(rf"converting: ({read}\d? MB) of \1, .+ after", lines[-1]), lines


def test_a_deletion_knows_how_many_checkpoints_go(run, capsys, errors_of):
    for step in (2, 3):
        tc.save(run / f"step_{step:08d}", {"a": step}, step=step)
    lines = errors_of(io.StringIO(), "gc", "RUN", "--keep-last", "1", "--progress").splitlines()
    assert re.search(r": 1 of 2, .+ left$", lines[-1]), lines


def test_a_rebuild_knows_how_many_shards_it_has_to_read_and_the_index_counts_as_read(run, capsys, errors_of):
    def last(*command):
        return errors_of(io.StringIO(), *command, "--progress").splitlines()[-1]

    assert re.match(r"reading the shards: 4 of 4, ", last("rebuild-index", "RUN/step_00000001", "--replace"))
    size = bytes_text(sum(file.stat().st_size for file in (run / "step_00000001").glob("*.json")))
    assert last("show", "RUN/step_00000001").startswith(f"reading the index: {size}, "), "and the timings"
    tc.save(run / "step_00000002", {"a": 1}, step=2)
    both = sum((run / name / INDEX_NAME).stat().st_size for name in ("step_00000001", "step_00000002"))
    assert last("diff", "RUN/step_00000001", "RUN/step_00000002").startswith(f"comparing: {bytes_text(both)}, ")


def test_a_trace_counts_ranks_and_a_report_checkpoints(run, capsys, errors_of):
    lines = errors_of(io.StringIO(), "trace", "RUN/step_00000001", "--out", "RUN.json", "--progress").splitlines()
    assert re.match(r"writing the spans of ranks: (\d+) of \1, ", lines[-1]), lines
    lines = errors_of(io.StringIO(), "report", "RUN", "--html", "RUN.html", "--progress").splitlines()
    assert re.match(r"reading .+: 1 of 1, ", lines[-1]), lines
