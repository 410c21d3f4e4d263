"""References: shards of a checkpoint that lie in the directories of other checkpoints of its run.

A save that finds a file of its plan unchanged, byte for byte, in the checkpoint that it follows does not write it: its
index names the file that is there. It always names the directory in which the file was first written, so that a reader
follows one step, and no chain of them. Directories are plain names: all lie beside the checkpoint's own.

The save groups what does not change into files of their own (`kept_groups`), so that whole files stay the same. An
index says for each array to which group it belongs and for how many saves its bytes have stayed, from which the next
save plans its own groups. Nothing else is kept anywhere: a restart plans the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from ...errors import FormatError
from ..sharding.int_runs import Runs, check_runs, decode_runs, encode_runs, length_of
from .shard_header import MAX_HEADER, MAX_NBYTES, MAX_WORLD, SAVE_ID

STAYED_SAVES = 2
"""The number of checkpoints in a row that must have the same bytes of an array until it is put into a group."""
GROUP_NBYTES = 256 << 20
"""The bytes of the arrays of a group for each rank, unless one array has more: what one change writes again."""
MAX_DIRECTORY = 255
"""The characters of the name of a directory, at most."""


class Home(msgspec.Struct, frozen=True, array_like=True):
    """A save in another directory of the run, some of whose shards belong to a checkpoint too."""

    directory: str
    """The plain name of the directory, which lies beside that of the checkpoint."""
    save_id: str

    def is_sound(self) -> bool:
        """Whether it names a directory beside others and a save."""
        name = self.directory
        plain = 0 < len(name) <= MAX_DIRECTORY and not name.startswith(".") and not set(name) & {"/", "\\", "\0"}
        return plain and SAVE_ID.fullmatch(self.save_id) is not None


class SharedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a rank's plan that is not written, as its home has it."""

    home: Home
    home_part: int
    """Its part in the home, by which it is named there."""
    part: int
    """Its part in this checkpoint."""
    stream: int
    """Where it starts in the stream of its rank's data bytes in this checkpoint."""
    nbytes: int
    """Bytes of its data area."""
    header: int
    """Bytes before its data area."""


