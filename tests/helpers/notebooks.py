"""Runs the guides in notebooks/, and renews their stored outputs: `make notebooks`.

`run_quickly` executes the cells of all guides in one process each, forked from one that has torch imported: a kernel
takes seconds to start. `run_in_kernel` has Jupyter do it, with pictures and all.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
_TIME = re.compile(r"(?<![\w.])[0-9][0-9.,]* ?(?:ns|µs|us|ms|s|min)\b")
_DIAGNOSIS = re.compile(r"(?:As long as (?:usual|the last ones): )?[0-9.,]+ x (the median of .*?;).* % of it is .*")
_COLOR = re.compile(r"\x1b\[[0-9;]*m| +$", re.MULTILINE)
_ID = re.compile(r"\b[0-9a-f]{16}\b")


def settled(text: str, *directories: str) -> str:
    """Returns an output without what differs between runs and machines: places, save ids, times, causes, colours."""
    for directory in directories:
        text = text.replace(directory + "/", "").replace(directory, ".")
    text = re.sub(re.escape(tempfile.gettempdir()) + r"/tmp\w+/?", "", text)
    text = _DIAGNOSIS.sub(r"… x \1 … % of it is ….", text)
    return _TIME.sub("… s", _ID.sub("<id>", _COLOR.sub("", text)))


def text_of(cell: Any) -> str:
    """Returns what a cell printed, as it is stored."""
    return "".join("".join(out["text"]) for out in cell.get("outputs", ()) if out["output_type"] == "stream")


def sources_of(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def run_quickly(paths: Sequence[Path], directory: Path, *, times: int = 1) -> dict[str, list[str]]:
    """Executes the cells of notebooks, each in a directory of its own that is created in `directory`.

    Returns:
        By notebook, what each cell printed; the last text is a traceback where a cell failed.
    """
    command = [sys.executable, "-m", __name__, "run", str(directory), str(times), *map(str, paths)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    return {path.stem: json.loads((directory / f"{path.stem}.json").read_text()) for path in paths}


def _run_all(directory: Path, times: int, paths: list[Path]) -> None:
    """Forks a process for each notebook, two at a time."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot  # noqa: F401
    import torch._dynamo  # which optimizers import in their first step
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    import treeckpt.dcp
    import treeckpt.training  # noqa: F401

    running = 0
    for path in paths:
        if running == 2:
            os.wait()
            running -= 1
        if os.fork() == 0:
            code = 1
            try:
                _run_one(path, directory, times)
                code = 0
            finally:
                os._exit(code)
        running += 1
    while running:
        os.wait()
        running -= 1


def _run_one(path: Path, directory: Path, times: int) -> None:
    here, temporary = directory / path.stem / "here", directory / path.stem / "temporary"
    here.mkdir(parents=True)
    temporary.mkdir()
    os.chdir(here)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # functions are pickled by the name of their module
    printed: list[str] = []
    for number, source in enumerate(sources_of(path) * times):
        shown = io.StringIO()
        try:
            with contextlib.redirect_stdout(shown):
                exec(compile(source, f"{path.stem} cell {number}", "exec"), module.__dict__)
        except Exception:
            printed.append(traceback.format_exc())
            break
        printed.append(settled(shown.getvalue(), *map(str, temporary.glob("*")), str(here)))
    (directory / f"{path.stem}.json").write_text(json.dumps(printed))


def run_in_kernel(path: Path, directory: Path) -> Any:
    """Returns the notebook as a fresh kernel leaves it, with settled outputs; raises where a cell fails."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(directory)}}
    NotebookClient(notebook, timeout=300, startup_timeout=300, resources=place, coalesce_streams=True).execute()
    notebook.metadata.language_info = nbformat.NotebookNode(name="python")  # not the version that it ran on
    for cell in notebook.cells:
        cell.get("metadata", {}).pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
        for out in cell.get("outputs", ()):
            if out.output_type == "stream":
                out.text = settled(out.text, str(directory))
            elif "image/png" in out.get("data", {}):
                out.data = {"image/png": out.data["image/png"]}
                out.metadata = {}
    return notebook


def main() -> None:
    """Renews the stored outputs of the notebooks that are named, or of all."""
    import nbformat

    for path in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        with tempfile.TemporaryDirectory() as directory:
            nbformat.write(run_in_kernel(path, Path(directory)), path)
        print(f"{path}  {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        _run_all(Path(sys.argv[2]), int(sys.argv[3]), [Path(name) for name in sys.argv[4:]])
    else:
        main()
