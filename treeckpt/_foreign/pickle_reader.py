"""Reads a pickle as data. Nothing that it names is imported, looked up or called.

`pickletools` splits the stream into instructions, and a small stack machine executes those that build containers and
plain values. A class or function is only its name (`Symbol`). A call becomes an `UnbuiltObject` with the name, the
arguments and the state, unless the caller passes a constructor for exactly that name that accepts the arguments.
Attributes are set on these records only. Long byte strings stay in the file (`FileBytes`).

A few hundred bytes can name any amount of work: tuples that share their elements 40 levels deep are hashed one by one,
keys of one hash are compared with each other, a call copies its arguments each time. All of it is counted before it is
done (`StepBudget`), and what is counted may follow the bytes of the pickle, as in any that a program writes.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import fractions
import itertools
import pathlib
import pickletools
import reprlib
import sys
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from ..errors import CorruptError, FormatError, TreeckptError
from .files import FileRange

MAX_PICKLE = 1 << 30
"""The largest pickle of a checkpoint in bytes, without the byte strings that stay in the file."""
MIN_LEFT_IN_FILE = 4 << 10
"""Bytes from which a byte string stays in the file."""
BUFFER_NBYTES = 1 << 20
"""Bytes of a pickle that are read at a time."""
SHORT_ARGUMENT = 8
"""Elements of an argument that one instruction may copy."""
FREE_STEPS = 1 << 18
"""Steps of any pickle, however small."""
STEPS_PER_BYTE = 8
"""Steps for each byte of a pickle beyond `FREE_STEPS`: one of a checkpoint takes about one, never more than three."""
MAX_KEY_DEPTH = 100
"""Levels of tuples in a key or an element of a set: hashing takes the stack of the process for each."""
MAX_MEMO = 1 << 32
"""Numbers of places in the memo."""
_HASH_MODULUS = sys.hash_info.modulus
_RANDOM_HASHES = frozenset((str, bytes))
"""Keys whose hashes no file can choose."""

Constructors = Mapping[str, Callable[..., Any]]
"""The function that builds a value from the arguments in a pickle, by `module name`."""


class Symbol(msgspec.Struct, frozen=True):
    """A class or function that a pickle names."""

    text: str
    """The module and the name of the class or function, with a blank between."""


class UnbuiltObject(msgspec.Struct, eq=False):
    """A call in a pickle that was not made: its arguments, and the state and items set on its result."""

    symbol: str
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = []
    """The elements or (key, value) pairs that were added to it."""
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


class _BriefRepr(reprlib.Repr):
    """Formats containers without sorting them, and other objects by their class, unless their text is short."""

    def _some(self, parts: Iterable[str], left: str, right: str, size: int) -> str:
        return left + ", ".join(parts) + (", ..." if size > self.maxdict else "") + right

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if level <= 0:
            return "{...}"
        pairs = itertools.islice(x.items(), self.maxdict)
        return self._some(
            (f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in pairs), "{", "}", len(x)
        )

    def repr_set(self, x: Collection[Any], level: int) -> str:
        if level <= 0:
            return "{...}"
        return self._some((self.repr1(one, level - 1) for one in itertools.islice(x, self.maxdict)), "{", "}", len(x))

    repr_frozenset = repr_set

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, dict):
            return self.repr_dict(x, level)
        if isinstance(x, (tuple, list)):
            return self.repr_list([*itertools.islice(x, self.maxlist + 1)], level)
        own = isinstance(x, msgspec.Struct) and "__repr__" in vars(type(x))
        if own or isinstance(x, _SHORT):
            return super().repr_instance(x, level)
        return f"<{type(x).__name__}>"


_SHORT = (
    Symbol, bool, type(None), type(...), bytes, float, complex, range, decimal.Decimal, fractions.Fraction, uuid.UUID,
    pathlib.PurePath, dt.date, dt.time, dt.timedelta, dt.tzinfo,
)  # fmt: skip
_BRIEF = _BriefRepr()


def brief(value: Any) -> str:
    """Formats a value from a file in at most 80 characters, even if containers contain each other repeatedly."""
    try:
        return _BRIEF.repr(value)[:80]
    except (ValueError, RecursionError) as error:
        return f"{type(value).__name__} ({error!s:.40})"


class StepBudget:
    """Counts the steps that a pickle takes beyond its instructions, and refuses more than follow its size.

    A step is an element or a byte that is copied, or a part of a key that is hashed or compared.
    """

    def __init__(self, label: str) -> None:
        self.label, self._taken = label, 0
        self.nbytes = 0
        """Bytes of the pickle that were read so far."""

    def take(self, steps: int) -> None:
        """Counts steps, before they are done.

        Raises:
            CorruptError: they are too many.
        """
        self._taken += steps
        limit = FREE_STEPS + STEPS_PER_BYTE * self.nbytes
        if self._taken > limit:
            raise CorruptError(
                self.label,
                expected=f"a pickle of {self.nbytes} bytes that takes at most {limit} steps",
                found="containers that hold, copy or compare each other over and over",
                hint="No program writes such a checkpoint",
            )

    def hash_keys(self, keys: Collection[Any], into: int = 0, same: dict[int, dict[int, int]] | None = None) -> None:
        """Counts what it takes to put keys into a dict or a set.

        Args:
            into: the identity of that dict or set.
            same: by such an identity, how many keys have each hash, of those whose hashes a file can choose.

        Raises:
            CorruptError: it takes too many steps.
            ValueError: a key that is nested too deeply.
            TypeError: a key that cannot be hashed.
        """
        if _RANDOM_HASHES.issuperset(map(type, keys)):
            # 64 bytes of text count as one step
            self.take(sum(map(len, keys)) >> 6)
            return
        counts: dict[int, int] | None = None
        for key in keys:
            if type(key) is int and -_HASH_MODULUS < key < _HASH_MODULUS:
                continue  # each is its own hash
            weight = self._weight(key)
            if counts is None:
                counts = {} if same is None else same.setdefault(into, {})
            hashed = hash(key)
            count = counts.get(hashed, 0)
            self.take(weight * count)
            counts[hashed] = count + 1

    def _weight(self, key: Any) -> int:
        """Counts the parts of a key, each as often as it stands in it, and returns their number."""
        weight, rest = 0, [(key, 0)]
        while rest:
            node, depth = rest.pop()
            if depth > MAX_KEY_DEPTH:
                raise ValueError(f"a key of more than {MAX_KEY_DEPTH} levels")
            parts = (node.start, node.stop, node.step) if type(node) is slice else node
            held = len(parts) if isinstance(parts, (tuple, frozenset)) else sys.getsizeof(node) >> 6
            self.take(1 + held)
            weight += 1 + held
            if isinstance(parts, (tuple, frozenset)):
                rest.extend((part, depth + 1) for part in parts)
        return weight


class Unpickled(msgspec.Struct, frozen=True):
    """The result of reading a pickle."""

    value: Any
    steps: int
    """Number of its instructions: no valid tree has many more nodes."""
    budget: StepBudget
    """The budget, for what is built of the value."""


class _PickleStream:
    """A file for pickletools; `read` returns `FileBytes` for long byte strings."""

    def __init__(self, window: FileRange, budget: StepBudget) -> None:
        self._window, self._at, self._budget = window, 0, budget
        self._buffer, self._first = b"", 0
        self._opcode = b""

    def tell(self) -> int:
        return self._at

    def read(self, count: int) -> Any:
        # BINBYTES and BINBYTES8 alone: text and numbers are needed while the pickle is read
        if count >= MIN_LEFT_IN_FILE and self._opcode in b"B\x8e":
            blob = FileBytes(self._window.within(self._at, count))
            self._at += count
            return blob
        self._budget.nbytes += count
        start = self._at - self._first
        if start < 0 or start + count > len(self._buffer):
            self._fill(count)
            start = 0
        data = self._buffer[start : start + count]
        self._at += count
        if count == 1:
            self._opcode = data
        return data

    def _fill(self, count: int) -> None:
        """Reads at least `count` bytes into the buffer; none at the end of the file."""
        size = min(max(count, BUFFER_NBYTES), self._window.size - self._at)
        if self._budget.nbytes > MAX_PICKLE:
            raise ValueError(f"a pickle of more than {MAX_PICKLE} bytes")
        if count > size:  # before memory is allocated for what is not there
            raise ValueError(f"{count} bytes are announced, {size} are left")
        self._buffer, self._first = self._window.read(self._at, size).tobytes(), self._at

    def ahead(self) -> tuple[bytes, int]:
        """Returns the buffer, and the place in it of what is read next; bytes follow, but at the end of the file."""
        if self._at - self._first >= len(self._buffer) and self._at < self._window.size:
            self._fill(1)
        return self._buffer, self._at - self._first

    def skip(self, count: int) -> None:
        """Goes on behind bytes that were taken from the buffer."""
        self._at += count

    def readline(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n") and self._at < self._window.size:
            if len(line) > MIN_LEFT_IN_FILE:
                raise ValueError(f"a line of more than {MIN_LEFT_IN_FILE} bytes")
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
    budget = StepBudget(window.label)
    machine = _PickleMachine(constructors, persistent, budget)
    stream = _PickleStream(window, budget)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of odd escapes in the texts of the oldest protocol
            steps = machine.run(stream)
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
    return Unpickled(value, steps, budget)


_REFUSALS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, OSError)
"""Errors of constructors for arguments that they do not accept: they concern one value, not the whole file."""


def _next(stream: Any) -> tuple[Any, Any]:
    """Returns the next instruction of a stream, and its argument.

    Raises:
        ValueError: there is none.
    """
    code = stream.read(1)
    opcode = _OPCODES.get(code)
    if opcode is None:
        raise ValueError(f"an unknown instruction {code!r}" if code else "the pickle ends without STOP")
    return opcode, opcode.arg.reader(stream) if opcode.arg is not None else None


class _PickleMachine:
    """A stack, as pickles are written for; each instruction is one `step`."""

    def __init__(self, constructors: Constructors, persistent: Callable[[Any], Any] | None, budget: StepBudget) -> None:
        self.constructors, self.persistent, self.budget = constructors, persistent, budget
        self._same: dict[int, dict[int, int]] = {}
        """Hashes of dicts and sets that have other keys than texts and small numbers: see `StepBudget.hash_keys`."""
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, stream: _PickleStream) -> int:
        """Executes the instructions of a pickle up to its end; returns their number.

        Raises:
            KeyError: one that checkpoints do not need.
        """
        steps, name = 0, ""
        while name != "STOP":
            steps += self._run_ahead(stream)
            opcode, argument = _next(stream)
            name = opcode.name
            steps += 1
            self.step(name, argument)
        return steps

    def _run_ahead(self, stream: _PickleStream) -> int:
        """Executes instructions that lie in the buffer of a stream and have a short argument; returns their number."""
        data, start = stream.ahead()
        at, end, steps = start, len(data), 0
        budget, before = self.budget, self.budget.nbytes - start
        while at + 1 < end and (quick := _QUICK[data[at]]) is not None:
            size, execute = quick
            first = at + 1
            if size < 0:  # so many bytes have the number of those that follow
                first -= size
                size = int.from_bytes(data[at + 1 : first], "little")
            if first + size > end:
                break
            at = first + size
            budget.nbytes = before + at
            execute(self, data[first:at] if size else b"")
            steps += 1
        stream.skip(at - start)
        return steps

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
        kept = len(self.stack) - count
        if kept < 0:
            raise IndexError("pop from empty list")
        items = self.stack[kept:]
        del self.stack[kept:]
        return items

    def _move(self, name: str, argument: Any) -> None:
        """Executes an instruction of the stack, the marks or the memo."""
        match name:
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                if not 0 <= int(argument) < MAX_MEMO:
                    raise ValueError(f"a place {argument!r:.40} in the memo")
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
            self.budget.take(len(args))
            self.stack.append(UnbuiltObject(name, (function, *args), items=[]))
        else:
            self.stack.append(self._made(name, args))

    def _made(self, name: str, args: tuple[Any, ...]) -> Any:
        make, why = self.constructors.get(name), ""
        try:
            if make is not None:
                self._count_copies(name, args)
                return make(*args)
        # too many steps are an error of the whole pickle, not of this value
        except CorruptError:
            raise
        except FormatError as error:
            why = error.found
        except _REFUSALS as error:
            why = f"{error}"
        return UnbuiltObject(name, args, items=[], why=why[:200])

    def _count_copies(self, name: str, args: tuple[Any, ...]) -> None:
        """Counts the elements and bytes that a constructor copies, and the keys that it hashes."""
        for arg in args:
            kind = type(arg)
            if (
                kind is int and arg.bit_length() > 256
            ):  # fractions and ranges divide numbers, in steps of their length squared
                self.budget.take((arg.bit_length() >> 8) ** 2)
            elif kind in _COPIED and len(arg) > SHORT_ARGUMENT:
                self.budget.take(len(arg))
        kind = name.rpartition(" ")[2]
        if kind in _HASHING and args and type(args[0]) in _COPIED:
            keys: Any = args[0]
            if kind == "OrderedDict" and not isinstance(keys, dict):
                if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in keys):
                    raise ValueError("an OrderedDict of what is no pair")
                keys = [key for key, _ in keys]
            self.budget.hash_keys(keys)

    def _count_keys(self, target: Any, keys: Collection[Any]) -> None:
        """Counts keys that are put into a dict or a set."""
        self.budget.hash_keys(keys, id(target), self._same)

    def build(self, operands: list[Any]) -> None:
        made = self.stack[-1]
        if isinstance(made, (UnbuiltObject, DeferredValue)):
            [made.state] = operands
        elif type(made) is collections.OrderedDict and isinstance(operands[0], dict):
            self._count_keys(vars(made), operands[0])
            self.budget.take(len(operands[0]))
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
            self._count_keys(target, items)
            target.update(items)
        else:
            raise ValueError(f"items for a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        target, pairs = self.stack[-1], zip(items[::2], items[1::2], strict=True)
        if isinstance(target, UnbuiltObject):
            target.items += pairs
        elif isinstance(target, dict):
            self._count_keys(target, items[::2])
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
        self.budget.take(len(module) + len(name))
        self.stack.append(Symbol(f"{module} {name}"))

    def drop(self, operands: list[Any]) -> None:
        pass

    def make_dict(self, items: list[Any]) -> None:
        self.budget.hash_keys(items[::2])
        self.stack.append(dict(zip(items[::2], items[1::2], strict=True)))

    def make_frozenset(self, items: list[Any]) -> None:
        self.budget.hash_keys(items)
        self.stack.append(frozenset(items))


_COPIED = frozenset(
    (list, tuple, dict, set, frozenset, str, bytes, bytearray, collections.deque, collections.OrderedDict)
)
"""What constructors copy, or look through, as a whole; what they refuse has other types."""
_HASHING = frozenset(("set", "frozenset", "OrderedDict", "Counter"))
"""Names of constructors that hash the elements of their first argument."""


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
    "EMPTY_DICT": (0, lambda _: {}),
    "EMPTY_LIST": (0, list),
    "EMPTY_TUPLE": (0, tuple),
    "EMPTY_SET": (0, set),
    "TUPLE1": (1, tuple),
    "TUPLE2": (2, tuple),
    "TUPLE3": (3, tuple),
    "TUPLE": (None, tuple),
    "LIST": (None, list),
}
"""Instructions that build a value from operands, with their number; None for all since the last mark."""
_APPLIED: dict[str, tuple[int | None, Callable[[_PickleMachine, list[Any]], None]]] = {
    "DICT": (None, _PickleMachine.make_dict),
    "FROZENSET": (None, _PickleMachine.make_frozenset),
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

_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}


def _quick_put(machine: _PickleMachine, argument: bytes) -> None:
    machine.memo[int.from_bytes(argument, "little")] = machine.stack[-1]


def _quick_get(machine: _PickleMachine, argument: bytes) -> None:
    machine.stack.append(machine.memo[int.from_bytes(argument, "little")])


def _quick_text(machine: _PickleMachine, argument: bytes) -> None:
    machine.stack.append(str(argument, "utf-8", "surrogatepass"))


def _quick_int(machine: _PickleMachine, argument: bytes) -> None:
    # of four bytes with a sign, of fewer without
    machine.stack.append(int.from_bytes(argument, "little", signed=len(argument) == 4))


def _quick_tuple(count: int) -> Callable[[_PickleMachine, bytes], None]:
    def execute(machine: _PickleMachine, _: bytes) -> None:
        stack = machine.stack
        if len(stack) < count:
            raise IndexError("a tuple of more than there is")
        stack[-count:] = [tuple(stack[-count:])]

    return execute


def _quick_mark(machine: _PickleMachine, _: bytes) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _quick_memoize(machine: _PickleMachine, _: bytes) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _quick_built(count: int | None, build: Callable[[list[Any]], Any]) -> Callable[[_PickleMachine, bytes], None]:
    def execute(machine: _PickleMachine, _: bytes) -> None:
        value = build(machine.take(count))  # replaces the stack if it is marked
        machine.stack.append(value)

    return execute


def _quick_applied(
    count: int | None, apply: Callable[[_PickleMachine, list[Any]], None]
) -> Callable[[_PickleMachine, bytes], None]:
    return lambda machine, _: apply(machine, machine.take(count))


_Quick = tuple[int, Callable[[_PickleMachine, bytes], None]]
_QUICK_BY_NAME: dict[str, _Quick] = {
    "BINPUT": (1, _quick_put),
    "LONG_BINPUT": (4, _quick_put),
    "BINGET": (1, _quick_get),
    "LONG_BINGET": (4, _quick_get),
    "BININT": (4, _quick_int),
    "BININT1": (1, _quick_int),
    "BININT2": (2, _quick_int),
    "SHORT_BINUNICODE": (-1, _quick_text),
    "BINUNICODE": (-4, _quick_text),
    **{f"TUPLE{count}": (0, _quick_tuple(count)) for count in (1, 2, 3)},
    **{name: (0, _quick_built(*built)) for name, built in _BUILT.items() if built[0] is None or not built[0]},
    **{name: (0, _quick_applied(*applied)) for name, applied in _APPLIED.items()},
    "MARK": (0, _quick_mark),
    "MEMOIZE": (0, _quick_memoize),
}
"""Instructions, with what executes them and the bytes of their argument: -1 or -4 where so many give their number."""
_QUICK: list[_Quick | None] = [None] * 256
"""The same by the byte of the instruction."""
for _opcode in pickletools.opcodes:
    _QUICK[ord(_opcode.code)] = _QUICK_BY_NAME.get(_opcode.name)
