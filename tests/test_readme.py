"""Python in the README and in the prose of guides runs; commands, links and figures of the pages are right."""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks
from treeckpt._cli import main
from treeckpt._cli.command import EXIT_CODES
from treeckpt._core.format import shard_header
from treeckpt._io.comm.comm import Comm
from treeckpt._io.storage import obstore
from treeckpt._io.storage.requests_in_flight import PER_CPU, START
from treeckpt._saving import shard_files
from treeckpt.convert import FORMATS, SOURCES, _conversion, _register

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FORMATS_PAGE = (ROOT / "treeckpt/convert/FORMATS.md").read_text()


def prose_of(guide: Path) -> str:
    cells = json.loads(guide.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


PAGES_BY_HAND = ["README.md", "CONTRIBUTING.md", "tests/README.md", "tests/bench/RESULTS.md"]
PAGES = {
    page: page.read_text() for page in [*map(ROOT.joinpath, PAGES_BY_HAND), *sorted((ROOT / "treeckpt").rglob("*.md"))]
}
GUIDES = {guide: prose_of(guide) for guide in sorted((ROOT / "notebooks").glob("*.ipynb"))}
BESIDE = GUIDES[ROOT / "notebooks/03_background_and_manager.ipynb"]
RANKS = GUIDES[ROOT / "notebooks/02_distributed.ipynb"]


def blocks_of(text: str) -> list[str]:
    """The Python in the prose of a page."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_the_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(blocks_of(README)) >= 3
    names: dict[str, object] = {}
    for block in [*blocks_of(README), *blocks_of(BESIDE), *blocks_of(RANKS)]:
        exec(compile(block, "README.md", "exec"), names)


@pytest.mark.parametrize(("world", "twice"), [(4, 0), (2, 0), (1, 0), (3, 1)])
def test_the_lines_for_a_sampler_leave_out_no_sample_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, world: int, twice: int
) -> None:
    [block] = [one for one in blocks_of(RANKS) if "DistributedSampler" in one]

    def left(world: int, seen: int) -> list[list[int]]:
        """Returns what the sampler of each rank gives, of the epoch 3."""
        found: list[list[int]] = []
        for rank in range(world):
            names: dict[str, Any] = {"extra": {"epoch": 3, "seen": seen}, "torch": torch}
            monkeypatch.setenv("RANK", f"{rank}")
            monkeypatch.setenv("WORLD_SIZE", f"{world}")
            exec(block, names)
            options = {name: names[name] for name in ("sampler", "generator")}
            loader = torch.utils.data.DataLoader(range(100), batch_size=4, **options)  # pyright: ignore[reportArgumentType]
            found.append([int(number) for batch in loader for number in batch])
        return found

    before = {number for numbers in left(4, 0) for number in numbers[:16]}  # four batches of each of four ranks
    after = [number for numbers in left(world, 64) for number in numbers]
    padding = -100 % world  # the sampler gives each rank as many
    assert before | set(after) == set(range(100)) and len(before) + len(after) == 100 + twice + padding


class Batches:
    """A loader that records what it is given."""

    def __init__(self, taken: int) -> None:
        self.taken, self.given = taken, list[int]()

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given.append(state["taken"])


def test_the_lines_for_another_number_of_ranks_do_as_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [block] = [one for one in blocks_of(RANKS) if "per_rank=" in one]
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def save(comm: Comm) -> None:
        tree = tc.training.state(model, optimizer, loader=Batches(10 + comm.rank))
        tc.save("run/step_00000200", tree, comm=comm)

    assert errors_of(on_ranks(4, save)) == [None] * 4
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        loader = Batches(0)
        exec(block, {"tc": tc, "model": model, "optimizer": optimizer, "beside": {"loader": loader}})
        assert loader.given == [10 + rank, 46 // 2]


@pytest.mark.parametrize("page", PAGES_BY_HAND)
def test_links_and_pictures_exist(page: str) -> None:
    targets = re.findall(r"\]\(\s*([^)#\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert len(targets) > (20 if page.endswith("README.md") else 0)
    missing = [target for target in targets if "://" not in target and not ((ROOT / page).parent / target).exists()]
    assert not missing


def test_labels_that_name_a_test_module_name_the_one_they_lead_to() -> None:
    labels = re.findall(r"\[(test_\w+)\]\(([^)#]+)", (ROOT / "tests/README.md").read_text())
    assert len(labels) > 20 and [label for label, target in labels if Path(target).stem != label] == []


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= 15_000


def places_in(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    return {re.sub(r"[^a-z0-9 -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)}


def test_places_on_the_pages_exist() -> None:
    links = [
        ((page.parent / target).resolve() if target else page, place)
        for page, text in (PAGES | GUIDES).items()
        for target, place in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", text)
        if "://" not in target
    ]
    assert len(links) > 3
    assert [(target.name, place) for target, place in links if place not in places_in(PAGES[target])] == []


def test_commands_exist() -> None:
    [subparsers] = [a for a in main.new_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    text = "\n".join(text for page, text in (PAGES | GUIDES).items() if page.name != "CONTRIBUTING.md")
    named = set(re.findall(r"(?:^|`)treeckpt ([a-z][a-z-]*)", text, re.M))
    assert {"ls", "show", "verify", "bench", "report"} <= named <= set(subparsers.choices)
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test", "test-dcp"} <= set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)) <= targets


def test_exit_codes_are_those_of_the_help() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", GUIDES[ROOT / "notebooks/09_operating.ipynb"], re.M))
    codes = dict(re.findall(r"^  (\d+) +(.*)$", EXIT_CODES, re.M))
    assert codes.keys() == rows.keys() == {"0", "1", "2", "3", "130"}
    assert all(rows[code].startswith(text.partition(";")[0]) for code, text in codes.items())


def test_the_dependencies_are_those_that_are_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[><=]", one)[0] for one in project["dependencies"]]
    [line] = [line for line in README.splitlines() if line.startswith("pip install . ")]
    assert sorted(re.findall(r"[a-z_]+", line.partition("#")[2].partition(":")[0].replace(" and ", " "))) == names
    assert project["requires-python"] == ">=3.11" and "Python 3.11 or newer" in README
    assert {"all", "s3", "fsspec"} <= set(project["optional-dependencies"])


def test_figures_are_those_of_the_code() -> None:
    assert f"`memory=` ({_conversion.DEFAULT_MEMORY >> 20} MiB)" in FORMATS_PAGE
    assert f"Every {shard_header.BLOCK >> 10} KiB has a checksum" in " ".join(README.split())
    assert obstore.PART == 8 << 20 and obstore.LARGE_PART == 64 << 20 and (PER_CPU, START) == (16, 64)
    guide = " ".join(GUIDES[ROOT / "notebooks/07_buckets.ipynb"].split())
    assert "parts of 8 to 64 MiB, 16 in flight for each processor, up to 64" in guide
    assert "16 requests of 8 MiB for each processor" in guide
    assert shard_files.UPLOADS == 4 and "four shards at a time" in guide
    assert shard_files.COPIES == 512 << 20 and "copied into at most 512 MiB" in guide


def test_the_table_of_formats_has_each_of_them() -> None:
    [rows] = re.findall(r"\| format \| read .*?\n\|[-|]+\n(.*?)\n\n", FORMATS_PAGE, re.DOTALL)
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines()]
    names = {"torch.save": "torch", "DCP": "dcp", "safetensors": "safetensors", "hfai": "hfai", "Paddle": "paddle"}
    names["RecIS"] = "recis"
    found = {names[word]: row for row in cells for word in names if word in row[0]}
    own = {"treeckpt", *_register._registered}
    assert set(found) == set(SOURCES) - own
    assert {kind for kind, row in found.items() if row[2].startswith("yes")} == set(FORMATS) - own
