"""A page shows exactly one command of repair, the same as the JSON and the command line."""

import html
import re

import pytest

from tests.dashboard.helpers import page
from tests.helpers.samples import write_run
from treeckpt._cli.main import main
from treeckpt._core.format.index import INDEX_NAME


@pytest.fixture
def run(tmp_path):
    """A lost index, a damaged index, a missing shard and a save that never finished; step 500 is right."""
    run = tmp_path / "run"
    write_run(run, steps=(100, 200, 300, 400, 500))
    (run / "step_00000100" / INDEX_NAME).unlink()
    (run / "step_00000200" / INDEX_NAME).write_bytes(b"{")
    next((run / "step_00000300").glob("shard-*")).unlink()
    next((run / "step_00000400").glob("shard-*")).unlink()
    (run / "step_00000400" / INDEX_NAME).unlink()
    return run


def test_a_page_shows_the_one_command_that_the_command_line_shows(serve, run, capsys):
    client = serve(run)
    rows = {row["step"]: row for row in page(client).json()["run"]["checkpoints"]}
    main(["ls", str(run)])
    said = capsys.readouterr().out
    expected = {100: "verify {} --repair", 200: "verify {} --repair", 300: "verify {}", 400: "gc {}"}
    assert rows[500]["repair"] is None and said.count("treeckpt ") == len(expected)
    for step, command in expected.items():
        repair = rows[step]["repair"]
        assert repair["command"] == "treeckpt " + command.format(run / f"step_{step:08d}")
        assert f"{repair['command']} {repair['effect']}" in said
        for tab in ("", "/verify") if rows[step]["readable"] else ("",):
            text = html.unescape(client.get(f"/checkpoints/{rows[step]['id']}{tab}").text)
            assert re.findall(r"<code>(treeckpt [a-z]+ .*?)</code>", text) == [repair["command"]], (step, tab)
