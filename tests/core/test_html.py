"""Strings from a checkpoint become text in HTML, never markup."""

import pytest

from treeckpt._core.html import Html, el, facts, joined, table


def test_strings_are_escaped_and_markup_is_not():
    assert joined(["<b>", Html("<i>"), None, 3, "a\x1b&"]) == "&lt;b&gt;<i>3a\\x1b&amp;"
    assert isinstance(joined(["a"]), Html)


def test_elements_have_their_attributes_and_children():
    assert el("p", "a<", Html("<br>"), None, class_="x", data_at='"\x1b', title=None) == (
        '<p class="x" data-at="&quot;\\x1b">a&lt;<br></p>'
    )
    assert el("br") == "<br>" and el("meta", charset="utf-8") == '<meta charset="utf-8">' and el("td") == "<td></td>"


def test_tables_align_numbers_to_the_right():
    assert table(["name", "bytes"], [["<w>", 5]], right=["bytes"]) == (
        '<table><thead><tr><th>name</th><th class="n">bytes</th></tr></thead>'
        '<tbody><tr><td>&lt;w&gt;</td><td class="n">5</td></tr></tbody></table>'
    )


def test_a_row_has_a_cell_for_each_column():
    with pytest.raises(ValueError):
        table(["name", "bytes"], [["w"]])


def test_facts_are_names_and_values():
    assert facts([("step", 3), ("by", "<a>")]) == (
        "<dl><div><dt>step</dt><dd>3</dd></div><div><dt>by</dt><dd>&lt;a&gt;</dd></div></dl>"
    )
