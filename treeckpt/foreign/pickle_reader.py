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

MAX_PICKLE = 1 << 30
"""The largest pickle of a checkpoint in bytes, without the byte strings that stay in the file."""
LONG = 4 << 10
"""Bytes from which a byte string stays in the file."""
BUFFER = 1 << 20

Constructors = Mapping[str, Callable[..., Any]]
"""By `module name`, the function that builds a value from the arguments in a pickle."""


class Symbol(msgspec.Struct, frozen=True):
    """A class or function that a pickle names."""

    text: str
    """Its module and its name, with a blank between."""


class UnbuiltObject(msgspec.Struct, eq=False):
    """A call in a pickle that was not made: its arguments, and the state and items set on its result."""

    symbol: str
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = []
    """Elements or (key, value) pairs."""
    why: str = ""
    """The error of the constructor of that name; empty if there is none."""

    def __repr__(self) -> str:
        return f"<{self.symbol.replace(' ', '.')[:200]}>"


class DeferredValue(msgspec.Struct, eq=False):
    """A value that is built after the whole pickle is read, because its state follows the constructor call."""

    state: Any = None

    def make(self) -> Any:
        """Builds the value."""
        raise NotImplementedError


class FileBytes(msgspec.Struct, frozen=True, eq=False):
    """A long byte string that stays in the file."""

    window: FileRange

    def __len__(self) -> int:
        return self.window.size

    def bytes(self) -> bytes:
        """Reads it."""
        return self.window.read(0, self.window.size).tobytes()


def brief(value: Any) -> str:
    """Formats a value from a file in at most 80 characters, even if containers contain each other repeatedly."""
    try:
        return reprlib.repr(value)[:80]
    except (ValueError, RecursionError) as error:
        return f"{type(value).__name__} ({error!s:.40})"


class Unpickled(msgspec.Struct, frozen=True):
    """The result of reading a pickle."""

    value: Any
    steps: int
    """Number of its instructions: no valid tree has many more nodes."""


class _PickleStream:
    """A file for pickletools; `read` returns `FileBytes` for long byte strings."""

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
            size = min(max(count, BUFFER), self._window.size - self._at)
            if count > size:  # before memory is allocated for what is not there
                raise ValueError(f"{count} bytes are announced, {size} are left")
            self._buffer, self._first = self._window.read(self._at, size).tobytes(), self._at
        start = self._at - self._first
        data = self._buffer[start : start + count]
        self._at += len(data)
        if count == 1:
            self._opcode = data
        return data

    def readline(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n") and self._at < self._window.size:
            if len(line) > LONG:
                raise ValueError(f"a line of more than {LONG} bytes")
            line += self.read(1)
        return bytes(line)


def read_pickle(
    window: FileRange, constructors: Constructors, *, persistent: Callable[[Any], Any] | None = None
) -> Unpickled:
    """Reads the pickle at the beginning of a byte range.

    Args:
        constructors: all other calls become `UnbuiltObject`s.
        persistent: resolves a persistent id.

    Raises:
        FormatError: not a pickle, or one with instructions that no checkpoint needs.
        CorruptError: it is truncated.
    """
    machine = _PickleMachine(constructors, persistent)
    stream: Any = _PickleStream(window)
    steps = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of odd escapes in the texts of the oldest protocol
            for opcode, argument, _ in pickletools.genops(stream):
                steps += 1
                machine.step(opcode.name, argument)
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
    return Unpickled(value, steps)


_REFUSALS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, OSError)
"""Errors of constructors for arguments that they do not accept: they concern one value, not the whole file."""


