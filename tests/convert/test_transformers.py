"""A model of transformers, there and back. Runs where transformers is installed: pip install -e '.[hub]'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import treeckpt as tc

transformers: Any = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def _gpt2() -> Any:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=97, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def _llama() -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=48,
        vocab_size=97, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(12).view(2, 6)).logits


@pytest.mark.parametrize("make", [_gpt2, _llama])
@pytest.mark.parametrize("size", [None, "20kB"])
def test_from_pretrained_loads_what_we_write_and_we_what_it_saves(tmp_path: Path, make: Any, size: str | None) -> None:
    torch.manual_seed(0)
    model = make()
    tc.save(tmp_path / "one", {"model": model.state_dict(), "step": 3})
    report = tc.convert.to_safetensors(tmp_path / "one", tmp_path / "hub", subtree="model", max_shard_size=size)
    assert (len(report.files) > 1) == (size is not None)
    model.config.save_pretrained(tmp_path / "hub")
    loaded, info = type(model).from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert torch.equal(_logits(loaded), _logits(model))
    assert {k: v.dtype for k, v in loaded.state_dict().items()} == {k: v.dtype for k, v in model.state_dict().items()}
    model.save_pretrained(tmp_path / "theirs", **({"max_shard_size": "20KB"} if size else {}))
    assert bool(list((tmp_path / "theirs").glob("*.index.json"))) == (size is not None)
    tc.convert.convert(tmp_path / "theirs", tmp_path / "two")
    back = tc.load(tmp_path / "two")
    other = make()
    missing, unexpected = other.load_state_dict(back, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, "the tied one is not in their files"
    other.tie_weights()
    assert torch.equal(_logits(other), _logits(model))


def test_a_cast_model_loads_in_its_dtype(tmp_path: Path) -> None:
    model = _llama()
    tc.save(tmp_path / "one", model.state_dict())
    tc.convert.to_safetensors(tmp_path / "one", tmp_path / "hub", dtype="bfloat16")
    model.config.save_pretrained(tmp_path / "hub")
    loaded = type(model).from_pretrained(tmp_path / "hub", dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16()), name
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["model_type"] == "llama"
