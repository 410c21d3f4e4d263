"""The process that measures by how much the arrays of two checkpoints differ: it reads both, and keeps the result.

It prints how many bytes it has read, and why it failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from treeckpt._core.tree.spec import BLOB_KINDS
from treeckpt._inspect.diff import comparable, diff
from treeckpt._io.storage.local_store import for_reading
from treeckpt._io.storage.store import DirectoryEntry, Store
from treeckpt._io.storage.wrapped_store import CountingStore
from treeckpt._loading.compare import measured_pairs
from treeckpt._loading.run_load import opened
from treeckpt._runs.statistics_store import ChangeStore, ComparedSave
from treeckpt._runs.verification import fingerprint_of

from ..store.jobs import Failed, ReadPrinter, folder_at, send


def main(arguments: Sequence[str]) -> None:
    """Measures two checkpoints.

    Args:
        arguments: the URL of a run, empty for a local folder, and the name of the folder in it, or its path, of the
            first checkpoint and of the second one; the cache directory.
    """
    run_a, name_a, run_b, name_b, cache = arguments
    printer = ReadPrinter()
    folders = [folder_at(run_a, name_a), folder_at(run_b, name_b)]
    before = [folder.listed().entries() for folder in folders]
    first, second = (CountingStore(for_reading(folder), printer.add) for folder in folders)
    with opened(first) as a, opened(second) as b:
        a.check_against_files()
        b.check_against_files()
        saves = (_save(folders[0], before[0], a.index.save_id), _save(folders[1], before[1], b.index.save_id))
        both = comparable(a.index, b.index, diff(a.index, b.index))
        pairs = [(x, y) for x, y in both if x.spec is not None and x.spec.kind not in BLOB_KINDS]
        if not ChangeStore(Path(cache)).record(*saves, measured_pairs(a, b, pairs)):
            send(Failed("the result could not be written to the cache"))


def _save(folder: Store, entries: Mapping[str, DirectoryEntry], save_id: str) -> ComparedSave:
    return ComparedSave(folder.place, save_id, fingerprint_of(entries, save_id))
