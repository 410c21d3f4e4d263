"""Reads a pickle as data. Nothing that it names is imported, looked up or called.

`pickletools` splits the stream into instructions, and a small stack machine executes those that build containers and
plain values. A class or function is only its name (`Symbol`). A call becomes an `UnbuiltObject` with the name, the
arguments and the state, unless the caller passes a constructor for exactly that name that accepts the arguments.
Attributes are set on these records only. Long byte strings stay in the file (`FileBytes`).
"""

from __future__ import annotations

import collections
import pickletools
import reprlib
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import msgspec

from ..errors import CorruptError, FormatError, TreeckptError
from .files import FileRange

__all__ = [
    "Constructors",
    "DeferredValue",
    "FileBytes",
    "Symbol",
    "UnbuiltObject",
    "Unpickled",
    "brief",
    "read_pickle",
]

MAX_PICKLE = 1 << 30
"""Bytes of a pickle, blobs not counted: beyond that it is no description of a checkpoint."""
LONG = 4 << 10
"""Bytes from which a byte string stays in the file."""
BUFFER = 1 << 20

Constructors = Mapping[str, Callable[..., Any]]
"""By `module name`, what makes a value of the arguments that a pickle gives."""


class Symbol(msgspec.Struct, frozen=True):
    """A class or function that a pickle names."""

    text: str
    """Its module and its name, with a blank between."""


class UnbuiltObject(msgspec.Struct, eq=False):
    """An object that the pickle builds by a call: the call, and the state and items set afterwards."""

    symbol: str
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = []
    """What is appended or set on it."""
    why: str = ""
    """Why the constructor of that name refused; empty where there is none."""

    def __repr__(self) -> str:
        return f"<{self.symbol.replace(' ', '.')[:200]}>"


class DeferredValue(msgspec.Struct, eq=False):
    """A value that is built after the whole pickle is read, because its state follows the constructor call."""

    state: Any = None

    def make(self) -> Any:
        """The value."""
        raise NotImplementedError


class FileBytes(msgspec.Struct, frozen=True, eq=False):
    """A long byte string that is still in the file."""

    window: FileRange

    def __len__(self) -> int:
        return self.window.size

    def bytes(self) -> bytes:
        """Reads it."""
        return self.window.read(0, self.window.size).tobytes()


def brief(value: Any) -> str:
    """A value from a file in few characters, however large it is: containers may hold each other over and over."""
    try:
        return reprlib.repr(value)[:80]
    except (ValueError, RecursionError) as error:
        return f"{type(value).__name__} ({error!s:.40})"


class Unpickled(msgspec.Struct, frozen=True):
    """What came of a pickle."""

    value: Any
    stop: int
    """Bytes of the stream that it took."""
    steps: int
    """How many instructions it had: no honest tree has many more nodes."""


class _PickleStream:
    """A window as pickletools reads it; it is told of long byte strings without their bytes."""

    def __init__(self, window: FileRange) -> None:
        self._window, self._at, self._read = window, 0, 0
        self._buffer, self._first = b"", 0
        self._opcode = b""

    def tell(self) -> int:
        return self._at

    def read(self, count: int) -> Any:
        if count >= LONG and self._opcode in b"B\x8e":
            blob = FileBytes(self._window.within(self._at, count))
            self._at += count
            return blob
        self._read += count
        if self._read > MAX_PICKLE:
            raise ValueError(f"a pickle of more than {MAX_PICKLE} bytes")
        if not self._first <= self._at <= self._at + count <= self._first + len(self._buffer):
            self._fill(count)
        start = self._at - self._first
        data = self._buffer[start : start + count]
        self._at += len(data)
        if count == 1:
            self._opcode = data
        return data

    def _fill(self, count: int) -> None:
        size = min(max(count, BUFFER), self._window.size - self._at)
        if count > size:  # before room is made for what is not there
            raise ValueError(f"{count} bytes are announced, {size} are left")
        self._buffer, self._first = self._window.read(self._at, size).tobytes(), self._at

    def readline(self) -> bytes:
        parts: list[bytes] = []
        while not parts or parts[-1] not in (b"\n", b""):
            if len(parts) > LONG:
                raise ValueError(f"a line of more than {LONG} bytes")
            parts.append(self._line_byte())
        return b"".join(parts)

    def _line_byte(self) -> bytes:
        if self._at >= self._window.size:
            return b""
        kept = self._opcode
        data = self.read(1)
        self._opcode = kept
        return data


def read_pickle(
    window: FileRange, constructors: Constructors, *, persistent: Callable[[Any], Any] | None = None
) -> Unpickled:
    """The value of the pickle at the beginning of a stretch of a file.

    Args:
        constructors: what may be made; any other call becomes an `UnbuiltObject`.
        persistent: resolves a persistent id.

    Raises:
        FormatError: no pickle, or one that asks for what no checkpoint needs.
        CorruptError: it is cut short.
    """
    machine = _PickleMachine(constructors, persistent)
    stream = _PickleStream(window)
    steps = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of odd escapes in the texts of the oldest protocol
            for opcode, argument, _ in pickletools.genops(stream):  # pyright: ignore[reportArgumentType] (it only reads)
                steps += 1
                _STEPS[opcode.name](machine, argument)
        [value] = machine.stack
    except TreeckptError:
        raise
    except KeyError as error:
        raise FormatError(window.label, expected="a pickle of plain data", found=f"{error!s:.100}") from error
    except (ValueError, IndexError, TypeError, AttributeError, OverflowError, RecursionError, AssertionError) as error:
        raise CorruptError(
            window.label,
            expected="a whole pickle of plain data",
            found=f"{type(error).__name__}: {error}"[:200],
            hint="The file is damaged, or not what its name says",
        ) from error
    return Unpickled(value, stream.tell(), steps)


