"""The server and the scripts write sizes, durations, rates and numbers as the same texts."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from treeckpt._core.columns import bytes_column, numbers_column, seconds_column
from treeckpt._core.text import bytes_text, seconds_text

STATIC = Path(__file__).parents[3] / "dashboard" / "static"
SCRIPT = """
globalThis.document = { body: { dataset: {} } };
const { bytesText, secondsText } = await import("./dom.js");
const { bytesColumn, numbersColumn, secondsColumn } = await import("./columns.js");
const makes = { bytesColumn, numbersColumn, secondsColumn, bytesText: () => bytesText, secondsText: () => secondsText };
let text = "";
for await (const part of process.stdin) text += part;
const texts = JSON.parse(text).map(([name, values]) => {
  const format = makes[name](values);
  return values.map((value) => format(value));
});
console.log(JSON.stringify(texts));
"""
MAKES = {
    "bytesColumn": bytes_column,
    "secondsColumn": seconds_column,
    "numbersColumn": numbers_column,
    "bytesText": lambda _: bytes_text,
    "secondsText": lambda _: seconds_text,
}
FACTORS = (1, 1.25, 2.5, 3.3333, 7, 50, 9_999, 10_000, 10_001, 1e6)


def columns():
    """Columns around each limit of the rules, with ties, and with values of every size."""
    sizes = [0, 1, 12, 125, 999, 999.4, 999.5, 1000, 1125, 4_005_000, 999_500, 1e9 / 3, 10**13 + 5]
    times = [0, 1e-9, 2.5e-7, 0.9995e-3, 0.125, 0.9995, 1.005, 9.995, 10, 99.94, 99.95, 100.5, 599.9, 600, 3599.5, 1e5]
    numbers = [0, -1.5, 0.1, 1e-5, 3.3e-4, 2.00005, 12344.5, 123456, 1e15, 1.5e300, "NaN"]
    for names, values in (
        ("bytesColumn bytesText", sizes),
        ("secondsColumn secondsText", times),
        ("numbersColumn", numbers),
    ):
        for name in names.split():
            yield name, values
            yield from ((name, [value, value * by]) for value in values if value != "NaN" for by in FACTORS)


def test_the_server_and_the_scripts_write_the_same_texts():
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed: the texts of scripts are not compared")
    asked = list(columns())
    command = [node, "--input-type=module", "--eval", SCRIPT]
    ran = subprocess.run(command, input=json.dumps(asked), cwd=STATIC, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    for (name, values), texts in zip(asked, json.loads(ran.stdout), strict=True):
        assert list(map(MAKES[name](values), values)) == texts, (name, values)
