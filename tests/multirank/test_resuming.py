"""A training that is killed and restarted, or told to end, comes to what it would have come to undisturbed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import treeckpt as tc
from treeckpt._core.format.files import parse_file_name, step_name
from treeckpt._runs.catalog import CheckpointInfo
from treeckpt._runs.discovery import scan

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2


@contextlib.contextmanager
def started(*arguments: object, restarts: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)),
        *("--max-restarts", str(restarts), "--monitor-interval", "0.1"),
        *("-m", "tests.multirank.resuming", *map(str, arguments)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def output_of(process: subprocess.Popen[bytes], code: int = 0, *, limit: float = 400) -> str:
    output = process.communicate(timeout=limit)[0].decode(errors="replace")
    assert process.returncode == code, output[-6000:]
    return output


def results_in(out: Path) -> list[dict[str, str]]:
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.slow
def test_a_training_that_is_killed_twice_ends_as_if_it_never_was(tmp_path: Path) -> None:
    with started(tmp_path / "calm", tmp_path / "calm out", 20) as process:
        output_of(process)
    kills = ("--kill", "1:10", "--kill", "0:15")
    with started(tmp_path / "rough", tmp_path / "rough out", 20, *kills, restarts=16) as process:
        output = output_of(process, limit=400)  # gloo may use many attempts up before it connects all ranks
    starts = [int(line.rpartition(" ")[2]) for line in output.splitlines() if " attempt " in line]
    assert len(starts) >= 3 * WORLD and len(set(starts)) == 3, output
    assert sorted(starts)[:2] == [0, 0] and sorted(starts)[-1] in (12, 15)
    assert results_in(tmp_path / "rough out") == results_in(tmp_path / "calm out")
    calm, rough = (
        tc.load(tmp_path / name / step_name(18), fallback=tc.Fallback(per_rank="take")) for name in ("calm", "rough")
    )
    assert calm["schedule"] == rough["schedule"]
    calm_run, rough_run = (scan(tmp_path / name) for name in ("calm", "rough"))
    kept = {info.name for info in calm_run}
    assert kept <= {info.name for info in rough_run}, "both keep the same steps"
    left = [info for info in rough_run if info.name not in kept]
    assert all(map(is_left_for_now, left)), [sorted(os.listdir(info.path)) for info in left]
    assert all(info.status == "complete" for info in rough_run if info.name in kept)


def is_left_for_now(info: CheckpointInfo) -> bool:
    """Whether a kill is why a clean-up leaves a directory until the grace period is over: nothing is in it any more, a
    reader left its lease, or a save its shards.
    """
    names = os.listdir(info.path)
    ids = {kind.save_id for name in names if (kind := parse_file_name(name)) and kind.kind == "shard"}
    return not names or any(name.startswith("lease.") for name in names) or bool(ids - {info.save_id})


@pytest.mark.parametrize("who", [[1], pytest.param([0, 1], marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_makes_all_save_the_same_step_and_exit_well(tmp_path: Path, who: list[int]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    with started(run, out, 0, "--forever") as process:
        before = wait_for_step(out, 5, process)
        for rank in who:
            os.kill(int(Path(f"{out}.{rank}.pid").read_text()), signal.SIGTERM)
        after = max(steps_in(out))
        output_of(process)
    [info] = scan(run)
    assert info.status == "complete" and info.world == WORLD
    assert tc.verify(info.path).ok
    ended = [int(Path(f"{out}.{rank}.step").read_text()) for rank in range(WORLD)]
    assert ended == [info.step] * WORLD, "every rank ended at the step that was saved"
    assert before <= info.step <= after + 50, "and soon"
    assert not Path(f"{out}.0.json").exists(), "none went on to the end"


def wait_for_step(out: Path, step: int, process: subprocess.Popen[bytes]) -> int:
    """Waits until all ranks are at a step or behind it; gives that of the one that is ahead."""
    limit = time.monotonic() + 300
    while min(steps := steps_in(out)) < step:
        assert time.monotonic() < limit and process.poll() is None, f"at steps {steps}; exit {process.poll()}"
        time.sleep(0.05)
    return max(steps)


def steps_in(out: Path) -> list[int]:
    """The step at which each rank is, 0 where it has not said so yet."""
    steps: list[int] = []
    for rank in range(WORLD):
        with contextlib.suppress(FileNotFoundError):
            while not (text := Path(f"{out}.{rank}.step").read_text()):  # it is being written anew
                time.sleep(0.001)
            steps.append(int(text))
    return [*steps, *[0] * (WORLD - len(steps))]
