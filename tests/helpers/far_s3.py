"""The S3 server of `treeckpt.bench.s3_server` as a test sees it: its settings, its log, and stores on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.helpers.s3 import S3, started
from treeckpt.bench import s3_server


class FarS3(S3):
    """A server that stands as far away as its settings say."""

    def set(self, **settings: Any) -> None:
        """Changes settings, ends all rules but those given, and forgets the log."""
        self.request("POST", "/!set", json.dumps(settings).encode())

    def log(self) -> list[dict[str, Any]]:
        """The requests since the last `set`."""
        return json.loads(self.request("GET", "/!log"))["log"]

    def gets(self, suffix: str = "") -> list[dict[str, Any]]:
        """The successful reads among them of objects whose keys end with a suffix."""
        return [
            r for r in self.log() if r["method"] == "GET" and r["status"] in (200, 206) and r["path"].endswith(suffix)
        ]


@contextmanager
def far_s3_server() -> Iterator[FarS3]:
    """Starts a server, ends it again."""
    with started(s3_server.__file__) as port:
        yield FarS3(port, port)
