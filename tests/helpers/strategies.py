"""Hypothesis strategies for shapes, regions, layouts, leaves, values and trees, used by all test modules."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import itertools
import math
import pathlib
import time
import uuid
import zoneinfo
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from treeckpt._core.planning.save_plan import ArrayLeaf
from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.sharding.placements import (
    BoxLayout,
    Layout,
    Mesh,
    MeshLayout,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from treeckpt._core.sharding.region import Region, flat_regions
from treeckpt._core.tree.containers import PerRank

__all__ = [
    "Branch",
    "Color",
    "Weight",
    "array_leaves",
    "box_layouts",
    "flat_layouts",
    "keys",
    "layouts",
    "mesh_layouts",
    "meshes",
    "regions",
    "resolve",
    "same",
    "shapes",
    "trees",
    "values",
]


# shapes and regions ---------------------------------------------------------------------------------------------------
def shapes(*, max_ndim: int = 4, max_size: int = 7, min_size: int = 0) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of small arrays, 0-dimensional and empty ones among them."""
    return st.lists(st.integers(min_size, max_size), max_size=max_ndim).map(tuple)


@st.composite
def regions(draw: DrawFn, shape: Sequence[int], *, empty: bool = True) -> Region:
    """A region inside an array of this shape; without elements only if `empty` (or the array has none)."""
    offset: list[int] = []
    counts: list[int] = []
    for n in shape:
        least = 0 if empty or n == 0 else 1
        start = draw(st.integers(0, n - least))
        offset.append(start)
        counts.append(draw(st.integers(least, n - start)))
    return Region(tuple(offset), tuple(counts))


# layouts --------------------------------------------------------------------------------------------------------------
@st.composite
def meshes(draw: DrawFn, *, world: int | None = None) -> Mesh:
    """A mesh of all ranks of a world, in any order; of 1 to 8 ranks unless the world is given."""
    if world is None:
        shape = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (1, 4)]))
    else:
        factors = [(a, world // a) for a in range(1, world + 1) if world % a == 0]
        shape = draw(st.sampled_from([(world,), *factors]))
    ranks = draw(st.permutations(range(math.prod(shape))))
    return Mesh(shape, encode_runs(ranks))


def _placements(ndim: int) -> SearchStrategy[Placement]:
    if not ndim:
        return st.just(Replicate())
    dims = st.integers(0, ndim - 1)
    return st.one_of(st.just(Replicate()), st.builds(Shard, dims), st.builds(StridedShard, dims, st.integers(1, 4)))


@st.composite
def mesh_layouts(draw: DrawFn, ndim: int, *, mesh: Mesh | None = None, world: int | None = None) -> MeshLayout:
    """Any placements on any mesh: sharded, strided, replicated, several mesh dimensions on one of the array's."""
    mesh = mesh if mesh is not None else draw(meshes(world=world))
    return MeshLayout(mesh, tuple(draw(_placements(ndim)) for _ in mesh.shape))


@st.composite
def box_layouts(draw: DrawFn, shape: tuple[int, ...], world: int) -> BoxLayout:
    """Explicit pieces that cover an array: cut at random, given to one or several ranks, now and then overlapping."""
    boxes = [Region.whole(shape)]
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(boxes) - 1))
        box = boxes[at]
        dims = [d for d, n in enumerate(box.shape) if n > 1]
        if not dims:
            continue
        dim = draw(st.sampled_from(dims))
        cut = draw(st.integers(1, box.shape[dim] - 1))
        low, high = list(box.shape), list(box.shape)
        low[dim], high[dim] = cut, box.shape[dim] - cut
        offset = list(box.offset)
        offset[dim] += cut
        boxes[at : at + 1] = [Region(box.offset, tuple(low)), Region(tuple(offset), tuple(high))]
    if draw(st.booleans()):
        boxes.append(draw(regions(shape)))
    ranks = st.lists(st.integers(0, world - 1), min_size=1, max_size=3, unique=True)
    pieces = [(rank, box) for box in boxes for rank in draw(ranks)]
    return BoxLayout(tuple(draw(st.permutations(pieces))))


@st.composite
def flat_layouts(draw: DrawFn, shape: tuple[int, ...], world: int) -> BoxLayout:
    """A flat range of elements per rank, as ZeRO makes them, cut into boxes."""
    size = math.prod(shape)
    inner = sorted(draw(st.lists(st.integers(0, size), min_size=world - 1, max_size=world - 1)))
    cuts = [0, *inner, size]
    pieces = [
        (rank, region)
        for rank, (start, stop) in enumerate(itertools.pairwise(cuts))
        for region in flat_regions(shape, start, stop)
    ]
    return BoxLayout(tuple(pieces) if pieces else ((0, Region.whole(shape)),))


def layouts(shape: tuple[int, ...], world: int) -> SearchStrategy[Layout]:
    """Any layout of one array over the ranks 0 to world - 1."""
    return st.one_of(
        mesh_layouts(len(shape), world=world),
        box_layouts(shape, world),
        flat_layouts(shape, world),
    )


