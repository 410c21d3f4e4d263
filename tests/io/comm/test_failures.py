"""One rank's failure, at any moment of a save or load: all ranks raise one error, nothing is lost or left behind."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.elsewhere import elsewhere
from tests.helpers.world import (
    LONG,
    Faulty,
    Outcome,
    Patient,
    Switch,
    assert_equal,
    assert_holds,
    errors_of,
    on_ranks,
    small_tree,
    whole_tree,
)
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._core.format.shard_header import parse_shard_name
from treeckpt._core.format.timings import decode_timings
from treeckpt._core.text import seconds_text
from treeckpt._io.comm.comm import Comm, thread_comms
from treeckpt._io.storage.local_store import LocalStore
from treeckpt._io.storage.store import MemoryStore

WORLD = 3
CHANGING = ("prepare", "create", "write", "commit", "publish")
"""The store calls that a save cannot do without."""


def save(store: Any, comm: Comm, seed: int, **options: Any) -> tc.SaveReport:
    return tc.save(store, small_tree(comm.rank, WORLD, seed=seed), comm=comm, **options)


def shards(store: MemoryStore) -> set[str]:
    return {name for name in store.sizes() if parse_shard_name(name)}


def save_id_of(store: MemoryStore) -> str:
    return tc.inspect(store).save_id


class Attempt:
    """A save of three ranks in which one rank's store fails at a given call."""

    def __init__(self, culprit: int, switch: Switch, *, overwrite: bool) -> None:
        self.culprit, self.switch, self.overwrite = culprit, switch, overwrite
        self.store = MemoryStore("faulty")
        self.comms = thread_comms(WORLD, timeout=LONG)
        if overwrite:
            assert errors_of(self.save(seed=1, faulty=False)) == [None] * WORLD
        self.before = shards(self.store)
        self.outcomes = self.save(seed=2, faulty=True)

    def save(self, *, seed: int, faulty: bool) -> list[Outcome]:
        def act(comm: Comm) -> tc.SaveReport:
            store = Faulty(self.store, self.switch) if faulty and comm.rank == self.culprit else self.store
            return save(store, comm, seed, overwrite=self.overwrite)

        return on_ranks(self.comms, act)

    def check_failed(self) -> None:
        """All ranks raise one error that names culprit and cause; what was there before is there, and nothing else."""
        errors = errors_of(self.outcomes)
        texts = {str(error) for error in errors}
        assert len(texts) == 1 and all(isinstance(e, tc.TreeckptError) for e in errors), errors
        text = texts.pop()
        assert "injected" in text
        if isinstance(errors[0], tc.RankError):
            assert list(errors[0].ranks) == [self.culprit]
            assert "earlier checkpoint at this path is still valid" in text
        else:
            assert self.culprit == 0, "only what concerns the path itself is nobody's failure"
        if self.overwrite:
            assert_holds(self.store, seed=1)
        else:
            with pytest.raises(tc.CheckpointNotFound):
                tc.load(self.store)

    def check_clean(self) -> None:
        assert shards(self.store) == self.before, "no shard of the failed save is left"
        kept = {save_id_of(self.store)} if self.overwrite else set()
        left = {name for name in self.store.sizes() if name.startswith("timings.")}
        failed = [name for name in left if name.split(".")[1] not in kept]
        for name in failed:
            timings = decode_timings(bytes(self.store.files[name]), name)
            assert timings.error is not None and f"rank {self.culprit}" in timings.error
            assert {span.rank for span in timings.spans} == set(range(WORLD))

    def check_next_save(self) -> None:
        assert errors_of(self.save(seed=3, faulty=False)) == [None] * WORLD
        assert_holds(self.store, seed=3)


