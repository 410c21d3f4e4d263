"""Models of transformers under the names and layouts of the hub, there and back. Needs the extra `hub`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import treeckpt as tc
from tests.helpers.hub_models import HUB_MODELS, outputs, tiny_model
from treeckpt.integrations.transformers import hub_rules, module_rules

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
QUICK = ("bert", "qwen2", "qwen3_moe")
"""A model with renamed parameters, one with tied ones, one whose experts are joined."""


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, without a network; imported by the first test: every worker of pytest-xdist collects this file."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    library: Any = pytest.importorskip("transformers", minversion="5.23")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def _arrays(directory: Path) -> dict[str, Any]:
    """Shape and dtype of each array in the one file of a directory."""
    data = (directory / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: (entry["shape"], entry["dtype"]) for name, entry in header.items() if name != "__metadata__"}


def _load_with_transformers(model: Any, directory: Path) -> Any:
    model.config.save_pretrained(directory)
    loaded, info = type(model).from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return loaded


def _check_state(state: dict[str, Any], model: Any) -> None:
    wanted = model.state_dict()
    assert state.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(state[name], tensor)] == []


def _check_there_and_back(model: Any, tmp_path: Path) -> None:
    tc.save(tmp_path / "ours", {"model": model.state_dict(), "step": 3})
    tc.convert.to_safetensors(tmp_path / "ours", tmp_path / "hub", subtree="model", hub_names=model)
    loaded = _load_with_transformers(model, tmp_path / "hub")
    assert torch.equal(outputs(loaded), outputs(model))
    _check_state(loaded.state_dict(), model)

    model.save_pretrained(tmp_path / "theirs")
    assert _arrays(tmp_path / "hub") == _arrays(tmp_path / "theirs"), "as save_pretrained writes them"
    rules = module_rules(model)
    tc.convert.convert(tmp_path / "theirs", tmp_path / "back")
    _check_state(tc.load(tmp_path / "back", model.state_dict(), transforms=rules), model)

    tc.convert.convert(tmp_path / "hub", tmp_path / "again")
    rules = module_rules(model, tc.inspect(tmp_path / "again"))
    tc.convert.convert(tmp_path / "hub", tmp_path / "renamed", transforms=rules)
    _check_state(tc.load(tmp_path / "renamed", model.state_dict()), model)


@pytest.mark.parametrize("name", QUICK)
def test_a_model_goes_to_the_hubs_names_and_back(tmp_path: Path, name: str) -> None:
    _check_there_and_back(tiny_model(name), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HUB_MODELS.keys() - set(QUICK)))
def test_every_model_goes_to_the_hubs_names_and_back(tmp_path: Path, name: str) -> None:
    _check_there_and_back(tiny_model(name), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "mixtral", "vit"])
def test_a_model_that_transformers_loaded_has_the_names_that_it_came_with(tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path / "theirs")
    loaded = _load_with_transformers(model, tmp_path / "theirs")
    tc.save(tmp_path / "ours", loaded.state_dict())
    tc.convert.to_safetensors(tmp_path / "ours", tmp_path / "hub", hub_names=loaded)
    assert _arrays(tmp_path / "hub") == _arrays(tmp_path / "theirs")


def test_a_config_has_the_rules_of_its_model_and_they_have_a_json_form() -> None:
    model = tiny_model("qwen3_moe")
    model.config.architectures = [type(model).__name__]
    for derive in (hub_rules, module_rules):
        rules = derive(model)
        assert derive(model.config) == rules == tc.rules.decode(tc.rules.encode(rules))


def test_the_optimizers_moments_follow_the_experts_of_a_training_state(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    optimizer = torch.optim.AdamW(model.parameters())
    outputs_of = model(input_ids=torch.arange(12).view(2, 6), labels=torch.arange(12).view(2, 6))
    outputs_of.loss.backward()
    optimizer.step()
    state = tc.training.state(model, optimizer)
    tc.save(tmp_path / "one", state)
    there = hub_rules(model, tc.inspect(tmp_path / "one"), prefix="model/")
    tc.save(tmp_path / "hub", tc.load(tmp_path / "one", transforms=tc.rules.carried(*there)))
    paths = tc.inspect(tmp_path / "hub").by_path
    assert "model/model.layers.0.mlp.experts.3.gate_proj.weight" in paths
    assert "optimizer/model.layers.0.mlp.experts.3.gate_proj.weight/exp_avg" in paths
    back = module_rules(model, prefix="model/")
    loaded = tc.load(tmp_path / "hub", state, transforms=tc.rules.carried(*back))
    assert all(torch.equal(a, b) for a, b in zip(_leaves(loaded), _leaves(state), strict=True))


def _leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def test_what_is_not_the_models_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    tc.save(tmp_path / "one", {"model": model.state_dict(), "step": 3})
    with pytest.raises(tc.MismatchError, match=r"of Qwen2ForCausalLM, found .* as model/model.embed.*subtree='model'"):
        tc.convert.to_safetensors(tmp_path / "one", tmp_path / "hub", hub_names=model)
    other = {name: tensor[:1] if name == "model.norm.weight" else tensor for name, tensor in model.state_dict().items()}
    tc.save(tmp_path / "two", other)
    with pytest.raises(tc.MismatchError, match=r"model.norm.weight: expected shape \(32,\)"):
        tc.convert.to_safetensors(tmp_path / "two", tmp_path / "hub", hub_names=model)
    with pytest.raises(tc.MismatchError, match="a model of transformers, or its config, found Linear"):
        tc.convert.to_safetensors(tmp_path / "one", tmp_path / "hub", hub_names=torch.nn.Linear(2, 2))
    assert not (tmp_path / "hub").exists()


def test_a_conversion_without_rules_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading as loading

    model = tiny_model("qwen2")
    convert = loading.Conv3dToLinear(3, (1, 2, 2))
    model._weight_conversions = [loading.WeightConverter("q_proj.weight", "q_proj.weight", operations=[convert])]
    with pytest.raises(tc.MismatchError, match=r"self_attn.q_proj.weight: expected .*Chunk.*LinearToConv3d"):
        hub_rules(model)


def test_outputs_and_batches_are_containers_of_their_class(transformers: Any) -> None:
    model = tiny_model("qwen2")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(12).view(2, 6) + 3})
    with torch.no_grad():
        output = model(**batch, output_hidden_states=True, use_cache=False)
    store = tc.MemoryStore()
    tc.save(store, {"output": output, "batch": batch})
    loaded = tc.load(store)
    assert type(loaded["output"]) is type(output) and type(loaded["batch"]) is type(batch)
    assert list(loaded["output"]) == list(output) and loaded["output"].loss is None
    assert loaded["output"].logits is loaded["output"]["logits"] and torch.equal(loaded["output"].logits, output.logits)
    assert torch.equal(loaded["output"].hidden_states[1], output.hidden_states[1])
    assert torch.equal(model(**loaded["batch"]).logits, output.logits)


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, "20kB"])
def test_sharded_directories_and_other_dtypes_load_too(tmp_path: Path, size: str | None) -> None:
    model = tiny_model("llama")
    tc.save(tmp_path / "one", model.state_dict())
    options: Any = {"hub_names": model, "dtype": "bfloat16", "max_shard_size": size}
    report = tc.convert.to_safetensors(tmp_path / "one", tmp_path / "hub", **options)
    assert (len(report.files) > 1) == (size is not None)
    loaded = _load_with_transformers(model, tmp_path / "hub")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].bfloat16(), tensor.bfloat16()), name


def test_experts_of_float8_on_the_hub_are_scaled_and_joined(tmp_path: Path) -> None:
    model, fresh = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path / "plain")
    block, tensors, expected = (8, 12), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in tc.load(tmp_path / "plain").items():
        tensors[name] = expected[name] = tensor
        if name.endswith("proj.weight"):
            rows, columns = tensor.shape
            scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])) / 10 + 0.01
            each = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
            tensors[name] = (tensor.float() / each).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
            expected[name] = (tensors[name].float() * each).to(tensor.dtype)
    for directory, given in (("float8", tensors), ("expected", expected)):
        tc.save(tmp_path / directory, given)
    wanted = tc.load(tmp_path / "expected", transforms=module_rules(model))
    scale = tc.rules.Dequantize("*.weight", "*.weight_scale_inv", block=block, dtype=str(model.dtype))
    rules = [scale, *module_rules(model, tc.inspect(tmp_path / "float8"))]
    report = tc.training.restore(tmp_path / "float8", fresh, under="model", transforms=rules)
    assert report.unexpected == report.missing == () and len(tensors) > len(expected)
    _check_state(fresh.state_dict(), type("Wanted", (), {"state_dict": lambda _: wanted})())
    with pytest.raises(tc.MismatchError, match=r"_proj.weight.*weight_scale_inv.*Dequantize"):
        tc.load(tmp_path / "float8", model.state_dict(), transforms=rules[1:], cast=True, strict="missing")


EXPORTS: dict[str, Any] = {
    "hub": tc.convert.to_safetensors,
    "alone/model.safetensors": tc.convert.convert,
    "torch/pytorch_model.bin": tc.convert.to_torch_file,
}


@pytest.mark.parametrize("name", EXPORTS)
def test_from_pretrained_opens_what_was_exported_with_the_files_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    model = tiny_model("qwen2")
    model.config.save_pretrained(tmp_path / "files")
    files = {path.name: path for path in (tmp_path / "files").iterdir()}
    tc.save(tmp_path / "ours", {"model": model.state_dict(), "step": 3}, files=files)
    report = EXPORTS[name](tmp_path / "ours", tmp_path / name, subtree="model")
    assert set(files) < set(report.files)
    directory = (tmp_path / name).parent if "/" in name else tmp_path / name
    assert torch.equal(outputs(type(model).from_pretrained(directory)), outputs(model))


def test_the_files_of_a_model_come_along_through_all_formats_with_a_directory(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path / "theirs")
    for before, after, to in (("theirs", "ours", "treeckpt"), ("ours", "dcp", "dcp"), ("dcp", "hub", "safetensors")):
        tc.convert.convert(tmp_path / before, tmp_path / after, to=to)
    assert tc.read_file(tmp_path / "ours", "config.json") == (tmp_path / "theirs/config.json").read_bytes()
    assert torch.equal(outputs(type(model).from_pretrained(tmp_path / "hub")), outputs(model))
