"""No name in a checkpoint sends a control sequence, a faked line or a change of direction to a terminal or a log."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import treeckpt as tc
from treeckpt._cli.main import main
from treeckpt._runs.run import RunDirectory

ODD = ["\x1b[2J", "\x1b]0;t\x07", "\r", "\n", "\x85", "\x9b31m", "\u202e", "\u2066", "\u2028", "\x7f", "\u200f", "\t"]
NAMES = st.lists(st.sampled_from([*ODD, "a", "é", "字", "~"]), min_size=1, max_size=6).map("".join)


def hidden(text: str) -> list[str]:
    """The characters of an output, but for the ends of its lines, that a terminal obeys in place of showing them."""
    return [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


@contextlib.contextmanager
def everything_written() -> Iterator[list[str]]:
    """Collects what goes to both streams, to the log and to warnings."""
    written, out, err, log = list[str](), io.StringIO(), io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("treeckpt").addHandler(handler)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            yield written
    finally:
        logging.getLogger("treeckpt").removeHandler(handler)
        written += [out.getvalue(), err.getvalue(), log.getvalue(), *(f"{one.message}" for one in warned)]


def told(call: Any, *arguments: Any, **options: Any) -> None:
    """Prints what a call returns or raises, as a program would."""
    try:
        print(call(*arguments, **options))
    except tc.TreeckptError as error:
        print(error)


def test_no_odd_name_sends_control_characters(tmp_path: Path) -> None:
    check_outputs(tmp_path, "".join(ODD), "".join(reversed(ODD)))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NAMES, other=NAMES)
def test_no_name_sends_control_characters(tmp_path: Path, name: str, other: str) -> None:
    check_outputs(tmp_path, name, other)


def check_outputs(tmp_path: Path, name: str, other: str) -> None:
    run = Path(os.path.realpath(tmp_path)) / f"{len(os.listdir(tmp_path))}{name}"
    tree = {name: np.arange(3), "inner": {other + name: other, "x": 1}}
    step = run / "step_00000001"
    tc.save(step, tree, step=1, custom_metadata={name: other, "metrics": {other: 1.0}})
    tc.save(run / f"odd{name}", {other: np.ones(2), "n": 1})
    save_file({"w": np.ones(2), name: np.ones(1)}, run / f"odd{other}.safetensors")
    torch.save({name: torch.ones(2)}, run / f"other{name}.pt")
    shard = next((run / f"odd{name}").glob("shard*"))
    shard.write_bytes(shard.read_bytes()[:-8] + b"?" * 8)
    paths = [str(step), str(run), str(run / f"odd{name}"), str(run / f"odd{other}.safetensors"), str(run / "no" / name)]
    with everything_written() as written:
        for path in paths:
            for command in ("show", "ls", "verify", "gc"):
                main([command, path])
                main([command, path, "--json"])
            told(tc.load, path, {"w": ..., other: torch.ones(4)})
            told(tc.verify, path)
            told(tc.inspect, path) if path.startswith("no") else None
        main(["show", str(step), "--structure"])
        main(["show", str(step), "inner"])
        main(["show", str(step), name])
        main(["diff", paths[0], paths[2]])
        main(["convert", paths[0], str(run / "out.safetensors")])
        told(tc.convert.convert, paths[0], run / f"{name}.pt", lossy=True)
        told(tc.load_into, paths[0], {name: np.zeros(3), "more" + other: np.zeros(1)}, strict=False)
        told(RunDirectory(run).clean, [tc.policy.Last(1)])
        told(tc.save, step, {name: object()}, overwrite=True)
        logging.getLogger("treeckpt").warning("left out: %s", name)
    assert [found for text in written if (found := hidden(text))] == []


@pytest.mark.parametrize("fake", ["\n  metadata is fine", "\x1b[1A"])
def test_the_name_of_a_fact_cannot_fake_a_line(tmp_path: Path, fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    tc.save(tmp_path / "c", {"n": 1}, custom_metadata={f"loss{fake}": 1})
    assert main(["show", str(tmp_path / "c")]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert line.startswith("metadata loss\\x") and line.endswith("1")


def test_an_error_keeps_the_name_itself() -> None:
    error = tc.TreeError("a\x1b[2J", expected="x\ny", found="\u202e")
    assert (error.path, error.expected, error.found) == ("a\x1b[2J", "x\ny", "\u202e")
    assert str(error) == "a\\x1b[2J: expected x\\x0ay, found \\u202e"


def test_the_statistics_of_a_path_that_is_no_text_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / os.fsdecode(b"step\xff"))
    tc.save(path, {"w": np.arange(9.0)})
    assert main(["verify", "--statistics", path]) == 0
    assert "14.283" in capsys.readouterr().out