class References(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an incremental save records of the files and arrays of a checkpoint.

    Attributes:
        key: the digest of the trees of all ranks: numbers of arrays mean the same where it is the same.
        homes: the saves in whose directories files lie.
        home: for each file, in the order of the table of files: 0 for this checkpoint's own directory, else the number
            of a home, from 1 on. Empty where all files are its own.
        home_part: the part of each file in its home, for its own files their part. Empty as `home`.
        group: for each array, in the order of the leaves: 0 for none, else the number of its group.
        stayed: for each array: how many checkpoints in a row have its bytes, `STAYED_SAVES` at most; 0 where they are
            others than in the checkpoint before.
        since_full: the number of saves since one that took nothing from others.
        rows: of each table with deltas, by its path, the number of rows that a load gives: those of the table and of
            its deltas but for replaced and deleted ones.
    """

    key: str
    homes: tuple[Home, ...] = ()
    home: Runs = ()
    home_part: Runs = ()
    group: Runs = ()
    stayed: Runs = ()
    since_full: int = 0
    rows: dict[str, int] = {}

    @property
    def before_files(self) -> References:
        """What is known before the files are written, as the manifest has it."""
        return References(self.key, group=self.group, since_full=self.since_full, rows=self.rows)

    def places(self, parts: Sequence[int]) -> list[tuple[Home | None, int]]:
        """Returns (home, part there) of each file of the table; None for this checkpoint's own directory."""
        if not self.homes:
            return [(None, part) for part in parts]
        homes: list[Home | None] = [None, *self.homes]
        numbers, inner = decode_runs(self.home).tolist(), decode_runs(self.home_part).tolist()
        return [(homes[number], part) for number, part in zip(numbers, inner, strict=True)]

    def problem(self, save_id: str, files: int, name: str) -> str:
        """Returns what is wrong with it for a table of so many files, in the index called `name`; empty if nothing.

        Raises:
            FormatError: a column has numbers that mean nothing.
        """
        if not all(home.is_sound() and home.save_id != save_id for home in self.homes):
            return "a home that is no save in a directory beside it"
        if len({home.save_id for home in self.homes}) != len(self.homes):
            return "a home that is there twice"
        listed = files if self.homes else 0
        if length_of(self.home) != listed or length_of(self.home_part) != listed:
            return f"homes of {length_of(self.home)} files, of {listed}"
        check_runs(self.home, path=f"{name}: references/home", low=0, high=len(self.homes) + 1)
        check_runs(self.home_part, path=f"{name}: references/part", low=0, high=MAX_WORLD + 1)
        check_runs(self.group, path=f"{name}: references/group", low=0, high=MAX_WORLD)
        check_runs(self.stayed, path=f"{name}: references/stayed", low=0, high=STAYED_SAVES + 1)
        return "" if length_of(self.stayed) in (0, length_of(self.group)) else "columns of different lengths"


def encode_shared(files: Sequence[SharedFile]) -> str:
    """Encodes the shared files of a rank for the header of its first shard; empty for none."""
    return msgspec.json.encode(files).decode() if files else ""


def decode_shared(text: str, name: str) -> tuple[SharedFile, ...]:
    """Decodes what `encode_shared` returns, in the header of the file called `name`; raises FormatError."""
    try:
        files = msgspec.json.decode(text, type=tuple[SharedFile, ...]) if text else ()
    except msgspec.MsgspecError as error:
        raise FormatError(name, expected="files of other checkpoints", found=f"{error}"[:200]) from error
    if not all(map(_is_sound, files)):
        raise FormatError(name, expected="files in directories beside its own", found=text[:200])
    return files


def _is_sound(file: SharedFile) -> bool:
    return (
        file.home.is_sound()
        and 0 <= file.home_part <= MAX_WORLD
        and 0 < file.part <= MAX_WORLD
        and 0 <= file.stream < MAX_NBYTES
        and 0 <= file.nbytes < MAX_NBYTES
        and 0 < file.header <= MAX_HEADER
    )


def with_homes(
    references: References, files: Sequence[tuple[int, int]], shared: Mapping[int, Sequence[SharedFile]]
) -> References:
    """Returns references with the homes of files.

    Args:
        files: (rank, part) of each file, in the order of the table of files.
        shared: by rank.
    """
    places = {(rank, file.part): file for rank, listed in shared.items() for file in listed}
    homes = tuple(sorted({file.home for file in places.values()}, key=lambda home: (home.directory, home.save_id)))
    columns: tuple[Runs, Runs] = ((), ())
    if homes:
        numbers = {home: number for number, home in enumerate(homes, 1)}
        found = [places.get(file) for file in files]
        columns = (
            encode_runs([0 if file is None else numbers[file.home] for file in found]),
            encode_runs([part if f is None else f.home_part for (_, part), f in zip(files, found, strict=True)]),
        )
    return msgspec.structs.replace(references, homes=homes, home=columns[0], home_part=columns[1])


def kept_groups(
    count: int, frozen: Sequence[int], before: References | None = None, tables: Sequence[int] = ()
) -> tuple[np.ndarray, list[int]]:
    """Returns the group of each array, 0 for none, and the numbers of those that are to get one.

    Groups of what has stayed stay, without the arrays that changed.

    Args:
        count: of arrays.
        frozen: the numbers of those of which the tree says that they are not trained.
        before: that of the checkpoint that the save follows, if it is one of the same trees.
        tables: the numbers of the columns of tables, which are put into groups by these.
    """
    old, stayed, least = np.zeros(count, np.int64), np.ones(count, np.int64), np.full(count, STAYED_SAVES)
    least[frozen] = 1
    if before is not None and length_of(before.group) == count:
        stayed = decode_runs(before.stayed) if before.stayed else stayed  # a rebuilt index does not know it
        old = np.where(stayed > 0, decode_runs(before.group), 0)
    if tables:
        old[tables], least[tables] = 0, STAYED_SAVES + 1
    groups = np.unique(np.append(0, old), return_inverse=True)[1].reshape(-1)[1:]  # without gaps
    return groups, np.flatnonzero((groups == 0) & (stayed >= least)).tolist()


def with_new_groups(
    groups: np.ndarray, nbytes: Mapping[int, int], world: int, tables: Mapping[int, int]
) -> tuple[int, ...]:
    """Returns the group of each array, with arrays put into new ones.

    Args:
        groups: as `kept_groups` returns them.
        nbytes: of each new array, all ranks together.
        tables: of each column of a table, or of a delta of one, the number of that: each has a group of its own.
    """
    number, filled, found = int(groups.max(initial=0)), GROUP_NBYTES * world, groups.tolist()
    for array, added in nbytes.items():
        if filled + added > GROUP_NBYTES * world:
            number, filled = number + 1, 0
        found[array], filled = number, filled + added
    for array, part in tables.items():
        found[array] = number + part
    return tuple(found)


def count_stayed(
    count: int, before: References | None, changed: Iterable[np.ndarray], unknown: Iterable[np.ndarray]
) -> Runs:
    """Returns the column `stayed` of a save.

    Args:
        count: of arrays.
        before: that of the checkpoint with which files were compared; None where they were not.
        changed: for each rank the numbers of the arrays that it has found changed.
        unknown: for each rank the numbers of those that it has not compared, as they were not in such a file before.
    """
    if before is None or length_of(before.stayed) != count:
        return encode_runs(np.ones(count, np.int64))
    old = decode_runs(before.stayed)
    stayed = np.minimum(old + 1, STAYED_SAVES)
    for numbers in unknown:
        stayed[numbers] = old[numbers]
    for numbers in changed:
        stayed[numbers] = 0
    return encode_runs(stayed)
