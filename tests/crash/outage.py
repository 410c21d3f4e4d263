"""What may be on the disk after a power loss? Every state that a recording of system calls leaves possible, in bounds.

At any moment an effect is durable if its node was synced after it; each of the others may have reached the disk or
not, whatever happened to those before it, and a write may have reached it in part. (File systems promise more than
that, each another thing; a save must not need it.)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from .syscalls import Effect, Recording

__all__ = ["State", "lay_out", "states"]

LOST, WHOLE, FRONT, BACK = range(4)
"""How much of an effect reached the disk."""
SECTOR = 512


class State(msgspec.Struct, frozen=True):
    """What is on the disk: the bytes of each file by its path, and None for each directory."""

    tree: dict[str, bytes | None]
    saved: bool
    """Whether the save had returned by then."""


def states(recording: Recording, limit: int, *, seed: int = 0) -> Iterator[State]:
    """The states after a power loss at each moment, each once; at most `limit` choices of what is lost for a moment."""
    chance = random.Random(seed)
    seen: set[int] = set()
    moments = sorted({e.begin + 1 for e in recording.effects} | {s.end + 1 for s in recording.syncs} | {recording.end})
    if recording.returned is not None:
        moments = sorted({*moments, recording.returned + 1})
    for moment in moments:
        begun = [effect for effect in recording.effects if effect.begin < moment]
        open_ = [number for number, effect in enumerate(begun) if not _durable(effect, recording, moment)]
        saved = recording.returned is not None and moment > recording.returned
        for choice in _choices(len(open_), limit, chance):
            tree = _replay(recording, begun, dict(zip(open_, choice, strict=True)))
            key = hash((saved, tuple(sorted(tree.items(), key=lambda item: item[0]))))
            if key not in seen:
                seen.add(key)
                yield State(tree, saved)


def _durable(effect: Effect, recording: Recording, moment: int) -> bool:
    return any(s.node == effect.node and effect.end < s.begin and s.end < moment for s in recording.syncs)


def _choices(count: int, limit: int, chance: random.Random) -> Iterator[tuple[int, ...]]:
    """What becomes of each effect: everything that is possible, or if that is too much, the ends and a sample."""
    if 4**count <= limit:
        yield from itertools.product((LOST, WHOLE, FRONT, BACK), repeat=count)
        return
    first = [(LOST,) * count, (WHOLE,) * count]
    for usual, odd in ((WHOLE, LOST), (LOST, WHOLE), (WHOLE, FRONT), (WHOLE, BACK)):
        first += [tuple(odd if i == at else usual for i in range(count)) for at in reversed(range(count))]
    yield from first[:limit]
    for _ in range(limit - len(first)):
        yield tuple(chance.choice((LOST, WHOLE, WHOLE, FRONT, BACK)) for _ in range(count))


def _replay(recording: Recording, begun: Sequence[Effect], fate: dict[int, int]) -> dict[str, bytes | None]:
    files: dict[int, bytearray] = {}
    folders = {node: dict(names) for node, names in recording.folders.items()}
    for number, effect in enumerate(begun):
        how = fate.get(number, WHOLE)
        if how == LOST:
            continue
        if effect.names:
            for name, node in effect.names:
                folders[effect.node].pop(name, None)
                if node is not None:
                    folders[effect.node][name] = node
        else:
            file = files.setdefault(effect.node, bytearray(recording.files[effect.node]))
            _apply(file, effect, how)
    found: dict[str, bytes | None] = {}

    def walk(node: int, path: str) -> None:
        for name, child in folders[node].items():
            if child in folders:
                found[path + name] = None
                walk(child, f"{path}{name}/")
            else:
                found[path + name] = bytes(files.get(child, recording.files[child]))

    walk(0, "")
    return found


def _apply(file: bytearray, effect: Effect, how: int) -> None:
    if effect.size is not None:
        if len(file) > effect.size and not effect.grows:
            del file[effect.size :]
        file.extend(bytes(max(0, effect.size - len(file))))
        return
    cut = len(effect.data) // 2 // SECTOR * SECTOR
    low, high = {WHOLE: (0, len(effect.data)), FRONT: (0, cut), BACK: (cut, len(effect.data))}[how]
    start = effect.offset + low
    file.extend(bytes(max(0, start - len(file))))
    file[start : effect.offset + high] = effect.data[low:high]


def lay_out(state: State, root: Path) -> None:
    """Makes the files of a state below a directory."""
    root.mkdir()
    for path, data in sorted(state.tree.items()):
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)
