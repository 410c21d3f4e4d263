"""Long texts and bytes are stored in the shards, as bytes and once, and are values all the same."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers.second_reader import read
from tests.helpers.world import errors_of, on_ranks, reseal
from treeckpt._arrays.registry import MAX_VALUE_NBYTES
from treeckpt._cli.main import main
from treeckpt._loading.compare import value_changes
from treeckpt._loading.run_load import opened
from treeckpt.convert import convert

SIZES = st.sampled_from([0, 1, 1365, 1366, 2048, 2049, 4095, 4096, 4097, 5000, 70_000])
LETTERS = st.sampled_from(["a", "é", "€", "😀", "\0", "\udc80", "\n"])
TEXTS = st.builds(lambda n, letter, end: letter * n + end, SIZES, LETTERS, st.text(max_size=3))
BLOBS = st.one_of(
    TEXTS,
    st.builds(lambda n, end: b"\xff" * n + end, SIZES, st.binary(max_size=3)),
    st.builds(lambda n, end: bytearray(b"\0" * n + end), SIZES, st.binary(max_size=3)),
)
TREES = st.recursive(
    st.one_of(BLOBS, st.integers(), st.none(), st.builds(np.arange, st.integers(0, 3))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        assert found.tolist() == expected.tolist()
    else:
        assert found == expected


def long_tree() -> dict[str, Any]:
    return {
        "reader": bytes(range(256)) * 40,
        "log": ["é" * 3000, "short", 3],
        "buffer": bytearray(b"ab" * 4000),
        "names": "\udc80" * 2000,
        "w": np.arange(4.0),
        "short": "x" * MAX_VALUE_NBYTES,
    }


@settings(max_examples=12, deadline=None)
@given(shared=TREES, own=st.lists(TREES, min_size=2, max_size=2))
def test_texts_and_bytes_of_any_length_come_back_exactly(shared: Any, own: list[Any]) -> None:
    store = tc.MemoryStore()

    def save(comm: Any) -> None:
        tc.save(store, {"shared": shared, "own": tc.PerRank(own[comm.rank])}, comm=comm)

    assert errors_of(on_ranks(2, save)) == [None, None]
    found = [one.value for one in on_ranks(2, lambda comm: tc.load(store, comm=comm))]
    for rank, tree in enumerate(found):
        assert_same(tree["shared"], shared)
        assert_same(tree["own"].value, own[rank])
    assert tc.verify(store).ok
    index = tc.rebuild_index(store, replace=True)
    assert all(leaf.nbytes <= index.nbytes for leaf in index.entries)
    assert_same(tc.load(store, select=["shared"])["shared"], shared)


def test_only_those_of_more_than_4_kib_are_in_the_shard(tmp_path: Path) -> None:
    tree = {"text": "é" * 2048, "longer": "é" * 2049, "bytes": b"x" * 4096, "more": bytearray(4097)}
    tc.save(tmp_path / "c", tree)
    index = tc.inspect(tmp_path / "c")
    assert {leaf.path: leaf.nbytes for leaf in index.entries} == {"text": 0, "longer": 4098, "bytes": 0, "more": 4097}
    assert index.nbytes == 4098 + 4097 and all(leaf.spec is None for leaf in index.entries)
    assert_same(tc.load(tmp_path / "c"), tree)
    assert read(tmp_path / "c") == {**tree, "text": tree["text"], "bytes": read(tmp_path / "c")["bytes"]}
    safetensors = pytest.importorskip("safetensors.numpy")
    [shard] = (tmp_path / "c").glob("*.safetensors")
    assert safetensors.load_file(shard)["longer"].tobytes() == tree["longer"].encode()


def test_a_large_blob_is_stored_once_without_memory_of_its_own(tmp_path: Path) -> None:
    program = """
import resource, sys, treeckpt as tc, numpy as np
blob = np.random.default_rng(0).bytes(64 << 20)
tc.save(sys.argv[1] + "/small", {"reader": blob[:10_000], "w": np.zeros(1 << 20, np.uint8)})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tc.save(sys.argv[1] + "/c", {"reader": blob})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 24 << 10  # KiB: a few blocks of I/O
    assert sum(file.stat().st_size for file in (tmp_path / "c").iterdir()) < (64 << 20) * 1.001
    assert tc.inspect(tmp_path / "c").nbytes == 64 << 20


