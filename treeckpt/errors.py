"""The errors that treeckpt raises.

    TreeckptError
    |- TreeError             the tree given to save cannot be stored: a leaf, node or key of unknown kind; a TypeError
    |- MismatchError         what is requested is not what was saved: keys, shapes, dtypes, kinds; a ValueError
    |- LayoutError           pieces leave a gap, lie outside their array, or are only partial sums
    |- CheckpointError       the state of the files
    |  |- CheckpointNotFound   no index.json: nothing there, or a save that never finished
    |  |- CheckpointExists     the directory already holds a checkpoint
    |  |- FormatError          unknown version or field, or metadata that no save of ours writes
    |  `- CorruptError         bytes changed: checksum, truncation, a file of another save
    |- StoreError            the files could not be read or reached: network, credentials, permissions, a failing disk
    `- RankError             a rank failed or fell silent; every rank raises it

Each error has four parts: `path` (the leaf or file), `expected`, `found`, and `hint` (what to do next).
`treeckpt.dcp` wraps them in the `CheckpointException` of torch.distributed.checkpoint, with the cause of each rank.

What is refused, because it would be lost or changed in silence, and what to do instead:

- Values of unknown kinds, which would need pickle, and pickle runs code on load: convert them, register the class with
  optree, or pass `allow_pickle=True` on both sides.
- Mapping classes with a storage of their own, because only their code knows what they hold: the error has the line that
  registers the class. Subclasses of dict, OrderedDict and UserDict, as transformers' `ModelOutput`, are kept.
- Attributes of an OrderedDict that are no plain values (one is `_metadata` of a state dict, the versions of modules):
  delete them. Ranks that have another version of a module of one name: build the same model on all.
- `Partial` placements, where each rank holds a part of a sum: redistribute first.
- Quantised tensors of torch, and tensor subclasses that do not say of which tensors they are made
  (`__tensor_flatten__`), whose bytes mean nothing without library internals: save their parts.
- Replicas, and pieces that hold the same elements, that differ (above 64 KiB in samples): `PerRank`, `FromRank`, or
  find out why. `verify_replicas=True` compares all bytes. Without it an array that differs outside of the samples is
  saved, each part of it from one of the ranks.
- numpy dtypes with fields, of extended precision, or of packages other than `ml_dtypes`, because a name does not say
  what their bytes mean: save the fields, or `astype`.
- Trees deeper than 200 levels, because Python bounds nested calls: nest less, or save parts.
- `custom_metadata` and `files` that rank 0 does not give, or that others give differently: give them on rank 0 alone.
- A save by one of several ranks that a launcher started, without a process group or `comm=`, because the ranks would
  overwrite each other: `init_process_group` first, or `comm="alone"`.
- Another dtype than was saved: `cast=True`.
- Missing or unexpected leaves, because a typo would look like success: `strict="missing"` where the rest of the
  checkpoint is not yours, `strict=False`, or `...` in `like`.
- An existing checkpoint at the path: `overwrite=True`, with which the old one stays valid until the new one is
  committed.
- Classes that the program has not imported, because importing a module by a file's word runs code: import it first, or
  pass `like`.
- Moments of a rank's part of a parameter, as the codes of 8-bit optimizers, in another layout, which only the optimizer
  could make: the layout and the ranks with which they were saved, or `optimizer=None`.
- `PerRank` state on another number of ranks, of which nobody knows whose it is: `Fallback(per_rank="take")`, for a
  training state `Fallback(per_rank={"loader": "take"})`, or leave it out.
"""

from __future__ import annotations

