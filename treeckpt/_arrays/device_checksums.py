"""Checksums of a data area that lies in tensors on a device, computed there: only they come to the host.

They are the xxh3-64 of blocks of `BLOCK` bytes, as shards have them. By the specification of xxHash a block is a row of
stripes of 64 bits x 8 lanes. What a stripe adds to the 8 accumulators depends on no other stripe: it is computed for
all of them at once, and summed over each 16. Between two sums the accumulators are scrambled, which takes 255 steps one
after the other, each for all blocks at once. The arithmetic is that of int64, which wraps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from .._core.format.shard_header import BLOCK, hash_block
from .._core.sharding.region import Region, tiles
from .torch import gather_samples, raw_array

KINDS = frozenset({"cuda"})
"""The kinds of devices that compute checksums of their memory."""
GATHERED_NBYTES = 16 << 20
"""The bytes that are gathered at a time; a call allocates 2.5 times as many at most, and `SUMS_NBYTES`."""
TILE_NBYTES = GATHERED_NBYTES // 4
"""The bytes of an array that is not contiguous that are copied at a time."""
SUMS_NBYTES = 32 << 20
"""The bytes of the sums at most, 1/16 of those of their blocks: the more there are, the more blocks a step is for."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_ACCUMULATORS = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
"""What the accumulators are before the first stripe."""
_AVALANCHE = 0x165667919E3779F9
_LOW = (1 << 32) - 1
_STRIPES, _LANES = 16, 8
"""The numbers of stripes between two scrambles, and of lanes of a stripe."""
_SCRAMBLE, _LAST, _MERGE, _START = range(_STRIPES, _STRIPES + 4)
"""Rows of `_secret_words`."""
_SUMS = BLOCK // (_STRIPES * _LANES * 8)
"""The number of sums of a block."""


def device_checksums(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Returns the checksums of the blocks of a data area that holds the elements of tensors, each in C order.

    What is left after the last whole block is copied to the host.

    Returns:
        None where the tensors do not lie on one device that computes checksums, or where it has no memory left.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or next(iter(devices)).type not in KINDS:
        return None
    try:
        return _checksums(tensors, devices.pop())
    except torch.OutOfMemoryError:
        return None


def _checksums(tensors: Sequence[torch.Tensor], device: torch.device) -> list[int]:
    nbytes = sum(tensor.nbytes for tensor in tensors)
    words = torch.from_numpy(_secret_words()).to(device)
    buffer = torch.empty(min(GATHERED_NBYTES, nbytes), dtype=torch.uint8, device=device)
    most = min(nbytes // BLOCK, SUMS_NBYTES // (_SUMS * _LANES * 8))
    sums = torch.empty((most, _SUMS, _LANES), dtype=torch.int64, device=device)
    found, filled, rest = list[int](), 0, buffer[:0]
    for data in _gathered(tensors, buffer):
        count = len(data) // BLOCK
        if filled + count > most:
            found += _merged(sums[:filled], words)
            filled = 0
        blocks, rest = data[: count * BLOCK], data[count * BLOCK :]
        stripes = blocks.view(torch.int64).view(count, _SUMS, _STRIPES, _LANES)
        _sum_stripes(stripes, words, sums[filled : filled + count])
        filled += count
    if filled:
        found += _merged(sums[:filled], words)
    return [*found, hash_block(raw_array(rest.cpu()))] if len(rest) else found


def _gathered(tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the bytes of tensors one after the other, uint8[n], in a buffer that is full but for the last time."""
    parts, room = list[torch.Tensor](), len(buffer)
    for tensor in tensors:
        for tile in tiles(Region.whole(tensor.shape), TILE_NBYTES // tensor.itemsize):
            data = gather_samples(tensor[tile.slices()], None)
            while len(data):
                part, data = data[:room], data[room:]
                parts.append(part)
                room -= len(part)
                if not room:
                    torch.cat(parts, out=buffer)
                    parts, room = [], len(buffer)  # copies go before what follows is allocated
                    yield buffer
    if parts:
        filled, parts = torch.cat(parts, out=buffer[: len(buffer) - room]), []
        yield filled


def _secret_words() -> np.ndarray:
    """Returns int64[20, 8]: the secret of each stripe, and the rows at `_SCRAMBLE`, `_LAST`, `_MERGE` and `_START`."""
    offsets = [*range(0, 8 * _STRIPES, 8), len(_SECRET) - 64, len(_SECRET) - 71, 11]
    rows = [np.frombuffer(_SECRET, "<u8", _LANES, offset) for offset in offsets]
    return np.array([*rows, np.array(_ACCUMULATORS, np.uint64)]).view(np.int64)


def _sum_stripes(stripes: torch.Tensor, words: torch.Tensor, out: torch.Tensor) -> None:
    """Writes what each 16 stripes add to the accumulators to `out`, int64[n, 256, 8].

    Args:
        stripes: of n blocks, int64[n, 256, 16, 8]; they are lost.
        words: those of `_secret_words`.
    """
    # each lane adds its data to its neighbour's accumulator, and a product to its own
    torch.sum(stripes, 2, out=out)
    out.copy_(out.unflatten(-1, (_LANES // 2, 2)).flip(-1).flatten(-2))
    stripes ^= words[:_STRIPES]
    stripes[:, -1, -1] ^= words[_STRIPES - 1] ^ words[_LAST]
    low = stripes & _LOW
    stripes >>= 32
    stripes &= _LOW
    stripes *= low
    out += stripes.sum(2)


def _merged(sums: torch.Tensor, words: torch.Tensor) -> list[int]:
    """Returns the checksums of blocks from their sums, int64[n, 256, 8]."""
    first, *others = sums.unbind(1)
    accumulators, secret = first + words[_START], words[_SCRAMBLE]
    for added in others:
        scrambled = accumulators ^ _shifted(accumulators, 47) ^ secret
        accumulators = torch.add(added, scrambled, alpha=_PRIME32[0])
    left, right = (accumulators ^ words[_MERGE]).unflatten(-1, (_LANES // 2, 2)).unbind(-1)
    result = _folded_product(left, right).sum(-1) + _signed(BLOCK * _PRIME64[0])
    result = (result ^ _shifted(result, 37)) * _signed(_AVALANCHE)
    result ^= _shifted(result, 32)
    return raw_array(result.cpu()).tolist()


def _folded_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns the low 64 bits of products of unsigned numbers of 64 bits, xor the high ones."""
    a, b, c, d = left & _LOW, _shifted(left, 32), right & _LOW, _shifted(right, 32)
    low, first, second = a * c, a * d, b * c
    carried = _shifted(low, 32) + (first & _LOW) + (second & _LOW)
    high = b * d + _shifted(first, 32) + _shifted(second, 32) + (carried >> 32)
    return (left * right) ^ high


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Returns numbers shifted to the right, with zeros from the left."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    """Returns the number of an int64 with the low 64 bits of an integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
