"""Element types: names, widths, tags."""

import re

import numpy as np
import pytest
import torch

from treeckpt._arrays.numpy import dtype_name
from treeckpt._core.sharding.dtypes import dtype_of, normalize_dtype, numpy_dtype
from treeckpt.errors import FormatError, MismatchError

WIDTHS = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
}
WIDTHS |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}
NUMBERS = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
NUMBERS += ["float16", "float32", "float64", "complex64", "complex128"]
OTHERS = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"]
OTHERS += ["float4_e2m1fn_x2", "complex32", "int1", "uint7"]
NUMPYS = ["datetime64", "datetime64[ns]", "timedelta64[25s]", "timedelta64[D]", "bytes5", "str7", "void3"]


@pytest.mark.parametrize("name", NUMBERS + OTHERS + NUMPYS)
def test_the_parts_of_an_element_make_up_its_width(name):
    dtype = dtype_of(name)
    assert dtype.name == name
    assert WIDTHS[dtype.tag] * dtype.parts == dtype.itemsize


@pytest.mark.parametrize("name", NUMBERS + NUMPYS)
def test_numpy_agrees_on_width_and_name(name):
    dtype = dtype_of(name)
    assert np.dtype(dtype.numpy).itemsize == dtype.itemsize
    # numpy counts the width of fixed-width types in bits
    bits = re.fullmatch(r"(bytes|str|void)(\d+)", name)
    assert np.dtype(dtype.numpy).name == (f"{bits[1]}{dtype.itemsize * 8}" if bits else name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "float",
        "Float32",
        "float128",
        "object",
        "datetime64[x]",
        "datetime64[0s]",
        "datetime64[٣s]",
        "bytes0",
        "str",
        "void01",
        "bytes9999999999",
        "str536870912",
        "int9",
        "uint0",
        "float32 ",
        "datetime64[ns]\n",
        "datetime64[99999999999s]",
    ],
)
def test_unknown_names_are_refused(name):
    with pytest.raises(FormatError, match="dtype"):
        dtype_of(name)


@pytest.mark.parametrize("name", [n for n in OTHERS if "int" not in n])
def test_torch_agrees_on_width(name):
    torch = pytest.importorskip("torch")
    assert getattr(torch, name).itemsize == dtype_of(name).itemsize


@pytest.mark.parametrize("find", [dtype_of, numpy_dtype])
def test_dtypes_are_looked_up_once(find):
    find("float32")
    before = find.cache_info().hits
    find("float32")
    assert find.cache_info().hits == before + 1


@pytest.mark.parametrize("name", NUMBERS + OTHERS)
def test_a_dtype_of_torch_has_the_name_that_we_give_it(name):
    assert normalize_dtype(getattr(torch, name)) == normalize_dtype(f"torch.{name}") == normalize_dtype(name) == name


@pytest.mark.parametrize("text", ["?", "<u2", ">i4", "f8", "c16", "M8[D]", "m8[25us]", "S5", "U7", "V3"])
def test_a_dtype_of_numpy_has_the_name_that_its_arrays_have(text):
    assert normalize_dtype(np.dtype(text)) == dtype_name(np.dtype(text), "")


def test_a_scalar_type_of_numpy_is_a_dtype():
    assert [normalize_dtype(kind) for kind in (np.float32, np.int64, np.bool_)] == ["float32", "int64", "bool"]


@pytest.mark.parametrize(
    "odd", [float, None, 3, torch.ones(1), torch.strided, torch.qint8, np.float32(1), np.dtype("O"), np.dtype("i4,f4")]
)
def test_what_is_no_dtype_is_refused(odd):
    with pytest.raises(MismatchError, match="dtype: expected the name of a dtype"):
        normalize_dtype(odd)
