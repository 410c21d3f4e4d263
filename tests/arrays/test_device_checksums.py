"""Checksums that a device computes of its memory are those of xxhash: on the host too, where a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.devices import CUDA_MARKS, DEVICES, leaves_of, state_on
from treeckpt._arrays import device_checksums as module
from treeckpt._arrays.device_checksums import GATHERED_NBYTES, SUMS_NBYTES, device_checksums
from treeckpt._core.format.shard_header import BLOCK


@pytest.fixture(autouse=True, scope="module")
def on_the_host_too() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "KINDS", module.KINDS | {"cpu"})
        yield


def expected(data: bytes) -> list[int]:
    return [xxhash.xxh3_64_intdigest(data[low : low + BLOCK]) for low in range(0, len(data), BLOCK)]


def bytes_of(tensors: Sequence[torch.Tensor]) -> bytes:
    plain = [tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    return b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in plain)


def filled(nbytes: int, fill: int | None) -> np.ndarray:
    if fill is not None:
        return np.full(nbytes, fill, np.uint8)
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4 * BLOCK), st.lists(st.integers(0, 4 * BLOCK), max_size=4), st.sampled_from([None, 0, 1, 255]))
@example(BLOCK - 1, [], None)
@example(BLOCK, [1], None)
@example(BLOCK + 1, [BLOCK], None)
@example(3 * BLOCK, [0, 3 * BLOCK], 255)
def test_they_are_those_of_xxhash_however_the_bytes_are_cut(nbytes: int, cuts: list[int], fill: int | None) -> None:
    data = filled(nbytes, fill)
    parts = np.split(data, sorted(cut for cut in cuts if cut <= nbytes))
    assert device_checksums([torch.from_numpy(part) for part in parts]) == expected(data.tobytes())


@given(st.lists(st.integers(0, 2**64 - 1), min_size=64, max_size=64))
@settings(max_examples=60, deadline=None)
def test_they_are_those_of_xxhash_whatever_the_bits(words: list[int]) -> None:
    data = np.resize(np.array(words, np.uint64), BLOCK // 8 - 37)  # what repeats is not at the same place of a stripe
    data = np.concatenate([data, ~data, data >> np.uint64(32), data << np.uint64(32)])
    assert device_checksums([torch.from_numpy(data.view(np.int64))]) == expected(data.tobytes())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("gathered", "kept"), [(1, 1), (1, 3), (2, 2), (2, 5), (4, 64)])
def test_they_are_the_same_in_steps_of_any_size(
    monkeypatch: pytest.MonkeyPatch, device: str, gathered: int, kept: int
) -> None:
    monkeypatch.setattr(module, "GATHERED_NBYTES", gathered * BLOCK)
    monkeypatch.setattr(module, "SUMS_NBYTES", max(gathered, kept) * BLOCK // 16)
    data = filled(7 * BLOCK + 12_345, None)
    parts = [torch.from_numpy(part).to(device) for part in np.split(data, [0, 100, BLOCK, BLOCK, 5 * BLOCK + 7])]
    assert device_checksums(parts) == expected(data.tobytes())


@pytest.mark.parametrize("device", DEVICES)
def test_they_are_of_the_elements_in_c_order_whatever_dtype_and_strides(device: str) -> None:
    base = torch.randn(300, 2000, device=device)
    number = torch.randn(400, 300, dtype=torch.complex64, device=device)
    views = [
        base.t(),
        base[::2, 1::3],
        base[0, ::2],
        number.conj(),
        number.conj().imag,
        number.to(torch.complex128).conj().t(),
    ]
    tensors = [*leaves_of(state_on(device)).values(), *views, torch.empty(0, device=device), base[3:]]
    assert device_checksums([tensor.detach() for tensor in tensors]) == expected(bytes_of(tensors))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_hashed_is_not_written_to(device: str) -> None:
    tensor = torch.randn(BLOCK, device=device)
    before = tensor.clone()
    device_checksums([tensor])
    assert torch.equal(tensor, before)


def test_tensors_of_several_devices_or_of_the_host_alone_are_not_hashed_so(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = torch.zeros(BLOCK), torch.zeros(BLOCK, device="meta")
    assert device_checksums([here, there]) is None and device_checksums([there]) is None
    monkeypatch.setattr(module, "KINDS", module.KINDS - {"cpu"})
    assert device_checksums([here]) is None


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that exist at once of those that operations make while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._live = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        self._live = {key: live for key, live in self._live.items() if not live[0].expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                storage = leaf.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(nbytes for _, nbytes in self._live.values()))
        return result


def test_the_memory_that_it_takes_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered, sums = GATHERED_NBYTES // 4, SUMS_NBYTES // 4  # to hash 150 MB, and not 600
    for name, nbytes in (("GATHERED", gathered), ("TILE", gathered // 4), ("SUMS", sums)):
        monkeypatch.setattr(module, f"{name}_NBYTES", nbytes)
    tensors = [torch.zeros(4500, 4500).t(), torch.zeros(4500, 2000, dtype=torch.complex64).conj().t()]
    with Allocated() as allocated:
        device_checksums(tensors)
    assert 2 * gathered < allocated.most < 2.5 * gathered + sums + (1 << 20)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=CUDA_MARKS)])
def test_a_device_allocates_no_more_than_that(device: str) -> None:
    tensors = [torch.zeros(1 << 28, device=device), torch.zeros(9000, 9000, device=device).t()]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    device_checksums(tensors)
    assert torch.cuda.max_memory_allocated() - before < 2.5 * GATHERED_NBYTES + SUMS_NBYTES + (4 << 20)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=CUDA_MARKS)])
def test_where_a_device_has_no_memory_left_the_host_is_to_hash(device: str) -> None:
    tensor = torch.zeros(32 << 20, device=device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (2 << 20)) / total)
    try:
        assert device_checksums([tensor]) is None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
