"""The JavaScript of the dashboard passes the type checker, in lines that fit a screen."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STATIC = ROOT / "dashboard" / "static"
TYPESCRIPT = "7.0.2"


@pytest.fixture(scope="module")
def tsc():
    """The command of the type checker, installed by npm into .cache/ on the first run."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed: JavaScript is not type-checked")
    folder = ROOT / ".cache" / f"typescript-{TYPESCRIPT}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", temporary, f"typescript@{TYPESCRIPT}"]
            installed = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if installed.returncode:
                pytest.skip(f"npm cannot install typescript@{TYPESCRIPT}: {installed.stderr.strip()[-300:]}")
            shutil.move(temporary, folder)
            Path(temporary).mkdir()  # for the context manager to remove
    return folder / "node_modules" / ".bin" / "tsc"


def test_every_script_passes_the_type_checker(tsc):
    command = [tsc, "--noEmit", "--project", STATIC / "jsconfig.json"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_type_checker_sees_every_script(tsc):
    command = [tsc, "--noEmit", "--listFilesOnly", "--project", STATIC / "jsconfig.json"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout.splitlines()
    assert {Path(line).name for line in listed} >= {script.name for script in STATIC.glob("*.js")}


def test_no_line_of_a_script_is_longer_than_120_characters():
    long = [
        f"{script.name}:{number}"
        for script in sorted(STATIC.glob("*.js"))
        for number, line in enumerate(script.read_text().splitlines(), 1)
        if len(line) > 120
    ]
    assert long == []
