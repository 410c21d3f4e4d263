"""What a file names is looked up and never run; what it says wrongly, and what no path can be, is an error of ours."""

from __future__ import annotations

import collections
import dataclasses
import enum
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import treeckpt as tc
from tests.helpers.world import reseal
from treeckpt._arrays.registry import resolve
from treeckpt._cli import main
from treeckpt.convert import convert

CALLS: list[str] = []
"""What ran that should not have."""


class Hooked(enum.Enum):
    ONE = 1

    @classmethod
    def _missing_(cls, value: object) -> Any:
        CALLS.append(f"missing {value}")
        return cls.ONE


class Flags(enum.Flag):
    A = 1
    B = 2
    C = 4

    @classmethod
    def _missing_(cls, value: object) -> Any:
        CALLS.append(f"missing {value}")
        return super()._missing_(value)


class Bits(enum.IntFlag):
    READ = 1
    WRITE = 2


class Shouting(enum.EnumMeta):
    def __getitem__(cls, name: str) -> Any:
        CALLS.append(f"item {name}")
        return super().__getitem__(name)


class Loud(enum.Enum, metaclass=Shouting):
    ONE = 1


class Point(NamedTuple):
    x: Any
    y: Any


class Dear(Point):
    @classmethod
    def _make(cls, iterable: Any) -> Any:
        CALLS.append("make")
        return super()._make(iterable)

    def __new__(cls, *args: Any) -> Any:
        CALLS.append("new")
        return super().__new__(cls, *args)


@dataclasses.dataclass
class Plain:
    a: Any

    def __init__(self, a: Any) -> None:
        CALLS.append("init")
        self.a = a

    def __post_init__(self) -> None:
        CALLS.append("post")

    def __setattr__(self, name: str, value: Any) -> None:
        CALLS.append("setattr")
        object.__setattr__(self, name, value)

    def __setstate__(self, state: Any) -> None:
        CALLS.append("setstate")


@dataclasses.dataclass
class Failing(Exception):
    a: Any


class Meta(type):
    def __getattr__(cls, name: str) -> Any:
        CALLS.append(f"attribute {name}")
        return type("Made", (), {})


class Odd(metaclass=Meta):
    class Inner(enum.Enum):
        ONE = 1


@pytest.fixture(autouse=True)
def nothing_called() -> None:
    CALLS.clear()


def _leaf(path: Path, change: Callable[[Any], Any]) -> None:
    """Gives the only value of a checkpoint another form."""
    reseal(path, lambda d: d["index"]["leaves"].__setitem__(0, ["v", change(d["index"]["leaves"][0][1])]))


