"""Made arrays: parts cover them exactly, whatever is done, and say where every element comes from."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.helpers.strategies import regions
from treeckpt._core.sharding.region import Region
from treeckpt._core.tree.spec import ArraySpec
from treeckpt.rules import _composed_array
from treeckpt.rules._composed_array import ComposedArray, Constant

Pair = tuple[ComposedArray, np.ndarray]


def evaluate(array: ComposedArray, sources: dict[str, np.ndarray]) -> np.ndarray:
    """What parts say, element by element; fails where one is missing or there twice."""
    found = np.full(array.shape, -1, np.int64)
    for part in array.parts:
        assert (found[part.region.slices()] == -1).all(), "an element twice"
        if isinstance(part, Constant):
            found[part.region.slices()] = part.value
            continue
        kept = [axis for axis in part.axes if axis >= 0]
        box = sources[part.source][part.box.slices()]
        assert all(box.shape[d] == 1 for d in range(box.ndim) if d not in kept)
        found[part.region.slices()] = box.transpose([*kept, *(d for d in range(box.ndim) if d not in kept)]).reshape(
            part.region.shape
        )
    assert (found >= 0).all(), "an element missing"
    return found


@st.composite
def changed(draw: DrawFn) -> tuple[ComposedArray, np.ndarray, dict[str, np.ndarray]]:
    """An array after some changes, and what it is."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    sources = {name: np.arange(np.prod(shape)).reshape(shape) + 1000 * i for i, name in enumerate("abc")}
    pool: list[Pair] = [(_composed_array.saved(n, ArraySpec(shape, "int64")), array) for n, array in sources.items()]
    pool.append((_composed_array.constant(ArraySpec(shape, "int64"), 7), np.full(shape, 7)))
    now, array = pool[0]
    for _ in range(draw(st.integers(0, 5))):
        axis = draw(st.integers(0, max(array.ndim - 1, 0)))
        kind = draw(st.sampled_from(["permute", "narrow", "interleave", "stack", "take"]))
        if kind == "permute":
            axes = draw(st.permutations(range(array.ndim)))
            now, array = _composed_array.permute(now, axes), array.transpose(axes)
        elif kind == "narrow":
            box = draw(regions(array.shape, empty=False))
            now, array = _composed_array.narrow(now, box), array[box.slices()]
        elif kind == "take" and array.ndim:
            at = draw(st.integers(0, array.shape[axis] - 1))
            now, array = _composed_array.take(now, axis, at), array.take(at, axis)
        elif kind == "stack" and array.ndim < 4:
            now, array = _composed_array.stack([now, now], axis), np.stack([array, array], axis)
        elif kind == "interleave" and array.ndim:
            groups = draw(st.sampled_from([g for g in range(1, 6) if array.shape[axis] % g == 0]))
            others = [pair for pair in pool if pair[1].shape == array.shape][:2]
            parts = [array, *(other for _, other in others)]
            cut = [np.split(part, groups, axis) for part in parts]
            now = _composed_array.interleave([now, *(other for other, _ in others)], axis, groups)
            array = np.concatenate([part[g] for g in range(groups) for part in cut], axis)
    return now, array, sources


@given(changed())
def test_parts_say_where_each_element_comes_from(case: tuple[ComposedArray, np.ndarray, dict[str, np.ndarray]]) -> None:
    now, array, sources = case
    assert now.shape == array.shape
    assert (evaluate(now, sources) == array).all()


@given(changed(), st.data())
def test_the_parts_of_a_region_are_that_region(
    case: tuple[ComposedArray, np.ndarray, dict[str, np.ndarray]], data: st.DataObject
) -> None:
    now, array, sources = case
    box = data.draw(regions(array.shape))
    parts = _composed_array.parts_in(now, box)
    assert sum(part.region.size for part in parts) == box.size
    assert all(part.region.within(box) for part in parts)
    assert (evaluate(_composed_array.narrow(now, box), sources) == array[box.slices()]).all()


@given(changed(), st.data())
def test_what_is_cut_and_put_together_again_is_as_it_was(
    case: tuple[ComposedArray, np.ndarray, dict[str, np.ndarray]], data: st.DataObject
) -> None:
    now, array, sources = case
    if not array.ndim:
        return
    axis = data.draw(st.integers(0, array.ndim - 1))
    groups = data.draw(st.sampled_from([g for g in range(1, 6) if array.shape[axis] % g == 0]))
    cut = data.draw(st.integers(0, array.shape[axis] // groups))
    pieces = _composed_array.uninterleave(now, axis, [cut, array.shape[axis] // groups - cut], groups)
    parts = [np.split(group, [cut], axis) for group in np.split(array, groups, axis)]
    for piece, found in zip(pieces, zip(*parts, strict=True), strict=True):
        assert (evaluate(piece, sources) == np.concatenate(found, axis)).all()
    again = _composed_array.interleave(pieces, axis, groups)
    assert (evaluate(again, sources) == array).all()


def test_undoing_a_change_gives_the_saved_array_itself() -> None:
    spec = ArraySpec((12, 4, 2), "float32")
    whole = _composed_array.saved("w", spec)
    pieces = _composed_array.uninterleave(whole, 0, [4, 1, 1], 2)
    assert _composed_array.interleave(pieces, 0, 2) == _composed_array.saved("w", spec)
    assert _composed_array.permute(_composed_array.permute(whole, (2, 0, 1)), (1, 2, 0)) == _composed_array.saved(
        "w", spec
    )
    assert len(pieces[0].parts) == 2, "the queries of each group"


def test_casts_follow_each_other() -> None:
    whole = _composed_array.saved("w", ArraySpec((2,), "float32"))
    assert _composed_array.cast(_composed_array.cast(whole, "bfloat16"), "float32").parts[0].dtypes == (
        "float32",
        "bfloat16",
        "float32",
    )
    assert _composed_array.cast(whole, "float32") == whole
    assert _composed_array.narrow(whole, Region((1,), (1,))).parts[0].dtypes == ("float32",)
