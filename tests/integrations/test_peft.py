"""Adapters of PEFT: their state without the base, and exports that PEFT loads, equal to its own files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import treeckpt as tc

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library


@pytest.fixture(autouse=True)
def peft(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, without a network; imported by the first test."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("peft", minversion="0.21")


METHODS: dict[str, Callable[[Any], Any]] = {
    "lora": lambda peft: peft.LoraConfig(target_modules=["c_attn"], bias="lora_only"),
    "dora": lambda peft: peft.LoraConfig(target_modules=["c_attn"], use_dora=True),
    "ia3": lambda peft: peft.IA3Config(target_modules=["c_attn", "c_proj"], feedforward_modules=["c_proj"]),
    "prompt": lambda peft: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": lambda peft: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8
    ),
    "prefix": lambda peft: peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8
    ),
    "modules-to-save": lambda peft: peft.LoraConfig(target_modules=["c_attn"], modules_to_save=["ln_f"]),
    "tokens": lambda peft: peft.LoraConfig(target_modules=["c_attn"], trainable_token_indices=[1, 2]),
    "vera": lambda peft: peft.VeraConfig(target_modules=["c_attn"]),
}
TOKENS = torch.arange(5)[None]


def _model() -> Any:
    from tests.integrations.trainer_job import language_model

    return language_model().eval()


def _trained(peft: Any, config: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Returns a model whose adapter has trained for two steps."""
    model = peft.get_peft_model(_model(), config)
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for _ in range(2):
        _train_step(model, optimizer)
    return model, optimizer


def _train_step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def _logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=TOKENS).logits


@pytest.mark.parametrize("method", METHODS)
def test_the_state_of_an_adapter_goes_on_bit_for_bit_and_has_no_base(peft: Any, tmp_path: Path, method: str) -> None:
    from treeckpt.integrations.peft import peft_state

    model, optimizer = _trained(peft, METHODS[method](peft))
    state = peft_state(model, optimizer)
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad and "transformer.wte.w" in name]
    assert not {*frozen} & {*state["model"]} and len(state["left_out"]) > 20
    tc.save(tmp_path / "c", state)
    other = peft.get_peft_model(_model(), METHODS[method](peft))
    others = torch.optim.Adam([one for one in other.parameters() if one.requires_grad], lr=0.1)
    tc.training.restore(tmp_path / "c", other, others, strict="missing")
    assert [_train_step(other, others) for _ in range(2)] == [_train_step(model, optimizer) for _ in range(2)]


@pytest.mark.parametrize("method", METHODS)
def test_an_export_is_the_file_that_peft_writes_and_loads(peft: Any, tmp_path: Path, method: str) -> None:
    from treeckpt.integrations.peft import export, peft_state

    model, _ = _trained(peft, METHODS[method](peft))
    tc.save(tmp_path / "c", peft_state(model))
    model.save_pretrained(tmp_path / "own")
    export(tmp_path / "c", peft.get_peft_model(_model(), METHODS[method](peft)), tmp_path / "ours")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "own" / name).read_bytes()
    loaded = peft.PeftModel.from_pretrained(_model(), tmp_path / "ours")
    assert torch.equal(_logits(loaded), _logits(model))


def test_adalora_goes_on_bit_for_bit_and_exports_the_ranks_that_were_saved(peft: Any, tmp_path: Path) -> None:
    from treeckpt.integrations.peft import AdaLoraRanks, export, peft_state

    def adalora() -> tuple[Any, torch.optim.Optimizer]:
        schedule: dict[str, Any] = {"init_r": 6, "target_r": 2, "total_step": 10, "tinit": 1, "tfinal": 2, "deltaT": 1}
        config = peft.AdaLoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, **schedule)
        model = peft.get_peft_model(_model().train(), config)
        return model, torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=0.1)

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
        loss = _train_step(model, optimizer)
        model.base_model.update_and_allocate(number)
        return loss

    model, optimizer = adalora()
    with pytest.raises(tc.TreeckptError, match=r"AdaLoraRanks\(model\)"):
        peft_state(model, optimizer)
    losses = list[float]()
    for number in range(1, 12):
        losses.append(step(model, optimizer, number))
        tc.save(tmp_path / f"{number}", peft_state(model, optimizer, extra={"adalora": AdaLoraRanks(model)}))
        before = AdaLoraRanks(model).state_dict()["patterns"]
        model.save_pretrained(tmp_path / f"own-{number}")
        assert AdaLoraRanks(model).state_dict()["patterns"] == before
    for number in (1, 6, 9):  # before it takes ranks away, while it does, and after that
        other, others = adalora()
        ranks = {"adalora": AdaLoraRanks(other)}
        tc.training.restore(tmp_path / f"{number}", other, others, strict="missing", extra=ranks)
        assert [step(other, others, at) for at in range(number + 1, 12)] == losses[number:]
        export(tmp_path / f"{number}", other, tmp_path / f"ours-{number}")
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            written = [(tmp_path / f"{who}-{number}" / name).read_bytes() for who in ("own", "ours")]
            assert written[0] == written[1]
    loaded = peft.PeftModel.from_pretrained(_model(), tmp_path / "ours-9")
    assert loaded.base_model.model.transformer.h[0].attn.c_attn.lora_A["default"].shape[0] < 6


def test_adapters_that_are_not_active_are_saved_and_exported_too(peft: Any, tmp_path: Path) -> None:
    from treeckpt.integrations.peft import export, peft_state

    def two(model: Any) -> Any:
        model.add_adapter("other", peft.LoraConfig(target_modules=["c_proj"], init_lora_weights=False))
        return model

    model = two(_trained(peft, METHODS["lora"](peft))[0])
    model.set_adapter("default")
    tc.save(tmp_path / "c", peft_state(model, rng=False))
    blank = two(peft.get_peft_model(_model(), METHODS["lora"](peft)))
    export(tmp_path / "c", blank, tmp_path / "ours")
    loaded = peft.PeftModel.from_pretrained(_model(), tmp_path / "ours")
    loaded.load_adapter(tmp_path / "ours" / "other", "other")
    for name in ("default", "other"):
        model.set_adapter(name)
        loaded.set_adapter(name)
        assert torch.equal(_logits(loaded), _logits(model))


def test_what_has_no_adapters_is_refused(peft: Any, tmp_path: Path) -> None:
    from treeckpt.integrations.peft import export, peft_state

    model, _ = _trained(peft, METHODS["lora"](peft))
    tc.save(tmp_path / "c", peft_state(torch.nn.parallel.DataParallel(model), exclude="**/*.h.1.**"))
    with pytest.raises(tc.TreeckptError, match=r"PeftModel.*GPT2LMHeadModel"):
        peft_state(_model())
    with pytest.raises(tc.MismatchError, match=r"h\.1\.attn.*all adapters of the model"):
        export(tmp_path / "c", model, tmp_path / "ours")
