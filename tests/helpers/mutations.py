"""Files of each format as programs write them, and changes to them, as damage or an attacker would make, by number."""

from __future__ import annotations

import io
import json
import pickletools
import random
import shutil
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import treeckpt as tc
from tests.helpers.hfai_parts import trained, write_parts
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.shard_header import sealed

GOLDEN = Path(__file__).parents[1] / "golden"
NUMBERS = (0, 1, -1, 2, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 61) - 1, 1 << 62, (1 << 63) - 1, 10**30)
OPCODES = tuple(opcode.code.encode("latin1") for opcode in pickletools.opcodes)


def _tree() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.randn(6, 7)
    state = OrderedDict(w=base, t=base.t(), v=base.view(-1)[3::4], b=torch.ones(9, dtype=torch.bfloat16))
    return {
        "model": state,
        "optimizer": {"state": {n: {"step": torch.tensor(float(n)), "exp_avg": torch.ones(3)} for n in range(4)}},
        "numpy": np.arange(6.0).reshape(2, 3),
        "rng": (3, (1, 2, 3), None),
        "set": {1, 2.5, "x"},
        "key": {1: torch.Size([2, 3]), (1, 2): b"abc", None: slice(1, 2), "dtype": torch.float16},
        "big": 10**40,
        "text": "é" * 30,
    }


def _torch(path: Path, protocol: int = 2) -> Path:
    path.mkdir()
    torch.save(_tree(), path / "file.pt", pickle_protocol=protocol)
    return path / "file.pt"


def _dcp(path: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"model": {"w": torch.ones(6, 7), "t": torch.randn(4, 5).t()}, "n": 5, "list": [torch.ones(2), "text"]},
            checkpoint_id=path, no_dist=True,
        )  # fmt: skip
    return path


def _safetensors(path: Path) -> Path:
    path.mkdir()
    save_file({"a.w": torch.ones(6, 7), "a.b": torch.ones(7).bfloat16(), "e": torch.empty(0, 3)},
              path / "m.safetensors", {"by": "us"})  # fmt: skip
    return path / "m.safetensors"


