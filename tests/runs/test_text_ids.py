"""Checkpoints of a run that have a text in the place of a step: ordered by their saves, kept, pinned, restored."""

from __future__ import annotations

import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks
from treeckpt._cli.main import main
from treeckpt._io.storage.deletions import hold_lock, take_index
from treeckpt._runs.run import RunDirectory


def manager(run: Path, **options: Any) -> tc.Manager:
    return tc.Manager(run, background=False, **{"keep": None, **options})


def tree(text: Any) -> dict[str, Any]:
    return {"w": torch.full((3,), float(len(str(text)))), "text": text}


@pytest.mark.parametrize("background", [False, True])
def test_the_newest_is_the_one_saved_last(tmp_path: Path, background: bool) -> None:
    """recis-saver, lines 113-164, 326-345: ids in any order; the last line of the list is the latest."""
    with tc.Manager(tmp_path, keep=None, background=background) as made:
        for text in ("checkpoint_b", "checkpoint_a", "zero"):
            made.save(text, tree(text))
        made.wait()
        assert made.names() == ["checkpoint_b", "checkpoint_a", "zero"] and made.steps() == []
        made.save("checkpoint_a", tree("again"))
        made.wait()
        assert made.latest() == "checkpoint_a"
    again = manager(tmp_path)
    assert again.names() == ["checkpoint_b", "zero", "checkpoint_a"] and again.latest() == "checkpoint_a"
    assert again.restore()["text"] == "again" and again.restore(step="zero")["text"] == "zero"
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint_b", "checkpoint_a", "zero"}
    assert tc.inspect(again.path("zero")).step is None


def test_retention_counts_saves_also_after_a_restart(tmp_path: Path) -> None:
    """recis-saver, lines 165-192: max_keep, whose list a restart forgets, and which deletes an id saved twice."""
    made = manager(tmp_path, keep=2)
    for text in ("a", "b"):
        made.save(text, tree(text))
    made = manager(tmp_path, keep=2)
    made.restore()
    made.save("c", tree("c"))
    assert made.names() == ["b", "c"]
    made.save("c", tree("twice"))
    assert made.names() == ["b", "c"] and made.restore()["text"] == "twice"
    made.pin("b")
    for text in ("d", "e", "f"):
        made.save(text, tree(text))
    assert made.names() == ["b", "e", "f"]
    made.unpin("b")
    report = made.clean()
    assert [removal.name for removal in report.removed] == ["b"] and [*report.kept] == ["e", "f"]
    assert "kept      f: newest" in str(report)
    made.delete("e")
    assert made.names() == ["f"]


def test_the_best_is_kept_and_named(tmp_path: Path) -> None:
    made = manager(tmp_path, keep=[tc.policy.Best("loss"), tc.policy.EverySteps(1)])
    for text, loss in (("first", 0.5), ("second", 0.1), ("third", 0.3)):
        made.save(text, tree(text), metrics={"loss": loss})
    assert made.names() == ["second", "third"] and made.best("loss") == "second"


def test_steps_and_texts_stand_beside_each_other(tmp_path: Path) -> None:
    made = manager(tmp_path)
    for step in (10, "before", 20, "after", 30):
        made.save(step, tree(step))
    assert made.steps() == [10, 20, 30] and made.names() == ["before", "after"]
    assert made.latest() == 30 and made.count == 30
    assert manager(tmp_path).restore()["text"] == 30
    # a step below one that was saved is a step back, whatever texts lie between
    back = manager(tmp_path)
    assert back.restore(step="before")["text"] == "before" and back.count == 10
    back.save(15, tree(15))
    infos = {info.name: info.abandoned for info in RunDirectory(tmp_path).checkpoints()}
    assert infos == {
        "step_00000010": False, "before": False, "step_00000015": False,
        "step_00000020": True, "after": True, "step_00000030": True,
    }  # fmt: skip
    assert manager(tmp_path).latest() == 15


