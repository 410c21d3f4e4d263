"""Collective steps of all ranks: every rank reports, rank 0 concludes, and every rank gets the result or raises.

`Exchange` carries out such steps in one round; `from_rank0`, `gather_errors` and `all_gather` are calls of one step. A
rank that does not call in time is named in the error that the others raise. `gather_results` and `from_rank` do the
same through an all-gather of the caller's, as of a process group. One rank's failure is a message, a `Fault`, for which
every rank raises an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from ... import errors
from ..._core.format.decoding import decode_msgpack
from ...errors import MismatchError, RankError, StoreError, TreeckptError
from .comm import Comm
from .rounds import Round

NOT_COMMITTED = "Nothing was committed; an earlier checkpoint at this path is still valid"
"""The hint of the error of a save that failed."""
_KINDS: dict[str, type[TreeckptError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    # a `RankError` is made of the causes of several ranks, which a `Fault` does not carry
    if isinstance(kind, type) and issubclass(kind, TreeckptError) and kind is not RankError
}
"""Error classes of treeckpt that can be raised for the failure of another rank."""


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An error as a message between ranks."""

    rank: int
    kind: str
    """The name of the error's class."""
    path: str
    expected: str
    found: str
    hint: str
    text: str
    common: bool = False
    """Whether the coordinator found it for all ranks: then no single rank has failed."""
    errno: int = 0
    """The number of the system's error for which a `StoreError` was raised; 0 without one."""


