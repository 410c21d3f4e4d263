"""States on a device are saved, staged while it works, and loaded there; on the host the same, but for CUDA's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as dcp_load

import treeckpt as tc
from tests.bench import speed
from tests.bench.device_limits import DeviceLimits
from tests.bench.states import synchronize
from tests.helpers.devices import CUDA_MARKS, DEVICES, busy_device, leaves_of, state_on
from treeckpt import training
from treeckpt._saving.staging import Arena, cuda_pinning

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.dtype, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def all_same(found: dict[str, Any], saved: dict[str, Any], device: str) -> bool:
    pairs = [(leaf, leaves_of(saved)[name]) for name, leaf in leaves_of(found).items()]
    assert {leaf.device.type for leaf, _ in pairs} == {device}
    return all(bits(a) == bits(b) for a, b in pairs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
def test_every_dtype_and_view_comes_back_to_the_device(tmp_path: Path, device: str, *, background: bool) -> None:
    state, path = state_on(device), tmp_path / "c"
    tc.save_async(path, state).result(120) if background else tc.save(path, state)
    assert tc.verify(path).ok
    for found in (
        tc.load(path, device=device),
        tc.load(path, device="original"),
        tc.load(path, device=lambda where: where),
        tc.load(path, tc.abstract(state)),
        tc.load_async(path, device=device).result(120),
    ):
        assert all_same(found, state, device) and found["tied"][0] is found["tied"][1]
    assert all_same(tc.load(path), {**state}, "cpu"), "without a device new tensors are on the host"
    target = state_on(device)
    with torch.no_grad():
        for leaf in leaves_of(target).values():  # not every dtype has a kernel that fills
            (leaf.view(torch.uint8) if leaf.shape == (6, 8) else leaf).zero_()
    tc.load_into(path, target)
    assert all_same(target, state, device)


@pytest.mark.parametrize(
    ("device", "stream"),
    [("cpu", "current"), *(pytest.param("cuda", s, marks=CUDA_MARKS) for s in ("current", "side"))],
)
def test_a_save_holds_what_was_queued_on_the_device_before_it_and_nothing_after(
    tmp_path: Path, device: str, stream: str
) -> None:
    a, x = torch.rand(512, 512, device=device), torch.zeros(1 << 20, device=device)
    with busy_device(a, side_stream=stream == "side"):
        x.add_(3)
        pending = tc.save_async(tmp_path / "c", {"x": x, "a": a})
        pending.wait_staged(120)
        x.add_(100)
    pending.result(120)
    assert tc.load(tmp_path / "c")["x"].eq(3).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_lazy_save_holds_the_weights_of_before_the_guarded_step(tmp_path: Path, device: str) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.Dropout(0.1), nn.Linear(512, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randn(32, 256, device=device)).square().mean().backward()
        before = {name: leaf.detach().clone() for name, leaf in model.state_dict().items()}
        pending = tc.save_async(
            tmp_path / f"{step}", model.state_dict(), background=tc.BackgroundOptions(staging="lazy")
        )
        training.guard(optimizer, pending)
        optimizer.step()
        optimizer.zero_grad()
        pending.result(120)
        saved = tc.load(tmp_path / f"{step}")
        assert all(torch.equal(saved[name], leaf.cpu()) for name, leaf in before.items())


@pytest.mark.parametrize("device", DEVICES)
def test_a_training_on_the_device_continues_with_the_same_losses(tmp_path: Path, device: str) -> None:
    def job(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.3), nn.Linear(64, 1)).to(device)
        options = {"fused": True} if device == "cuda" else {}
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, **options)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses: list[float] = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 5, device=device)).square().mean()  # dropout and data: the device's generator
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    model, optimizer = job(0)
    run(model, optimizer)
    tc.save(tmp_path / "c", training.state(model, optimizer))
    expected = run(model, optimizer)
    model, optimizer = job(7)
    training.restore(tmp_path / "c", model, optimizer)
    assert run(model, optimizer) == expected
    assert next(model.parameters()).device.type == device


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_are_read_into_pinned_memory_and_onto_the_device_from_there(tmp_path: Path, device: str) -> None:
    tc.save(tmp_path / "c", {"x": torch.arange(1 << 20, device=device)})
    target = torch.zeros(1 << 20, dtype=torch.int64, pin_memory=device == "cuda")
    address = target.data_ptr()
    tc.load_into(tmp_path / "c", {"x": target})
    there = target.to(device, non_blocking=True)
    assert target.data_ptr() == address and target.is_pinned() == (device == "cuda")
    assert torch.equal(there.cpu(), torch.arange(1 << 20))
    copy = tc.trees.offload({"x": there}, pin=True)["x"]
    assert copy.is_cpu and copy.is_pinned() == (device == "cuda") and torch.equal(copy, target)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("device", DEVICES)
def test_trees_are_copied_to_host_memory_and_back_while_the_device_works(device: str) -> None:
    """pytorch-state_dict_utils, lines 1008-1148 and 758-822: `non_blocking`, memory pinned or shared, or both."""
    tree = state_on(device)
    for pin, share in ((True, False), (False, True), (True, True)):
        moved = tc.trees.offload(tree, pin=pin, share=share)
        assert all_same(moved, tree, "cpu")
        into = tc.trees.empty_like(tree, pin=pin, share=share)
        tc.trees.copy_into(tree, into, non_blocking=True)
        synchronize(torch.device(device))
        assert all_same(into, tree, "cpu")
        for leaf in leaves_of(into).values():
            assert not leaf.numel() or (leaf.is_shared(), leaf.is_pinned()) == (share, pin and device == "cuda")
        back = tc.trees.empty_like(tree)
        tc.trees.copy_into(into, back, non_blocking=True)
        synchronize(torch.device(device))
        assert all_same(back, tree, device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=CUDA_MARKS)])
def test_staging_memory_is_pinned_in_a_process_that_uses_cuda(device: str) -> None:
    torch.zeros(1, device=device)
    arena = Arena(3 << 20, cuda_pinning())
    memory = torch.from_numpy(arena.memory)
    assert memory.is_pinned()
    source = torch.arange(arena.nbytes // 8, device=device)
    memory.view(torch.int64).copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory.view(torch.int64), source.cpu())
    del memory
    arena.close()


@pytest.mark.parametrize("device", DEVICES)
def test_dcp_calls_save_and_load_tensors_of_the_device(tmp_path: Path, device: str) -> None:
    state = {"w": torch.randn(300, 40, device=device), "b": torch.arange(7, device=device)}
    tc.convert.convert(_saved(tmp_path / "ours", state), tmp_path / "dcp", to="dcp")
    tc.dcp.save(state, checkpoint_id=str(tmp_path / "through"), no_dist=True)
    for load in (
        lambda target: tc.dcp.load(target, checkpoint_id=str(tmp_path / "through"), no_dist=True),
        lambda target: dcp_load(target, storage_reader=FileSystemReader(tmp_path / "dcp"), no_dist=True),
        lambda target: tc.load_into(tmp_path / "dcp", target),
    ):
        target = {name: torch.zeros_like(leaf) for name, leaf in state.items()}
        load(target)
        assert all(
            torch.equal(target[name], leaf) and target[name].device == leaf.device for name, leaf in state.items()
        )


def _saved(path: Path, state: dict[str, Any]) -> Path:
    tc.save(path, state)
    return path


@pytest.mark.parametrize("device", DEVICES)
def test_the_copies_that_the_benchmark_compares_with_copy(device: str) -> None:
    limits = DeviceLimits(device, 0)
    rates = limits.measure()
    assert set(rates) == {"D2H", "H2D"} and all(rate > 0 for rate in rates.values())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=CUDA_MARKS)])
def test_the_benchmark_measures_a_device(tmp_path: Path, device: str) -> None:
    out = tmp_path / "out.json"
    options = ["--device", device, "--scale", "0.02", "--repetitions", "1", "--dir", str(tmp_path), "--json", str(out)]
    assert speed.main(options) == 0
    report = json.loads(out.read_text())
    found = [bar for bar in report["bars"] if bar["scenario"].startswith("device")]
    assert len(found) == 5 and all(bar["state"] in ("ok", "short") for bar in found)
