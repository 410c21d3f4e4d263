"""Finds the adapter of a leaf by the module name of its class, without importing a library.

Values of libraries, and texts and bytes too long for an index, are stored and made again here too.
An adapter's module is imported when the first leaf of its library is found, so a program without torch never imports
it. Of a library only the name is known here. Libraries from outside are registered as the built-in ones are.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, cast

import msgspec
import numpy as np

from .._core.sharding.dtypes import dtype_of, normalize_dtype
from .._core.sharding.region import Region
from .._core.tree.keyed_table import TableColumn
from .._core.tree.spec import ArraySpec
from .._core.tree.tensor_parts import TensorParts
from .._core.tree.value_codec import TypedValue, Value, decode_value, encode_value
from ..errors import CorruptError, FormatError, MismatchError, TreeckptError, TreeError
from .base import (
    Adapter,
    Allocate,
    ArraySource,
    ArrayTarget,
    HostMemory,
    LazyArray,
    PartsNeeded,
    SourcePiece,
    lazy_source,
    raw_dtype,
)


class ArrayLibrary(msgspec.Struct, frozen=True):
    """A class of arrays, and what saves and makes them."""

    name: str
    """The name of the adapter's module in this package, if it is a module there."""
    array: str
    """The module and name of the class."""
    kinds: tuple[str, ...] = ()
    """The `ArraySpec.kind`s of which the adapter makes arrays."""
    package: str = ""
    """The package whose values are stored by `encode` and `decode` of the module, under kinds that begin so."""
    adapter: Adapter | None = None
    """The adapter; None for the module."""
    given: tuple[Any, ...] = ()
    """The functions that `register` was given."""

    def get(self) -> Adapter:
        """Returns the adapter, whose module is imported when it is first asked for."""
        return self.adapter if self.adapter is not None else cast(Adapter, _module(self.name))


_LIBRARIES: dict[str, ArrayLibrary] = {}
"""The libraries that are registered, by name."""


def add_library(library: ArrayLibrary) -> None:
    """Registers a library: of two for one class, or for one kind, the later one counts."""
    _LIBRARIES[library.name] = library
    for known in (adapter_of, _libraries, _is_torch, _by_kind, _cast_error):
        known.cache_clear()


def register(
    name: str, array: type, *, to_numpy: Callable[[Any], np.ndarray], from_numpy: Callable[[np.ndarray], Any]
) -> None:
    """Has arrays of a class saved as arrays, and come back as such: those of a library in this process's memory.

    >>> class Grid:
    ...     def __init__(self, cells):
    ...         self.cells = cells
    >>> def cells_of(grid):
    ...     return grid.cells
    >>> tc.arrays.register("grid", Grid, to_numpy=cells_of, from_numpy=Grid)
    >>> report = tc.save("run/step_00000200", {"g": Grid(np.arange(3))})
    >>> type(tc.load("run/step_00000200")["g"]).__name__, tc.load("run/step_00000200")["g"].cells
    ('Grid', array([0, 1, 2]))

    Args:
        name: of the library, which checkpoints keep: the `kind` of `tc.ArraySpec`s of its arrays.
        array: the class; its subclasses count too.
        to_numpy: returns the elements of an array, as one of numpy in the same memory.
        from_numpy: returns an array of the class that uses the memory of one of numpy, which is filled afterwards.

    Raises:
        TreeckptError: the name is taken, or the class is that of a library already.
    """
    free = isinstance(name, str) and re.fullmatch(r"[A-Za-z][\w.-]*", name) and name not in (*_BLOB_KINDS, "refused")
    if not free or not isinstance(array, type):
        expected = "a name of letters, digits and _ . -, and the class of the arrays"
        raise TreeckptError("register", expected=expected, found=f"{name!r:.80} and {array!r:.80}")
    from .host_library import HostLibrary

    library = ArrayLibrary(
        name,
        _class_name(array),
        (name,),
        adapter=HostLibrary(name, to_numpy, from_numpy),
        given=(array, to_numpy, from_numpy),
    )
    for known in _LIBRARIES.values():
        if known.name != name and name not in known.kinds and known.array != library.array:
            continue
        # defined again, as by a cell of a notebook that is run again
        again = [_class_name(one) for one in known.given] == [_class_name(one) for one in library.given]
        if known.name != name or not again:
            raise TreeckptError(
                "register", expected="a library that is not registered", found=f"{known.name!r}, which is"
            )
    add_library(library)


def _class_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@lru_cache(maxsize=8)
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{name}")


