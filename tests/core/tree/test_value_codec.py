"""Python values have one JSON form each, which files keep, and come back with their type; nothing else is built."""

import argparse
import collections
import datetime as dt
import decimal
import enum
import fractions
import io
import itertools
import math
import pathlib
import types
import uuid
import zoneinfo

import msgspec
import numpy as np
import pytest

from treeckpt._core.tree.flatten import flatten
from treeckpt._core.tree.value_codec import (
    TypedValue,
    Value,
    check_hash_collisions,
    decode_value,
    encode_value,
    type_name,
)
from treeckpt.errors import FormatError, MismatchError, TreeError


class Shade(enum.Enum):
    LIGHT = 1
    DARK = "d"
    CALL = print


class Bits(enum.Flag):
    A = 1
    B = 2


class Numbers(enum.IntFlag):
    A = 1
    B = 2


class Words(enum.StrEnum):
    A = "a"


KINDS = {type_name(kind): kind for kind in (Shade, Bits, Numbers, Words, int)}
ZONE = dt.timezone(dt.timedelta(hours=2), "X")
TIME = dt.datetime(2024, 5, 6, 7, 8, 9, 10, fold=1)


def t(kind, *items):
    return TypedValue(kind, items)


FORMS = [
    (None, None), (True, True), (5, 5), (-(1 << 63), -(1 << 63)), ((1 << 63) - 1, (1 << 63) - 1), (1.5, 1.5),
    ("x", "x"), (1 << 63, t("int", "0x8000000000000000")), (-(1 << 63) - 1, t("int", "-0x8000000000000001")),
    (math.inf, t("float", "inf")), (-math.inf, t("float", "-inf")), ("\ud800", t("str", "7aCA")),
    (1 - 2j, t("complex", 1.0, -2.0)), (b"\0\xff", t("bytes", "AP8=")), (bytearray(b"a"), t("bytearray", "YQ==")),
    (range(1, 9, 2), t("range", 1, 9, 2)), (slice(None, 3), t("slice", None, 3, None)), (..., t("ellipsis")),
    ([1, [2]], t("list", 1, t("list", 2))), ((1, ()), t("tuple", 1, t("tuple"))),
    ({3, 1, 2}, t("set", 1, 2, 3)), (frozenset({"b", "a"}), t("frozenset", "a", "b")),
    ({1: "x", "k": None}, t("dict", 1, "x", "k", None)),
    (collections.OrderedDict(b=1, a=2), t("OrderedDict", "b", 1, "a", 2)),
    (collections.Counter("aab"), t("Counter", "a", 2, "b", 1)),
    (TIME, t("datetime", "2024-05-06T07:08:09.000010", None, 1)),
    (TIME.replace(tzinfo=ZONE, fold=0), t("datetime", "2024-05-06T07:08:09.000010",
                                          t("timezone", t("timedelta", 0, 7200, 0), "X"), 0)),
    (dt.time(7, 8, tzinfo=dt.UTC), t("time", "07:08:00", t("timezone", t("timedelta", 0, 0, 0)), 0)),
    (dt.date(2024, 5, 6), t("date", "2024-05-06")), (dt.timedelta(1, 2, 3), t("timedelta", 1, 2, 3)),
    (zoneinfo.ZoneInfo("UTC"), t("ZoneInfo", "UTC")), (decimal.Decimal("1.50"), t("Decimal", "1.50")),
    (fractions.Fraction(2, 6), t("Fraction", 1, 3)),
    (uuid.UUID(int=5), t("UUID", "00000000-0000-0000-0000-000000000005")),
    (pathlib.PurePosixPath("a/b"), t("PurePosixPath", "a/b")),
    (pathlib.PureWindowsPath("a/b"), t("PureWindowsPath", "a\\b")),
    (argparse.Namespace(lr=0.5, p=pathlib.PurePosixPath("a")),
     t("Namespace", "lr", 0.5, "p", t("PurePosixPath", "a"))),
    (types.SimpleNamespace(a=[1], self=None), t("SimpleNamespace", "a", t("list", 1), "self", None)),
    (np.float32(1.5), t("numpy", "<f4", "AADAPw==")), (np.str_("a"), t("numpy.str", "a")),
    (np.bytes_(b"a"), t("numpy.bytes", "YQ==")), (np.dtype("int16"), t("numpy.dtype", "<i2")),
    (Shade.LIGHT, t("enum", type_name(Shade), "LIGHT", 1)), (Shade.DARK, t("enum", type_name(Shade), "DARK", "d")),
    (Bits.A | Bits.B, t("enum", type_name(Bits), None, 3)), (Bits.B, t("enum", type_name(Bits), "B", 2)),
    (Numbers.A | Numbers.B, t("enum", type_name(Numbers), None, 3)),
    (Words.A, t("enum", type_name(Words), "A", "a")),
]  # fmt: skip


