"""Values of the standard library in files of torch.save come out as torch.load(weights_only=False) gives them."""

from __future__ import annotations

import argparse
import datetime as dt
import decimal
import fractions
import io
import pathlib
import pickle
import types
import uuid
import zipfile
import zoneinfo
from pathlib import Path
from typing import Any

import pytest
import torch

import treeckpt as tc
from treeckpt.convert import convert
from treeckpt.errors import TreeckptError, TreeError

SPACE = argparse.Namespace(lr=0.1, out=pathlib.Path("/runs/a"), device=torch.device("cpu"), sub=types.SimpleNamespace())
ZONED = dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.timezone(dt.timedelta(hours=1), "X"), fold=1)
VALUES = [
    pathlib.Path("/a/b"),
    pathlib.PurePosixPath("a"),
    pathlib.PureWindowsPath("c:/x/y"),
    SPACE,
    types.SimpleNamespace(a=1, b={"c": [1, (2,)]}),
    dt.datetime(2026, 1, 2, 3, 4, 5),
    ZONED,
    ZONED.replace(tzinfo=zoneinfo.ZoneInfo("UTC")),
    dt.date(2026, 1, 2),
    dt.time(1, 2, tzinfo=dt.UTC),
    dt.timedelta(1, 2, 3),
    dt.timezone(dt.timedelta(hours=1)),
    zoneinfo.ZoneInfo("UTC"),
    decimal.Decimal("1.50"),
    decimal.Decimal("1e999999999"),
    fractions.Fraction(-1, 3),
    uuid.UUID(int=5),
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_plain_value_comes_out_as_torch_gives_it(tmp_path: Path, value: Any, protocol: int) -> None:
    torch.save({"x": value, "list": [value, 1]}, tmp_path / "a.pt", pickle_protocol=protocol)
    expected = torch.load(tmp_path / "a.pt", weights_only=False)
    found = tc.load(tmp_path / "a.pt")
    assert found == expected and type(found["x"]) is type(expected["x"])
    convert(tmp_path / "a.pt", tmp_path / "ours")
    assert tc.load(tmp_path / "ours") == expected


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("content", [b"", b"abc", bytes(range(256)) * 40, "", "a\r\nb" * 5000], ids=len)
def test_a_file_in_memory_comes_out_at_its_position(tmp_path: Path, content: Any, protocol: int) -> None:
    buffer = io.BytesIO(content) if isinstance(content, bytes) else io.StringIO(content, newline="")
    buffer.seek(min(len(content), 2))
    buffer.name = "x"  # type: ignore[union-attr]
    torch.save({"x": buffer}, tmp_path / "a.pt", pickle_protocol=protocol)
    expected, found = torch.load(tmp_path / "a.pt", weights_only=False)["x"], tc.load(tmp_path / "a.pt")["x"]
    assert type(found) is type(expected) and found.tell() == expected.tell() == buffer.tell()
    assert found.getvalue() == expected.getvalue() and vars(found) == vars(expected) == {"name": "x"}


def test_one_object_at_two_places_is_one_object(tmp_path: Path) -> None:
    torch.save({"a": SPACE, "b": SPACE}, tmp_path / "a.pt")
    assert tc.load(tmp_path / "a.pt")["a"] == tc.load(tmp_path / "a.pt")["b"] == SPACE


class OfTheProgram:
    """A class whose objects only its own code makes."""


@pytest.mark.parametrize(
    ("inside", "named"),
    [(OfTheProgram(), "OfTheProgram"), ([{"k": OfTheProgram()}], "OfTheProgram"), (torch.zeros(2), r"args\.x")],
)
def test_a_namespace_is_refused_as_a_whole_for_what_it_cannot_have(tmp_path: Path, inside: Any, named: str) -> None:
    torch.save({"args": argparse.Namespace(x=inside), "w": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(TreeError, match=f"^args: .*{named}"):
        convert(tmp_path / "a.pt", tmp_path / "ours")
    convert(tmp_path / "a.pt", tmp_path / "ours", exclude="args")
    assert tc.load(tmp_path / "a.pt", select="w")["w"] == torch.ones(1)


class Call:
    """Pickles as the call of a name with arguments, and perhaps a state."""

    def __init__(self, name: str, args: tuple[Any, ...], state: Any = None) -> None:
        self.name, self.args, self.state = name, args, state

    def __reduce__(self) -> Any:
        module, _, name = self.name.partition(":")
        owner: Any = __import__(module)
        for step in name.split("."):
            owner = getattr(owner, step)
        return (owner, self.args) if self.state is None else (owner, self.args, self.state)


@pytest.mark.parametrize(
    "call",
    [
        Call("zoneinfo:ZoneInfo", ("UTC",)),
        Call("zoneinfo:ZoneInfo._unpickle", ("../../etc/passwd", 1)),
        Call("zoneinfo:ZoneInfo._unpickle", ("No/Where", 1)),
        Call("zoneinfo:ZoneInfo._unpickle", ("", 1)),
        Call("decimal:Decimal", ("x",)),
        Call("decimal:Decimal", (5,)),
        Call("fractions:Fraction", ("1e999999999",)),
        Call("fractions:Fraction", (1, 0)),
        Call("datetime:date", (b"x",)),
        Call("datetime:datetime", (1, 2)),
        Call("datetime:timedelta", (10**12,)),
        Call("pathlib:PurePosixPath", (5,)),
        Call("uuid:UUID", (), {"int": "x"}),
        Call("uuid:UUID", (), 5),
        Call("io:BytesIO", (), (b"a", -1, None)),
        Call("io:BytesIO", (), (b"a", 0, {"x": OfTheProgram()})),
        Call("io:BytesIO", (), 5),
        Call("io:BytesIO", (5,)),
        Call("argparse:Namespace", (), 5),
        Call("argparse:Namespace", (), {1: 2}),
        Call("argparse:Namespace", (1,)),
        Call("builtins:getattr", (str, "join")),
    ],
    ids=lambda call: f"{call.name}{call.args}{call.state}"[:60],
)
def test_a_value_that_its_class_would_not_make_is_refused_by_its_path(tmp_path: Path, call: Call) -> None:
    data = pickle.dumps({"x": call, "n": 1}, protocol=4)
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/version", b"3\n")
    with pytest.raises(TreeckptError, match=r"^x"):
        tc.load(tmp_path / "a.pt")
    assert tc.load(tmp_path / "a.pt", select="n")["n"] == 1


def test_what_is_refused_is_named_at_each_of_its_places(tmp_path: Path) -> None:
    one = OfTheProgram()
    space = argparse.Namespace(x=one)
    torch.save({"a": space, "b": one, "c": space, "d": 1}, tmp_path / "a.pt")
    for path in "abc":
        with pytest.raises(TreeError, match=f"^{path}: "):
            tc.load(tmp_path / "a.pt", select=path)
    with pytest.raises(TreeError, match=r"^b: "):
        convert(tmp_path / "a.pt", tmp_path / "ours", exclude=["a", "c"])
    assert tc.load(tmp_path / "a.pt", select="d")["d"] == 1
