"""Slices of values, and reads of a checkpoint that is replaced meanwhile."""

import numpy as np

import treeckpt as tc
from treeckpt._io.storage.local_store import LocalStore


def test_a_peek_shows_values_and_what_they_are_like(asked):
    found = asked("/peek", "odd")
    assert found["values"] == [["1", "nan", "inf"], ["-2", "0", "0"]] and found["region"] == "[0:2, 0:3]"
    numbers = found["statistics"]
    assert [numbers[k] for k in ("nan", "infinite", "zero", "minimum", "maximum")] == [1, 1, 2, "-2", "1"]
    assert sum(numbers["bins"]) == 4 and found["verified"] and found["nbytes"] == 24
    assert asked("/peek", "half")["values"] == [["1", "-2"]]
    assert asked("/peek", "rng/~rank*", at="2")["rank"] == 2


def test_axis_pickers_choose_the_slice(asked, tree):
    deep = tree["deep"]
    found = asked("/peek", "deep", y=0, x=1, at="0,0,5", top=1, rows=2, columns=3)
    assert found["region"] == "[1:3, 0:3, 5:6]" and found["values"] == deep[1:3, :3, 5].astype(str).tolist()
    turned = asked("/peek", "deep", y=2, x=0, at="0,4,0")
    assert turned["values"] == deep[:, 4, :].T.astype(str).tolist()
    whole = asked("/peek", "deep", whole=True)
    assert whole["elements"] == deep.size and whole["statistics"]["maximum"] == "119"
    assert asked("/peek", "deep", top=10**9, left=10**9)["region"] == "[0:1, 4:5, 5:6]"


def test_what_has_no_values_to_look_at_says_so(asked):
    assert "no elements" in asked("/peek", "empty", 404)["error"]
    assert "no elements" in asked("/peek", "n", 404)["error"]


def test_a_peek_and_checksums_follow_a_checkpoint_that_is_replaced_meanwhile(serve, tmp_path, monkeypatch):
    path = tmp_path / "step_00000001"
    tc.save(path, {"w": np.full(1000, 1.0)})
    client = serve(path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    at = f"/api/v1/checkpoints/{run['checkpoints'][0]['id']}"
    sizes, number, times = LocalStore.sizes, iter(range(2, 100)), [0]

    def replaced(self):
        if times[0]:
            times[0] -= 1
            tc.save(path, {"w": np.full(1000, float(next(number)))}, overwrite=True)
        return sizes(self)

    monkeypatch.setattr(LocalStore, "sizes", replaced)
    for ask, expected in (("leaves/0/peek", 2.0), ("leaves/0/peek", 3.0)):
        client.get(f"{at}/leaves")
        times[0] = 1
        answer = client.get(f"{at}/{ask}")
        assert answer.status_code == 200, answer.text
        assert answer.json()["values"][0][0] == f"{expected:g}" and answer.json()["verified"]
    times[0] = 1
    assert client.get(f"{at}/files/0/checksums").json()["problem"] is None
