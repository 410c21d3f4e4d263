"""Verdicts of verifications: what could not be read is none, and damage is known to all who use the checkpoint."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import treeckpt as tc
from tests.crash.syscalls import why_not
from tests.helpers.background import descriptors_left, in_child
from tests.helpers.corruption import flip
from tests.helpers.world import on_ranks
from treeckpt._cli.main import main
from treeckpt._core.format.files import step_name, verdict_name
from treeckpt._io.storage.open import open_store
from treeckpt._loading import verify as verify_module
from treeckpt._runs.discovery import scan
from treeckpt._runs.run import RunDirectory
from treeckpt._runs.verification import VerificationStore, fingerprint_of, found_part, shown_parts
from treeckpt.reports import Problem

UNREAD = 3
NOBODY = 65534


def save(run: Path, step: int, **options: Any) -> str:
    """Saves a step with 8 shards; returns the save id."""
    tree = {f"{n}": np.full(512, n + step, np.int32) for n in range(8)}
    return tc.save(run / step_name(step), tree, step=step, max_shard_bytes=2048, **options).save_id


def damage(run: Path, step: int) -> Path:
    """Changes a byte of a shard, which another change makes right again; returns its path."""
    shard = sorted((run / step_name(step)).glob("shard-*"))[3]
    shard.write_bytes(flip(shard.read_bytes(), shard.stat().st_size - 9))
    return shard


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved")
    for step in (1, 2, 3):
        save(run, step)
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(saved, tmp_path / "run")


def kept(run: Path) -> list[str]:
    """Verdicts beside the checkpoints of a run, and in the cache."""
    cached = (Path(os.environ["TREECKPT_CACHE"]) / "verified-1").glob("*.json")
    return [path.name for path in [*run.glob("*/damage.*"), *cached]]


def test_without_descriptors_nothing_is_called_damaged_and_the_exit_code_says_so(run: Path) -> None:
    def verify(*options: str) -> int:
        with descriptors_left(5):
            return main(["verify", str(run / step_name(3)), *options])

    code, text = in_child(verify)
    assert code == UNREAD and "parts could not be read" in text and "ulimit -n" in text and "problem" not in text
    code, text = in_child(lambda: verify("--json"))
    found = json.loads(text)
    assert (code, found["ok"], found["verdict"], found["report"]["problems"]) == (UNREAD, None, "unread", [])
    assert 0 < len(found["report"]["unread"]) < 8 and "Too many open files" in found["report"]["unread"][0][1]
    assert kept(run) == []
    assert main(["verify", str(run)]) == 0 and len(kept(run)) == 3, "the next one reads all"


def test_of_a_run_what_could_not_be_read_is_said_beside_the_rest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def verify() -> int:
        with descriptors_left(1):
            return main(["verify", str(run)])

    code, text = in_child(verify)
    assert code == UNREAD and "ulimit -n" in text and "Traceback" not in text and not kept(run)
    damage(run, 2)
    index = run / step_name(3) / "index.json"
    opened = os.open

    def refuse(path: Any, *rest: Any, **more: Any) -> int:
        if str(path) == str(index):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert main(["verify", str(run)]) == 1, "damage comes first"
    lines = capsys.readouterr().out.splitlines()
    assert "1 part could not be read; index.json" in lines[0] and "1 problem" in lines[1] and "intact" in lines[2]


def test_latest_never_passes_over_what_could_not_be_read(run: Path) -> None:
    def latest() -> int:
        with tc.Manager(run) as manager, descriptors_left(5):
            print(manager.latest(verify=True))
        return 0

    code, text = in_child(latest)
    assert code == 99 and text.startswith("StoreError") and "could not be read" in text and "ulimit -n" in text
    with tc.Manager(run) as manager:
        assert manager.latest(verify=True) == 3


def verified_with(run: Path, *inject: str, shard: Path) -> tuple[int, str]:
    """Runs `treeckpt verify` of step 3 as a program whose calls on one shard the kernel answers with errors."""
    calls = inject[0].partition(":")[0]
    options = ["-f", "-qq", "-o", "/dev/null", "-P", str(shard), "-e", f"trace={calls}", "-e", f"inject={inject[0]}"]
    command = [sys.executable, "-m", "treeckpt", "verify", str(run / step_name(3))]
    root = Path(tc.__file__).parents[1]
    done = subprocess.run(["strace", *options, *command], cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("inject", "text"),
    [
        ("?pread64,?preadv,?preadv2,?read:error=EIO", "Input/output error"),
        ("openat:error=EMFILE:when=1", "ulimit -n"),
        pytest.param("?pread64,?preadv,?preadv2:error=EIO:when=1", "Input/output error", marks=pytest.mark.slow),
    ],
    ids=["EIO", "EMFILE", "EIO for a moment"],
)
def test_an_error_that_the_kernel_gives_is_no_damage(run: Path, inject: str, text: str) -> None:
    if why := why_not():
        pytest.skip(why)
    shard = sorted((run / step_name(3)).glob("shard-*"))[4]
    assert (found := verified_with(run, inject, shard=shard))[0] == UNREAD and text in found[1], found
    assert "1 part could not be read" in found[1] and not kept(run)
    assert main(["verify", str(run / step_name(3))]) == 0, "the next one reads it"
    if "EIO" in inject:
        assert "on_corrupt='skip'" in found[1], "what to do if it stays"
        loaded = in_child(lambda: skip_eio(run / step_name(3), shard))
        assert loaded == (0, "7\n"), "what a disk can read is loaded"


def skip_eio(path: Path, shard: Path) -> int:
    read = tc.LocalStore.read_into

    def fails(self: Any, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        if name == shard.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        read(self, name, offset, out, shared=shared)

    tc.LocalStore.read_into = fails
    print(sum(leaf is not ... for leaf in tc.load(path, fallback=tc.Fallback(on_corrupt="skip")).values()))
    return 0


def test_for_want_of_descriptors_no_leaf_is_left_out_as_damaged(run: Path) -> None:
    def load() -> int:
        with descriptors_left(5):
            tc.load(run / step_name(3), fallback=tc.Fallback(on_corrupt="skip"))
        return 0

    code, text = in_child(load)
    assert code == 99 and text.startswith("StoreError") and "ulimit -n" in text


def test_bytes_that_only_a_second_try_could_read_are_compared_and_no_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[int] = []
    of = verify_module._error_of

    def once(store: Any, opened: Any, start: int, out: memoryview) -> Exception | None:
        if not failed:
            failed.append(start)
            return OSError(errno.EIO, os.strerror(errno.EIO))
        return of(store, opened, start, out)

    monkeypatch.setattr(verify_module, "_error_of", once)
    assert tc.verify(run / step_name(3)).ok and "only a second try could read them" in caplog.text


def test_damage_that_one_user_finds_keeps_the_good_step_from_the_clean_up_of_another(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = damage(run, 3)
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "of the one on call"))
    assert main(["verify", str(run / step_name(3))]) == 1
    [verdict] = (run / step_name(3)).glob("damage.*")
    found = json.loads(verdict.read_bytes())
    assert verdict.name == verdict_name(found["save_id"]) and found["total"] == 1 and "treeckpt verify" in found["by"]
    assert found["index_xxh3"] and found["ended_ns"] and shard.name == found["problems"][0]["file"]

    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "of the training"))
    with tc.Manager(run, keep=1, background=False) as manager:
        report = manager.clean()
        assert report.kept == {2: ("newest", "one of the last 1"), 3: ("damaged: counts for no policy",)}
        assert manager.latest(verify=True) == 2
    capsys.readouterr()
    assert main(["ls", str(run)]) == 0 and "damaged" in capsys.readouterr().out.splitlines()[1]
    assert [info.damaged for info in scan(run)] == [True, False], "the listing alone says it"

    damage(run, 3)  # a copy is put in its place
    assert main(["ls", "--json", str(run)]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert row["verification"]["changed"] and row["verification"]["total"] == 1, "until all is compared"
    with tc.Manager(run) as manager:
        assert manager.latest(verify=True) == 3, "what was written since is compared again"
    assert not list(run.glob("*/damage.*"))
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "of the one on call"))
    assert [info.damaged for info in scan(run)] == [False, False]
    [info, _] = scan(run)
    assert VerificationStore(tmp_path / "of the one on call").find(
        RunDirectory(run).folder(3), info.save_id, beside=False
    ) is None, "what the first one has in the cache no longer holds"  # fmt: skip


def test_a_training_that_finds_damage_keeps_it_for_its_own_clean_up(run: Path) -> None:
    damage(run, 3)
    with tc.Manager(run, keep=1, background=False) as manager:
        assert manager.latest(verify=True) == 2 and manager.clean().kept.keys() == {2, 3}


def test_the_step_that_a_restore_took_in_place_of_a_damaged_one_stays_until_the_next_save(run: Path) -> None:
    damage(run, 3)
    with tc.Manager(run, keep=1, background=False) as manager:
        assert manager.restore()["0"][0] == 2
        assert manager.clean().kept.keys() == {2, 3}, "as after a save that has failed"
    assert json.loads(next(run.glob("*/damage.*")).read_bytes())["complete"] is False


@pytest.mark.parametrize("how", ["saved again", "deleted", "cleaned"])
def test_a_verdict_goes_with_the_save_that_it_is_about(run: Path, how: str) -> None:
    damage(run, 3)
    assert main(["verify", str(run / step_name(3))]) == 1
    if how == "saved again":
        save(run, 3, overwrite=True)
    elif how == "deleted":
        tc.Manager(run).delete(3)
    else:
        shutil.copy2(next(run.glob("*/damage.*")), run / step_name(1) / verdict_name("0" * 16))
        assert tc.Manager(run).clean().removed[0].files == (verdict_name("0" * 16),)
        return
    assert not list(run.glob("*/damage.*")) and tc.Manager(run).best("no metric") is None
    assert not any(info.damaged for info in scan(run))


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 200, b"x" * (2 << 20)])
def test_a_verdict_that_cannot_be_understood_counts_by_its_name(run: Path, content: bytes) -> None:
    save_id = tc.inspect(run / step_name(3)).save_id
    (run / step_name(3) / verdict_name(save_id)).write_bytes(content)
    with tc.Manager(run, keep=1) as manager:
        assert manager.clean().kept.keys() == {2, 3}
        assert manager.latest(verify=True) in (2, 3)


def test_damage_in_very_many_places_with_long_texts_is_known_afterwards(run: Path) -> None:
    folder, [save_id] = open_store(run / step_name(3)), [info.save_id for info in scan(run) if info.step == 3]
    part = Problem(file=sorted((run / step_name(3)).glob("shard-*"))[0].name, text="\U0001d54f" * 2000)
    store, problems = VerificationStore(run.parent / "cache"), shown_parts([part] * 20_000)
    fingerprint = fingerprint_of(folder.entries(), save_id or "")
    for unread in ([], problems):
        verdict = found_part(save_id or "", fingerprint, problems, by="a test")
        store.record(folder, msgspec.structs.replace(verdict, unread=unread), beside=False)
        found = store.find(folder, save_id, beside=False)
        assert found is not None and found.total == len(found.problems) == 10_000


def test_terminal_escapes_in_a_verdict_are_shown_as_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run, 3)
    assert main(["verify", str(run / step_name(3))]) == 1
    [verdict] = run.glob("*/damage.*")
    found = json.loads(verdict.read_bytes())
    verdict.write_text(json.dumps(found | {"by": "\x1b[2J", "problems": [{"file": "\x1b[31m", "text": "a\nb"}]}))
    capsys.readouterr()
    assert main(["ls", str(run)]) == 0
    assert "\x1b" not in (text := capsys.readouterr().out) and "a\nb" not in text


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's files need a superuser")
def test_where_nothing_can_be_written_the_cache_has_it_and_the_report_says_so() -> None:
    base = Path(tempfile.mkdtemp())
    try:
        base.chmod(stat.S_IRWXU | stat.S_IROTH | stat.S_IXOTH)
        save(base / "run", 3)
        shard = damage(base / "run", 3)
        cache = base / "cache"
        cache.mkdir()
        os.chown(cache, NOBODY, NOBODY)

        def verify() -> int:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.environ["TREECKPT_CACHE"] = str(cache)
            return main(["verify", str(base / "run" / step_name(3))])

        code, text = in_child(verify)
        assert code == 1 and "only the cache of this user has that it is damaged" in text, text
        assert len(list(cache.glob("*/*.json"))) == 1 and not list(base.glob("run/*/damage.*"))
        shard.chmod(0)
        code, text = in_child(verify)
        assert code == UNREAD and "Permission denied" in text and "Give this user the permission" in text, text
        assert len(list(cache.glob("*/*.json"))) == 1, "what was known stays"
    finally:
        shutil.rmtree(base)


def without_cache(run: Path) -> str:
    """What `best`, `latest`, `clean` and `restore` say where the newest of 3 steps is damaged."""
    with tc.Manager(run, keep=9, background=False) as manager:
        best, clean = manager.best("loss", mode="min"), manager.clean()
        return f"{best} {manager.latest(verify=True)} {sorted(clean.kept)} {manager.restore()['0'][0]}"


def test_a_cache_that_cannot_be_listed_counts_as_empty(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage(run, 3)
    with tc.Manager(run, keep=9, background=False) as manager:
        manager.save(4, {"0": np.full(512, 4)}, metrics={"loss": 0.5})
    (run.parent / "cache").mkdir()
    (run.parent / "cache" / "verified-1").write_bytes(b"")  # has a time, and is no directory
    assert without_cache(run) == "4 4 [1, 2, 3, 4] 4"
    [shard] = (run / step_name(4)).glob("shard-*")
    shard.write_bytes(flip(shard.read_bytes(), shard.stat().st_size - 9))
    assert without_cache(run) == "4 2 [1, 2, 3, 4] 2"
    assert "could not be written to the cache" in caplog.text and len(list(run.glob("*/damage.*"))) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser becomes a user without an entry")
def test_a_user_without_a_home_gets_the_step_before_a_damaged_one() -> None:
    base, number = Path(tempfile.mkdtemp()), 54321

    def ask() -> int:
        os.setgroups([])
        os.setgid(number)
        os.setuid(number)
        for name in ("TREECKPT_CACHE", "HOME", "XDG_CACHE_HOME"):
            os.environ.pop(name, None)
        with pytest.raises(RuntimeError):
            Path.home()
        print(without_cache(base / "run"))
        shard = damage(base / "run", 2)
        print(main(["verify", str(shard.parent)]), main(["ls", str(base / "run")]))
        return main(["verify", "--statistics", str(base / "run" / step_name(1))])

    try:
        base.chmod(stat.S_IRWXU | stat.S_IRWXO)
        with tc.Manager(base / "run", background=False, max_shard_bytes=2048) as manager:
            for step in (1, 2, 3):
                manager.save(step, {f"{n}": np.full(512, step, np.int32) for n in range(8)}, metrics={"loss": step})
        damage(base / "run", 3)
        for path in (base / "run").rglob("*"):
            os.chown(path, number, number)
        os.chown(base / "run", number, number)
        code, text = in_child(ask)
        assert "1 2 [1, 2, 3] 2\n" in text and "1 0\n" in text and "no home directory" in text, text
        assert code not in (0, 99), text
    finally:
        shutil.rmtree(base)


def test_what_cannot_be_kept_of_a_load_never_ends_the_restore_on_one_rank_alone(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damage(run, 3)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(VerificationStore, "record", fail)
    found = on_ranks(2, lambda comm: tc.Manager(run, comm=comm).restore()["0"][0])
    assert [one.value for one in found] == [2, 2], found
    assert "could not be kept: RuntimeError: no such thing" in caplog.text
