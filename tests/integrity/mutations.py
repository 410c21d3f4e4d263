"""Changes files as an attacker would, at random, by a seed: `python -m tests.integrity.mutations FIRST LAST [FORMATS]`.

Whatever comes of a changed file is right or an error of ours, soon and within little memory. Each format is read in a
fork of its own: what a changed file has a process map stays in it, and to import torch for each takes seconds.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import treeckpt as tc
from tests.helpers.hfai_parts import trained, write_parts
from tests.helpers.mutations import part_at, places_in
from tests.helpers.world import on_ranks, reseal, reseal_shard, shards_of, small_tree
from treeckpt._cli.main import main as command_line
from treeckpt.convert import convert

__all__ = ["FORMATS", "SLOW", "outcome"]

SLOW = 20.0
"""Seconds of computing that no small file takes."""
GOLDEN = Path(__file__).parents[1] / "golden"
NUMBERS = (0, 1, -1, 2, 3, 7, 63, 255, 4096, 1 << 16, 1 << 24, 1 << 31, 1 << 40, 1 << 61, 1 << 62, 1 << 63, 10**30)
TEXTS = ("", "x", "/", "../../etc/passwd", "~rank0", "~rank*", "@0", "__metadata__", "os:system", "float1024", "int8")
TEXTS += ("torch:Size", "uint8", "float32", "numpy", "tensor", "parameter", "cuda:0", "meta:9999999999", "\0", "set")
WORDS = ("a", "t", "v", "pa", "pv", "w", "g", "b", "n", "list", "dict", "tuple", "per_rank", "table", "deque", "custom")


def _any(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(9 if depth < 2 else 6)
    if kind < 2:
        return draw.choice(NUMBERS)
    if kind < 4:
        return draw.choice((*TEXTS, *WORDS))
    if kind == 4:
        return draw.choice((None, True, False, 0.5, -1e308))
    if kind == 5:
        return [[draw.choice(NUMBERS), draw.choice(NUMBERS), draw.choice(NUMBERS)]]
    below = [_any(draw, depth + 1) for _ in range(draw.randrange(4))]
    return below if kind < 8 else {draw.choice(TEXTS): part for part in below}


def _mutate(document: Any, draw: random.Random) -> None:
    """Changes a few parts of a document in place."""
    for _ in range(draw.randint(1, 3)):
        places = list(places_in(document))
        if not places:
            return
        place = draw.choice(places)
        parent, key = part_at(document, place[:-1]), place[-1]
        act = draw.randrange(6)
        if act == 0:
            del parent[key]
        elif act == 1 and type(parent[key]) is int:
            parent[key] += draw.choice((-1, 1, 8, -4096, 4096))
        elif act == 2 and isinstance(parent, list):
            parent.append(msgspec.json.decode(msgspec.json.encode(parent[key])))
        elif act == 3:
            parent[key] = msgspec.json.decode(msgspec.json.encode(part_at(document, draw.choice(places))))
        else:
            parent[key] = _any(draw)


def _damage(data: bytes, draw: random.Random) -> bytes:
    """Changes a few bytes."""
    made = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at, act = draw.randrange(max(len(made), 1)), draw.randrange(7)
        if act < 2 and made:
            made[at] = draw.randrange(256)
        elif act == 2 and made:
            made[at] ^= 1 << draw.randrange(8)
        elif act == 3:
            made[at:at] = draw.randbytes(draw.randint(1, 9))
        elif act == 4:
            del made[at : at + draw.randint(1, 9)]
        elif act == 5:
            made[at : at + 8] = draw.choice(NUMBERS[:15]).to_bytes(8, draw.choice(("little", "big")), signed=True)
        elif draw.randrange(4) == 0:
            del made[at:]
    return bytes(made)


# what is changed ------------------------------------------------------------------------------------------------------
def _tree(rank: int) -> Any:
    table = tc.KeyedTable(
        np.arange(40) + 64 * rank, {"w": np.ones((40, 3))}, buckets=128, owned=(64 * rank, 64 * rank + 64)
    )
    weight = torch.nn.Parameter(torch.ones(4, 3))
    more = {"w": weight, "row": weight.data[1], "half": torch.ones(5, dtype=torch.bfloat16), "q": deque([1, 2.5], 3)}
    more |= {"o": OrderedDict(a=1, b=(None, b"x")), "d": defaultdict(list, k=[1j]), "s": {1, 2}, "z": torch.Size([2])}
    return {**small_tree(rank, 2), "table": table, "more": more, "u": {1: "x", (2, "y"): np.float32(1)}}


def _ours(path: Path) -> None:
    outcomes = on_ranks(2, lambda c: tc.save(path, _tree(c.rank), comm=c, custom_metadata={"note": [1, {"a": 2.5}]}))
    assert all(o.error is None for o in outcomes), outcomes


def _shared(path: Path) -> None:
    tree = {"w": torch.nn.Parameter(torch.ones(4, 3), requires_grad=False), "n": torch.zeros(5)}
    for step, base in ((1, None), (2, 1), (3, 2)):
        tc.save(path / f"{step}", tree, **({} if base is None else {"base": path / f"{base}"}))
    assert tc.inspect(path / "3").shared_names


def _plain() -> Any:
    base = torch.arange(24.0)
    return {
        "model": {"w": base.view(4, 6), "t": base[3:9], "b": torch.ones(3, dtype=torch.bfloat16)},
        "lr": 0.5,
        "n": [1, "x"],
    }


def _pt(path: Path) -> None:
    torch.save(_plain(), path / "a.pt")


def _safetensors(path: Path) -> None:
    tc.save(path / "c", _plain()["model"])
    convert(path / "c", path / "a.safetensors")
    shutil.rmtree(path / "c")


def _dcp(path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_plain(), checkpoint_id=path / "d", no_dist=True)


def _golden(name: str) -> Callable[[Path], None]:
    return lambda path: shutil.copytree(GOLDEN / name, path / "d") and None


def _hfai(path: Path) -> None:
    model, optimizer = trained(0)
    write_parts(path / "d", {"model": [model], "optimizer": [optimizer]}, {"epoch": 3}, 2)


def _index(path: Path, draw: random.Random) -> None:
    reseal(path, lambda document: _mutate(document["index"], draw))


def _header(path: Path, draw: random.Random) -> None:
    with contextlib.suppress(AssertionError, AttributeError, KeyError, TypeError):  # too long, or no header at all
        reseal_shard(draw.choice(shards_of(path)), lambda header: _mutate(header, draw))


def _references(path: Path, draw: random.Random) -> None:
    if draw.randrange(3):
        reseal(path / "3", lambda document: _mutate(document["index"]["references"], draw))
        return
    [shard] = shards_of(path / "3")
    with contextlib.suppress(AssertionError):  # too long
        reseal_shard(shard, lambda header: _mutate_shared(header["__metadata__"], draw))


def _mutate_shared(metadata: dict[str, Any], draw: random.Random) -> None:
    shared = msgspec.json.decode(metadata["shared"])
    _mutate(shared, draw)
    metadata["shared"] = msgspec.json.encode(shared).decode()


def _bytes(path: Path, draw: random.Random) -> None:
    file = draw.choice(sorted(p for p in path.rglob("*") if p.is_file()))
    file.write_bytes(_damage(file.read_bytes(), draw))


# what is done ---------------------------------------------------------------------------------------------------------
def _cli(*arguments: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        command_line(list(arguments))


def _read(path: Path) -> list[Callable[[], object]]:
    return [
        lambda: tc.load(path, fallback=tc.Fallback(per_rank="take")),
        lambda: tc.load(path, read=tc.ReadOptions(copy=True), fallback=tc.Fallback(per_rank="take"), device="original"),
        lambda: tc.load(path, fallback=tc.Fallback(per_rank="take", on_corrupt="skip")),
        lambda: tc.load(path, tc.abstract(_tree(0)), fallback=tc.Fallback(per_rank="take"), strict=False),
        lambda: tc.verify(path),
        lambda: _cli("show", str(path)),
        lambda: _cli("show", str(path), "pieces"),
        lambda: _cli("diff", str(path), str(path), "--values"),
        lambda: convert(path, path.parent / "out.pt", overwrite=True, lossy=True),
        lambda: convert(path, path.parent / "out.safetensors", overwrite=True, lossy=True),
    ]


def _rebuild(path: Path) -> list[Callable[[], object]]:
    return [
        lambda: tc.load(path, fallback=tc.Fallback(per_rank="take")),
        lambda: tc.verify(path),
        lambda: tc.rebuild_index(path, replace=True),
    ]


def _read_shared(path: Path) -> list[Callable[[], object]]:
    sharer = path / "3"
    return [
        *_read(sharer),
        lambda: tc.save(path / "4", {"n": np.zeros(5)}, base=sharer),
        lambda: tc.verify(sharer, repair=True),
        lambda: _cli("gc", str(path), "--keep-last", "1"),
        lambda: _cli("flatten", str(sharer)),
        lambda: tc.rebuild_index(sharer, replace=True),
    ]


def _foreign(path: Path) -> list[Callable[[], object]]:
    [source] = [p for p in path.iterdir() if not p.name.startswith("out")]
    return [
        lambda: convert(source, path / "out", overwrite=True, exclude="nothing*"),
        lambda: convert(source, path / "out.safetensors", overwrite=True, lossy=True),
        lambda: tc.load(source),
        lambda: tc.load(source, device="original", read=tc.ReadOptions(copy=True, memory=1 << 20)),
        lambda: tc.load_into(source, {"model": {"w": np.empty((4, 6), np.float32)}, "w": np.empty(3)}, strict=False),
        lambda: _cli("show", str(source)),
    ]


Made = Callable[[Path], None]
Changed = Callable[[Path, random.Random], None]
FORMATS: dict[str, tuple[Made, Changed, Callable[[Path], list[Callable[[], object]]]]] = {
    "index": (_ours, _index, _read),
    "header": (_ours, _header, _rebuild),
    "bytes": (_ours, _bytes, _rebuild),
    "references": (_shared, _references, _read_shared),
    "torch": (_pt, _bytes, _foreign),
    "safetensors": (_safetensors, _bytes, _foreign),
    "dcp": (_dcp, _bytes, _foreign),
    "paddle": (_golden("paddle"), _bytes, _foreign),
    "hfai": (_hfai, _bytes, _foreign),
}


def outcome(made: Path, name: str, seed: int, place: Path) -> str:
    """What goes wrong with a changed copy of a checkpoint; empty where all is an error of ours or right."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(made, place / "c")
    _, change, calls = FORMATS[name]
    change(place / "c", random.Random(seed))
    for number, call in enumerate(calls(place / "c")):
        begin = time.process_time()
        try:
            call()
        except tc.TreeckptError as error:
            if len(str(error)) > 5000:
                return f"{name} {seed}, call {number}: an error of {len(str(error))} characters"
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            where = [f"{frame.filename[-30:]}:{frame.lineno}" for frame in frames]
            return f"{name} {seed}, call {number}: {type(error).__name__}: {error!s:.150} at {where}"
        if time.process_time() - begin > SLOW:
            return f"{name} {seed}, call {number}: {time.process_time() - begin:.1f} s"
    return ""


def run(name: str, first: int, last: int) -> None:
    """Prints what goes wrong with changed files of a format."""
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "made"
        made.mkdir()
        FORMATS[name][0](made)
        for seed in range(first, last):
            if found := outcome(made, name, seed, Path(directory) / "place"):
                print(found, flush=True)


def main(first: int, last: int, names: Sequence[str]) -> None:
    for name in names:
        process = multiprocessing.get_context("fork").Process(target=run, args=(name, first, last))
        process.start()
        process.join()
        print(f"{name} exits with {process.exitcode}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or list(FORMATS))