def test_a_report_of_one_rank_does_not_pass_its_bytes_off_as_the_checkpoints() -> None:
    store = MemoryStore()
    outcomes = on_ranks(WORLD, lambda comm: save(store, comm, 0))
    for report in (outcome.value for outcome in outcomes):
        assert f"by {WORLD} ranks in {seconds_text(report.seconds)}; this rank wrote " in str(report).splitlines()[0]
    alone = tc.save(MemoryStore(), {"a": np.arange(4)})
    assert "  32 B in " in str(alone) and "rank" not in str(alone).splitlines()[0]


def count(culprit: int, *, overwrite: bool, names: Any = CHANGING) -> int:
    switch = Switch(names=names)
    attempt = Attempt(culprit, switch, overwrite=overwrite)
    assert errors_of(attempt.outcomes) == [None] * WORLD
    assert_holds(attempt.store, seed=2)
    return len(switch.calls)


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("culprit", range(WORLD))
def test_a_failing_store_call_fails_the_save_on_all_ranks(culprit: int, overwrite: bool) -> None:
    for at in range(count(culprit, overwrite=overwrite)):
        switch = Switch(at, names=CHANGING)
        attempt = Attempt(culprit, switch, overwrite=overwrite)
        published = [name for name in switch.calls if name.startswith("publish timings")]
        if len(published) == 2 and switch.fired == published[-1] and switch.calls[-2] == f"publish {INDEX_NAME}":
            assert errors_of(attempt.outcomes) == [None] * WORLD, "it was committed before"
            assert_holds(attempt.store, seed=2)
            continue
        attempt.check_failed()
        attempt.check_clean()
        attempt.check_next_save()


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_store_call_that_fails_after_it_took_effect(culprit: int, overwrite: bool) -> None:
    for at in range(count(culprit, overwrite=overwrite)):
        switch = Switch(at, after=True, names=CHANGING)
        attempt = Attempt(culprit, switch, overwrite=overwrite)
        if switch.fired == f"publish {INDEX_NAME}":
            # the new index is in place, so its shards must stay, whatever is said of the save
            assert {type(error) for error in errors_of(attempt.outcomes)} == {tc.RankError}
            assert "index is in place" in str(attempt.outcomes[1].error)
            assert_holds(attempt.store, seed=2)
        elif errors_of(attempt.outcomes) == [None] * WORLD:
            assert switch.fired.startswith("publish timings")
            assert_holds(attempt.store, seed=2)
        else:
            attempt.check_failed()
            attempt.check_clean()
        if overwrite or INDEX_NAME not in attempt.store.sizes():
            attempt.check_next_save()


@pytest.mark.parametrize("at", range(12))
def test_reading_and_deleting_may_fail_without_harm(at: int) -> None:
    """Looking for what stands there, and removing the old files after the commit."""
    switch = Switch(at, names=("sizes", "read", "delete"))
    attempt = Attempt(0, switch, overwrite=True)
    if errors_of(attempt.outcomes) == [None] * WORLD:
        assert_holds(attempt.store, seed=2)
    else:
        attempt.check_failed()
        attempt.check_clean()
    attempt.check_next_save()


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, ValueError, KeyError, AssertionError])
@pytest.mark.parametrize("name", ["commit", "publish"])
def test_foreign_errors_of_a_store_are_named_too(kind: type[Exception], name: str) -> None:
    def act(call: str) -> None:
        raise kind(f"injected at {call}")

    attempt = Attempt(0, Switch(0, act=act, names=(name,)), overwrite=True)
    attempt.check_failed()
    attempt.check_clean()
    attempt.check_next_save()


def test_errors_after_the_commit_do_not_undo_it() -> None:
    def act(call: str) -> None:
        raise ValueError(f"injected at {call}")

    done = count(0, overwrite=True, names=("publish", "sizes", "delete"))
    for at in range(done):
        switch = Switch(at, act=act, names=("publish", "sizes", "delete"))
        attempt = Attempt(0, switch, overwrite=True)
        committed = f"publish {INDEX_NAME}" in switch.calls[:at]
        assert (errors_of(attempt.outcomes) == [None] * WORLD) == committed
        assert_holds(attempt.store, seed=2 if committed else 1)


