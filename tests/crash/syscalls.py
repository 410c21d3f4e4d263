"""Which system calls did a program make on the files below a directory? Recorded with strace, read as effects.

Nothing is taken from the program's word: the bytes are those of its writes, and what is durable follows from its fsyncs
alone. A file's fsync makes its content durable, not its name; a name is durable after an fsync of its directory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

__all__ = ["Effect", "Recording", "Sync", "record", "why_not"]

CALLS = (
    *("openat", "?open", "?creat", "pwrite64", "pwritev", "?pwritev2", "write", "writev", "ftruncate", "?truncate"),
    *("fallocate", "fsync", "fdatasync", "?rename", "renameat", "?renameat2", "?link", "linkat", "?symlink"),
    *("symlinkat", "?unlink", "unlinkat", "?mkdir", "mkdirat", "?rmdir"),
)
LINE = re.compile(r"^(?P<pid>\d+) +(?:<\.\.\. \w+ resumed>)?(?P<text>.*?)(?P<open> ?<unfinished \.\.\.>)?$")
CALL = re.compile(r"^(?P<name>\w+)\((?P<arguments>.*?)\)? += (?P<result>-?\d+)")
HEX = re.compile(r"(?:\\x[0-9a-f]{2})+")


class Effect(msgspec.Struct, frozen=True):
    """What one call changes of one node: bytes of a file, its size, or names of a directory.

    It takes effect at some moment between two lines of the recording.
    """

    begin: int
    end: int
    node: int
    offset: int = 0
    data: bytes = b""
    size: int | None = None
    """The new size; with `grows`, at least that."""
    grows: bool = False
    names: tuple[tuple[str, int | None], ...] = ()
    """What each stands for now; None for nothing. They change together."""


class Sync(msgspec.Struct, frozen=True):
    """An fsync of a node."""

    begin: int
    end: int
    node: int


class Recording(msgspec.Struct):
    """All effects and syncs, in the order in which the calls returned. Node 0 is the directory itself."""

    files: dict[int, bytes]
    """The content of the files that there were before."""
    folders: dict[int, dict[str, int]]
    """The same of the directories."""
    effects: list[Effect] = []
    syncs: list[Sync] = []
    returned: int | None = None
    """When the program said, by looking for a file `returned`, that its save had returned."""
    end: int = 0


def why_not() -> str:
    """Why system calls can not be recorded here; "" if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-f", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"strace may not trace here: {tried.stderr.strip()}"


