"""Commands that may take long show a bar on a terminal; elsewhere, and with --json, nothing unless it is asked for."""

import io
import json
import re
import sys

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.samples import gpt_state, write_checkpoint
from treeckpt.cli.main import main
from treeckpt.runs import progress_bar

COMMANDS = [
    ("reading", "ls", "RUN"),
    ("reading the index", "show", "RUN/step_00000001"),
    ("verifying", "verify", "RUN/step_00000001"),
    ("verifying", "verify", "RUN/step_00000001", "--repair"),
    ("comparing", "diff", "RUN/step_00000001", "RUN/step_00000001", "--values"),
    ("deleting", "gc", "RUN", "--keep-last", "1"),
    ("reading values", "show", "RUN/step_00000001", "model/wte.weight"),
    ("reading the shards", "rebuild-index", "RUN/step_00000001", "--replace"),
    ("converting", "convert", "RUN/step_00000001", "RUN-converted", "--to", "treeckpt", "--overwrite"),
]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def run(tmp_path):
    write_checkpoint(tmp_path / "run" / "step_00000001", gpt_state(layers=1), step=1)
    return tmp_path / "run"


@pytest.fixture
def errors_of(run, monkeypatch):
    """Runs a command whose bar has no patience; returns what it writes to a stream of errors."""
    monkeypatch.setattr(progress_bar, "PATIENCE", 0)

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