def test_several_failing_ranks_are_all_named() -> None:
    store, comms = MemoryStore(), thread_comms(WORLD, timeout=LONG)

    def act(comm: Comm) -> None:
        save(Faulty(store, Switch(0, names=("commit",))) if comm.rank else store, comm, 1)

    for error in errors_of(on_ranks(comms, act)):
        assert isinstance(error, tc.RankError) and sorted(error.ranks) == [1, 2]
    assert not shards(store)


def test_a_disk_that_is_full_everywhere_is_one_error() -> None:
    store, comms = MemoryStore(), thread_comms(WORLD, timeout=LONG)

    def full(name: str) -> None:
        raise OSError(28, "No space left on device")

    for error in errors_of(on_ranks(comms, lambda c: save(Faulty(store, Switch(0, act=full, names=("write",))), c, 1))):
        assert isinstance(error, tc.CheckpointError) and "No space left on device" in str(error)


def test_on_one_rank_the_error_of_the_system_is_the_cause(tmp_path: Path) -> None:
    store = Faulty(tc.LocalStore(tmp_path / "c"), Switch(0, names=("commit",)))
    with pytest.raises(
        tc.CheckpointError, match=f"{tmp_path}/c: expected files that can be written, found OSError"
    ) as e:
        tc.save(store, whole_tree())
    assert isinstance(e.value.__cause__, OSError) and e.value.__cause__.errno == 5
    assert [p.name.split(".")[0] for p in (tmp_path / "c").iterdir()] == ["timings"]


# before anything is written -------------------------------------------------------------------------------------------
class Broken:
    """An array-like leaf no adapter knows."""


def nothing_written(store: MemoryStore) -> bool:
    return store.sizes() == {}


@pytest.mark.parametrize("culprit", range(WORLD))
def test_a_rank_that_cannot_flatten_its_tree_is_named(culprit: int) -> None:
    store, comms = MemoryStore(), thread_comms(WORLD, timeout=LONG)

    def act(comm: Comm) -> None:
        tree = small_tree(comm.rank, WORLD)
        if comm.rank == culprit:
            tree["nested"][0]["bad"] = Broken()
        tc.save(store, tree, comm=comm)

    for error in errors_of(on_ranks(comms, act)):
        assert isinstance(error, tc.RankError) and list(error.ranks) == [culprit]
        assert "nested/0/bad" in error.ranks[culprit] and "Broken" in error.ranks[culprit]
    assert nothing_written(store)
    assert errors_of(on_ranks(comms, lambda c: save(store, c, 1))) == [None] * WORLD


def test_a_leaf_that_is_bad_everywhere_is_one_plain_error() -> None:
    store = MemoryStore()
    for error in errors_of(on_ranks(WORLD, lambda c: tc.save(store, {"a": [Broken()]}, comm=c))):
        assert type(error) is tc.TreeError and error.path == "a/0" and error.hint
    assert nothing_written(store)


def test_an_array_that_cannot_be_read_is_named_before_anything_is_written() -> None:
    """Contents are hashed before the writes; the rank that fails there must not leave the others waiting."""
    import numpy as np
    import torch

    store, comms = MemoryStore(), thread_comms(WORLD, timeout=LONG)

    def act(comm: Comm) -> None:
        tensor = torch.ones(10)
        if comm.rank == 1:
            tensor.untyped_storage().resize_(0)
        tc.save(store, {"w": tensor, "n": np.ones(3)}, comm=comm)

    for error in errors_of(on_ranks(comms, act)):
        assert isinstance(error, tc.RankError) and list(error.ranks) == [1]
    assert nothing_written(store)


