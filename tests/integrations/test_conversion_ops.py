"""The rules of each conversion operation do what the operation does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import treeckpt as tc
from treeckpt.integrations.transformers._hub_names import RECORDED, NamedArray, RecordedOperation, RuleRecorder


def _operation(name: str, *args: Any, **options: Any) -> Any:
    pytest.importorskip("transformers", minversion="5.23")
    from transformers import core_model_loading

    return getattr(core_model_loading, name)(*args, **options)


def _tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _list(count: int, *shape: int, seed: int = 0) -> list[torch.Tensor]:
    return [_tensor(*shape, seed=100 * seed + i) for i in range(count)]


EXPERTS = {"experts.*.gate": _list(4, 2, 3), "experts.*.up": _list(4, 2, 3, seed=1)}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    ("Chunk", {"dim": 1}, {"qkv": [_tensor(2, 6)]}, ["q", "k", "v"]),
    ("Split", {"dim": 0}, {"qkv": [_tensor(6, 2)]}, ["q", "k", "v"]),
    ("Concatenate", {"dim": 1}, {"gate": [_tensor(3, 2)], "up": [_tensor(3, 4)]}, ["both"]),
    ("Interleave", {"dim": 1}, {"w": [_tensor(2, 8, 3)]}, ["w"]),
    ("Interleave", {"dim": 0, "inverse": True}, {"w": [_tensor(6, 3)]}, ["w"]),
    ("MergeModulelist", {"dim": 0}, EXPERTS, ["experts"]),
    ("SplitModulelist", {"dim": 0}, {"experts": [_tensor(4, 2, 3)]}, ["experts.*.w"]),
    ("Transpose", {"dim0": 1, "dim1": 2}, {"w": [_tensor(4, 2, 3)]}, ["w"]),
    ("Transpose", {"dim0": 0, "dim1": 1, "check_dims": True}, {"w": [_tensor(2, 3)]}, ["q"]),
    ("Transpose", {"dim0": 0, "dim1": 1, "check_dims": True}, {"w": [_tensor(3, 2)]}, ["q"]),
    ("PermuteForRope", {}, {"w": [_tensor(16, 3)]}, ["w"]),
    ("PermuteForRope", {"inverse": True}, {"w": [_tensor(16)]}, ["w"]),
    ("PermuteForRope", {"subconfig_key": "vision_config", "permute_layer_names": ["q"]}, {"q": [_tensor(8, 2)],
     "v": [_tensor(8, 2)]}, ["fused"]),
    ("ErnieFuseAndSplitTextVisionExperts", {}, EXPERTS, ["text", "vision"]),
    ("ErnieSplitAndDecoupleTextVisionExperts", {}, {"text": [_tensor(2, 4, 3)], "vision": [_tensor(2, 4, 3)]},
     ["experts.*.gate", "experts.*.up"]),
]  # fmt: skip


class _Model:
    def get_parameter(self, name: str) -> torch.Tensor:
        return {"q": _tensor(3, 2), "k": _tensor(1, 2), "v": _tensor(2, 2)}[name]


@pytest.mark.parametrize(("name", "options", "given", "targets"), CASES)
def test_rules_give_what_the_operation_gives(
    name: str, options: dict[str, Any], given: dict[str, Any], targets: list[str]
) -> None:
    op = _operation(name, **options)
    more: Any = {
        "source_patterns": list(given),
        "target_patterns": targets,
        "full_layer_name": "q",
        "model": _Model(),
        "config": SimpleNamespace(num_attention_heads=4, vision_config=SimpleNamespace(num_attention_heads=2)),
    }
    stored = {f"{name}[{i}]": tensor for name, tensors in given.items() for i, tensor in enumerate(tensors)}
    named = {name: [NamedArray(f"{name}[{i}]", tuple(t.shape)) for i, t in enumerate(ts)] for name, ts in given.items()}
    to = RuleRecorder("")
    made = RecordedOperation(op, to).convert(named, **more)
    wanted = op.convert({name: list(tensors) for name, tensors in given.items()}, **more)
    store = tc.MemoryStore()
    tc.save(store, stored)
    loaded = tc.load(store, transforms=to.rules)
    assert made.keys() == wanted.keys()
    for name, array in made.items():
        array = array[0] if isinstance(array, list) else array
        tensor = wanted[name][0] if isinstance(wanted[name], list) else wanted[name]
        assert array.shape == tuple(tensor.shape)
        assert torch.equal(loaded[array.name], tensor), name


def test_every_operation_is_compared() -> None:
    assert {name for name, *_ in CASES} == set(RECORDED)


def test_an_operation_undone_is_the_rules_of_its_reverse() -> None:
    to = RuleRecorder("")
    forward = RecordedOperation(_operation("PermuteForRope"), to)
    assert forward.reverse_op.op.inverse and forward.reverse_op.to is to


def test_arrays_that_an_operation_does_not_fit_are_named() -> None:
    op = RecordedOperation(_operation("Chunk", dim=0), RuleRecorder(""))
    given = {"w": [NamedArray("w", (5, 2))]}
    with pytest.raises(tc.MismatchError, match=r"layers.0.w: expected arrays that Chunk fits, found 2 chunks of shape"):
        op.convert(given, target_patterns=["a", "b"], source_patterns=["w"], full_layer_name="layers.0.w")
