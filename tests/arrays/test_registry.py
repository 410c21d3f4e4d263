"""An array library is known by its adapter and by one entry of the registry."""

import sys
from types import ModuleType

import numpy as np
import pytest

import treeckpt as tc
from treeckpt._arrays import numpy, registry
from treeckpt._arrays.base import ArraySource, ArrayTarget, HostArray, SourcePiece, local_pieces, local_shape_of
from treeckpt._core.sharding.region import Region
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._core.tree.value_codec import TypedValue


class PlainArray:
    """Bytes with a shape and a dtype."""

    def __init__(self, data, shape, dtype):
        self.data, self.shape, self.dtype = data, shape, dtype

    @property
    def elements(self):
        return np.frombuffer(self.data, f"u{np.dtype(self.dtype).itemsize}").reshape(self.shape)


class Unit:
    """A value of the library."""


def abstract(leaf, path, rank):
    return ArraySpec(leaf.shape, leaf.dtype, kind="plain") if isinstance(leaf, PlainArray) else None


def source(leaf, path, rank):
    if (spec := abstract(leaf, path, rank)) is None:
        return None
    return ArraySource(spec, None, (SourcePiece(Region.whole(leaf.shape), HostArray(leaf.elements)),))


def target_in(spec, array):
    return ArrayTarget(spec, array, local_pieces(spec, lambda box: HostArray(array.elements[(*box, ...)])))


def target(leaf, path, rank):
    spec = abstract(leaf, path, rank)
    return None if spec is None else target_in(spec, leaf)


def empty(spec, path, device, *, allocate=None):
    shape = local_shape_of(spec)
    return target_in(
        spec, PlainArray(bytearray(np.dtype(spec.dtype).itemsize * int(np.prod(shape))), shape, spec.dtype)
    )


def like(leaf, path, rank, device, *, allocate=None):
    spec = abstract(leaf, path, rank)
    return None if spec is None else empty(spec, path, device)


def wrap(spec, memory, offset):
    nbytes = np.dtype(spec.dtype).itemsize * int(np.prod(spec.shape))
    return PlainArray(memory[offset : offset + nbytes], spec.shape, spec.dtype)


def encode(value):
    return TypedValue("plain.unit", ()) if isinstance(value, Unit) else None


def decode(value):
    return Unit()


@pytest.fixture(autouse=True)
def adapter(monkeypatch):
    own = (abstract, source, target, empty, like, wrap, encode, decode)
    shared = {"known_dtype": numpy.known_dtype, "cast": numpy.cast, "mark_written": numpy.mark_written}
    module = ModuleType("treeckpt._arrays.plain")
    vars(module).update({function.__name__: function for function in own}, **shared)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    array = f"{__name__}.PlainArray"
    monkeypatch.setitem(registry._LIBRARIES, "plain", array)
    monkeypatch.setitem(registry._ADAPTERS, array, "plain")
    caches = (registry.adapter_of, registry._libraries, registry._module, registry._cast_error)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def array():
    return PlainArray(bytearray(np.arange(12, dtype="float32")), (3, 4), "float32")


@pytest.mark.parametrize("like", [None, "array", "spec"])
def test_arrays_come_back_as_arrays_of_their_library(tmp_path, array, like):
    tree = {"a": array, "tied": array, "n": np.arange(3), "unit": Unit()}
    tc.save(tmp_path / "c", tree)
    wanted = {None: None, "array": tree, "spec": tc.abstract(tree)}[like]
    found = tc.load(tmp_path / "c", wanted)
    assert [type(leaf) for leaf in found.values()] == [PlainArray, PlainArray, np.ndarray, Unit]
    for name in ("a", "tied"):
        assert (found[name].shape, found[name].dtype, found[name].data) == (array.shape, array.dtype, array.data)


def test_arrays_are_saved_beside_the_training_and_filled_in_place(tmp_path, array):
    tc.save_async(tmp_path / "c", {"a": array}).result()
    into = {"a": PlainArray(bytearray(48), (3, 4), "float32")}
    tc.load_into(tmp_path / "c", into)
    assert into["a"].data == array.data


def test_arrays_are_cast_and_sliced(tmp_path, array):
    tc.save(tmp_path / "c", {"a": array})
    rows = (Region((1, 0), (2, 4)),)
    found = tc.load(tmp_path / "c", {"a": ArraySpec((3, 4), "float64", regions=rows, kind="plain")}, cast=True)
    assert np.frombuffer(found["a"].data).tolist() == list(range(4, 12))


def test_a_library_that_is_not_there_is_named(tmp_path, array, monkeypatch):
    tc.save(tmp_path / "c", {"a": array, "unit": Unit()})
    monkeypatch.delitem(sys.modules, "treeckpt._arrays.plain")
    registry._module.cache_clear()
    with pytest.raises(tc.MismatchError, match=r"a: expected plain, to load a plain, found no plain in this"):
        tc.load(tmp_path / "c", {"a": ArraySpec((3, 4), "float32", kind="plain"), "unit": ...})
