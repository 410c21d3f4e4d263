"""Interleavings on an S3 server that stops each request of each process until it may be answered.

Each process has a port of its own there, by which the server knows it; the last port stops nobody.
"""

from __future__ import annotations

import asyncio
import base64
import contextvars
import http.client
import io
import json
import os
import signal
import time
from typing import Any

from tests.bench.s3_objects import S3Object, S3Segment, new_etag
from tests.bench.s3_server import S3Answer, S3Request, S3Server
from tests.crash.interleaved_actor import changes
from tests.crash.interleaved_cases import STEPS
from tests.crash.interleaved_stage import ACTORS, LONGEST_PAUSE, QUIET, STUCK, Link, Process, Stage, asleep, save_id_in
from treeckpt._core.format.files import step_name

__all__ = ["RemoteStage"]

BUCKET = "bucket"
_actor: contextvars.ContextVar[int] = contextvars.ContextVar("actor")
"""Whose connection it is; `ACTORS` for the one that stops nobody."""


class GatedServer(S3Server):
    """A server that asks the scheduler before it carries out a request, and tells it when it is answered."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address, self.run = address, ""
        self.free: list[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = [[] for _ in range(ACTORS)]

    async def listen(self) -> list[int]:
        ports: list[int] = []
        for actor in range(ACTORS + 1):

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, actor: int = actor) -> None:
                _actor.set(actor)
                await self.serve(reader, writer)

            server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20, backlog=1024)
            ports.append(server.sockets[0].getsockname()[1])
        return ports

    async def _wait(self, request: S3Request) -> None:
        actor = _actor.get()
        if actor == ACTORS:
            return
        self.free[actor] = [line for line in self.free[actor] if not line[0].at_eof()]  # of one that was killed
        if self.free[actor]:
            line = self.free[actor].pop()
        else:
            line = await asyncio.open_unix_connection(self.address)
            line[1].write(json.dumps({"actor": actor, "pid": 0, "main": False}).encode() + b"\n")
        line[1].write(json.dumps({"next": self._words(request)}).encode() + b"\n")
        if not await line[0].readline():
            line[1].close()
            raise ConnectionError("the process was killed, and its request is lost")
        request.row["line"] = line

    def _words(self, request: S3Request) -> str:
        prefix = f"{BUCKET}/{self.run}/"
        if "list-type" in request.query:
            return f"LIST {request.query.get('prefix', '').removeprefix(self.run + '/')}"
        return f"{request.method} {request.path.removeprefix(prefix)}{'?delete' if 'delete' in request.query else ''}"

    async def _send(self, answer: S3Answer, request: S3Request, writer: asyncio.StreamWriter) -> bool:
        line, names = request.row.pop("line", None), self.names() if changes(request.method) else None
        try:
            return await super()._send(answer, request, writer)
        finally:
            if line is not None:
                line[1].write(json.dumps({"done": names}).encode() + b"\n")
                self.free[_actor.get()].append(line)

    def names(self) -> list[str | None]:
        """The save that each step's index names."""
        found: list[str | None] = []
        for step in STEPS:
            index = self.objects.get(f"{BUCKET}/{self.run}/{step_name(step)}/index.json")
            found.append(None if index is None else save_id_in(_content(index)))
        return found

    def _answer(self, request: S3Request, body: S3Segment) -> S3Answer:
        # as S3 does: without a condition of deletions a process that was stopped takes away what others have put there
        version, present = request.headers.get("if-match"), self.objects.get(request.path)
        if request.method == "DELETE" and version and (present is None or present.etag != version):
            return S3Answer(412)
        return super()._answer(request, body)

    def _control(self, request: S3Request, body: bytes) -> S3Answer:
        if request.method == "POST":
            self.objects.clear()
            self.uploads.clear()
            self.log.clear()
            told = json.loads(body)
            self.run = told["run"]
            for name, text in told["files"].items():
                self.objects[f"{BUCKET}/{self.run}/{name}"] = _stored(base64.b64decode(text))
            return S3Answer(200, text=json.dumps(self.names()).encode())
        prefix = f"{BUCKET}/{self.run}/"
        files = {k.removeprefix(prefix): base64.b64encode(_content(o)).decode() for k, o in self.objects.items()}
        return S3Answer(200, text=json.dumps(files).encode())


