"""Commands on damaged checkpoints: one message and an exit code, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.corruption import flip
from tests.helpers.world import reseal, shards_of
from treeckpt._cli.main import main
from treeckpt._core.format.index import INDEX_NAME


@pytest.fixture
def step(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "step_00000001"
    tc.save(path, {"w": np.arange(9), "b": [1, "x"]}, step=1)
    return path


def damage(step: Path, name: str) -> None:
    (shard,) = shards_of(step)
    (timings,) = step.glob("timings.*")
    index, data = step / INDEX_NAME, shard.read_bytes()
    if name == "index flipped":
        index.write_bytes(flip(index.read_bytes(), 200))
    elif name == "index empty":
        index.write_bytes(b"")
    elif name == "index a directory":
        index.unlink()
        index.mkdir()
    elif name == "index gone":
        index.unlink()
    elif name == "index hostile":
        reseal(step, lambda document: document["index"].update(world=1 << 60))
    elif name == "index of endless values":
        reseal(step, lambda document: document["index"].update(metadata={"metrics": ["int", ["9" * 100_000]]}))
    elif name == "shard flipped":
        shard.write_bytes(flip(data, len(data) - 1))
    elif name == "header flipped":
        shard.write_bytes(flip(data, 60))
    elif name == "shard cut":
        shard.write_bytes(data[:5000])
    elif name == "shard gone":
        shard.unlink()
    elif name == "timings flipped":
        timings.write_bytes(flip(timings.read_bytes(), 60))
    elif name == "timings a link":
        timings.unlink()
        timings.symlink_to(timings.name)
    elif name == "records of zeros":
        for record in ("progress-00000.0123456789abcdef.json", "lease.0123456789abcdef.json", "pinned.json"):
            (step / record).write_bytes(bytes(5000))
    else:
        raise AssertionError(name)


DAMAGES = (
    "index flipped", "index empty", "index a directory", "index gone", "index hostile", "index of endless values",
    "shard flipped", "header flipped", "shard cut", "shard gone", "timings flipped", "timings a link",
    "records of zeros",
)  # fmt: skip
COMMANDS = {
    "ls": lambda step: ["ls", step.parent],
    "show": lambda step: ["show", step],
    "show a leaf": lambda step: ["show", step, "w"],
    "verify": lambda step: ["verify", step],
    "diff": lambda step: ["diff", step, step],
    "rebuild-index": lambda step: ["rebuild-index", step],
    "repair": lambda step: ["verify", step, "--repair"],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_every_command_ends_with_a_message(step: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage(step, name)
    for command in COMMANDS.values():
        for options in ([], ["--json"]):
            code = main([*map(str, command(step)), *options])
            out, err = capsys.readouterr()
            assert code in (0, 1), f"{command(step)}: {out}{err}"
            assert out or err
            assert "Traceback" not in err and len(err) < 5000
            if options and code == 0:
                json.loads(out)


@pytest.mark.parametrize("name", ["index flipped", "header flipped", "timings flipped", "index gone"])
def test_repair_says_what_it_did_and_ends_with_0(step: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage(step, name)
    assert main(["verify", str(step)]) == 1
    capsys.readouterr()
    assert main(["verify", str(step), "--repair"]) == 0
    out, _ = capsys.readouterr()
    assert "repaired" in out and "intact" in out
    assert main(["verify", str(step)]) == 0


def test_repair_says_what_is_lost_and_ends_with_1(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(step, "shard flipped")
    assert main(["verify", str(step), "--repair"]) == 1
    out, _ = capsys.readouterr()
    assert "lost: w" in out
    assert main(["verify", str(step), "--repair", "--json"]) == 1
    found = json.loads(capsys.readouterr()[0])
    assert found["ok"] is False and found["report"]["problems"][0][-1] == ["w"]


def test_a_real_process_prints_no_traceback(step: Path) -> None:
    damage(step, "index hostile")
    done = subprocess.run(
        [sys.executable, "-m", "treeckpt", "verify", str(step)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr and INDEX_NAME in done.stderr
