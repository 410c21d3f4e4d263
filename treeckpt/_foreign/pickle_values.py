"""Builds a tree from a pickle read as data: plain values, numpy arrays and scalars, torch dtypes and devices.

`PLAIN` has constructors for the objects of the standard library, numpy and torch that state dicts contain; each checks
its arguments. `build_tree` replaces the remaining records by values; an object that only foreign code could build is
reported with its path, and refused or left out.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import fractions
import math
import pathlib
import uuid
import zoneinfo
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from .._arrays.base import LazyArray
from .._arrays.numpy import dtype_name
from .._arrays.registry import encodable, encode
from .._core.sharding.dtypes import dtype_of, numpy_dtype
from .._core.sharding.region import MAX_NDIM
from .._core.tree.containers import DEFAULT_FACTORIES
from .._core.tree.dict_attributes import encode_attributes
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import MAX_DEPTH, check_stack, child_path
from .._core.tree.tensor_parts import TensorParts
from .._core.tree.value_codec import BUFFERS, NAMESPACES, decode_path, new_buffer, new_namespace
from ..errors import CorruptError, FormatError, TreeckptError, TreeError
from .files import flat_array
from .pickle_reader import Constructors, DeferredValue, FileBytes, Symbol, UnbuiltObject, Unpickled, brief

T = TypeVar("T")

_CODE, _HELD = "Making it would run its code", "It is none of what checkpoints hold"
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, bytearray))
MAX_CODE = 64
"""Characters of the code of a numpy dtype."""
PATH_STEP = 64
"""Characters of a path that cost one step."""
FREE_NODES = 100_000
"""The largest number of nodes of a tree from a pickle with few instructions."""


class _NumpyDtype(DeferredValue, eq=False):
    """numpy's dtype as it is pickled: a code, then a state with the byte order."""

    code: Any = ""

    def make(self) -> np.dtype[Any]:
        state = () if self.state is None else _of(tuple, self.state)
        order = state[1] if len(state) > 1 else "|"
        if isinstance(self.code, Symbol) and self.code.text.startswith("ml_dtypes ") and order in ("<", "|", "="):
            return numpy_dtype(self.code.text.removeprefix("ml_dtypes "))
        # what is no code is refused like an array of objects
        code = self.code if isinstance(self.code, str) and len(self.code) <= MAX_CODE else "O"
        if "O" in code or order not in ("<", ">", "|", "="):
            raise ValueError(f"a numpy dtype {brief(self.code)}")
        _, _, inner, names, *rest = (*state, None, None, None, None)[: max(4, len(state))]
        dtype = np.dtype(code + self._unit(rest))
        plain = not (dtype.hasobject or dtype.fields or dtype.subdtype)
        if not plain or inner is not None or names is not None:
            raise ValueError(f"a numpy dtype {brief(self.code)}{' with fields' if names is not None else ''}")
        return dtype if order == "|" else dtype.newbyteorder(order)

    def _unit(self, rest: Sequence[Any]) -> str:
        """Returns the unit of a time, such as `[25us]`; the last part of the state is (name, count, ...)."""
        if self.code[:1] not in ("M", "m") or len(rest) < 5:
            return ""
        name, count, *_ = _tuple(rest[4][1])
        name = name.decode() if isinstance(name, bytes) else name
        return "" if name == "generic" else f"[{int(count)}{name}]"


