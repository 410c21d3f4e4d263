"""The tree of a checkpoint as text and as rows, without its arrays."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from treeckpt._cli.main import main
from treeckpt._cli.show import structure_lines, structure_rows


@dataclasses.dataclass
class Options:
    lr: float
    betas: tuple[float, float]


def tree() -> dict[Any, Any]:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    return {
        "model": {"w": w, "tie": w, "a/b": [1, None]},
        (0, True): Options(0.5, (0.9, 0.99)),
        "own": tc.PerRank({"seed": 7}),
        "empty": {},
    }


TEXT = """\
dict
  model: dict
    w: numpy float32[2, 3]
    tie: numpy float32[2, 3], shares the memory of model/w
    a~1b: list
      0: 1
      1: None
  ~(0~,~b1~): dataclass {cls}
    lr: 0.5
    betas: tuple
      0: 0.9
      1: 0.99
  own: per_rank
    ~rank*: dict
      seed: 1 rank: 7
  empty: dict, empty
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tc.save(tmp_path / "c", tree())
    for shard in tmp_path.glob("c/*.safetensors"):
        shard.unlink()  # the index alone is read
    return tmp_path / "c"


def test_the_command_prints_the_tree_or_a_part_of_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--structure", str(path)]) == 0
    assert capsys.readouterr().out == TEXT.format(cls=f"{__name__}:Options")
    assert main(["show", "--structure", str(path), "model/a~1b"]) == 0
    assert capsys.readouterr().out == "model/a~1b: list\n  0: 1\n  1: None\n"
    assert main(["show", "--structure", str(path), "modle"]) == 2
    assert "no such path" in capsys.readouterr().err


def test_as_json_it_has_a_row_for_each_container_and_leaf(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--structure", "--json", str(path)]) == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows[""] == {"path": "", "kind": "dict", "depth": 0, "children": 4}
    assert rows["model/tie"]["spec"] == {"shape": [2, 3], "dtype": "float32", "kind": "numpy"}
    assert rows["model/tie"]["shares"] == "model/w" and rows["~(0~,~b1~)/lr"]["value"] == 0.5
    assert (rows["own/~rank*/seed"]["ranks"], rows["own/~rank*/seed"]["value"]) == (1, [7])
    assert rows["~(0~,~b1~)"]["cls"] == f"{__name__}:Options"


def test_a_leaf_alone_and_a_deep_tree_are_shown(tmp_path: Path) -> None:
    tc.save(tmp_path / "leaf", 3)
    assert list(structure_lines(structure_rows(tc.inspect(tmp_path / "leaf")))) == ["3"]
    deep: Any = 1
    for _ in range(199):
        deep = [deep]
    tc.save(tmp_path / "deep", deep)
    assert len(structure_rows(tc.inspect(tmp_path / "deep"))) == 200
