"""CUDA: copies on a separate stream, into pinned memory, while the training's kernels run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch


@lru_cache(maxsize=64)
def _side_stream(device: int) -> Any:
    return torch.cuda.Stream(device)


def wait_for_current_streams() -> None:
    """Makes the copies that follow wait for all work queued so far on the calling thread's current streams."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            _side_stream(device).wait_stream(torch.cuda.current_stream(device))


def use_copy_streams() -> contextlib.ExitStack:
    """Returns a context in which all work of this thread follows what `wait_for_current_streams` has waited for."""
    opened = contextlib.ExitStack()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            opened.enter_context(torch.cuda.stream(_side_stream(device)))
    return opened


def start_copy_to_host(part: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    """Starts to copy a CUDA tensor to the host; returns a function that waits for the end of the copy."""
    stream = _side_stream(part.device.index)
    if part.is_conj() or part.is_neg():
        # across devices the copy would be conjugated on the host, perhaps before it has arrived
        part = part.resolve_conj().resolve_neg()
        stream.wait_stream(torch.cuda.current_stream(part.device))
    with torch.cuda.stream(stream):
        out.copy_(part, non_blocking=True)
    # else the allocator could give a temporary's memory to the training before the copy has ended
    part.record_stream(stream)
    return stream.synchronize


def pin(address: int, nbytes: int) -> Callable[[], None]:
    """Pins host memory, so that copies to it need no intermediate buffer; returns a function that unpins it.

    Raises:
        RuntimeError: the driver refuses.
    """
    runtime: Any = torch.cuda.cudart()
    status = runtime.cudaHostRegister(address, nbytes, 0)
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister of {nbytes} bytes: {status}")
    return partial(runtime.cudaHostUnregister, address)


def pin_function() -> Callable[[int, int], Callable[[], None]] | None:
    """Returns `pin` in a process that uses CUDA; else None."""
    return pin if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def device_setter() -> Callable[[], None]:
    """Returns a function that makes this thread's current device that of the thread that calls it."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())
