"""The errors that treeckpt raises.

    TreeckptError
    |- TreeError             the tree given to save cannot be stored: a leaf, a node or a key of an unknown kind
    |- MismatchError         what is requested is not what was saved: keys, shapes, dtypes, kinds
    |- LayoutError           pieces leave a gap, lie outside their array, or are only partial sums
    |- CheckpointError       the state of the files
    |  |- CheckpointNotFound   no index.json: nothing there, or a save that never finished
    |  |- CheckpointExists     the directory already holds a checkpoint
    |  |- FormatError          unknown version or field, or metadata that no save of ours writes
    |  `- CorruptError         bytes changed: checksum, truncation, a file of another save
    |- StoreError            the place of the files cannot be reached, or refuses: network, credentials, permissions
    `- RankError             a rank failed or fell silent; every rank raises it

Each error has four parts: `path` (the leaf or file), `expected`, `found`, and `hint` (what to do next).
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CheckpointExists",
    "CheckpointNotFound",
    "CorruptError",
    "FormatError",
    "LayoutError",
    "MismatchError",
    "RankError",
    "StoreError",
    "TreeError",
    "TreeckptError",
]


class TreeckptError(Exception):
    """The base of every error that treeckpt raises on purpose."""

    def __init__(self, path: str, *, expected: str = "", found: str = "", hint: str = "") -> None:
        self.path = path
        self.expected = expected
        self.found = found
        self.hint = hint
        super().__init__(self._message())

    def add_hint(self, text: str) -> None:
        """Appends a sentence to the hint."""
        self.hint = f"{self.hint}. {text}" if self.hint else text
        self.args = (self._message(),)

    def _message(self) -> str:
        facts = [f"{word} {value}" for word, value in (("expected", self.expected), ("found", self.found)) if value]
        text = f"{self.path or '<root>'}: {', '.join(facts)}"
        return f"{text}. {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(kind: type[TreeckptError], fields: dict[str, object]) -> TreeckptError:
    """Builds an unpickled error: pickle cannot call a constructor with keyword-only arguments."""
    error = kind.__new__(kind)
    error.__dict__.update(fields)
    Exception.__init__(error, error._message())  # pyright: ignore[reportPrivateUsage]
    return error


class TreeError(TreeckptError):
    """The tree holds something that cannot be saved."""


class MismatchError(TreeckptError):
    """The requested tree and the saved tree differ."""


class LayoutError(TreeckptError):
    """The pieces of an array do not form the array."""


class CheckpointError(TreeckptError):
    """The files of a checkpoint are missing, invalid or in the way."""


class CheckpointNotFound(CheckpointError):
    """There is no index: nothing was saved here, or the save never finished."""


class CheckpointExists(CheckpointError):
    """The directory of a save already holds a checkpoint."""


class FormatError(CheckpointError):
    """Metadata of an unknown version, or that no save of treeckpt writes."""


class CorruptError(CheckpointError):
    """Bytes are missing or changed."""


class StoreError(TreeckptError):
    """The place of the files cannot be reached, or refuses. The checkpoint may be valid: try again."""


class RankError(TreeckptError):
    """One or more ranks failed or fell silent. `ranks` maps each of them to its cause, as text."""

    def __init__(
        self, path: str, *, ranks: dict[int, str], expected: str = "", found: str = "", hint: str = ""
    ) -> None:
        self.ranks = ranks
        if not found:
            found = "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(ranks.items()))
        super().__init__(path, expected=expected, found=found, hint=hint)
