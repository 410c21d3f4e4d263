"""For tests of one's own, with pytest: `StoreSuite` for stores, and `thread_comms` for code that runs on ranks.

`StoreSuite` is what each `treeckpt.stores.Store` must pass, and those of treeckpt do.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from ._api import load, save
from ._core.public_names import publish
from ._io.comm.comm import thread_comms
from ._io.storage.memory import aligned_buffer
from ._io.storage.store import Store, Writer
from ._loading.run_load import verify
from .errors import CheckpointExists, CorruptError, StoreError

__all__ = ["StoreSuite", "read_range", "thread_comms", "write_file"]
publish(__name__, __all__, globals())

_SIZES = [0, 1, 4095, 4096, 4097, 3 * (1 << 20) + 5]
"""Bytes of files: none, one, those around a page, and some blocks with a part of one."""
_BLOCK = 1 << 20
"""Bytes of one write."""
_CLOCK_NS = 24 * 3600 * 10**9
"""Nanoseconds by which the clock of a store may differ from that of this machine."""


def _pattern(nbytes: int) -> bytes:
    # 251 is prime: bytes of a wrong page or block are other bytes
    return bytes(range(251)) * (nbytes // 251) + bytes(range(nbytes % 251))


def write_file(store: Store, name: str, data: bytes, *, commit: bool = True) -> Writer:
    """Writes a file in blocks, the last one first where the writer takes any order; returns its writer."""
    writer = store.create(name, len(data))
    starts = range(0, len(data), _BLOCK)
    for start in starts if writer.ordered else reversed(starts):
        block = data[start : start + _BLOCK]
        buffer = aligned_buffer(len(block))
        buffer[:] = block
        writer.write(start, buffer)
    if commit:
        writer.commit()
    return writer


def read_range(store: Store, name: str, start: int, stop: int) -> bytes:
    """Returns bytes of a file, read into aligned memory."""
    out = aligned_buffer(stop - start)[: stop - start]
    store.read_into(name, start, out)
    return bytes(out)


class StoreSuite:
    """What every store promises.

    A subclass has a fixture `store` that gives one without files, of which no other test knows:

        class TestMyStore(treeckpt.testing.StoreSuite):
            @pytest.fixture
            def store(self, tmp_path):
                return MyStore(tmp_path)
    """

    maps = True
    """Whether the store has `Store.map`; a subclass for one without sets it to False."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        raise NotImplementedError("a subclass gives the store")

    def test_nothing_is_there_before_anything_was_written(self, store: Store) -> None:
        assert store.sizes() == {}
        with pytest.raises(FileNotFoundError):
            store.read("index.json", limit=10)
        with pytest.raises(FileNotFoundError):
            store.read_into("a", 0, aligned_buffer(1))

    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_what_was_written_is_read_back(self, store: Store, nbytes: int) -> None:
        store.prepare()
        data = _pattern(nbytes)
        write_file(store, "a", data)
        assert store.sizes() == {"a": nbytes}
        assert store.read("a", limit=nbytes) == data
        assert read_range(store, "a", 0, nbytes) == data
        for start, stop in ((0, 1), (1, 2), (4090, 4100), (4096, 8192), (nbytes - 1, nbytes), (nbytes, nbytes)):
            if 0 <= start <= stop <= nbytes:
                assert read_range(store, "a", start, stop) == data[start:stop]
                if self.maps:
                    assert bytes(store.map("a", start, stop - start)) == data[start:stop]
        store.close()
        assert read_range(store, "a", 0, nbytes) == data, "a store can be used again once it was closed"

    def test_reading_past_the_end_is_an_error(self, store: Store) -> None:
        store.prepare()
        write_file(store, "a", _pattern(5000))
        for start, stop in ((0, 5001), (4999, 5001), (5000, 5001), (4096, 8192), (1 << 40, (1 << 40) + 1)):
            with pytest.raises(CorruptError, match="a: expected"):
                read_range(store, "a", start, stop)
            with pytest.raises(CorruptError if self.maps else StoreError, match="a: expected"):
                store.map("a", start, stop - start)
        with pytest.raises(CorruptError, match="a: expected at most 4999 bytes"):
            store.read("a", limit=4999)

    def test_pieces_of_memory_are_filled_one_after_the_other_or_not_at_all(self, store: Store) -> None:
        store.prepare()
        data = _pattern(9000)
        write_file(store, "a", data)
        read_range(store, "a", 0, 9000)
        # a thousand buffers are more than a store fills in one call to the system
        for start, lengths in ((0, [9000]), (100, [1, 4096, 0, 3]), (4096, [1] * 1000), (9000, [])):
            parts = [memoryview(bytearray(length)) for length in lengths]
            done = store.read_parts("a", start, parts)
            stop = start + sum(lengths)
            assert b"".join(parts) == (data[start:stop] if done else bytes(stop - start))
        try:
            assert not store.read_parts("a", 8000, [memoryview(bytearray(2000))])
        except CorruptError as error:
            assert "a: expected" in str(error)

    def test_an_aborted_file_is_gone(self, store: Store) -> None:
        store.prepare()
        writer = write_file(store, "a", _pattern(5000), commit=False)
        writer.abort()
        writer.abort()
        assert store.sizes() == {}
        write_file(store, "a", b"x")
        assert store.read("a", limit=1) == b"x"

    def test_aborting_after_commit_does_nothing(self, store: Store) -> None:
        store.prepare()
        write_file(store, "a", b"x").abort()
        assert store.sizes() == {"a": 1}

    def test_a_file_is_never_created_twice(self, store: Store) -> None:
        store.prepare()
        write_file(store, "a", b"first")
        with pytest.raises(FileExistsError):
            write_file(store, "a", b"new")
        assert store.read("a", limit=5) == b"first"

    def test_publishing_replaces_only_if_told(self, store: Store) -> None:
        store.prepare()
        store.publish("index.json", b"one", replace=False)
        with pytest.raises(CheckpointExists, match=r"index\.json: expected no such file, found one"):
            store.publish("index.json", b"two", replace=False)
        assert store.read("index.json", limit=9) == b"one"
        store.publish("index.json", b"three", replace=True)
        assert store.read("index.json", limit=9) == b"three"
        store.publish("other", b"", replace=True)
        assert store.sizes() == {"index.json": 5, "other": 0}, "nothing temporary is left"

    def test_a_file_whose_check_fails_does_not_get_its_name(self, store: Store) -> None:
        def fail() -> None:
            raise LookupError("the shards are gone")

        store.prepare()
        for replace in (False, True):
            with pytest.raises(LookupError, match="the shards are gone"):
                store.publish("index.json", b"one", replace=replace, check=fail)
        assert store.sizes() == {}

    def test_of_concurrent_publishers_exactly_one_wins(self, store: Store) -> None:
        store.prepare()
        won: list[bytes] = []
        start = threading.Barrier(8)

        def publish(number: int) -> None:
            data = bytes([number]) * 100_000
            start.wait()
            try:
                store.publish("index.json", data, replace=False)
                won.append(data)
            except CheckpointExists:
                pass

        threads = [threading.Thread(target=publish, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [store.read("index.json", limit=1 << 20)] == won
        assert list(store.sizes()) == ["index.json"]

    def test_a_reader_sees_the_old_or_the_new_file(self, store: Store) -> None:
        store.prepare()
        contents = {bytes([n]) * 50_000 for n in range(30)}
        store.publish("index.json", bytes(50_000), replace=True)
        done = threading.Event()
        torn: list[bytes] = []

        def look() -> None:
            while not done.is_set():
                data = store.read("index.json", limit=1 << 20)
                if data not in contents:
                    torn.append(data)

        thread = threading.Thread(target=look)
        thread.start()
        for data in contents:
            store.publish("index.json", data, replace=True)
        done.set()
        thread.join()
        assert not torn

    def test_deleting_twice_is_no_error(self, store: Store) -> None:
        store.prepare()
        write_file(store, "a", b"x")
        store.delete("a")
        store.delete("a")
        store.delete("never there")
        assert store.sizes() == {}

    def test_preparing_twice_is_no_error(self, store: Store) -> None:
        store.prepare()
        write_file(store, "a", b"x")
        store.prepare()
        assert store.sizes() == {"a": 1}

    def test_a_checkpoint_goes_through(self, store: Store) -> None:
        tree = {"w": np.arange(100_000), "small": np.arange(3, dtype="u1"), "none": np.empty((0, 2)), "v": 1}
        save(store, tree)
        back = load(store)
        assert all(np.array_equal(back[key], tree[key]) for key in tree)
        assert verify(store).ok

    def test_its_address_leads_to_the_same_files(self, store: Store) -> None:
        store.prepare()
        if (address := store.address()) is None:
            pytest.skip("only this process can open the store")
        pickle.loads(address).publish("index.json", b"one", replace=False)
        assert store.read("index.json", limit=9) == b"one"

    def test_entries_tell_sizes_and_when_files_were_written(self, store: Store) -> None:
        store.prepare()
        write_file(store, "a", b"one")
        entry = store.entries()["a"]
        assert (entry.nbytes, entry.regular, entry.link) == (3, True, False) and store.entry("a") == entry
        # a store that does not know when gives 0
        assert entry.modified_ns == 0 or abs(time.time_ns() - entry.modified_ns) < _CLOCK_NS
        assert store.entry("b") is None
        assert store.listed().entries() == store.entries()

    def test_a_version_that_is_no_longer_there_is_neither_replaced_nor_deleted(self, store: Store) -> None:
        if not store.traits.conditional:
            pytest.skip("the store is not conditional")
        store.publish("index.json", b"one", replace=False)
        data, version = store.read_version("index.json", limit=9)
        assert data == b"one"
        store.publish("index.json", b"other", replace=version)
        with pytest.raises(CheckpointExists):
            store.publish("index.json", b"late", replace=version)
        with pytest.raises(CheckpointExists):
            store.delete("index.json", version=version)
        store.delete("index.json", version=store.read_version("index.json", limit=9)[1])
        assert store.sizes() == {}

    def test_a_file_gets_another_name_and_takes_no_name_that_is_in_use(self, store: Store) -> None:
        if not store.traits.renames:
            pytest.skip("the store does not rename")
        store.prepare()
        for name in ("a", "b"):
            store.publish(name, name.encode(), replace=False)
        with pytest.raises(CheckpointExists):
            store.rename("a", "b", replace=False)
        assert store.sizes() == {"a": 1, "b": 1}
        store.rename("a", "c", replace=False)
        store.rename("c", "b", replace=True)
        assert store.sizes() == {"b": 1} and store.read("b", limit=1) == b"a"
        with pytest.raises(FileNotFoundError):
            store.rename("a", "c", replace=True)