def record(root: Path, command: Sequence[str], trace: Path, *, cwd: Path) -> Recording:
    """Runs a program to its end, and gives what it did below `root`."""
    recorder = _Reader(root.resolve())
    options = ["-f", "--seccomp-bpf", "-qq", "-y", "-xx", "-s", "100000000", "-e", "trace=" + ",".join(CALLS)]
    done = subprocess.run(
        ["strace", *options, "-o", str(trace), *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with open(trace) as lines:
        for begin, end, text in _calls(lines):
            recorder.read(begin, end, text)
    return recorder.recording


def _calls(lines: Iterator[str]) -> Iterator[tuple[int, int, str]]:
    """(line at which it began, line at which it returned, its text) of each call."""
    begun: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(lines):
        match = LINE.match(line.rstrip("\n"))
        if match is None:
            continue
        begin, before = begun.pop(match["pid"], (number, ""))
        if match["open"]:
            begun[match["pid"]] = (number, match["text"])
        else:
            yield begin, number, before + match["text"]


def _plain(text: str) -> str:
    return HEX.sub(lambda m: os.fsdecode(bytes.fromhex(m[0].replace("\\x", ""))), text).strip('"')


class _Reader:
    """Follows which name stands for which node while the calls are read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.recording = Recording({}, {})
        self.names: dict[str, int] = {}
        self._number = 0
        self._take(root)

    def _take(self, path: Path) -> int:
        node = self.names[str(path)] = self._next()
        if path.is_dir():
            self.recording.folders[node] = {child.name: self._take(child) for child in sorted(path.iterdir())}
        else:
            self.recording.files[node] = path.read_bytes()
        return node

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def read(self, begin: int, end: int, text: str) -> None:
        self.recording.end = end + 1
        match = CALL.match(text)
        if match is None:
            return
        arguments = match["arguments"].split(", ")
        if "O_" in text and self._path(arguments, 0 if match["name"] == "open" else 1) == str(self.root / "returned"):
            self.recording.returned = end
        if int(match["result"]) < 0:
            return
        handler = getattr(self, f"_{match['name']}", None)
        on_fd = arguments[0].partition("<")[2].rstrip(">")
        if handler is not None:
            handler(begin, end, arguments)
        elif self._ours(_plain(on_fd)) or any(self._ours(_plain(a)) for a in arguments):
            raise AssertionError(f"a call of which the effect is not known: {text[:300]}")

    def _ours(self, path: str) -> bool:
        return path == str(self.root) or path.startswith(f"{self.root}/")

    def _path(self, arguments: Sequence[str], at: int) -> str:
        """A path, relative to the directory before it, if there is one."""
        path = _plain(arguments[at])
        base = _plain(arguments[at - 1].partition("<")[2].rstrip(">")) if at else str(self.root)
        return os.path.normpath(os.path.join(base, path))

    def _node(self, argument: str) -> int | None:
        """Of a file descriptor; None if it is not below the root."""
        path = _plain(argument.partition("<")[2].rstrip(">"))
        if not self._ours(path):
            return None
        assert path in self.names, f"{path} is not known"
        return self.names[path]

    def _change(self, begin: int, end: int, names: dict[str, int | None]) -> None:
        """Names change at once; they must lie in one directory, as nothing is moved from one to another."""
        parents = {os.path.dirname(name) for name in names}
        assert len(parents) == 1, names
        for name, node in names.items():
            self.names.pop(name, None)
            if node is not None:
                self.names[name] = node
        changes = tuple((os.path.basename(name), node) for name, node in names.items())
        self.recording.effects.append(Effect(begin, end, self.names[parents.pop()], names=changes))

    # the calls ---------------------------------------------------------------------------------------------------
    def _openat(self, begin: int, end: int, arguments: list[str]) -> None:
        path = self._path(arguments, 1)
        if not self._ours(path):
            return
        if "O_CREAT" in arguments[2] and path not in self.names:
            node = self._next()
            self.recording.files[node] = b""
            self._change(begin, end, {path: node})
        elif "O_TRUNC" in arguments[2]:
            self.recording.effects.append(Effect(begin, end, self.names[path], size=0))

    def _open(self, begin: int, end: int, arguments: list[str]) -> None:
        self._openat(begin, end, [f"AT_FDCWD<{self.root}>", *arguments])

    def _pwrite64(self, begin: int, end: int, arguments: list[str]) -> None:
        if (node := self._node(arguments[0])) is not None:
            data = bytes.fromhex(arguments[1].strip('"').replace("\\x", ""))
            assert len(data) == int(arguments[2]), "the trace has all bytes"
            self.recording.effects.append(Effect(begin, end, node, int(arguments[3]), data))

    def _write(self, begin: int, end: int, arguments: list[str]) -> None:
        """Files of ours that are written so are written front to back."""
        if (node := self._node(arguments[0])) is not None:
            at = sum(len(effect.data) for effect in self.recording.effects if effect.node == node)
            self._pwrite64(begin, end, [*arguments, str(at)])

    def _ftruncate(self, begin: int, end: int, arguments: list[str]) -> None:
        if (node := self._node(arguments[0])) is not None:
            self.recording.effects.append(Effect(begin, end, node, size=int(arguments[1])))

    def _fallocate(self, begin: int, end: int, arguments: list[str]) -> None:
        if (node := self._node(arguments[0])) is not None:
            size = int(arguments[2]) + int(arguments[3])
            self.recording.effects.append(Effect(begin, end, node, size=size, grows=True))

    def _fsync(self, begin: int, end: int, arguments: list[str]) -> None:
        if (node := self._node(arguments[0])) is not None:
            self.recording.syncs.append(Sync(begin, end, node))

    _fdatasync = _fsync

    def _rename(self, begin: int, end: int, arguments: list[str]) -> None:
        self._renamed(begin, end, self._path(arguments[:1], 0), self._path(arguments[1:], 0))

    def _renameat(self, begin: int, end: int, arguments: list[str]) -> None:
        self._renamed(begin, end, self._path(arguments, 1), self._path(arguments, 3))

    _renameat2 = _renameat

    def _renamed(self, begin: int, end: int, source: str, target: str) -> None:
        if self._ours(source):
            self._change(begin, end, {source: None, target: self.names[source]})

    def _link(self, begin: int, end: int, arguments: list[str]) -> None:
        self._linked(begin, end, self._path(arguments[:1], 0), self._path(arguments[1:], 0))

    def _linkat(self, begin: int, end: int, arguments: list[str]) -> None:
        self._linked(begin, end, self._path(arguments, 1), self._path(arguments, 3))

    def _linked(self, begin: int, end: int, source: str, target: str) -> None:
        if self._ours(source):
            self._change(begin, end, {target: self.names[source]})

    def _unlink(self, begin: int, end: int, arguments: list[str]) -> None:
        if self._ours(path := self._path(arguments[:1], 0)):
            self._change(begin, end, {path: None})

    _rmdir = _unlink

    def _unlinkat(self, begin: int, end: int, arguments: list[str]) -> None:
        if self._ours(path := self._path(arguments, 1)):
            self._change(begin, end, {path: None})

    def _mkdir(self, begin: int, end: int, arguments: list[str]) -> None:
        self._made(begin, end, self._path(arguments[:1], 0))

    def _mkdirat(self, begin: int, end: int, arguments: list[str]) -> None:
        self._made(begin, end, self._path(arguments, 1))

    def _made(self, begin: int, end: int, path: str) -> None:
        if self._ours(path):
            node = self._next()
            self.recording.folders[node] = {}
            self._change(begin, end, {path: node})