@lru_cache(maxsize=1024)
def adapter_of(kind: type) -> Adapter | None:
    """Returns the adapter of a class of arrays; None for other classes."""
    by_class = {library.array: library for library in _LIBRARIES.values()}
    library = next(filter(None, (by_class.get(_class_name(base)) for base in kind.__mro__)), None)
    return None if library is None else library.get()


@lru_cache(maxsize=1024)
def _libraries(kind: type) -> frozenset[str]:
    """Returns the libraries with values that define a class or its base classes."""
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return frozenset(library.name for library in _LIBRARIES.values() if library.package in packages)


@lru_cache(maxsize=64)
def _by_kind(kind: str) -> ArrayLibrary | None:
    """Returns the library that makes arrays of a kind; None where none does."""
    return next((library for library in _LIBRARIES.values() if kind in library.kinds), None)


# tensors that are made of others --------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _is_torch(kind: type) -> bool:
    return adapter_of(kind) is not None and "torch" in _libraries(kind)


def parts_adapter() -> Any:
    """Returns `_arrays.tensor_parts`, which imports torch."""
    return _module("tensor_parts")


def torch_adapter() -> Any:
    """Returns `_arrays.torch`, which imports torch."""
    return _module("torch")


def any_in_parts(nodes: Sequence[object]) -> bool:
    """Returns whether a tensor among objects is made of others; see `_arrays.tensor_parts`."""
    return any(parts_adapter().any_in_parts(kind, nodes) for kind in set(map(type, nodes)) if _is_torch(kind))


def take_apart(leaf: object, path: str) -> TensorParts | None:
    """Returns a tensor that is made of others in parts; None for another leaf.

    Raises:
        TreeError: its class keeps what cannot be stored beside its tensors.
    """
    return parts_adapter().take_apart(leaf, path) if _is_torch(type(leaf)) else None


def build_tensor(made: TensorParts, path: str) -> Any:
    """Returns the tensor of its parts, or the parts; see `_arrays.tensor_parts.build`."""
    return parts_adapter().build(made, path) if "torch" in sys.modules else made


def in_parts_if_needed(act: Callable[[bool], Any], *, always: bool = False) -> Any:
    """Returns what an action returns that expands a tree, with `layouts` False, and again with True if it needs that.

    It asks no object for its state a second time: in a tree with such objects all tensors are looked at.

    Args:
        act: changes nothing before all leaves of the tree are described.
        always: calls it with True at once.
    """
    if always:
        return act(True)
    try:
        return act(False)
    except PartsNeeded:
        return act(True)


def holds_partial_sums(leaf: object) -> bool:
    """Returns whether a leaf is a DTensor of which ranks hold partial sums."""
    return _is_torch(type(leaf)) and _module("dtensor").is_partial(leaf)


# leaves ---------------------------------------------------------------------------------------------------------------


_PLAIN_VALUES = frozenset((int, float, bool, str, type(None), bytes, complex))


def source_of(leaf: object, path: str, rank: int) -> ArraySource | None:
    """Describes an array to save; returns None for a value.

    Raises:
        TreeError, LayoutError: an array that cannot be saved.
    """
    kind = type(leaf)
    if kind in _PLAIN_VALUES:
        return None
    if (adapter := adapter_of(kind)) is not None:
        return adapter.source(leaf, path, rank)
    if isinstance(leaf, TableColumn):
        raise TreeError(
            path,
            expected="arrays and values",
            found="a KeyedTable",
            hint="Tables are saved and loaded; other operations take their arrays",
        )
    if isinstance(leaf, LazyArray):
        return lazy_source(leaf)
    if isinstance(leaf, ArraySpec) or leaf is ...:
        raise TreeError(
            path, expected="a leaf with data", found=f"{leaf!r:.60}", hint="Such leaves are for like= of load"
        )
    return None


def abstract_of(leaf: object, path: str, rank: int) -> ArraySpec | None:
    """Returns the spec of an array; None for a value."""
    if (adapter := adapter_of(type(leaf))) is not None:
        return adapter.abstract(leaf, path, rank)
    if isinstance(leaf, ArraySpec):
        return leaf
    if isinstance(leaf, TableColumn) and leaf.kind != "offsets":
        return abstract_of(leaf.array, path, rank)
    return None


def library_of(spec: ArraySpec) -> Adapter:
    """Returns the adapter that creates arrays of the spec's kind.

    Raises:
        MismatchError: no library of this kind is registered.
    """
    if (library := _by_kind(spec.kind)) is None:
        raise MismatchError(
            "",
            expected=f"a library for arrays of kind {spec.kind!r:.80}",
            found="none",
            hint="Import what registers it (treeckpt.arrays.register), or pass like= with arrays of another library",
        )
    return library.get()


