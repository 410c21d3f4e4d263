"""An S3 server for measurements and faults, in one asyncio process: latency, rate and troubles are set while it runs.

    python -m tests.bench.s3_server [CERTIFICATE KEY]

It prints its port. With the files of a certificate and its key it speaks HTTPS. It answers what S3 clients of
checkpoints send: GET with ranges, HEAD, PUT (with `If-None-Match: *` and `If-Match`), copies, DELETE, deletes of many,
listings by pages, and multipart uploads.
Signatures are not looked at (the log leaves out those in URLs), and every bucket exists. Google's XML interface differs
in a header, which is known too: `x-goog-if-generation-match`. Objects stay in memory (memfd) and are sent by
`sendfile`, so one core carries more than 1 GB/s; over HTTPS they are encrypted on that core.

`POST /!set` takes a JSON object with any of the fields of `S3Settings` and forgets the log; `GET /!log` gives the
requests since then; `DELETE /!objects` forgets all objects. A rule is `{"match": regex over "METHOD path range",
"do": what, "times": n, "seconds": s}`; what is one of: 500, 503, 429 (answers without a look at the object), error
(answers with the rule's `status`, `code` and, inside the XML, `more`), slow (waits first), stall (waits in the middle
of the body), reset (the connection ends in the middle of the body), lost (the request is carried out, the connection
ends without an answer), shifted (other bytes than those of the range, under their own Content-Range), short (half of
the range, under its own Content-Range), whole (the whole object, status 200), flipped (one bit of the body is
changed), meet (waits until `count` requests have been under way at a time, at most `seconds`), hold
(waits for the next `POST /!release`, or setting).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import itertools
import json
import os
import random
import re
import ssl
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from tests.bench.s3_objects import S3Object, S3Segment, flipped_copy, list_objects, new_etag, new_generation

PIECE_SECONDS = 0.02
"""A body goes in pieces that take about so long at the connection's rate."""
ERRORS = {400: "InvalidArgument", 403: "AccessDenied", 404: "NoSuchKey", 412: "PreconditionFailed", 416: "InvalidRange"}
ERRORS |= {429: "TooManyRequests", 500: "InternalError", 501: "NotImplemented", 503: "SlowDown"}
LOOKS, LOOK_SECONDS = 3, 0.02
"""How often a client has to be seen asleep, and the seconds between two looks."""


@dataclass
class S3Settings:
    """How far away the server is, and what goes wrong there."""

    latency: float = 0.0
    """Seconds before each answer."""
    client: int = 0
    """A process whose requests are answered in stages: when it waits, all its threads asleep, all that it has sent are
    answered. So requests of one stage wait for no answer of another one, however busy the machine is. 0 for none."""
    rate: float = 0.0
    """Bytes per second of one connection, in each direction; 0 is as fast as it goes."""
    tail: float = 0.0
    """Part of the GETs that wait `tail_seconds` more."""
    tail_seconds: float = 1.0
    busy_above: int = 0
    """Requests at the same time above which the answer is 503; 0 for no limit."""
    trouble: float = 0.0
    """Part of the requests that meet one of `kinds`, drawn by `seed`."""
    kinds: list[str] = field(default_factory=list)
    where: str = ""
    """Only requests meet trouble whose line, as for a rule, matches this regex."""
    seconds: float = 30.0
    """How long a drawn stall lasts."""
    seed: int = 0
    conditional: str = "honoured"
    """Writes with `If-None-Match`: honoured, ignored (as if they were plain), or refused (501)."""
    matching: str = ""
    """Writes with `If-Match`; as `conditional` unless told."""
    page: int = 1000
    """Keys in a page of a listing."""
    tokens: str = "honoured"
    """Continuation tokens of listings: honoured; repeated (each answers the first page, and that there are more);
    in a cycle (the last page leads to the first); or empty (pages without keys follow the first)."""
    rules: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class S3Request:
    """A request, and its row in the log."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    row: dict[str, Any]
    do: str = ""
    seconds: float = 0.0
    rule: dict[str, Any] = field(default_factory=dict)


@dataclass
class S3Answer:
    """A status, headers, and a text or the bytes of an object."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    text: bytes = b""
    body: list[tuple[io.FileIO, int, int]] = field(default_factory=list)
    """Parts of memory files: file, offset, bytes."""


