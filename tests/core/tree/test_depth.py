"""Trees of as many levels as are allowed: saved, loaded and looked at by every way; deeper ones are refused by name."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import treeckpt as tc
from tests.helpers.world import on_ranks, reseal
from treeckpt import training
from treeckpt._core.tree.structure import MAX_DEPTH
from treeckpt._inspect.outline import Outline
from treeckpt._inspect.treemap import treemap_of
from treeckpt._report import report
from treeckpt.convert import convert
from treeckpt_dashboard.checkpoint.tree import folds_page
from treeckpt_dashboard.pages.damage import NO_DAMAGE
from treeckpt_dashboard.store.outline_file import StoredOutline, write_outline


@dataclasses.dataclass
class Link:
    next: Any
    n: int = 0


KINDS = ("dict", "list", "tuple", "dataclass")


def deep(levels: int, value: Any, *, kind: str = "", at_each: bool = False) -> Any:
    """A chain of containers, of one kind or of all in turn."""
    tree = value
    for level in range(levels):
        match kind or KINDS[level % 4]:
            case "dict":
                tree = {"k": tree, **({"n": level} if at_each else {})}
            case "list":
                tree = [tree, level] if at_each else [tree]
            case "tuple":
                tree = (tree, level) if at_each else (tree,)
            case _:
                tree = Link(tree, level if at_each else 0)
    return tree


def same(a: Any, b: Any) -> bool:
    """Without calls within calls."""
    waiting = [(a, b)]
    while waiting:
        a, b = waiting.pop()
        if type(a) is not type(b):
            return False
        if isinstance(a, dict):
            if list(a) != list(b):
                return False
            waiting += [(a[key], b[key]) for key in a]
        elif isinstance(a, (list, tuple)):
            if len(a) != len(b):
                return False
            waiting += zip(a, b, strict=True)
        elif isinstance(a, Link):
            waiting += [(a.next, b.next), (a.n, b.n)]
        elif isinstance(a, (torch.Tensor, np.ndarray)):
            if a.tolist() != b.tolist():
                return False
        elif a != b:
            return False
    return True


@pytest.mark.parametrize("kind", ["", "dict"])
def test_a_deep_tree_comes_back(tmp_path: Path, kind: str) -> None:
    tree = deep(MAX_DEPTH, torch.arange(3), kind=kind, at_each=True)
    tc.save(tmp_path / "c", tree)
    assert same(tc.load(tmp_path / "c"), tree)
    like = deep(MAX_DEPTH, torch.zeros(3, dtype=torch.int64), kind=kind, at_each=True)
    assert same(tc.load(tmp_path / "c", like), tree)
    assert same(tc.load(tmp_path / "c", tc.abstract(like)), tree)
    assert len(tc.inspect(tmp_path / "c").entries) == len(tc.inspect(tmp_path / "c").leaves)
    assert tc.verify(tmp_path / "c").ok


def test_a_deep_tree_is_filled_in_place(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", deep(MAX_DEPTH, torch.arange(3), kind="dict", at_each=True))
    into = deep(MAX_DEPTH, target := torch.zeros(3, dtype=torch.int64), kind="dict", at_each=True)
    into["n"] = -1
    tc.load_into(tmp_path / "c", into)
    assert target.tolist() == [0, 1, 2] and into["n"] == MAX_DEPTH - 1
    tc.load_into(tc.Bank([tmp_path / "c"]), into)
    tc.trees.copy_into(deep(MAX_DEPTH, torch.ones(3, dtype=torch.int64), kind="dict", at_each=True), into)
    assert target.tolist() == [1, 1, 1]


def test_a_deep_list_of_values_is_one_value(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": deep(MAX_DEPTH - 1, 5, kind="list")})
    into: dict[str, Any] = {"a": [1, 2]}
    tc.load_into(tmp_path / "c", into)
    assert same(into["a"], deep(MAX_DEPTH - 1, 5, kind="list"))
    tc.trees.copy_into({"a": deep(MAX_DEPTH - 2, 5, kind="list")}, into)
    assert same(into["a"], deep(MAX_DEPTH - 2, 5, kind="list"))


def test_deep_trees_are_saved_beside_the_training_and_by_several_ranks(tmp_path: Path) -> None:
    tree = deep(MAX_DEPTH, torch.arange(3), at_each=True)
    tc.save_async(tmp_path / "a", tree).result()
    assert same(tc.load(tmp_path / "a"), tree)

    def act(comm: Any) -> Any:
        half = {"own": tc.PerRank(deep(150, comm.rank)), f"rank{comm.rank}": deep(150, comm.rank), "all": deep(150, 1)}
        tc.save(tmp_path / "c", half, comm=comm)
        return tc.load(tmp_path / "c", comm=comm)

    for rank, outcome in enumerate(on_ranks(2, act)):
        assert outcome.error is None
        assert same(outcome.value["own"].value, deep(150, rank)) and same(outcome.value["rank1"], deep(150, 1))


def test_operations_on_deep_trees(tmp_path: Path) -> None:
    tree = deep(MAX_DEPTH, torch.arange(3), kind="dict", at_each=True)
    for made in (
        tc.trees.offload(tree),
        tc.trees.gather(tree),
        tc.trees.distribute(tree, tree),
        tc.trees.unflatten_names(tc.trees.flatten_names(tree), tree),
    ):
        assert same(made, tree)
    assert tc.trees.same_structure(tree, tree)


def test_a_lost_index_of_a_deep_tree_is_made_again(tmp_path: Path) -> None:
    tree = deep(MAX_DEPTH, torch.arange(3), at_each=True)
    tc.save(tmp_path / "c", tree)
    written = (tmp_path / "c" / "index.json").read_bytes()
    os.unlink(tmp_path / "c" / "index.json")
    tc.rebuild_index(tmp_path / "c")
    assert (tmp_path / "c" / "index.json").read_bytes() == written
    assert same(tc.load(tmp_path / "c"), tree)


def test_rules_and_globs_on_deep_trees(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"old": deep(MAX_DEPTH - 1, torch.arange(3), kind="dict"), "x": 1})
    found = tc.load(tmp_path / "c", rename={"old": "new"})
    assert same(found["new"], deep(MAX_DEPTH - 1, torch.arange(3), kind="dict"))
    assert tc.load(tmp_path / "c", select="x")["x"] == 1


def test_deep_parts_of_a_training_state(tmp_path: Path) -> None:
    model, extra = nn.Linear(1, 1), deep(150, 5, kind="dict", at_each=True)
    tc.save(tmp_path / "c", training.state(model, extra=extra))
    assert same(training.restore(tmp_path / "c", model).extra, extra)
    into = deep(150, 0, kind="dict", at_each=True)
    training.restore(tmp_path / "c", model, extra=into)
    assert same(into, extra)
    into = deep(150, 0, kind="dict", at_each=True)
    training.restore(training.state(model, extra=extra), model, extra=into)
    assert same(into, extra)
    for one, act in ((extra, "save"), (deep(150, 0, kind="dict", at_each=True), "restore")):
        manager = tc.Manager(tmp_path / "run", background=False)
        manager.register("extra", one)
        manager.save(1) if act == "save" else manager.restore()
        assert same(one, extra)


@pytest.mark.parametrize("kind", KINDS)
def test_a_deeper_tree_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    tree = deep(MAX_DEPTH + 1, 1, kind=kind)
    for act in (
        lambda: tc.save(tmp_path / "c", tree),
        lambda: tc.save_async(tmp_path / "c", tree),
        lambda: tc.abstract(tree),
        lambda: tc.trees.offload(tree),
        lambda: tc.trees.same_structure(tree, tree),
    ):
        with pytest.raises(tc.TreeError, match="at most 200 levels deep"):
            act()
    assert not (tmp_path / "c" / "index.json").exists()


def test_a_much_deeper_tree_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeError, match=r"^k/k/k.*at most 200 levels deep, found a deeper one") as caught:
        tc.save(tmp_path / "c", deep(10_000, 1, kind="dict"))
    assert len(str(caught.value)) < 500 and not (tmp_path / "c").exists()


def _at(frames: int, act: Callable[[], Any]) -> Any:
    """Calls a function from a stack of so many frames."""
    below, frame = 0, sys._getframe()
    while frame := frame.f_back:
        below += 1

    def nest(left: int) -> Any:
        return nest(left - 1) if left > 0 else act()

    return nest(frames - below)


def _walks(tmp_path: Path) -> dict[str, Callable[[], Any]]:
    """Saves and loads of a tree as deep as is allowed."""
    tree = deep(MAX_DEPTH, torch.arange(3), at_each=True)
    tc.save(tmp_path / "c", tree)
    into = deep(MAX_DEPTH, torch.zeros(3, dtype=torch.int64), kind="dict", at_each=True)
    tc.save(tmp_path / "d", deep(MAX_DEPTH, torch.arange(3), kind="dict", at_each=True))
    return {
        "save": lambda: tc.save(tmp_path / "new", tree, overwrite=True),
        "load": lambda: tc.load(tmp_path / "c"),
        "load like": lambda: tc.load(tmp_path / "c", tree),
        "load into": lambda: tc.load_into(tmp_path / "d", into),
        "inspect": lambda: tc.inspect(tmp_path / "c"),
        "verify": lambda: tc.verify(tmp_path / "c"),
        "offload": lambda: tc.trees.offload(tree),
        "convert": lambda: convert(tmp_path / "d", tmp_path / "converted", to="torch", overwrite=True),
    }


def test_the_deepest_tree_fits_below_500_calls(tmp_path: Path) -> None:
    for act in _walks(tmp_path).values():
        _at(500, act)


@pytest.mark.parametrize("frames", range(600, 960, 90))
def test_below_more_calls_it_is_refused_by_name_before_anything_changes(tmp_path: Path, frames: int) -> None:
    tree = deep(MAX_DEPTH, torch.arange(3), kind="dict", at_each=True)
    tc.save(tmp_path / "c", tree)
    torch.save(tree, tmp_path / "deep.pt")
    into = deep(MAX_DEPTH, target := torch.zeros(3, dtype=torch.int64), kind="dict", at_each=True)
    for act in (
        lambda: tc.save(tmp_path / "new", tree),
        lambda: tc.load(tmp_path / "c", tree),
        lambda: tc.load_into(tmp_path / "c", into),
        lambda: tc.load(tmp_path / "deep.pt"),
    ):
        with pytest.raises(tc.TreeError, match="room for 420 nested calls"):
            _at(frames, act)
    assert not (tmp_path / "new").exists() and target.tolist() == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_deeper_files_of_other_programs_are_refused_by_name(tmp_path: Path) -> None:
    torch.save(deep(MAX_DEPTH + 1, 1, kind="list"), tmp_path / "deep.pt")
    nested = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "data.pkl").write_bytes(nested)
    with zipfile.ZipFile(tmp_path / "deeper.pt", "w") as archive:
        archive.writestr("archive/data.pkl", nested)
        archive.writestr("archive/version", b"3")
    names: Any = {"w": torch.ones(2)}
    for _ in range(MAX_DEPTH):
        names = {"k": names}
    dcp.save(names, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name in ("deep.pt", "deeper.pt", "dcp"):
        for act in (tc.load, lambda path: convert(path, tmp_path / "out")):
            with pytest.raises(tc.FormatError):
                act(tmp_path / name)
    assert not (tmp_path / "out").exists()


def test_a_rule_that_makes_a_deeper_tree_is_refused_by_name(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": 1})
    with pytest.raises(tc.TreeError, match="at most 200 levels deep"):
        tc.load(tmp_path / "c", rename={"a": "/".join(["k"] * (MAX_DEPTH + 1))})


def test_containers_that_hold_themselves_are_refused_soon(tmp_path: Path) -> None:
    tree: dict[str, Any] = {str(n): n for n in range(1000)}
    tree["itself"], tree["again"] = tree, [tree, tree]
    began = time.process_time()
    with pytest.raises(tc.TreeError, match="holds itself"):
        tc.save(tmp_path / "c", tree)
    itself: list[Any] = [1]
    itself.append(itself)
    with pytest.raises(tc.TreeError, match="at most 200 levels deep"):
        tc.trees.same_structure(itself, itself)
    assert time.process_time() - began < 60


_COMMANDS = """
import json, sys
from treeckpt._cli.main import main
for command in json.load(sys.stdin):
    assert main(command) == 0, command
    print("end of the command")
