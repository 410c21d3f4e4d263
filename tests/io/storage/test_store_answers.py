"""What a store answers with an error is sent again, or ends in an error whose hint fits it; a listing always ends."""

from __future__ import annotations

import re
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import until
from tests.helpers.far_s3 import FarS3
from tests.helpers.s3 import MIB, array, same
from treeckpt._io.storage import obstore

ADVICE = {
    (400, "ExpiredToken"): "credentials have expired: renew",
    (400, "TokenRefreshRequired"): "credentials have expired: renew",
    (400, "InvalidToken"): "does not take these credentials",
    (403, "InvalidAccessKeyId"): "does not take these credentials",
    (403, "SignatureDoesNotMatch"): "does not take these credentials",
    (403, "RequestTimeTooSkewed"): "Set the clock",
    (404, "NoSuchUpload"): "upload was aborted.*save again",
    (404, "NoSuchBucket"): "Make the bucket",
    (400, "AuthorizationHeaderMalformed"): "region",
    (400, "IllegalLocationConstraintException"): "region",
    (301, "PermanentRedirect"): "region",
    (403, "InvalidObjectState"): "archive",
    (400, "EntityTooLarge"): "max_shard_bytes",
    (400, "KeyTooLongError"): "shorter or plainer path",
    (400, "BadDigest"): "Bytes changed",
    (400, "KMS.DisabledException"): "encryption key",
    (403, "QuotaExceeded"): "store is full",
    (403, "AccessDenied"): "credentials do not allow",
    (403, "AllAccessDisabled"): "account and the billing",
    (405, "MethodNotAllowed"): "rules of the bucket",
    # Azure Blob Storage, which obstore gives in the same form
    (409, "BlobArchived"): "archive",
    (409, "BlobImmutableDueToPolicy"): "rules of the bucket",
    (409, "ContainerBeingDeleted"): "bucket's name",
    (403, "AuthenticationFailed"): "SAS token",
    (412, "LeaseIdMissing"): "rules of the bucket",
    # Google Cloud Storage
    (403, "AccountDisabled"): "account and the billing",
    (403, "UserProjectAccountProblem"): "account and the billing",
}


def refusal(match: str, status: int, code: str, times: int = 1, more: str = "") -> dict[str, object]:
    return {"match": match, "do": "error", "status": status, "code": code, "times": times, "more": more}


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("RequestTimeout", "list-type"),
        ("RequestTimeout", r"^PUT .*index"),
        ("RequestTimeout", r"^PUT .*partNumber=2"),
        ("RequestTimeout", r"^POST .*\?uploads"),
        ("OperationAborted", r"^POST .*uploadId"),
        ("IncompleteBody", r"^PUT .*partNumber=1"),
    ],
)
def test_what_the_store_asks_to_send_again_is_sent_again(
    server: FarS3, in_parts: None, code: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore, "PAUSE", 0.001)
    tree, url = {"w": array(11)}, server.url()
    server.set(rules=[refusal(match, 409 if code == "OperationAborted" else 400, code)])
    tc.save(server.store(url), tree)
    server.set(rules=[refusal("^GET .*", 400, code, times=2)])
    assert same(server.store(url), tree)


def test_the_first_retry_waits_as_long_as_its_constant_says(server: FarS3, monkeypatch: pytest.MonkeyPatch) -> None:
    store = server.store()
    store.publish("index.json", b"{}", replace=True)
    waited: list[float] = []
    monkeypatch.setattr(obstore, "PAUSE", 0.01)
    # of this module alone: threads of other tests may sleep too
    clock = SimpleNamespace(
        monotonic=time.monotonic, sleep=lambda seconds: (waited.append(seconds), time.sleep(seconds))
    )
    monkeypatch.setattr(obstore, "time", clock)
    server.set(rules=[refusal("^GET .*index", 400, "RequestTimeout", times=2)])
    assert store.read("index.json", limit=9) == b"{}"
    monkeypatch.undo()
    server.set()
    assert [seconds for seconds in waited if seconds in (0.01, 0.02, 0.04)] == [0.01, 0.02]


