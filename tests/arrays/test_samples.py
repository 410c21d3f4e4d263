"""Large replicas are compared by samples: another tensor is found always, as is any changed range of 256 KiB."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.devices import DEVICES
from treeckpt._arrays.base import FlatRangeArray, LazyArray
from treeckpt._arrays.describe import content_digests, describe_tree
from treeckpt._arrays.digests import PERIOD_NBYTES, SAMPLE_NBYTES, SMALL_LEAF_NBYTES, ComparedPart, compared, digests_of
from treeckpt._arrays.torch import DeviceArray, tensor_data
from treeckpt._core.sharding.region import Region
from treeckpt._core.tree.spec import ArraySpec


def sampled(leaf: Any) -> bytes:
    [digest] = content_digests(describe_tree({"a": leaf}, rank=0), "sample").values()
    return digest


def noise(*shape: int, seed: int = 0, dtype: str = "uint8") -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def as_tensor_of(kind: str) -> Callable[[np.ndarray], Any]:
    """An array of float32 in other memory: what is in it, in C order, is the same."""
    return {
        "contiguous": torch.from_numpy,
        "transposed": lambda a: torch.from_numpy(np.ascontiguousarray(a.T)).t(),
        "part of rows": lambda a: torch.from_numpy(np.concatenate([a, a], 1))[:, : a.shape[1]],
        "every second": lambda a: torch.from_numpy(np.repeat(a, 2, 0))[::2],
        "reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
        "big-endian": lambda a: a.astype(">f4"),
        "lazy": lambda a: LazyArray(
            ArraySpec(a.shape, "float32", kind="numpy"), lambda region: a[region.slices()].view("<u4")
        ),
        "imaginary": lambda a: torch.from_numpy(-a).mul(1j).conj().imag,  # a negative view, read through torch
    }[kind]


KINDS = [
    "contiguous", "transposed", "part of rows", "every second", "reversed", "big-endian", "lazy", "imaginary",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(300, 700), (3, 100_000), (100_000, 3), (129, 511)])
def test_samples_are_of_the_content_wherever_it_lies(kind: str, shape: tuple[int, int]) -> None:
    content = np.random.default_rng(0).standard_normal(shape, np.float32)
    leaf = as_tensor_of(kind)(content)
    assert sampled(leaf) == sampled(content)
    changed = content.copy()
    changed.reshape(-1)[-1] += 1
    assert sampled(as_tensor_of(kind)(changed)) == sampled(changed) != sampled(content), "the last element"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_changed_range_of_256_kib_is_always_found(data: st.DataObject) -> None:
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8, 16, 20]), label="itemsize")
    least = -(-PERIOD_NBYTES // itemsize)
    size = data.draw(st.integers(least, 3 * least), label="size")
    rows = data.draw(st.sampled_from([1, 2, 3, 7]), label="rows")
    size += -size % rows
    start = data.draw(st.integers(0, size - least), label="start")
    kind = {16: "complex128", 20: "U5"}.get(itemsize, f"u{itemsize}")
    before = np.zeros(size, kind)
    after = before.copy()
    after[start : start + least] = "x" if kind == "U5" else 1
    strides = data.draw(st.sampled_from(["C order", "transposed", "reversed"]), label="strides")
    shown = [np.ascontiguousarray(one.reshape(rows, -1)) for one in (before, after)]
    if strides == "transposed":
        shown = [np.ascontiguousarray(one.T).T for one in shown]
    elif strides == "reversed":
        shown = [np.ascontiguousarray(one[::-1])[::-1] for one in shown]
    assert sampled(shown[0]) != sampled(shown[1])


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_boxes_of_pieces_are_sampled_alike_in_each_piece_that_has_them(data: st.DataObject) -> None:
    """Whatever array the box is in: a larger one, a flat range, or on a device."""
    content = torch.from_numpy(noise(400, 300, dtype="float32"))
    low, left = data.draw(st.integers(0, 50)), data.draw(st.integers(0, 20))
    box = Region((low, left), (300, 270))
    want = content[box.slices()].contiguous()
    found = [
        ComparedPart(tensor_data(content), box, 4),
        ComparedPart(DeviceArray(content), box, 4),
        ComparedPart(FlatRangeArray(tensor_data(content.reshape(-1)), 0, (400, 300)), box, 4),
        ComparedPart(FlatRangeArray(DeviceArray(content.reshape(-1)), 0, (400, 300)), box, 4),
        ComparedPart(DeviceArray(content.t().contiguous().t()), box, 4),
        ComparedPart(tensor_data(want), Region.whole((300, 270)), 4),
    ]
    parts = [part for one in found if (part := compared(one, "sample")) is not None]
    assert len(parts) == 6 and len(set(digests_of(parts))) == 1
    small = [ComparedPart(part.data, Region(part.box.offset, (7, 8)), 4) for part in found]
    assert len(set(digests_of(small))) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_samples_of_tensors_read_by_torch_are_those_of_numpy(device: str, dtype: torch.dtype) -> None:
    """Several are copied together, small ones as a whole."""
    data = torch.from_numpy(noise(300_000 * dtype.itemsize) % 2).view(dtype)
    tensors = [data[:n] for n in (0, 1, 5000, 90_000, 300_000)]
    here = [tensor_data(tensor) for tensor in tensors]
    there = [DeviceArray(tensor.to(device)) for tensor in tensors]
    digests = [
        digests_of(
            [
                part
                for one, tensor in zip(readers, tensors, strict=True)
                if (part := compared(ComparedPart(one, Region.whole(tensor.shape), dtype.itemsize), "sample"))
            ]
        )
        for readers in (here, there)
    ]
    assert digests[0] == digests[1] and len(digests[0]) == len(tensors)


def layer(name: str, seed: int, shapes: random.Random) -> torch.Tensor:
    """A tensor of a random shape and dtype, whose initialisation is that of the seed."""
    torch.manual_seed(seed)
    rows, width = shapes.choice([64, 300, 1000]), shapes.choice([3, 64, 257, 500])
    if name == "codes":
        return torch.randint(0, 256, (rows * width,), dtype=torch.uint8)
    weight = torch.empty(rows, width).uniform_(-0.1, 0.1)
    return {"weight": weight, "column-major": weight.t(), "half": weight.bfloat16(), "bias": weight[0]}[name]


def test_a_replica_of_another_initialisation_is_found_in_each_of_1000_trees() -> None:
    names, found = ("weight", "column-major", "half", "bias", "codes"), 0
    for seed in range(1000):
        rng = random.Random(seed)
        tree = {f"layer{n}": layer(rng.choice(names), seed, rng) for n in range(rng.randint(1, 3))}
        odd = rng.choice(sorted(tree))
        kind = tree[odd]
        other = (
            torch.rand(kind.shape, generator=torch.Generator().manual_seed(seed + 1_000_000)).mul(200).to(kind.dtype)
        )
        digests = [content_digests(describe_tree(one, rank=0), "sample") for one in (tree, {**tree, odd: other})]
        found += {path for path in tree if digests[0][path] != digests[1][path]} == {odd}
    assert found == 1000


def test_samples_are_few() -> None:
    assert SAMPLE_NBYTES * 250 <= PERIOD_NBYTES and SMALL_LEAF_NBYTES < PERIOD_NBYTES


def test_a_small_strided_vector_on_a_device_has_the_digest_of_its_elements() -> None:
    vector, box = torch.arange(2000.0)[::2], Region.whole((1000,))
    [on_device, on_host] = digests_of(
        [ComparedPart(data, box, 4) for data in (DeviceArray(vector), tensor_data(vector))]
    )
    assert on_device == on_host
