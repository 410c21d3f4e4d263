"""A FIFO, a socket or a device in place of a file or a directory is an error at once, wherever a path is opened."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import treeckpt as tc

_CALLS = """
import os, sys, traceback
import treeckpt as tc
from treeckpt._cli.main import main
from treeckpt._runs.run import RunDirectory

other, *paths = sys.argv[1:]
path = ''
calls = {
    "load": lambda: tc.load(path),
    "like": lambda: tc.load(path, {"n": 0}),
    "load_into": lambda: tc.load_into(path, {"n": 0}),
    "inspect": lambda: tc.inspect(path),
    "verify": lambda: tc.verify(path),
    "convert": lambda: tc.convert.convert(path, other),
    "Manager": lambda: tc.Manager(path),
    "RunDirectory": lambda: RunDirectory(path).checkpoints(),
    "save": lambda: tc.save(path, {"n": 1}),
    "files": lambda: tc.save(other, {"n": 1}, files={"x": path}),
    "show": lambda: main(["show", path]),
    "rules": lambda: main(["show", os.environ["GOOD"], "--rules", path]),
    "ls": lambda: main(["ls", path]),
    "cli verify": lambda: main(["verify", path]),
    "diff": lambda: main(["diff", path, path]),
    "cli convert": lambda: main(["convert", path, other]),
    "gc": lambda: main(["gc", path]),
    "dashboard": lambda: main(["dashboard", path, "--port", "0"]),
}
for path in paths:
    for name, call in calls.items():
        try:
            ended = f"returned {call()}"
        except tc.TreeckptError as error:
            ended = f"refused {error}"
        print(f"@ {path}: {name}: {ended}", flush=True)
"""


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    tc.save(tmp_path / "good", {"n": 1})
    kinds = {f"{tmp_path}/x.pt": "a FIFO", f"{tmp_path}/fifo": "a FIFO", f"{tmp_path}/x.safetensors": "a socket"}
    kinds[f"{tmp_path}/x.bin"] = "a device"
    os.mkfifo(tmp_path / "x.pt")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "x.bin").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{tmp_path}/x.safetensors")
    out = subprocess.run(
        [sys.executable, "-c", _CALLS, tmp_path / "other", *kinds],
        env={**os.environ, "GOOD": str(tmp_path / "good")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert out.returncode == 0, (out.stdout, out.stderr)
    ends = [line[2:].split(": ", 2) for line in out.stdout.splitlines() if line.startswith("@ ")]
    assert len(ends) == len(kinds) * 18, (out.stdout, out.stderr)
    assert not [end for end in ends if not end[2].startswith(("refused", "returned 1", "returned 2"))]
    told = ("load", "inspect", "Manager")
    assert not [end for end in ends if end[1] in told and kinds[end[0]] not in end[2]]


def test_a_checkpoint_of_another_program_with_a_fifo_inside_is_refused_at_once(tmp_path: Path) -> None:
    for number, name in enumerate((".metadata", "0.metadata", "model.safetensors", "PART_00000.pt")):
        directory = tmp_path / f"{number}"
        directory.mkdir()
        os.mkfifo(directory / name)
    script = (
        "import sys, treeckpt as tc\n"
        "for path in sys.argv[1:]:\n"
        "    try: print('loaded', tc.load(path))\n"
        "    except tc.TreeckptError as error: print('refused', error)\n"
    )
    paths = [tmp_path / f"{number}" for number in range(4)]
    out = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, timeout=60)
    assert out.stdout.count("refused") == 4, (out.stdout, out.stderr)
