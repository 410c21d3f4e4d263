"""Says which one command puts a checkpoint right, and what it will do; by what its files and a verification show.

The command line and the pages take it from here. What other bytes still prove is made again by `verify --repair`: a
lost or damaged index, a header, the length of a shard, timings that cannot be read, a sidecar file that has its copy.
Bytes of arrays that are lost, or files, can only be copied back; `verify` then finds that they are right. Where an
index names lost shards beside those of another save, `rebuild-index --replace` makes the index of that. What a save or
a deletion has left is removed by `gc`.
"""

from __future__ import annotations

import msgspec

from .._core.format.files import parse_file_name
from .._core.text import shell_quoted
from .catalog import CheckpointInfo, FilesFault
from .verification import DamagedPart


class RepairAdvice(msgspec.Struct, frozen=True):
    """What to do about a checkpoint that is not right."""

    command: str
    """For a shell."""
    effect: str
    """What it does, as a sentence that follows the command."""

    @property
    def text(self) -> str:
        """Both as a sentence."""
        return f"{self.command} {self.effect}"


_INDEX = "makes the index again from the shards, if they are whole"
_AGAIN = "makes again what the other bytes prove, keeps what was there under another name, and names what is lost"
_COPIED = (
    "shows whether all is right, once the files were copied back from another place: nothing here has the lost bytes. "
    'Without a copy, tc.load(..., fallback=tc.Fallback(on_corrupt="skip")) loads the rest'
)
_OTHER = (
    "makes the index of the other save whose shards are there, if they are whole: those that the index names are gone, "
    "unless they are copied back from another place"
)
_LEFT = "removes it, unless a save or a reader may still need it"
_EFFECTS: dict[FilesFault, str] = {
    "index_lost": _INDEX,
    "index_damaged": _INDEX,
    "files_long": _AGAIN,
    "copies_left": _AGAIN,
    "files_lost": _COPIED,
    "other_save": _OTHER,
    "unfinished": _LEFT,
}


def repair_advice(info: CheckpointInfo) -> RepairAdvice | None:
    """Returns what to do; None where nothing is wrong, or nothing can be done from here.

    Args:
        info: with what is known of its bytes.
    """
    effect = _EFFECTS.get(info.fault) if info.fault else None
    if effect is None and info.damaged:
        problems = info.verification.problems if info.verification is not None else []
        effect = _AGAIN if not problems or any(map(_may_be_made_again, problems)) else _COPIED
    if effect is None:
        return None
    path = shell_quoted(info.path)
    command = {
        _LEFT: f"treeckpt gc {path}",
        _COPIED: f"treeckpt verify {path}",
        _OTHER: f"treeckpt rebuild-index {path} --replace",
    }.get(effect)
    return RepairAdvice(command or f"treeckpt verify {path} --repair", effect)


def _may_be_made_again(part: DamagedPart) -> bool:
    """Whether it is a file that the shards prove, or the header of a shard: that begins with the file."""
    kind = parse_file_name(part.file)
    return kind is not None and (kind.kind in ("index", "timings") or (kind.kind == "shard" and not part.start))