@st.composite
def array_leaves(draw: DrawFn, world: int, *, min_leaves: int = 1, max_leaves: int = 5) -> list[ArrayLeaf]:
    """Arrays of any shape, itemsize and layout, some of them one per rank."""
    leaves: list[ArrayLeaf] = []
    meshes_here = [draw(meshes(world=world)) for _ in range(2)]
    for number in range(draw(st.integers(min_leaves, max_leaves))):
        shape = draw(shapes(max_ndim=3))
        itemsize = draw(st.sampled_from([1, 2, 4, 8, 16, 12]))
        align = draw(st.sampled_from([0, 0, 1, itemsize // 2]))
        kind = draw(st.integers(0, 5))
        if kind == 5:
            own = sorted(draw(st.sets(st.integers(0, world - 1), min_size=1)))
            layout: Layout = MeshLayout(Mesh((len(own),), encode_runs(own)), (Replicate(),))
            leaves.append(ArrayLeaf(f"l{number}", shape, itemsize, layout, align, encode_runs(own)))
            continue
        # a few shared meshes, so that arrays meet in one stream of replicas
        shared = mesh_layouts(len(shape), mesh=draw(st.sampled_from(meshes_here)))
        layout = draw(shared if kind < 3 else layouts(shape, world))
        leaves.append(ArrayLeaf(f"l{number}", shape, itemsize, layout, align))
    return leaves


# values ---------------------------------------------------------------------------------------------------------------
class Color(enum.Enum):
    RED = 1
    BLUE = "blue"
    CALL = dt.date  # a value that cannot be stored; its name is enough


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata")


def _zones() -> SearchStrategy[dt.tzinfo | None]:
    offsets = st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23))
    return st.one_of(
        st.none(),
        st.just(dt.UTC),
        st.builds(dt.timezone, offsets),
        st.builds(dt.timezone, offsets, st.text(min_size=1, max_size=5)),
        st.sampled_from(ZONES).map(zoneinfo.ZoneInfo),
    )


def _numpy_scalars() -> SearchStrategy[np.generic]:
    numbers = st.one_of(
        *(
            st.binary(min_size=np.dtype(code).itemsize, max_size=np.dtype(code).itemsize).map(
                lambda data, code=code: np.frombuffer(data, code)[0]
            )
            for code in (
                "i1",
                "u1",
                "i2",
                "u2",
                "i4",
                "u4",
                "i8",
                "u8",
                "f2",
                "f4",
                "f8",
                "c8",
                "c16",
                "M8[ns]",
                "m8[us]",
            )
        )
    )
    return st.one_of(
        numbers,
        st.booleans().map(np.bool_),
        st.text(max_size=5).map(np.str_),
        st.binary(max_size=5).map(np.bytes_),
        st.sampled_from([np.datetime64("NaT"), np.datetime64("2026-01-01"), np.timedelta64(25, "s")]),
    )


@st.composite
def _hashable(draw: DrawFn) -> Any:
    """Values that can stand in a set or be a key."""
    return draw(_HASHABLE)


_HASHABLE: SearchStrategy[Any] = st.deferred(
    lambda: st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(1 << 63) - 2, -(1 << 63) + 2),
        st.integers((1 << 63) - 2, (1 << 64) + 2),
        st.integers(0, 10).map(lambda n: 7**1000 + n),
        st.floats(),
        st.sampled_from([-0.0, 5e-324, 1e16, 1e22, 1.7976931348623157e308]),
        st.complex_numbers(),
        st.text(max_size=8),
        st.sampled_from(["\ud800", "a\0b", "\udcff/~"]),
        st.binary(max_size=8),
        st.builds(range, st.integers(-5, 5), st.integers(-5, 5), st.integers(1, 3)),
        st.just(...),
        st.datetimes(timezones=_zones(), allow_imaginary=True),
        st.times(timezones=_zones()),
        st.dates(),
        st.timedeltas(),
        _zones(),
        st.decimals().filter(lambda d: not d.is_snan()),
        st.sampled_from([decimal.Decimal("-0.00"), decimal.Decimal("1E+40")]),
        st.fractions(),
        st.uuids(),
        st.sampled_from([pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("C:/x"), pathlib.Path("c/../d")]),
        st.sampled_from([*Color, Access.READ, Access.READ | Access.WRITE, Access(0), *Level]),
        st.sampled_from([np.dtype("f4"), np.dtype(">i8"), np.dtype("M8[ns]"), np.dtype("U7"), np.dtype("bool")]),
        _numpy_scalars(),
    )
)


