"""Recognizes the formats of other programs' checkpoints by file names and first bytes; nothing else is read."""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from ..._core.format.files import (
    MAX_SIDECAR_NBYTES,
    MAX_SIDECARS,
    MAX_SIDECARS_NBYTES,
    alike_names,
    is_sidecar_name,
    is_step_name,
    parse_file_name,
    step_of,
)
from ..._core.format.index import INDEX_NAME
from ..._core.text import count_text
from ...errors import CheckpointNotFound, CorruptError, StoreError
from ..os_errors import shows_damage, wrap_read_error
from .local_files import kind_of_file, read_head

DCP_METADATA, DCP_DATA = ".metadata", ".distcp"
HFAI_PART = re.compile(r"PART_([0-9]+)\.pt")
PADDLE_METADATA = re.compile(r"[0-9]+\.metadata")
SAFETENSORS_INDEX = ".safetensors.index.json"
RECIS_KEYS, RECIS_INDEX, RECIS_READERS, RECIS_LIST = "tensorkey.json", "index", "io_state_count", "checkpoint"
"""Files of RecIS: the names of blocks, which shard has each, how many readers there are; and beside the checkpoints of
a run the list of their names."""
_RECIS_WEIGHTS = "torch_rank_weights_embs_table_multi_shard.json"
"""Describes the blocks of a checkpoint of RecIS once more."""
RECIS_DENSE, RECIS_EXTRA = "model.pt", "extra.pt"
RECIS_READER = re.compile(r"io_state_([0-9]{1,9})\.pt")
RECIS_UNDER_WAY = re.compile(r"[0-9]+tensorkey\.json|ckpt-[0-9]{7,}(-[0-9]{7,})?\.(index|data|json)(\.tmp)?")
"""The names of files that a save of RecIS removes before it ends."""
_RECIS_SHARD = re.compile(r"model-[0-9]{6,}-of-[0-9]{6,}\.safetensors")
MAX_LIST_NBYTES = 1 << 20
"""Bytes of a list of checkpoints, at most."""
_LISTED = 1000
"""Names at the end of such a list that are looked for."""
TORCH_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")
"""The ends of the names that files of torch.save mostly have."""
HEAD = 64
"""How many first bytes of a file tell its format."""


class KnownFormat(msgspec.Struct, frozen=True):
    """How a format of another program is recognised."""

    name: str
    text: str
    """What it is called in messages."""
    directory: Callable[[frozenset[str]], bool] | None = None
    """Whether a directory is of it, by the names of its files; None where it is a file."""
    file: Callable[[str, bytes], bool] | None = None
    """Whether a file is, by its name and its first `HEAD` bytes; None where it is a directory."""


_FORMATS: dict[str, KnownFormat] = {}
"""The formats that are registered, by name, in the order in which they are asked."""


def add_format(known: KnownFormat) -> None:
    """Registers a format: it is asked before those that are there."""
    others = {name: other for name, other in _FORMATS.items() if name != known.name}
    _FORMATS.clear()
    _FORMATS.update({known.name: known, **others})


def format_of_names(names: Iterable[str]) -> str | None:
    """Returns the format of a directory by its file names; None for no known one."""
    names = frozenset(names)
    found = (known.name for known in _FORMATS.values() if known.directory is not None and known.directory(names))
    return next(found, None)


def format_of_head(name: str, head: bytes) -> str | None:
    """Returns the format of a file by its name and first bytes; None for no known one."""
    if name.endswith(DCP_DATA):  # tensors one after the other, each as a file of torch.save, of which one would be read
        return None
    found = (known.name for known in _FORMATS.values() if known.file is not None and known.file(name, head))
    return next(found, None)


def _any_matches(pattern: re.Pattern[str]) -> Callable[[frozenset[str]], bool]:
    return lambda names: any(map(pattern.fullmatch, names))


# those that are asked last come first
def _is_recis(names: frozenset[str]) -> bool:
    if names & {RECIS_KEYS, RECIS_READERS} or names >= {RECIS_DENSE, RECIS_EXTRA}:
        return True
    return any(map(RECIS_UNDER_WAY.fullmatch, names))


add_format(
    KnownFormat(
        "pickle",
        "a bare pickle, as torch before 1.6 wrote it",
        # the opcode that pickles of protocol 2 and later begin with
        file=lambda _, head: head[:1] == b"\x80",
    )
)
add_format(
    KnownFormat(
        "safetensors",
        "a safetensors file",
        directory=lambda names: any(name.endswith((".safetensors", SAFETENSORS_INDEX)) for name in names),
        # a length of 8 bytes, then JSON, which may begin with spaces
        file=lambda name, head: head[8:9] == b"{" or name.endswith(".safetensors"),
    )
)
# a zip file, as torch.save writes it since torch 1.6
add_format(KnownFormat("torch", "a file of torch.save", file=lambda _, head: head[:4] == b"PK\3\4"))
add_format(
    KnownFormat(
        "paddle",
        "a checkpoint of Paddle",
        directory=_any_matches(PADDLE_METADATA),
        file=lambda name, _: PADDLE_METADATA.fullmatch(name) is not None,
    )
)
add_format(KnownFormat("recis", "a checkpoint of RecIS", directory=_is_recis))
add_format(KnownFormat("hfai", "a directory of hfai.checkpoint", directory=_any_matches(HFAI_PART)))
add_format(
    KnownFormat("dcp", "a directory of torch.distributed.checkpoint", directory=lambda names: DCP_METADATA in names)
)


