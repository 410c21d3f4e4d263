"""Does the benchmark of the dashboard still measure every bar?"""

import pytest


@pytest.mark.slow
def test_every_bar_is_measured(tmp_path):
    pytest.importorskip("playwright.sync_api")
    from tests.bench.dashboard import main

    rows = main(["--small", "--folder", str(tmp_path)]).rows
    assert len(rows) >= 18 and [row for row in rows if row[3] == "not measured"] == []
