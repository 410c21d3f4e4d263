"""The likely mistakes of a first day: each error says what is wrong, what is there, and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from treeckpt import training


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model, in a directory with checkpoints of it: `state`, `weights`, `lightning` and steps 10 and 20 of `run`."""
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    tc.save("state", training.state(model, torch.optim.AdamW(model.parameters())))
    tc.save("weights", model.state_dict())
    tc.save("lightning", {"model": {f"net.{name}": leaf for name, leaf in model.state_dict().items()}})
    with tc.Manager("run", background=False) as manager:
        manager.save(10, {"a": 1})
        manager.save(20, {"a": 2})
    os.mkdir("empty")
    Path("notes.txt").write_text("hello")
    return model


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a path where nothing is": (
        lambda net: tc.load("run/step_00000030"),
        r"step_00000030: expected .*, found nothing at this path\. Check the path: .*run holds .*_00000020",
    ),
    "a random generator as it is": (
        lambda net: tc.save("new", training.state(net, extra={"shuffle": torch.Generator()})),
        r"extra/shuffle: expected .*, found torch.*Generator.*Save its state, from \.get_state, in tc\.PerRank",
    ),
    "a mistyped run": (
        lambda net: tc.load("rnu/step_00000020"),
        r"found nothing at this path\. Check the path: near to it is .*/run/step_00000020\. .* holds ",
    ),
    "a step without its zeros": (lambda net: tc.load("run/step_20"), r"near to it is .*/run/step_00000020\. "),
    "a link to nowhere": (
        lambda net: (os.symlink("gone", "link"), tc.load("link")),
        r"found .*/link, a link to gone, where nothing is\. Mount or make what it leads to",
    ),
    "a file for a run": (
        lambda net: tc.Manager("notes.txt"),
        r"notes.txt: expected a run, .*, found a file of no known format\. Check the path$",
    ),
    "a run for a checkpoint": (
        lambda net: tc.load("run"),
        r"run: .*found a run of 2 steps. Load a step, as .*run/step_00000020, or take tc.Manager\('.*run'\)",
    ),
    "an empty directory": (lambda net: tc.load("empty"), r"empty: .*found a directory that is empty. Check the path"),
    "a text file": (lambda net: tc.load("notes.txt"), r"notes.txt: .*found a file of no known format. Check the path"),
    "the index for its checkpoint": (
        lambda net: tc.load("run/step_00000020/index.json"),
        r"index.json: .*found a file of a checkpoint\. Give the directory that holds it, .*/run/step_00000020$",
    ),
    "a checkpoint for a run": (
        lambda net: tc.Manager("state").resume(net),
        r"state: expected a run, .*found one checkpoint. Give the directory above it, .*, or load it with tc.load",
    ),
    "a step that was not saved": (
        lambda net: tc.Manager("run").restore(step=15),
        r"step_00000015: expected a complete checkpoint.*Steps that can be loaded: 10, 20",
    ),
    "the nearest step": (
        lambda net: tc.Manager("run").restore(step=17),
        r"step_00000017: .*, found no checkpoint of step 17\. Steps that can be loaded: 10, 20; the nearest is 20$",
    ),
    "a step to pin": (
        lambda net: tc.Manager("run").pin(12),
        r"step_00000012: .*, found no checkpoint of step 12\. Steps that can be loaded: 10, 20; the nearest is 10$",
    ),
    "a step to unpin": (lambda net: tc.Manager("run").unpin(12), r"found no such directory\. Steps .*nearest is 10$"),
    "a step of an empty run": (
        lambda net: tc.Manager("empty").delete(12),
        r"found no checkpoint of step 12\. Steps that can be loaded: none$",
    ),
    "a policy of no kind": (
        lambda net: tc.Manager("new", keep="newest"),
        r"keep: expected policies.*, found 'newest'\. .*'newest' is no policy: e\.g\. last:3 ",
    ),
    "a tree for a step": (
        lambda net: tc.Manager("run").save(net.state_dict(), 5),
        r"step: expected an integer, found (collections\.)?OrderedDict. Pass the number of training steps",
    ),
    "a training state into a model": (
        lambda net: tc.load_into("state", net),
        r"4 missing in the checkpoint.*0.weight as model/0.weight: pass rename=\{'model/\*': '\*'\}, strict='missing'"
        r"\. Checkpoint: state$",
    ),
    "a model's state into a tree": (
        lambda net: tc.load("weights", {"model": net.state_dict()}),
        r"model/0.weight as 0.weight: pass rename=\{'\*': 'model/\*'\}\. Checkpoint: weights$",
    ),
    "names of Lightning": (
        lambda net: training.restore("lightning", net, rng=False),
        r"model/0.weight as model/net.0.weight: pass rename=\{'model/net.\*': 'model/\*'\}"
        r"\. Checkpoint: lightning$",
    ),
    "a model for a path": (
        lambda net: training.restore(net, "state"),
        r"expected a path.*found Sequential. The path comes first: restore\(path, model, optimizer\)",
    ),
    "an optimizer for a model": (
        lambda net: training.state(torch.optim.AdamW(net.parameters()), net),
        r"model: expected a .*Module.*found .*AdamW. The order is state\(model, optimizer\)",
    ),
}


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda net: tc.load("weights", map_location="cpu"), "'map_location' is no option of load; device= says"),
        (lambda net: tc.load("weights", weights_only=True), "of load; leave it out: no code .* allow_pickle=True"),
        (lambda net: tc.load("run", step=10), r"of load; give the path of the step.*Manager\(run\).restore\(step="),
        (lambda net: tc.Manager("run").restore(map_location="cpu"), "of restore; device= says"),
        (lambda net: tc.load_async("weights", map_location="cpu"), "of load_async, nor of load; device= says"),
        (lambda net: tc.load_into("weights", net, stric=False), "of load_into; near to it is 'strict'"),
        (lambda net: tc.save("new", {}, force=True), "'force' is no option of save; overwrite=True"),
        (lambda net: tc.save_async("new", {}, process_group=None), "of save_async; comm= takes a process group"),
        (lambda net: training.state(net, schedulers=None), "of state; near to it is 'scheduler'"),
        (lambda net: tc.Manager("run").resume(net, lr_scheduler=None), "of resume; near to it is 'scheduler'"),
        (lambda net: tc.Manager("run", max_to_keep=3), "of Manager, nor of save; keep= takes a number"),
        (lambda net: tc.save("new", {}, colour=1), "^'colour' is no option of save$"),
    ],
)
def test_an_option_of_another_library_is_named_with_what_it_is_here(net: nn.Module, act: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        act(net)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_what_to_do(net: nn.Module, name: str) -> None:
    act, words = MISTAKES[name]
    with pytest.raises(tc.TreeckptError) as caught:
        act(net)
    assert re.search(words, str(caught.value)), str(caught.value)


def test_what_the_errors_advise_works(net: nn.Module) -> None:
    saved = {name: leaf.clone() for name, leaf in net.state_dict().items()}

    def comes_back(load: Callable[[], Any]) -> None:
        with torch.no_grad():
            for leaf in net.parameters():
                leaf.zero_()
        load()
        assert all(torch.equal(leaf, saved[name]) for name, leaf in net.state_dict().items())

    comes_back(lambda: tc.load_into("state", net, rename={"model/*": "*"}, strict="missing"))
    comes_back(lambda: tc.load_into("weights", {"model": net}, rename={"*": "model/*"}))
    comes_back(lambda: training.restore("lightning", net, rng=False, rename={"model/net.*": "model/*"}))
