"""Ranks that each load a part of a checkpoint, and are strict together: each leaf of it is asked for by one at least.

The ranks exchange digests of the names that they do not ask for, once all have compared theirs with the checkpoint, and
before any memory is touched. A rank that fails before that says so in the same exchange, so that none waits for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import xxhash

from .._core.tree.leaf_differences import Strict, some_of
from .._io.comm.collective import Conclusion, Exchange, decode_each
from .._io.comm.comm import Comm
from .._io.comm.rounds import Round
from ..errors import MismatchError, TreeckptError

_OWN = "~rank*"
"""What stands in the path of state that each rank has of its own."""


class _NotAskedFor(msgspec.Struct, array_like=True):
    """The leaves of the checkpoint that a rank does not ask for; of all ranks, those that none asks for."""

    shared: list[int]
    """Digests of the names of those that any rank may ask for."""
    own: list[str]
    """The names of those that this rank alone may ask for."""


class PartialRanks:
    """The ranks of one load with `partial`, seen from one of them."""

    def __init__(self, comm: Comm, url: str) -> None:
        self._comm, self._url, self._topic = comm, url, f"{url} load of parts"
        self._has_ended = comm.size == 1

    def own_strict(self, strict: Strict) -> Strict:
        """Returns how strict this rank is about its own part: what it does not ask for, others may."""
        return "missing" if strict is True and self._comm.size > 1 else strict

    def check(self, unexpected: Sequence[str], strict: Strict) -> list[str]:
        """Returns the leaves of the checkpoint that no rank asks for. Every rank has to call it, or `abandon`.

        Args:
            unexpected: those that this rank does not ask for.

        Raises:
            MismatchError: there are some, and `strict` is True; on all ranks.
            RankError: another rank has failed.
        """
        own = [path for path in unexpected if _OWN in path]  # of this rank alone: no other can ask for it
        names = {xxhash.xxh3_64_intdigest(path.encode()): path for path in unexpected if _OWN not in path}
        if not self._has_ended:
            left = self._exchange(_NotAskedFor(sorted(names), own), None)
            own, names = left.own, {digest: names[digest] for digest in left.shared}
        paths = sorted((*names.values(), *own))
        if paths and strict is True:
            raise MismatchError(
                paths[0],
                expected=f"each leaf of {self._url} to be asked for by one rank of {self._comm.size} at least",
                found=some_of("asked for by none", paths),
                hint='Pass strict="missing" to leave these unread',
            )
        return paths

    def abandon(self, error: BaseException) -> None:
        """Tells the other ranks that this one has failed, unless it has called `check`."""
        if self._has_ended:
            return
        if isinstance(error, Exception):
            with contextlib.suppress(TreeckptError):
                self._exchange(_NotAskedFor([], []), error)
        elif (following := Round(self._comm, self._topic)).join() is None:  # an interrupt
            following.abandon(error)

    def _exchange(self, mine: _NotAskedFor, error: Exception | None) -> _NotAskedFor:
        self._has_ended = True

        def report() -> bytes:
            if error is not None:
                raise error
            return msgspec.msgpack.encode(mine)

        def conclude(reports: Mapping[int, bytes]) -> Conclusion[_NotAskedFor]:
            found = decode_each(reports, _NotAskedFor).values()
            first, *others = (set(one.shared) for one in found)
            own = sorted({path for one in found for path in one.own})
            return Conclusion(_NotAskedFor(sorted(first.intersection(*others)), own))

        hint = "Nothing was loaded"
        with Exchange(self._comm, self._topic, path=self._url, hint=hint, call="load of parts") as exchange:
            return exchange.step(report, conclude, _NotAskedFor)


@contextlib.contextmanager
def partial_ranks(comm: Comm, url: str, partial: bool | PartialRanks) -> Iterator[PartialRanks | None]:
    """Gives the ranks of a load for the body that carries it out; None where each rank is strict for itself.

    Args:
        partial: the ranks, where a caller has them.

    Raises:
        MismatchError: `partial` is no bool.
    """
    if isinstance(partial, PartialRanks):
        yield partial
        return
    if not isinstance(partial, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MismatchError("partial", expected="True or False", found=f"{partial!r:.60}")
    ranks = PartialRanks(comm, url) if partial else None
    try:
        yield ranks
    except BaseException as error:
        if ranks is not None:
            ranks.abandon(error)
        raise
