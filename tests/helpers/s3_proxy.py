"""A process between an S3 client and its server: counts requests, and does to them what a test asks for.

    python s3_proxy.py UPSTREAM_PORT

It prints its port. `POST /!rules` sets rules, `GET /!log` gives the requests since then. A rule is
`{"match": regex over "METHOD path range", "do": what, "times": n, "seconds": s, "count": n}`; what is one of: 500, 503,
403 (an answer without asking the server), page (200 and a web page without asking the server, as of a proxy that wants
somebody to log in; `headers` are beside it), slow (waits first), meet (waits until `count` requests are under way, at
most `seconds`), cut (no answer, the server is not asked), lost (the server is asked, its answer is not passed on), half
(half of the answer's body, then the connection ends).
"""

from __future__ import annotations

import http.client
import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in to go on</title></head><body>proxy</body></html>\n" * 3
ERRORS = {"500": "InternalError", "503": "SlowDown", "403": "AccessDenied"}


class State:
    def __init__(self) -> None:
        self.rules: list[dict[str, Any]] = []
        self.log: list[dict[str, Any]] = []
        self.in_flight: list[dict[str, Any]] = []
        self.met = False
        self.lock = threading.Condition()

    def count(self) -> dict[str, int]:
        """How many requests are in flight, and how many of them are parts of uploads."""
        return {"flying": len(self.in_flight), "parts": sum("partNumber" in one["path"] for one in self.in_flight)}

    def leave(self, row: dict[str, Any]) -> None:
        with self.lock:
            self.in_flight = [one for one in self.in_flight if one is not row]

    def fault(self, line: str) -> dict[str, Any] | None:
        with self.lock:
            for rule in self.rules:
                if rule["times"] and re.search(rule["match"], line):
                    rule["times"] -= 1
                    return rule
        return None


STATE = State()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream = 0

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return None
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith("/!"):
            return self._control(body)
        with STATE.lock:
            row = {"method": self.command, "path": self.path, "range": self.headers.get("Range", "")}
            STATE.in_flight.append(row)
            row |= {"sent": len(body), "got": 0, "status": 0} | STATE.count()
            row |= {"condition": self.headers.get("If-None-Match") or self.headers.get("If-Match") or ""}
            STATE.log.append(row)
            STATE.lock.notify_all()
        try:
            self._pass_on(body, row)
        except OSError:
            self.close_connection = True
        finally:
            STATE.leave(row)

    def _control(self, body: bytes) -> None:
        with STATE.lock:
            if self.command == "POST":
                # requests of processes that were killed are under way for long, and count no more
                STATE.rules, STATE.log, STATE.met, STATE.in_flight = json.loads(body), [], False, []
            answer = json.dumps(STATE.log).encode()
        self._answer(200, {}, answer)

    def _pass_on(self, body: bytes, row: dict[str, Any]) -> None:
        rule = STATE.fault(f"{self.command} {self.path} {row['range']}")
        what = rule["do"] if rule is not None else ""
        if what == "slow":
            time.sleep(rule["seconds"])
        elif what == "meet":
            with STATE.lock:
                STATE.lock.wait_for(lambda: STATE.met or len(STATE.in_flight) >= rule["count"], rule["seconds"])
                STATE.met = STATE.met or len(STATE.in_flight) >= rule["count"]
                row |= {name: max(row[name], number) for name, number in STATE.count().items()}
                STATE.lock.notify_all()
        elif what in ERRORS:
            text = f'<?xml version="1.0"?><Error><Code>{ERRORS[what]}</Code><Message>injected</Message></Error>'
            self._answer(int(what), {"Content-Type": "application/xml"}, text.encode())
            return
        elif what == "page":
            self._answer(200, {"Content-Type": "text/html", "Content-Length": str(len(PAGE)), **rule["headers"]}, PAGE)
            return
        elif what == "cut":
            self.close_connection = True
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=300)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        upstream.request(self.command, self.path, body, headers)
        response = upstream.getresponse()
        data = response.read()
        upstream.close()
        row["status"], row["got"] = response.status, len(data)
        if what == "lost":
            self.close_connection = True
            return
        STATE.leave(row)  # before the answer, behind which the client may send its next request at once
        self._answer(response.status, dict(response.getheaders()), data, half=what == "half")

    def _answer(self, status: int, headers: dict[str, str], data: bytes, *, half: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else len(data)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if half else data)
        self.close_connection = self.close_connection or half


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are nothing special."""


if __name__ == "__main__":
    Handler.upstream = int(sys.argv[1])
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
