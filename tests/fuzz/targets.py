"""What is fuzzed: each decoder with documents that were right once, changed as an attacker would, with seals that fit.

A target is a Hypothesis test of its own: run as such by pytest, and driven by coverage through `python -m tests.fuzz`.
Each lets only errors of ours out, within bounded memory.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch  # not within the first example, which is measured
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers.foreign_files import file_window
from tests.helpers.world import on_ranks, small_tree
from treeckpt._arrays.registry import decode
from treeckpt._core.format.byte_map import extents_in_file, locate_chunks
from treeckpt._core.format.files import Progress, decode_progress, encode_progress
from treeckpt._core.format.index import INDEX_NAME, decode_index
from treeckpt._core.format.references import decode_shared
from treeckpt._core.format.shard_header import decode_header, header_nbytes, sealed
from treeckpt._core.format.timings import Span, Timings, decode_timings, encode_timings
from treeckpt._core.tree.structure import Structure, paths_of, tables_of
from treeckpt._core.tree.value_codec import Value
from treeckpt._foreign.pickle_reader import read_pickle
from treeckpt._foreign.pickle_values import PLAIN, build_tree
from treeckpt._inspect.outline import Outline
from treeckpt._io.storage.open import open_store

__all__ = ["TARGETS"]

EXAMPLES = int(os.environ.get("TREECKPT_FUZZ_EXAMPLES", "40"))
MOST = 96 << 20
"""Bytes that a document of a few kilobytes may make a reader allocate."""

SECONDS = 5.0
"""Of this thread's computing, at most; an honest document takes some milliseconds."""

bounded = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@contextlib.contextmanager
def only_ours() -> Iterator[None]:
    """Lets errors of ours pass, and nothing else; bounds the memory."""
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before, begin = tracemalloc.get_traced_memory()[0], time.thread_time()
    try:
        yield
    except tc.TreeckptError as error:
        assert len(str(error)) < 5000, "an error of a few lines"
    finally:
        peak = tracemalloc.get_traced_memory()[1] - before
        if started:
            tracemalloc.stop()
    assert peak < MOST, f"{peak >> 20} MiB"
    assert time.thread_time() - begin < SECONDS, f"{time.thread_time() - begin:.1f} s of computing"


# documents ------------------------------------------------------------------------------------------------------------
NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 7, 255, 1 << 16, 1 << 24, 1 << 31, 1 << 40, 1 << 62, 1 << 63, 10**30]) | (
    st.integers(-(1 << 64), 1 << 64)
)
TEXTS = st.sampled_from(
    ["", "x", "/", "..", "../../etc/passwd", "a/b", "~rank0", "~rank*", "@0", "__metadata__", "os:system", "float1024"]
) | st.text(max_size=8)
WORDS = st.sampled_from(["a", "t", "v", "pa", "pv", "w", "g", "b", "n", "list", "dict", "tuple", "per_rank", "table"])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | TEXTS | WORDS,
    lambda below: st.lists(below, max_size=4) | st.dictionaries(TEXTS | WORDS, below, max_size=3),
    max_leaves=8,
)


def _places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield (*at, key)
        yield from _places(child, (*at, key))


def mutate(document: Any, data: st.DataObject) -> Any:
    """A document with a few of its parts replaced, repeated, moved or taken away."""
    document = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        places = list(_places(document))
        if not places:
            break
        at = data.draw(st.sampled_from(places), "where")
        parent = document
        for key in at[:-1]:
            parent = parent[key]
        act = data.draw(st.sampled_from(["replace", "near", "drop", "repeat", "move"]), "what")
        if act == "replace":
            parent[at[-1]] = data.draw(JSON, "by")
        elif act == "near" and type(parent[at[-1]]) is int:
            parent[at[-1]] += data.draw(st.sampled_from([-1, 1, 8, -4096, 4096]), "by")
        elif act == "drop":
            del parent[at[-1]]
        elif act == "repeat" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[at[-1]]))
        else:
            parent[at[-1]] = copy.deepcopy(_at(document, data.draw(st.sampled_from(places), "from")))
    return document


