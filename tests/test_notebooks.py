"""Every guide runs, prints what is stored with it, leaves no file, and holds nothing of the machine that it ran on."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.notebooks import NOTEBOOKS, ROOT, run_in_kernel, run_quickly, sources_of, text_of
from tests.helpers.samples import write_checkpoint
from treeckpt._cli.main import main
from treeckpt_dashboard.runs import metrics

STEMS = [path.stem for path in NOTEBOOKS]
each_guide = pytest.mark.parametrize("path", NOTEBOOKS, ids=STEMS)


def cells_of(path: Path) -> list[Any]:
    return json.loads(path.read_text())["cells"]


def stored_texts(path: Path) -> list[str]:
    return [text_of(cell) for cell in cells_of(path) if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    directory = tmp_path_factory.mktemp("guides")
    return directory, run_quickly(NOTEBOOKS, directory)


def test_the_guides_are_numbered_and_each_names_the_next() -> None:
    assert [int(stem[:2]) for stem in STEMS] == list(range(1, len(STEMS) + 1)) and len(STEMS) == 11
    for path, following in zip(NOTEBOOKS, STEMS[1:], strict=False):
        *_, last = (cell for cell in cells_of(path) if cell["cell_type"] == "markdown")
        assert f"({following}.ipynb)" in "".join(last["source"])


@each_guide
def test_the_guide_prints_what_is_stored_with_it(path: Path, printed: tuple[Path, dict[str, list[str]]]) -> None:
    assert printed[1][path.stem] == stored_texts(path)


@each_guide
def test_the_guide_leaves_no_file(path: Path, printed: tuple[Path, dict[str, list[str]]]) -> None:
    assert [file for file in (printed[0] / path.stem).rglob("*") if file.is_file()] == []


@each_guide
def test_stored_outputs_are_small_and_hold_no_path_host_or_time(path: Path) -> None:
    assert path.stat().st_size < 300_000
    assert json.loads(path.read_text())["metadata"]["language_info"] == {"name": "python"}
    outputs = [out for cell in cells_of(path) for out in cell.get("outputs", ())]
    assert outputs
    assert {out.get("name", "stdout") for out in outputs} == {"stdout"}  # no warnings
    for out in outputs:
        assert set(out.get("data", {})) <= {"image/png"}
        for picture in out.get("data", {}).values():
            assert base64.b64decode("".join(picture)).startswith(b"\x89PNG")
    text = "\n".join(stored_texts(path))
    assert not re.search(
        r"(?<!\w)/(tmp|home|work|root|usr|var)\b|localhost|\b[0-9a-f]{16}\b|\b20\d\d-\d\d-\d\d\b", text
    )


@each_guide
def test_links_and_pictures_of_the_guide_exist(path: Path) -> None:
    text = "\n".join("".join(cell["source"]) for cell in cells_of(path) if cell["cell_type"] == "markdown")
    assert len(text.split()) < 900  # five minutes with the code
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    places = [(path.parent / target.partition("#")[0]).resolve() for target in targets if "://" not in target]
    assert [place for place in places if not place.exists() or ROOT not in place.parents] == []


@pytest.mark.parametrize("world", [1, 3])
def test_the_code_on_a_slow_save_runs_on_a_save_of_the_readers_own(tmp_path: Path, world: int) -> None:
    [path] = [path for path in NOTEBOOKS if path.stem == "08_a_slow_save"]
    sample, *cells = sources_of(path)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as shown, mpl.rc_context({"backend": "agg"}):
        exec(sample, names)
        if world == 1:
            tc.save(tmp_path / "c", {"w": np.ones(9)})
        else:  # its record names no hosts
            write_checkpoint(tmp_path / "c", {"w": tc.PerRank(np.ones(9))}, world=world)
        assert main(["trace", str(tmp_path / "c"), "--out", str(tmp_path / "trace.json")]) == 0
        names["trace"] = json.loads((tmp_path / "trace.json").read_text())
        for cell in cells:
            exec(cell, names)
    assert re.search(r"^write +\d", shown.getvalue(), re.M) and names["ranks"] == list(range(world))
    names["plt"].close("all")


def test_the_guides_name_metrics_and_states_that_the_dashboard_has() -> None:
    text = "\n".join("".join(cell["source"]) for path in NOTEBOOKS for cell in cells_of(path))
    named = set(re.findall(r"\btreeckpt_(?!dashboard)([a-z_]+)", text))
    assert len(named) > 3 and named <= set(metrics._HELP)
    assert set(re.findall(r'status="(\w+)"', text)) <= set(metrics._STATUSES)


# with a kernel --------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@each_guide
def test_a_kernel_gives_the_outputs_that_are_stored(path: Path, tmp_path: Path) -> None:
    fresh = [cell for cell in run_in_kernel(path, tmp_path).cells if cell.cell_type == "code"]
    stored = [cell for cell in cells_of(path) if cell["cell_type"] == "code"]
    assert [text_of(cell) for cell in fresh] == stored_texts(path)
    kinds = [[sorted(out.get("data", [out["output_type"]])) for out in cell["outputs"]] for cell in (*fresh, *stored)]
    assert kinds[: len(fresh)] == kinds[len(fresh) :]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_guides_run_twice_in_one_process(tmp_path: Path) -> None:
    for path, printed in run_quickly(NOTEBOOKS, tmp_path, times=2).items():
        half = len(printed) // 2
        assert printed[:half] == printed[half:], path
