"""Saves, loads, verifies, converts and deletes in the working directory: on systems where the test suite does not run.

`python smoke.py` needs treeckpt with torch and nothing of the checkout.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import treeckpt as tc
from treeckpt._cli.main import main
from treeckpt.convert import convert

ELEMENTS = 1_500_001


def tree(value: int) -> dict[str, object]:
    return {
        "w": torch.arange(ELEMENTS, dtype=torch.float32) + value,
        "half": torch.full((5, 7), value, dtype=torch.bfloat16),
        "counts": np.arange(777, dtype=np.int16) + value,
        "step": value,
    }


def check(found: object, value: int) -> None:
    expected = tree(value)
    assert isinstance(found, dict) and tc.trees.same_structure(found, expected)
    for key, leaf in expected.items():
        same = torch.equal(found[key], leaf) if isinstance(leaf, torch.Tensor) else np.all(found[key] == leaf)
        assert same, f"{key}: another value than was saved"


def save_and_load() -> None:
    tc.save("run/step_00000001", tree(1), step=1)
    check(tc.load("run/step_00000001"), 1)
    tc.load_into("run/step_00000001", target := tree(0))
    check(target, 1)
    tc.save("run/step_00000001", tree(2), step=1, overwrite=True)
    check(tc.load("run/step_00000001"), 2)
    tc.prewarm(tree(0))
    for step in (2, 3):
        tc.save_async(f"run/step_0000000{step}", tree(step), step=step).result()
        check(tc.load(f"run/step_0000000{step}"), step)
    assert tc.verify("run/step_00000003").ok


def keep_two() -> None:
    with tc.Manager("job", every=1, keep=[tc.policy.Last(2)]) as manager:
        for step in range(1, 5):
            manager.save(step, tree(step))
    assert tc.Manager("job", keep=[tc.policy.Last(2)]).steps() == [3, 4]
    check(tc.load("job/step_00000004"), 4)


def convert_there_and_back() -> None:
    for name, to in (("out.pt", "torch"), ("out.safetensors", "safetensors"), ("out_dcp", "dcp")):
        convert("run/step_00000003", name, to=to, lossy=True)
    convert("run/step_00000003", "out.pt", lossy=True, overwrite=True)
    convert("out.pt", "back")
    assert torch.equal(tc.load("back")["w"], tree(3)["w"])


def use_commands() -> None:
    for code, command in (
        (0, "ls run"),
        (0, "show run/step_00000001 w"),
        (0, "verify run/step_00000001"),
        (0, "diff run/step_00000001 run/step_00000003 --values"),
        (0, "gc job --keep-last 1"),
        (1, "verify missing"),
    ):
        assert main(command.split()) == code, command
    assert sorted(path.name for path in Path("job").iterdir()) == ["step_00000004"]


if __name__ == "__main__":
    save_and_load()
    keep_two()
    convert_there_and_back()
    use_commands()
    print("all as it was")