def _at(node: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        node = node[key]
    return node


@lru_cache
def saved() -> tc.MemoryStore:
    """A checkpoint of two ranks with leaves of all kinds."""
    store = tc.MemoryStore()

    def tree(rank: int) -> Any:
        table = tc.KeyedTable(
            np.arange(40) + 64 * rank, {"w": np.ones((40, 3))}, buckets=128, owned=(64 * rank, 64 * rank + 64)
        )
        return {**small_tree(rank, 2), "view": [1j, b"x", {1: (None, 2.5)}], "table": table}

    outcomes = on_ranks(2, lambda c: tc.save(store, tree(c.rank), comm=c))
    assert all(outcome.error is None for outcome in outcomes)
    return store


@lru_cache
def index_document() -> Any:
    return msgspec.json.decode(bytes(saved().files[INDEX_NAME]))


@lru_cache
def header_document() -> Any:
    name = next(name for name in sorted(saved().files) if name.endswith(".safetensors"))
    data = bytes(saved().files[name])
    return msgspec.json.decode(data[8 : header_nbytes(data[:8], name)])


def reseal(document: Any) -> bytes:
    if isinstance(document, dict) and "seal" in document:
        document = {"seal": "0" * 16} | {k: v for k, v in document.items() if k != "seal"}
    text = msgspec.json.encode(document)
    return sealed(text) if b'"seal":"' in text[:256] else text


# targets --------------------------------------------------------------------------------------------------------------
@bounded
@given(st.data())
def indexes(data: st.DataObject) -> None:
    """An index that fits its seal: read, listed, looked into, and loaded by."""
    document = mutate(index_document(), data)
    encoded = reseal(document)
    with only_ours():
        index = decode_index(encoded)
        with contextlib.suppress(tc.TreeckptError):
            Outline.of(index).children("", count=20)
        for leaf in index.entries[:20]:
            with contextlib.suppress(tc.TreeckptError):
                locate_chunks(index, leaf)
        for file in index.file_list[:4]:
            extents_in_file(index, file)
    store = tc.MemoryStore()
    store.files.update(saved().files)
    store.files[INDEX_NAME] = bytearray(encoded)
    for act in (lambda: tc.load(store, fallback=tc.Fallback(per_rank="take")), lambda: tc.verify(store)):
        with only_ours():
            act()


@lru_cache
def ranges_document() -> Any:
    return msgspec.json.decode((Path(__file__).parents[1] / "golden" / "version_1_ranges" / INDEX_NAME).read_bytes())


@bounded
@given(st.data())
def ranges(data: st.DataObject) -> None:
    """An index of arrays that are cut into ranges."""
    encoded = reseal(mutate(ranges_document(), data))
    with only_ours():
        index = decode_index(encoded)
        for leaf in index.entries[:20]:
            with contextlib.suppress(tc.TreeckptError):
                locate_chunks(index, leaf)


@bounded
@given(st.data())
def headers(data: st.DataObject) -> None:
    """A shard's header that fits its seal."""
    document = mutate(header_document(), data)
    if isinstance(document, dict) and isinstance(document.get("__metadata__"), dict):
        rest = {k: v for k, v in document["__metadata__"].items() if k != "seal"}
        document = {"__metadata__": {"seal": "0" * 16} | rest} | document | {}
        document["__metadata__"] = {"seal": "0" * 16} | rest
    text = msgspec.json.encode(document)
    text = text.ljust(-(-(8 + len(text)) // 4096) * 4096 - 8)
    encoded = len(text).to_bytes(8, "little") + text
    with only_ours():
        decode_header(sealed(encoded) if b'"seal":"' in encoded[:256] else encoded, "shard")


FROZEN = np.arange(70_000)
HOMES = st.sampled_from(
    ["..", ".", "", "/", "/etc", "a/b", "..\\x", "a\0b", ".x", "x" * 256, "home", "sharer", "other", "h\u00f6me"]
)


@lru_cache
def run_of_two() -> str:
    """The URL of a run in which `sharer` shares a file of `home`."""
    run = "memory://fuzz/run"
    tree = {"frozen": torch.nn.Parameter(torch.from_numpy(FROZEN), requires_grad=False), "step": 1}
    tc.save(f"{run}/before", tree, overwrite=True)
    tc.save(f"{run}/home", tree, base=f"{run}/before", overwrite=True)
    tc.save(f"{run}/sharer", tree, base=f"{run}/home", overwrite=True)
    assert set(tc.inspect(f"{run}/sharer").shared_names.values()) == {"home"}
    return run


@bounded
@given(st.data())
def references(data: st.DataObject) -> None:
    """What an index, or a shard's header, says to lie elsewhere: nothing outside the run, all as it was saved."""
    store = open_store(f"{run_of_two()}/sharer")
    whole = store.read(INDEX_NAME, limit=1 << 20)
    document = msgspec.json.decode(whole)
    found = document["index"]["references"]
    if data.draw(st.booleans(), "home"):
        found["homes"][0][0] = data.draw(HOMES, "name")
    else:
        document["index"]["references"] = mutate(found, data)
    with only_ours():
        files = decode_index(reseal(document)).file_list
        assert all(is_plain(file.directory) for file in files)
    shared = mutate([[["home", "0123456789abcdef"], 1, 1, 0, 560_000, 4096]], data)
    with only_ours():
        assert all(is_plain(one.home.directory) for one in decode_shared(msgspec.json.encode(shared).decode(), "shard"))
    store.publish(INDEX_NAME, reseal(document), replace=True)
    try:
        with only_ours():
            assert np.array_equal(tc.load(store)["frozen"].numpy(), FROZEN)
        with only_ours():
            tc.verify(store)
    finally:
        store.publish(INDEX_NAME, whole, replace=True)


def is_plain(name: str) -> bool:
    return not name.startswith(".") and not set(name) & {"/", "\\", "\0"}


@bounded
@given(st.data())
def structures(data: st.DataObject) -> None:
    """The tree of an index."""
    encoded = msgspec.json.encode(mutate(index_document()["index"]["structure"], data))
    with only_ours(), contextlib.suppress(msgspec.MsgspecError, RecursionError):
        structure = msgspec.json.decode(encoded, type=Structure)
        paths_of(structure)
        tables_of(structure)


@bounded
@given(st.data())
def timings(data: st.DataObject) -> None:
    """The record of how long a save took."""
    spans = (Span("save", 0, 0, 9), Span("write", 0, 1, 5, 100, 0), Span("save", 1, 0, 8))
    document = msgspec.json.decode(encode_timings(Timings("0123456789abcdef", 5, 2, spans)))
    encoded = reseal(mutate(document, data))
    with only_ours():
        found = decode_timings(encoded, "timings")
        assert all(0 <= span.rank < found.world and span.seconds >= 0 for span in found.spans)


@bounded
@given(st.data())
def progress(data: st.DataObject) -> None:
    """The record of a save under way."""
    record = Progress("0123456789abcdef", 0, 2, 5, "write", 10, 100, 1, 2)
    encoded = msgspec.json.encode(mutate(msgspec.json.decode(encode_progress(record)), data))
    with only_ours():
        assert 0 <= decode_progress(encoded, "progress").fraction <= 1


@bounded
@given(st.data())
def values(data: st.DataObject) -> None:
    """Python values, as an index has them."""
    leaves = [leaf[1] for leaf in index_document()["index"]["leaves"] if leaf[0] == "v"]
    value = mutate({"value": data.draw(st.sampled_from(leaves) | JSON)}, data).get("value")
    with only_ours(), contextlib.suppress(msgspec.MsgspecError, RecursionError):
        decode(msgspec.json.decode(msgspec.json.encode(value), type=Value), "value", allow_pickle=False)


@bounded
@given(document=st.binary(max_size=200), at=st.integers(0, 400), protocol=st.integers(0, 5))
def pickles(document: bytes, at: int, protocol: int) -> None:
    """Pickles of other libraries: read as data, whatever they ask for."""
    good = pickle.dumps({"a": [1, (2.5, "x")], "b": {b"y"}, "c": np.dtype("f4"), "d": range(3)}, protocol)
    for content in (document, good[:at] + document + good[at + len(document) :]):
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "data.pkl"
            file.write_bytes(content)
            with only_ours():
                window = file_window(file)
                build_tree(read_pickle(window, PLAIN), window.label)


@bounded
@given(document=st.binary(max_size=600))
def raw_bytes(document: bytes) -> None:
    """Anything at all, to every decoder."""
    for encoded in (document, b'{"seal":"0000000000000000",' + document):
        fits = sealed(encoded) if b'"seal":"0000000000000000"' in encoded else encoded
        decoders: tuple[Callable[[bytes, str], object], ...] = (
            decode_index,
            decode_header,
            decode_timings,
            decode_progress,
            header_nbytes,
        )
        for decoder in decoders:
            with only_ours():
                decoder(fits, "file")


TARGETS: dict[str, Any] = {
    f.__name__: f
    for f in (indexes, ranges, headers, references, structures, timings, progress, values, pickles, raw_bytes)
}