def _hub(path: Path) -> Path:
    path.mkdir()
    names = [f"model-{n + 1:05d}-of-00002.safetensors" for n in range(2)]
    for n, name in enumerate(names):
        save_file({f"layers.{n}": torch.full((5, 6), float(n))}, path / name)
    document = {"metadata": {"total_size": 240}, "weight_map": {f"layers.{n}": name for n, name in enumerate(names)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(document))
    return path


def _parts(path: Path) -> Path:
    model, optimizer = trained(0)
    write_parts(path, {"model": [model], "optimizer": [optimizer]}, {"epoch": 3}, 2)
    return path


def _paddle(path: Path) -> Path:
    shutil.copytree(GOLDEN / "paddle" / "two", path)
    return path


def _ours(path: Path) -> Path:
    tree = _tree()
    tree["key"] = {"a": torch.Size([2, 3])}
    tc.save(path, tree)
    return path


FORMATS: dict[str, Callable[[Path], Path]] = {
    "torch": _torch,
    "torch, protocol 5": lambda path: _torch(path, 5),
    "dcp": _dcp,
    "safetensors": _safetensors,
    "hub": _hub,
    "hfai": _parts,
    "paddle": _paddle,
    "ours": _ours,
}


def _changed_bytes(data: bytes, dice: random.Random) -> bytes:
    """Flips, cuts, moves, repeats or overwrites bytes, more often near the beginning and the end."""
    out, size = bytearray(data), len(data)

    def place() -> int:
        near = dice.choice(("front", "back", "any"))
        reach = min(size, 600)
        return (
            min(max(size - 1, 0), dice.randrange(reach or 1) + (size - reach if near == "back" else 0))
            if (near != "any")
            else dice.randrange(size or 1)
        )

    match dice.choice(("flip", "flip", "cut", "length", "length", "splice", "insert", "delete")):
        case "flip":
            for _ in range(dice.randint(1, 6)):
                if size:
                    out[place()] ^= 1 << dice.randrange(8)
        case "cut":
            del out[place() :]
        case "length":
            width = dice.choice((1, 2, 4, 8))
            at = place()
            out[at : at + width] = (dice.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
        case "splice":
            start, at = place(), place()
            part = out[start : start + dice.randint(1, 200)]
            out[at : at + len(part)] = part
        case "insert":
            at = place()
            out[at:at] = dice.randbytes(dice.randint(1, 40))
        case _:
            at = place()
            del out[at : at + dice.randint(1, 40)]
    return bytes(out)


def _changed_pickle(data: bytes, dice: random.Random) -> bytes:
    """Changes instructions of a pickle: another one, one again, one less, another argument."""
    try:
        places = [at for _, _, at in pickletools.genops(data) if at is not None]
    except ValueError:
        return _changed_bytes(data, dice)
    out = bytearray(data)
    for _ in range(dice.randint(1, 3)):
        n = dice.randrange(len(places) - 1)
        start, stop = places[n], places[n + 1]
        match dice.choice(("code", "again", "drop", "argument", "bytes", "swap")):
            case "code":
                out[start : start + 1] = dice.choice(OPCODES)
            case "again":
                out[start:start] = out[start:stop] * dice.randint(1, 50)
            case "drop":
                del out[start:stop]
            case "argument":
                if stop - start > 1:
                    out[dice.randrange(start + 1, stop)] = dice.randrange(256)
            case "swap":
                m = dice.randrange(len(places) - 1)
                out[start:stop] = data[places[m] : places[m + 1]]
            case _:
                return _changed_bytes(bytes(out), dice)
    return bytes(out)


def _changed_zip(data: bytes, dice: random.Random) -> bytes:
    """Changes the entries of an archive; the checksums fit what they are now, unless these are what is changed."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = next(n for n, (name, _) in enumerate(entries) if name.endswith("data.pkl"))
    act = dice.choice(("pickle",) * 6 + ("drop", "twice", "rename", "storage", "packed", "directory"))
    method = zipfile.ZIP_STORED
    if act == "pickle":
        entries[at] = (entries[at][0], _changed_pickle(entries[at][1], dice))
    elif act == "drop":
        del entries[dice.randrange(len(entries))]
    elif act == "twice":
        entries.append((dice.choice(entries)[0], dice.choice(entries)[1]))
    elif act == "rename":
        n = dice.randrange(len(entries))
        entries[n] = (dice.choice(("../x", "x/", "a/data.pkl", "file/byteorder", "x" * 70)), entries[n][1])
    elif act == "storage":
        n = dice.randrange(len(entries))
        entries[n] = (entries[n][0], _changed_bytes(entries[n][1], dice))
    elif act == "packed":
        method = zipfile.ZIP_DEFLATED
    made = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(made, "w", method) as archive:
        warnings.simplefilter("ignore")
        for name, content in entries:
            archive.writestr(name, content)
    out = bytearray(made.getvalue())
    if act == "directory":  # fields of an entry of the directory: sizes, offset, CRC, lengths
        begin = out.rindex(b"PK\x01\x02")
        field = dice.choice((10, 16, 20, 24, 28, 30, 42))
        out[begin + field : begin + field + 2] = dice.choice(NUMBERS).to_bytes(16, "little", signed=True)[:2]
    return bytes(out)


def places_in(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each part of a JSON document."""
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*at, key)
        yield from places_in(child, (*at, key))


def part_at(node: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        node = node[key]
    return node


def _changed_json(document: Any, dice: random.Random) -> Any:
    for _ in range(dice.randint(1, 3)):
        places = list(places_in(document))
        if not places:
            break
        place = dice.choice(places)
        above, key = part_at(document, place[:-1]), place[-1]
        match dice.choice(("number", "number", "text", "drop", "move", "more")):
            case "number":
                above[key] = dice.choice(NUMBERS)
            case "text":
                above[key] = dice.choice(("", "x", "../x", "F32", "é", None, True, [], {}, 1.5, "0" * 300))
            case "drop":
                del above[key]
            case "move":
                above[key] = json.loads(json.dumps(part_at(document, dice.choice(places))))
            case _:
                if isinstance(above, list):
                    above.extend([above[key]] * dice.randint(1, 2_000))
    return document


def _changed_header(data: bytes, dice: random.Random) -> bytes:
    """Changes the header of a safetensors file; its length fits."""
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(_changed_json(json.loads(data[8 : 8 + length]), dice)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def mutate(path: Path, number: int) -> None:
    """Changes one file of a checkpoint, in place."""
    dice = random.Random(number)
    files = sorted(file for file in ([path] if path.is_file() else path.iterdir()) if file.is_file())
    told = [file for file in files if file.name in (".metadata", INDEX_NAME) or file.suffix in (".metadata", ".json")]
    file = dice.choice(told if told and dice.random() < 0.6 else files)
    data = file.read_bytes()
    inside = dice.random() < 0.7
    if inside and file.suffix in (".pt", ".pth"):
        data = _changed_zip(data, dice)
    elif inside and file.suffix in (".metadata", ".distcp", "") and data[:1] == b"\x80":
        data = _changed_pickle(data, dice)
    elif inside and file.name.endswith(".json"):
        document = _changed_json(json.loads(data), dice)
        if file.name == INDEX_NAME and isinstance(document, dict):
            document = {"seal": "0" * 16} | {key: value for key, value in document.items() if key != "seal"}
            data = sealed(json.dumps(document, separators=(",", ":")).encode())
        else:
            data = json.dumps(document).encode()
    elif inside and file.suffix == ".safetensors" and not file.name.startswith("shard-"):
        data = _changed_header(data, dice)
    else:
        data = _changed_bytes(data, dice)
    file.write_bytes(data)


def mutated(path: Path, number: int) -> tuple[str, Path]:
    """Writes a checkpoint with a change; the formats take turns. Returns the format and the path."""
    name = list(FORMATS)[number % len(FORMATS)]
    kept = path / f"{name}.kept"
    if not kept.exists():
        made = FORMATS[name](kept)
        (path / f"{name}.is file").write_text(made.name if made.is_file() else "")
    shutil.copytree(kept, target := path / f"m{number}")
    inner = (path / f"{name}.is file").read_text()
    found = target / inner if inner else target
    mutate(found, number)
    return name, found