def test_names_of_a_file_import_nothing() -> None:
    """torch makes some of its modules when they are asked for, hundreds of others with them."""
    lines = [
        "import sys, torch, numpy, treeckpt",
        "from treeckpt._core.tree.value_codec import TypedValue",
        "from treeckpt._arrays.registry import decode, resolve",
        "from treeckpt._arrays.torch import torch_dtype",
        "before = set(sys.modules)",
        "def attempt(act):",
        "    try: act()",
        "    except (LookupError, treeckpt.TreeckptError): pass",
        "    else: raise AssertionError('found')",
        "attempt(lambda: resolve('torch:_inductor.x'))",
        "attempt(lambda: resolve('torch:_inductor'))",
        "attempt(lambda: resolve('torch:_dynamo.eval_frame'))",
        "for kind in ('dtype', 'layout', 'memory_format'):",
        "    attempt(lambda: decode(TypedValue('torch.' + kind, ('_inductor',)), 'x', allow_pickle=False))",
        "attempt(lambda: torch_dtype('_inductor'))",
        "new = set(sys.modules) - before",
        "assert not any(name.startswith('torch.') for name in new), sorted(new)[:9]",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_only_what_stands_in_modules_and_classes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    here = __name__
    assert resolve(f"{here}:Point") is Point and resolve(f"{here}:Odd.Inner") is Odd.Inner
    assert resolve("builtins:int") is int

    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            CALLS.append(f"module {name}")
            return object.__getattribute__(self, name)

    class Proxy:
        @property
        def __class__(self) -> Any:
            CALLS.append("class")
            return type

    lazy: Any = Lazy("lazy_one")
    lazy.__dict__["proxy"], lazy.__dict__["Point"] = Proxy(), Point
    lazy.__dict__["__getattr__"] = lambda name: CALLS.append(f"getattr {name}")
    monkeypatch.setitem(sys.modules, "lazy_one", lazy)
    monkeypatch.setitem(sys.modules, "no_module", Odd)
    CALLS.clear()
    assert resolve("lazy_one:Point") is Point
    for name in ("lazy_one:x", "lazy_one:proxy", "lazy_one:Point.x.y", "no_module:Inner", f"{here}:Odd.Outer", "", ":"):
        with pytest.raises(LookupError):
            resolve(name)
    assert not CALLS


def test_members_of_enums_are_found_without_their_hooks(tmp_path: Path) -> None:
    saved = [Hooked.ONE, Flags.A | Flags.C, Flags(0), Bits.READ | Bits.WRITE, Bits(8 | 1), Loud.ONE]
    tc.save(tmp_path / "c", {"v": saved})
    CALLS.clear()
    found = tc.load(tmp_path / "c")["v"]
    assert [(type(a), a) for a in found] == [(type(a), a) for a in saved]
    assert not CALLS


NO_MEMBERS: list[Any] = [
    ["Hooked", None, 7],
    ["Hooked", "TWO", 1],
    ["Flags", None, 64],
    ["Hooked", None, ["list", []]],
    ["Point", "x", 1],
    ["Flags", None, "x"],
]


@pytest.mark.parametrize("value", NO_MEMBERS)
def test_values_that_are_no_members_call_nothing(tmp_path: Path, value: Any) -> None:
    tc.save(tmp_path / "c", {"v": 1})
    _leaf(tmp_path / "c", lambda _: ["enum", [f"{__name__}:{value[0]}", *value[1:]]])
    with pytest.raises((tc.MismatchError, tc.FormatError)):
        tc.load(tmp_path / "c")
    assert not CALLS


def test_containers_come_back_without_code_of_their_classes(tmp_path: Path) -> None:
    tree = {"dear": Dear(1, np.ones(3)), "plain": Plain(np.zeros(2))}
    tc.save(tmp_path / "c", tree)
    CALLS.clear()
    found = tc.load(tmp_path / "c")
    assert not CALLS
    assert type(found["dear"]) is Dear and found["dear"].x == 1 and type(found["plain"]) is Plain
    assert found["plain"].a.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["Failing", "Odd", "Hooked", "Point"])
def test_a_class_of_another_kind_is_refused(tmp_path: Path, name: str) -> None:
    tc.save(tmp_path / "c", {"p": Plain(1)})
    reseal(tmp_path / "c", lambda d: d["index"]["structure"][2][0].__setitem__(1, f"{__name__}:{name}"))
    CALLS.clear()
    with pytest.raises(tc.MismatchError):
        tc.load(tmp_path / "c")
    assert not CALLS


# what is said wrongly -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["numpy", "tensor"])
@pytest.mark.parametrize("shape", [[0, 1 << 60], [1 << 61, 0], [0, 1 << 31, 1 << 31], [1, 0, (1 << 62) - 1]])
def test_shapes_of_no_elements_are_bounded_too(tmp_path: Path, kind: str, shape: list[int]) -> None:
    tc.save(tmp_path / "c", {"a": np.empty((0, 3)) if kind == "numpy" else torch.empty(0, 3)})
    reseal(tmp_path / "c", lambda d: d["index"]["specs"][0].update(shape=shape))
    for act in (tc.inspect, tc.load, tc.verify):
        with pytest.raises(tc.FormatError):
            act(tmp_path / "c")


@pytest.mark.parametrize("maxlen", [-5, 1 << 70, 1, -(1 << 70)])
def test_lengths_of_deques_are_lengths(tmp_path: Path, maxlen: int) -> None:
    tc.save(tmp_path / "c", {"d": collections.deque([np.ones(1), 2], maxlen=3)})
    assert tc.load(tmp_path / "c")["d"].maxlen == 3
    reseal(tmp_path / "c", lambda d: d["index"]["structure"][2][0].__setitem__(1, maxlen))
    with pytest.raises(tc.FormatError):
        tc.load(tmp_path / "c")