class _PickleMachine:
    """A stack, as pickles are written for; each instruction is one `step`."""

    def __init__(self, constructors: Constructors, persistent: Callable[[Any], Any] | None) -> None:
        self.constructors, self.persistent = constructors, persistent
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Executes one instruction.

        Raises:
            KeyError: checkpoints do not need it.
        """
        if name in _PUSHED:
            self.stack.append(argument)
        elif name in _BUILT:
            count, build = _BUILT[name]
            value = build(self.take(count))  # replaces the stack if it is marked
            self.stack.append(value)
        elif name in _APPLIED:
            count, apply = _APPLIED[name]
            apply(self, self.take(count))
        else:
            self._move(name, argument)

    def take(self, count: int | None) -> list[Any]:
        """Pops objects from the stack; `None` pops those since the last mark."""
        if count is None:
            items, self.stack = self.stack, self.marks.pop()
            return items
        items = [self.stack.pop() for _ in range(count)]
        return items[::-1]

    def _move(self, name: str, argument: Any) -> None:
        """Executes an instruction of the stack, the marks or the memo."""
        match name:
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[int(argument)] = self.stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[int(argument)])
            case "MARK":
                self.marks.append(self.stack)
                self.stack = []
            case "POP":  # pops a mark if nothing is above it
                self.take(1 if self.stack else None)
            case "DUP":
                self.stack.append(self.stack[-1])
            case "GLOBAL":
                self.name(argument.split(" ", 1))
            case "PROTO" | "FRAME" | "STOP":
                pass
            case _:
                raise KeyError(name)

    def call(self, operands: list[Any]) -> None:
        function, args, *named = operands
        if not isinstance(function, (Symbol, UnbuiltObject)) or not (named or isinstance(args, tuple)):
            raise ValueError(f"a call of {type(function).__name__}")
        name = function.text if isinstance(function, Symbol) else function.symbol
        if named:  # arguments by name, which no constructor of ours takes
            self.stack.append(UnbuiltObject(name, (args, *named), items=[]))
        elif isinstance(function, UnbuiltObject):  # as of a nested class, which older protocols look up by getattr
            self.stack.append(UnbuiltObject(name, (function, *args), items=[]))
        else:
            self.stack.append(self._made(name, args))

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

    def build(self, operands: list[Any]) -> None:
        made = self.stack[-1]
        if isinstance(made, (UnbuiltObject, DeferredValue)):
            [made.state] = operands
        elif type(made) is collections.OrderedDict and isinstance(operands[0], dict):
            vars(made).update(operands[0])  # as `_metadata` of a state dict
        elif not isinstance(made, dict):
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
        target, pairs = self.stack[-1], zip(items[::2], items[1::2], strict=True)
        if isinstance(target, UnbuiltObject):
            target.items += pairs
        elif isinstance(target, dict):
            target.update(pairs)
        else:
            raise ValueError(f"keys for a {type(target).__name__}")

    def persist(self, operands: list[Any]) -> None:
        if self.persistent is None:
            raise ValueError("a persistent id")
        self.stack.append(self.persistent(*operands))

    def name(self, operands: list[Any]) -> None:
        module, name = operands
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is no text")
        self.stack.append(Symbol(f"{module} {name}"))

    def drop(self, operands: list[Any]) -> None:
        pass


def _dict(items: list[Any]) -> dict[Hashable, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


_PUSHED = frozenset((
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "BYTEARRAY8",
))  # fmt: skip
"""Instructions whose argument is the value. Out-of-band buffers and the registry of extensions are not among ours."""
_BUILT: dict[str, tuple[int | None, Callable[[list[Any]], Any]]] = {
    "NONE": (0, lambda _: None),
    "NEWTRUE": (0, lambda _: True),
    "NEWFALSE": (0, bool),
    "EMPTY_DICT": (0, _dict),
    "EMPTY_LIST": (0, list),
    "EMPTY_TUPLE": (0, tuple),
    "EMPTY_SET": (0, set),
    "TUPLE1": (1, tuple),
    "TUPLE2": (2, tuple),
    "TUPLE3": (3, tuple),
    "TUPLE": (None, tuple),
    "LIST": (None, list),
    "DICT": (None, _dict),
    "FROZENSET": (None, frozenset),
}
"""Instructions that build a value from operands, with their number; None for all since the last mark."""
_APPLIED: dict[str, tuple[int | None, Callable[[_PickleMachine, list[Any]], None]]] = {
    "APPEND": (1, _PickleMachine.append),
    "APPENDS": (None, _PickleMachine.append),
    "ADDITEMS": (None, _PickleMachine.append),
    "SETITEM": (2, _PickleMachine.set_items),
    "SETITEMS": (None, _PickleMachine.set_items),
    "STACK_GLOBAL": (2, _PickleMachine.name),
    "REDUCE": (2, _PickleMachine.call),
    "NEWOBJ": (2, _PickleMachine.call),
    "NEWOBJ_EX": (3, _PickleMachine.call),
    "BUILD": (1, _PickleMachine.build),
    "BINPERSID": (1, _PickleMachine.persist),
    "POP_MARK": (None, _PickleMachine.drop),
}
"""Other instructions with operands."""