def test_a_restored_text_begins_a_branch(tmp_path: Path) -> None:
    made = manager(tmp_path, keep=1)
    made.save("a", tree("a"), pin=True)
    made.save("b", tree("b"))
    made.restore(step="a")
    made.save("c", tree("c"))
    assert made.names() == ["a", "c"]
    assert tc.inspect(made.path("c")).lineage.follows == tc.inspect(made.path("a")).save_id


@pytest.mark.parametrize("odd", ["5", "1.5", "-1", "step_7", "a/b", "..", "", ".x", "index.json", "a" * 200, "x\n"])
def test_what_cannot_be_a_name_is_refused(tmp_path: Path, odd: str) -> None:
    made = manager(tmp_path / "run")
    for call in (made.save, made.pin, made.path):
        with pytest.raises(tc.TreeError, match="step: expected an integer, or a"):
            call(odd)
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


def test_what_others_saved_in_a_run_is_left(tmp_path: Path) -> None:
    """A checkpoint that was saved by hand, or copied, is none of the run, and no save replaces it."""
    made = manager(tmp_path, keep=1)
    tc.save(tmp_path / "hand", tree("hand"))
    made.save("a", tree("a"))
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    with pytest.raises(tc.CheckpointExists, match="hand: expected a name that is free"):
        made.save("hand", tree("other"))
    made.save("b", tree("b"))
    assert made.names() == ["b"] and tc.load(tmp_path / "hand")["text"] == "hand"
    for name in ("hand", "copy"):
        with pytest.raises(tc.CheckpointNotFound, match="no manager saved by this name"):
            made.restore(step=name)
        with pytest.raises(tc.CheckpointNotFound):
            made.delete(name, force=True)
    with pytest.raises(tc.CheckpointNotFound, match="the nearest is b"):
        made.restore(step="bb")


