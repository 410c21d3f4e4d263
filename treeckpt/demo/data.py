"""The training data of the demo: the bytes that the model reads at each step.

The text is the standard library's own sources, which every machine that runs this has. A batch is a pure function of
(text, seed, step, row): the start of each row is drawn by a hash of those numbers, so that no generator has to be
saved and every rank can make exactly its own rows. Tokens are bytes; there is no vocabulary to learn or to store.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TEXT_BYTES = 1 << 20


def read_text(folder: Path | None = None, *, nbytes: int = TEXT_BYTES) -> NDArray[np.uint8]:
    """Returns the first bytes of a folder's top-level Python files, joined in the order of their names.

    Returns:
        1-D, at most `nbytes` long.

    Raises:
        FileNotFoundError: there is no Python source there (some systems ship the library compiled or zipped).
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        if len(text) >= nbytes:
            break
        text += file.read_bytes()
    if not text:
        raise FileNotFoundError(f"{folder}: expected Python sources to train on, found none")
    return np.frombuffer(bytes(text[:nbytes]), dtype=np.uint8)


def row_start(seed: int, step: int, row: int, *, stop: int) -> int:
    """Returns the start of a row of a step's batch in the text: a number in [0, stop)."""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % stop


def batch(text: NDArray[np.uint8], step: int, *, seed: int, rows: range, length: int) -> NDArray[np.int64]:
    """Returns rows of a step's global batch: inputs are `[:, :-1]`, targets `[:, 1:]`.

    Returns:
        (len(rows), length + 1), each row a part of the text.
    """
    stop = len(text) - length
    if stop < 1:
        raise ValueError(f"expected a text of more than {length} bytes, got {len(text)}")
    starts = [row_start(seed, step, row, stop=stop) for row in rows]
    return np.stack([text[start : start + length + 1] for start in starts]).astype(np.int64)