def test_a_rank_that_fails_to_plan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from treeckpt._saving import agree

    store, real = MemoryStore(), agree.compute_plan

    def compute_plan(key: str, tree: Any, rank: int, *rest: Any) -> Any:
        if rank == 2:
            raise MemoryError("no memory for a plan")
        return real(key, tree, rank, *rest)

    monkeypatch.setattr(agree, "compute_plan", compute_plan)
    for error in errors_of(on_ranks(WORLD, lambda c: save(store, c, 1))):
        assert isinstance(error, tc.RankError) and error.ranks == {2: "MemoryError: no memory for a plan"}
    assert not shards(store)


@pytest.mark.parametrize("culprit", range(WORLD))
def test_a_rank_that_never_calls_save_is_named_as_silent(culprit: int) -> None:
    store, comms = MemoryStore(), thread_comms(WORLD, timeout=LONG)
    waiting = [Patient(comm, culprit) for comm in comms]
    outcomes = on_ranks(waiting, lambda c: None if c.rank == culprit else save(store, c, 1))
    expected = [[0], [0]] if culprit == 0 else [[culprit], []]
    assert [comm.waited for comm in waiting if comm.rank != culprit] == expected, "nobody waits for it twice"
    for rank, error in enumerate(errors_of(outcomes)):
        if rank != culprit:
            assert isinstance(error, tc.RankError) and list(error.ranks) == [culprit]
            assert "silent" in error.ranks[culprit] and error.hint
    assert nothing_written(store)
    assert errors_of(on_ranks(comms, lambda c: save(store, c, 2, step=5))) == [None] * WORLD
    assert_holds(store, seed=2)


def test_a_rank_that_comes_late_gets_the_error_of_the_save_it_missed() -> None:
    store, comms = MemoryStore(), thread_comms(WORLD, timeout=LONG)
    on_ranks([Patient(comm, 2) for comm in comms[:2]], lambda c: save(store, c, 1, step=1))
    with pytest.raises(tc.RankError, match=r"rank 2: silent for 0\.1 s"):
        save(store, comms[2], 1, step=1)
    assert errors_of(on_ranks(comms, lambda c: save(store, c, 2, step=2))) == [None] * WORLD


def test_ranks_that_disagree_about_the_path_are_told(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        save(tmp_path / ("b" if comm.rank == 1 else "a"), comm, 1)

    for error in errors_of(on_ranks(WORLD, act)):
        assert type(error) is tc.MismatchError
        assert error.path == str(tmp_path / "a") and "on rank 1" in error.found and str(tmp_path / "b") in error.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"), [("overwrite", True), ("step", 7), ("max_shard_bytes", 100), ("verify_replicas", True)]
)
def test_ranks_that_disagree_about_an_argument_are_told(name: str, value: Any) -> None:
    store = MemoryStore()
    on_ranks(WORLD, lambda c: save(store, c, 1, overwrite=True))
    before = dict(store.files)
    outcomes = on_ranks(WORLD, lambda c: save(store, c, 2, **({name: value} if c.rank == 2 else {})))
    for error in errors_of(outcomes):
        assert type(error) is tc.MismatchError
        assert f"the same {name} on every rank" in error.expected and "on rank 2" in error.found and error.hint
    assert store.files == before