def target_of(leaf: object, path: str, rank: int) -> ArrayTarget | None:
    """Describes an array to fill in place; returns None for a value."""
    adapter = adapter_of(type(leaf))
    return None if adapter is None else adapter.target(leaf, path, rank)


def mark_written(leaves: Iterable[object]) -> None:
    """Tells the libraries of arrays that these were written to without their functions."""
    found: dict[Adapter, list[object]] = {}
    for leaf in leaves:
        if (adapter := adapter_of(type(leaf))) is not None:
            found.setdefault(adapter, []).append(leaf)
    for adapter, arrays in found.items():
        adapter.mark_written(arrays)


def like_of(
    leaf: object, path: str, rank: int, device: str | None, *, allocate: Allocate | None = None
) -> ArrayTarget | None:
    """Creates an array as a leaf describes it: an array, an `ArraySpec`, or anything with shape and dtype.

    Returns None for a leaf that describes no array.
    """
    if isinstance(leaf, ArraySpec):
        return new_array(leaf, path, device or leaf.device, allocate=allocate)
    if (adapter := adapter_of(type(leaf))) is not None:
        return adapter.like(leaf, path, rank, device, allocate=allocate)
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None or encodable(leaf):
        return None
    return new_array(_foreign_spec(tuple(int(n) for n in shape), dtype, path), path, device, allocate=allocate)


def encodable(leaf: object) -> bool:
    """Returns whether the leaf is a value that can be stored; numpy scalars, which have a shape, are such values."""
    try:
        encode(leaf, "")
    except TreeError:
        return False
    return True


def is_unknown(leaf: object) -> bool:
    """Returns whether the leaf is neither an array, nor what stands for one, nor a value that can be stored."""
    stands_for_one = leaf is ... or isinstance(leaf, (ArraySpec, TableColumn, LazyArray))
    return not stands_for_one and adapter_of(type(leaf)) is None and not is_value(leaf)


def is_value(leaf: object) -> bool:
    """Returns whether the leaf is a Python value, and not `...`, an array, or an object of an unknown kind."""
    return leaf is not ... and (type(leaf) in _PLAIN_VALUES or encodable(leaf))


def _foreign_spec(shape: tuple[int, ...], dtype: Any, path: str) -> ArraySpec:
    kind = "tensor" if type(dtype).__module__.partition(".")[0] == "torch" else "numpy"
    try:
        if kind == "tensor" or isinstance(dtype, (np.dtype, type)):
            name = normalize_dtype(dtype)
        else:  # of another library, by its own name
            name = dtype_of(str(getattr(dtype, "name", None) or str(dtype).rpartition(".")[2])).name
        return ArraySpec(shape, name, kind=kind)
    except (FormatError, MismatchError) as error:
        raise MismatchError(path, expected="a known dtype", found=f"{dtype!r:.60}") from error


@lru_cache(maxsize=1024)
def _cast_error(kind: str, saved: str, wanted: str) -> MismatchError | None:
    """Returns why elements of one dtype cannot be converted to another, found by converting a one; None if they can."""
    raw = raw_dtype(dtype_of(saved).itemsize)
    try:
        library_of(ArraySpec((), wanted, kind=kind)).cast(
            np.ones(1, dtype_of(saved).numpy or raw).view(raw), saved, wanted
        )
    except MismatchError as error:
        return error
    return None


def check_cast(spec: ArraySpec, saved: str, path: str) -> None:
    """Checks that elements can be cast to a spec's dtype, before anything is read.

    Raises:
        MismatchError: neither the library nor ml_dtypes can cast them.
    """
    error = _cast_error(spec.kind, saved, spec.dtype)
    if error is not None:
        raise MismatchError(path, expected=error.expected, found=error.found, hint=error.hint) from error


def check_library(spec: ArraySpec, path: str) -> Adapter:
    """Returns the adapter that creates arrays of a spec's kind and dtype.

    Raises:
        MismatchError: the library is not installed, or lacks the dtype.
    """
    try:
        adapter = library_of(spec)
        adapter.known_dtype(spec.dtype)
    except ImportError as error:
        library = _by_kind(spec.kind)
        assert library is not None, "its module is not there"
        name = library.name
        raise MismatchError(
            path,
            expected=f"{name}, to load a {spec.kind}",
            found=f"no {name} in this environment",
            hint=f"Install treeckpt[{name}], or pass like= with numpy arrays",
        ) from error
    except MismatchError as error:
        raise MismatchError(path, expected=error.expected, found=error.found, hint=error.hint) from error
    return adapter


