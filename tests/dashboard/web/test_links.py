"""A link in a run shows no file of the host outside of the run, unless the server was started so."""

from __future__ import annotations

import pytest

from tests.helpers.samples import gpt_state, write_checkpoint
from treeckpt._io.storage.local_files import FOLLOW_LINKS


@pytest.mark.parametrize("follow", [False, True])
def test_files_that_are_links_out_of_the_run_are_shown_if_the_server_was_started_so(
    serve, tmp_path, monkeypatch, follow
):
    write_checkpoint(tmp_path / "run" / "step_00000001", gpt_state(layers=1), step=1, metadata={"note": "secret"})
    write_checkpoint(tmp_path / "outside", gpt_state(layers=1), step=2, metadata={"note": "secret"})
    (tmp_path / "run" / "step_00000002").symlink_to(tmp_path / "outside")
    for file in (tmp_path / "run" / "step_00000001").iterdir():
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    if follow:
        monkeypatch.setenv(FOLLOW_LINKS, "1")
    client = serve(tmp_path / "run")
    [run] = client.get("/api/v1/runs").json()["runs"]
    states = {found["name"]: (found["id"], found["status"]) for found in run["checkpoints"]}
    for name in ("step_00000001", "step_00000002"):
        identity, status = states[name]
        tree = client.get(f"/api/v1/checkpoints/{identity}/tree")
        page = client.get(f"/checkpoints/{identity}").text
        assert status in (("complete",) if follow else ("unread", "foreign")), name
        assert (tree.status_code, "secret" in page) == ((200, True) if follow else (404, False)), name
