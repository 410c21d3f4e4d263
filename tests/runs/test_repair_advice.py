"""The one command that is advised for what is wrong with a checkpoint does what is said of it."""

import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.corruption import flip
from tests.helpers.world import reseal, shards_of
from treeckpt._cli.main import main
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._io.storage.open import open_store
from treeckpt._runs.catalog import read_info, with_verification
from treeckpt._runs.repair_advice import repair_advice
from treeckpt._runs.verification import VerificationStore, cache_directory

TREE = {"a": np.arange(50_000), "b": np.arange(10)}


@pytest.fixture
def step(tmp_path, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "it's a run" / "step_00000001"
    tc.save(path, TREE, step=1, files={"notes.txt": b"hello"})
    return path


def advice_for(step):
    info = with_verification(read_info(step), open_store(step), VerificationStore(cache_directory()))
    return info, repair_advice(info)


def run(command):
    """Runs a command as a shell does; returns its exit code."""
    program, *arguments = shlex.split(command)
    assert program == "treeckpt"
    return main(arguments)


def change(step, at):
    [shard] = shards_of(step)
    shard.write_bytes(flip(shard.read_bytes(), at))


BY_REPAIR = {
    "the index is lost": lambda step: (step / INDEX_NAME).unlink(),
    "the index is damaged": lambda step: (step / INDEX_NAME).write_bytes(b"{"),
    "a shard goes on behind its end": lambda step: shards_of(step)[0].write_bytes(
        shards_of(step)[0].read_bytes() + b"more"
    ),
    "a header is damaged": lambda step: change(step, 20),
    "the timings are damaged": lambda step: next(step.glob("timings.*")).write_bytes(b"{"),
    "a sidecar file is lost, and its copy is not": lambda step: next(step.glob("file.*")).unlink(),
}


@pytest.mark.parametrize("name", BY_REPAIR)
def test_what_the_shards_prove_is_made_again_by_the_command(step, name, capsys):
    assert advice_for(step)[1] is None, "nothing is wrong"
    BY_REPAIR[name](step)
    if name.endswith(("header is damaged", "timings are damaged")):
        assert main(["verify", str(step)]) == 1
        assert f"treeckpt verify {shlex.quote(str(step))} --repair makes again" in capsys.readouterr().out
    _, advice = advice_for(step)
    assert advice.command == f"treeckpt verify {shlex.quote(str(step))} --repair" and "makes" in advice.effect
    assert run(advice.command) == 0 and tc.verify(step).ok
    assert np.array_equal(tc.load(step)["a"], TREE["a"])
    assert advice_for(step)[1] is None, "what was advised is done"


def lose(step, size):
    [shard] = shards_of(step)
    shard.unlink() if size is None else shard.write_bytes(shard.read_bytes()[:size])


BY_COPY = {
    "bytes of arrays are changed": lambda step: change(step, -10),
    "a shard is missing": lambda step: lose(step, None),
    "a shard is cut short": lambda step: lose(step, 5000),
    "a sidecar file and its copy are missing": lambda step: [file.unlink() for file in step.glob("*notes.txt")],
    "a sidecar file is changed": lambda step: next(step.glob("file.*")).write_bytes(b"hallo"),
}


@pytest.mark.parametrize("name", BY_COPY)
def test_what_is_lost_is_copied_back_and_then_verified_by_the_command(step, name, capsys):
    copy = shutil.copytree(step, step.parent.parent / "copy")
    BY_COPY[name](step)
    main(["verify", str(step)])
    assert "once the files were copied back" in capsys.readouterr().out
    _, advice = advice_for(step)
    assert advice.command == f"treeckpt verify {shlex.quote(str(step))}" and "copied back" in advice.effect
    assert run(advice.command) == 1, "not yet"
    for file in copy.iterdir():
        shutil.copy2(file, step / file.name)
    assert run(advice.command) == 0
    info, advice = advice_for(step)
    assert info.status == "complete" and info.intact and advice is None


def test_where_an_index_names_lost_shards_beside_those_of_the_save_before_that_comes_back(step, capsys):
    """As where a save was stopped for minutes, a clean-up took its shards, and it was killed behind its PUT."""
    before, copy = tc.inspect(step), shutil.copytree(step, step.parent.parent / "copy")
    tc.save(step, {"a": np.arange(3)}, step=1, overwrite=True)
    shutil.copy2(step / INDEX_NAME, copy / INDEX_NAME)
    shutil.rmtree(step)
    copy.rename(step)
    # neither a clean-up nor a save takes what is left for leftovers
    assert main(["gc", str(step)]) == 0
    with pytest.raises(tc.TreeckptError):
        tc.save(step, {"a": object()}, step=1, overwrite=True)
    assert main(["verify", str(step)]) == 1
    _, advice = advice_for(step)
    assert advice.command == f"treeckpt rebuild-index {shlex.quote(str(step))} --replace"
    told = capsys.readouterr().out
    assert advice.text in told and "treeckpt gc" not in told
    assert run(advice.command) == 0 and tc.inspect(step).save_id == before.save_id and tc.verify(step).ok
    assert advice_for(step)[1] is None


def test_an_index_of_a_newer_version_is_not_to_be_replaced(step):
    def newer(document):
        document["version"] = 99

    reseal(step, newer)
    info, advice = advice_for(step)
    assert info.status == "damaged" and "99" in info.error and advice is None


def killed(step, when):
    """Kills a save that writes into a directory."""
    code = """if True:
        import os, signal, sys
        import numpy as np
        import treeckpt as tc
        from treeckpt._io.storage import local_store
        def kill(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)
        publish = local_store.LocalStore.publish
        def at_the_commit(self, name, data, **options):
            kill() if name == "index.json" else publish(self, name, data, **options)
        if sys.argv[2] == "commit":
            local_store.LocalStore.publish = at_the_commit
        else:
            import treeckpt._io.storage.local_files
            from treeckpt._saving import shard_writer
            create = local_store.LocalStore.create
            def created(self, name, nbytes):
                writer = create(self, name, nbytes)
                type(writer).write = kill
                return writer
            local_store.LocalStore.create = created
        tc.save(sys.argv[1], {"a": np.arange(50_000)}, step=1)
    """
    subprocess.run([sys.executable, "-c", code, str(step), when], check=False)
    assert not (step / INDEX_NAME).exists() and shards_of(step)


def test_a_save_that_was_killed_before_its_commit_is_brought_back(step):
    shutil.rmtree(step)
    killed(step, "commit")
    info, advice = advice_for(step)
    assert info.saving[0].state == "killed" and info.fault == "index_lost"
    assert run(advice.command) == 0 and np.array_equal(tc.load(step)["a"], TREE["a"])


def test_what_a_killed_save_has_left_is_removed(step, capsys):
    shutil.rmtree(step)
    killed(step, "write")
    info, advice = advice_for(step)
    assert info.fault == "unfinished" and advice.command == f"treeckpt gc {shlex.quote(str(step))}"
    main(["ls", str(step.parent)])
    assert capsys.readouterr().out.count("treeckpt ") == 1 + 0, "one command"
    assert run(advice.command) == 0 and not step.exists()


def test_a_save_in_progress_needs_no_repair(step):
    (step / INDEX_NAME).unlink()
    from tests.dashboard.helpers import under_way

    under_way(step, [(10, "write")], world=1)
    assert advice_for(step)[1] is None
