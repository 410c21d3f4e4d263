"""Every notebook runs from top to bottom, twice from one directory, leaves no file, and is committed without output."""

from __future__ import annotations

import copy
import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs_again_and_leaves_no_file(
    path: pathlib.Path, times: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    notebook = nbformat.read(path, as_version=4)
    cells = copy.deepcopy(notebook.cells)
    for time in range(1, times):
        notebook.cells += [nbformat.from_dict({**cell, "id": f"again-{time}-{n}"}) for n, cell in enumerate(cells)]
    NotebookClient(notebook, timeout=300, startup_timeout=300, resources={"metadata": {"path": str(here)}}).execute()
    assert not list(here.iterdir())
    assert not [file for file in temporary.rglob("*") if file.suffix in {".json", ".safetensors", ".pt", ".py"}]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_committed_without_output(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
