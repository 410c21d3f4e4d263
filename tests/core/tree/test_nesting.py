"""Trees of up to a thousand levels: saved, loaded and looked at by every way, and refused past that."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import treeckpt as tc
from tests.helpers.world import on_ranks, reseal
from treeckpt import training
from treeckpt.convert import convert
from treeckpt.core.analysis.outline import Outline
from treeckpt.core.analysis.treemap import treemap_of
from treeckpt.core.tree.dict_attributes import DictAttributes
from treeckpt.core.tree.nesting import (
    MAX_REPEATED_CHILDREN,
    MAX_SHARED,
    SplitStructure,
    expand_shared_subtrees,
    extract_shared_subtrees,
    leaf_count,
    split_structure,
    without_absent_attributes,
)
from treeckpt.core.tree.structure import (
    DOCUMENT_DEPTH,
    MAX_DEPTH,
    CustomNode,
    DictNode,
    ListNode,
    OrderedDictNode,
    PerRankNode,
    Structure,
)
from treeckpt.report import report
from treeckpt_dashboard.checkpoint.folds import folds_page
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


LEVELS = [99, 100, 101, 200, 250, MAX_DEPTH]


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("kind", ["", "dict"])
def test_a_deep_tree_comes_back(tmp_path: Path, levels: int, kind: str) -> None:
    tree = deep(levels, torch.arange(3), kind=kind, at_each=True)
    tc.save(tmp_path / "c", tree)
    assert same(tc.load(tmp_path / "c"), tree)
    like = deep(levels, torch.zeros(3, dtype=torch.int64), kind=kind, at_each=True)
    assert same(tc.load(tmp_path / "c", like), tree)
    assert same(tc.load(tmp_path / "c", tc.abstract(like)), tree)
    assert len(tc.inspect(tmp_path / "c").entries) == len(tc.inspect(tmp_path / "c").leaves)
    assert tc.verify(tmp_path / "c").ok


def test_no_index_of_a_tree_that_older_readers_know_has_another_form(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", deep(100, 1))
    assert "below" not in json.loads((tmp_path / "c" / "index.json").read_bytes())["index"]
    tc.save(tmp_path / "d", deep(101, 1))
    assert len(json.loads((tmp_path / "d" / "index.json").read_bytes())["index"]["below"]) == 1


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
        half = {"own": tc.PerRank(deep(900, comm.rank)), f"rank{comm.rank}": deep(900, comm.rank), "all": deep(900, 1)}
        tc.save(tmp_path / "c", half, comm=comm)
        return tc.load(tmp_path / "c", comm=comm)

    for rank, outcome in enumerate(on_ranks(2, act)):
        assert outcome.error is None
        assert same(outcome.value["own"].value, deep(900, rank)) and same(outcome.value["rank1"], deep(900, 1))


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
    model, extra = nn.Linear(1, 1), deep(900, 5, kind="dict", at_each=True)
    tc.save(tmp_path / "c", training.state(model, extra=extra))
    assert same(training.restore(tmp_path / "c", model).extra, extra)
    into = deep(900, 0, kind="dict", at_each=True)
    training.restore(tmp_path / "c", model, extra=into)
    assert same(into, extra)
    into = deep(900, 0, kind="dict", at_each=True)
    training.restore(training.state(model, extra=extra), model, extra=into)
    assert same(into, extra)
    for one, act in ((extra, "save"), (deep(900, 0, kind="dict", at_each=True), "restore")):
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
    ):
        with pytest.raises(tc.TreeError, match="at most 1000 levels deep"):
            act()
    assert not (tmp_path / "c" / "index.json").exists()


def test_containers_that_hold_themselves_are_refused_soon(tmp_path: Path) -> None:
    tree: dict[str, Any] = {str(n): n for n in range(1000)}
    tree["itself"], tree["again"] = tree, [tree, tree]
    began = time.monotonic()
    with pytest.raises(tc.TreeError, match="holds itself"):
        tc.save(tmp_path / "c", tree)
    assert time.monotonic() - began < 60


_COMMANDS = """
import json, sys
from treeckpt.cli.main import main
for command in json.load(sys.stdin):
    assert main(command) == 0, command
    print("end of the command")
