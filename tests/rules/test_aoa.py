"""Configurations of Paddle, `{"aoa_statements": [...]}`, give the arrays that Paddle's statements describe.

Row P16 of the Paddle table in `treeckpt/convert/SYSTEMS.md`; expected arrays are computed by numpy from the statement.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import treeckpt as tc

HEADS, GROUPS, WIDTH = 8, 2, 3
RNG = np.random.default_rng(0)
TREE: dict[str, Any] = {
    "a": RNG.normal(size=(4, 6)).astype("float32"),
    "b": RNG.normal(size=(4, 6)).astype("float32"),
    "cube": RNG.normal(size=(4, 1, 2)).astype("float32"),
    "w_0": np.full((2, 1), 0.0),
    "w_1": np.full((2, 1), 1.0),
    "w_2": np.full((2, 1), 2.0),
    "q": RNG.normal(size=(5, HEADS * WIDTH)),
    "k": RNG.normal(size=(5, GROUPS * WIDTH)),
    "v": RNG.normal(size=(5, GROUPS * WIDTH)),
    **{f"layers.{n}.x": np.full(2, n) for n in range(1, 12)},
    **{f"e.{n}.w": np.full((1, 2), n) for n in range(12)},
}


def heads(name: str) -> list[np.ndarray]:
    return np.split(TREE[name], TREE[name].shape[1] // WIDTH, axis=1)


def by_groups() -> np.ndarray:
    each = HEADS // GROUPS
    q, k, v = heads("q"), heads("k"), heads("v")
    return np.concatenate([a for g in range(GROUPS) for a in (*q[g * each : (g + 1) * each], k[g], v[g])], axis=1)


def by_shards(shards: int) -> np.ndarray:
    parts = [np.split(TREE[name], shards, axis=1) for name in "qkv"]
    return np.concatenate([part[n] for n in range(shards) for part in parts], axis=1)


QKV = f"num_heads={HEADS}, num_key_value_groups={GROUPS}"
FORMS: list[tuple[list[str], dict[str, Any]]] = [
    (["a, b -> c, axis=0"], {"c": np.concatenate([TREE["a"], TREE["b"]])}),
    (["a -> c,d ,axis = 1 \n"], {"c": TREE["a"][:, :3], "d": TREE["a"][:, 3:]}),
    (["cube -> d, permute= '[2, 0, 1]' \n"], {"d": TREE["cube"].transpose(2, 0, 1)}),
    (['cube -> d, permute="[]"'], {"d": TREE["cube"].transpose()}),
    (["a^T -> d"], {"d": TREE["a"].T}),
    (["a -> c", "c^T -> c"], {"c": TREE["a"].T}),
    (["a -> d, dtype='float16'"], {"d": TREE["a"].astype("float16")}),
    (["a -> d, axis=0"], {"d": TREE["a"]}),
    (["w[0:3] -> w, axis=1"], {"w": np.array([[0.0, 1, 2]] * 2)}),
    (["a -> p[0:3], axis=1"], {f"p_{n}": TREE["a"][:, 2 * n : 2 * n + 2] for n in range(3)}),
    (["layers.$LAYER_ID.x -> h.$LAYER_ID.y"], {f"h.{n}.y": np.full(2, n) for n in range(1, 12)}),
    (["layers.$LAYER_ID_OFFSET.x -> layers.$LAYER_ID_OFFSET.x"],
     {f"layers.{n}.x": np.full(2, n + 1) for n in range(11)}),
    (["e.*.w -> e, axis=0"], {"e": np.repeat(np.arange(12)[:, None], 2, axis=1)}),
    ([f"q, k, v -> qkv, fused_qkv, {QKV}"], {"qkv": by_groups()}),
    ([f"q, k, v -> qkv, fused_qkv_old, {QKV}, shards=2"], {"qkv": by_shards(2)}),
    (["a, b -> ffn, fused_ffn, shards=2"],
     {"ffn": np.concatenate([TREE[n][:, s : s + 3] for s in (0, 3) for n in "ab"], axis=1)}),
    (["a -> one", "a -> two, dtype='float64'", "a -> a"],
     {"one": TREE["a"], "two": TREE["a"].astype("float64"), "a": TREE["a"]}),
    (["a^T -> one", "a -> two, three, axis=0"],
     {"one": TREE["a"].T, "two": TREE["a"][:2], "three": TREE["a"][2:]}),
]  # fmt: skip


def named(each: Any) -> str:
    return each[0] if isinstance(each, list) else ""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("aoa") / "c"
    tc.save(path, TREE)
    return path


def assert_arrays(found: dict[str, Any], wanted: dict[str, np.ndarray]) -> None:
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array), name


@pytest.mark.parametrize(("statements", "wanted"), FORMS, ids=named)
def test_statements_of_paddle_give_the_arrays_that_they_describe(
    saved: Path, statements: list[str], wanted: dict[str, np.ndarray]
) -> None:
    found = tc.load(saved, transforms={"aoa_statements": statements})
    assert_arrays(found, wanted)
    assert_arrays(found, {name: TREE[name] for name in found.keys() - wanted.keys()})
    assert {"q", "k", "v"} <= found.keys() or "qkv" in wanted, "names in no statement stay"


REVERSIBLE = [form for form in FORMS if "dtype" not in str(form[0]) and "*" not in str(form[0]) and len(form[0]) < 2]
REVERSIBLE += [(["a -> d, src_dtype='float32', dst_dtype='float64'"], {"d": TREE["a"].astype("float64")})]


@pytest.mark.parametrize(("statements", "wanted"), REVERSIBLE, ids=named)
def test_a_reversed_configuration_gives_back_what_the_statements_took(
    tmp_path: Path, statements: list[str], wanted: dict[str, np.ndarray]
) -> None:
    tc.save(tmp_path / "c", wanted)
    found = tc.load(tmp_path / "c", transforms={"aoa_statements": statements, "aoa_config_reverse": True})
    assert_arrays(found, {name: TREE[name] for name in found})
    assert found.keys() <= TREE.keys()


def test_statements_remove_leaves_and_leave_those_of_the_target(saved: Path) -> None:
    into = {"a": np.zeros((4, 6), "float32"), "new": np.ones(2)}
    config = {"aoa_statements": ["_ -> new", *(f"{name} -> _" for name in TREE if name != "a")]}
    tc.load_into(saved, into, transforms=config)
    assert_arrays(into, {"a": TREE["a"], "new": np.ones(2)})


def test_rules_of_the_model_are_applied_to_the_optimizers_state(tmp_path: Path) -> None:
    model = nn.ModuleDict({"old": nn.Linear(2, 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    model["old"](torch.ones(2)).sum().backward()
    optimizer.step()
    tc.save(tmp_path / "c", tc.training.state(model, optimizer))
    new = nn.ModuleDict({"new": nn.Linear(4, 2)})
    again = torch.optim.AdamW(new.parameters())
    names = ["model/old.weight^T -> model/new.weight", "model/old.bias -> model/new.bias, model/rest, axis=0"]
    config = {"aoa_statements": [*names, "model/rest -> _"]}
    tc.training.restore(tmp_path / "c", new, again, transforms=config)
    assert torch.equal(new["new"].weight, model["old"].weight.T)
    moment = optimizer.state[model["old"].weight]["exp_avg"]
    assert torch.equal(again.state[new["new"].weight]["exp_avg"], moment.T)
    assert torch.equal(again.state[new["new"].bias]["exp_avg"], optimizer.state[model["old"].bias]["exp_avg"][:2])


def test_conversions_and_sources_of_several_take_a_configuration(saved: Path, tmp_path: Path) -> None:
    config = {"aoa_statements": ["a, b -> c, axis=0"]}
    tc.convert.convert(saved, tmp_path / "new", select="c", transforms=config)
    assert tc.load(tmp_path / "new")["c"].shape == (8, 6)
    bank = [tc.From(saved, transforms=config, select="c")]
    assert tc.load(bank)["c"].shape == (8, 6)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"statements": ["a -> b"]}, "'statements' is none of its keys"),
        ({"aoa_statements": "a -> b"}, "aoa_statements"),
        ({"aoa_statements": ["a -> b"], "enable": 1}, "'enable' is none of its keys"),
        ({"aoa_statements": ["a -> b"], "aoa_config_reverse": "false"}, '"aoa_config_reverse": True'),
        ({"aoa_statements": ["a, b -> ffn, fused_ffn"]}, "in how many parts ranks held the fused array"),
        ({"aoa_statements": ["a -> e.*.w, axis=0"]}, "names written out"),
        ({"aoa_statements": ["a -> b, dtype='float16'"], "aoa_config_reverse": True}, "src_dtype=, the dtype that is"),
    ],
)
def test_what_a_configuration_leaves_open_is_refused_by_name(saved: Path, config: Any, found: str) -> None:
    with pytest.raises(tc.errors.FormatError, match=re.escape(found)):
        tc.load(saved, transforms=config)


def test_a_configuration_may_stand_in_a_file_of_rules() -> None:
    config = {"aoa_statements": ["a -> b"]}
    assert tc.rules.decode(json.dumps(config)) == tc.rules.decode(f"[{json.dumps(config)}]") == tc.rules.parse(config)


def test_an_unequal_split_is_refused(saved: Path) -> None:
    with pytest.raises(tc.MismatchError, match="split a -> "):
        tc.load(saved, transforms={"aoa_statements": ["a -> x, y, z, axis=0"]})