def decode(value, **options):
    return decode_value(value, "p", resolve=KINDS.__getitem__, **options)


@pytest.mark.parametrize(("value", "form"), FORMS, ids=[str(n) for n in range(len(FORMS))])
def test_each_value_has_its_form_and_comes_back(value, form):
    found = encode_value(value, "p")
    assert found == form and type(found) is type(form)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Value) == form
    back = decode(form)
    assert back == value and type(back) is type(value)
    assert list(back) == list(value) if isinstance(value, dict) else True
    assert getattr(back, "fold", 0) == getattr(value, "fold", 0)


def test_a_number_that_is_none_comes_back():
    assert math.isnan(decode(encode_value(math.nan, "p")))
    assert math.copysign(1, decode(encode_value(-0.0, "p"))) == -1


def test_paths_of_this_machine_come_back_as_such_and_others_as_pure_ones():
    assert encode_value(pathlib.Path("a"), "p") == t(type(pathlib.Path()).__name__, "a")
    assert type(decode(t("PosixPath", "a"))) in (pathlib.PosixPath, pathlib.PurePosixPath)
    here, other = ("PosixPath", "WindowsPath")
    if isinstance(pathlib.Path(), pathlib.PureWindowsPath):
        here, other = other, here
    assert type(decode(t(here, "a"))) is type(pathlib.Path())
    assert type(decode(t(other, "a"))).__name__ == f"Pure{other}"


@pytest.mark.parametrize("kind", [io.BytesIO, io.StringIO])
def test_a_file_in_memory_comes_back_at_its_position_with_its_attributes(kind):
    written = "a\nbc" if kind is io.StringIO else b"a\nbc"
    for buffer in (kind(), kind(written), kind(written)):
        buffer.seek(2)
    buffer.name = "x.png"
    back = decode(msgspec.json.decode(msgspec.json.encode(encode_value(buffer, "p")), type=Value))
    assert type(back) is kind and back.tell() == buffer.tell() == 2
    assert back.getvalue() == written and vars(back) == {"name": "x.png"}


def test_the_lines_of_a_text_in_memory_end_as_before():
    back = decode(encode_value(io.StringIO("a\r\nb", newline=""), "p"))
    assert back.readline() == "a\r\n"


def test_a_closed_file_in_memory_is_refused_by_path():
    buffer = io.BytesIO()
    buffer.close()
    with pytest.raises(TreeError, match=r"a/b: .*open"):
        encode_value(buffer, "a/b")


@pytest.mark.parametrize("value", [{"x": [object()]}, {"x": np.zeros(2)}])
def test_what_a_namespace_cannot_have_is_refused_by_the_name_of_the_attribute(value):
    with pytest.raises(TreeError) as caught:
        encode_value(argparse.Namespace(lr=1, sub=types.SimpleNamespace(**value)), "args")
    assert caught.value.path == "args.sub.x"


def test_an_enum_without_a_storable_value_is_known_by_its_name():
    class Callables(enum.Enum):
        ONE = (object(),)

    found = encode_value(Callables.ONE, "p")
    assert found.items[1:] == ("ONE", None)
    assert decode_value(found, "p", resolve=lambda name: Callables) is Callables.ONE


def depth(n, inner=1):
    for _ in range(n):
        inner = [inner]
    return inner


def test_values_nest_up_to_a_hundred_levels():
    assert decode(encode_value(depth(100), "p")) == depth(100)
    with pytest.raises(TreeError, match="100 deep"):
        encode_value(depth(101), "p")
    form = 1
    for _ in range(101):
        form = t("list", form)
    assert decode(form) == depth(101), "the innermost number is no level"
    with pytest.raises(FormatError, match="100 deep"):
        decode(t("list", form))


def test_the_value_of_an_enum_is_a_level_too():
    class Deep(enum.Enum):
        FITS = depth(99)
        LONG = depth(100)

    assert decode_value(encode_value(Deep.FITS, "p").items[2], "p") == depth(99)
    assert encode_value(Deep.LONG, "p").items[2] is None
    form = 1
    for _ in range(100):
        form = t("list", form)
    with pytest.raises(MismatchError):
        decode(t("enum", type_name(Shade), None, form))
    with pytest.raises(FormatError, match="100 deep"):
        decode(t("enum", type_name(Shade), None, t("list", form)))


def test_an_object_of_another_class_is_refused_with_its_class_and_text():
    class Long:
        def __init__(self, length):
            self.length = length

        def __repr__(self):
            return "x" * self.length

    for length, text in ((80, "x" * 80), (81, "x" * 77 + "...")):
        with pytest.raises(TreeError) as caught:
            encode_value([Long(length)], "a/b")
        assert caught.value.path == "a/b" and caught.value.found == f"{type_name(Long)}: {text}"


