"""`gs://` URLs, on a server that answers as Google's XML interface does: what a store must do for checkpoints.

The server is the one of the benchmark. No emulator that could be installed has the XML interface, by which obstore
writes: fake-gcs-server and gcp-storage-emulator know the JSON one.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.far_s3 import FarS3
from tests.helpers.s3 import MIB, array, same


@pytest.fixture
def options(server: FarS3) -> dict[str, Any]:
    server.set()
    account = {"gcs_base_url": f"http://127.0.0.1:{server.port}", "disable_oauth": True}
    account |= {"client_email": "", "private_key": "", "private_key_id": ""}
    return {"service_account_key": json.dumps(account), "client_options": {"allow_http": True}}


def test_a_checkpoint_in_parts_comes_back(server: FarS3, options: dict[str, Any]) -> None:
    store, tree = tc.ObjectStore("gs://bucket/parts/step", **options), {"w": array(24), "b": np.arange(10.0)}
    tc.save(store, tree)
    assert sum("partNumber" in row["path"] for row in server.log()) == 3
    server.set()
    assert same(store, tree) and tc.verify(store).ok
    assert len([row for row in server.gets("safetensors") if row["sent"] > MIB]) >= 3


def test_a_path_that_is_taken_is_overwritten_only_when_told(options: dict[str, Any]) -> None:
    store = tc.ObjectStore("gs://bucket/taken/step", **options)
    tc.save(store, {"n": 1})
    with pytest.raises(tc.CheckpointExists):
        tc.save(store, {"n": 2})
    tc.save(store, {"n": 3}, overwrite=True)
    assert tc.load(store) == {"n": 3}
    with pytest.raises(tc.CheckpointExists):
        store.publish("index.json", b"other", replace=False)
    with pytest.raises(tc.CheckpointExists):
        store.compare_and_swap("index.json", b"new", holds=lambda _: _replaced(store), limit=1 << 20)
    assert store.read("index.json", limit=1 << 20) == b"between"


def _replaced(store: tc.ObjectStore) -> bool:
    store.publish("index.json", b"between", replace=True)
    return True


def test_a_manager_keeps_what_its_policy_keeps(options: dict[str, Any]) -> None:
    url = "gs://bucket/managed"
    with tc.Manager(tc.ObjectRun(url, **options), keep=tc.policy.Last(2), background=False) as manager:
        for step in range(4):
            manager.save(step, {"n": step})
    with tc.Manager(tc.ObjectRun(url, **options)) as manager:
        assert manager.restore() == {"n": 3} and manager.steps() == [2, 3]
