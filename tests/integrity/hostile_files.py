"""Checkpoints of a few kilobytes that claim to be huge, with seals that fit; and what they cost a reader.

`python -m tests.integrity.hostile_files DIRECTORY [CASE ...]` makes them one after the other, reads each in
every way, and prints what each way came to.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import treeckpt as tc
from tests.helpers.world import reseal, shards_of
from treeckpt._core.format.index import INDEX_NAME

__all__ = ["CASES", "REFUSED", "WAYS", "measure"]

ADDRESSES = 8 << 30
"""Bytes of address space: what is not bounded ends here rather than in the machine."""
MANY = 1 << 20
PRIME = (1 << 61) - 1
"""Python's hash of an integer is what it leaves when divided by this."""


def save(path: Path) -> None:
    """An array of a megabyte, a tie, a value, and state of the rank's own."""
    array = np.arange(MANY, dtype=np.uint8)
    tree = {"a": array, "b": array, "own": tc.PerRank({"r": np.ones(3)}), "step": 7}
    tc.save(path, tree, overwrite=True)


def _chunks(*record: Any) -> Callable[[Path], None]:
    return lambda path: reseal(path, lambda d: d["index"]["leaves"][0].__setitem__(3, list(record)))


def _index(change: Callable[[Any], None]) -> Callable[[Path], None]:
    return lambda path: reseal(path, lambda d: change(d["index"]))


def _grid(cells: int, leaves: int = 1) -> Callable[[Path], None]:
    """Arrays of one byte a cell."""

    def change(index: Any) -> None:
        index["specs"].append({"shape": [cells], "dtype": "uint8", "kind": "numpy"})
        cut = ["g", [[[0, 1, cells + 1]]], [[0, 0, cells]], [[0, 1, cells]]]
        names = ["a", *(f"k{n}" for n in range(1, leaves))]
        index["structure"] = ["dict", names, [None] * leaves]
        index["leaves"] = [["a", len(index["specs"]) - 1, -1, cut]] * leaves

    return _index(change)


def _rows(index: Any) -> None:
    index["files"] |= {"rank": [[0, 0, MANY]], "part": [[0, 1, MANY]]}
    index["files"] |= {name: [[0, 0, MANY]] for name in ("stream", "nbytes")} | {"header": [[4096, 0, MANY]]}


def _ranks(index: Any) -> None:
    index["world"] = 1 << 24
    index["files"] |= {name: [[0, int(name == "rank"), 1 << 24]] for name in index["files"]}
    every = [[0, 1, 1 << 24]]
    index["structure"] = ["per_rank", [every], [["list", [None] * 200]]]
    index["leaves"] = [["pa", 0, [[0, 0, 1 << 24]]]] * 200


def _own(index: Any) -> None:
    """The same with as many ranks as a table of files may have rows."""
    _ranks(index)
    text = json.dumps(index).replace(str(1 << 24), str(MANY))
    index.update(json.loads(text))


def _mesh(index: Any) -> None:
    index["layouts"].append(["mesh", [[1 << 24], [[0, 0, 1 << 24]], ["dp"]], [["s", 0]]])
    index["leaves"][0][2] = len(index["layouts"]) - 1


def _broadcast(index: Any) -> None:
    index["specs"].append({"shape": [MANY, MANY], "dtype": "uint8", "kind": "numpy"})
    index["leaves"][1] = ["t", len(index["specs"]) - 1, 0, [0, [0, 0]]]


def _members(kind: str, member: Callable[[int], Any]) -> Callable[[Path], None]:
    value = [kind, [part for n in range(40_000) for part in member(n)]]
    return _index(lambda index: index["leaves"].__setitem__(-1, ["v", value]))