def test_an_object_whose_text_fails_is_refused_too():
    class Broken:
        def __repr__(self):
            raise ValueError("no text")

    with pytest.raises(TreeError, match="repr failed"):
        encode_value(Broken(), "p")


def test_values_of_other_libraries_are_encoded_and_built_by_them():
    class Other:
        pass

    other = Other()
    form = encode_value([other], "p", lambda value: t("other", 5) if value is other else None)
    assert form == t("list", t("other", 5))
    assert decode(form, extra=lambda typed: typed.items[0] * 2) == [10]
    with pytest.raises(TreeError):
        encode_value([Other()], "p", lambda value: None)


@pytest.mark.parametrize(
    "form",
    [
        t("os.system", "true"), t("int", "zz"), t("int"), t("int", 5), t("bytes", "a"), t("str", "/w=="),
        t("range", "a"), t("set", t("list")), t("dict", 1), t("dict", t("list"), 1), t("datetime", "x", None, 0),
        t("date", "2024-13-01"),
        t("Fraction", 1, 0), t("Fraction", "1e9", 2), t("UUID", "5"), t("enum", "x"), t("enum", 1, "A", 1),
        t("numpy", "<f4", "AA=="), t("numpy", "<f4", ""), t("Counter", 1), t("ZoneInfo", "No/Where"),
        t("timedelta", 10**12), t("ellipsis", 1), t("Namespace", 1, 2), t("SimpleNamespace", "a"),
        t("BytesIO"), t("BytesIO", "a", 0, None), t("BytesIO", t("bytes", "YQ=="), -1, None),
        t("BytesIO", t("bytes", "YQ=="), 0, 5), t("BytesIO", t("bytes", "YQ=="), 1 << 70, None),
        t("StringIO", "a", "x", 0, None), t("StringIO", 5, "", 0, None),
    ],
)  # fmt: skip
def test_forms_of_no_value_are_refused_by_path(form):
    with pytest.raises(FormatError) as caught:
        decode_value(form, "a/b", resolve=KINDS.__getitem__)
    assert caught.value.path == "a/b"


@pytest.mark.parametrize(
    "form",
    [
        t("enum", "no:Such", "A", 1), t("enum", type_name(Shade), "NONE", 1), t("enum", type_name(Shade), None, 9),
        t("enum", "builtins:int", "real", 1), t("enum", type_name(Bits), None, "x"),
        t("enum", type_name(Bits), None, False),
        t("enum", type_name(Shade), None, 3),
    ],
)  # fmt: skip
def test_what_this_program_lacks_is_a_mismatch_by_path(form):
    with pytest.raises(MismatchError) as caught:
        decode_value(form, "a/b", resolve=KINDS.__getitem__)
    assert caught.value.path == "a/b"


def test_without_a_way_to_find_classes_no_enum_is_built():
    with pytest.raises(MismatchError, match="Shade"):
        decode_value(t("enum", type_name(Shade), "LIGHT", 1), "p")


def test_an_enum_may_be_found_by_value_where_its_members_have_other_names_now():
    assert decode(t("enum", type_name(Shade), None, "d")) is Shade.DARK


def test_more_than_64_members_of_one_hash_are_refused():
    same = (1 << 61) - 1  # the hash of a multiple is 0
    members, spread = [same * n for n in range(65)], list(range(1, 200))
    assert check_hash_collisions(members[:64] + spread, "p") == members[:64] + spread
    with pytest.raises(FormatError, match="65 of one hash") as caught:
        check_hash_collisions(members + spread, "a/b")
    assert caught.value.path == "a/b"
    assert check_hash_collisions(members[:64], "p") == members[:64]
    with pytest.raises(FormatError, match="65 of one hash"):
        check_hash_collisions(members, "p")
    pairs = [same * n + rest for rest in range(1, 100) for n in (0, 1)]
    assert check_hash_collisions(pairs, "p") == pairs, "chance"
    assert check_hash_collisions(members[:64] + pairs, "p") == members[:64] + pairs
    form = t("set", *(encode_value(same * n, "p") for n in range(65)))
    with pytest.raises(FormatError):
        decode(form)
    with pytest.raises(FormatError):
        decode(t("dict", *(item for member in form.items for item in (member, 1))))
    assert len(decode(t("list", *form.items))) == 65


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys, collections.Counter])
def test_what_a_load_would_refuse_for_its_hashes_is_not_stored(kind):
    signs = list(itertools.product((-1, -2), repeat=7))  # 128 tuples of one hash
    with pytest.raises(TreeError, match=r"a/b: expected at most 64 .* of one hash, found 128") as caught:
        encode_value(kind(signs), "a/b")
    assert "strings" in caught.value.hint
    assert decode(encode_value(kind(signs[:64]), "a/b")) == kind(signs[:64])
    with pytest.raises(TreeError, match=r"x: expected at most 64 .* found 128"):
        flatten({"x": dict.fromkeys(signs, 1)})
