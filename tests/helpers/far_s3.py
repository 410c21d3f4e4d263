"""The S3 server of `tests.bench.s3_server` as a test sees it: its settings, its log, and stores on it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.large import write_many
from tests.helpers.s3 import BUCKET, S3, started, wait_for_late_requests

ROOT = Path(__file__).parents[2]


class FarS3(S3):
    """A server that stands as far away as its settings say."""

    def set(self, **settings: Any) -> None:
        """Changes settings, ends all rules but those given, and forgets the log."""
        wait_for_late_requests()
        self.request("POST", "/!set", json.dumps(settings).encode())

    def release(self) -> None:
        """Lets the requests go on that a rule holds."""
        self.request("POST", "/!release")

    def log_now(self) -> list[dict[str, Any]]:
        """The requests since the last `set`, without a wait for late ones."""
        return json.loads(self.request("GET", "/!log"))["log"]

    def log(self) -> list[dict[str, Any]]:
        """The requests since the last `set`."""
        wait_for_late_requests()
        return self.log_now()

    def gets(self, suffix: str = "") -> list[dict[str, Any]]:
        """The successful reads among them of objects whose keys end with a suffix."""
        return [
            r for r in self.log() if r["method"] == "GET" and r["status"] in (200, 206) and r["path"].endswith(suffix)
        ]


@contextmanager
def far_s3_server() -> Iterator[FarS3]:
    """Starts a server, ends it again."""
    with started("-m", "tests.bench.s3_server", cwd=ROOT) as port:
        yield FarS3(port, port)


def put_many(server: FarS3, count: int) -> str:
    """A run of so many small checkpoints on the server; returns its URL. About a second a thousand."""
    url = server.url()
    with tempfile.TemporaryDirectory() as directory:
        run = write_many(Path(directory) / "run", count)
        files = [path for path in run.rglob("*") if path.is_file()]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda path: server.put(f"{_key(url)}/{path.relative_to(run)}", path.read_bytes()), files))
    return url


def _key(url: str) -> str:
    return url.removeprefix(f"s3://{BUCKET}/")


def rounds(log: list[dict[str, Any]]) -> int:
    """The largest number of requests of which each one began after the one before it had ended."""
    found, ended = 0, -1.0
    for row in sorted(log, key=lambda row: row["ended"]):
        if row["at"] >= ended:
            found, ended = found + 1, row["ended"]
    return found


def lists(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The listings among requests."""
    return [row for row in log if "list-type" in row["path"]]
