"""Object stores of other makers, each in processes of its own: SeaweedFS and Azurite, and rclone as an S3 server.

`make test-stores` installs them. fake-gcs-server and gcp-storage-emulator are left out: they know Google's JSON
interface, and obstore writes by the XML one (see `tests/io/storage/test_google_store.py`). MinIO, Ceph and Garage are
in no registry of packages as servers that can be started alone.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

import treeckpt as tc
from tests.helpers.background import until
from tests.helpers.world import LONG

_BIN = Path(sys.executable).parent
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every Azurite: public."""
_S3 = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}


def _program(name: str) -> str:
    path = os.pathsep.join([str(_BIN), str(_BIN.parent / "azurite/node_modules/.bin"), os.environ["PATH"]])
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"no {name} here: `make test-stores` installs it")
    return found


def _free_port() -> int:
    """A port that is free, as is the one 10,000 above it, which SeaweedFS takes too."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 10_000))
            return port


@contextmanager
def _running(*command: str, **variables: str) -> Iterator[None]:
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env={**os.environ, **variables}, **quiet)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _wait(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Waits until the store answers."""

    def answers() -> bool:
        with contextlib.suppress(tc.StoreError):
            tc.ObjectRun(f"{url}/none", **options, retry_config={"max_retries": 0}).names()
            return True
        return False

    assert until(answers, LONG)
    return options


@contextmanager
def seaweedfs(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """SeaweedFS: the URL of a bucket, and the options by which a store reaches it."""
    names = ("s3.port", "master.port", "filer.port", "volume.port", "s3.port.iceberg", "s3.port.lance")
    ports = {name: _free_port() for name in names}
    given = [f"-{name}={port}" for name, port in ports.items()]
    given += [f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-bucket=bucket", "-webdav=false"]
    given += ["-admin.ui=false", f"-admin.port={_free_port()}"]
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    with _running(_program("weed"), "mini", *given, **keys):
        options = {"endpoint": f"http://127.0.0.1:{ports['s3.port']}", **_S3}
        yield "s3://bucket", _wait("s3://bucket", options)


@contextmanager
def rclone(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A directory as an S3 server by rclone."""
    (directory / "bucket").mkdir()
    port = _free_port()
    address = ["--addr", f"127.0.0.1:{port}", "--auth-key", "key,secret"]
    with _running(_program("rclone"), "serve", "s3", *address, str(directory)):
        yield "s3://bucket", _wait("s3://bucket", {"endpoint": f"http://127.0.0.1:{port}", **_S3})


@contextmanager
def azurite(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Microsoft's emulator of Azure."""
    port = _free_port()
    given = ["--location", str(directory), "--blobPort", f"{port}", "--silent", "--skipApiVersionCheck"]
    with _running(_program("azurite-blob"), *given):
        account = "devstoreaccount1"
        options = {"account_name": account, "account_key": _AZURE_KEY, "endpoint": f"http://127.0.0.1:{port}/{account}"}

        def made() -> bool:
            with contextlib.suppress(OSError):
                _make_container(port, account)
                return True
            return False

        assert until(made, LONG)
        yield "az://bucket", _wait("az://bucket", options)


def _make_container(port: int, account: str) -> None:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    rows = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    text = "PUT" + "\n" * 12 + rows + f"/{account}/{account}/bucket\nrestype:container"
    seal = hmac.new(base64.b64decode(_AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers |= {"Authorization": f"SharedKey {account}:{base64.b64encode(seal).decode()}", "Content-Length": "0"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG)
    connection.request("PUT", f"/{account}/bucket?restype=container", headers=headers)
    assert connection.getresponse().status == 201
    connection.close()