def to_fault(error: BaseException, rank: int, *, common: bool = False) -> Fault:
    """Returns an error as a message."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TreeckptError):
        cause = error.__cause__ or error.__context__
        number = (cause.errno or 0) if isinstance(error, StoreError) and isinstance(cause, OSError) else 0
        facts = error.path, error.expected, error.found, error.hint
        return Fault(rank, type(error).__name__, *facts, text, common, number)
    return Fault(rank, type(error).__name__, path="", expected="", found="", hint="", text=text, common=common)


def silent_faults(lost: Mapping[int, str]) -> list[Fault]:
    """Returns the faults of ranks that did not answer, with what is known of each."""
    return [
        Fault(rank, RankError.__name__, path="", expected="", found="", hint="", text=text)
        for rank, text in lost.items()
    ]


def raise_faults(
    faults: Sequence[Fault],
    path: str,
    size: int,
    *,
    cause: BaseException | None = None,
    hint: str = NOT_COMMITTED,
) -> None:
    """Raises the error that the faults amount to; does nothing where there are none.

    A treeckpt error that concerns all ranks alike is raised as itself; failures of single ranks as one `RankError`
    that names each.

    Args:
        size: how many ranks there are.
        cause: this rank's own error.
        hint: what state the failure leaves behind.
    """
    if not faults:
        return
    # a rank alone has no others to name: its error keeps its class and its traceback
    if cause is not None and size == 1:
        raise cause
    first = faults[0]
    alike = all((f.kind, f.path, f.expected) == (first.kind, first.path, first.expected) for f in faults)
    kind = _KINDS.get(first.kind)
    if kind is not None and alike and (first.common or len(faults) == size):
        raise kind(first.path, expected=first.expected, found=first.found, hint=first.hint) from cause
    ranks = {fault.rank: fault.text for fault in faults}
    raise RankError(path, ranks=ranks, expected=f"all {size} ranks to succeed", hint=hint) from cause


T = TypeVar("T")
_encode = msgspec.msgpack.encode
_ENDING = "end of a call"
_HINT = "Call it on every rank, in the same order"


class _Report(msgspec.Struct, array_like=True):
    """What a rank sends: its fault, or the result of its work."""

    fault: Fault | None
    result: bytes = b""
    call: str = ""
    """The call that the rank makes, of calls that other messages do not tell apart."""


class _Reply(msgspec.Struct, array_like=True):
    """What rank 0 sends to all: faults, or its conclusion."""

    faults: tuple[Fault, ...]
    result: bytes = b""


class Conclusion(msgspec.Struct, Generic[T]):
    """What rank 0 concludes in one step, for all ranks."""

    result: T
    last: bool = True
    """Whether the exchange ends with this step."""
    settle: bool = True
    """At the last step, whether rank 0 waits until the others have read it; see `Round.broadcast`."""


def decode_each(messages: Mapping[int, bytes], kind: type[T]) -> dict[int, T]:
    """Decodes messages by rank; equal ones are decoded once, into one object."""
    decoded: dict[bytes, T] = {}
    for message in messages.values():
        if message not in decoded:
            decoded[message] = decode_msgpack(message, kind)
    return {rank: decoded[message] for rank, message in messages.items()}


class Exchange(contextlib.AbstractContextManager["Exchange"]):
    """Collective steps of one call, in one round. After a failed step no other may follow.

    Args:
        topic: a path and the name of the call: it tells calls apart.
        path: of errors; by default the topic.
        hint: for the error of a failed step: what state the failure leaves behind.
        log_waits: whether to log a long wait for ranks that may not have made the call.
        call: must be the same on all ranks: after an interrupt one may make another call than the others.
    """

    def __init__(
        self, comm: Comm, topic: str, *, path: str = "", hint: str = _HINT, log_waits: bool = True, call: str = ""
    ) -> None:
        self.round = Round(comm, topic, log_waits=log_waits)
        self._comm, self._path, self._hint, self._call = comm, path or topic, hint, call
        self._missed: _Reply | None = None
        """How the call has ended, where this rank comes too late for it."""
        self._error: Exception | None = None
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Exchange:
        with self.round.abandoned_on_error():
            missed = self.round.join()
            if missed is not None:
                self._missed = decode_msgpack(missed, _Reply)
            else:
                self._exit.enter_context(self.round.heartbeats())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.round.abandon(error)
        with self.round.abandoned_on_error():
            self._exit.close()

    def step(
        self,
        work: Callable[[], bytes] | None,
        conclude: Callable[[dict[int, bytes]], Conclusion[T]],
        kind: type[T],
    ) -> T:
        """Carries out one step; returns rank 0's conclusion.

        Args:
            work: its result is this rank's report.
            conclude: is called on rank 0 with all reports, by rank, if no rank has failed.
            kind: the type of the conclusion, one that msgspec can decode.

        Raises:
            TreeckptError: what `work` raised here, or `conclude` on rank 0.
            RankError: `work` failed on other ranks, or ranks did not answer.
        """
        if self._missed is not None:
            reply, concluded = self._missed, None
        else:
            report, self._error = _report_of(work, self._comm.rank)
            reply, concluded = self._carry_out(report, conclude)
        raise_faults(reply.faults, self._path, self._comm.size, cause=self._error, hint=self._hint)
        return concluded.result if concluded is not None else decode_msgpack(reply.result, kind)

    def faults_of(self, report: _Report) -> tuple[Fault, ...]:
        """Carries out one step with a given report; returns the faults of all ranks without raising them."""
        return (self._missed or self._carry_out(report, lambda _: Conclusion(None))[0]).faults

    def _carry_out(
        self, report: _Report, conclude: Callable[[dict[int, bytes]], Conclusion[T]]
    ) -> tuple[_Reply, Conclusion[T] | None]:
        """Returns rank 0's reply, and on rank 0 itself what the reply encodes."""
        report.call = self._call
        messages = self.round.gather(_encode(report))
        if messages is None:
            return decode_msgpack(self.round.broadcast(None), _Reply), None
        reports = decode_each(messages, _Report)
        faults = [report.fault for report in reports.values() if report.fault is not None]
        faults += silent_faults(self.round.lost)
        faults += self._other_calls(reports)
        reply, concluded = _Reply(tuple(faults)), None
        if not faults:
            try:
                concluded = conclude({rank: report.result for rank, report in reports.items()})
                reply = _Reply((), _encode(concluded.result))
            except Exception as error:
                self._error, concluded = error, None
                # what is wrong with the reports concerns all ranks; any other exception is a failure of rank 0
                reply = _Reply((to_fault(error, 0, common=isinstance(error, TreeckptError)),))
        last, settle = (concluded.last, concluded.settle) if concluded is not None else (True, True)
        self.round.broadcast(_encode(reply), last=last, settle=settle)
        return reply, concluded

    def _other_calls(self, reports: Mapping[int, _Report]) -> list[Fault]:
        """Returns a fault where a rank makes another call than this one."""
        for rank, report in reports.items():
            if report.call != self._call:
                error = MismatchError(
                    self._path,
                    expected=f"the same call on every rank, as {self._call!r} on rank {self._comm.rank}",
                    found=f"{report.call!r} on rank {rank}",
                    hint=_HINT,
                )
                return [to_fault(error, rank, common=True)]
        return []


