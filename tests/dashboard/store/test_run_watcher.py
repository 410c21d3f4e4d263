"""The list of a run is kept up to date: what is inspected again, and what requests wait for."""

import os
import threading
import time
from concurrent import futures

import numpy as np
import pytest

import treeckpt as tc
from tests.dashboard.helpers import under_way
from tests.helpers.background import until
from tests.helpers.large import write_many
from tests.helpers.memory_run import MemoryRun
from treeckpt._core.format.files import PIN_NAME
from treeckpt._io.storage.local_store import LocalRun, LocalStore
from treeckpt._runs import catalog
from treeckpt_dashboard.runs.model import runs_page
from treeckpt_dashboard.store import watch
from treeckpt_dashboard.store.library import Library
from treeckpt_dashboard.store.watch import RunWatcher


def test_only_what_may_have_changed_is_looked_at_again(tmp_path):
    write_many(tmp_path / "run", 200)
    now, looked = [0.0], []
    library = Library([tmp_path / "run"])
    run = library.runs[0]

    def look(folder):
        looked.append(folder.name)
        return library.inspect_directory(run, folder)

    watch = RunWatcher(run.store, look, clock=lambda: now[0])
    watch.refresh(wait=300)
    assert sorted(looked) == sorted(run.store.names()) and looked[0] == "step_00020000"
    version, looked[:] = watch.version, []
    watch.refresh(wait=300)
    assert looked == []  # fresh still
    now[0] = 2.0
    (tmp_path / "run" / "step_00000100" / PIN_NAME).write_bytes(b"{}")
    watch.refresh(wait=300)
    assert looked[-1] == "step_00000100" and len(looked) <= 65 and watch.version == version + 1
    assert watch.infos[-1].pinned
    now[0] = 4.0
    (tmp_path / "run" / "step_00000100").rename(tmp_path / "gone")
    watch.refresh(wait=300)
    assert len(watch.infos) == 199


def test_a_small_run_is_looked_at_again_within_half_a_second(tmp_path):
    """A save that lasts a second is seen by whoever asks while it lasts."""
    write_many(tmp_path / "run", 3)
    now, library = [0.0], Library([tmp_path / "run"])
    [run] = library.runs

    def look(folder):
        time.sleep(0.05)  # a busy machine: what counts is the clock of the watcher
        now[0] += 0.01
        return library.inspect_directory(run, folder)

    watch = RunWatcher(run.store, look, clock=lambda: now[0])
    watch.refresh(wait=300)
    under_way(tmp_path / "run" / "step_00000007", [(500, "write")], world=1)
    now[0] += 0.4
    watch.refresh(wait=300)
    assert [info.name for info in watch.infos if info.saving] == ["step_00000007"]


def standing_still(path, after):
    """Returns a library whose scan of a run waits after so many directories, what lets it go on, and what it saw."""
    library, gate, seen = Library([path]), threading.Event(), []
    run = library.runs[0]

    def look(folder):
        seen.append(folder.name)
        if len(seen) > after:
            gate.wait(300)
        return library.inspect_directory(run, folder)

    library.watches[run.id] = RunWatcher(run.store, look)
    return library, gate, seen


def test_the_first_look_shows_how_far_it_is_and_does_not_block(tmp_path, monkeypatch):
    write_many(tmp_path / "run", 30)
    library, gate, seen = standing_still(tmp_path / "run", after=10)
    run = library.runs[0]
    with monkeypatch.context() as patch:
        patch.setattr("treeckpt_dashboard.store.watch.FIRST_WAIT_SECONDS", 0.3)
        runs_page(library)
        assert until(lambda: len(seen) > 10)  # and now it stands still
        part = runs_page(library).runs[0]
    assert (part.scan.complete, part.total, part.scan.total) == (False, 10, 30) and part.newest_step == 3000
    gate.set()
    library.watches[run.id].refresh(wait=300)
    part = runs_page(library).runs[0]
    assert part.scan.complete and part.total == 30


def test_a_full_page_is_shown_while_the_rest_is_looked_at(tmp_path):
    for step in range(1, 141):
        (tmp_path / f"step_{step:08d}").mkdir()
    library, gate, _ = standing_still(tmp_path, after=120)
    watch = library.watches[library.runs[0].id]
    while len(watch.infos) < 100:
        watch.refresh()
    assert watch.infos[0].step == 140 and not watch.progress.complete and len(watch.infos) <= 120
    gate.set()
    watch.refresh(wait=300)
    assert len(watch.infos) == 140 and watch.progress.complete


def test_a_run_whose_file_system_hangs_does_not_hold_up_the_others(tmp_path, monkeypatch):
    waits = []

    def counted(turns, seconds):
        waits.append(seconds)
        return futures.wait(turns, seconds)

    monkeypatch.setattr(watch, "_turns", watch._Turns())  # in which no scan of another test waits
    monkeypatch.setattr("treeckpt_dashboard.store.watch.TURN_SECONDS", 0.05)
    monkeypatch.setattr("treeckpt_dashboard.store.watch.wait_for", counted)
    for name in ("hangs", "works"):
        write_many(tmp_path / name, 30)
    library, gate, asked = Library([tmp_path / "hangs", tmp_path / "works"]), threading.Event(), threading.Event()
    first, second = library.runs

    def look(folder):
        asked.set()
        gate.wait(300)
        return library.inspect_directory(first, folder)

    library.watches[first.id] = RunWatcher(first.store, look)
    library.watches[first.id].start()
    assert asked.wait(60) and until(lambda: waits), "it hangs, and waits for its turn"
    library.watches[second.id].refresh(wait=300)
    assert library.watches[second.id].progress.complete and not library.watches[first.id].progress.seen
    assert waits == [0.05, 0.05, 0, 0, 0], "that of the first run, then of the second, which waits once"
    gate.set()
    library.watches[first.id].refresh(wait=300)
    assert library.watches[first.id].progress.complete