class S3Server:
    """The objects, the uploads under way, and the log."""

    def __init__(self) -> None:
        self.settings, self.objects = S3Settings(), dict[str, S3Object]()
        self.uploads: dict[str, tuple[str, dict[int, S3Object]]] = {}
        self.log: list[dict[str, Any]] = []
        self.busy, self.numbers, self.draw = 0, itertools.count(1), random.Random(0)
        self.released, self.busiest = asyncio.Event(), 0
        """Set when no request is held; and the most requests under way at a time since the last setting."""
        self.stage, self.staged = 0, 0
        """The number of the stage, and its requests that wait to be answered."""
        self.answered = asyncio.Event()
        """Set when those of the stage are answered."""

    # connections ----------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if not await self._one(head, reader, writer):
                    break
        with contextlib.suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()

    async def _one(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answers one request; False where the connection ends then."""
        first, *lines = head.decode().split("\r\n")
        method, target, _ = first.split(" ")
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines if line)}
        url = urlsplit(target)
        path = re.sub(r"[?&]X-Amz-[^&]*", "", target)
        row: dict[str, Any] = {"method": method, "path": path, "range": headers.get("range", ""), "status": 0}
        request = S3Request(method, unquote(url.path).lstrip("/"), dict(parse_qsl(url.query, True)), headers, row)
        if request.path.startswith("!"):
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await self._send(self._control(request, body), request, writer)
            return True
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        condition = headers.get("if-none-match", headers.get("if-match", ""))
        row |= {"busy": self.busy, "at": time.monotonic(), "sent": 0, "condition": condition, "stage": self.stage}
        self.log.append(row)
        log = self.log
        try:
            if headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await self._receive(reader, headers)
            self._find_trouble(request)
            await self._wait(request)
            answer = self._answer(request, body)
            row |= {"status": answer.status, "received": body.nbytes}
            return request.do != "lost" and await self._send(answer, request, writer)
        finally:
            # what was sent before the last setting, and takes long, does not count
            self.busy -= log is self.log
            row["ended"] = time.monotonic()

    async def _receive(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> S3Segment:
        file = io.FileIO(os.memfd_create("object"), "r+")
        begin, taken = time.monotonic(), 0
        pieces = _body(reader, int(headers.get("content-length", 0)))
        if headers.get("transfer-encoding", "").lower() == "chunked":
            pieces = _chunks(reader)
        if "aws-chunked" in headers.get("content-encoding", ""):  # whose trailer is not looked at
            inner = asyncio.StreamReader()
            async for data in pieces:
                inner.feed_data(data)
            inner.feed_eof()
            pieces = _chunks(inner)
        async for data in pieces:
            taken += file.write(data) or 0
            await self._pace(begin, taken)
        return S3Segment(file, taken)

    async def _pace(self, begin: float, nbytes: int) -> None:
        if self.settings.rate:
            await asyncio.sleep(max(begin + nbytes / self.settings.rate - time.monotonic(), 0))

    async def _wait(self, request: S3Request) -> None:
        settings, seconds = self.settings, self.settings.latency
        if request.method == "GET" and settings.tail and self.draw.random() < settings.tail:
            seconds += settings.tail_seconds
        if request.do == "slow":
            seconds += request.seconds
        if seconds:
            await asyncio.sleep(seconds)
        if request.do == "meet":
            await self._meet(request)
        elif request.do == "hold":
            await self.released.wait()
        elif settings.client:
            await self._wait_for_client(settings.client)

    async def _meet(self, request: S3Request) -> None:
        log, end = self.log, time.monotonic() + request.seconds
        while log is self.log and self.busiest < request.rule["count"] and time.monotonic() < end:
            await asyncio.sleep(LOOK_SECONDS)
        request.row["busy"] = max(request.row["busy"], self.busy)

    async def _wait_for_client(self, client: int) -> None:
        """Waits until the client waits for all that it has sent."""
        answered, self.staged, looks = self.answered, self.staged + 1, 0
        if self.staged > 1:
            await answered.wait()
            return
        while looks < LOOKS and answered is self.answered:
            await asyncio.sleep(LOOK_SECONDS)
            looks = looks + 1 if self.staged == self.busy and is_asleep(client) else 0
        if answered is self.answered:
            self._end_stage()

    def _end_stage(self) -> None:
        self.answered.set()
        self.stage, self.staged, self.answered = self.stage + 1, 0, asyncio.Event()

    def _find_trouble(self, request: S3Request) -> None:
        line = f"{request.method} {request.row['path']} {request.row['range']}"
        for rule in self.settings.rules:
            if rule.get("times", 1) and re.search(rule["match"], line):
                rule["times"] = rule.get("times", 1) - 1
                request.do, request.seconds, request.rule = str(rule["do"]), rule.get("seconds", 0.0), rule
                break
        else:
            where = self.settings.where
            if self.settings.trouble and re.search(where, line) and self.draw.random() < self.settings.trouble:
                request.do, request.seconds = self.draw.choice(self.settings.kinds), self.settings.seconds
        if not request.do and self.settings.busy_above and self.busy > self.settings.busy_above:
            request.do = "503"
        request.row["do"] = request.do

    async def _send(self, answer: S3Answer, request: S3Request, writer: asyncio.StreamWriter) -> bool:
        body, nbytes = answer.body, sum(n for _, _, n in answer.body) or len(answer.text)
        headers = {"Content-Length": str(nbytes), "Date": formatdate(usegmt=True), **answer.headers}
        head = f"HTTP/1.1 {answer.status} -\r\n" + "".join(f"{n}: {v}\r\n" for n, v in headers.items()) + "\r\n"
        if request.method == "HEAD":
            writer.write(head.encode())
        else:
            half = len(answer.text) // 2
            writer.write(head.encode() + answer.text[:half])
            if not body and not await self._break_off(request, writer):
                return False
            writer.write(answer.text[half:])
            begin, sent, loop = time.monotonic(), 0, asyncio.get_running_loop()
            secure = writer.get_extra_info("sslcontext") is not None
            step = int(self.settings.rate * PIECE_SECONDS) or (1 << 20 if secure else 4 << 20)
            if request.do in ("stall", "reset"):
                step = max(min(step, nbytes // 4), 1)
            for file, offset, count in body:
                for at in range(offset, offset + count, step):
                    if sent >= nbytes // 2 and not await self._break_off(request, writer):
                        return False
                    size = min(step, offset + count - at)
                    if secure:
                        writer.write(os.pread(file.fileno(), size, at))
                        await writer.drain()
                    else:
                        await loop.sendfile(writer.transport, file, at, size)
                    sent += size
                    request.row["sent"] = sent
                    await self._pace(begin, sent)
        await writer.drain()
        return request.headers.get("connection", "").lower() != "close"

    async def _break_off(self, request: S3Request, writer: asyncio.StreamWriter) -> bool:
        """In the middle of a body: waits for a stall, or returns False for a connection that is reset."""
        if request.do == "stall":
            request.do = ""
            await asyncio.sleep(request.seconds)
        if request.do == "reset":
            await writer.drain()
            writer.transport.abort()
        return request.do != "reset"

    # what is asked for ----------------------------------------------------------------------------------------

    def _control(self, request: S3Request, body: bytes) -> S3Answer:
        if request.path == "!release":
            self.released.set()
        elif request.method == "POST":
            self.settings = S3Settings(**{**asdict(self.settings), "rules": [], **json.loads(body)})
            self.draw, self.log = random.Random(self.settings.seed), []
            self.released.set()
            self.released, self.busy, self.busiest = asyncio.Event(), 0, 0
            self._end_stage()
        if request.method == "DELETE":
            self.objects.clear()
        stored = sum(found.nbytes for found in self.objects.values())
        return S3Answer(
            200, text=json.dumps({"log": self.log, "uploads": len(self.uploads), "stored": stored}).encode()
        )

    def _answer(self, request: S3Request, body: S3Segment) -> S3Answer:
        if request.do in ("500", "503", "429"):
            return _error(int(request.do))
        if request.do == "error":
            return _error(request.rule["status"], request.rule["code"], request.rule.get("more", ""))
        method, key, query = request.method, request.path, request.query
        if "list-type" in query or (method == "GET" and "/" not in key.rstrip("/")):
            return _xml(list_objects(self.objects, key.rstrip("/"), query, self.settings.page, self.settings.tokens))
        if "delete" in query:
            return self._delete(key.rstrip("/"), body)
        if "uploads" in query or "uploadId" in query:
            return self._upload(request, body)
        if method == "PUT" and (source := request.headers.get("x-amz-copy-source")):
            return self._copy(unquote(source).lstrip("/"), key)
        if method == "PUT":
            return self._put(request, S3Object([body], new_etag(body)))
        if method == "DELETE":
            self.objects.pop(key, None)
            return S3Answer(204)
        found = self.objects.get(key)
        return _error(404) if found is None else self._get(request, found)

    def _get(self, request: S3Request, found: S3Object) -> S3Answer:
        headers = {"ETag": found.etag, "Last-Modified": formatdate(found.modified, usegmt=True)}
        headers |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        headers["x-goog-generation"] = new_generation(found.etag)
        first, last, status = 0, found.nbytes - 1, 200
        if (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", request.row["range"])) and request.do != "whole":
            first, last, status = int(asked[1]), min(int(asked[2] or last), last), 206
            if first > last:
                return _error(416)
            if request.do == "shifted":
                move = -1 if first else 1
                first, last = first + move, min(last + move, found.nbytes - 1)
            if request.do == "short":
                last = (first + last) // 2
            headers["Content-Range"] = f"bytes {first}-{last}/{found.nbytes}"
        body, at = [], 0
        for segment in found.segments:
            low, high = max(first, at), min(last + 1, at + segment.nbytes)
            if low < high:
                body.append((segment.file, low - at, high - low))
            at += segment.nbytes
        if request.do == "flipped" and body:
            body = [(flipped_copy(body), 0, sum(n for _, _, n in body))]
        if not body:
            headers["Content-Length"] = "0"
        return S3Answer(status, headers, body=body)

    def _delete(self, bucket: str, body: S3Segment) -> S3Answer:
        for key in re.findall("<Key>(.*?)</Key>", os.pread(body.file.fileno(), body.nbytes, 0).decode()):
            self.objects.pop(f"{bucket}/{unescape(key)}", None)
        return _xml("<DeleteResult></DeleteResult>")

    def _copy(self, source: str, key: str) -> S3Answer:
        found = self.objects.get(source)
        if found is None:
            return _error(404)
        self.objects[key] = S3Object(found.segments, found.etag)
        return _xml(f"<CopyObjectResult><ETag>{escape(found.etag)}</ETag></CopyObjectResult>")

    def _put(self, request: S3Request, new: S3Object) -> S3Answer:
        present = self.objects.get(request.path)
        none_match, match = request.headers.get("if-none-match"), request.headers.get("if-match")
        tag = present.etag if present else ""
        if generation := request.headers.get("x-goog-if-generation-match"):
            none_match, match = generation == "0", generation != "0" and generation
            tag = new_generation(tag)
        if none_match or match:
            manner = (match and self.settings.matching) or self.settings.conditional
            if manner == "refused":
                return _error(501)
            if manner == "honoured" and ((none_match and present) or (match and (present is None or tag != match))):
                return _error(412)
        self.objects[request.path] = new
        return S3Answer(200, {"ETag": new.etag, "x-goog-generation": new_generation(new.etag)})

    def _upload(self, request: S3Request, body: S3Segment) -> S3Answer:
        number = request.query.get("uploadId", "")
        if "uploads" in request.query:
            number = f"upload-{next(self.numbers)}"
            self.uploads[number] = request.path, {}
            return _xml(f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>")
        if number not in self.uploads:
            return _error(404, "NoSuchUpload")
        parts = self.uploads[number][1]
        if request.method == "PUT":
            parts[int(request.query["partNumber"])] = part = S3Object([body], new_etag(body))
            return S3Answer(200, {"ETag": part.etag})
        if request.method == "DELETE":
            del self.uploads[number]
            return S3Answer(204)
        text = os.pread(body.file.fileno(), body.nbytes, 0).decode()
        wanted = [int(n) for n in re.findall(r"<PartNumber>(\d+)</PartNumber>", text)]
        if wanted != sorted(parts):
            return _error(400, "InvalidPart")
        if any(parts[n].nbytes < 5 << 20 for n in wanted[:-1]):
            return _error(400, "EntityTooSmall")
        tags = hashlib.md5("".join(parts[n].etag for n in wanted).encode()).hexdigest()
        new = S3Object([segment for n in wanted for segment in parts[n].segments], f'"{tags}-{len(wanted)}"')
        answer = self._put(request, new)
        if answer.status != 200:
            return answer
        del self.uploads[number]
        return _xml(f"<CompleteMultipartUploadResult><ETag>{escape(new.etag)}</ETag></CompleteMultipartUploadResult>")


def is_asleep(process: int) -> bool:
    """Whether all threads of a process wait for something, or it has ended."""
    states = list[str]()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{process}/task/{thread}/stat") as stat:
                states.append(stat.read().rpartition(")")[2].split()[0])
    return set(states) <= {"S", "Z"}


async def _body(reader: asyncio.StreamReader, nbytes: int) -> AsyncIterator[bytes]:
    """Yields so many bytes as they arrive."""
    while nbytes:
        data = await reader.read(min(nbytes, 1 << 20))
        if not data:
            raise ConnectionError("the body ended")
        yield data
        nbytes -= len(data)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yields the chunks of a body without its length; those of aws-chunked have the same form."""
    while size := int((await reader.readline()).partition(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    while (await reader.readline()).strip():  # trailers
        pass


def _xml(text: str) -> S3Answer:
    return S3Answer(200, {"Content-Type": "application/xml"}, f'<?xml version="1.0"?>{text}'.encode())


def _error(status: int, code: str = "", more: str = "") -> S3Answer:
    answer = _xml(f"<Error><Code>{code or ERRORS[status]}</Code><Message>injected or asked for</Message>{more}</Error>")
    return S3Answer(status, answer.headers, answer.text)


async def main(*certificate: str) -> None:
    """Prints a free port and serves there until it is ended."""
    context = None
    if certificate:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*certificate)
    server = await asyncio.start_server(S3Server().serve, "127.0.0.1", 0, limit=1 << 20, backlog=1024, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
