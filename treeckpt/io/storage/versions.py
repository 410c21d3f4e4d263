"""One version of a checkpoint: what one save has published, though another save may replace it meanwhile.

A save with `overwrite=True` publishes its index and then deletes the files of the save before. Whoever has read the
index of that one finds files missing, which says nothing of either save: the new version is to be read instead.
"""

from __future__ import annotations

from typing import Any

from ...core.format.index import INDEX_NAME
from ...errors import CheckpointError, CheckpointNotFound
from .store import Store, SupportsMappedReads

__all__ = ["Replaced", "Version"]


class Replaced(CheckpointError):
    """Another save has replaced the version that was being read."""


class Version:
    """A store whose index is read once: all that is read through it is of one save, or fails."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        """The store itself, whatever version it has."""
        self._index: bytes | None = None
        self.url = inner.url
        self.prepare, self.sizes, self.map, self.close = inner.prepare, inner.sizes, inner.map, inner.close
        self.read_into, self.read_parts = inner.read_into, inner.read_parts
        self.create, self.publish, self.delete = inner.create, inner.publish, inner.delete
        if isinstance(inner, SupportsMappedReads):
            self.mapped = inner.mapped

    def read(self, name: str, *, limit: int) -> bytes:
        if name != INDEX_NAME:
            return self.inner.read(name, limit=limit)
        if self._index is None:
            self._index = self.inner.read(name, limit=limit)
        return self._index

    def is_replaced(self) -> bool:
        """Whether another index has been published since this one was read.

        Raises:
            CheckpointNotFound: there is no index any more.
        """
        if self._index is None:
            return False
        try:
            return self.inner.read(INDEX_NAME, limit=len(self._index)) != self._index
        except FileNotFoundError as error:
            raise CheckpointNotFound(
                self.url,
                expected=f"a checkpoint ({INDEX_NAME})",
                found="none: it was deleted while it was being read",
                hint="Load another step",
            ) from error
        except CheckpointError:  # longer than the one before
            return True
        except Exception:
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
