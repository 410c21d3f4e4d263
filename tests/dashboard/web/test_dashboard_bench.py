"""The benchmark of the dashboard measures every bar."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_every_bar_is_measured(tmp_path):
    pytest.importorskip("playwright.sync_api")
    # a process of its own: two of playwright's drivers do not get on in one
    command = [sys.executable, "-m", "tests.bench.dashboard", "--small", "--folder", str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    rows = [line for line in done.stdout.splitlines() if " bar " in line]
    assert len(rows) >= 20 and [row for row in rows if row.endswith("not measured")] == []