def _fraction(n: int) -> list[Any]:
    return ["Fraction", [PRIME // 3 * (n + 7919) % PRIME, n + 7919]]


def _keys(index: Any) -> None:
    keys = [["int", [hex((n + 9) * PRIME)]] for n in range(40_000)]
    index["structure"] = ["dict", keys, [None] * len(keys)]
    index["leaves"] = [["v", 0]] * len(keys)


def _names(index: Any) -> None:
    index["structure"] = ["dict", ["x" * 100_000], [["list", [None] * 100_000]]]
    index["leaves"] = [["v", 0]] * 100_000


def _groups(world: int) -> Callable[[Path], None]:
    """A group of its own for each rank."""

    def change(index: Any) -> None:
        index["world"] = world
        index["files"] |= {name: [[0, int(name == "rank"), world]] for name in index["files"]}
        index["structure"] = ["per_rank", [[[n]] for n in range(world)], [None] * world]
        index["leaves"] = [["pv", [n]] for n in range(world)]

    return _index(change)


def _sparse(file: Callable[[Path], Path], front: int, nbytes: int = 1 << 30) -> Callable[[Path], None]:
    """A hole of a gigabyte behind the first bytes of a file."""

    def change(path: Path) -> None:
        kept = file(path).read_bytes()[:front]
        file(path).write_bytes(kept)
        os.truncate(file(path), nbytes)

    return change


def _sparse_header(path: Path) -> None:
    """A shard whose header is a hole of a gigabyte, and an index that says so."""
    shard = shards_of(path)[0]
    kept = shard.read_bytes()[8:300]
    shard.write_bytes(((1 << 30) - 8).to_bytes(8, "little") + kept)
    os.truncate(shard, (1 << 30) + MANY + 24)
    reseal(path, lambda d: d["index"]["files"].update(header=[[1 << 30]]))


def _timings(path: Path) -> Path:
    return next(path.glob("timings.*.json"))


def _timed(path: Path) -> None:
    """Timings of a world of 2 ** 24 ranks."""
    file = _timings(path)
    import msgspec

    from treeckpt._core.format.shard_header import sealed

    document = msgspec.json.decode(file.read_bytes())
    document["timings"] |= {"world": 1 << 24, "hosts": [["x", [[0, 1, 1 << 24]]]]}
    document["seal"] = "0" * 16
    file.write_bytes(sealed(msgspec.json.encode(document)))


CASES: dict[str, Callable[[Path], None]] = {
    "grid of 2^20 cells": _grid(MANY),
    "grid of 2^23 cells": _grid(1 << 23),
    "200 grids of 2^16 cells": _grid(1 << 16, 200),
    "2^20 boxes": _chunks("b", [[[0, 1, MANY]]], [[[1, 0, MANY]]], [[0, 0, MANY]], [[0, 1, MANY]]),
    "2^20 rows of files": _index(_rows),
    "a tie of 2^40 elements": _index(_broadcast),
    "200 arrays of 2^24 ranks": _index(_ranks),
    "200 arrays of 2^20 ranks": _index(_own),
    "2^12 groups of ranks": _groups(1 << 12),
    "2^16 groups of ranks": _groups(1 << 16),
    "a mesh of 2^24 ranks": _index(_mesh),
    "a set of fractions of one hash": _members("set", lambda n: [_fraction(n)]),
    "a set of integers of one hash": _members("frozenset", lambda n: [["int", [hex((n + 9) * PRIME)]]]),
    "a dict of fractions of one hash": _members("dict", lambda n: [_fraction(n), 0]),
    "keys of one hash": _index(_keys),
    "a long name above many leaves": _index(_names),
    "an index with a hole": _sparse(lambda path: path / INDEX_NAME, 200),
    "an index of zeros": _sparse(lambda path: path / INDEX_NAME, 0),
    "a header with a hole": _sparse_header,
    "timings with a hole": _sparse(_timings, 100),
    "timings of 2^24 ranks": _timed,
}


# what reads them ------------------------------------------------------------------------------------------------------
def _cli(*arguments: str) -> None:
    from treeckpt._cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    if code:
        raise tc.CheckpointError("cli", expected="0", found=f"{code}: {err.getvalue()[-300:]}{out.getvalue()[-300:]}")


def _verify(path: Path, good: Path) -> None:
    if not (report := tc.verify(path)).ok:
        raise tc.CorruptError("verify", expected="an intact checkpoint", found=f"{report.problems[0]!s:.200}")


def _convert(suffix: str) -> Callable[[Path, Path], None]:
    def convert(path: Path, good: Path) -> None:
        from treeckpt.convert import convert as run

        run(path, path.parents[1] / f"converted{suffix}", overwrite=True, lossy=True)

    return convert


def _rebuild(path: Path, good: Path) -> None:
    index = (path / INDEX_NAME).read_bytes() if (path / INDEX_NAME).stat().st_size < 1 << 24 else None
    try:
        tc.rebuild_index(path, replace=True)
    finally:
        if index is not None:
            (path / INDEX_NAME).write_bytes(index)


def _dashboard(path: Path, good: Path) -> float:
    """The seconds of computing of the page that takes most."""
    from starlette.testclient import TestClient

    from treeckpt_dashboard.store import watch
    from treeckpt_dashboard.web.app import create_app

    watch.FIRST_WAIT_SECONDS = 600.0  # no page is shown before its runs were looked at
    slowest = 0.0
    os.environ["TREECKPT_CACHE"] = str(path.parents[1] / "cache")
    with TestClient(create_app([path.parent]), base_url="http://127.0.0.1") as client:
        [run] = client.get("/api/v1/runs").json()["runs"]
        at = next(f"checkpoints/{row['id']}" for row in run["checkpoints"] if row["name"] == path.name)
        places = [f"/{prefix}{at}{page}" for prefix in ("", "api/v1/") for page in PAGES]
        codes = dict[str, int]()
        for place in (*places, "/", "/live", "/metrics"):
            begin = _computed()
            codes[place] = client.get(place).status_code
            slowest = max(slowest, _computed() - begin)
    assert set(codes.values()) <= {200, 202, 404}, codes
    return slowest


PAGES = ("", "/files", "/files/0", "/timing", "/leaves/0", "/leaves/0/chunks", "/leaves/0/map", "/leaves/1")

WAYS: dict[str, Callable[[Path, Path], float | None]] = {
    "inspect": lambda path, good: tc.inspect(path) and None,
    "load": lambda path, good: tc.load(path, fallback=tc.Fallback(per_rank="take")) and None,
    "load_into": lambda path, good: tc.load_into(path, {"a": np.empty(MANY, np.uint8)}, strict=False) and None,
    "verify": _verify,
    "show": lambda path, good: _cli("show", str(path)),
    "show a leaf": lambda path, good: _cli("show", str(path), "a"),
    "ls": lambda path, good: _cli("ls", str(path.parent)),
    "diff": lambda path, good: _cli("diff", str(good), str(path)),
    "convert": _convert(".safetensors"),
    "convert to torch": _convert(".pt"),
    "convert to ours": _convert(""),
    "rebuild": _rebuild,
    "dashboard": _dashboard,
}
REFUSED = ("inspect", "load", "verify", "show", "diff", "convert")


def _peak() -> int:
    """The most memory that this process has held since it was last asked to begin anew, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _computed() -> float:
    """The seconds that this process and those that it has waited for have computed: others' work does not count."""
    return sum(os.times()[:4])


def measure(path: Path, good: Path, way: str) -> dict[str, Any]:
    """The seconds of computing and bytes that one way of reading takes, and the error that it ends with."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begin, slowest = _peak(), _computed(), None
    try:
        slowest, error = WAYS[way](path, good), ""
    except tc.TreeckptError as raised:
        error = f"{type(raised).__name__}: {raised}"
    except BaseException as raised:
        error = f"! {type(raised).__name__}: {raised}"[:600]
    seconds = _computed() - begin if slowest is None else slowest
    return {"way": way, "seconds": seconds, "nbytes": _peak() - before, "error": error}


def main(directory: Path, cases: list[str]) -> None:
    good, path = directory / "run" / "step_00000001", directory / "run" / "step_00000002"
    for place in (good, path):
        save(place)
    for way in WAYS:  # imports, and what else is done once
        measured = measure(path, good, way)
        assert not measured["error"], measured
    for case in cases:
        shutil.rmtree(path)
        save(path)
        CASES[case](path)
        for way in WAYS:
            print(json.dumps({"case": case, **measure(path, good, way)}), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
