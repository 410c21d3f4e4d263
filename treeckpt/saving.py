"""The save protocol: agree, write, report, commit.

1. Every rank says hello with two digests: of its inventory (what it brings) and of the contents that replicas must share. Equal
   inventories need no further talk: every rank computes the same global plan. Otherwise one rank of each kind sends its
   inventory, the coordinator joins them, and all get the result, which is kept for the next save.
2. Every rank writes its shards, durably, under names that hold the save id.
3. Every rank reports. If all did well the coordinator publishes timings and then the index, which is the commit.
4. Everybody learns how it ended. Any failure makes every rank raise an error that names rank, path and cause; what the
   failed save wrote is deleted, and an earlier index stays valid.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

from .core.assign import ArrayLeaf, assign
from .core.build import build_index
from .core.errors import CheckpointError, CheckpointExists, MismatchError, RankError, TreeckptError
from .core.events import Timings, encode_timings, timings_name
from .core.index import INDEX_NAME, encode_index, encode_manifest
from .core.inventory import Plenum, RankClass, array_leaves, digest_of, unify
from .core.plan import FilePlan, SavePlan, place, plan_save
from .core.records import FileTable, Index, file_table
from .core.runs import encode_runs
from .core.shard import ShardHeader, block_count, parse_shard_name, shard_name
from .core.spec import Value, encode_value
from .faults import Fault, fault_of, raise_faults
from .io.codec import read_index
from .io.comm import Comm
from .io.engine import SaveFile, entries_of, run_save
from .io.record import Recorder
from .io.store import Store
from .leaves.describe import Brought, bring, content_digests
from .reports import SaveReport

__all__ = ["SaveOptions", "save_tree"]


SETTLE = 30.0
"""Seconds that a finished save waits for the other ranks to learn of it."""


class SaveOptions(msgspec.Struct, frozen=True):
    """The knobs of a save; see `treeckpt.save`."""

    step: int | None = None
    overwrite: bool = False
    verify_replicas: bool = False
    allow_pickle: bool = False
    max_shard_bytes: int = 1 << 62
    namespace: str = ""


class _Hello(msgspec.Struct, array_like=True):
    fault: Fault | None
    url: str
    digest: bytes
    contents: bytes
    remembered: str
    own_values: dict[str, Value]


class _Terms(msgspec.Struct, array_like=True):
    """What the coordinator decides after hello."""

    faults: tuple[Fault, ...]
    save_id: str
    created_ns: int
    key: str
    """Names the global plan that follows from all inventories."""
    tellers: tuple[int, ...]
    """Ranks that send their contents and, if need be, their inventory; none where all are equal."""
    known: bool
    """Whether every rank remembers that plan, so that inventories need not be sent."""


class _Told(msgspec.Struct, array_like=True):
    group: RankClass | None
    """None where the plan is known."""
    contents: dict[str, bytes]
    values: dict[str, Value]


class _Joined(msgspec.Struct, array_like=True):
    faults: tuple[Fault, ...]
    plenum: Plenum | None


class _Done(msgspec.Struct, array_like=True):
    fault: Fault | None
    files: tuple[tuple[int, int, int, int, int], ...]
    timings: tuple[Any, ...]


class _Plans(msgspec.Struct, frozen=True):
    """What follows from the inventories alone, kept for the next save of the same tree."""

    key: str
    plenum: Plenum
    arrays: list[tuple[int, ArrayLeaf]]
    shares: list[Any]
    own: SavePlan


class _Save:
    """One save on one rank. The attributes are filled in the order of the protocol."""

    def __init__(self, store: Store, tree: object, comm: Comm, options: SaveOptions, metadata: Mapping[str, object]):
        self.store, self.tree, self.comm, self.options = store, tree, comm, options
        self.recorder = Recorder(comm.rank)
        self.custom = metadata
        self.metadata: dict[str, Value] = {}
        self.brought: Brought | None = None
        self.error: Exception | None = None
        self.previous: Index | None = None
        self.own_values: dict[tuple[str, int], Value] = {}
        self.values: dict[str, Value] = {}
        self.created: list[str] = []

    # 1. agree ------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        with self.recorder.span("flatten"):
            fault, brought = self._bring()
            self.brought = brought
        with self.recorder.span("agree"):
            contents = self._contents() if brought is not None and self.comm.size > 1 else {}
            plans: _Plans | None = self.comm.memory.get("plans")
            hello = _Hello(
                fault,
                self.store.url,
                digest_of(brought.inventory) if brought is not None else b"",
                xxhash.xxh3_128_digest(msgspec.json.encode(sorted(contents.items()))),
                plans.key if plans is not None else "",
                brought.own_values if brought is not None else {},
            )
            everyone = self.comm.gather(msgspec.msgpack.encode(hello))
            terms = self._terms([msgspec.msgpack.decode(m, type=_Hello) for m in everyone]) if everyone else None
            self.terms = self._share(terms, _Terms)
            raise_faults(self.terms.faults, self.store.url, self.comm, self.error)
            joined = self._tell(contents) if self.terms.tellers else None
        with self.recorder.span("plan"):
            self.plans = self._plan(joined)

    def _share(self, message: Any, kind: Any) -> Any:
        data = self.comm.broadcast(msgspec.msgpack.encode(message) if message is not None else None)
        return msgspec.msgpack.decode(data, type=kind)

    def _bring(self) -> tuple[Fault | None, Brought | None]:
        try:
            self.metadata = {key: encode_value(value, f"custom_metadata/{key}") for key, value in self.custom.items()}
            brought = bring(
                self.tree,
                rank=self.comm.rank,
                allow_pickle=self.options.allow_pickle,
                namespace=self.options.namespace,
            )
            self.values = brought.values
            return None, brought
        except Exception as error:
            self.error = error
            return fault_of(error, self.comm.rank), None

    def _contents(self) -> dict[str, bytes]:
        assert self.brought is not None, "asked for after bringing"
        return content_digests(self.brought, every=self.options.verify_replicas)

    def _terms(self, hellos: list[_Hello]) -> _Terms:
        faults: list[Fault] = [hello.fault for hello in hellos if hello.fault is not None]
        urls = {hello.url for hello in hellos}
        if len(urls) > 1:
            faults.append(fault_of(_different_paths(hellos), 0))
        if not faults:
            try:
                self._prepare()
            except Exception as error:
                self.error = error
                faults.append(fault_of(error, 0))
        for rank, hello in enumerate(hellos):
            self.own_values.update({(path, rank): value for path, value in hello.own_values.items()})
        self.hellos = hellos
        key = xxhash.xxh3_128_hexdigest(b"".join(hello.digest for hello in hellos))
        kinds: dict[tuple[bytes, bytes], int] = {}
        for rank, hello in enumerate(hellos):
            kinds.setdefault((hello.digest, hello.contents), rank)
        tellers = tuple(kinds.values()) if len(kinds) > 1 else ()
        known = all(hello.remembered == key for hello in hellos)
        return _Terms(tuple(faults), secrets.token_hex(8), self.recorder.created_ns, key, tellers, known)

    def _prepare(self) -> None:
        """The coordinator makes the directory, and looks for what stands there."""
        try:
            names = self.store.sizes()
            if INDEX_NAME in names:
                if not self.options.overwrite:
                    raise CheckpointExists(
                        self.store.url,
                        expected="no checkpoint",
                        found="one",
                        hint="Save to another path, or pass overwrite=True",
                    )
                self.previous = self._previous()
            self.store.prepare()
        except OSError as error:
            raise CheckpointError(
                self.store.url, expected="a directory that can be made and written", found=f"{error}"
            ) from error

    def _previous(self) -> Index | None:
        try:
            return read_index(self.store)
        except CheckpointError:
            return None  # what cannot be read can be overwritten; its shards stay for rebuild-index

    def _tell(self, contents: dict[str, bytes]) -> Plenum | None:
        rank = self.comm.rank
        message = b""
        if rank in self.terms.tellers:
            assert self.brought is not None, "faults were raised before"
            group = None if self.terms.known else RankClass(encode_runs([rank]), self.brought.inventory)
            message = msgspec.msgpack.encode(_Told(group, contents, self.brought.values))
        everyone = self.comm.gather(message)
        joined = None
        if everyone is not None:
            told = {r: msgspec.msgpack.decode(m, type=_Told) for r, m in enumerate(everyone) if m}
            joined = self._join(told)
        return self._raise_or_plenum(self._share(joined, _Joined))

    def _raise_or_plenum(self, joined: _Joined) -> Plenum | None:
        raise_faults(joined.faults, self.store.url, self.comm)
        return joined.plenum

    def _join(self, told: dict[int, _Told]) -> _Joined:
        """The coordinator compares contents by path and joins the inventories."""
        try:
            _compare({rank: tale.contents for rank, tale in told.items()})
            self.values = {path: value for tale in reversed(told.values()) for path, value in tale.values.items()}
            if self.terms.known:
                return _Joined((), None)
            groups: dict[bytes, list[int]] = {}
            for rank, hello in enumerate(self.hellos):
                groups.setdefault(hello.digest, []).append(rank)
            classes = [
                RankClass(encode_runs(ranks), told[ranks[0]].group.inventory)  # pyright: ignore[reportOptionalMemberAccess]
                for ranks in groups.values()
            ]
            return _Joined((), unify(classes, self.comm.size))
        except Exception as error:
            return _Joined((fault_of(error, 0),), None)

    def _plan(self, joined: Plenum | None) -> _Plans:
        kept: _Plans | None = self.comm.memory.get("plans")
        key = f"{self.terms.key}/{self.options.max_shard_bytes}"
        if kept is not None and kept.key == self.terms.key and self.comm.memory.get("plans_key") == key:
            return kept
        if joined is None and kept is not None and kept.key == self.terms.key:
            joined = kept.plenum
        if joined is None:
            assert self.brought is not None, "faults were raised before"
            everyone = encode_runs(range(self.comm.size))
            joined = unify([RankClass(everyone, self.brought.inventory)], self.comm.size)
        arrays = array_leaves(joined)
        leaves = [leaf for _, leaf in arrays]
        shares = assign(leaves)
        own = plan_save(leaves, shares, self.comm.rank, max_shard_bytes=self.options.max_shard_bytes)
        plans = _Plans(self.terms.key, joined, arrays, shares, own)
        self.comm.memory["plans"], self.comm.memory["plans_key"] = plans, key
        return plans

    # 2. write ------------------------------------------------------------------------------------------------

    def write(self) -> tuple[tuple[int, int, int, int, int], ...]:
        manifest = self._manifest() if self.comm.rank == 0 else None
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

    def _leaf(self, number: int) -> Any:
        return self.plans.plenum.leaves[self.plans.arrays[number][0]]

    def _describe(self, number: int) -> tuple[str, str, tuple[int, ...]]:
        leaf = self._leaf(number)
        return leaf.path.replace("~rank*", f"~rank{self.comm.rank}"), leaf.spec.dtype, leaf.spec.shape

    def _pieces(self, number: int) -> Any:
        assert self.brought is not None, "faults were raised before"
        return self.brought.sources[self._leaf(number).path].pieces

    def _manifest(self) -> str:
        return encode_manifest(self._index(None, FileTable()))

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

    def commit(self, fault: Fault | None, files: tuple[tuple[int, int, int, int, int], ...]) -> None:
        done = _Done(fault, files, tuple(msgspec.structs.astuple(span) for span in self.recorder.spans))
        with self.recorder.span("gather"):
            faults: list[Fault] = []
            everyone: list[bytes] | None = None
            try:
                everyone = self.comm.gather(msgspec.msgpack.encode(done))
            except RankError as error:
                faults.append(fault_of(error, 0))
        verdict = None
        if self.comm.rank == 0:
            reports = [msgspec.msgpack.decode(m, type=_Done) for m in everyone or ()]
            faults += [report.fault for report in reports if report.fault is not None]
            if not faults:
                try:
                    self._publish(reports)
                except Exception as error:
                    self.error = error
                    faults.append(fault_of(error, 0))
            if faults:
                self._leave_timings(reports, faults)
            verdict = _Joined(tuple(faults), None)
        ended = self._share(verdict, _Joined)
        if ended.faults:
            self._remove(self.created)
        try:
            self.comm.gather(b"", timeout=SETTLE)  # rank 0 may serve the messages: it goes when all have read
        except RankError:
            pass
        raise_faults(ended.faults, self.store.url, self.comm, self.error)

    def _publish(self, reports: list[_Done]) -> None:
        with self.recorder.span("publish"):
            rows = [row for report in reports for row in report.files]
            placed, totals = place([leaf for _, leaf in self.plans.arrays], self.plans.shares, self.comm.size)
            for rank, report in enumerate(reports):
                written = sum(row[3] for row in report.files)
                if written != int(totals[rank]):
                    raise AssertionError(f"rank {rank} wrote {written} bytes, the plan says {int(totals[rank])}")
            numbers = (number for number, _ in self.plans.arrays)
            index = self._index(dict(zip(numbers, placed, strict=True)), file_table(rows))
            data = encode_index(index)
            self._put_timings(reports, None)
            self.store.publish(INDEX_NAME, data, replace=self.options.overwrite)
        # committed: what follows may fail without harm
        try:
            self._put_timings(reports, None)
            self._remove_previous()
        except OSError:
            pass

    def _put_timings(self, reports: list[_Done], error: str | None) -> None:
        own = tuple(msgspec.structs.astuple(span) for span in self.recorder.spans)
        spans = [row for report in reports[1:] for row in report.timings]
        timings = msgspec.convert(
            {
                "save_id": self.terms.save_id,
                "step": self.options.step,
                "world": self.comm.size,
                "spans": [*own, *spans],
                "error": error,
            },
            Timings,
        )
        self.store.publish(timings_name(self.terms.save_id), encode_timings(timings), replace=True)

    def _leave_timings(self, reports: list[_Done], faults: list[Fault]) -> None:
        try:
            self._put_timings(reports, "; ".join(f"rank {f.rank}: {f.text}" for f in faults)[:4000])
        except Exception:
            return  # the error that is being reported matters more

    def _remove(self, names: list[str]) -> None:
        for name in names:
            try:
                self.store.delete(name)
            except OSError:
                continue

    def _remove_previous(self) -> None:
        if self.previous is None:
            return
        old = self.previous.save_id
        names = [name for name in self.store.sizes() if (p := parse_shard_name(name)) is not None and p[0] == old]
        self._remove([*names, timings_name(old)])


def _different_paths(hellos: list[_Hello]) -> TreeckptError:
    other = next(rank for rank, hello in enumerate(hellos) if hello.url != hellos[0].url)
    return CheckpointError(
        hellos[0].url, expected="the same path on every rank", found=f"{hellos[other].url} on rank {other}"
    )


def _compare(contents: dict[int, dict[str, bytes]]) -> None:
    seen: dict[str, tuple[int, bytes]] = {}
    for rank, digests in contents.items():
        for path, digest in digests.items():
            first, expected = seen.setdefault(path, (rank, digest))
            if digest != expected:
                raise MismatchError(
                    path,
                    expected=f"the same content on every rank that holds it, as on rank {first}",
                    found=f"another on rank {rank}",
                    hint="Wrap what each rank has of its own in tc.PerRank; if they should be equal, find out why not",
                )


def save_tree(
    store: Store, tree: object, comm: Comm, options: SaveOptions, metadata: Mapping[str, object]
) -> SaveReport:
    """Saves a tree; see `treeckpt.save`."""
    job = _Save(store, tree, comm, options, metadata)
    with job.recorder.span("save"):
        job.agree()
        fault, files = None, ()
        try:
            files = job.write()
        except Exception as error:
            job.error = error
            fault = fault_of(error, comm.rank)
        job.commit(fault, files)
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