def other_formats(names: Iterable[str], kind: str) -> list[str]:
    """Returns, of the files in a directory of one format, the names that files of others have: these are not read."""
    suffixes = TORCH_SUFFIXES if kind == "safetensors" else (".safetensors", *TORCH_SUFFIXES)
    others = [
        name for name in names if name.endswith(suffixes) or (kind != "paddle" and PADDLE_METADATA.fullmatch(name))
    ]
    return sorted(name for name in others if not _is_part(name, kind))


def _is_part(name: str, kind: str) -> bool:
    """Whether a file, which may have a name of another format, is one of a checkpoint of this format."""
    if kind == "recis":
        own = name in (RECIS_DENSE, RECIS_EXTRA, RECIS_KEYS, RECIS_INDEX, RECIS_READERS, _RECIS_WEIGHTS)
        return own or any(pattern.fullmatch(name) for pattern in (RECIS_READER, _RECIS_SHARD))
    return kind == "hfai" and HFAI_PART.fullmatch(name) is not None


SIDECAR_SUFFIXES = (".jinja", ".json", ".md", ".model", ".py", ".txt", ".yaml", ".yml")
"""The ends of the names of small files that belong to a checkpoint of another program: configs, tokenizers, code."""


def sidecar_names(sizes: Mapping[str, int], kind: str) -> list[str]:
    """Returns, of the files in a directory of another program, those that are its sidecar files.

    Args:
        kind: the format of the directory.
    """
    left, names = MAX_SIDECARS_NBYTES, []
    for name, nbytes in sorted(sizes.items()):
        small = nbytes <= min(left, MAX_SIDECAR_NBYTES) and len(names) < MAX_SIDECARS
        beside = is_sidecar_name(name) and name.endswith(SIDECAR_SUFFIXES) and not is_of_format(name, kind)
        if small and beside:
            names.append(name)
            left -= nbytes
    return [name for name in names if name not in alike_names(names)]


def is_of_format(name: str, kind: str) -> bool:
    """Returns whether a file in a directory of this format has a name that this or another format gives its files."""
    metadata = name == DCP_METADATA or PADDLE_METADATA.fullmatch(name) is not None
    ends = DCP_DATA, ".safetensors", SAFETENSORS_INDEX, *TORCH_SUFFIXES
    return metadata or name.endswith(ends) or _is_part(name, kind)


def names_text(names: Iterable[str]) -> str:
    """Lists names: the first five, and how many more."""
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def newest_of_recis(path: Path) -> Path:
    """Returns the checkpoint that the list in a run of RecIS names last; any other path unchanged.

    Raises:
        CheckpointNotFound: it is not there, though others of the list are.
        StoreError: it could not be read, so that this is not known.
    """
    try:
        if not (listed := path / RECIS_LIST).is_file() or listed.stat().st_size > MAX_LIST_NBYTES:
            return path
        lines = (line.strip() for line in listed.read_text(errors="replace").splitlines())
        names = [line for line in lines if line and not Path(line).is_absolute() and ".." not in Path(line).parts]
        there = (path / name for name in names[::-1][:_LISTED] if format_of_names(_names_in(path / name)) == "recis")
        newest = next(there, None)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or shows_damage(error):
            return path
        raise wrap_read_error(error, str(path)) from error
    if newest is not None and newest != path / names[-1]:
        raise CheckpointNotFound(
            str(path / names[-1]),
            expected=f"the checkpoint that {listed} names last",
            found="no checkpoint of RecIS",
            hint=f"Give the path of another one: {newest} is there",
        )
    return newest or path


def _names_in(path: Path) -> list[str]:
    return os.listdir(path) if path.is_dir() else []


def format_at(path: Path) -> tuple[str | None, list[str] | None]:
    """Returns the format of a local file or directory, None for no known one, and the names in a directory.

    Raises:
        StoreError: it could not be read, so that this is not known.
    """
    try:
        names = os.listdir(path) if path.is_dir() else None
        return format_of_head(path.name, read_head(path, HEAD)) if names is None else format_of_names(names), names
    except (ValueError, CorruptError):  # what is wrong with the path is said where a checkpoint is expected
        return None, None
    except OSError as error:
        if not shows_damage(error):
            raise wrap_read_error(error, str(path)) from error
        return None, None


