"""Pages of a checkpoint with tensors that are made of others: their parts are its leaves."""

from __future__ import annotations

import torch

import treeckpt as tc


def test_the_pages_show_the_parts(serve, tmp_path):
    tc.save(tmp_path / "run" / "step_00000001", {"s": torch.eye(3).to_sparse(), "x": torch.ones(2)}, step=1)
    client = serve(tmp_path / "run")
    [run] = client.get("/api/v1/runs").json()["runs"]
    checkpoint = run["checkpoints"][0]["id"]
    page = client.get(f"/checkpoints/{checkpoint}")
    assert page.status_code == 200
    rows = client.get(f"/api/v1/checkpoints/{checkpoint}/tree").json()
    assert "torch:sparse_coo" in str(rows)
