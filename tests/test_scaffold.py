"""What pyproject.toml and constraints.txt say holds for this code, and for the wheel built from it."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml

from tests.helpers.samples import write_run

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"treeckpt": "treeckpt", "treeckpt_dashboard": "dashboard"}
"""Import name of each top-level package -> its folder in the checkout."""


@pytest.fixture(scope="module")
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the sdist of a copy, so that neither an old build/ nor a parallel run can slip into it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", cwd=source)
    [built] = (source / "dist").glob("treeckpt-*.whl")
    return built


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def source_files() -> set[str]:
    """Every file that an installed treeckpt needs, as it is named in a wheel."""
    return {
        (Path(name) / path.relative_to(ROOT / folder)).as_posix()
        for name, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", "screenshots"} & set(path.parts)
    }


def test_every_package_is_listed_in_pyproject(pyproject):
    there = {str(Path(file).parent).replace("/", ".") for file in source_files() if file.endswith("__init__.py")}
    assert set(pyproject["tool"]["setuptools"]["packages"]) == there


def test_all_package_data_that_is_declared_is_there(pyproject):
    data = pyproject["tool"]["setuptools"]["package-data"]
    declared = [(FOLDERS[name], pattern) for name, patterns in data.items() for pattern in patterns]
    assert [(folder, pattern) for folder, pattern in declared if not any((ROOT / folder).glob(pattern))] == []


def test_every_folder_with_modules_is_a_package():
    with_modules = {Path(file).parent for file in source_files() if file.endswith(".py")}
    assert [str(f) for f in sorted(with_modules) if f"{f.as_posix()}/__init__.py" not in source_files()] == []


def test_installed_versions_are_the_pinned_ones():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    canonical = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    installed = {re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version.split("+")[0] for d in distributions()}
    shared = canonical.keys() & installed.keys()
    assert {n: installed[n] for n in shared} == {n: canonical[n] for n in shared}
    assert pins["torch"] == "2.13.0"


def test_wheel_holds_every_source_file(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert source_files() <= set(archive.namelist())


def test_wheel_is_small_and_needs_few_packages(wheel, pyproject):
    assert wheel.stat().st_size < 2 << 20
    needed = {re.split(r"[<>=]", requirement)[0] for requirement in pyproject["project"]["dependencies"]}
    assert needed == {"ml_dtypes", "msgspec", "numpy", "optree", "rich", "xxhash"}


def test_wheel_works_outside_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
        cwd=tmp_path,
    )
    code = "import treeckpt, treeckpt_dashboard.web.app; print(treeckpt.__file__); print(treeckpt_dashboard.__file__)"
    files = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert all(file.startswith(str(site)) for file in files), files
    write_run(tmp_path / "run", steps=(100, 200))
    program = str(site / "bin" / "treeckpt")
    assert "dashboard" in run(program, "--help", cwd=tmp_path, PYTHONPATH=str(site))
    assert "step_00000200" in run(program, "ls", "run", cwd=tmp_path, PYTHONPATH=str(site))


def test_workflows_are_valid():
    checked = [str(path) for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
    assert checked and not run(str(Path(sys.executable).with_name("actionlint")), *checked, cwd=ROOT)


def test_the_workflow_and_the_metadata_name_the_same_pythons(pyproject):
    metadata = re.findall(r"Python :: (3\.\d+)", "\n".join(pyproject["project"]["classifiers"]))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["linux"]["strategy"]["matrix"]["python"] == metadata
    assert pyproject["project"]["requires-python"] == f">={metadata[0]}"


def test_hooks_run_the_tools_of_make_check():
    recipe = (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0]
    tools = re.findall(r"\$\(BIN\)/([\w-]+(?: check| format)?)", recipe)
    [local] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook["entry"].removeprefix(".venv/bin/") for hook in local["hooks"]]
    assert len(tools) == 4 and all(any(hook.startswith(tool) for hook in hooks) for tool in tools), (tools, hooks)


def test_editable_install_finds_the_checkout_from_elsewhere(tmp_path):
    code = "import treeckpt, treeckpt_dashboard; print(treeckpt.__file__); print(treeckpt_dashboard.__file__)"
    files = run(sys.executable, "-c", code, cwd=tmp_path).split()
    assert files == [str(ROOT / folder / "__init__.py") for folder in FOLDERS.values()]


def test_no_tracked_file_is_over_one_mebibyte():
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    sizes = {name: (ROOT / name).stat().st_size for name in names if name and (ROOT / name).is_file()}
    assert [name for name, size in sizes.items() if size > 1 << 20] == []


def test_each_file_of_tests_stays_on_one_worker():
    files = ["tests/test_error_classes.py", "tests/core/format/test_save_progress.py"]
    shown = run(sys.executable, "-m", "pytest", "-n", "2", "-v", "-p", "no:cacheprovider", *files, cwd=ROOT)
    workers = {file: set(re.findall(rf"^\[(gw\d)\].* PASSED {file}::", shown, re.M)) for file in files}
    assert sorted(map(len, workers.values())) == [1, 1] and len(set.union(*workers.values())) == 2, shown