@contextlib.contextmanager
def needs_torch(package: str) -> Iterator[None]:
    """The body imports the modules of a package that needs torch.

    Raises:
        ModuleNotFoundError: torch is not installed; it names the extra to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        text = f"{package} needs torch, which is not installed: pip install 'treeckpt[torch]'"
        raise ModuleNotFoundError(text, name="torch") from error


def new_array(spec: ArraySpec, path: str, device: str | None, *, allocate: Allocate | None = None) -> ArrayTarget:
    """Creates an array of the library that the spec's kind names.

    Raises:
        MismatchError: the library is not installed.
    """
    return check_library(spec, path).empty(spec, path, device, allocate=allocate)


# values ---------------------------------------------------------------------------------------------------------------


PICKLE_ADVICE = "Or pass allow_pickle=True"


def encode(value: object, path: str, *, allow_pickle: bool = False, advice: str = "") -> Value:
    """Returns the stored form of a value, of any known library.

    Args:
        advice: what else can be done with a value of an unknown kind: an option that the caller has.

    Raises:
        TreeError: a value of an unknown kind; with `allow_pickle` only if it cannot be pickled.
    """
    try:
        return encode_value(value, path, encode_of_library)
    except TreeError as error:
        of_library = bool(_libraries(type(value)))
        # an error without a hint is of a known kind
        if advice and error.hint and not of_library:
            error.add_hint(advice)
        if not allow_pickle or of_library:
            raise
    import base64
    import pickle

    try:
        return TypedValue("pickle", (base64.b64encode(pickle.dumps(value)).decode(),))
    except Exception as error:
        raise TreeError(path, expected="a value that pickle takes", found=f"{value!r:.60} ({error})") from error


def is_same_value(first: object, second: object, path: str = "") -> bool:
    """Whether two values have the same stored form; Python's own comparison takes 1, 1.0 and True for the same.

    Raises:
        TreeError: a value of an unknown kind.
    """
    stored = [msgspec.json.encode(encode(value, path)) for value in (first, second)]
    return stored[0] == stored[1]


def encode_of_library(value: Any) -> TypedValue | None:
    """Stores a `PyTreeSpec`, and a value of a library whose adapter has `encode` and `decode`."""
    # optree is imported where a program has one: the writer process has none
    if (optree := sys.modules.get("optree")) is not None and type(value) is optree.PyTreeSpec:
        from .._core.tree.treespec import encode_treespec

        return encode_treespec(value)
    found = (getattr(_LIBRARIES[name].get(), "encode", None) for name in _libraries(type(value)))
    return next((stored for encode in found if encode and (stored := encode(value)) is not None), None)


def decode(value: Value, path: str, *, allow_pickle: bool) -> object:
    """Returns the value of a stored form.

    Raises:
        MismatchError: it is a pickle and `allow_pickle` is not given.
    """
    if not isinstance(value, TypedValue):
        return value

    def extra(typed: TypedValue) -> object:
        if typed.kind == "optree.PyTreeSpec":
            from .._core.tree.treespec import decode_treespec

            return decode_treespec(typed, resolve, resolve_function if allow_pickle else None)
        if typed.kind == "pickle":
            return _unpickle(typed, path, allow_pickle)
        if typed.kind == "refused":
            raise _refused(typed, path)
        return decode_of_library(typed)

    return decode_value(value, path, resolve=resolve, extra=extra)


def decode_of_library(typed: TypedValue) -> Any:
    """Returns the value of a library whose adapter has `encode` and `decode`; raises LookupError for other kinds."""
    name = typed.kind.partition(".")[0]
    library = _LIBRARIES.get(name)
    restore = getattr(library.get(), "decode", None) if library is not None and library.package else None
    if restore is None:
        raise LookupError(typed.kind)
    return restore(typed)


def _refused(typed: TypedValue, path: str) -> TreeError:
    """Returns the error for an object in a foreign file that only its own code could make."""
    what, why = typed.items
    return TreeError(
        path,
        expected="tensors, arrays, containers and plain values",
        found=f"{what}",
        hint=f"{why}. Leave it out (exclude={path!r}, or `...` in like), or have the program that wrote it save plain "
        "values; of a module or optimizer, its state_dict()",
    )


def _unpickle(typed: TypedValue, path: str, allow_pickle: bool) -> object:
    if not allow_pickle:
        raise MismatchError(
            path,
            expected="a value that loads without running code",
            found="a pickled object",
            hint="If you trust whoever wrote this checkpoint, pass allow_pickle=True",
        )
    import base64
    import pickle

    try:
        return pickle.loads(base64.b64decode(str(typed.items[0]), validate=True))
    except Exception as error:
        raise MismatchError(
            path,
            expected="a pickle that this program can load",
            found=f"{type(error).__name__}: {error}"[:200],
            hint="Import what it needs, or leave this leaf out with `...` in like",
        ) from error


def resolve(name: str) -> type:
    """Returns the class `module:qualname`, if its module is imported already; imports and calls nothing.

    Only entries of the module's own dict, or of a class's, are found, not attributes that a module or a metaclass
    computes on access.

    Raises:
        LookupError: there is no such class in this process.
    """
    found: Any = resolve_function(name)
    if not issubclass(type(found), type):
        raise LookupError(name)
    return found


def resolve_function(name: str) -> object:
    """Returns the class or function `module:qualname` as `resolve` does."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    known: Any = object.__getattribute__(found, "__dict__") if issubclass(type(found), ModuleType) else {}
    *classes, last = qualname.split(".")
    for part in classes:
        found = known.get(part)
        if not issubclass(type(found), type):
            raise LookupError(name)
        known = type.__getattribute__(found, "__dict__")
    if last not in known:
        raise LookupError(name)
    return known[last]


