"""Background saves under uses that nobody plans: interrupts, odd arguments, comms that come and go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import arenas_open, files_open, savers_ended
from tests.helpers.world import errors_of, on_ranks
from treeckpt._io.comm import rounds
from treeckpt._io.comm.comm import SoloComm
from treeckpt._saving import background
from treeckpt._saving.session import session_of
from treeckpt._saving.staging import Arena

TREE = {"a": np.arange(1000)}


def interrupt(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["staging", "starting the thread"])
def test_an_interrupted_save_keeps_nothing_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    comm = SoloComm()

    def save() -> tc.Pending:
        return tc.save_async(tmp_path / "c", TREE, comm=comm, background=tc.BackgroundOptions(writer="thread"))

    with monkeypatch.context() as patch:
        if where == "staging":
            patch.setattr(background, "stage", interrupt)
        else:
            patch.setattr(threading.Thread, "start", interrupt)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                save()
    pool = session_of(comm).pool
    assert pool.leased == [False]
    assert save().result(60) is not None


def test_a_save_whose_thread_cannot_start_is_made_in_the_calling_thread_and_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    comm = SoloComm()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert tc.save_async(tmp_path / "c", TREE, comm=comm, background=tc.BackgroundOptions(writer="thread")).done()
        with pytest.raises(tc.CheckpointExists):  # there is nobody else to tell
            tc.save_async(tmp_path / "c", TREE, comm=comm, background=tc.BackgroundOptions(writer="thread"))
    assert tc.verify(tmp_path / "c").ok and "the calling thread writes, as none can be started" in caplog.text
    assert (
        tc.save_async(
            tmp_path / "d", TREE, comm=comm, background=tc.BackgroundOptions(writer="thread", timeout=60)
        ).result(60)
        is not None
    )


def test_comms_that_come_and_go_leave_no_descriptors(tmp_path: Path) -> None:
    tc.save_async(tmp_path / "first", TREE, comm=SoloComm(), background=tc.BackgroundOptions(writer="thread")).result(
        60
    )
    savers_ended()
    before = arenas_open()
    for number in range(3):
        tc.save_async(
            tmp_path / f"{number}", TREE, comm=SoloComm(), background=tc.BackgroundOptions(writer="thread")
        ).result(60)
    savers_ended()
    assert arenas_open() <= before and files_open(tmp_path) == []


def test_an_arena_that_is_dropped_is_unpinned_before_its_memory_goes() -> None:
    told: list[bool] = []

    def pin(address: int, nbytes: int) -> Any:
        def unpin() -> None:
            told.append(f"{address:x}-" in Path("/proc/self/maps").read_text())

        return unpin

    arena = Arena(1 << 21, pin)
    del arena
    assert told == [True]


@pytest.mark.parametrize("option", ["busy", "staging", "writer"])
def test_unknown_choices_are_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(tc.TreeckptError, match=f"(?s){option}.*'wiat'"):
        tc.save_async(tmp_path / "c", TREE, comm=SoloComm(), background=tc.BackgroundOptions(**{option: "wiat"}))
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_a_timeout_within_which_nobody_can_answer_is_refused(tmp_path: Path, timeout: float) -> None:
    with pytest.raises(tc.TreeckptError, match=r"a timeout of more than 0 seconds.*busy="):
        tc.save_async(tmp_path / "c", TREE, comm=SoloComm(), background=tc.BackgroundOptions(timeout=timeout))
    assert not (tmp_path / "c").exists()


def test_steps_may_be_integers_of_numpy(tmp_path: Path) -> None:
    tc.save(tmp_path / "a", TREE, step=np.int64(3))  # pyright: ignore[reportArgumentType]
    assert tc.inspect(tmp_path / "a").step == 3
    with pytest.raises(tc.TreeError, match="step"):
        tc.save(tmp_path / "b", TREE, step=3.5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_a_save_whose_writers_cannot_all_be_started_writes_the_right_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """As where a container may have no more processes: the pool keeps what it was given when a thread is refused."""
    start, started = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("treeckpt-write"):
            if len(started) >= allowed:
                raise RuntimeError("can't start new thread")
            started.append(thread.name)
        start(thread)

    tree = {"a": np.arange(7 << 20), "b": np.arange(5 << 20, dtype=np.int32)[::-1]}
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for attempt in range(3):
        started.clear()
        tc.save(tmp_path / str(attempt), tree)
        found = tc.load(tmp_path / str(attempt))
        assert all(np.array_equal(found[name], tree[name]) for name in tree)


@pytest.mark.parametrize("step", [-1, np.int64(-5)])
def test_a_step_below_0_is_refused_by_every_call(tmp_path: Path, step: Any) -> None:
    for save in (tc.save, tc.save_async):
        with pytest.raises(tc.TreeError, match=f"step: expected a step, 0 or more, found {step}"):
            save(tmp_path / "a", TREE, step=step)
    with pytest.raises(tc.TreeError, match="0 or more"):
        tc.Manager(tmp_path).restore(step=step)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", [0, -5, 2.5, True, "1GB"])
def test_shards_of_no_bytes_are_refused(tmp_path: Path, nbytes: Any) -> None:
    for save in (tc.save, tc.save_async):
        with pytest.raises(tc.TreeckptError, match=r"max_shard_bytes: expected .*1 or more.*None"):
            save(tmp_path / "a", TREE, max_shard_bytes=nbytes)
    assert list(tmp_path.iterdir()) == []


def test_shards_may_be_limited_by_integers_of_numpy(tmp_path: Path) -> None:
    report = tc.save(tmp_path / "a", {"a": np.arange(8), "b": np.arange(8)}, max_shard_bytes=np.int64(64))  # pyright: ignore[reportArgumentType]
    assert len(report.files) == 2


@pytest.mark.parametrize("path", ["", "file://"])
def test_an_empty_path_is_not_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[Callable[[], Any]] = [
        lambda: tc.save(path, TREE),
        lambda: tc.save_async(path, TREE),
        lambda: tc.load(path),
        lambda: tc.load_into(path, TREE),
        lambda: tc.inspect(path),
        lambda: tc.verify(path),
        lambda: tc.rebuild_index(path),
        lambda: tc.Manager(path),
    ]
    for call in calls:
        with pytest.raises(tc.CheckpointError, match=r"path: expected a path, .* found an empty one\. .*'\.'"):
            call()
    assert list(tmp_path.iterdir()) == []
    tc.save(".", TREE)
    assert tc.load(".")["a"].tolist() == TREE["a"].tolist()


def test_a_save_into_memory_that_its_ranks_do_not_share_fails() -> None:
    tree = {"own": tc.PerRank(np.arange(8))}
    stores = [tc.MemoryStore("apart") for _ in range(2)]
    for error in errors_of(on_ranks(2, lambda comm: tc.save(stores[comm.rank], tree, comm=comm))):
        assert isinstance(error, tc.RankError), error
        assert "the memory of one process" in str(error) and 'comm="alone"' in str(error)
    with pytest.raises(tc.CheckpointNotFound):
        tc.load(stores[0])
    shared = tc.MemoryStore("shared")
    assert errors_of(on_ranks(2, lambda comm: tc.save(shared, tree, comm=comm))) == [None, None]


@pytest.mark.parametrize("given", [[1], "note", 0, {1: "a"}, {("a",): 1}], ids=repr)
def test_metadata_that_is_no_mapping_by_name_is_refused_by_every_save(tmp_path: Path, given: Any) -> None:
    manager = tc.Manager(tmp_path / "run", background=False)
    for save in (
        lambda: tc.save(tmp_path / "c", TREE, custom_metadata=given),
        lambda: tc.save_async(tmp_path / "c", TREE, custom_metadata=given),
        lambda: manager.save(1, TREE, custom_metadata=given, metrics={"loss": 1}),
    ):
        with pytest.raises(
            tc.TreeError, match=r"custom_metadata: expected (values by name|names of type str)"
        ) as caught:
            save()
        assert type(next(iter(given)) if isinstance(given, dict) else given).__name__ in caught.value.found
        assert caught.value.hint
    assert not (tmp_path / "c" / "index.json").exists() and manager.steps() == []


def test_metadata_that_one_rank_gives_wrongly_is_told_to_all() -> None:
    store = tc.MemoryStore()
    wrong: dict[int, Any] = {0: None, 1: [1]}
    errors = errors_of(on_ranks(2, lambda comm: tc.save(store, {"w": 1}, comm=comm, custom_metadata=wrong[comm.rank])))
    assert all(isinstance(error, tc.RankError) and "custom_metadata" in error.ranks[1] for error in errors)


@pytest.mark.parametrize("given", [[b"a"], b"a", 3], ids=repr)
def test_files_that_are_no_mapping_are_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(tc.TreeError, match=r"files: expected contents or paths by name") as caught:
        tc.save(tmp_path / "c", TREE, files=given)
    assert type(given).__name__ in caught.value.found and caught.value.hint


def test_a_rank_alone_opens_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a round was opened")

    monkeypatch.setattr(rounds.Round, "__init__", fail)
    tc.save(tmp_path / "a", TREE)
    tc.save_async(tmp_path / "b", TREE, background=tc.BackgroundOptions(writer="thread")).result(60)
    with pytest.raises(tc.CheckpointExists):
        tc.save(tmp_path / "a", TREE)
    assert [np.array_equal(tc.load(tmp_path / name)["a"], TREE["a"]) for name in "ab"] == [True, True]