class _NumpyArray(DeferredValue, eq=False):
    """numpy's array as it is pickled: by protocol 5 with all there is, by others empty, then a state with it."""

    args: tuple[Any, ...] = ()

    def make(self) -> np.ndarray | LazyArray:
        if self.args:
            data, dtype, shape, order = self.args
        else:
            _, shape, dtype, fortran, data = self.state
            order = "F" if fortran else "C"
        element = dtype.make()
        if (
            not isinstance(shape, tuple)
            or len(shape) > MAX_NDIM
            or any(type(n) is not int or n < 0 for n in shape)
            or order not in "CF"
        ):
            raise ValueError(f"an array of shape {brief(shape)}")
        if isinstance(data, FileBytes):
            plain = element.newbyteorder("<") == element or element.itemsize == 1
            # along one dimension both orders are the same
            if plain and (order == "C" or sum(n != 1 for n in shape) <= 1):
                return flat_array(ArraySpec(shape, dtype_name(element, ""), kind="numpy"), data.window)
            data = data.bytes()
        if not isinstance(data, (bytes, bytearray)) or len(data) != math.prod(shape) * element.itemsize:
            raise ValueError("an array whose bytes do not make up its shape")
        # a copy: an array over bytes could not be written to
        return np.frombuffer(bytearray(data), element).reshape(shape, order=order)  # pyright: ignore[reportCallIssue, reportArgumentType]


class _NumpyScalar(DeferredValue, eq=False):
    dtype: Any = None
    data: Any = None

    def make(self) -> Any:
        element = self.dtype.make()
        if not isinstance(self.data, bytes) or len(self.data) != element.itemsize:
            raise ValueError("a numpy scalar of the wrong size")
        return np.frombuffer(self.data, element)[0]


class _PickledState(DeferredValue, eq=False):
    """A value that is made of the state alone, which follows."""

    build: Callable[[Any], Any] = tuple

    def make(self) -> Any:
        made = self.build(self.state)
        if not encodable(made):
            raise ValueError(f"{brief(made)} with a state that is not plain")
        return made


class _PickledNamespace(DeferredValue, eq=False):
    """A namespace, whose attributes are built first."""

    name: str = ""


def _buffer(kind: Any) -> Callable[[], _PickledState]:
    """Returns the constructor of a file in memory, of `BUFFERS`."""

    def build(state: Any) -> Any:
        return new_buffer(kind, *(part.bytes() if isinstance(part, FileBytes) else part for part in _held(state)))

    return lambda: _PickledState(build=build)


def _uuid(state: Any) -> uuid.UUID:
    return uuid.UUID(int=state["int"])


def _fraction(*args: Any) -> fractions.Fraction:
    """Builds a fraction of two integers; of a text like "1e999999999" its class would compute the power."""
    if len(args) == 1 and isinstance(args[0], str):
        return fractions.Fraction(*map(int, args[0].split("/")))
    return fractions.Fraction(*(_of(int, one) for one in args))


def _of(kind: type[T] | tuple[type[T], ...], value: Any) -> T:
    """Returns a value of this class or one of these, or of a subclass."""
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} in place of a {getattr(kind, '__name__', 'text or number')}")
    return value


