"""A store of one's own is opened by the URLs of a scheme that was registered for it: files in an SQLite database."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import treeckpt as tc
from treeckpt import stores
from treeckpt._cli.main import main
from treeckpt._io.storage import open as opening
from treeckpt.testing import StoreSuite

SCHEMA = "CREATE TABLE IF NOT EXISTS files (folder TEXT, name TEXT, data BLOB, ns INT, PRIMARY KEY (folder, name))"


class SqliteStore(stores.Store):
    """The files of a checkpoint as rows of a table."""

    def __init__(self, url: str) -> None:
        self._url = url
        database, _, self.folder = url.partition("://")[2].partition("?")
        self.database = Path(database)

    @property
    def url(self) -> str:
        return self._url

    @property
    def name(self) -> str:
        return self.folder

    def rows(self, text: str, *values: object) -> list[tuple]:
        with closing(sqlite3.connect(self.database, timeout=60)) as database, database:
            database.execute(SCHEMA)
            return database.execute(text, values).fetchall()

    def entries(self) -> dict[str, stores.DirectoryEntry]:
        found = self.rows("SELECT name, length(data), ns FROM files WHERE folder = ?", self.folder)
        return {name: stores.DirectoryEntry(nbytes, ns) for name, nbytes, ns in found}

    def _data(self, name: str) -> bytes:
        found = self.rows("SELECT data FROM files WHERE folder = ? AND name = ?", self.folder, name)
        if not found:
            raise FileNotFoundError(f"{self.url}/{name}")
        return found[0][0]

    def read(self, name: str, *, limit: int) -> bytes:
        data = self._data(name)
        if len(data) > limit:
            raise tc.CorruptError(f"{self.url}/{name}", expected=f"at most {limit} bytes", found=f"{len(data)}")
        return data

    def read_into(self, name: str, offset: int, out: memoryview, *, shared: bool = False) -> None:
        data = self._data(name)[offset : offset + len(out)]
        if len(data) < len(out):
            raise tc.CorruptError(f"{self.url}/{name}", expected=f"{len(out)} bytes at {offset}", found=f"{len(data)}")
        out[:] = data

    def create(self, name: str, nbytes: int) -> stores.Writer:
        return SqliteWriter(self, name, nbytes)

    def publish(
        self,
        name: str,
        data: bytes,
        *,
        replace: bool | stores.VersionTag,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        check()
        verb = "INSERT OR REPLACE" if replace else "INSERT"
        try:
            self.rows(f"{verb} INTO files VALUES (?, ?, ?, ?)", self.folder, name, bytes(data), time.time_ns())
        except sqlite3.IntegrityError as error:
            raise tc.CheckpointExists(f"{self.url}/{name}", expected="no such file", found="one") from error

    def delete(self, name: str, *, version: stores.VersionTag | None = None) -> None:
        self.rows("DELETE FROM files WHERE folder = ? AND name = ?", self.folder, name)


class SqliteWriter:
    ordered = False

    def __init__(self, store: SqliteStore, name: str, nbytes: int) -> None:
        self.store, self.name, self.data = store, name, bytearray(nbytes)
        if name in store.entries():
            raise FileExistsError(f"{store.url}/{name}")

    def write(self, offset: int, data: memoryview) -> None:
        if offset + len(data) > len(self.data):
            raise ValueError("past the end of the file")
        self.data[offset : offset + len(data)] = data

    def commit(self) -> None:
        self.store.publish(self.name, self.data, replace=False)

    def abort(self) -> None:
        self.data.clear()


class SqliteRun(stores.RunStore):
    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def names(self) -> list[str]:
        found = SqliteStore(self.url).rows("SELECT DISTINCT folder FROM files ORDER BY folder")
        return [folder for (folder,) in found if not folder.startswith(".")]

    def folder(self, name: str) -> stores.Store:
        return SqliteStore(f"{self.url}?{name}")


@pytest.fixture(autouse=True)
def scheme(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(opening, "_SCHEMES", dict(opening._SCHEMES))
    stores.register("sqlite", SqliteStore, SqliteRun)
    yield


class TestAStoreBehindAUrl(StoreSuite):
    maps = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[stores.Store]:
        yield opening.open_store(f"sqlite://{tmp_path}/files.db?c")


def test_a_manager_and_commands_take_the_url_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite://{tmp_path}/run.db"
    with tc.Manager(url, keep=2, background=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": np.full(70_000, step)})
    assert tc.Manager(url).steps() == [2, 3] and tc.Manager(url).restore()["w"].tolist() == [3] * 70_000
    assert tc.load(f"{url}?step_00000002", select="w")["w"][0] == 2 and tc.verify(f"{url}?step_00000003").ok
    assert main(["ls", url]) == 0
    assert "step_00000003" in capsys.readouterr().out
    tc.save_async(f"{url}?other", {"n": 1}).result()
    assert tc.load(f"{url}?other") == {"n": 1}


def test_a_scheme_that_is_taken_is_refused_and_one_that_is_defined_again_is_not() -> None:
    stores.register("sqlite", SqliteStore, SqliteRun)
    for taken in ("sqlite", "s3"):
        with pytest.raises(tc.TreeckptError, match=f"found '{taken}', which is"):
            stores.register(taken, tc.MemoryStore)
    for bad in ("file", "local", "Mine", "a b", "", 3):
        with pytest.raises(tc.TreeckptError, match="expected a scheme"):
            stores.register(bad, SqliteStore)  # pyright: ignore[reportArgumentType]


def test_a_scheme_of_checkpoints_alone_says_so_of_a_run(tmp_path: Path) -> None:
    stores.register("shelf", tc.MemoryStore)
    with pytest.raises(tc.StoreError, match=r"Give treeckpt\.stores\.register\('shelf', \.\.\.\) a `run` too"):
        tc.Manager("shelf://run")


def test_what_opens_no_store_is_named() -> None:
    with pytest.raises(tc.TreeckptError, match="scheme: expected functions of a URL, found 3 and None"):
        stores.register("three", 3)  # pyright: ignore[reportArgumentType]
    stores.register("nothing", lambda url: None, lambda url: None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(tc.StoreError, match=r"nothing://a: expected a Store from the function .*, found a NoneType"):
        tc.load("nothing://a")
    with pytest.raises(tc.StoreError, match=r"nothing://a: expected a RunStore from the function .*, found a NoneType"):
        tc.Manager("nothing://a")