def test_a_text_that_is_saved_without_a_restore_is_warned_of(tmp_path: Path) -> None:
    manager(tmp_path).save("a", tree("a"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager(tmp_path).save("b", tree("b"))
    with pytest.warns(UserWarning, match="a: a replaces a checkpoint that this manager neither saved nor restored"):
        manager(tmp_path).save("a", tree("a"))


def test_a_damaged_one_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = manager(tmp_path)
    for text in ("a", "b"):
        made.save(text, tree(text))
    [shard] = (tmp_path / "b").glob("shard*")
    data = bytearray(shard.read_bytes())
    data[-9] ^= 1
    shard.write_bytes(data)
    with caplog.at_level(logging.WARNING, "treeckpt"):
        assert manager(tmp_path).restore()["text"] == "a"
    assert "passed over" in caplog.text


def test_an_index_that_cannot_be_decoded_is_named_and_not_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = manager(tmp_path, keep=1)
    made.save("a", tree("a"))
    made.save("b", tree("b"), pin=True)
    (tmp_path / "b/index.json").write_text("{")
    with caplog.at_level(logging.WARNING, "treeckpt"):
        again = manager(tmp_path, keep=1)
        assert again.latest() is None
    assert "b: passed over, damaged" in caplog.text
    with pytest.raises(tc.CheckpointExists, match="force=True"):
        again.save("b", tree("c"))
    again.save("c", tree("c"))
    assert (tmp_path / "b/index.json").exists() and again.names() == ["c"]


def test_an_index_of_something_else_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Many programs write an `index.json`: a run that has one in a directory beside its steps is begun all the same."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/index.json").write_text('{"pages": []}')
    with caplog.at_level(logging.WARNING, "treeckpt"):
        made = manager(tmp_path, keep=1)
        model = torch.nn.Linear(2, 2)
        assert made.latest() is None and made.resume(model, torch.optim.SGD(model.parameters())) is None
        for text in ("a", "b"):
            made.save(text, tree(text))
    with pytest.raises(tc.CheckpointNotFound):
        made.delete("site", force=True)
    assert caplog.text == "" and made.names() == ["b"] and (tmp_path / "site/index.json").exists()


def test_a_deletion_that_was_cut_short_is_ended(tmp_path: Path) -> None:
    made = manager(tmp_path, keep=1)
    made.save("a", tree("a"))
    made.save("b", tree("b"), pin=True)
    folder = RunDirectory(tmp_path).folder("b")
    with hold_lock(folder, "deleting"):
        take_index(folder, f"deleted.{tc.inspect(tmp_path / 'b').save_id}.{'0' * 16}.json", holds=None)
    (tmp_path / "b" / "pinned.json").unlink()
    made.save("c", tree("c"))
    assert not (tmp_path / "b").exists() and made.names() == ["c"]


def test_ranks_agree_on_a_text(tmp_path: Path) -> None:
    def act(comm: Any) -> Any:
        made = tc.Manager(tmp_path, comm=comm, keep=1)
        made.save("a", tree("a"))
        made.save("b", tree("b"))
        made.wait()
        return made.latest(), made.names(), made.restore()["text"]

    outcomes = on_ranks(3, act)
    assert errors_of(outcomes) == [None] * 3
    assert [outcome.value for outcome in outcomes] == [("b", ["b"], "b")] * 3

    def differ(comm: Any) -> Any:
        tc.Manager(tmp_path, comm=comm).restore(step="b" if comm.rank else "a")

    assert all(errors_of(on_ranks(2, differ)))


def test_a_training_resumes_from_a_text(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with manager(tmp_path) as made:
        made.save("tuned", tc.training.state(model, optimizer))
    other = torch.nn.Linear(3, 2)
    fresh = manager(tmp_path)
    report = fresh.resume(other, torch.optim.AdamW(other.parameters()))
    assert report is not None and report.path.endswith("tuned") and torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("leads_to", ["best", "nothing"])
def test_no_save_goes_through_a_link(tmp_path: Path, leads_to: str) -> None:
    made = manager(tmp_path)
    made.save("best", tree("best"))
    (tmp_path / "alias").symlink_to(tmp_path / leads_to)
    with pytest.raises(tc.CheckpointExists, match="alias: expected a directory, or nothing, found a link"):
        made.save("alias", tree("other"))
    assert made.restore(step="best")["text"] == "best" and made.names() == ["best"]
    assert not (tmp_path / "nothing").exists()


def test_the_count_goes_on_from_a_text(tmp_path: Path) -> None:
    """A run that ends with a text is not trained anew from its first step."""
    made = manager(tmp_path, keep=None)
    made.save("begun", tree("begun"))
    made.save(500, tree(500))
    made.count = 507
    made.save("final", tree("final"))
    resumed = manager(tmp_path, keep=None)
    assert resumed.latest() == "final" and resumed.restore()["text"] == "final" and resumed.count == 507
    resumed.count += 1
    resumed.save(resumed.count, tree(508))
    assert {info.name: info.abandoned for info in RunDirectory(tmp_path).checkpoints()} == {
        "step_00000508": False, "final": False, "step_00000500": False, "begun": False,
    }  # fmt: skip
    fresh = manager(tmp_path, keep=None)
    assert fresh.restore(step="begun")["text"] == "begun" and fresh.count == 0


def test_the_list_says_which_text_a_step_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = manager(tmp_path, keep=None)
    for step in (10, "tuned", 20):
        made.save(step, tree(step))
    assert main(["ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines[0].index("after")
    assert {line.split()[0]: line[at:].split()[0] for line in lines[1:4]} == {
        "step_00000020": "tuned", "tuned": "10", "step_00000010": "-",
    }  # fmt: skip


def test_commands_take_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = manager(tmp_path)
    for text in ("a", "b"):
        made.save(text, tree(text))
    assert main(["pin", str(tmp_path), "a"]) == 0 and (tmp_path / "a/pinned.json").exists()
    assert main(["unpin", str(tmp_path), "a"]) == 0
    assert main(["gc", str(tmp_path), "--keep-last", "1", "--dry-run"]) == 0
    assert "b" in capsys.readouterr().out
    assert main(["rm", str(tmp_path), "a", "--yes"]) == 0 and made.names() == ["b"]
    assert main(["ls", str(tmp_path)]) == 0 and "b" in capsys.readouterr().out
