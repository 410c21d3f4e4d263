"""Long texts and bytes are shown by their first characters, never as numbers."""

import numpy as np

import treeckpt as tc
from tests.dashboard.helpers import number_of


def test_a_long_text_is_shown_by_its_first_characters_and_its_bytes_are_counted(serve, tmp_path):
    tree = {"log": "<b>first\n" * 2000, "own": tc.PerRank(b"\xff" * 5000), "w": np.ones(3)}
    tc.save(tmp_path / "step_00000001", tree)
    client = serve(tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    at = f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}"
    numbers = {path: number_of(client, at, path) for path in ("log", "own/~rank*", "w")}
    found = client.get(f"{at}/leaves/{numbers['log']}").json()
    assert found["values"][0] == {"name": "", "type": "str", "text": "str of 18,000 bytes"}
    assert found["values"][1]["text"].startswith("'<b>first\\n<b>first") and found["nbytes"] == 18_000
    assert (found["dtype"], found["kind"], found["numbers"], found["forms"]) == (None, "value", None, [])
    page = client.get(f"/checkpoints/{run['checkpoints'][0]['id']}/leaves/{numbers['log']}").text
    assert "&lt;b&gt;first" in page and "<b>first" not in page
    own = client.get(f"{at}/leaves/{numbers['own/~rank*']}").json()
    assert own["kind"] == "value per rank" and own["values"][1]["name"] == "rank 0"
    rows = client.get(f"{at}/search", params={"q": "log"}).json()["rows"]
    assert (rows[0]["nbytes"], rows[0]["text"]) == (18_000, "value str of 18,000 bytes")
    shown = client.get(f"{at}/treemap", params={"by": "dtype"})
    assert shown.status_code == 200 and "uint8" not in shown.text
    assert client.get(f"{at}/leaves/{numbers['log']}/peek").status_code == 404