import logging
import unicodedata

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
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def visible(text: str) -> str:
    """Escapes every character that has no glyph of its own, or that reorders others.

    All text that treeckpt writes to a terminal or a log, and every message of its errors, goes through it: names come
    from files, and may hold control sequences and faked lines.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if unicodedata.category(c) in _HIDDEN else c for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _make_visible(record: logging.LogRecord) -> bool:
    record.msg, record.args = visible(record.getMessage()), ()
    return True


logging.getLogger("treeckpt").addFilter(_make_visible)


class TreeckptError(Exception):
    """The base of every error that treeckpt raises on purpose.

    Cause: an argument of a wrong kind or value, where no class below says more.

    Remedy: what the message says. A program that catches it catches all errors of treeckpt.

    >>> tc.Manager("job", keep=[tc.policy.Last(0)])
    Traceback (most recent call last):
    ...
    treeckpt.errors.TreeckptError: keep: expected a count of 1 or more, found Last(count=0). None keeps all; ...
    """

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
        return visible(f"{text}. {self.hint}" if self.hint else text)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(kind: type[TreeckptError], fields: dict[str, object]) -> TreeckptError:
    """Builds an unpickled error: pickle cannot call a constructor with keyword-only arguments."""
    error = kind.__new__(kind)
    error.__dict__.update(fields)
    Exception.__init__(error, error._message())  # pyright: ignore[reportPrivateUsage]
    return error


class TreeError(TreeckptError, TypeError):
    """The tree holds something that cannot be saved. It is a `TypeError`, too.

    Cause: a leaf, key or container of a kind that no checkpoint holds: an open file, a function, a quantised tensor, a
    tree that contains itself; an optimizer with parameters that are not the model's.

    Remedy: leave it out, save its parts, register its class with optree, or pass `allow_pickle=True` to `save` and
    `load`.

    >>> tc.save("new", {"act": torch.relu})
    Traceback (most recent call last):
    ...
    treeckpt.errors.TreeError: act: expected an array, a container or a plain Python value, found ...
    """


class MismatchError(TreeckptError, ValueError):
    """The requested tree and the saved tree differ. It is a `ValueError`, too.

    Cause: other leaves, shapes, dtypes or kinds than were saved; `PerRank` state of a world of another size; ranks
    that contradict each other; an argument that the checkpoint has no meaning for.

    Remedy: `strict="missing"` or `strict=False`, `rename=`, `cast=True`, `fallback=tc.Fallback(per_rank="take")`, or
    `...` for what is not wanted. `treeckpt show CKPT --structure` shows what was saved.

    >>> tc.load("run/step_00000100", {"model": {"weight": torch.empty(3, 4), "bias": ...}, "step": ...})
    Traceback (most recent call last):
    ...
    treeckpt.errors.MismatchError: model/weight: expected shape (3, 4), found (2, 4) in the checkpoint. ...
    """


class LayoutError(TreeckptError):
    """The pieces of an array do not form the array.

    Cause: pieces given by `Sharded` that leave a gap, or lie outside of their global shape; a `Partial` placement,
    which is a part of a sum; owners of a keyed table that leave a bucket out, or share one.

    Remedy: correct offset and global shape; `redistribute` partial sums first; `KeyedTable.share(rank, world)` for
    owners.

    >>> tc.save("new", {"w": tc.Sharded(np.ones((2, 4)), global_shape=(4, 4), offset=(0, 0))})
    Traceback (most recent call last):
    ...
    treeckpt.errors.LayoutError: w: expected pieces that cover all of shape (4, 4), found no rank holds ...
    """


class CheckpointError(TreeckptError):
    """The files of a checkpoint are missing, invalid or in the way.

    Cause: see the classes below it. Itself it is raised where an earlier background save failed and nobody asked
    for its result, or where another save has taken the place of this one.

    Remedy: what the message says; `Manager.restore` and `resume` take an older checkpoint by themselves.

    >>> try:
    ...     tc.load("run/step_00000300")
    ... except tc.CheckpointError as error:
    ...     error.expected
    'a checkpoint (index.json)'
    """


class CheckpointNotFound(CheckpointError):
    """There is no index: nothing was saved here, or the save never finished.

    Cause: a wrong path, a run in place of one of its steps, or a save that was killed before it was committed.

    Remedy: the message lists what is near. `treeckpt ls RUN` shows the steps and their state; `treeckpt rebuild-
    index` makes a lost index again where all shards are there.

    >>> tc.load("run/step_00000300")
    Traceback (most recent call last):
    ...
    treeckpt.errors.CheckpointNotFound: .../step_00000300: expected a checkpoint (index.json), found nothing at ...
    """


class CheckpointExists(CheckpointError):
    """The directory of a save already holds a checkpoint.

    Cause: a second save to one path, often a training that was started again and counts from 0.

    Remedy: another path; `overwrite=True`, which keeps the old one until the new one is committed; or
    `Manager.resume`.

    >>> tc.save("run/step_00000100", {"step": 100})
    Traceback (most recent call last):
    ...
    treeckpt.errors.CheckpointExists: .../step_00000100: expected no checkpoint, found one. ...
    """


class FormatError(CheckpointError):
    """Metadata of an unknown version, or that no save of treeckpt writes.

    Cause: a file of no known format; a checkpoint of a newer version of treeckpt; rules in JSON that name no rule.

    Remedy: check the path, or update treeckpt; `treeckpt convert` reads the formats of other programs.

    >>> from pathlib import Path
    >>> size = Path("notes.txt").write_text("hello")
    >>> tc.convert.convert("notes.txt", "new")
    Traceback (most recent call last):
    ...
    treeckpt.errors.FormatError: notes.txt: expected ...
    """


class CorruptError(CheckpointError):
    """Bytes are missing or changed.

    Cause: a disk, a copy or a network that changed or cut a file; shards of different saves in one directory.

    Remedy: restore the file from a copy. `treeckpt verify CKPT --repair` makes again what can be; `load(...,
    fallback=tc.Fallback(on_corrupt="skip"))` returns what is intact; `Manager.restore` takes the checkpoint before.

    >>> from pathlib import Path
    >>> [shard] = Path("run/step_00000100").glob("shard-*")
    >>> size = shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    >>> tc.load("run/step_00000100")
    Traceback (most recent call last):
    ...
    treeckpt.errors.CorruptError: model/weight, model/bias: ...: expected bytes that match their checksum, ...
    """

    def __init__(
        self, path: str, *, expected: str = "", found: str = "", hint: str = "", repairable: bool = False
    ) -> None:
        self.repairable = repairable
        """Whether it is the index, which `verify --repair` may make again from the shards."""
        super().__init__(path, expected=expected, found=found, hint=hint)


class StoreError(TreeckptError):
    """The files could not be read or reached this time: nothing is known of them. They may be valid: try again.

    Cause: no network, no or wrong credentials, a bucket that does not exist, a URL whose library is not installed,
    a local run that this process may not read, no file descriptors left, a disk that fails (EIO).

    Remedy: what the message names. No manager falls back to an older checkpoint because of it.

    >>> tc.load("nowhere://bucket/run")
    Traceback (most recent call last):
    ...
    treeckpt.errors.StoreError: nowhere://bucket/run: expected a path, or a URL that fsspec knows, found ...
    """

    unanswered = False
    """Whether a write was sent and not answered: the store may have carried it out, or may do so later."""
    refused_once = False
    """Whether the store has not carried the request out for a reason that passes: the same may be sent again."""


class RankError(TreeckptError):
    """One or more ranks failed or fell silent. `ranks` maps each of them to its cause, as text.

    Cause: what one rank raised; or a rank that died, hangs, or never made the call (a save under `if rank == 0:`).

    Remedy: mend the cause of the rank that is named. All ranks raise it, so that none waits for the others.

    >>> print(tc.RankError("run/step_00000100", ranks={3: "no space left on device"}))
    run/step_00000100: found rank 3: no space left on device
    """

    def __init__(
        self, path: str, *, ranks: dict[int, str], expected: str = "", found: str = "", hint: str = ""
    ) -> None:
        self.ranks = ranks
        if not found:
            found = "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(ranks.items()))
        super().__init__(path, expected=expected, found=found, hint=hint)