def values() -> SearchStrategy[Any]:
    """Python values of every kind that can be stored, nested ones too."""
    plain = st.one_of(
        _hashable(),
        st.sampled_from([decimal.Decimal("sNaN"), dt.datetime(2026, 10, 25, 2, 30, fold=1)]),
        st.binary(max_size=8).map(bytearray),
        st.builds(slice, st.none() | st.integers(), st.integers(), st.none()),
    )
    hashable = st.recursive(
        _hashable(), lambda inner: st.frozensets(inner, max_size=3) | st.tuples(inner, inner), max_leaves=4
    )
    return st.recursive(
        st.one_of(plain, hashable, st.sets(hashable, max_size=3)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(hashable, inner, max_size=3),
            st.dictionaries(hashable, inner, max_size=3).map(collections.OrderedDict),
        ),
        max_leaves=6,
    )


# trees ----------------------------------------------------------------------------------------------------------------
class Weight(NamedTuple):
    value: Any
    scale: Any


@dataclasses.dataclass
class Branch:
    left: Any
    right: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    only: Any


class Registered:
    """A class of the user's own, known to optree."""

    def __init__(self, parts: Sequence[Any], name: str) -> None:
        self.parts = list(parts)
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registered) and (self.parts, self.name) == (other.parts, other.name)

    __hash__ = None  # type: ignore[assignment]


optree.register_pytree_node(
    Registered,
    lambda r: (r.parts, r.name, tuple(f"part {i}" for i in range(len(r.parts)))),
    lambda name, parts: Registered(parts, name),
    namespace="treeckpt-tests",
)

CLASSES: dict[str, type] = {
    f"{kind.__module__}:{kind.__qualname__}": kind
    for kind in (Color, Access, Level, Weight, Branch, Frozen, Registered, time.struct_time)
}


def resolve(name: str) -> type:
    """Finds the classes of this module, as a program finds those it has imported."""
    return CLASSES[name]


def keys() -> SearchStrategy[Any]:
    """Dict keys of every kind that can be stored; nan, which equals nothing, is not among them."""
    atoms = st.one_of(
        st.text(max_size=4),
        st.sampled_from(
            ["", "a", "a/b", "~", "~0", "~b1", "1", "-1", "٣", "~(a~,b~)", "~rank0", "x@0", "__metadata__", "01"]
        ),
        st.integers(-3, 3),
        st.integers(),
        st.booleans(),
        st.none(),
        st.floats(allow_nan=False),
        st.binary(max_size=3),
    )
    return st.recursive(atoms, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)


def trees(
    leaf: SearchStrategy[Any] | None = None, *, per_rank: bool = True, max_leaves: int = 12
) -> SearchStrategy[Any]:
    """Trees of every kind of container, empty ones too. Leaves are small integers unless given."""

    def grow(inner: SearchStrategy[Any]) -> SearchStrategy[Any]:
        few = st.lists(inner, max_size=3)
        mapping = st.dictionaries(keys(), inner, max_size=3)
        factories: list[Callable[[], Any] | None] = [None, int, list, dict, set, collections.OrderedDict]
        kinds: list[SearchStrategy[Any]] = [
            mapping,
            mapping.map(collections.OrderedDict),
            st.builds(collections.defaultdict, st.sampled_from(factories), mapping),
            few,
            few.map(tuple),
            st.builds(collections.deque, few, st.sampled_from([None, 3, 7])),
            st.builds(Weight, inner, inner),
            st.builds(Branch, inner, inner),
            st.builds(Frozen, inner),
            st.builds(Registered, few, st.text(max_size=3)),
            st.lists(inner, min_size=9, max_size=9).map(time.struct_time),
        ]
        if per_rank:
            kinds.append(st.builds(PerRank, inner))
        return st.one_of(kinds)

    return st.recursive(leaf if leaf is not None else st.integers(0, 99), grow, max_leaves=max_leaves)


def same(a: Any, b: Any) -> bool:
    """Equality that sees types, order of keys, nan, the sign of zero, time zones and factories."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        if getattr(a, "default_factory", None) is not getattr(b, "default_factory", None):
            return False
        return same(list(a.items()), list(b.items()))
    if isinstance(a, collections.deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (set, frozenset)):
        rest = list(b)
        for x in a:
            at = next((i for i, y in enumerate(rest) if same(x, y)), None)
            if at is None:
                return False
            rest.pop(at)
        return not rest
    if isinstance(a, (dt.datetime, dt.time)):
        naive = same(a.replace(tzinfo=None).isoformat(), b.replace(tzinfo=None).isoformat())
        return naive and a.fold == b.fold and same(a.tzinfo, b.tzinfo)
    if isinstance(a, dt.timezone):
        return a == b and a.tzname(None) == b.tzname(None)
    if dataclasses.is_dataclass(a) and not isinstance(a, enum.Enum):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, Registered):
        return a.name == b.name and same(a.parts, b.parts)
    if isinstance(a, (float, complex, decimal.Decimal)) and not isinstance(a, np.generic):
        return repr(a) == repr(b)
    if isinstance(a, (np.str_, np.bytes_)):
        return bool(a == b)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, (zoneinfo.ZoneInfo, uuid.UUID, fractions.Fraction, enum.Enum, pathlib.PurePath)):
        return bool(a == b)
    return bool(a == b)