def _moment(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the constructor of a date or a time: of bytes or numbers, and a zone."""
    return lambda data, *more: kind(_held(data) if isinstance(data, bytes) else _of(int, data), *more)


def _zone(key: Any, *_: Any) -> zoneinfo.ZoneInfo:
    return zoneinfo.ZoneInfo(_of(str, key))


def _named(owner: Any, name: Any) -> Symbol:
    """Returns what older protocols look up by getattr: a nested name, of those that are known."""
    if not isinstance(owner, Symbol) or type(name) is not str or (full := f"{owner.text}.{name}") not in PLAIN:
        raise ValueError(f"a look-up in {brief(owner)}")
    return Symbol(full)


_PATH_MODULES = ("pathlib", "pathlib._local")
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)


def _encode(text: Any, codec: Any) -> bytes:
    """Decodes bytes as protocol 2 writes them."""
    if not isinstance(text, str) or codec not in ("latin1", "latin-1"):
        raise ValueError(f"text in {brief(codec)}")
    return text.encode("latin-1")


def size_as_tuple(items: Any) -> tuple[int, ...]:
    """Builds a torch.Size as a tuple: metadata are read without torch, whose import takes seconds."""
    return tuple(int(_of(int, n)) for n in _held(items))


def _size(items: Any) -> Any:
    import torch

    return torch.Size(size_as_tuple(items))


def _device(*args: Any) -> Any:
    import torch

    return torch.device(*(_of((str, int), arg) for arg in args))


def _layout(name: Any) -> Symbol:
    return Symbol(_of(str, name).replace(".", " ", 1))


_PYTHON_2 = {"long": "int", "unicode": "str"}
"""Names of builtins in Python 2, which protocol 2 uses."""


def _default(*args: Any) -> Any:
    factory = args[0] if args else None
    if factory is None:
        return collections.defaultdict()
    module, _, name = factory.text.partition(" ") if isinstance(factory, Symbol) else ("", "", "")
    name = _PYTHON_2.get(name, name) if module == "__builtin__" else name
    made: Any = DEFAULT_FACTORIES.get(name)
    if made is None or module not in ("__builtin__", made.__module__):
        raise ValueError(f"a defaultdict of {brief(factory)}")
    return collections.defaultdict(made)


def _both(name: str, make: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Returns a builtin under the names of its module in Python 2 and 3."""
    return {f"__builtin__ {name}": make, f"builtins {name}": make}


def _numpy(name: str, make: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Returns a function of numpy under the names of its module in numpy 1 and 2."""
    module, name = name.split(" ")
    return {f"numpy.{core}.{module} {name}": make for core in ("core", "_core")}


PLAIN: Constructors = {
    "collections OrderedDict": lambda items=(): collections.OrderedDict(_held(items)),
    "collections Counter": lambda items=(): collections.Counter(_held(items)),
    "collections defaultdict": _default,
    "collections deque": lambda items=(), *most: collections.deque(_held(items), *most),
    "_codecs encode": _encode,
    **_both("set", lambda items=(): set(_held(items))),
    **_both("frozenset", lambda items=(): frozenset(_held(items))),
    **_both("bytearray", lambda data=b"", *codec: bytearray(_encode(data, *codec) if codec else _held(data))),
    **_both("bytes", lambda items=(): bytes(_held(items))),
    **_both("complex", lambda real, imag: complex(float(real), float(imag))),
    **_both("slice", lambda *args: slice(*args)),
    **_both("range", lambda *args: range(*args)),
    "__builtin__ xrange": lambda *args: range(*args),
    **{f"{module} {kind.__name__}": partial(decode_path, kind) for kind in _PATHS for module in _PATH_MODULES},
    "argparse Namespace": lambda: _PickledNamespace(name="Namespace"),
    "types SimpleNamespace": lambda: _PickledNamespace(name="SimpleNamespace"),
    **{f"_io {name}": _buffer(kind) for name, kind in BUFFERS.items()},
    "datetime datetime": _moment(dt.datetime),
    "datetime date": _moment(dt.date),
    "datetime time": _moment(dt.time),
    "datetime timedelta": dt.timedelta,
    "datetime timezone": dt.timezone,
    "zoneinfo ZoneInfo._unpickle": _zone,
    **_both("getattr", _named),
    "decimal Decimal": lambda text: decimal.Decimal(_of(str, text)),
    "fractions Fraction": _fraction,
    "uuid UUID": lambda: _PickledState(build=_uuid),
    "torch Size": _size,
    "torch device": _device,
    "torch.serialization _get_layout": _layout,
    "numpy dtype": lambda code, *_: _NumpyDtype(code=code),
    **_numpy("multiarray _reconstruct", lambda *_: _NumpyArray()),
    **_numpy("multiarray scalar", lambda dtype, data: _NumpyScalar(dtype=dtype, data=data)),
    **_numpy("numeric _frombuffer", lambda *args: _NumpyArray(args=args)),
}
"""Constructors by name. None of them calls an argument, and none builds more than the pickle holds."""


def _held(items: Any) -> Any:
    """Returns the elements of a new container if they are in the pickle; a number or a range could be huge."""
    if not isinstance(items, (list, tuple, dict, set, frozenset, bytes, bytearray)):
        raise ValueError(f"a container of a {type(items).__name__}")
    return items


def dtype_named(symbol: Any) -> str:
    """Returns the name of the torch dtype that a symbol is.

    Raises:
        FormatError: it is none.
    """
    module, _, name = symbol.text.partition(" ") if isinstance(symbol, Symbol) else ("", "", "")
    if module != "torch":
        raise FormatError("dtype", expected="a dtype of torch", found=brief(symbol))
    return dtype_of(name).name


def sizes_of(node: Any, label: str, expected: str = "a torch.Size") -> tuple[int, ...]:
    """Returns a shape or an offset.

    Raises:
        FormatError: it is none.
    """
    listed = isinstance(node, (tuple, list)) and len(node) <= MAX_NDIM
    if not listed or any(type(n) is not int or not 0 <= n < 1 << 62 for n in node):
        raise FormatError(label, expected=expected, found=brief(node))
    return tuple(node)


class RefusedLeaf(msgspec.Struct, frozen=True):
    """A leaf that could not be built."""

    path: str
    what: str
    why: str = _CODE


def build_tree(read: Unpickled, label: str, refused: list[RefusedLeaf] | None = None) -> Any:
    """Builds the tree that a pickle describes.

    Args:
        refused: receives leaves that cannot be built, which become `...`; without it they are errors.

    Raises:
        TreeError: a leaf cannot be built, or the stack has no room for the levels of the tree.
        FormatError: more nodes than instructions: containers contain one another repeatedly.
    """
    try:
        return _TreeBuilder(label, read, refused).build(read.value, "", 0)
    except RecursionError:
        check_stack(label)
        raise


class _TreeBuilder:
    def __init__(self, label: str, read: Unpickled, refused: list[RefusedLeaf] | None) -> None:
        self.label, self.left, self.refused = label, max(FREE_NODES, 2 * read.steps), refused
        self.budget = read.budget
        self._copied: set[int] = set()
        """The identities of byte strings of which one value was made: further values of them are copies."""
        self.made: dict[int, tuple[Any, Any, RefusedLeaf | None]] = {}
        """Each node, its value, and why it has none, by the identity of the node."""

    def build(self, node: Any, path: str, depth: int) -> Any:
        self.left -= 1
        if len(path) > PATH_STEP:  # each is a text of its own
            self.budget.take(len(path) // PATH_STEP)
        if self.left < 0 or depth > MAX_DEPTH:
            raise FormatError(
                self.label,
                expected=f"a tree at most {MAX_DEPTH} levels deep",
                found="a deeper one, or containers that hold each other over and over",
                hint="No program writes such a checkpoint",
            )
        kind = type(node)
        if kind in (dict, collections.OrderedDict, collections.defaultdict):
            return self._mapping(node, path, depth)
        if kind in (list, collections.deque):
            for i, child in enumerate(node):
                node[i] = self.build(child, child_path(path, i), depth + 1)
            return node
        if kind in (tuple, set, frozenset):
            items: list[Any] = []
            for i, child in enumerate(node):
                items.append(self.build(child, child_path(path, i) if kind is tuple else path, depth + 1))
            try:
                if kind is not tuple:
                    self.budget.hash_keys(items)
                return kind(items)
            except (TypeError, ValueError) as error:  # an array as an element
                return self._refuse(path, f"a {kind.__name__} with {error}"[:200], _HELD)
        if isinstance(node, (Symbol, UnbuiltObject, FileBytes, DeferredValue)):
            if id(node) not in self.made:  # built once, so that ties stay
                is_space = isinstance(node, _PickledNamespace)
                value: Any = self._namespace(node, path, depth) if is_space else self._value(node, path)
                # with the node: as long as it is there, no other object has its identity
                self.made[id(node)] = node, value, self.refused[-1] if value is ... and self.refused else None
            elif (refused := self.made[id(node)][2]) is not None:
                self._refuse(path, refused.what, refused.why)
            return self.made[id(node)][1]
        if kind in _PLAIN or isinstance(node, (LazyArray, TensorParts, np.ndarray)) or encodable(node):
            return node
        return self._refuse(path, brief(node), _HELD)

    def _mapping(self, node: Any, path: str, depth: int) -> Any:
        try:
            paths = [child_path(path, key) for key in node]
        except TreeError as error:
            return self._refuse(path, f"a {type(node).__name__} with {error.found}", _HELD)
        for key, below in zip(list(node), paths, strict=True):
            node[key] = self.build(node[key], below, depth + 1)
        if type(node) is collections.OrderedDict and (attributes := vars(node)):
            for name, value in list(attributes.items()):
                attributes[name] = self.build(value, f"{path}.{name}", depth + 1)
            try:
                encode_attributes(attributes, path)
            except TreeError as error:
                attributes.clear()
                self._refuse(error.path, error.found, _HELD)
        return node

    def _namespace(self, node: _PickledNamespace, path: str, depth: int) -> Any:
        """Builds an object of attributes, which is one value: it is refused as a whole for what it cannot have."""
        above, self.refused = self.refused, []
        state = self.build({} if node.state is None else node.state, path, depth + 1)
        inner, self.refused = self.refused, above
        what, made = f"an {node.name} with ", None
        try:
            made = new_namespace(NAMESPACES[node.name], state)
            encode(made, path)
        except (TypeError, TreeError) as error:
            found = error.found if isinstance(error, TreeError) else f"{error}"
            inner = inner or [RefusedLeaf(getattr(error, "path", path), found, _HELD)]
        return self._refuse(path, f"{what}{inner[0].path}: {inner[0].what}", inner[0].why) if inner else made

    def _value(self, node: Any, path: str) -> Any:
        if isinstance(node, FileBytes):
            return node.bytes()
        if isinstance(node, Symbol):
            module, _, name = node.text.partition(" ")
            constant = _torch_constant(name) if module == "torch" else None
            named = node.text.replace(" ", ".")
            return self._refuse(path, f"the class or function {named}") if constant is None else constant
        if isinstance(node, UnbuiltObject):
            what = f"an object made by {node.symbol.replace(' ', '.')}"
            return self._refuse(path, f"{what} ({node.why})", _HELD) if node.why else self._refuse(path, what)
        held = (*_tuple(node.state), *_tuple(getattr(node, "args", ())))
        for part in held:
            if isinstance(part, (bytes, bytearray, FileBytes)):
                if id(part) in self._copied:
                    self.budget.take(len(part))
                self._copied.add(id(part))
        try:
            made = node.make()
            if isinstance(made, np.ndarray):
                dtype_name(made.dtype, path)
            return made
        except CorruptError:
            raise
        except TreeckptError as error:
            return self._refuse(path, error.found, _HELD)
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
            return self._refuse(path, f"{error}"[:200], _HELD)

    def _refuse(self, path: str, what: str, why: str = _CODE) -> Any:
        if self.refused is None:
            raise refusal(RefusedLeaf(path, what, why), self.label)
        self.refused.append(RefusedLeaf(path, what, why))
        return ...


def _tuple(state: Any) -> tuple[Any, ...]:
    return state if isinstance(state, tuple) else ()


def _torch_constant(name: str) -> Any:
    """Returns the dtype or layout of torch of that name."""
    import torch

    constant = vars(torch).get(name)
    return constant if isinstance(constant, (torch.dtype, torch.layout)) else None


def refusal(leaf: RefusedLeaf, label: str) -> TreeError:
    """Returns the error for a leaf that cannot be built."""
    leave = f"Leave it out (exclude={leaf.path!r}, --exclude {leaf.path!r}), or have" if leaf.path else "Have"
    return TreeError(
        f"{leaf.path}: {label}",
        expected="tensors, arrays, containers and plain values",
        found=leaf.what[:200],
        hint=f"{leaf.why}. {leave} the program that wrote it save plain values; of a module or optimizer, "
        "its state_dict()",
    )
