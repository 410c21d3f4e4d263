"""Object stores against a real S3 server: requests, faults, races, hostile names; and everything that works on runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import until
from tests.helpers.elsewhere import elsewhere
from tests.helpers.s3 import BUCKET, MIB, ONCE, QUICK, S3, array, same
from tests.helpers.world import LONG, assert_equal, errors_of, on_ranks, small_tree, whole_tree
from treeckpt._cli.main import main
from treeckpt._core.format.files import step_name
from treeckpt._core.format.shard_header import parse_shard_name
from treeckpt._io.storage import object_store
from treeckpt._io.storage import object_store as objects_module
from treeckpt._io.storage.bucket import ObjectListing
from treeckpt._io.storage.memory import aligned_buffer
from treeckpt._io.storage.requests_in_flight import RequestDepth, UploadWindow
from treeckpt._io.storage.store import DirectoryEntry
from treeckpt._runs import discovery
from treeckpt._runs.run import RunDirectory
from treeckpt._saving import shard_writer
from treeckpt.policy import Last

# what goes over the wire ---------------------------------------------------------------------------------------------


def test_a_save_uploads_parts_side_by_side_in_order_and_publishes_last(s3: S3, in_parts: None) -> None:
    s3.rules({"match": "PUT .*partNumber", "do": "meet", "times": 99, "count": 3, "seconds": LONG})
    store, tree = s3.store(), {"w": array(34), "n": 1}
    store._bucket._window = window = UploadWindow()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    window.depth, window.expect = RequestDepth(4), lambda seconds: None
    tc.save(store, tree)
    log = s3.log()
    parts = [row for row in log if "partNumber" in row["path"]]
    assert len(parts) == 7 and sum(row["sent"] for row in parts) > 34 * MIB
    assert max(row["flying"] for row in parts) >= 3 and max(row["parts"] for row in parts) <= 4
    writes = [row for row in log if row["method"] in ("PUT", "POST")]
    [index] = [row for row in writes if row["path"].endswith("index.json")]
    assert index["condition"] == "*" and all("shard" not in row["path"] for row in log[log.index(index) :])
    assert not s3.uploads(store.url) and same(store, tree)


def test_a_slow_store_holds_the_save_up_instead_of_filling_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    class Slow:
        def upload(self, key: str, nbytes: int, blocks: Any) -> None:
            for block in blocks:
                time.sleep(0.02)
                taken.append(len(block))

    writer = object_store.MultipartWriter(Slow(), "key", 20 * MIB)  # pyright: ignore[reportArgumentType]
    ahead: list[int] = []
    for start in range(0, 20 * MIB, MIB):
        writer.write(start, memoryview(bytearray(MIB)))
        ahead.append(start + MIB - sum(taken))
    writer.commit()
    assert sum(taken) == 20 * MIB and max(ahead) <= (object_store.MAX_QUEUED_BLOCKS + 2) * MIB


def test_memory_stays_bounded_whatever_the_size(s3: S3) -> None:
    # arrays that take no memory themselves, in a process whose peak only a save of half the size has raised
    program = """
