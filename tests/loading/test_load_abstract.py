"""The tree of a checkpoint without its arrays: values as saved, specs in the place of arrays; a target for `load`."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import treeckpt as tc


class Pair(NamedTuple):
    left: Any
    right: Any


def tree() -> dict[Any, Any]:
    weight = torch.arange(6.0).reshape(2, 3)
    return {
        "model": collections.OrderedDict(
            {"w": weight, "tie": weight, "row": weight[1], "b": torch.nn.Parameter(weight)}
        ),
        "pair": Pair(np.ones(2, np.int16), [1, None, "x"]),
        (0, True): {"lr": 0.5, "betas": (0.9, 0.99), "names": {"a", "b"}},
        "own": tc.PerRank({"seed": 7, "state": np.zeros(3)}),
        "empty": {},
    }


def test_values_come_as_saved_and_arrays_as_their_specs(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", tree())
    for file in tmp_path.glob("c/*.safetensors"):
        file.unlink()  # nothing of them is read
    found = tc.load_abstract(tmp_path / "c")
    assert found["model"]["w"] == tc.ArraySpec((2, 3), "float32") and found["model"]["row"].shape == (3,)
    assert found["model"]["b"].kind == "parameter" and found["model"]["b"].requires_grad
    assert found["pair"] == Pair(tc.ArraySpec((2,), "int16", kind="numpy"), [1, None, "x"])
    assert found[0, True] == tree()[0, True] and found["empty"] == {}
    assert found["own"].value == {"seed": 7, "state": tc.ArraySpec((3,), "float64", kind="numpy")}
    assert tc.trees.same_structure(found, tc.abstract(tree()))


def test_it_is_a_target_for_the_same_load(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", tree())
    found, expected = tc.load(tmp_path / "c", tc.load_abstract(tmp_path / "c")), tc.load(tmp_path / "c")
    assert tc.trees.same_structure(found, expected)
    assert torch.equal(found["model"]["w"], expected["model"]["w"])
    assert np.array_equal(found["own"].value["state"], np.zeros(3))


def test_globs_rules_and_banks_hold(tmp_path: Path) -> None:
    tc.save(tmp_path / "a", {"w": np.ones(2), "h": [np.ones(1), 3]})
    tc.save(tmp_path / "b", {"w": np.ones(5)})
    assert tc.load_abstract(tmp_path / "a", select="h") == {
        "w": ...,
        "h": [tc.ArraySpec((1,), "float64", kind="numpy"), 3],
    }
    assert tc.load_abstract(tmp_path / "a", exclude="h/0")["h"] == [..., 3]
    assert list(tc.load_abstract(tmp_path / "a", rename={"h": "layers"})) == ["w", "layers"]
    both = tc.load_abstract([tmp_path / "a", tmp_path / "b"])
    assert (both["w"].shape, both["h"][1]) == ((5,), 3)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"own": tc.PerRank(1), "w": np.ones(2)})
    with pytest.raises(tc.MismatchError, match="each glob of select to mean some leaf") as caught:
        tc.load_abstract(tmp_path / "c", select="v")
    assert caught.value.path == "v"
    with pytest.raises(tc.CheckpointNotFound, match="none"):
        tc.load_abstract(tmp_path / "none")
    with pytest.raises(tc.MismatchError, match="per_rank: expected 'error', 'take'"):
        tc.load_abstract(tmp_path / "c", fallback=tc.Fallback(per_rank="all"))  # type: ignore[arg-type]


def test_keyed_tables_have_specs_in_their_columns(tmp_path: Path) -> None:
    table = tc.KeyedTable(np.arange(5, dtype=np.int64), {"w": np.ones((5, 2), np.float32)})
    tc.save(tmp_path / "c", {"table": table})
    found = tc.load_abstract(tmp_path / "c")["table"]
    assert isinstance(found, tc.KeyedTable) and found.slots["w"].shape == (5, 2)
