"""Rank 0 answers for all ranks, in rounds of their own and without collectives.

Every rank calls `from_rank0` at the same point; rank 0 alone looks at the disk, so ranks cannot disagree about what is
there,
however stale one rank's view of a network file system is. `gather_errors` is the reverse: every rank says how it
fared, and
all learn of every failure. A rank that does not call in time is named in the error that the others raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from ...errors import TreeckptError
from .comm import Comm
from .failures import CoordinatorReply, Fault, raise_faults, silent_faults, to_fault
from .rounds import Round

__all__ = ["all_gather", "from_rank0", "gather_errors"]

T = TypeVar("T")
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode
_HINT = "Call it on every rank, in the same order"


class _Answer(CoordinatorReply, array_like=True):
    """Rank 0's word: the answer, encoded, unless there are faults."""

    data: bytes


class _Tale(msgspec.Struct, array_like=True):
    fault: Fault | None
    data: bytes = b""


def from_rank0(comm: Comm, topic: str, answer: Callable[[], T], kind: type[T]) -> T:
    """What `answer()` is on rank 0, on every rank.

    Args:
        topic: names the question in errors: a path, and what is asked of it.
        kind: the type of the answer, one that msgspec knows.

    Raises:
        TreeckptError: what `answer` raised on rank 0.
        RankError: ranks fell silent.
    """
    if comm.size == 1:
        return answer()
    cause: list[Exception] = []

    def judge(faults: list[Fault]) -> _Answer:
        data = b""
        if not faults:
            try:
                data = _encode(answer())
            except Exception as error:
                cause.append(error)
                faults = [to_fault(error, 0, common=isinstance(error, TreeckptError))]
        return _Answer(tuple(faults), data)

    word = _converse(comm, topic, None, judge)
    raise_faults(word.faults, topic, comm, cause=cause[0] if cause else None, hint=_HINT)
    return _decode(word.data, type=kind)


def gather_errors(comm: Comm, topic: str, error: Exception | None) -> tuple[Fault, ...]:
    """Every rank's failure, on every rank.

    Args:
        error: this rank's own.
    """
    fault = to_fault(error, comm.rank) if error is not None else None
    if comm.size == 1:
        return (fault,) if fault is not None else ()
    return _converse(comm, topic, fault, lambda faults: _Answer(tuple(faults), b""), met=True).faults


def all_gather(comm: Comm, topic: str, work: Callable[[], T], kind: type[T]) -> list[T]:
    """What `work()` gives on each rank, by rank, on every rank.

    Args:
        kind: the type of what it gives, one that msgspec knows.

    Raises:
        TreeckptError: what `work` raised here.
        RankError: it failed on other ranks, or ranks fell silent.
    """
    if comm.size == 1:
        return [work()]
    fault, cause, data = None, None, b""
    try:
        data = _encode(work())
    except Exception as error:
        fault, cause = to_fault(error, comm.rank), error
    heard: dict[int, bytes] = {}

    def judge(faults: list[Fault]) -> _Answer:
        return _Answer(tuple(faults), _encode([heard[rank] for rank in range(comm.size)] if not faults else []))

    word = _converse(comm, topic, fault, judge, data, heard)
    raise_faults(word.faults, topic, comm, cause=cause, hint=_HINT)
    return [_decode(part, type=kind) for part in _decode(word.data, type=list[bytes])]


def _converse(
    comm: Comm,
    topic: str,
    fault: Fault | None,
    judge: Callable[[list[Fault]], _Answer],
    data: bytes = b"",
    words: dict[int, bytes] | None = None,
    met: bool = False,
) -> _Answer:
    """Has every rank say how it fared; rank 0 judges, and all learn of it.

    Args:
        data: what this rank has to say beside.
        words: on rank 0 takes what each rank said, before `judge` is asked.
        met: the ranks come from work that they began together, so that no wait is logged.
    """
    round_ = Round(comm, topic, met=met)
    missed = round_.join()
    if missed is not None:
        return _decode(missed, type=_Answer)
    with round_.heartbeats():
        return _exchange(round_, fault, judge, data, words)


def _exchange(
    round_: Round,
    fault: Fault | None,
    judge: Callable[[list[Fault]], _Answer],
    data: bytes,
    words: dict[int, bytes] | None,
) -> _Answer:
    heard = round_.gather(_encode(_Tale(fault, data)))
    if heard is None:
        return _decode(round_.share(None, last=True), type=_Answer)
    tales = {rank: _decode(message, type=_Tale) for rank, message in heard.items()}
    if words is not None:
        words.update({rank: tale.data for rank, tale in tales.items()})
    answer = judge([tale.fault for tale in tales.values() if tale.fault is not None] + silent_faults(round_.lost))
    round_.share(_encode(answer), last=True)
    return answer
