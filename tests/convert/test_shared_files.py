"""Checkpoints that share files of others of their run: converted to any format, copied alone, with the run, to disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from starlette.testclient import TestClient

import treeckpt as tc
from tests.dashboard.helpers import page
from tests.helpers.adapted import FROZEN, NBYTES, Adapted, assert_same, write_adapted
from treeckpt._cli.main import main
from treeckpt._io.storage.open import open_run, open_store
from treeckpt.convert import convert
from treeckpt_dashboard.web.app import create_app


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its steps 2 and 3 share a file of step 1."""
    run = tmp_path_factory.mktemp("shared") / "run"
    write_adapted(run, 3)
    return run


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp", "treeckpt"])
def test_a_conversion_has_what_the_checkpoint_shares(run: Path, tmp_path: Path, to: str) -> None:
    made = tmp_path / {"torch": "made.pt", "safetensors": "made.safetensors"}.get(to, "made")
    convert(run / "step_00000003", made, to=to, lossy=True)
    if to == "safetensors":
        found = {tuple(name.split(".")): array for name, array in load_file(made).items()}
    else:
        found = {
            (name, part): array
            for name, layer in tc.load(made).items()
            if name != "step"
            for part, array in layer.items()
        }
    expected = tc.load(run / "step_00000003")
    assert len(found) == 2 * FROZEN
    for (name, part), array in found.items():
        assert torch.equal(torch.as_tensor(array), expected[name][part])
    if to == "treeckpt":
        assert not tc.inspect(made).shared_names and tc.verify(made).ok


def test_what_is_copied_alone_names_the_steps_that_it_needs_everywhere(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "run" / "step_00000003"
    shutil.copytree(run / alone.name, alone)
    hint = "Copy the directory step_00000001 of the run beside this one too"
    for act in (lambda: tc.load(alone), lambda: convert(alone, tmp_path / "made.pt")):
        with pytest.raises(tc.CorruptError, match=hint):
            act()
    assert not (tmp_path / "made.pt").exists()
    assert main(["flatten", str(alone)]) == 1 and hint in capsys.readouterr().err
    [problem] = tc.verify(alone).problems
    assert "missing in step_00000001 beside this directory, which shares it" in problem.text
    for command in (["show", str(alone)], ["ls", str(alone.parent)]):
        main(command)
        assert "it shares shards of step_00000001, which must be beside it" in capsys.readouterr().out
    client = TestClient(create_app([str(alone.parent)]), base_url="http://127.0.0.1:8265")
    [row] = page(client).json()["run"]["checkpoints"]
    assert row["status"] == "damaged"
    shown = client.get(f"/checkpoints/{row['id']}").text
    assert "it shares shards of step_00000001, which must be beside it" in shown


def test_several_steps_that_are_needed_are_all_named(tmp_path: Path) -> None:
    frozen = torch.nn.Parameter(torch.ones(100_000), requires_grad=False)
    for step in range(8):
        tree = {"base": frozen, "stays": np.full(100_000, min(step, 3)), "changes": np.full(10_000, step)}
        tc.save(tmp_path / f"{step}", tree, **({"base": tmp_path / f"{step - 1}"} if step else {}))
    homes = list(tc.inspect(tmp_path / "7").shared_with)
    assert len(homes) > 1
    shutil.copytree(tmp_path / "7", tmp_path / "alone" / "7")
    with pytest.raises(tc.CorruptError, match=f"Copy the directories {', '.join(homes)} of the run"):
        tc.load(tmp_path / "alone" / "7")


def test_a_run_that_is_copied_or_renamed_goes_on(tmp_path: Path) -> None:
    state, run = Adapted(), tmp_path / "run"
    with tc.Manager(run, keep=None, incremental=True, background=False) as manager:
        for step in (1, 2):
            manager.save(step, state.train())
    shutil.copytree(run, tmp_path / "copy")
    run.rename(tmp_path / "renamed")
    for place in (tmp_path / "copy", tmp_path / "renamed"):
        with tc.Manager(place, keep=None, incremental=True, background=False) as manager:
            manager.restore()
            tree = state.train()
            report = manager.save(3, tree)
        assert report.shared_nbytes == FROZEN * NBYTES
        assert_same(place / "step_00000003", tree)
        assert all(tc.verify(place / f"step_0000000{step}").ok for step in (1, 2, 3))
    assert not run.exists()


def test_a_run_in_an_object_store_is_copied_to_disk(tmp_path: Path) -> None:
    state, url = Adapted(), "memory://copied/run"
    for step in range(3):
        tree = state.train()
        base = {"base": f"{url}/step_0000000{step - 1}"} if step else {}
        shared = tc.save(f"{url}/step_0000000{step}", tree, overwrite=True, **base).shared_nbytes
    assert shared == FROZEN * NBYTES
    for name in open_run(url).names():
        folder, place = open_store(f"{url}/{name}"), tmp_path / name
        place.mkdir()
        for file, nbytes in folder.sizes().items():
            (place / file).write_bytes(folder.read(file, limit=nbytes))
    assert_same(tmp_path / "step_00000002", tree)
    assert tc.verify(tmp_path / "step_00000002").ok