"""


def test_the_command_line_shows_and_converts_deep_trees(tmp_path: Path) -> None:
    tree = deep(MAX_DEPTH, torch.arange(3), kind="dict", at_each=True)
    tc.save(tmp_path / "c", tree)
    path, leaf = str(tmp_path / "c"), "/".join(["k"] * MAX_DEPTH)
    commands = [["show", path, "--depth", "1000"], ["show", path, leaf], ["verify", path], ["diff", path, path]]
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
    assert folds_page(outline, "").children == 2


# parts of a structure ----------------------------------------------------------------------------------------------
def _lists(levels: int, end: Structure = None) -> Structure:
    """A chain of lists, each with a leaf beside it."""
    node = end
    for _ in range(levels):
        node = ListNode((None, node))
    return node


def _levels(node: Structure) -> int:
    """The length of a chain of lists."""
    count = 0
    while node is not None:
        node, count = node.children[-1] if node.children else None, count + 1
    return count


@pytest.mark.parametrize("levels", [0, 1, DOCUMENT_DEPTH, DOCUMENT_DEPTH + 1, 2 * DOCUMENT_DEPTH + 1, MAX_DEPTH])
def test_parts_of_a_deep_structure_are_as_deep_as_a_document_and_make_it_up_again(levels: int) -> None:
    split = split_structure(_lists(levels))
    assert len(split.below) == max(levels - 1, 0) // DOCUMENT_DEPTH
    assert all(_levels(part) <= DOCUMENT_DEPTH + 1 for part in (split.top, *split.below)), "a mark is a level"
    whole = split.whole()
    assert _levels(whole) == levels
    while isinstance(whole, ListNode):
        assert len(whole.children) == 2 and whole.children[0] is None
        whole = whole.children[1]


def test_parts_deeper_than_a_tree_are_refused() -> None:
    def parts(last: int) -> SplitStructure:
        marks = [CustomNode("", n, (), ()) for n in range(9)]
        below = [_lists(DOCUMENT_DEPTH, mark) for mark in marks[1:]]
        return SplitStructure(_lists(DOCUMENT_DEPTH, marks[0]), (*below, _lists(last)))

    assert _levels(parts(DOCUMENT_DEPTH).whole()) == MAX_DEPTH
    with pytest.raises(tc.FormatError, match="at most 1000 levels"):
        parts(DOCUMENT_DEPTH + 1).whole()
    with pytest.raises(tc.TreeError, match="at most 1000 levels"):
        split_structure(_lists(MAX_DEPTH + 1))


def test_repeated_subtrees_are_stored_once_where_that_is_shorter() -> None:
    small, large = (ListNode((None,) * n) for n in (MAX_REPEATED_CHILDREN, MAX_REPEATED_CHILDREN + 1))
    pair = ListNode((None, None))
    tree = ListNode((small, small, pair, pair, large, ListNode((large,)), PerRankNode((), (large, large))))
    bare, shared = extract_shared_subtrees(tree)
    mark = CustomNode("", 0, (), ())
    assert shared == (large,)
    assert bare == ListNode((small, small, pair, pair, mark, ListNode((mark,)), PerRankNode((), (large, large))))
    assert expand_shared_subtrees(bare, shared, "index") == tree
    assert leaf_count(tree) == 2 * len(small.children) + 4 + 4 * len(large.children)
    once = ListNode((large, ListNode((None,) * 9)))
    assert extract_shared_subtrees(once) == (once, ())


def test_so_many_places_share_subtrees_and_no_more() -> None:
    one = ListNode((None,) * 4)
    bare, shared = extract_shared_subtrees(ListNode((one,) * (MAX_SHARED + 2)))
    assert bare == ListNode((CustomNode("", 0, (), ()),) * MAX_SHARED + (one,) * 2) and shared == (one,)
    assert expand_shared_subtrees(bare, shared, "index") == ListNode((one,) * (MAX_SHARED + 2))
    for marks in ([0] * (MAX_SHARED + 1), [1], [-1], [True], ["0"]):
        with pytest.raises(tc.FormatError, match="one of the shared subtrees"):
            expand_shared_subtrees(ListNode(tuple(CustomNode("", n, (), ()) for n in marks)), shared, "index")


def test_subtrees_are_shared_at_any_depth_of_a_document() -> None:
    one, mark = ListNode((None,) * 4), CustomNode("", 0, (), ())
    for levels in (0, 1, DOCUMENT_DEPTH):
        assert expand_shared_subtrees(_lists(levels, mark), (one,), "index") == _lists(levels, one)
    deeper = _lists(DOCUMENT_DEPTH + 1, mark)
    assert expand_shared_subtrees(deeper, (one,), "index") == deeper, "refused later"


# hostile files ---------------------------------------------------------------------------------------------------
def _chain(levels: int, end: Any = None) -> Any:
    node = end
    for _ in range(levels):
        node = ["list", [node]]
    return node


def _mark(number: Any) -> Any:
    return ["custom", "", number, [], []]


HOSTILE: dict[str, tuple[Any, list[Any]]] = {
    "deeper than allowed in pieces": (
        _chain(100, _mark(0)),
        [_chain(100, _mark(n + 1)) for n in range(11)] + [_chain(2)],
    ),
    "endless pieces": (_chain(1, _mark(0)), [_chain(1, _mark(n + 1)) for n in range(5000)] + [_chain(1)]),
    "a piece that is missing": (_chain(100, _mark(3)), [_chain(100)]),
    "a piece that holds itself": (_chain(100, _mark(0)), [_chain(100, _mark(0))]),
    "two pieces that hold each other": (_chain(2, _mark(0)), [_chain(2, _mark(1)), _chain(2, _mark(0))]),
    "a piece in two places": (["list", [_mark(0), _mark(0)]], [_chain(1)]),
    "a piece in no place": (_chain(1), [_chain(1)]),
    "a piece named by a text": (_chain(1, _mark("x")), [_chain(1)]),
    "a piece that is a leaf": (_chain(1, _mark(0)), [None]),
    "a mark without pieces": (_chain(1, _mark(0)), []),
    "deeper than a document nests": (_chain(5000), []),
    "much deeper than a document nests": (_chain(100_000), []),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pieces_are_refused(tmp_path: Path, name: str) -> None:
    tc.save(tmp_path / "c", {"w": torch.ones(3), "n": [1]})
    structure, below = HOSTILE[name]
    text = (tmp_path / "c" / "index.json").read_bytes()

    def change(document: Any) -> None:
        document["index"] |= {"structure": "STRUCTURE", "below": "BELOW"}

    reseal(tmp_path / "c", change)
    text = (tmp_path / "c" / "index.json").read_text()
    text = text.replace('"STRUCTURE"', _text(structure)).replace('"BELOW"', f"[{','.join(map(_text, below))}]")
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
    from treeckpt.core.format.shard_header import sealed

    at = data.index(b'"seal":"') + 8
    path.write_bytes(sealed(data[:at] + b"0" * 16 + data[at + 16 :]))


def test_a_document_has_an_ordered_dict_without_attributes_in_its_form_of_before_these() -> None:
    plain, noted = OrderedDictNode(("w",), (None,)), OrderedDictNode(("w",), (None,), DictAttributes(others=1))
    structure = DictNode(("a", "b", "c"), (plain, noted, DictNode(("x",), (plain,))))
    written = msgspec.json.encode(without_absent_attributes(structure))
    assert b'["OrderedDict",["w"],[null]]' in written and b'["OrderedDict",["w"],[null],[null,1]]' in written
    assert msgspec.json.decode(written, type=DictNode) == structure
    assert without_absent_attributes(None) is None
    untouched = DictNode(("x",), (DictNode((), ()),))
    assert without_absent_attributes(untouched) is untouched