def test_ls_counts_them_and_show_prints_their_first_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tc.Manager(tmp_path) as manager:
        manager.save(
            1, {"reader": b"\x1b[31m" + bytes(1 << 20), "log": "first\nline " * 1000, "own": tc.PerRank("z" * 5000)}
        )
    folder = str(tmp_path / "step_00000001")

    def printed(*command: str) -> str:
        assert main([*command]) == 0
        return capsys.readouterr().out

    assert "1.06 MB" in printed("ls", str(tmp_path))
    assert "bytes of 1,048,581 bytes" in printed("show", folder)
    assert "str of 11,000 bytes" in printed("show", folder, "--structure")
    shown = printed("show", folder, "log")
    assert "'first\\nline first" in shown and "11,000 bytes" in shown and "match their checksums" in shown
    assert "\x1b" not in printed("show", folder, "reader") and "'zzz" in printed("show", folder, "own/~rank*")
    assert json.loads(printed("show", folder, "log", "--json"))["values"]["text"].startswith("'first\\nline")


def test_a_changed_byte_is_found_and_only_its_leaf_is_lost(tmp_path: Path) -> None:
    tree = long_tree()
    tc.save(tmp_path / "c", tree)
    [shard] = (tmp_path / "c").glob("*.safetensors")
    index = tc.inspect(tmp_path / "c")
    [leaf] = index.by_path["reader"]
    file, at = index.locate(0, index.chunks_of(leaf)[0].start, index.chunks_of(leaf)[0].start + 1, "reader")
    data = bytearray(shard.read_bytes())
    data[at + 17] ^= 1
    shard.write_bytes(data)
    report = tc.verify(tmp_path / "c")
    assert not report.ok and "reader" in report.problems[0].leaves
    with pytest.raises(tc.CorruptError, match=file.name):
        tc.load(tmp_path / "c")
    into = {**tree, "reader": b""}
    with pytest.raises(tc.CorruptError, match=file.name):
        tc.load_into(tmp_path / "c", into)
    assert into["reader"] == b""
    assert tc.load(tmp_path / "c", fallback=tc.Fallback(on_corrupt="skip"))["reader"] is ...


def test_ranks_whose_texts_differ_are_told_so() -> None:
    def save(comm: Any, own: list[Any]) -> None:
        tc.save(tc.MemoryStore(), {"log": own[comm.rank]}, comm=comm)

    far = "x" * (1 << 20)
    for own, message in (
        ([far + "a", far + "b"], "log: .*equal"),
        (["a" * 5000, "b" * 5001], r"log: .*rank 0 has a str of 5000 bytes.*rank 1 has a str of 5001 bytes"),
        (["a" * 5000, b"a" * 5000], r"log: .*rank 0 has a str of 5000 bytes.*rank 1 has a bytes of 5000 bytes"),
        (["a" * 5000, "a" * 4000], r"log: .*rank 0 has a str of 5000 bytes.*rank 1 has a value"),
    ):
        store = tc.MemoryStore()
        errors = errors_of(
            on_ranks(2, lambda comm, own=own, store=store: tc.save(store, {"log": own[comm.rank]}, comm=comm))
        )
        for error in errors:
            with pytest.raises(tc.TreeckptError, match=message):
                raise error or AssertionError("saved")


def test_they_are_values_for_every_load(tmp_path: Path) -> None:
    tree = long_tree()
    tc.save_async(tmp_path / "c", tree).result()
    like = {"reader": b"", "log": ["", "", 0], "buffer": None, "names": 1, "w": np.zeros(4), "short": ""}
    assert_same(tc.load(tmp_path / "c", like), tree)
    assert_same(tc.load(tmp_path / "c", {"reader": ..., "log": []}, strict=False)["log"], tree["log"])
    assert_same(tc.load(tmp_path / "c", select=["log"])["log"], tree["log"])
    renamed = tc.load(tmp_path / "c", {"old": b""}, rename={"reader": "old"}, strict="missing")
    assert renamed == {"old": tree["reader"]}
    with pytest.raises(tc.MismatchError, match="reader: expected an array, found the value b'"):
        tc.load(tmp_path / "c", {"reader": torch.zeros(10_240, dtype=torch.uint8)}, strict=False)
    with pytest.raises(tc.MismatchError, match="w: expected a value"):
        tc.load(tmp_path / "c", {"w": "text"}, strict=False)
    into = dict(like, log=["x"])
    tc.load_into(tmp_path / "c", into)
    assert_same(into, tree)
    assert_same(tc.load(tmp_path / "c", tc.abstract(tree)), tree)
    first, second = (tc.load(tmp_path / "c")["buffer"] for _ in range(2))
    assert first is not second


