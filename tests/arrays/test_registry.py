"""An array library is known by its adapter and by one entry of the registry."""

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

    def to_numpy(self):
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)

    @classmethod
    def from_numpy(cls, array):
        return cls(memoryview(array.reshape(-1).view("u1")), array.shape, str(array.dtype))

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


@pytest.fixture(autouse=True, params=["adapter", "register"])
def library(request, monkeypatch):
    """The library, with an adapter of its own, or registered by its ways to and from numpy."""
    monkeypatch.setattr(registry, "_LIBRARIES", dict(registry._LIBRARIES))
    own = (abstract, source, target, empty, like, wrap, encode, decode)
    shared = {"known_dtype": numpy.known_dtype, "cast": numpy.cast, "mark_written": numpy.mark_written}
    adapter = ModuleType("plain")
    vars(adapter).update({function.__name__: function for function in own}, **shared)
    if request.param == "adapter":
        package = __name__.partition(".")[0]
        made = registry.ArrayLibrary("plain", f"{__name__}.PlainArray", ("plain",), package=package, adapter=adapter)
        registry.add_library(made)
    else:
        tc.arrays.register("plain", PlainArray, to_numpy=PlainArray.to_numpy, from_numpy=PlainArray.from_numpy)
    yield request.param
    monkeypatch.undo()
    registry.add_library(registry._LIBRARIES["numpy"])


@pytest.fixture
def array():
    return PlainArray(bytearray(np.arange(12, dtype="float32")), (3, 4), "float32")


@pytest.mark.parametrize("like", [None, "array", "spec"])
def test_arrays_come_back_as_arrays_of_their_library(tmp_path, array, like, library):
    tree = {"a": array, "tied": array, "n": np.arange(3), **({"unit": Unit()} if library == "adapter" else {})}
    tc.save(tmp_path / "c", tree)
    wanted = {None: None, "array": tree, "spec": tc.abstract(tree)}[like]
    found = tc.load(tmp_path / "c", wanted)
    assert [type(leaf) for leaf in found.values()] == [type(leaf) for leaf in tree.values()]
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


def test_arrays_are_ranks_parts_and_go_into_other_formats(tmp_path, array):
    tc.save(tmp_path / "c", {"a": tc.Sharded(array, (3, 4), (0, 0))})
    assert isinstance(tc.load(tmp_path / "c")["a"], PlainArray)
    tc.convert.to_safetensors(tmp_path / "c", tmp_path / "c.safetensors")
    assert tc.load(tmp_path / "c.safetensors")["a"].tolist() == array.elements.view("f4").tolist()


def test_a_library_that_is_not_there_is_named(tmp_path, array, monkeypatch):
    tc.save(tmp_path / "c", {"a": array})
    monkeypatch.setattr(registry, "_LIBRARIES", {k: v for k, v in registry._LIBRARIES.items() if k != "plain"})
    registry.add_library(registry._LIBRARIES["numpy"])
    with pytest.raises(tc.MismatchError, match="a: expected a library for arrays of kind 'plain', found none"):
        tc.load(tmp_path / "c")
    assert tc.load(tmp_path / "c", {"a": np.empty((3, 4), "float32")})["a"].tolist()[0] == [0, 1, 2, 3]


class Copied(PlainArray):
    @classmethod
    def from_numpy(cls, array):
        return cls(bytearray(array.tobytes()), array.shape, str(array.dtype))


def test_a_library_that_copies_is_refused_before_anything_is_read(tmp_path, array):
    tc.arrays.register("copied", Copied, to_numpy=Copied.to_numpy, from_numpy=Copied.from_numpy)
    tc.save(tmp_path / "c", {"a": Copied(array.data, array.shape, array.dtype)})
    with pytest.raises(tc.MismatchError, match="expected from_numpy, or to_numpy of copied to share the memory"):
        tc.load(tmp_path / "c")
    with pytest.raises(tc.MismatchError, match="expected to_numpy of twice to share the memory"):
        tc.arrays.register("twice", Unit, to_numpy=lambda unit: np.arange(12.0), from_numpy=lambda array: Unit())
        tc.load_into(tmp_path / "c", {"a": Unit()}, cast=True)


@pytest.mark.parametrize(
    ("name", "array"),
    [("torch", PlainArray), ("tensor", PlainArray), ("numpy", PlainArray), ("str", PlainArray), ("a/b", PlainArray),
     ("", PlainArray), ("mine", np.ndarray), ("mine", "PlainArray")],
)  # fmt: skip
def test_a_name_or_class_that_is_taken_or_none_is_refused(name, array):
    with pytest.raises(tc.TreeckptError, match="register: expected"):
        tc.arrays.register(name, array, to_numpy=np.asarray, from_numpy=PlainArray.from_numpy)


def test_a_registration_that_is_made_again_replaces_itself():
    for _ in range(2):
        tc.arrays.register("unit", Unit, to_numpy=np.asarray, from_numpy=PlainArray.from_numpy)
    with pytest.raises(tc.TreeckptError, match="found 'unit', which is"):
        tc.arrays.register("unit", Unit, to_numpy=np.array, from_numpy=PlainArray.from_numpy)
