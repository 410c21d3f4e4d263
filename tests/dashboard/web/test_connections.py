"""Clients that send half a request, or read nothing of an answer, keep nobody out: a real server and real sockets."""

from __future__ import annotations

import contextlib
import http.client
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.helpers.background import until
from tests.helpers.samples import write_checkpoint

TOKEN = "a-long-enough-token"
HALF = b"GET /api/v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
_PROGRAM = """
import sys
from treeckpt_dashboard.web import server
from treeckpt_dashboard.web.server import serve
server.READ_SECONDS = 1.0
serve([sys.argv[1]], port=0, token=sys.argv[2], cache=sys.argv[3], head_seconds=float(sys.argv[4]),
      started=lambda address: print("up", address, flush=True))
"""


class Server:
    def __init__(self, run: Path, cache: Path, head_seconds: float) -> None:
        command = [sys.executable, "-c", _PROGRAM, str(run), TOKEN, str(cache), str(head_seconds)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if line.startswith("up "))
        self.port = int(line.partition("127.0.0.1:")[2].partition("/")[0])

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(sent)
        return connection

    def ask(self, path: str = "/api/v1/runs", *, token: str | None = TOKEN) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            with self.stopped():
                connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
            return connection.getresponse().status
        finally:
            connection.close()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Lets the server not run: what is connected and sent meanwhile has arrived in time, however slow this is."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def holds(self, connection: socket.socket) -> bool:
        """Whether the server has its end of a connection open; its kernel may still have bytes of a closed one."""
        ends = [f"{port:04X}" for port in (self.port, connection.getsockname()[1])]
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()]
        return any([row[1][-4:], row[2][-4:]] == ends and row[9] != "0" for row in rows)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def server(tmp_path: Path, head_seconds: float) -> Iterator[Server]:
    write_checkpoint(tmp_path / "run" / "step_00000001", step=1)
    made = Server(tmp_path / "run", tmp_path / "cache", head_seconds)
    try:
        yield made
    finally:
        made.end()


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes a connection, without an answer."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_hundreds_of_half_sent_requests_keep_nobody_out(tmp_path: Path) -> None:
    with server(tmp_path, 600) as made, contextlib.ExitStack() as stack:
        for number in range(400):
            stack.enter_context(made.connect(HALF if number % 2 else b""))
            if number % 40 == 0:
                assert made.ask() == 200
        assert [made.ask() for _ in range(20)] == [200] * 20
        assert made.ask(token=None) == 401


def test_a_head_that_does_not_come_in_time_closes_the_connection(tmp_path: Path) -> None:
    with server(tmp_path, 2) as made:
        with made.connect() as nothing, made.connect(HALF) as half:
            assert is_closed(nothing) and is_closed(half)
        with made.connect(HALF) as slow:
            with contextlib.suppress(ConnectionError):  # it may be closed just before a byte is sent
                while not select.select([slow], [], [], 0.05)[0]:  # a byte now and then does not help
                    slow.sendall(b"x")
            assert is_closed(slow)
        assert made.ask() == 200


def test_the_next_head_of_a_connection_has_to_come_in_time_too(tmp_path: Path) -> None:
    request = f"GET /api/v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    with server(tmp_path, 2) as made:
        connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=60)
        ask = partial(connection.request, "GET", "/api/v1/runs", headers={"Authorization": f"Bearer {TOKEN}"})
        with made.stopped():
            ask()
        with made.connect() as nothing:
            for number in range(3):  # one that is used again and again stays
                if number == 2:
                    assert is_closed(nothing), "the time for a head has passed since the connection was opened"
                if number:
                    ask()
                answer = connection.getresponse()
                assert answer.status == 200 and answer.read()
        assert connection.sock is not None
        connection.sock.sendall(request)
        assert is_closed(connection.sock)
        connection.close()


def test_an_answer_that_is_not_taken_is_given_up(tmp_path: Path) -> None:
    request = f"GET /api/v1/openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    with server(tmp_path, 600) as made, made.connect() as greedy:
        count = 400  # far more than what sockets hold
        assert until(lambda: made.holds(greedy))
        greedy.sendall(request * count)
        assert until(lambda: not made.holds(greedy))
        answers = 0
        with contextlib.suppress(ConnectionResetError):
            greedy.settimeout(30)
            while data := greedy.recv(1 << 20):
                answers += data.count(b"HTTP/1.1 200")
        assert answers < count
        assert made.ask() == 200