def test_a_part_that_is_always_refused_ends_the_save(
    server: FarS3, in_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore, "PAUSE", 0.001)
    server.set(rules=[refusal("^PUT .*partNumber", 400, "RequestTimeout", times=99)])
    with pytest.raises(tc.StoreError, match=r"RequestTimeout.*too slow or too busy"):
        tc.save(server.store(), {"w": array(11)})
    server.set()


@pytest.mark.parametrize(("status", "code"), ADVICE, ids=str)
def test_each_error_of_a_store_has_the_advice_that_fits_it(
    server: FarS3, in_parts: None, status: int, code: str
) -> None:
    server.set()
    url = server.url()
    tc.save(server.store(url), {"n": 1})
    server.set(rules=[refusal("index", status, code, times=99)])
    with pytest.raises(tc.StoreError) as caught:
        tc.load(server.store(url))
    assert re.search(ADVICE[status, code], caught.value.hint), caught.value
    server.set(rules=[refusal("partNumber", status, code, times=99)])
    with pytest.raises(tc.StoreError) as caught:
        tc.save(server.store(), {"w": np.zeros(MIB)})
    assert re.search(ADVICE[status, code], caught.value.hint), caught.value
    server.set()


@pytest.mark.parametrize("form", ["%Y-%m-%dT%H:%M:%SZ", "%Y%m%dT%H%M%SZ", "%a, %d %b %Y %H:%M:%S GMT"])
def test_the_error_of_a_wrong_clock_says_by_how_much(server: FarS3, form: str) -> None:
    there = time.strftime(form, time.gmtime(time.time() - 7201))
    more = f"<ServerTime>{there}</ServerTime>"
    server.set(rules=[refusal("index", 403, "RequestTimeTooSkewed", more=more)])
    with pytest.raises(tc.StoreError, match=r"Set the clock of this machine: it is 2 h 0 min ahead of that of the"):
        tc.load(server.store())
    server.set()


def listing_threads() -> list[threading.Thread]:
    """Those that ask for the pages of a listing, for whoever waits for them."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("treeckpt-list")]


@pytest.mark.parametrize("tokens", ["repeated", "cycle", "empty"])
def test_a_listing_whose_pages_come_again_is_an_error(
    server: FarS3, tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore, "LISTING", 0.05)
    server.set(page=3)
    url = server.url()
    for step in range(1, 6):
        tc.save(server.store(f"{url}/step_{step:08}"), {"n": np.arange(3)})
    run = tc.ObjectRun(url, **server.options())
    assert len(run.names()) == len(run.folders()) == 5
    server.set(page=3, tokens=tokens)
    monkeypatch.setattr(obstore, "PAGE_SECONDS", 0.1)
    for ask in (run.names, run.folders, server.store(f"{url}/step_00000001").sizes):
        with pytest.raises(tc.StoreError, match=r"expected a listing that ends.*continuation tokens"):
            ask()
    assert until(lambda: not listing_threads())
    server.set(page=3, tokens=tokens)
    server.log()  # a request that was given up may have been on its way: it has come by now
    server.set(page=3, tokens=tokens)
    time.sleep(0.05)
    assert len(server.log()) == 0, "nothing goes on asking"
    server.set(page=1000, tokens="honoured")


def test_an_interrupt_ends_a_listing_that_is_not_answered(server: FarS3) -> None:
    server.set(rules=[{"match": "list-type", "do": "slow", "seconds": 60.0}])

    def interrupt() -> None:
        assert until(lambda: bool(server.log_now())), "it waits for the answer"
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Thread(target=interrupt, daemon=True).start()
            server.store().sizes()
    finally:
        signal.signal(signal.SIGINT, before)
    assert until(lambda: not listing_threads())
    server.set()


def test_a_listing_that_takes_long_is_waited_for(server: FarS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore, "LISTING", 0.05)
    server.set()
    url = server.url()
    tc.save(server.store(url), {"n": np.arange(3)})
    server.set(latency=0.1)
    assert "index.json" in server.store(url).sizes()
    monkeypatch.setattr(obstore.ObstoreBucket, "walk", lambda bucket, prefix: iter(()))  # its pages came at once
    server.set(latency=0.4)
    assert "index.json" in server.store(url).sizes()
    server.set(latency=0.0)