_REFUSALS = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RuntimeError)
"""What constructors raise of arguments that they do not take: of one value that is odd, not of a damaged file."""


class _PickleMachine:
    def __init__(self, constructors: Constructors, persistent: Callable[[Any], Any] | None) -> None:
        self.constructors, self.persistent = constructors, persistent
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def take(self, count: int) -> list[Any]:
        items = [self.stack.pop() for _ in range(count)]
        return items[::-1]

    def put(self, number: int | None = None) -> None:
        self.memo[len(self.memo) if number is None else int(number)] = self.stack[-1]

    def call(self, function: Any, args: Any) -> None:
        if not isinstance(function, (Symbol, UnbuiltObject)) or not isinstance(args, tuple):
            raise ValueError(f"a call of {type(function).__name__}")
        if isinstance(function, UnbuiltObject):  # as of a nested class, which older protocols look up by getattr
            self.push(UnbuiltObject(function.symbol, (function, *args), items=[]))
        else:
            self.push(self._made(function.text, args))

    def _made(self, name: str, args: tuple[Any, ...]) -> Any:
        make, why = self.constructors.get(name), ""
        try:
            if make is not None:
                return make(*args)
        except CorruptError:
            raise
        except FormatError as error:
            why = error.found
        except _REFUSALS as error:
            why = f"{error}"
        return UnbuiltObject(name, args, items=[], why=why[:200])

    def call_named(self, function: Any, args: Any, named: Any) -> None:
        """A call with arguments by name, which no constructor of ours takes."""
        if not isinstance(function, (Symbol, UnbuiltObject)):
            raise ValueError(f"a call of {type(function).__name__}")
        self.push(
            UnbuiltObject(function.text if isinstance(function, Symbol) else function.symbol, (args, named), items=[])
        )

    def build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if isinstance(made, (UnbuiltObject, DeferredValue)):
            made.state = state
        elif not isinstance(made, dict):  # attributes of an OrderedDict, as state dicts have, are not part of the tree
            raise ValueError(f"a state for a {type(made).__name__}")

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, UnbuiltObject):
            target.items += items
        elif isinstance(target, (list, collections.deque)):
            target.extend(items)
        elif isinstance(target, set):
            target.update(items)
        else:
            raise ValueError(f"items for a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, UnbuiltObject):
            target.items += pairs
        elif isinstance(target, dict):
            target.update(pairs)
        else:
            raise ValueError(f"keys for a {type(target).__name__}")

    def persist(self, identity: Any) -> None:
        if self.persistent is None:
            raise ValueError("a persistent id")
        self.push(self.persistent(identity))

    def symbol(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is no text")
        self.push(Symbol(f"{module} {name}"))


def _dict(items: list[Any]) -> dict[Hashable, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _ignore(machine: _PickleMachine, argument: Any) -> None:
    pass


def _drop(items: list[Any]) -> None:
    pass


def _pop(machine: _PickleMachine, argument: Any) -> None:
    if machine.stack:
        machine.stack.pop()
    else:  # pickle pops a mark so
        machine.to_mark()


_PUSHED = (
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "BYTEARRAY8",
)  # fmt: skip
"""Instructions whose argument is the value. Out-of-band buffers and the registry of extensions are not among ours."""

_STEPS: dict[str, Callable[[_PickleMachine, Any], None]] = {
    **dict.fromkeys(_PUSHED, _PickleMachine.push),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _ignore),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "EMPTY_SET": lambda m, _: m.push(set()),
    "TUPLE1": lambda m, _: m.push(tuple(m.take(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.take(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.take(3))),
    "MARK": lambda m, _: m.mark(),
    "POP": _pop,
    "POP_MARK": lambda m, _: _drop(m.to_mark()),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "TUPLE": lambda m, _: m.push(tuple(m.to_mark())),
    "LIST": lambda m, _: m.push(m.to_mark()),
    "DICT": lambda m, _: m.push(_dict(m.to_mark())),
    "FROZENSET": lambda m, _: m.push(frozenset(m.to_mark())),
    "APPEND": lambda m, _: m.append(m.take(1)),
    "APPENDS": lambda m, _: m.append(m.to_mark()),
    "ADDITEMS": lambda m, _: m.append(m.to_mark()),
    "SETITEM": lambda m, _: m.set_items(m.take(2)),
    "SETITEMS": lambda m, _: m.set_items(m.to_mark()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _PickleMachine.put),
    "MEMOIZE": lambda m, _: m.put(),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, n: m.push(m.memo[int(n)])),
    "GLOBAL": lambda m, name: m.symbol(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.symbol(*m.take(2)),
    "REDUCE": lambda m, _: m.call(*m.take(2)),
    "NEWOBJ": lambda m, _: m.call(*m.take(2)),
    "NEWOBJ_EX": lambda m, _: m.call_named(*m.take(3)),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.persist(m.stack.pop()),
}