def test_runs_that_wait_long_for_their_turns_go_on_in_turn_as_long_as_others_do(tmp_path, monkeypatch):
    def patient(turns, seconds):
        """Waits as long as it takes until a turn has ended, its own or that of another run."""
        ended = watch._turns.ended
        assert until(lambda: turns[0].done() or watch._turns.ended != ended)
        return futures.wait(turns, 0)

    monkeypatch.setattr(watch, "_turns", watch._Turns())
    monkeypatch.setattr(watch, "wait_for", patient)
    for number in range(6):
        write_many(tmp_path / f"run-{number}", 16)
    library, at_work, most = Library([tmp_path / f"run-{number}" for number in range(6)]), set(), []

    def look(folder):
        at_work.add(threading.get_ident())
        most.append(len(at_work))
        time.sleep(0.01)  # so that another run that takes no turn would be at work meanwhile
        found = library.inspect_directory(library.runs[0], folder)
        at_work.discard(threading.get_ident())
        return found

    for run in library.runs:
        library.watches[run.id] = RunWatcher(run.store, look)
        library.watches[run.id].start()
    for run in library.runs:
        library.watches[run.id].refresh(wait=300)
    assert max(most) == 1 and all(one.progress.complete for one in library.watches.values())


def test_the_list_changes_seldom_while_a_run_is_first_scanned(tmp_path):
    for step in range(3000):
        (tmp_path / f"step_{step:08d}").mkdir()
    library, lengths = Library([tmp_path]), []
    run = library.runs[0]

    def look(folder):
        lengths.append(len(watch.infos))
        return library.inspect_directory(run, folder)

    watch = library.watches[run.id] = RunWatcher(run.store, look)
    watch.refresh(wait=300)
    assert len(watch.infos) == 3000 and watch.progress.complete
    assert len(set(lengths)) < 70 and 100 in lengths, "each time by one in eight, and for the first page"
    assert all(known - length <= known / 8 for known, length in enumerate(lengths))


def test_a_shard_that_is_cut_short_later_is_found_in_the_end(tmp_path):
    write_many(tmp_path / "run", 3)
    now = [0.0]
    library = Library([tmp_path / "run"], clock=lambda: now[0])
    assert runs_page(library).runs[0].complete == 3
    shard = next((tmp_path / "run" / "step_00000200").glob("shard*"))
    with open(shard, "r+b") as file:
        file.truncate(100)
    now[0] = 2.0
    assert runs_page(library).runs[0].statuses == {"complete": 2, "damaged": 1}


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_changes_of_a_run_are_those_of_its_folders(tmp_path, kind):
    if kind == "local":
        write_many(tmp_path / "run", 3)
        (tmp_path / "run" / ".hidden").mkdir()
        (tmp_path / "run" / "note").write_text("x")
        (tmp_path / "run" / "lost").symlink_to(tmp_path / "nowhere")
        (tmp_path / "run" / "link").symlink_to(tmp_path / "run" / "step_00000100")
        run = LocalRun(tmp_path / "run")
    else:
        run = MemoryRun("changes")
        run.folder("a").publish("x", b"1", replace=True)
    assert run.modified_times() == {name: run.folder(name).modified_ns() for name in run.names()} != {}


def test_a_list_never_calls_a_checkpoint_corrupt_that_is_replaced_while_it_is_looked_at(tmp_path, monkeypatch):
    path = tmp_path / "step_00000001"
    tc.save(path, {"w": np.ones(1000)})
    entries, times = LocalStore.entries, [1]

    def replaced(self):
        found = entries(self)
        if times[0]:
            times[0] -= 1
            tc.save(path, {"w": np.zeros(1000)}, overwrite=True)
        return found

    monkeypatch.setattr(LocalStore, "entries", replaced)
    assert catalog.read_info(path).status == "complete"


def test_a_page_does_not_wait_for_the_rest_of_a_large_run(tmp_path, monkeypatch):
    """A page is full; a scan before its half is not about to end."""
    write_many(tmp_path / "run", 203)
    library, gate, _ = standing_still(tmp_path / "run", after=101)
    monkeypatch.setattr("treeckpt_dashboard.store.watch.HARDLY", 3600)
    monkeypatch.setattr("treeckpt_dashboard.store.watch.FIRST_WAIT_SECONDS", 3600)
    watch = library.watches[library.runs[0].id]
    watch.refresh()
    assert len(watch.infos) >= 100 and not watch.progress.complete
    gate.set()
    watch.refresh(wait=300)


def test_the_start_reads_few_names_of_the_runs_in_a_folder(tmp_path, monkeypatch):
    """A folder of a hundred runs of ten thousand steps has a million directories."""
    for name in ("a", "b", "c"):
        for step in range(400):
            (tmp_path / "runs" / name / f"step_{step:08d}").mkdir(parents=True)
    (tmp_path / "runs" / "d").mkdir()
    read, scandir = [], os.scandir

    class Counted:
        def __init__(self, path):
            self._entries, self._counted = scandir(path), str(path).startswith(str(tmp_path))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self._entries.close()

        def __iter__(self):
            return self

        def __next__(self):
            entry = next(self._entries)
            if self._counted:  # scans of other tests may go on
                read.append(entry.name)
            return entry

        close = __exit__

    monkeypatch.setattr(os, "scandir", Counted)
    library = Library([tmp_path / "runs"])
    assert [run.name for run in library.runs] == ["a", "b", "c"] and not any(run.single for run in library.runs)
    assert len(read) < 100
    library._look_for_runs([run for run, _ in library._given])
    assert len(read) < 200 and len(library.runs) == 3