def _report_of(work: Callable[[], bytes] | None, rank: int) -> tuple[_Report, Exception | None]:
    """Runs this rank's work; returns its report, and the error that it raised."""
    try:
        return _Report(None, work() if work is not None else b""), None
    except Exception as error:
        return _Report(to_fault(error, rank)), error


def from_rank0(comm: Comm, topic: str, answer: Callable[[], T], kind: type[T], *, call: str = "") -> T:
    """Returns the result of `answer()` on rank 0, on every rank.

    Only rank 0 reads the disk, so ranks cannot disagree about what is there, even if one rank's view of a network file
    system is stale.

    Args:
        topic, kind, call: as for `Exchange` and `Exchange.step`.

    Raises:
        TreeckptError: what `answer` raised on rank 0.
        RankError: ranks did not answer.
    """
    if comm.size == 1:
        return answer()
    with Exchange(comm, topic, call=call) as exchange:
        return exchange.step(None, lambda _: Conclusion(answer()), kind)


def gather_errors(comm: Comm, topic: str, error: Exception | None, *, log_waits: bool = False) -> tuple[Fault, ...]:
    """Returns every rank's failure, this rank's being `error`, on every rank."""
    fault = to_fault(error, comm.rank) if error is not None else None
    if comm.size == 1:
        return (fault,) if fault is not None else ()
    with Exchange(comm, topic, log_waits=log_waits, call=_ENDING) as exchange:
        return exchange.faults_of(_Report(fault))


@contextlib.contextmanager
def interrupts_told(comm: Comm, topic: str) -> Iterator[None]:
    """Runs a body after which all ranks have a round; an interrupt of it is told to the others as one of that round."""
    try:
        yield
    except BaseException as error:
        # an error that is no interrupt is told in that round itself
        if comm.size > 1 and not isinstance(error, Exception):
            following = Round(comm, topic)
            if following.join() is None:
                following.abandon(error)
        raise


@contextlib.contextmanager
def ending_together(comm: Comm, topic: str, path: str, *, hint: str) -> Iterator[None]:
    """Runs a body that each rank runs alone; at its end every rank waits for the others, and learns of their failures.

    Args:
        path, hint: of the error.

    Raises:
        RankError: it failed on some ranks, or these did not come. What failed alike on all is raised as it is.
    """
    error: Exception | None = None
    try:
        with interrupts_told(comm, topic):
            yield
    except Exception as failed:
        error = failed
    faults = gather_errors(comm, topic, error, log_waits=True)
    raise_faults(faults, path, comm.size, cause=error, hint=hint)


def all_gather(comm: Comm, topic: str, work: Callable[[], T], kind: type[T]) -> list[T]:
    """Returns the results of `work()`, of type `kind`, on all ranks, by rank, on every rank. Raises as a step."""
    if comm.size == 1:
        return [work()]
    with Exchange(comm, topic) as exchange:
        results = exchange.step(lambda: _encode(work()), Conclusion, dict[int, bytes])
    return [decode_msgpack(results[rank], kind) for rank in range(comm.size)]


class ByteGatherer(Protocol):
    """An all-gather of bytes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, data: bytes) -> list[bytes]:
        """Returns every rank's bytes, by rank."""
        ...


def gather_results(
    ranks: ByteGatherer, topic: str, work: Callable[[], T], kind: type[T], *, hint: str = _HINT
) -> list[T]:
    """Does what `all_gather` does through another all-gather, in which no rank can be silent."""
    results = _gather_reports(ranks, topic, lambda: _encode(work()), hint)
    return [decode_msgpack(result, kind) for result in results]


def from_rank(
    ranks: ByteGatherer, source: int, topic: str, work: Callable[[], T], kind: type[T], *, hint: str = _HINT
) -> T:
    """Returns the result of `work()` on rank `source`, on every rank; the other ranks do not call it."""
    mine = (lambda: _encode(work())) if ranks.rank == source else None
    return decode_msgpack(_gather_reports(ranks, topic, mine, hint)[source], kind)


def _gather_reports(ranks: ByteGatherer, topic: str, work: Callable[[], bytes] | None, hint: str) -> list[bytes]:
    report, error = _report_of(work, ranks.rank)
    reports = [decode_msgpack(data, _Report) for data in ranks.all_gather(_encode(report))]
    faults = [other.fault for other in reports if other.fault is not None]
    raise_faults(faults, topic, ranks.size, cause=error, hint=hint)
    return [other.result for other in reports]
