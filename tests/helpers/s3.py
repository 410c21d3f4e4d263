"""A real S3 server, moto's, in a process of its own, behind a proxy that counts requests and injects faults."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import treeckpt as tc

BUCKET = "bucket"
PAGE = 40
"""Keys in a page of a listing: S3 has 1000; fewer make paging cheap to test."""
QUICK = {"retry_config": {"backoff": {"init_backoff": timedelta(milliseconds=10)}}}
ONCE = {"retry_config": {"max_retries": 1, "backoff": {"init_backoff": timedelta(milliseconds=10)}}}
MIB = 1 << 20
"""Options: how soon, or how often, to ask again."""
_PROXY = str(Path(__file__).with_name("s3_proxy.py"))
_MOTO = """
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server
application = DomainDispatcherApplication(create_backend_app)
server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
print(server.server_port, flush=True)
server.serve_forever()
"""
_numbers = itertools.count()


def array(mib: int) -> np.ndarray:
    return np.arange(mib * MIB // 8)


def same(store: Any, tree: dict[str, Any]) -> bool:
    back = tc.load(store)
    return all(np.array_equal(back[key], tree[key]) for key in tree)


class S3:
    """The server, as a test sees it."""

    def __init__(self, port: int, proxy: int) -> None:
        self.port, self.proxy = port, proxy

    def options(self, **more: Any) -> dict[str, Any]:
        """By which a store reaches it."""
        return {
            "endpoint": f"http://127.0.0.1:{self.proxy}",
            "access_key_id": "key",
            "secret_access_key": "secret",
            "region": "us-east-1",
            **more,
        }

    def environment(self) -> dict[str, str]:
        """The same as variables."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def url(self, name: str = "run") -> str:
        """A place that no other test uses."""
        return f"s3://{BUCKET}/{os.getpid()}-{next(_numbers)}/{name}"

    def store(self, url: str = "", **options: Any) -> tc.ObjectStore:
        """A store that the proxy watches."""
        return tc.ObjectStore(url or self.url(), **self.options(**options))

    def request(self, method: str, path: str, body: bytes = b"", *, port: int = 0) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=120)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            data = response.read()
            assert response.status < 300, (response.status, data)
            return data
        finally:
            connection.close()

    def rules(self, *rules: dict[str, Any]) -> None:
        """What the proxy does from now on; forgets what it has counted."""
        wait_for_late_requests()
        self.request(
            "POST", "/!rules", json.dumps([{"times": 1, "seconds": 0, **r} for r in rules]).encode(), port=self.proxy
        )

    def log(self) -> list[dict[str, Any]]:
        """The requests since then."""
        wait_for_late_requests()
        return json.loads(self.request("GET", "/!log", port=self.proxy))

    def uploads(self, url: str) -> list[str]:
        """The keys, below a URL, of multipart uploads that have not ended."""
        listed = self.request("GET", f"/{BUCKET}?uploads").decode()
        keys = re.findall("<Key>(.*?)</Key>", listed.partition("<Upload>")[2])
        return [key for key in keys if f"s3://{BUCKET}/{key}".startswith(f"{url}/")]

    def put(self, key: str, data: bytes = b"x") -> None:
        """Puts an object past the client, under any key."""
        self.request("PUT", f"/{BUCKET}/{key}", data)


def wait_for_late_requests() -> None:
    """Waits for what this process still sends after saves and loads that have returned."""
    for thread in threading.enumerate():
        if thread.name == "treeckpt-late":
            thread.join()


@contextmanager
def s3_server() -> Iterator[S3]:
    """Starts server and proxy, ends them again."""
    environment = {**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)}
    with (
        started("-c", _MOTO, env=environment, stderr=subprocess.DEVNULL) as port,
        started(_PROXY, f"{port}") as proxy,
    ):
        server = S3(port, proxy)
        server.request("PUT", f"/{BUCKET}")
        yield server


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[int]:
    """A program that prints the port that it has chosen, and listens there already; ends it again."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