import sys, numpy as np, treeckpt as tc
from treeckpt._io.storage import obstore
from treeckpt._saving import shard_files
shard_files.BUFFER = 1 << 20
obstore.PART, shard_files.COPIES = 5 << 20, 10 << 20
row = np.arange(1 << 17)
def peak():  # ru_maxrss would begin with that of the process before exec
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
tc.save(sys.argv[1] + "/small", {"w": np.broadcast_to(row, (24, 1 << 17))})
before = peak()
tc.save(sys.argv[1] + "/large", {"w": np.broadcast_to(row, (64, 1 << 17))})
print((peak() - before) >> 10)
"""
    done = subprocess.run([sys.executable, "-c", program, s3.url()], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20, "MiB"


def test_a_slice_is_read_by_ranged_requests_for_its_bytes_only(s3: S3) -> None:
    store, full = s3.store(), np.arange(3 * MIB).reshape(24, -1)
    tc.save(store, {"w": full, "other": array(4)})
    s3.rules({"match": "GET .*shard.* bytes=(?!0-)", "do": "meet", "times": 99, "count": 3, "seconds": LONG})
    piece = tc.Sharded(np.zeros((16, full.shape[1]), full.dtype), full.shape, (4, 0))
    part = tc.load(store, {"w": piece, "other": ...})
    assert np.array_equal(part["w"].local, full[4:20])
    shard = [row for row in s3.log() if "shard" in row["path"] and row["method"] == "GET"]
    assert all(row["range"].startswith("bytes=") for row in shard)
    assert sum(row["got"] for row in shard) <= 1.05 * full[4:20].nbytes + objects_module.HEAD
    assert max(row["flying"] for row in shard) >= 3


def test_arrays_that_change_while_they_are_uploaded_fail_the_save(s3: S3, in_parts: None) -> None:
    array_, store = array(12), s3.store()
    real = object_store.MultipartWriter.write

    def write(self: Any, offset: int, data: memoryview) -> None:
        array_[-1] = offset  # as a training that does not wait
        real(self, offset, data)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(tc.CheckpointError, match="stay as they are"):
        patch.setattr(object_store.MultipartWriter, "write", write)
        tc.save(store, {"w": array_})
    assert not [name for name in store.sizes() if parse_shard_name(name) or name == "index.json"]
    assert not s3.uploads(store.url)


def test_an_upload_whose_blocks_come_out_of_turn_or_short_fails(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "SINGLE_PUT_LIMIT", 0)
    store = s3.store()
    writer = store.create("a", 10_000)
    writer.write(0, aligned_buffer(4096))
    for offset in (0, 8192):
        with pytest.raises(ValueError, match=f"a block at {offset} where 4096 is next"):
            writer.write(offset, aligned_buffer(4096)[:1808])
    with pytest.raises(Exception, match="4096 of 10000 bytes"):
        writer.commit()
    writer.abort()
    assert store.sizes() == {}


# faults --------------------------------------------------------------------------------------------------------------
EACH = [
    r"POST .*\?uploads",
    r"PUT .*partNumber=2",
    r"POST .*uploadId",
    r"PUT .*index",
    "GET .*list-type",
    "GET .*index",
    "GET .*shard",
]


@pytest.mark.parametrize("fault", ["500", "503", "slow", "cut", "lost", "half"])
def test_a_save_and_a_load_survive_a_fault_of_every_request(s3: S3, in_parts: None, fault: str) -> None:
    store, tree = s3.store(**QUICK), {"w": array(11), "n": np.arange(3)}
    s3.rules(*({"match": line, "do": fault, "seconds": 0.1} for line in EACH))
    tc.save(store, tree)
    assert same(store, tree)
    assert sum(name.startswith("shard") for name in store.sizes()) == 1 and "index.json" in store.sizes()


@pytest.mark.parametrize("line", [r"POST .*\?uploads", "PUT .*partNumber=2", "PUT .*index"])
def test_a_save_that_fails_leaves_no_index_no_shard_and_no_parts(s3: S3, in_parts: None, line: str) -> None:
    store = s3.store(**ONCE)
    s3.rules({"match": line, "do": "503", "times": 99})
    with pytest.raises(tc.StoreError, match=r"s3://bucket/.*expected to write it, found .*503.*SlowDown.*try again"):
        tc.save(store, {"w": array(11)})
    s3.rules()
    assert not [name for name in store.sizes() if not name.startswith("timings")]
    assert not s3.uploads(store.url)
    with pytest.raises(tc.CheckpointNotFound):
        tc.load(store)


def test_ranks_all_hear_of_one_that_cannot_upload(s3: S3) -> None:
    stores, url = {}, s3.url()
    for rank in range(3):
        stores[rank] = s3.store(url, **ONCE)
    s3.rules({"match": "PUT .*shard-00001", "do": "403", "times": 99})

    def save(comm: Any) -> None:
        tc.save(stores[comm.rank], small_tree(comm.rank, 3), comm=comm)

    errors = errors_of(on_ranks(3, save))
    assert all(isinstance(e, tc.RankError) and "policies" in str(e) and list(e.ranks) == [1] for e in errors)
    s3.rules()
    assert not [name for name in stores[0].sizes() if not name.startswith("timings")]
    assert not any(errors_of(on_ranks(3, save)))
    assert_equal(tc.load(stores[0], fallback=tc.Fallback(per_rank="take")), whole_tree())


def test_a_killed_save_leaves_nothing_that_is_seen(s3: S3) -> None:
    url = s3.url()
    s3.rules({"match": "PUT .*partNumber=[23]", "do": "slow", "times": 9, "seconds": 2 * LONG})
    program = "import sys, numpy as np, treeckpt as tc\ntc.save(sys.argv[1], {'w': np.zeros(5 << 20)})"
    saving = subprocess.Popen([sys.executable, "-c", program, url])
    assert until(lambda: saving.poll() is not None or any("partNumber=2" in row["path"] for row in s3.log()), LONG)
    assert saving.poll() is None
    saving.send_signal(signal.SIGKILL)
    saving.wait()
    assert not [name for name in s3.store(url).sizes() if not name.startswith("progress")]
    with pytest.raises(tc.CheckpointNotFound, match="found none"):
        tc.load(url)
    s3.rules()
    tc.save(url, {"w": np.arange(3)})
    assert same(url, {"w": np.arange(3)})


def test_a_network_that_fails_sends_nobody_back_to_an_older_checkpoint(s3: S3) -> None:
    url = s3.url()
    run = tc.ObjectRun(url, **s3.options(**ONCE))
    with tc.Manager(run, background=False) as made:
        for step in (1, 2):
            made.save(step, {"step": step})
        for line in (f"GET .*{step_name(2)}/index", "GET .*list-type"):
            s3.rules({"match": line, "do": "500", "times": 99})
            for act in (tc.Manager.latest, tc.Manager.restore, tc.Manager.clean):
                with pytest.raises(tc.StoreError, match="500"):
                    act(tc.Manager(run))
        s3.rules()
        assert made.latest() == 2 and made.restore() == {"step": 2}
        s3.rules({"match": f"GET .*{step_name(2)}/shard", "do": "500", "times": 99})
        made.save(3, {"w": np.arange(9)})
        s3.rules({"match": f"GET .*{step_name(3)}/shard", "do": "500", "times": 99})
        with pytest.raises(tc.StoreError, match="500"):
            made.restore()


def test_a_checkpoint_exists_until_it_is_deleted_and_a_store_that_refuses_is_an_error(s3: S3) -> None:
    url = s3.url()
    store = s3.store(url, **ONCE)
    assert not tc.exists(url)
    tc.save(store, {"w": np.arange(3)})
    s3.rules({"match": ".*", "do": "500", "times": 99})
    with pytest.raises(tc.StoreError, match="500"):
        tc.exists(store)
    s3.rules()
    assert tc.exists(store) and tc.exists(url)
    tc.delete(url)
    assert not tc.exists(store) and not store.sizes()


# races ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["a checkpoint", "nothing", "an unreadable index"])
def test_of_saves_that_overwrite_one_path_exactly_one_wins(
    s3: S3, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    store, real = s3.store(), shard_writer.publish_index
    if before == "a checkpoint":
        tc.save(store, {"by": "first"})
    elif before != "nothing":
        store.publish("index.json", b"{", replace=False)

    def outrun(*arguments: Any) -> None:
        monkeypatch.setattr(shard_writer, "publish_index", real)
        elsewhere(tc.save, store, {"by": "the faster"}, overwrite=True)
        real(*arguments)

    monkeypatch.setattr(shard_writer, "publish_index", outrun)
    with pytest.raises(tc.CheckpointExists, match="written meanwhile by another save"):
        tc.save(store, {"by": "the slower"}, overwrite=True)
    assert tc.load(store) == {"by": "the faster"} and tc.verify(store).ok


def test_of_many_swaps_at_once_exactly_one_wins(far_run: str) -> None:
    store, won, start = tc.ObjectStore(far_run), list[bytes](), threading.Barrier(6)
    store.publish("index.json", b"old", replace=False)

    def swap(data: bytes) -> None:
        start.wait()
        try:
            store.compare_and_swap("index.json", data, holds=lambda found: found == b"old", limit=99)
            won.append(data)
        except tc.CheckpointExists:
            pass

    threads = [threading.Thread(target=swap, args=(b"new %d" % n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.read("index.json", limit=99)] == won
    store.delete("index.json")
    store.compare_and_swap("index.json", b"anew", holds=lambda found: False, limit=99)
    assert store.read("index.json", limit=99) == b"anew", "what is gone meanwhile is nobody's"


# names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "a/b", "/a", "a\x00", "a\n"])
def test_names_that_lead_out_of_the_prefix_are_refused(s3: S3, name: str) -> None:
    store, run = s3.store(), tc.ObjectRun(s3.url(), **s3.options())
    for act in (
        lambda: store.read(name, limit=9),
        lambda: store.read_into(name, 0, memoryview(bytearray(9))),
        lambda: store.create(name, 9),
        lambda: store.publish(name, b"", replace=True),
        lambda: store.delete(name),
        lambda: run.folder(name),
    ):
        with pytest.raises(tc.StoreError, match="expected the plain name"):
            act()
    assert s3.log() == [], "nobody is even asked"


def test_keys_that_a_service_should_not_list_are_passed_over() -> None:
    keys = [
        "run/a",
        "run/a/b",
        "run/",
        "run",
        "other/c",
        "runs/d",
        "run/..",
        "run/e\x01",
        "run/f/../g",
        "/run/h",
        "run//i",
    ]
    listing = ObjectListing({key: DirectoryEntry(1, 0) for key in keys}, [])
    assert set(objects_module.files_below(listing, "run")) == {"a", "i"}


def test_a_key_that_no_client_can_name_is_an_error_that_names_it(s3: S3) -> None:
    url = s3.url("odd")
    s3.put(f"{url.removeprefix(f's3://{BUCKET}/')}//x")
    for act in (lambda: tc.ObjectRun(url).names(), lambda: discovery.scan(url)):
        with pytest.raises(tc.StoreError, match=r"odd//.* Another program has put this object there"):
            act()


def test_what_others_have_put_into_a_run_is_left_alone(s3: S3) -> None:
    url = s3.url()
    root = url.removeprefix(f"s3://{BUCKET}/")
    tc.save(f"{url}/{step_name(1)}", {"n": 1}, step=1)
    for key in ("README", ".hidden/x", "notes/a%20b%23.txt", f"{step_name(2)}/", f"{step_name(1)}/deep/er/x"):
        s3.put(f"{root}/{key}")
    assert tc.ObjectRun(url).names() == ["notes", step_name(1), step_name(2)]
    found = {info.name: info.status for info in discovery.scan(url)}
    assert found == {step_name(1): "complete", "notes": "foreign"}
    assert RunDirectory(url).clean([Last(1)], grace=0).removed == ()
    assert tc.load(f"{url}/{step_name(1)}") == {"n": 1}


# errors --------------------------------------------------------------------------------------------------------------


def test_errors_say_where_what_and_how_to_go_on(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        tc.StoreError, match=r"^s3://nobucket/run.*: expected a bucket to list in, found no such bucket"
    ):
        tc.save("s3://nobucket/run", {})
    with pytest.raises(tc.StoreError, match="found no such bucket"):
        tc.load("s3://nobucket/run")
    s3.rules({"match": "GET .*list-type", "do": "403", "times": 9})
    with pytest.raises(tc.StoreError, match=r"expected to list it, found .*AccessDenied.* do not allow to list here"):
        discovery.scan(s3.url())
    s3.rules()
    with pytest.raises(tc.CheckpointNotFound, match=r"expected a checkpoint \(index.json\), found none"):
        tc.load(s3.url())
    with pytest.raises(tc.StoreError, match=r"expected options that obstore takes, found .*nosuchoption"):
        tc.ObjectStore("s3://bucket/x", nosuchoption=1)
    with pytest.raises(tc.StoreError, match=r"expected options that obstore takes.* go into client_options"):
        tc.ObjectStore("s3://bucket/x", allow_http=True)
    for name in s3.environment():
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nowhere")
    options = {**ONCE, "metadata_endpoint": "http://127.0.0.1:9", "region": "us-east-1"}
    with pytest.raises(tc.StoreError, match=r"^s3://bucket: expected credentials, found none .*Set AWS_ACCESS_KEY_ID"):
        tc.ObjectStore("s3://bucket/run", **options)
    s3.rules({"match": "/latest/", "do": "403", "times": 9})
    options["metadata_endpoint"] = f"http://127.0.0.1:{s3.proxy}"  # an instance without a role
    with pytest.raises(tc.StoreError, match=r"No credentials are found, or not taken\. Set AWS_ACCESS_KEY_ID"):
        tc.load(tc.ObjectStore("s3://bucket/run", **options))


def test_mapping_an_object_is_refused(s3: S3) -> None:
    store = s3.store()
    tc.save(store, {"w": array(1)})
    with pytest.raises(tc.StoreError, match=r"expected a file on a disk.*Load without mmap"):
        tc.load(store, read=tc.ReadOptions(mmap=True))


# what stands between --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"ETag": '"x"', "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}])
@pytest.mark.parametrize("match", ["GET .*index", "GET .*shard", "GET .*shard.* bytes=(?!0-)", "GET .*list-type", ".*"])
def test_a_web_page_in_the_place_of_an_answer_is_no_damage(s3: S3, match: str, headers: dict[str, str]) -> None:
    tree = {"w": array(2)}
    tc.save(s3.store(url := s3.url()), tree)
    lists: list[Callable[[Any], object]] = [
        tc.verify,
        lambda store: tc.load(store, fallback=tc.Fallback(on_corrupt="skip")),
    ]
    plain: list[Callable[[Any], object]] = [
        tc.load,
        lambda store: tc.load_into(store, {"w": np.zeros_like(tree["w"])}),
    ]
    if "list-type" in match:  # by names that the index has, without a listing
        s3.rules({"match": match, "do": "page", "times": 99, "headers": headers})
        assert same(s3.store(url, **ONCE), tree)
    for act in lists if "list-type" in match else plain + lists:
        s3.rules({"match": match, "do": "page", "times": 99, "headers": headers})
        with pytest.raises(tc.StoreError, match=r"in its place|which is there") as caught:
            act(s3.store(url, **ONCE))
        assert "the proxy and the endpoint" in caught.value.hint
        s3.rules()
    assert same(s3.store(url), tree)


def test_a_web_page_is_no_empty_run_and_no_reason_to_start_anew(s3: S3) -> None:
    run = tc.ObjectRun(s3.url(), **s3.options(**ONCE))
    with tc.Manager(run, background=False) as manager:
        manager.save(1, {"w": array(1)})
    s3.rules({"match": ".*", "do": "page", "times": 999, "headers": {}})
    with tc.Manager(run, background=False) as manager, pytest.raises(tc.StoreError, match="a web page in its place"):
        manager.latest()
    s3.rules()


def test_a_web_page_in_the_place_of_a_look_is_no_object_that_exists(s3: S3) -> None:
    s3.rules({"match": "HEAD ", "do": "page", "times": 99, "headers": {}})
    with pytest.raises(tc.StoreError, match="a web page in its place"):
        s3.store(**ONCE).sizes()
    s3.rules()


# verdicts -------------------------------------------------------------------------------------------------------------
def test_a_store_that_refuses_a_shard_says_nothing_of_it_and_damage_is_known_to_all(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**s3.environment(), "TREECKPT_CACHE": str(tmp_path / "a")}.items():
        monkeypatch.setenv(name, value)
    url = s3.url()
    place = f"{url}/{step_name(2)}"
    for step in (1, 2):
        tc.save(f"{url}/{step_name(step)}", {"w": np.arange(1000) + step}, step=step)
    s3.rules({"match": "GET .*shard", "do": "403", "times": 99})
    assert main(["verify", "--json", place]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["verdict"]) == (None, "unread") and "AccessDenied" in found["report"]["unread"][0][1]
    with tc.Manager(url) as manager, pytest.raises(tc.StoreError, match="AccessDenied"):
        manager.latest(verify=True)
    assert not any(row["method"] == "PUT" for row in s3.log()) and not list(tmp_path.glob("a/*/*.json"))

    s3.rules()
    store = s3.store(place)
    [shard] = [name for name in store.sizes() if name.startswith("shard")]
    memory = bytearray(store.sizes()[shard])
    store.read_into(shard, 0, memoryview(memory))
    memory[-9] ^= 1
    store.publish(shard, bytes(memory), replace=True)
    s3.rules({"match": "PUT .*damage", "do": "403", "times": 99})
    assert main(["verify", place]) == 1
    assert "only the cache of this user has that it is damaged" in capsys.readouterr().out
    with tc.Manager(url, keep=1) as manager:
        assert manager.clean(dry_run=True).kept.keys() == {1, 2}
    s3.rules()
    assert main(["verify", place]) == 1 and "cache of this user" not in capsys.readouterr().out
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "b"))
    s3.rules()
    with tc.Manager(url, keep=1) as manager:
        assert manager.clean(dry_run=True).kept == {
            1: ("newest", "one of the last 1"),
            2: ("damaged: counts for no policy",),
        }
    asked = [row["path"] for row in s3.log()]
    assert sum("list-type" in path for path in asked) == 1 and sum("damage." in path for path in asked) == 1
    assert len(asked) == 5, "a listing, two indexes; of the one that has a verdict that, and the index beside it"


def test_the_beginnings_of_objects_that_are_kept_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "HEADS_NBYTES", 3 * objects_module.HEAD, raising=False)
    store = tc.ObjectStore(f"memory://{tmp_path.name}/heads")
    names = [f"shard-{number}" for number in range(10)]
    for number, name in enumerate(names):
        store.publish(name, bytes([number]) * (objects_module.HEAD + 1), replace=False)
    for name in (*names, *names):
        for nbytes in (8, 5000):
            data = bytearray(nbytes)
            store.read_into(name, 0, memoryview(data))
            assert data == bytes([int(name[-1])]) * nbytes
    assert list(store._heads) == names[-3:], "the oldest go first"
    store.close()
    store.read_into(names[0], 0, memoryview(bytearray(8)))
    assert list(store._heads) == names[:1]