"""


def test_the_command_line_shows_and_converts_deep_trees(tmp_path: Path) -> None:
    tree = deep(MAX_DEPTH, torch.arange(3), kind="dict", at_each=True)
    tc.save(tmp_path / "c", tree)
    path, leaf = str(tmp_path / "c"), "/".join(["k"] * MAX_DEPTH)
    commands = [["show", path, "--depth", str(MAX_DEPTH)], ["show", path, leaf], ["verify", path], ["diff", path, path]]
    command = [sys.executable, "-c", _COMMANDS]
    done = subprocess.run(command, input=json.dumps(commands), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shown, leaf_shown, *_ = done.stdout.split("end of the command\n")
    assert "k" in shown and "arange" not in leaf_shown
    convert(tmp_path / "c", tmp_path / "d", to="treeckpt", exclude="n")
    found = tc.load(tmp_path / "d")
    assert found["k"]["n"] == MAX_DEPTH - 2 and "n" not in found


def test_reports_and_pages_of_deep_trees(tmp_path: Path) -> None:
    tc.save(tmp_path / "run" / "step_00000001", deep(MAX_DEPTH, torch.arange(3), kind="dict", at_each=True), step=1)
    report(tmp_path / "run" / "step_00000001", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 1000
    index = tc.inspect(tmp_path / "run" / "step_00000001")
    outline = Outline.of(index)
    row = outline.row(".".join(["0"] * MAX_DEPTH))
    assert row.kind == "leaf" and outline.node_at("/".join(["k"] * MAX_DEPTH)) == row
    assert len(treemap_of(outline, "tree", count=50)) > 0
    write_outline(index, tmp_path / "table")
    stored = StoredOutline(tmp_path / "table")
    assert stored.row(row.node).path == row.path
    assert same(len(stored.index.paths), len(index.paths))
    assert folds_page(outline, NO_DAMAGE, "").children == 2


# hostile files ---------------------------------------------------------------------------------------------------
def _chain(levels: int, end: Any = None) -> Any:
    node = end
    for _ in range(levels):
        node = ["list", [node]]
    return node


def _shared(number: int) -> Any:
    return ["custom", "", number, [], []]


HOSTILE: dict[str, tuple[Any, list[Any]]] = {
    "deeper than allowed": (_chain(MAX_DEPTH + 1), []),
    "deeper than allowed by a shared part": (_chain(MAX_DEPTH, _shared(0)), [_chain(1)]),
    "deeper than Python nests calls": (_chain(5000), []),
    "much deeper than Python nests calls": (_chain(100_000), []),
    "a shared part that is missing": (_chain(100, _shared(3)), [_chain(100)]),
    "a shared part that holds itself": (_chain(100, _shared(0)), [_chain(100, _shared(0))]),
    "a shared part named by a text": (["list", [["custom", "", "x", [], []]]], [_chain(1)]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_structures_are_refused(tmp_path: Path, name: str) -> None:
    tc.save(tmp_path / "c", {"w": torch.ones(3), "n": [1]})
    structure, shared = HOSTILE[name]
    text = (tmp_path / "c" / "index.json").read_bytes()

    def change(document: Any) -> None:
        document["index"] |= {"structure": "STRUCTURE", "shared": "SHARED"}

    reseal(tmp_path / "c", change)
    text = (tmp_path / "c" / "index.json").read_text()
    text = text.replace('"STRUCTURE"', _text(structure)).replace('"SHARED"', f"[{','.join(map(_text, shared))}]")
    _write_sealed(tmp_path / "c" / "index.json", text.encode())
    for act in (tc.inspect, tc.load, tc.verify, lambda path: tc.load_into(path, {"w": torch.zeros(3), "n": [0]})):
        with pytest.raises(tc.FormatError):
            act(tmp_path / "c")


def _text(node: Any) -> str:
    """JSON of any depth."""
    parts: list[str] = []
    waiting: list[Any] = [node]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list) and not isinstance(one, Raw):
            waiting.append(Raw("]"))
            for at, child in reversed(list(enumerate(one))):
                waiting += [child, Raw(",")] if at else [child]
            waiting.append(Raw("["))
        else:
            parts.append(one.text if isinstance(one, Raw) else json.dumps(one))
    return "".join(parts)


class Raw:
    def __init__(self, text: str) -> None:
        self.text = text


def _write_sealed(path: Path, data: bytes) -> None:
    from treeckpt._core.format.shard_header import sealed

    at = data.index(b'"seal":"') + 8
    path.write_bytes(sealed(data[:at] + b"0" * 16 + data[at + 16 :]))