def describe_foreign(url: str) -> tuple[str, str] | None:
    """Describes another program's checkpoint at a local path: (what it is, how to load it); None if there is none.

    Raises:
        StoreError: it could not be read, so that this is not known.
    """
    kind, names = (None, None) if "://" in url else format_at(newest_of_recis(Path(url)))
    if kind is None or INDEX_NAME in (names or ()):
        return None
    if kind == "pickle":
        return _FORMATS[kind].text, "Load it with torch, in a place where its code may run, and save it anew"
    found = "a directory of safetensors files" if kind == "safetensors" and names is not None else _FORMATS[kind].text
    unread = other_formats(names or (), kind)
    return found + (f" (not read: {names_text(unread)})" if unread else ""), _as_it_is(url)


def refuse_file(path: str) -> None:
    """Refuses a file in place of a run, and a path through a link that leads nowhere.

    Raises:
        CheckpointNotFound: naming what the file is, or the link.
    """
    expected = "a run, the directory that holds the checkpoints"
    if (link := link_to_nothing(Path(path))) is not None:
        found, hint = link[0], f"{link[1]}; or give the path of the run itself"
        raise CheckpointNotFound(path, expected=expected, found=found, hint=hint)
    if Path(path).exists() and not Path(path).is_dir():
        found, hint = describe_foreign(path) or describe_place(path)
        raise CheckpointNotFound(path, expected=expected, found=found, hint=hint)


def link_to_nothing(path: Path) -> tuple[str, str] | None:
    """Describes the link on the way to a local path that leads nowhere: (what it is, what to do); None without one."""
    for place in (path, *path.parents) if not path.exists() else ():
        if place.is_symlink() and not place.exists():
            return f"{place}, a link to {os.readlink(place)}, where nothing is", "Mount or make what it leads to"
    return None


def _as_it_is(url: str) -> str:
    return f"Read it as it is with treeckpt show or tc.load, or convert it: tc.convert.convert({url!r}, 'NEW')"


def describe_place(url: str) -> tuple[str, str]:
    """Describes a place without a checkpoint: (what is there, what to do). Only local paths are looked at."""
    path, hint = Path(url), "Check the path"
    try:
        if "://" in url:
            return "none", hint
        if (link := link_to_nothing(path)) is not None:
            return link
        if not path.exists():
            near = next(parent for parent in path.parents if parent.exists())
            return "nothing at this path", f"{hint}: {_meant(path, near)}{near} {_held(near)}"
        if not path.is_dir() and not path.is_file():
            return kind_of_file(path.stat().st_mode), f"{hint}: a checkpoint is a directory or a file"
        steps = [name for name in os.listdir(path) if is_step_name(name)] if path.is_dir() else []
        if path.name.endswith(DCP_DATA):
            return "a data file of torch.distributed.checkpoint", f"Give its directory, {path.parent}"
        if path.name.endswith(SAFETENSORS_INDEX):
            return "an index of files of safetensors", f"Give its directory, {path.parent}"
        if not steps and path.is_dir():
            below = ", ".join(itertools.islice(_loadable_below(path, 3), 3))
            return f"a directory that {_held(path)}", f"Give one of those below it: {below}" if below else hint
        if not steps and parse_file_name(path.name) is not None:
            return "a file of a checkpoint", f"Give the directory that holds it, {path.parent}"
        if not steps:
            return "a file of no known format", hint
    except (OSError, StoreError):
        return "none", hint
    newest = path / max(steps, key=lambda name: step_of(name) or 0)
    found = f"a run of {count_text(len(steps), 'step')}"
    return found, f"Load a step, as {newest}, or take tc.Manager({url!r}), which chooses the newest"


def _loadable_below(path: Path, depth: int) -> Iterator[str]:
    """Yields the paths of checkpoints, runs and files of other programs in a directory; looks at 30 names of each."""
    for child in sorted(path.iterdir())[:30]:
        names = os.listdir(child) if child.is_dir() and os.access(child, os.R_OK | os.X_OK) else []
        if INDEX_NAME in names or any(map(is_step_name, names)) or describe_foreign(str(child)):
            yield str(child)
        elif names and depth > 1:
            yield from _loadable_below(child, depth - 1)


def _meant(path: Path, near: Path) -> str:
    """Names the path with the most similar name in `near`, its last existing parent; empty if none is similar."""
    wrong, *rest = path.relative_to(near).parts
    names = [name for name in os.listdir(near)[:10_000] if name != wrong] if near.is_dir() else []
    found = difflib.get_close_matches(wrong, names, n=1)
    return f"near to it is {near.joinpath(*found, *rest)}. " if found else ""


def _held(path: Path) -> str:
    if not path.is_dir():
        return "is a file"
    names = sorted(os.listdir(path))
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"holds {', '.join(names[-5:])}{more}" if names else "is empty"