@pytest.mark.parametrize("value", [["torch.device", ["meta:9999999999"]], ["torch.device", ["cuda:-7"]],
    ["torch.device", ["nope"]], ["torch.device", [1, 2, 3, 4]], ["torch.Size", ["x"]], ["torch.TorchVersion", [1, 2]],
    ["torch.dtype", []], ["ZoneInfo", ["\0"]], ["UUID", ["x"]], ["numpy.dtype", ["<U999999999999"]],
    ["range", [1, 2, 0]], ["Decimal", ["sNaN", 3]], ["set", [["Decimal", ["sNaN"]]]]])  # fmt: skip
def test_values_that_no_class_takes_are_refused(tmp_path: Path, value: Any) -> None:
    tc.save(tmp_path / "c", {"v": 1})
    _leaf(tmp_path / "c", lambda _: value)
    with pytest.raises((tc.FormatError, tc.MismatchError)) as caught:
        tc.load(tmp_path / "c")
    assert caught.value.path == "v"
    assert main.main(["show", str(tmp_path / "c"), "v"]) == 0


def test_a_spec_that_asks_for_gradients_of_integers_is_refused(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"a": torch.arange(4)})
    reseal(tmp_path / "c", lambda d: d["index"]["specs"][0].update(requires_grad=True))
    with pytest.raises(tc.FormatError):
        tc.load(tmp_path / "c")


def test_a_tensor_of_two_hundred_dimensions_is_refused_or_converted(tmp_path: Path) -> None:
    for dims in (60, 65, 200):
        torch.save({"a": torch.zeros((1,) * dims)}, tmp_path / "a.pt")
        for target in ("c", "c.safetensors"):
            try:
                convert(tmp_path / "a.pt", tmp_path / f"{dims}{target}")
            except tc.TreeckptError as error:
                assert dims > 64 and "a" in error.path and "dimensions" in str(error)
                assert not (tmp_path / f"{dims}{target}").exists()
            else:
                assert dims <= 64
        if dims <= 64:
            assert tc.load(tmp_path / f"{dims}c")["a"].dim() == dims


# paths ----------------------------------------------------------------------------------------------------------------
READERS: list[Callable[[Any], object]] = [tc.load, tc.inspect, tc.verify, tc.rebuild_index, tc.Manager]


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "memory://\ud800", "memory://a\0b", "file:///tmp/a\0b"])
def test_paths_that_no_file_can_have_are_refused(tmp_path: Path, name: str) -> None:
    path = name if "://" in name else f"{tmp_path}/{name}"
    tree = {"a": np.ones(3)}
    calls = [lambda act=act: act(path) for act in READERS]
    calls += [lambda: tc.save(path, tree), lambda: tc.load_into(path, tree), lambda: tc.save_async(path, tree).result()]
    calls += [lambda: convert(path, tmp_path / "x.pt"), lambda: convert(tmp_path, path)]
    for call in calls:
        with pytest.raises(tc.TreeckptError):
            call()
    for command in (["show", path], ["verify", path], ["ls", path], ["diff", path, path], ["convert", path, path]):
        assert main.main(command) in (1, 2)
    from treeckpt_dashboard.web.app import create_app

    with pytest.raises(tc.TreeckptError):
        create_app([path])
    assert not os.listdir(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes there")
def test_a_directory_whose_name_is_no_text_is_saved_to_and_loaded(tmp_path: Path) -> None:
    path, tree = f"{tmp_path}/\udcff", {"a": np.ones(3)}
    assert tc.save(path, tree).path.endswith("\\xff")
    tc.save_async(path, tree, overwrite=True).result()
    assert tc.load(path)["a"].tolist() == [1, 1, 1] and tc.verify(path).ok
    assert main.main(["show", path]) == 0 and os.listdir(os.fsencode(tmp_path)) == [b"\xff"]
    with pytest.raises(tc.CheckpointError):
        convert(path, f"{path}.pt")


def test_a_tensor_of_more_dimensions_than_can_be_loaded_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeError, match="64 dimensions"):
        tc.save(tmp_path / "c", {"a": torch.zeros((1,) * 65)})
    tree = {"a": torch.ones((1,) * 64)}
    tc.save(tmp_path / "c", tree)
    assert torch.equal(tc.load(tmp_path / "c")["a"], tree["a"])


def test_names_of_custom_metadata_are_text(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeError, match="custom_metadata"):
        tc.save(tmp_path / "c", {"a": 1}, custom_metadata={"\udcff": 1})
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").iterdir())
