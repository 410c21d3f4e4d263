"""Values come back with their type from JSON; what cannot is refused by path; hostile values are refused too."""

import collections
import datetime as dt
import decimal
import enum
import pathlib
import zoneinfo

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given

from tests.helpers.strategies import Access, Branch, Color, Level, resolve, same, values
from treeckpt._core.tree.spec import ArraySpec
from treeckpt._core.tree.value_codec import TypedValue, Value, decode_value, encode_value, type_name
from treeckpt.errors import FormatError, MismatchError, TreeError


def through_json(value, **options):
    data = msgspec.json.encode(encode_value(value, "leaf"))
    return decode_value(msgspec.json.decode(data, type=Value), "leaf", resolve=resolve, **options)


@given(values())
@example(float("nan"))
@example(-0.0)
@example(complex(-0.0, float("nan")))
@example(np.str_(""))
@example(np.str_("a\0"))
@example(np.bytes_(b""))
@example(np.datetime64("NaT"))
@example(dt.timezone(dt.timedelta(hours=1), "name"))
@example(dt.time(1, 2, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1))
@example({(): b"", "a": {frozenset({1, "x"})}})
@example(Color.CALL)
@example(Access(0))
def test_values_come_back_with_their_type(value):
    assert same(through_json(value), value)


def test_same_tells_values_apart():
    """The comparison that the other tests stand on."""
    differing = [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ((1,), [1]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (np.float32(1), np.float64(1)),
        (np.float32(1), 1.0),
        ({1}, {True}),
        (dt.UTC, dt.timezone(dt.timedelta(0), "x")),
        (dt.datetime(2026, 1, 1), dt.datetime(2026, 1, 1, fold=1)),
        (dt.datetime(2026, 1, 1, tzinfo=dt.UTC), dt.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC"))),
        (collections.deque([1], 3), collections.deque([1])),
        (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
        (Branch(1, 2), Branch(1, 3)),
    ]
    assert [pair for pair in differing if same(*pair)] == []
    assert same(float("nan"), float("nan"))


@pytest.mark.parametrize("value", [None, True, 0, -(1 << 63), (1 << 63) - 1, 1.5, -0.0, 5e-324, "text", ""])
def test_what_json_has_is_stored_as_such(value):
    assert same(encode_value(value, "x"), value)


def test_equal_sets_are_stored_alike_whatever_their_order():
    names = [f"name {i}" for i in range(50)]
    backwards = names[::-1]
    assert encode_value(set(names), "x") == encode_value(set(backwards), "x")


def test_nested_sets_are_stored_in_linear_time():
    deep = frozenset()
    for _ in range(60):
        deep = frozenset([deep])
    assert through_json(deep) == deep, "now: each level twice for that below would take 2 to the 60th steps"


class Custom:
    pass


class Text(str):
    pass


class OtherZone(dt.tzinfo):
    def utcoffset(self, when):
        return dt.timedelta(hours=1)

    def dst(self, when):
        return None

    def tzname(self, when):
        return "other"


RECORD = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")])[0]


@pytest.mark.parametrize(
    "value",
    [
        Custom(),
        Custom,
        Text("x"),
        print,
        dt.datetime(2026, 1, 1, tzinfo=OtherZone()),
        RECORD,
        np.void(b"ab"),
        np.rec.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")])[0],
        np.dtype([("a", "i4")]),
        np.dtype(("f4", (2,))),
        np.dtype("O"),
        [1, {"k": (Custom(),)}],
        {1, Custom},
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_be_stored_names_its_path_and_type(value):
    advice = r"Save its name" if value is print else r"optree\.register_pytree_node"
    with pytest.raises(TreeError, match=rf"expected .* found .* {advice}") as caught:
        encode_value(value, "model/x")
    assert caught.value.path == "model/x"
    assert "allow_pickle" not in caught.value.hint, "an option of save, which the codec does not have"


def test_a_value_whose_repr_fails_is_still_refused_by_path():
    class Broken:
        def __repr__(self):
            raise RuntimeError("no")

    with pytest.raises(TreeError, match="model/x"):
        encode_value(Broken(), "model/x")


def test_values_nested_without_end_are_refused():
    endless: list = []
    endless.append(endless)
    with pytest.raises(TreeError, match="deep"):
        encode_value(endless, "x")


def test_values_of_other_libraries_go_through_extra_inside_sets_too():
    def extra(value):
        return TypedValue("custom", ()) if isinstance(value, type) and value is Custom else None

    def back(typed):
        if typed.kind == "custom":
            return Custom
        raise LookupError(typed.kind)

    value = {Custom, 1}
    encoded = encode_value([value], "x", extra)
    assert decode_value(encoded, "x", extra=back) == [value]
    with pytest.raises(FormatError):
        decode_value(TypedValue("other", ()), "x", extra=back)


# hostile and unknown --------------------------------------------------------------------------------------------------
def nested(depth):
    typed = TypedValue("list", ())
    for _ in range(depth):
        typed = TypedValue("list", (typed,))
    return typed


@pytest.mark.parametrize(
    "value",
    [
        TypedValue("", ()),
        TypedValue("pickle", ("x",)),
        TypedValue("os.system", ("true",)),
        TypedValue("int", ("xyz",)),
        TypedValue("int", (5,)),
        TypedValue("int", ()),
        TypedValue("float", ("a",)),
        TypedValue("str", (5,)),
        TypedValue("bytes", (None,)),
        TypedValue("set", (TypedValue("list", ()),)),
        TypedValue("dict", (TypedValue("list", ()), 1)),
        TypedValue("dict", (1,)),
        TypedValue("datetime", ("2026", None, 0)),
        TypedValue("datetime", ("2026-01-01", "UTC", 0)),
        TypedValue("datetime", (5, None, 0)),
        TypedValue("datetime", ("2026-01-01", None, 7)),
        TypedValue("date", (5,)),
        TypedValue("timedelta", (10**15,)),
        TypedValue("timezone", (5,)),
        TypedValue("ZoneInfo", ("../../etc/passwd",)),
        TypedValue("ZoneInfo", ("No/Such",)),
        TypedValue("ZoneInfo", ("America",)),
        TypedValue("ZoneInfo", (5,)),
        TypedValue("Decimal", ("x",)),
        TypedValue("Fraction", (1, 0)),
        TypedValue("UUID", (5,)),
        TypedValue("UUID", ("x",)),
        TypedValue("PosixPath", (5,)),
        TypedValue("numpy", ("O", "AAAAAAAAAAA=")),
        TypedValue("numpy", ("<f4", "")),
        TypedValue("numpy", ("<f4", "AAA=")),
        TypedValue("numpy", ("<f4", 5)),
        TypedValue("numpy", ("(", "AAAA")),
        TypedValue("numpy", ("i4,i4", "AAAAAAAAAAA=")),
        TypedValue("numpy", (5, "AAAA")),
        TypedValue("numpy.dtype", ("{'names': ['a']",)),
        TypedValue("numpy.dtype", (5,)),
        TypedValue("numpy.dtype", ("O",)),
        TypedValue("numpy.dtype", ("",)),
        TypedValue("numpy.dtype", ("<f3",)),
        TypedValue("range", (1, 2, 0)),
        TypedValue("slice", ()),
        TypedValue("enum", ()),
        TypedValue("enum", (5, "a", 1)),
        nested(400),
    ],
    ids=lambda v: repr(v)[:60],
)
def test_values_that_no_save_writes_are_format_errors(value):
    with pytest.raises(FormatError) as caught:
        decode_value(value, "model/x", resolve=resolve)
    assert caught.value.path == "model/x"
    assert len(str(caught.value)) < 1000


def test_deepest_value_that_encodes_also_decodes():
    value: list = []
    for _ in range(99):
        value = [value]
    assert through_json(value) == value


@pytest.mark.parametrize(
    "value",
    [
        TypedValue("enum", ("no:Class", "A", 1)),
        TypedValue("enum", (type_name(Color), "GREEN", 1)),
        TypedValue("enum", (type_name(Color), None, "no such value")),
        TypedValue("enum", (type_name(Branch), "left", 1)),
    ],
)
def test_enums_that_the_program_lacks_say_what_to_import(value):
    with pytest.raises(MismatchError, match="Import") as caught:
        decode_value(value, "model/x", resolve=resolve)
    assert caught.value.path == "model/x"


def test_an_enum_without_a_resolver_is_refused():
    with pytest.raises(MismatchError):
        decode_value(encode_value(Level.LOW, "x"), "x")


def test_an_enum_comes_back_by_name_when_its_value_cannot_be_stored():
    typed = encode_value(Color.CALL, "x")
    assert isinstance(typed, TypedValue) and typed.items[1:] == ("CALL", None)
    assert decode_value(typed, "x", resolve=resolve) is Color.CALL


def test_enum_aliases_are_the_same_member():
    class Aliased(enum.Enum):
        A = 1
        B = 1  # noqa: PIE796

    assert decode_value(encode_value(Aliased.B, "x"), "x", resolve=lambda name: Aliased) is Aliased.A


def test_paths_of_another_system_come_back_pure():
    typed = TypedValue("WindowsPath", (r"C:\x",))
    found = decode_value(typed, "x")
    assert isinstance(found, pathlib.PureWindowsPath)


def test_an_array_spec_leaves_out_its_defaults():
    assert msgspec.json.encode(ArraySpec((2,), "float32")) == b'{"shape":[2],"dtype":"float32"}'


def test_a_counter_comes_back_as_one():
    found = decode_value(encode_value(collections.Counter({3: 2, "a": -1}), ""), "")
    assert type(found) is collections.Counter and found == {3: 2, "a": -1}


@pytest.mark.parametrize("dtype", ["float32", "torch.float32", torch.float32, np.float32, np.dtype("f4")])
@pytest.mark.parametrize("shape", [(2, 3), [2, 3], torch.Size((2, 3)), np.array([2, 3]), (np.int64(2), 3)])
def test_a_spec_takes_shapes_and_dtypes_of_any_library(shape, dtype):
    made = ArraySpec(shape, dtype)
    assert made == ArraySpec((2, 3), "float32") and type(made.dtype) is str
    assert type(made.shape) is tuple and {type(n) for n in made.shape} == {int}


def test_a_spec_of_another_thing_is_refused():
    for shape in (3, None, (2.0,), "ab", (None,)):
        with pytest.raises(MismatchError, match="shape: expected a shape"):
            ArraySpec(shape, "float32")
    with pytest.raises(MismatchError, match="expected the name of a dtype"):
        ArraySpec((2,), float)