# blobs: texts and bytes that are too long for an index, saved and read as an array, uint8[n] --------------------------

MAX_VALUE_NBYTES = 4096
"""The bytes of a text in UTF-8, or of bytes, up to which they are stored in the index."""
BLOB_TYPES = (bytes, bytearray, str, io.BytesIO)
Blob = bytes | bytearray | str | io.BytesIO
_BLOB_KINDS = tuple(kind.__name__ for kind in BLOB_TYPES)
# a text of Python may hold lone surrogates, which strict UTF-8 refuses
_TEXT = ("utf-8", "surrogatepass")
_POSITION = "<Q"
_POSITION_NBYTES = 8


def blob_source(value: Blob) -> ArraySource | None:
    """Describes the bytes of a long value as an array, those of `bytes` without a copy.

    What can grow is copied, because it could not while an array uses its memory. Returns None for a short value, for
    one of a subclass, as numpy has them, and for a BytesIO that was closed or has attributes.
    """
    # a character has at most 4 bytes in UTF-8: short texts need not be encoded
    if type(value) not in BLOB_TYPES or (not isinstance(value, io.BytesIO) and 4 * len(value) <= MAX_VALUE_NBYTES):
        return None
    if isinstance(value, io.BytesIO):
        if value.closed or value.getbuffer().nbytes <= MAX_VALUE_NBYTES or vars(value):
            return None
        data = b"".join((value.getbuffer(), struct.pack(_POSITION, value.tell())))
    else:
        data = value.encode(*_TEXT) if isinstance(value, str) else bytes(value)
    if len(data) <= MAX_VALUE_NBYTES:
        return None
    array = np.frombuffer(data, np.uint8)
    memory = HostMemory(array.__array_interface__["data"][0], array.shape, 1, array)
    spec = ArraySpec(array.shape, "uint8", kind=type(value).__name__)
    return ArraySource(spec, None, (SourcePiece(Region.whole(array.shape), memory),))


def blob_value(data: memoryview, kind: str, path: str) -> Blob:
    """Returns the value of a kind of `BLOB_KINDS` from the memory of its bytes.

    Raises:
        CorruptError: the bytes of a text are no UTF-8, or a BytesIO has no position.
    """
    if kind == "BytesIO":
        buffer = io.BytesIO(data[:-_POSITION_NBYTES])
        try:
            buffer.seek(*struct.unpack(_POSITION, data[-_POSITION_NBYTES:]))
        except (struct.error, OverflowError) as error:
            raise CorruptError(path, expected="a BytesIO with its position", found=f"{error}") from error
        return buffer
    if kind != "str":
        return bytearray(data) if kind == "bytearray" else bytes(data)
    try:
        return str(data, *_TEXT)
    except UnicodeDecodeError as error:
        raise CorruptError(path, expected="a text in UTF-8", found=f"{error}"[:200]) from error


# the libraries that are there -----------------------------------------------------------------------------------------

add_library(ArrayLibrary("torch", "torch.Tensor", ("tensor", "parameter", "buffer"), package="torch"))
add_library(ArrayLibrary("numpy", "numpy.ndarray", ("numpy",), package="numpy"))
add_library(ArrayLibrary("sharded_tensor", "torch.distributed._shard.sharded_tensor.api.ShardedTensor"))
# by its public name, which is that of its class too
add_library(ArrayLibrary("sharded", "treeckpt.Sharded"))
