"""Patterns over paths and the names made from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt.errors import MismatchError
from treeckpt.rules._patterns import compile_pattern, expand


@pytest.mark.parametrize(
    ("pattern", "template", "path", "name"),
    [
        ("model/h.$L.attn.*", "model/layers.${L + 4}.self.*", "model/h.8.attn.w.b", "model/layers.12.self.w.b"),
        ("stage.$S.layer.$L.*", "layer.${S * 4 + L}.*", "stage.2.layer.3.w", "layer.11.w"),
        ("layer.$L.*", "stage.${L // 4}.layer.${L % 4}.*", "layer.11.w", "stage.2.layer.3.w"),
        ("*.gamma", "*.weight", "a/b.gamma", "a/b.weight"),
        ("*/a/*", "*-*", "x/a/y", "x-y"),
        ("model", "net", "model/a/b", "net/a/b"),
        ("model/$L", "${L-1}", "model/3/w", "2/w"),
        ("x.$A.$A", "y.$A", "x.7.7", "y.7"),
        ("w[0].(a)", "v", "w[0].(a)", "v"),
        ("a*", "b*", "a", "b"),
    ],
)
def test_names_are_made_of_what_the_pattern_stands_for(pattern: str, template: str, path: str, name: str) -> None:
    binding = compile_pattern(pattern).match(path, below=True)
    assert binding is not None and expand(template, binding) == name


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("model", "model2"),
        ("model", "model.w"),
        ("h.$L.w", "h.x.w"),
        ("h.$L.w", "h.01.w"),
        ("h.$L.w", "h.-1.w"),
        ("x.$A.$A", "x.7.8"),
        ("a.b", "aXb"),
        ("w[0]", "w0"),
    ],
)
def test_what_only_looks_alike_is_not_meant(pattern: str, path: str) -> None:
    assert compile_pattern(pattern).match(path, below=True) is None


def test_what_lies_below_is_meant_only_where_it_is_asked_for() -> None:
    assert compile_pattern("model").match("model/a") is None
    assert compile_pattern("model").match("model/a", below=True) == (("/", "/a"),)


@given(st.integers(0, 10**6), st.integers(0, 100))
def test_an_offset_is_undone_by_its_opposite(number: int, offset: int) -> None:
    up = compile_pattern("h.$L.w").match(f"h.{number}.w")
    assert up is not None
    name = expand(f"l.${{L + {offset}}}.w", up)
    down = compile_pattern("l.$L.w").match(name)
    assert down is not None and expand(f"h.${{L - {offset}}}.w", down) == f"h.{number}.w"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("x.$M", r"\$M"),
        ("x.${L - 9}", "L - 9 = -6"),
        ("x.${L ** 2}", "only integers"),
        ("x.${__import__('os')}", "only integers"),
        ("x.${L // 0}", "zero"),
        ("x.${1 +}", "invalid"),
        ("*.*", "more"),
    ],
)
def test_names_that_cannot_be_made_are_refused(template: str, found: str) -> None:
    binding = compile_pattern("*.$L").match("w.3")
    assert binding is not None
    with pytest.raises(MismatchError, match=found):
        expand(template, binding)


def test_arithmetic_in_a_pattern_is_refused() -> None:
    with pytest.raises(MismatchError, match="compute in the new name"):
        compile_pattern("h.${L + 1}")
