"""Pickles of a few hundred bytes, or kilobytes, that name endless work or memory; each is refused."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

P = (1 << 61) - 1
"""Numbers that differ by it have one hash."""


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name(module: str, called: str) -> bytes:
    return f"c{module}\n{called}\n".encode()


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(data)) + data


def doubled(depth: int, first: bytes = b")") -> bytes:
    """A tuple of two times the same tuple, and so on."""
    return first + b"2\x86" * depth


def doubled_apart(depth: int) -> bytes:
    """An equal tuple that is another object."""
    return b"K\x01K\x01\x86" + b"2\x86" * depth


def one_hash(count: int) -> bytes:
    return b"".join(number(n * P) for n in range(1, count + 1))


def huge() -> bytes:
    """range(2 ** 40)."""
    return name("builtins", "range") + number(1 << 40) + b"\x85R"


RECORD = name("nowhere", "Class")
LONG_TEXT = text("x" * 60_000)


def calls(count: int) -> bytes:
    """A call of a call, each with as many arguments as memory holds of numbers that the pickle has."""
    args = b"(" + b"K\x01" * 20_000 + b"tq\x01"
    return RECORD + b")R" + args + b"0" + b"h\x01R" * count


BOMBS: dict[str, bytes] = {
    "a tuple of tuples in a set": b"\x8f(" + doubled(40) + b"\x90",
    "a tuple of tuples in a frozenset": b"(" + doubled(40) + b"\x91",
    "a tuple of tuples as a key": b"}" + doubled(40) + b"K\x01s",
    "a tuple of tuples in the keys of a dict": b"(" + doubled(40) + b"K\x01d",
    "a tuple of tuples in a set that is called": name("builtins", "set") + b"(" + doubled(40) + b"l\x85R",
    "a tuple of tuples in pairs": name("collections", "OrderedDict") + b"(" + doubled(40) + b"K\x01\x86l\x85R",
    "a tuple of tuples in a slice in a set": b"\x8f("
    + name("builtins", "slice") + doubled(40) + b"\x85R" + b"\x90",
    "equal tuples of tuples in a set": b"\x8f(" + doubled_apart(14) + b"".join(doubled_apart(14) for _ in range(300))
    + b"\x90",
    "a tuple of tuples as a device": name("torch", "device") + doubled(40) + b"\x85R",
    "a tuple of tuples as a layout": name("torch.serialization", "_get_layout") + doubled(40) + b"\x85R",
    "a tuple of tuples in a look-up": name("builtins", "getattr") + name("os", "path") + doubled(40) + b"\x86R",
    "a tuple of tuples in an ordered dict": name("collections", "OrderedDict") + b")R" + doubled(40) + b"K\x01s",
    "a tuple of tuples in the name of a defaultdict": name("collections", "defaultdict")
    + name("collections", "OrderedDict") + b"]" + b"(" + b"K\x01" + doubled(40) + b"\x86l\x85R" + b"\x85R",
    "a tuple of tuples 100,000 levels deep as a key": b"}" + b")" + b"\x85" * 100_000 + b"K\x01s",
    "records 100,000 levels deep": (RECORD + b")") * 0 + b")" + b"q\x000" + RECORD + b")R" + b"\x85" * 100_000,
    "a size of a range": name("torch", "Size") + huge() + b"\x85R",
    "a tensor of a range": name("torch._utils", "_rebuild_tensor_v2")
    + b"(" + b"N" + b"K\x00" + huge() + huge() + b"\x89Nt" + b"R",
    "a set of a range": name("builtins", "set") + huge() + b"\x85R",
    "a buffer of a range": name("_io", "BytesIO") + b")R" + huge() + b"b",
    "a dtype with a range": name("numpy", "dtype") + text("f4") + b"\x85R" + huge() + b"b",
    "60,000 numbers of one hash in a set": b"\x8f(" + one_hash(60_000) + b"\x90",
    "60,000 numbers of one hash as keys": b"}(" + b"".join(number(n * P) + b"N" for n in range(60_000)) + b"u",
    "60,000 numbers of one hash, one by one": b"}" + b"".join(number(n * P) + b"Ns" for n in range(60_000)),
    "60,000 numbers of one hash as places": b"N" + b"".join(b"p%d\n" % (n * P) for n in range(1, 60_001)),
    "60,000 tuples of one hash": b"\x8f(" + b"".join(number(n * P) + b"\x85" for n in range(60_000)) + b"\x90",
    "60,000 uuids of one hash": b"\x8f("
    + b"".join(
        name("uuid", "UUID") + b")R}" + text("int") + number(n * P) + b"sb" for n in range(60_000)
    )
    + b"\x90",
    "calls of calls": calls(60_000),
    "encoded again and again": b"(" + name("_codecs", "encode") + b"q\x01" + LONG_TEXT + text("latin1") + b"\x86q\x020"
    + b"h\x01h\x02R" * 60_000 + b"t",
    "copied again and again": b"(" + name("builtins", "bytearray") + b"q\x01"
    + name("_codecs", "encode") + LONG_TEXT + text("latin1") + b"\x86R\x85q\x020" + b"h\x01h\x02R" * 60_000 + b"t",
    "a list copied again and again": b"(" + name("collections", "deque") + b"q\x01"
    + b"](" + b"N" * 30_000 + b"e\x85q\x020" + b"h\x01h\x02R" * 60_000 + b"t",
    "attributes set again and again": name("collections", "OrderedDict") + b")R" + b"}("
    + b"".join(text(f"{n}") + b"N" for n in range(20_000)) + b"uq\x01b" + b"h\x01b" * 60_000,
    "names joined again and again": b"(" + LONG_TEXT + b"q\x010" + b"h\x01h\x01\x93" * 60_000 + b"t",
    "paths of a long key": b"}q\x00" + LONG_TEXT + b"q\x01](" + b"]" * 60_000 + b"es",
    "nested dicts of a long key": LONG_TEXT + b"q\x010" + b"}h\x01" * 900 + b"N" + b"s" * 900,
    "a fraction of long numbers": name("fractions", "Fraction")
    + number((1 << 4_000_000) - 3) + number((1 << 3_999_999) - 5) + b"\x86R",
    "a key of 20,000 digits": b"}" + number(10**20_000) + b"Ns",
    "a key of 20,000 digits in a tuple": b"}" + number(10**20_000) + b"\x85Ns",
    "a place of 20,000 digits": b"Np" + b"1" * 20_000 + b"\n",
    "a number of 20,000 digits in text": b"I" + b"1" * 20_000 + b"\n",
    "a number of 4,000 digits in text as a length": b"L" + b"1" * 4_000 + b"L\n" + b"\x85R",
    "no number in text": b"Inone\n",
    "no float in text": b"Fnone\n",
    "a text with half an escape": b"V\\u12\n",
    "a text that is no Unicode": b"X\x01\x00\x00\x00\xff",
    "a text in quotes that do not match": b"S'x\"\n",
    "a long number of a negative length": b"\x8b\xff\xff\xff\xff",
    "an extension": b"\x82\x01",
    "a large extension": b"\x84\x01\x00\x00\x00",
    "a persistent id in text": b"Pname\n",
    "a list in itself": b"]q\x01h\x01a",
    "a list of two times the same list": b"]" + b"q\x01](h\x01h\x01e" * 1 + b"".join(
        b"q" + bytes([n]) + b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e" for n in range(2, 60)),
    "a dtype of many fields": name("numpy", "dtype") + text("f4," * 20_000) + b"\x85R",
    "an array of many dimensions": name("numpy.core.multiarray", "_reconstruct") + b")R("
    + b"K\x01" + b"(" + b"K\x01" * 60_000 + b"t" + name("numpy", "dtype") + text("f4") + b"\x85R" + b"\x89" + text("")
    + b"tb",
    "bytes of a storage of a long name": b"(" + text("storage") + name("torch", "FloatStorage") + LONG_TEXT
    + text("cpu") + b"K\x01tq\x01" + b"0h\x01Q" * 60_000,
}  # fmt: skip


def write_bomb(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        file.writestr("archive/version", b"3\n")
    return path


def record(module: str, called: str, fields: dict[str, bytes]) -> bytes:
    """An object with fields."""
    state = b"}(" + b"".join(text(key) + value for key, value in fields.items()) + b"u"
    return name(module, called) + b")\x81" + state + b"b"


DCP = "torch.distributed.checkpoint.metadata"
PADDLE = "paddle.distributed.checkpoint.metadata"
SIZES = b"(" + b"".join(number(n) for n in (2, 3)) + b"t"


def _dcp(names: bytes, places: bytes = b"}", paths: bytes = b"}") -> bytes:
    return record(DCP, "Metadata", {"state_dict_metadata": names, "planner_data": paths, "storage_data": places})


def _place(of: bytes, offset: bytes) -> bytes:
    return record(DCP, "MetadataIndex", {"fqn": of, "offset": offset})


def _paddle(tensors: bytes, places: bytes = b"}", paths: bytes = b"}") -> bytes:
    fields = {"state_dict_metadata": tensors, "storage_metadata": places, "flat_mapping": paths}
    return record(PADDLE, "Metadata", fields)


def _paddle_place(of: bytes, offset: bytes = b")") -> bytes:
    return record(PADDLE, "LocalTensorIndex", {"tensor_key": of, "global_offset": offset, "is_flattened": b"\x89"})


def _tensor(chunks: bytes) -> bytes:
    properties = (name(DCP, "TensorProperties") + b")\x81(" + name("torch", "float32")
                  + name("torch.serialization", "_get_layout") + text("torch.strided") + b"\x85R\x89tb")  # fmt: skip
    return record(DCP, "TensorStorageMetadata", {"properties": properties, "size": SIZES, "chunks": chunks})


OFFSETS = [number(n * P + 1) + number(1) + b"\x86" for n in range(2)]
DIRECTORIES: dict[str, tuple[str, bytes]] = {
    "a tuple of tuples as a name": (".metadata", _dcp(b"}", b"}" + _place(doubled(40), b"N") + b"Ns")),
    "a tuple of tuples as an offset": (".metadata", _dcp(b"}", b"}" + _place(text("a"), doubled(40)) + b"Ns")),
    "an offset of a range": (".metadata", _dcp(b"}", b"}" + _place(text("a"), huge()) + b"Ns")),
    "offsets of one hash": (
        ".metadata",
        _dcp(b"}", b"}(" + b"".join(
            _place(text("a"), b"(" + b"".join(number(P * (n >> bit & 1)) for bit in range(15)) + b"t") + b"N"
            for n in range(5_000)
        ) + b"u"),
    ),
    "a path of tuples of tuples": (
        ".metadata",
        _dcp(b"}" + text("a") + record(DCP, "BytesStorageMetadata", {}) + b"s", b"}" + _place(text("a"), b"N") + b"Ns",
             b"}" + text("a") + b"(" + doubled(40) + b"ts"),
    ),
    "one list of chunks for all tensors": (
        ".metadata",
        _dcp(b"}(" + text("first") + _tensor(b"](" + record(DCP, "ChunkStorageMetadata", {
            "offsets": SIZES, "sizes": SIZES}) + b"q\x05" + b"h\x05" * 20_000 + b"eq\x06")
             + b"".join(text(f"t{n}") + _tensor(b"h\x06") for n in range(2_000)) + b"u"),
    ),
    "a tuple of tuples as the name of an array": (
        "0.metadata", _paddle(b"}", b"}" + _paddle_place(doubled(40)) + b"Ns"),
    ),
    "a tuple of tuples as a dtype": (
        "0.metadata",
        _paddle(b"}" + text("a") + b"]" + record(PADDLE, "LocalTensorMetadata", {
            "global_offset": b")", "local_shape": b")", "dtype": doubled(40)}) + b"as"),
    ),
    "pieces of other dimensions": (
        "0.metadata",
        _paddle(b"}" + text("a") + b"](" + b"".join(record(PADDLE, "LocalTensorMetadata", {
            "global_offset": sizes, "local_shape": sizes, "dtype": text("float32")}) for sizes in (b")", SIZES))
            + b"es"),
    ),
}  # fmt: skip
"""The name of a metadata file, and a pickle."""
