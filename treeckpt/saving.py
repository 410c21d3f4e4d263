"""The save protocol: agree, write, report, commit.

1. Every rank says hello with two digests: of its inventory (what it brings) and of the contents that replicas must
   share. Equal inventories need no further talk: every rank computes the same global plan. Otherwise one rank of each
   kind sends its inventory, the coordinator joins them, and all get the result, which is kept for the next save.
2. Every rank writes its shards, durably, under names that hold the save id.
3. Every rank reports. If all did well the coordinator publishes timings and then the index, which is the commit.
4. Everybody learns how it ended. Any failure makes every rank raise an error that names rank, path and cause; what the
   failed save wrote is deleted, and an earlier index stays valid. A rank that is not told the end deletes nothing.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import xxhash

from .agreement import (
    Arguments,
    Done,
    Ended,
    FileRow,
    Hello,
    Joined,
    Terms,
    Told,
    Verdict,
    check_hellos,
    compare,
    is_known,
    join,
    key_of,
    tellers_of,
)
from .core.build import build_index
from .core.errors import CheckpointError, CheckpointExists, CheckpointNotFound
from .core.events import Timings, encode_timings, timings_name
from .core.index import INDEX_NAME, encode_index, encode_manifest
from .core.inventory import Plenum, digest_of
from .core.plan import FilePlan, place
from .core.records import FileTable, Index, file_table
from .core.shard import ShardHeader, block_count, parse_shard_name, shard_name
from .core.spec import Value, encode_value
from .faults import Fault, fault_of, raise_faults, silent_faults
from .io.codec import read_index
from .io.comm import Comm, members_of
from .io.engine import SaveFile, entries_of, run_save
from .io.record import Recorder
from .io.rounds import Round
from .io.store import Store
from .leaves.describe import Brought, bring, content_digests
from .plans import kept_plans, make_plans
from .reports import SaveReport

__all__ = ["SaveOptions", "save_tree"]


class SaveOptions(msgspec.Struct, frozen=True):
    """The knobs of a save; see `treeckpt.save`."""

    step: int | None = None
    overwrite: bool = False
    verify_replicas: bool = False
    allow_pickle: bool = False
    max_shard_bytes: int = 1 << 62
    namespace: str = ""


_Word = TypeVar("_Word", bound=Ended)
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class _Save:
    """One save on one rank. The attributes are filled in the order of the protocol."""

    def __init__(self, store: Store, tree: object, comm: Comm, options: SaveOptions, metadata: Mapping[str, object]):
        self.store, self.tree, self.comm, self.options = store, tree, comm, options
        self.recorder = Recorder(comm.rank)
        self.round = Round(comm, f"{store.url} step {options.step}")
        self.custom = metadata
        self.metadata: dict[str, Value] = {}
        self.brought: Brought | None = None
        self.contents: dict[str, bytes] = {}
        self.error: Exception | None = None
        self.previous: Index | None = None
        self.own_values: dict[tuple[str, int], Value] = {}
        self.values: dict[str, Value] = {}
        self.created: list[str] = []
        self.publishing = False

    def _fault(self, error: Exception, *, common: bool = False) -> Fault:
        """This rank's failure; those of the system become errors of ours."""
        if isinstance(error, OSError):
            ours = CheckpointError(
                self.store.url, expected="files that can be written", found=f"{type(error).__name__}: {error}"
            )
            ours.__cause__ = error
            error = ours
        self.error = error
        return fault_of(error, self.comm.rank, common=common)

    def _share(self, message: _Word | None, kind: type[_Word]) -> _Word:
        """The coordinator's word, on every rank; one with faults is its last."""
        data = _encode(message) if message is not None else None
        last = message is not None and (bool(message.faults) or isinstance(message, Verdict))
        return _decode(self.round.share(data, last=last), type=kind)

    # 1. agree ------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        missed = self.round.join()
        if missed is not None:
            raise_faults(_decode(missed, type=Ended).faults, self.store.url, self.comm)
        with self.recorder.span("flatten"):
            fault = self._bring()
        with self.recorder.span("agree"):
            heard = self.round.gather(_encode(self._hello(fault)))
            terms = self._terms({r: _decode(m, type=Hello) for r, m in heard.items()}) if heard is not None else None
            self.terms = self._share(terms, Terms)
            raise_faults(self.terms.faults, self.store.url, self.comm, cause=self.error)
            self.joined = self._tell() if self.terms.tellers else None

    def _bring(self) -> Fault | None:
        try:
            self.metadata = {key: encode_value(value, f"custom_metadata/{key}") for key, value in self.custom.items()}
            self.brought = bring(
                self.tree,
                rank=self.comm.rank,
                allow_pickle=self.options.allow_pickle,
                namespace=self.options.namespace,
                members=members_of(self.comm),
            )
            self.values = self.brought.values
        except Exception as error:
            return self._fault(error)
        return None

    def _hello(self, fault: Fault | None) -> Hello:
        digest = b""
        if self.brought is not None:
            try:
                digest = digest_of(self.brought.inventory)
                if self.comm.size > 1:
                    self.contents = content_digests(self.brought, every=self.options.verify_replicas)
            except Exception as error:
                fault = self._fault(error)
        kept, options = kept_plans(self.comm), self.options
        return Hello(
            fault,
            Arguments(
                self.store.url, options.step, options.overwrite, options.verify_replicas, options.max_shard_bytes
            ),
            digest,
            xxhash.xxh3_128_digest(msgspec.json.encode(sorted(self.contents.items()))),
            kept.key if kept is not None else "",
            self.brought.own_values if self.brought is not None else {},
        )

    def _terms(self, hellos: dict[int, Hello]) -> Terms:
        faults = [hello.fault for hello in hellos.values() if hello.fault is not None]
        faults += silent_faults(self.round.lost)
        if not faults:
            try:
                check_hellos(hellos)
                self._prepare()
            except OSError as error:
                faults.append(self._fault(error))
            except Exception as error:
                faults.append(self._fault(error, common=True))
        for rank, hello in hellos.items():
            self.own_values.update({(path, rank): value for path, value in hello.own_values.items()})
        self.hellos = hellos
        key = key_of(hellos)
        return Terms(
            tuple(faults),
            save_id=secrets.token_hex(8),
            created_ns=self.recorder.created_ns,
            key=key,
            tellers=tellers_of(hellos),
            known=is_known(hellos, key),
        )

    def _prepare(self) -> None:
        """The coordinator makes the directory, and looks for what stands there."""
        try:
            if INDEX_NAME in self.store.sizes():
                if not self.options.overwrite:
                    raise CheckpointExists(
                        self.store.url,
                        expected="no checkpoint",
                        found="one",
                        hint="Save to another path, or pass overwrite=True",
                    )
                with contextlib.suppress(CheckpointError):
                    # what cannot be read can be overwritten; its shards stay for rebuild-index
                    self.previous = read_index(self.store)
            self.store.prepare()
        except OSError as error:
            raise CheckpointError(
                self.store.url,
                expected="a directory that can be made and written",
                found=f"{type(error).__name__}: {error}",
                hint="Choose another path, or give the permission to write there",
            ) from error

    def _tell(self) -> Plenum | None:
        message = b""
        if self.comm.rank in self.terms.tellers:
            assert self.brought is not None, "faults were raised before"
            inventory = None if self.terms.known else self.brought.inventory
            message = _encode(Told(inventory, self.contents, self.brought.values))
        heard = self.round.gather(message)
        joined = self._join(heard) if heard is not None else None
        joined = self._share(joined, Joined)
        raise_faults(joined.faults, self.store.url, self.comm, cause=self.error)
        return joined.plenum

    def _join(self, heard: dict[int, bytes]) -> Joined:
        if self.round.lost:
            return Joined(tuple(silent_faults(self.round.lost)), None)
        try:
            told = {rank: _decode(message, type=Told) for rank, message in heard.items() if message}
            self.values = {path: value for tale in reversed(told.values()) for path, value in tale.values.items()}
            joined = None if self.terms.known else join(self.hellos, told, self.comm.size)  # shapes before contents
            compare({rank: tale.contents for rank, tale in told.items()})
            return Joined((), joined)
        except Exception as error:
            return Joined((self._fault(error, common=True),), None)

    # 2. write ------------------------------------------------------------------------------------------------

    def write(self) -> tuple[Fault | None, tuple[FileRow, ...]]:
        """Plans and writes; a failure is told to the others, not raised."""
        assert self.brought is not None, "faults were raised before"
        try:
            with self.recorder.span("plan"):
                self.plans = make_plans(
                    self.comm,
                    self.terms.key,
                    self.joined,
                    self.brought.inventory,
                    max_shard_bytes=self.options.max_shard_bytes,
                )
            return None, self._write()
        except Exception as error:
            return self._fault(error), ()

    def _write(self) -> tuple[FileRow, ...]:
        manifest = encode_manifest(self._index(None, FileTable())) if self.comm.rank == 0 else None
        files = [
            SaveFile(file, self._name(file), self._header(file, manifest if file.part == 0 else None))
            for file in self.plans.own.files
        ]
        sizes = run_save(self.store, files, self._pieces, self.recorder, created=self.created.append)
        return tuple(
            (self.comm.rank, file.plan.part, file.plan.stream, nbytes, header)
            for file, (header, nbytes) in zip(files, sizes, strict=True)
        )

    def _name(self, file: FilePlan) -> str:
        return shard_name(self.terms.save_id, self.comm.rank, self.comm.size, file.part)

    def _header(self, file: FilePlan, manifest: str | None) -> ShardHeader:
        return ShardHeader(
            self.terms.save_id,
            self.comm.rank,
            self.comm.size,
            file.part,
            file.stream,
            entries_of(file, self._describe),
            (0,) * block_count(file.nbytes),
            manifest=manifest,
        )

    def _describe(self, number: int) -> tuple[str, str, tuple[int, ...]]:
        leaf = self.plans.leaf(number)
        assert leaf.spec is not None, "arrays only are written"
        return leaf.path.replace("~rank*", f"~rank{self.comm.rank}"), leaf.spec.dtype, leaf.spec.shape

    def _pieces(self, number: int) -> Any:
        assert self.brought is not None, "faults were raised before"
        return self.brought.sources[self.plans.leaf(number).path].pieces

    def _index(self, placed: Any, files: FileTable) -> Index:
        return build_index(
            self.plans.plenum,
            placed,
            files,
            values=self.values,
            own_values=self.own_values,
            save_id=self.terms.save_id,
            step=self.options.step,
            created_ns=self.terms.created_ns,
            metadata=self.metadata,
        )

    # 3. report and commit ------------------------------------------------------------------------------------

    def commit(self, fault: Fault | None, files: tuple[FileRow, ...]) -> None:
        done = Done(fault, files, tuple(self.recorder.spans))
        with self.recorder.span("gather"):
            heard = self.round.gather(_encode(done))
        verdict = self._judge({r: _decode(m, type=Done) for r, m in heard.items()}) if heard is not None else None
        ended = self._share(verdict, Verdict)
        if ended.faults and not ended.in_place:
            self._remove(self.created)
        hints = {"hint": _IN_PLACE} if ended.in_place else {}
        raise_faults(ended.faults, self.store.url, self.comm, cause=self.error, **hints)

    def _judge(self, reports: dict[int, Done]) -> Verdict:
        """The coordinator commits if all did well."""
        faults = [report.fault for report in reports.values() if report.fault is not None]
        faults += silent_faults(self.round.lost)
        if not faults:
            try:
                self._publish(reports)
            except Exception as error:
                faults.append(self._fault(error, common=isinstance(error, CheckpointExists)))
        if not faults:
            with contextlib.suppress(Exception):  # it is committed: the rest may fail without harm
                self._put_timings(reports, None)
                self._remove_previous()
            return Verdict((), True)
        with contextlib.suppress(Exception):  # the error that is being reported matters more
            self._put_timings(reports, "; ".join(f"rank {f.rank}: {f.text}" for f in faults)[:4000])
        return Verdict(tuple(faults), self._may_be_in_place())

    def _publish(self, reports: dict[int, Done]) -> None:
        with self.recorder.span("publish"):
            rows = [row for report in reports.values() for row in report.files]
            placed, totals = place([leaf for _, leaf in self.plans.arrays], self.plans.shares, self.comm.size)
            for rank, report in reports.items():
                written = sum(row[3] for row in report.files)
                if written != int(totals[rank]):
                    raise AssertionError(f"rank {rank} wrote {written} bytes, the plan says {int(totals[rank])}")
            numbers = (number for number, _ in self.plans.arrays)
            data = encode_index(self._index(dict(zip(numbers, placed, strict=True)), file_table(rows)))
            self._put_timings(reports, None)
            self.publishing = True
            self.store.publish(INDEX_NAME, data, replace=self.options.overwrite)

    def _may_be_in_place(self) -> bool:
        """After a failure: whether the index of this save is there, or might be.

        Publishing can fail behind the rename, when the directory is synced.
        """
        if not self.publishing:
            return False
        try:
            return read_index(self.store).save_id == self.terms.save_id
        except CheckpointNotFound:
            return False
        except Exception:
            return True

    def _put_timings(self, reports: dict[int, Done], error: str | None) -> None:
        told = (span for rank, report in reports.items() if rank for span in report.timings)
        spans = (*self.recorder.spans, *told)
        timings = Timings(self.terms.save_id, self.options.step, self.comm.size, spans, error)
        self.store.publish(timings_name(self.terms.save_id), encode_timings(timings), replace=True)

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(Exception):
                self.store.delete(name)

    def _remove_previous(self) -> None:
        if self.previous is None:
            return
        old = self.previous.save_id
        names = [name for name in self.store.sizes() if (p := parse_shard_name(name)) is not None and p[0] == old]
        self._remove([*names, timings_name(old)])


_IN_PLACE = "The new index is in place, but may not survive a power loss; save again"


def save_tree(
    store: Store, tree: object, comm: Comm, options: SaveOptions, metadata: Mapping[str, object]
) -> SaveReport:
    """Saves a tree; see `treeckpt.save`."""
    job = _Save(store, tree, comm, options, metadata)
    with job.recorder.span("save"):
        job.agree()
        job.commit(*job.write())
    return SaveReport(
        store.url,
        job.terms.save_id,
        options.step,
        comm.size,
        job.plans.own.nbytes,
        tuple(job.created),
        job.recorder.seconds,
        tuple(job.recorder.spans),
    )
