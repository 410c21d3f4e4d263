"""treeckpt/convert/SYSTEMS.md: each row says what the system does, what treeckpt does, and names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "treeckpt/convert/SYSTEMS.md").read_text()
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.splitlines()
    if re.match(r"\| [HTPRD]\d+ \|", line)
]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_complete_and_its_tests_exist(row: list[str]) -> None:
    _, lines, system, here, tests = row
    assert re.fullmatch(r"\d+(-\d+)?(, \d+(-\d+)?)*", lines)
    assert system
    assert here
    if here.startswith("Absent: "):
        return
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
    assert named
    for path, name in named:
        assert re.search(rf"def {name}\(", (ROOT / path).read_text()), f"{path}::{name}"


def test_no_row_is_named_twice() -> None:
    names = [row[0] for row in ROWS]
    assert len(set(names)) == len(names)