def _content(found: S3Object) -> bytes:
    return b"".join(os.pread(part.file.fileno(), part.nbytes, 0) for part in found.segments)


def _stored(data: bytes) -> S3Object:
    file = io.FileIO(os.memfd_create("object"), "r+")
    file.write(data)
    segment = S3Segment(file, len(data))
    return S3Object([segment], new_etag(segment))


def _serve(address: str, tell: int, parent: int) -> None:
    async def main() -> None:
        ports = await GatedServer(address).listen()
        os.write(tell, json.dumps(ports).encode() + b"\n")
        while os.getppid() == parent:
            await asyncio.sleep(1.0)

    asyncio.run(main())


class RemoteStage(Stage):
    """Cases in a bucket. A killed process's request is lost, or is carried out though it is dead."""

    def __init__(self, *, far: bool = False) -> None:
        address, told, parent = self.listen(), os.pipe(), os.getpid()
        self.server = os.fork()
        if self.server == 0:
            try:
                self.listener.close()
                _serve(address, told[1], parent)
            finally:
                os._exit(0)
        with os.fdopen(told[0]) as file:
            ports = json.loads(file.readline())
        os.close(told[1])
        self.connection = http.client.HTTPConnection("127.0.0.1", ports[-1])
        self.under_way: set[int] = set()
        """The links whose requests are being answered."""
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        super().__init__([{**keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"} for port in ports], far=far)

    def lay(self, files: dict[str, bytes]) -> None:
        self.run = f"s3://{BUCKET}/case{self.cases}/run"
        texts = {name: base64.b64encode(data).decode() for name, data in files.items()}
        names = self._ask("POST", {"run": self.run.removeprefix(f"s3://{BUCKET}/"), "files": texts})
        self.names = dict(zip(STEPS, names, strict=True))

    def files(self) -> dict[str, bytes]:
        return {name: base64.b64decode(text) for name, text in self._ask("GET", {}).items()}

    def _ask(self, method: str, body: dict[str, Any]) -> Any:
        self.connection.request(method, "/!run", json.dumps(body))
        return json.loads(self.connection.getresponse().read())

    def hear(self, link: Link, message: dict[str, Any]) -> None:
        if "done" not in message:
            super().hear(link, message)
            if link.next is not None and link.process.only_changes and not changes(link.next):
                self.go_on(link, 1)
            return
        self.under_way.discard(id(link))
        for step, name in zip(STEPS, message["done"] or self.names.values(), strict=True):
            if name != self.names[step]:
                self.names[step] = name
                self.events.append((link.process.number, "index", (step, name)))

    def go_on(self, link: Link, count: int) -> None:
        if link.sent:
            self.under_way.add(id(link))
        super().go_on(link, count)

    def settle(self) -> None:
        """Waits until nothing is being answered, and all processes wait: for an answer, or for each other."""
        begin, pause = time.monotonic(), QUIET
        while True:
            if self.poll(0) or self.under_way:
                self.poll(QUIET)
                continue
            busy = [process for process in self.processes if process.state == "busy"]
            if all(asleep(pid) for pid in (*(process.pid for process in busy), self.server)) and not self.poll(0):
                ready = any(process.state == "called" or self.stopped(process) for process in self.processes)
                if not busy or ready or time.monotonic() - begin > STUCK:
                    return
            pause = QUIET if self.poll(pause) else min(2 * pause, LONGEST_PAUSE)

    def kill(self, process: Process) -> None:
        sent = [link for link in self.stopped(process) if link.sent]
        if len(self.events) % 2:  # what it has sent arrives, though it is dead
            os.kill(process.pid, signal.SIGSTOP)
            for link in sent:
                self.go_on(link, 1)
            while self.under_way:
                self.poll(QUIET)
        for link in sent:
            self.under_way.discard(id(link))
        super().kill(process)

    def close(self) -> None:
        super().close()
        os.kill(self.server, signal.SIGKILL)
        os.waitpid(self.server, 0)