@pytest.mark.parametrize(
    ("give", "found"),
    [
        (lambda rank: {"note": "x", "seed": rank // 2}, "another value on rank 2"),
        (lambda rank: {"seed": 1} if rank == 2 else {"note": "x"}, "it on rank 2 alone"),
        (lambda rank: {"seed": 1} if rank == 1 else None, "it on rank 1 alone"),
        (lambda rank: {"note": "x", "seed": [1, {"deep": rank}]}, "another value on rank 1"),
        (lambda rank: {"note": "x", "seed": 1.5}, ""),
        (lambda rank: None if rank else {"note": "x", "seed": 3}, ""),
    ],
)
def test_custom_metadata_that_would_be_lost_stops_the_save(give: Any, found: str) -> None:
    store = MemoryStore()
    outcomes = on_ranks(WORLD, lambda c: tc.save(store, {"v": 1}, comm=c, custom_metadata=give(c.rank)))
    for error in errors_of(outcomes):
        if not found:
            assert error is None and tc.inspect(store).metadata == give(0)
            continue
        assert type(error) is tc.MismatchError and error.path == "custom_metadata/seed", error
        assert error.found == found and "rank 0" in error.expected and error.hint
    assert bool(found) == nothing_written(store)


def test_replicas_that_differ_stop_the_save() -> None:
    import numpy as np

    store = MemoryStore()
    for tree in (lambda r: {"a": {"lr": float(r == 2)}}, lambda r: {"a": {"lr": np.full(10, r == 2)}}):
        for error in errors_of(on_ranks(WORLD, lambda c, t=tree: tc.save(store, t(c.rank), comm=c))):
            assert type(error) is tc.MismatchError and error.path == "a/lr" and "rank 2" in error.found
    assert nothing_written(store)


# the end of a save ----------------------------------------------------------------------------------------------------
class _Deaf:
    """A comm that loses what rank 0 says last, as when rank 0 or the network is gone by then."""

    def __init__(self, inner: Comm) -> None:
        self.inner, self.rank, self.size, self.timeout = inner, inner.rank, inner.size, LONG
        self.state, self.heard = inner.state, set[str]()

    def post(self, key: str, data: bytes) -> None:
        self.inner.post(key, data)

    def drop(self, keys: Any) -> None:
        self.inner.drop(keys)

    def wait(self, keys: Any, timeout: float) -> list[bytes | None]:
        found = self.inner.wait(keys, timeout)
        if keys[-1].endswith("/all"):
            if len(self.heard - {keys[-1]}) == 2:  # after terms and joined trees
                return [None] * len(keys)
            self.heard.update(keys if found[-1] is not None else ())
            self.timeout = LONG if len(self.heard) < 2 else 0.1
        return found


@pytest.mark.parametrize("fails", [False, True], ids=["committed", "failed"])
def test_without_a_verdict_no_file_is_deleted(fails: bool) -> None:
    """The rank cannot know whether the index was published, so its shards must stay."""
    store, comms = MemoryStore(), list(thread_comms(WORLD, timeout=LONG))
    comms[1] = _Deaf(comms[1])  # pyright: ignore[reportArgumentType, reportCallIssue]

    def act(comm: Comm) -> None:
        save(Faulty(store, Switch(0, names=("commit",))) if fails and comm.rank == 2 else store, comm, 1)

    from treeckpt._io.comm import rounds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "LAST_READ_TIMEOUT", 0.2)
        errors = errors_of(on_ranks(comms, act))
    assert isinstance(errors[1], tc.RankError) and list(errors[1].ranks) == [0]
    assert "may be committed" in errors[1].hint
    if fails:
        assert [name.split("-")[1] for name in shards(store)] == ["00001"]
    else:
        assert errors[0] is errors[2] is None
        assert_holds(store, seed=1)


def test_another_save_that_commits_first_wins() -> None:
    """Two jobs save to one new path: one commits, the other is told and cleans up after itself."""
    store, done = MemoryStore(), threading.Event()

    def wait_for_other(name: str) -> None:
        elsewhere(tc.save, store, {"other": 1})
        done.set()

    slow = Faulty(store, Switch(0, act=wait_for_other, names=("commit",)))
    for error in errors_of(on_ranks(WORLD, lambda c: save(slow if c.rank == 0 else store, c, 1))):
        assert type(error) is tc.CheckpointExists
    assert done.is_set() and tc.load(store) == {"other": 1}
    assert len(shards(store)) == 1


def test_overwriting_removes_the_old_files_and_no_others(tmp_path: Path) -> None:
    on_ranks(WORLD, lambda c: save(tmp_path / "c", c, 1))
    (tmp_path / "c" / "notes.txt").write_text("mine")
    on_ranks(WORLD, lambda c: save(tmp_path / "c", c, 2, overwrite=True))
    names = [p.name for p in (tmp_path / "c").iterdir()]
    new = tc.inspect(tmp_path / "c").save_id
    assert sorted(names) == sorted(
        [INDEX_NAME, "notes.txt", f"timings.{new}.json", *(f.name for f in tc.inspect(tmp_path / "c").file_list)]
    )
    assert_holds(tmp_path / "c", seed=2)


@pytest.mark.parametrize("worlds", [(4, 2), (2, 4), (3, 3)], ids=str)
def test_a_checkpoint_overwritten_by_another_world_has_nothing_of_the_one_before(
    tmp_path: Path, worlds: tuple[int, int]
) -> None:
    def put(comm: Comm, seed: int) -> None:
        tc.save(tmp_path / "c", small_tree(comm.rank, comm.size, seed=seed), comm=comm, overwrite=seed > 0)

    for seed, world in enumerate(worlds):
        assert errors_of(on_ranks(world, lambda comm, seed=seed: put(comm, seed))) == [None] * world
    assert tc.inspect(tmp_path / "c").world == worlds[1]
    assert_holds(tmp_path / "c", seed=1)

    def act(comm: Comm) -> None:  # each rank, as it was cut at the second save
        target = small_tree(comm.rank, comm.size, seed=9)
        tc.load_into(tmp_path / "c", target, comm=comm)
        expected = small_tree(comm.rank, comm.size, seed=1)
        assert_equal(target["pieces"].local, expected["pieces"].local)
        assert_equal({**target, "pieces": 0}, {**expected, "pieces": 0})

    assert errors_of(on_ranks(worlds[1], act)) == [None] * worlds[1]


def test_fewer_leaves_than_ranks_are_saved_whole(tmp_path: Path) -> None:
    tree = {"n": np.arange(3)}
    assert errors_of(on_ranks(4, lambda c: tc.save(tmp_path / "c", tree, comm=c))) == [None] * 4
    assert_equal(tc.load(tmp_path / "c"), tree)
    assert tc.inspect(tmp_path / "c").nbytes == 24 and tc.verify(tmp_path / "c").ok


def test_overwriting_an_unreadable_checkpoint_works(tmp_path: Path) -> None:
    on_ranks(WORLD, lambda c: save(tmp_path / "c", c, 1))
    (tmp_path / "c" / INDEX_NAME).write_bytes(b"{")
    assert errors_of(on_ranks(WORLD, lambda c: save(tmp_path / "c", c, 2, overwrite=True))) == [None] * WORLD
    assert_holds(tmp_path / "c", seed=2)


# loads ----------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def saved() -> Iterator[MemoryStore]:
    store = MemoryStore("saved")
    assert errors_of(on_ranks(WORLD, lambda c: save(store, c, 1))) == [None] * WORLD
    yield store


Load = Callable[[Any], Any]


@pytest.mark.parametrize(
    "load",
    [
        lambda store: tc.load(store, fallback=tc.Fallback(per_rank="take")),
        lambda store: tc.load(store, read=tc.ReadOptions(copy=True), fallback=tc.Fallback(per_rank="take")),
        lambda store: tc.load(store, whole_tree(), fallback=tc.Fallback(per_rank="take")),
        lambda store: tc.verify(store),
        lambda store: tc.inspect(store),
    ],
    ids=["load", "copy", "like", "verify", "inspect"],
)
def test_a_read_that_fails_is_an_error_that_names_the_file(
    saved: MemoryStore, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    switch = Switch()
    load(Faulty(saved, switch))
    total = len(switch.calls)
    assert total >= 1
    for at in range(total):
        switch = Switch(at)
        try:
            found = load(Faulty(saved, switch))
        except (tc.CheckpointError, tc.StoreError) as error:
            name = switch.fired.partition(" ")[2]
            assert "injected" in str(error) and (name or saved.url) in str(error), (switch.fired, str(error))
        else:
            assert isinstance(found, tc.VerifyReport), switch.fired
            assert "injected" in (caplog.text if found.ok else str(found)), "or it was read again, with a warning"


def test_load_into_that_compares_first_leaves_every_target_untouched_when_a_read_fails(saved: MemoryStore) -> None:
    switch = Switch()
    target = whole_tree(seed=9)
    tc.load_into(
        Faulty(saved, switch), target, read=tc.ReadOptions(verify="first"), fallback=tc.Fallback(per_rank="take")
    )
    assert_equal(target, whole_tree(seed=1))
    checking = len(switch.calls) // 2
    for at in range(checking):
        target = whole_tree(seed=9)
        with pytest.raises((tc.CheckpointError, tc.StoreError), match="injected"):
            tc.load_into(
                Faulty(saved, Switch(at)),
                target,
                read=tc.ReadOptions(verify="first"),
                fallback=tc.Fallback(per_rank="take"),
            )
        assert_equal(target, whole_tree(seed=9))


@pytest.mark.parametrize("again", [1, 2])
def test_what_changes_after_it_was_compared_is_found_when_it_is_put_in_place(tmp_path: Path, again: int) -> None:
    class Changing(LocalStore):
        """Whose bytes change once all were read that often."""

        left = 0

        def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
            super().read_into(name, offset, out, shared=shared)
            if name.endswith(".safetensors") and offset:
                Changing.left -= len(out)
                if Changing.left < 0:
                    out[:] = bytes(len(out))

        def read_parts(self, name: str, offset: int, parts: Any, *, shared: bool = False) -> bool:
            return False

        @contextlib.contextmanager
        def mapped(self, name: str, offset: int, nbytes: int, *, fetch: bool) -> Iterator[None]:
            yield None

    tc.save(tmp_path / "c", {"w": np.ones(1 << 20, np.uint8)})
    target = {"w": np.full(1 << 20, 7, np.uint8)}
    Changing.left = again << 20
    if again == 1:
        with pytest.raises(tc.CorruptError, match=r"w: .*changed bytes"):
            tc.load_into(Changing(tmp_path / "c"), target, read=tc.ReadOptions(verify="first"))
    else:
        tc.load_into(Changing(tmp_path / "c"), target, read=tc.ReadOptions(verify="first"))
        assert (target["w"] == 1).all()


def test_an_object_that_cannot_give_its_state_fails_the_save_of_every_rank(tmp_path: Path) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("no state to give")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def act(comm: Any) -> Any:
        return tc.save(tmp_path / "c", {"object": Broken() if comm.rank else 1}, comm=comm)

    for error in errors_of(on_ranks(2, act)):
        assert error is not None and "no state to give" in str(error), error
    assert not (tmp_path / "c" / "index.json").exists()


# the same with leaders that speak for others --------------------------------------------------------------------------
@pytest.fixture
def in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the tests of small worlds run with four ranks, of which rank 2 speaks for rank 3."""
    comms = functools.partial(thread_comms, timeout=60.0, group_sizes=(2,))
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "WORLD", 4)
    monkeypatch.setattr(module, "thread_comms", comms)
    monkeypatch.setattr("tests.helpers.world.thread_comms", comms)


SUITE: tuple[tuple[Callable[..., None], tuple[Any, ...]], ...] = (
    (test_a_failing_store_call_fails_the_save_on_all_ranks, (2, True)),
    (test_a_failing_store_call_fails_the_save_on_all_ranks, (3, False)),
    (test_a_disk_that_is_full_everywhere_is_one_error, ()),
    (test_a_rank_that_cannot_flatten_its_tree_is_named, (3,)),
    (test_replicas_that_differ_stop_the_save, ()),
)


@pytest.mark.usefixtures("in_groups")
@pytest.mark.parametrize(("test", "arguments"), SUITE, ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_goes_wrong_ends_as_in_small_worlds(test: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    test(*arguments)