class Reader:
    """A data loader with a position of any size."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


class Extra(torch.nn.Linear):
    state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_a_resumed_run_has_them_in_objects_models_and_extra(tmp_path: Path) -> None:
    def made(content: Any) -> tuple[Extra, Any, Reader]:
        model = Extra(2, 2)
        model.state = content
        return model, torch.optim.Adam(model.parameters()), Reader(content)

    blob = b"state" * 2000
    with tc.Manager(tmp_path) as manager:
        model, optimizer, reader = made(blob)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["note"] = "n" * 5000
        extra = {"log": "line\n" * 2000, "best": 1.0}
        manager.save(1, tc.training.state(model, optimizer, loader=reader, extra=extra))
    for length in (0, 9000):
        model, optimizer, reader = made(b"x" * length)
        optimizer.param_groups[0]["note"] = ""
        extra = {"log": "l" * length, "best": 0.0}
        with tc.Manager(tmp_path) as manager:
            assert manager.resume(model, optimizer, loader=reader, extra=extra).step == 1
        assert model.state == blob and reader.state == blob and extra == {"log": "line\n" * 2000, "best": 1.0}
        assert optimizer.param_groups[0]["note"] == "n" * 5000


def test_converting_treats_them_as_other_values(tmp_path: Path) -> None:
    tree = {"w": torch.arange(4.0), "log": "é" * 4000, "reader": b"ab" * 4000, "buffer": bytearray(5000)}
    tc.save(tmp_path / "c", tree)
    convert(tmp_path / "c", tmp_path / "c.pt")
    found = torch.load(tmp_path / "c.pt", weights_only=False)
    assert {key: found[key] for key in ("log", "reader", "buffer")} == {k: tree[k] for k in ("log", "reader", "buffer")}
    convert(tmp_path / "c.pt", tmp_path / "back")
    assert tc.inspect(tmp_path / "back").nbytes == tc.inspect(tmp_path / "c").nbytes
    convert(tmp_path / "c", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "again")
    for folder in ("c", "back", "again"):
        again = tc.load(tmp_path / folder)
        assert_same(
            {k: again[k] for k in ("log", "reader", "buffer")}, {k: tree[k] for k in ("log", "reader", "buffer")}
        )


def test_the_interface_of_dcp_reads_and_writes_them(tmp_path: Path) -> None:
    import treeckpt.dcp as dcp

    state = {"model": {"w": torch.arange(4.0)}, "reader": b"ab" * 4000, "log": "x" * 9000}
    dcp.save(state, checkpoint_id=tmp_path / "c")
    assert tc.inspect(tmp_path / "c").nbytes == 16 + 8000 + 9000
    found = {"model": {"w": torch.zeros(4)}, "reader": b"", "log": ""}
    dcp.load(found, checkpoint_id=tmp_path / "c")
    assert found["reader"] == state["reader"] and found["log"] == state["log"]
    assert torch.equal(found["model"]["w"], state["model"]["w"])


def test_a_difference_of_content_is_found_by_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = long_tree()
    tc.save(tmp_path / "a", tree)
    tc.save(tmp_path / "b", {**tree, "reader": tree["reader"][:-1] + b"!", "names": "n" * 5000})
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--values"]) == 0
    text = capsys.readouterr().out
    assert "str of 6,000 bytes" in text and "str of 5,000 bytes" in text and "1 of 10240 differ" in text
    assert "mean" not in text
    with opened(tmp_path / "a") as a, opened(tmp_path / "b") as b:
        assert [change.path for change in value_changes(a, b)] == ["reader"]


def test_an_index_that_says_other_things_of_them_is_refused(tmp_path: Path) -> None:
    def changed(change: Any) -> None:
        tc.save(tmp_path / "c", {"log": "é" * 3000, "w": np.zeros(3)}, overwrite=True)
        reseal(tmp_path / "c", change)
        with pytest.raises(tc.FormatError, match=r"log|w"):
            tc.load(tmp_path / "c")

    def of_floats(document: dict[str, Any]) -> None:
        document["index"]["specs"][0] |= {"dtype": "float32", "shape": [1500]}

    def an_array(document: dict[str, Any]) -> None:
        document["index"]["leaves"][0][0] = "a"

    def a_blob(document: dict[str, Any]) -> None:
        document["index"]["leaves"][1][0] = "x"

    for change in (of_floats, an_array, a_blob):
        changed(change)


def test_bytes_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"log": b"\xff" * 5000})
    reseal(tmp_path / "c", lambda document: document["index"]["specs"][0].update(kind="str"))
    with pytest.raises(tc.CorruptError, match="log: expected a text in UTF-8"):
        tc.load(tmp_path / "c")


def test_long_values_in_an_index_are_read_as_before(tmp_path: Path) -> None:
    tree = {"log": "é" * 3000, "reader": b"\xff" * 5000, "own": tc.PerRank("x" * 9000)}
    tc.save(tmp_path / "c", tree)

    def inline(document: dict[str, Any]) -> None:
        stored = {"log": tree["log"], "reader": ["bytes", [base64.b64encode(tree["reader"]).decode()]]}
        document["index"]["leaves"] = [["v", stored["log"]], ["v", stored["reader"]], ["pv", ["x" * 9000]]]

    reseal(tmp_path / "c", inline)
    found = tc.load(tmp_path / "c")
    assert (found["log"], found["reader"], found["own"].value) == (tree["log"], tree["reader"], "x" * 9000)


def test_a_buffer_may_grow_when_it_is_saved(tmp_path: Path) -> None:
    buffer = bytearray(b"x" * 9000)
    tc.save(tmp_path / "a", {"buffer": buffer})
    buffer.extend(b"y" * 9000)
    pending = tc.save_async(tmp_path / "b", {"buffer": buffer}, background=tc.BackgroundOptions(staging="lazy"))
    buffer.extend(b"z" * 90_000)
    pending.result()
    assert tc.load(tmp_path / "a")["buffer"] == b"x" * 9000
    assert tc.load(tmp_path / "b")["buffer"] == b"x" * 9000 + b"y" * 9000


def test_the_text_of_one_rank_counts_for_all() -> None:
    store = tc.MemoryStore()
    own = ["a", "b" * 9000]
    act = lambda comm: tc.save(store, {"log": tc.FromRank(own[comm.rank], rank=1)}, comm=comm)  # noqa: E731
    assert errors_of(on_ranks(2, act)) == [None, None]
    assert tc.load(store) == {"log": own[1]}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_writes_its_own_entries_of_bytes(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as torch_dcp

    import treeckpt.dcp as dcp

    state = {"w": torch.arange(4.0), "log": "x" * 9000, "note": [1, "y" * 9000]}
    torch_dcp.save(state, storage_writer=dcp.Writer(tmp_path / "c"), no_dist=True)
    found = {"w": torch.zeros(4), "log": "", "note": []}
    torch_dcp.load(found, storage_reader=dcp.Reader(tmp_path / "c"), no_dist=True)
    assert found["log"] == state["log"] and found["note"] == state["note"] and found["w"].tolist() == [0, 1, 2, 3]
    assert (tmp_path / "c" / "index.json").stat().st_size < 9000


def test_an_index_that_claims_more_than_the_files_have_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    tc.save(tmp_path / "c", {"log": "x" * 9000})
    reseal(tmp_path / "c", lambda document: document["index"]["specs"][0].update(shape=[1 << 45]))
    for act in (tc.load, lambda path: convert(path, tmp_path / "c.pt"), lambda path: convert(path, tmp_path / "copy")):
        with pytest.raises(tc.TreeckptError, match="log"):
            act(tmp_path / "c")
    assert main(["show", str(tmp_path / "c"), "log"]) == 1


@pytest.mark.parametrize("position", [0, 17, 5000, 9000])
def test_a_file_in_memory_keeps_its_content_and_position(tmp_path: Path, position: int) -> None:
    file, noted = io.BytesIO(b"ab" * 2500), io.BytesIO(b"ab" * 2500)
    file.seek(position)
    setattr(noted, "name", "state.bin")  # noqa: B010 (the class declares none)
    tree = {"file": file, "noted": noted, "small": io.BytesIO(b"x"), "model": torch.nn.Linear(1, 1).state_dict()}
    tc.save(tmp_path / "c", tree)
    assert tc.inspect(tmp_path / "c").nbytes == 5000 + 8 + 8
    found = tc.load(tmp_path / "c")
    assert (found["file"].getvalue(), found["file"].tell()) == (file.getvalue(), position)
    assert found["noted"].name == "state.bin" and found["noted"].getvalue() == file.getvalue()
    assert file.tell() == position and file.write(b"more") == 4
