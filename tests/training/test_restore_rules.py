"""A model whose parameters were renamed, split and joined goes on training as the one that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from treeckpt import rules as R

HEADS, KV, SIZE, HIDDEN = 4, 2, 3, 6


class Fused(nn.Module):
    """Grouped-query projections and a gated layer, as one weight each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, HIDDEN)
        self.h = nn.ModuleList(nn.ModuleDict({
            "qkv": nn.Linear(HIDDEN, (HEADS + 2 * KV) * SIZE), "ffn": nn.Linear(HIDDEN, 10, bias=False)
        }) for _ in range(2))  # fmt: skip
        self.head = nn.Linear(HIDDEN, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.h:
            qkv = layer["qkv"](x).unflatten(-1, (KV, HEADS // KV + 2, SIZE))
            x = x + mix(qkv[..., :-2, :].flatten(-3), qkv[..., -2, :].flatten(-2), qkv[..., -1, :].flatten(-2))
            gate, up = layer["ffn"](x).chunk(2, -1)
            x = x + (gate.tanh() * up).sum(-1, keepdim=True)
        return self.head(x * self.scale)


class Parted(nn.Module):
    """The same with a weight for each."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": HEADS * SIZE, "k": KV * SIZE, "v": KV * SIZE}
        self.blocks = nn.ModuleList(nn.ModuleDict({
            **{name: nn.Linear(HIDDEN, size) for name, size in sizes.items()},
            "gate": nn.Linear(HIDDEN, 5, bias=False), "up": nn.Linear(HIDDEN, 5, bias=False),
        }) for _ in range(3))  # fmt: skip
        self.tokens = nn.Embedding(11, HIDDEN)
        self.head = nn.Linear(HIDDEN, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        for layer in list(self.blocks)[1:]:
            x = x + mix(layer["q"](x), layer["k"](x), layer["v"](x))
            x = x + (layer["gate"](x).tanh() * layer["up"](x)).sum(-1, keepdim=True)
        return self.head(x * self.scale)


def mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q[..., :HIDDEN] * k + v - q[..., HIDDEN:]


RULES = [
    R.Rename("model/h.$L.*", "model/blocks.${L + 1}.*"),
    R.split_qkv(
        "model/blocks.$L.qkv.*",
        ("model/blocks.$L.q.*", "model/blocks.$L.k.*", "model/blocks.$L.v.*"),
        heads=HEADS,
        kv_heads=KV,
    ),
    R.split_ffn("model/blocks.$L.ffn.weight", ("model/blocks.$L.gate.weight", "model/blocks.$L.up.weight")),
]
NEW = ["model/blocks.0*"]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    x = torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def saved(path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Fused().double()
    model.scale += 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for seed in range(3):
        step(model, optimizer, seed)
    tc.save(path, tc.training.state(model, optimizer))
    return model, optimizer


def fresh(*, lr: float = 0.5) -> tuple[Parted, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Parted().double()
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def test_a_model_with_parted_projections_goes_on_where_the_fused_one_stood(tmp_path: Path) -> None:
    before = saved(tmp_path / "c")
    model, optimizer = fresh()
    report = tc.training.restore(
        tmp_path / "c", model, optimizer, rename={"model/embed.*": "model/tokens.*"}, transforms=RULES, exclude=NEW
    )
    assert not report.missing and not report.unexpected
    assert ("model/embed.weight", "model/tokens.weight") in report.renamed
    assert optimizer.param_groups[0]["lr"] == 0.02
    state = optimizer.state[model.blocks[2]["k"].bias]
    fused = before[1].state[before[0].h[1]["qkv"].bias]["exp_avg"].view(KV, HEADS // KV + 2, SIZE)
    assert torch.equal(state["exp_avg"], fused[:, -2].flatten()) and state["step"] == 3
    assert not optimizer.state.get(model.blocks[0]["q"].weight)
    for seed in range(3, 6):
        assert step(model, optimizer, seed) == pytest.approx(step(*before, seed), rel=1e-12)


def test_a_model_with_fused_projections_goes_on_where_the_parted_one_stood(tmp_path: Path) -> None:
    model, optimizer = fresh(lr=0.02)
    for seed in range(3):
        step(model, optimizer, seed)
    model.scale += 1
    tc.save(tmp_path / "c", tc.training.state(model, optimizer))
    heads = "fused_qkv, num_heads=4, num_key_value_groups=2, axis=0"
    rules = f"""
        blocks.0.* -> _
        tokens.* -> embed.*
        blocks.$L.q.*, blocks.$L.k.*, blocks.$L.v.* -> h.${{L-1}}.qkv.*, {heads}
        blocks.$L.gate.weight, blocks.$L.up.weight -> h.${{L-1}}.ffn.weight, fused_ffn, axis=0
    """
    torch.manual_seed(2)
    fused = Fused().double()
    adam = torch.optim.AdamW(fused.parameters(), lr=0.5)
    report = tc.training.restore(tmp_path / "c", fused, adam, transforms=R.parse(rules, prefix="model/"))
    assert "model/blocks.0.q.weight" in report.dropped and not report.unexpected
    for seed in range(3, 6):
        assert step(fused, adam, seed) == pytest.approx(step(model, optimizer, seed), rel=1e-12)


def test_what_is_missing_without_the_rules_is_named_and_nothing_changes(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    model, optimizer = fresh()
    was = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(tc.MismatchError, match=r"missing in the checkpoint: model/blocks\.0"):
        tc.training.restore(tmp_path / "c", model, optimizer, transforms=RULES)
    with pytest.raises(tc.MismatchError, match=r"split model/blocks"):
        tc.training.restore(
            tmp_path / "c", model, optimizer, transforms=[RULES[0], R.Split("model/blocks.$L.x", ("a",))]
        )
    assert all(torch.equal(value, was[name]) for name, value in model.state_dict().items())


def test_kept_and_unselected_parameters_stay_as_they_are(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    model, optimizer = fresh()
    gate, scale = model.blocks[1]["gate"].weight.clone(), model.scale.clone()
    rules: list[Any] = [R.Rename("model/embed.*", "model/tokens.*"), *RULES, R.Keep("model/blocks.*.gate.weight")]
    report = tc.training.restore(
        tmp_path / "c", model, optimizer, transforms=rules, exclude=[*NEW, "model/scale"], strict=True
    )
    assert torch.equal(model.blocks[1]["gate"].weight, gate) and torch.equal(model.scale, scale)
    assert not optimizer.state.get(model.blocks[1]["gate"].weight)
    assert "exp_avg" in optimizer.state[model.blocks[1]["up"].weight]
    assert not report.missing


def test_rules_on_a_tree_in_memory_are_refused() -> None:
    model, optimizer = fresh()
    with pytest.raises(tc.MismatchError, match="a tree in memory"):
        tc.training.restore(tc.training.state(model, optimizer), model, optimizer, exclude="model/head*")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select": "model/wieght"}, "model/wieght: expected each glob of select .* near to it .*model/weight"),
        ({"exclude": ["model/wieght"]}, "model/wieght: expected each glob of exclude"),
        ({"keep": ("lrr",)}, "keep: expected some of .*lr, .*found 'lrr'"),
        ({"strict": "miss"}, "strict: expected True or False or 'missing', found 'miss'"),
        ({"read": tc.ReadOptions(mmap=True)}, "mmap: expected False, in restore, found True"),
    ],
)
def test_words_that_mean_nothing_are_refused_before_anything_changes(
    tmp_path: Path, options: Any, message: str
) -> None:
    saved, model = nn.Linear(2, 2), nn.Linear(2, 2)
    tc.save(tmp_path / "c", tc.training.state(saved, torch.optim.AdamW(saved.parameters())))
    before = model.weight.clone()
    with pytest.raises(tc.MismatchError, match=message):
        tc.training.restore(tmp_path / "c", model, torch.optim.AdamW(model.parameters()), **options)
    assert torch.equal(before, model.weight)


def test_what_only_one_side_has_may_be_excluded(tmp_path: Path) -> None:
    saved, model = (
        nn.ModuleDict({"body": nn.Linear(2, 2), "old": nn.Linear(2, 2)}),
        nn.ModuleDict({"body": nn.Linear(2, 2), "new": nn.Linear(2, 3)}),
    )
    tc.save(tmp_path / "c", tc.training.state(saved))
    tc.training.restore(tmp_path / "c", model, exclude=["model/old.*", "model/new.*"], rng=False)
    assert torch.equal(model["body"].weight, saved["body"].weight)
