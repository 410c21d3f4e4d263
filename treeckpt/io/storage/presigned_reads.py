"""Reads ranges of objects of S3 over plain HTTP, by presigned URLs: from the socket to where the bytes belong.

obstore copies a body into memory of its own before Python sees it. Of 0.54 GB on two processors, at 40 ms and 90 MB/s a
connection, its stream takes 0.40 s and 0.47 s of processor time, and reads from sockets 0.28 s and 0.24 s. Over HTTPS
they gain nothing: OpenSSL hands over 16 KiB at a time, and each of these calls takes Python's global lock. So HTTPS,
proxies, and options that a URL cannot express stay with obstore. Indexes are deleted by presigned URLs too, as obstore
knows no condition for that.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import ssl
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, getproxies, proxy_bypass, urlopen

import numpy as np

from .bucket import RangeResponse

PIECE = 1 << 20
"""Bytes that are read at a time where no memory is given: with 256 KiB threads wait more often for Python's global lock
(0.41 s in place of 0.31 s), and 2 MiB gain nothing."""
CONNECT_TIMEOUT, TIMEOUT = 10.0, 120.0
"""Seconds without a connection, and without a byte, after which a request has failed."""
CHANGED = 412
"""The status of an answer to a request whose condition does not hold."""
REFUSAL = 64 << 10
"""Bytes of an answer without data that are read, at most."""
_OPTIONS = {
    *("endpoint", "endpoint_url", "region", "default_region", "access_key_id", "secret_access_key", "session_token"),
    *("token", "credential_provider", "unsigned_payload", "virtual_hosted_style_request", "conditional_put"),
    *("copy_if_not_exists", "disable_bulk_delete", "checksum_algorithm", "retry_config"),
}
"""Options that say no more than where objects are, who reads them, and how they are written."""
_OTHER_REQUESTS = re.compile(
    r"AWS_(SKIP_SIGNATURE|REQUEST_PAYER|S3_EXPRESS|SSE_.*|PROXY_.*|DEFAULT_HEADERS|USER_AGENT)"
)
_OTHER_DELETIONS = re.compile(r"REQUEST_PAYER|S3_EXPRESS|PROXY_.*|DEFAULT_HEADERS")
_PLAIN_CLIENT = {"allow_http", "timeout", "connect_timeout", "user_agent"}
_NO_CONDITION = (400, 403, 405, 501)
"""Answers of stores that know no condition for a deletion, or take no presigned URL."""
"""Variables of the environment by which obstore sends requests that a presigned URL does not stand for."""


def can_presign(endpoint: str, options: Mapping[str, Any], client_options: Mapping[str, Any]) -> bool:
    """Whether reads from an endpoint can go by presigned URLs over sockets of this process.

    Args:
        options, client_options: those of obstore that were given, beside the environment.
    """
    url, proxies = urlsplit(endpoint), getproxies()
    proxied = ("http" in proxies or "all" in proxies) and not proxy_bypass(url.hostname or "")
    given = {name.lower().removeprefix("aws_") for name in options}
    asked = not given <= _OPTIONS or not set(client_options) <= {"allow_http"}
    return url.scheme == "http" and not proxied and not asked and not any(map(_OTHER_REQUESTS.fullmatch, os.environ))


def can_delete_matching(options: Mapping[str, Any], client_options: Mapping[str, Any]) -> bool:
    """Whether a presigned URL stands for a deletion by obstore with these options, and can be reached without it."""
    given = [name.upper().removeprefix("AWS_") for name in (*options, *(n for n in os.environ if n[:4] == "AWS_"))]
    asked = any(map(_OTHER_DELETIONS.fullmatch, given)) or not set(client_options) <= _PLAIN_CLIENT
    return not asked and "all" not in getproxies()


def delete_matching(url: str, version: str) -> bool:
    """Deletes the object of a presigned URL if it has a version, by its ETag; returns whether the store answers that.

    A service that does not know the condition deletes every version, or refuses the request: then it returns False.

    Raises:
        FileExistsError: it has another version, or there is none.
        AnswerError: the request has failed, and may have been carried out.
    """
    request = Request(url, method="DELETE", headers={"If-Match": version})
    try:
        with urlopen(request, timeout=TIMEOUT) as answer:
            status, text = answer.status, ""
    except HTTPError as error:
        status, text = error.code, f"{error.reason}"
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            text += f": {error.read(REFUSAL).decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
            return False  # obstore may know the certificate
        raise AnswerError(f"HTTP error: connection: {error}") from error
    if status == CHANGED:
        raise FileExistsError(url)
    if status in (200, 202, 204, 404):
        return True
    if status in _NO_CONDITION:
        return False
    raise AnswerError(f"status code: {status} {text}")


class AnswerError(Exception):
    """A request failed; the text is that of obstore's errors, so that the same may be done about both."""


class PresignedReader:
    """Reads ranges; keeps connections that are idle for the next ones.

    Args:
        sign: returns a presigned URL for a GET of an object.
        is_temporary: whether an error is one that the same request may not meet again, by more than its status.
    """

    def __init__(self, sign: Callable[[str], str], is_temporary: Callable[[Exception], bool]) -> None:
        self._sign, self._is_temporary = sign, is_temporary
        self._idle: list[http.client.HTTPConnection] = []
        self._pid = os.getpid()
        weakref.finalize(self, _close, self._idle)

    def get(self, key: str, start: int, nbytes: int) -> RangeResponse | None:
        """Requests a range.

        Returns:
            None for an answer that is an error which no later request mends, as a missing object.

        Raises:
            AnswerError: the range is not answered, now or as asked.
        """
        url = urlsplit(self._sign(key))
        last = start + nbytes - 1
        connection, answer = self._ask(url.netloc, f"{url.path}?{url.query}", {"Range": f"bytes={start}-{last}"})
        if answer.status == 200:
            connection.close()
            raise AnswerError(f"asked for bytes {start}-{last}, answered with a non-partial response")
        if answer.status != 206:
            with contextlib.closing(connection), _named_errors():
                text = answer.read(REFUSAL).decode(errors="replace")
            error = AnswerError(f"status code: {answer.status} {answer.reason}: {text}")
            if answer.status in (408, 429) or answer.status >= 500 or self._is_temporary(error):
                raise error
            return None
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.getheader("Content-Range", ""))
        size = int(found[3]) if found else 0
        if not found or (int(found[1]), int(found[2])) != (start, min(last, size - 1)):
            connection.close()
            raise AnswerError(f"asked for bytes {start}-{last}, answered with {answer.getheader('Content-Range')}")
        return RangeResponse(size, _SocketBody(connection, answer, min(nbytes, size - start), self._idle))

    def _ask(
        self, host: str, target: str, headers: dict[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Sends a request, again where a connection that was idle has ended meanwhile."""
        if self._pid != os.getpid():  # the connections belong to the process that this one was forked from
            _close(self._idle)
            self._pid = os.getpid()
        while True:
            try:
                connection, was_idle = self._idle.pop(), True
            except IndexError:
                connection, was_idle = http.client.HTTPConnection(host, timeout=CONNECT_TIMEOUT), False
            try:
                with _named_errors():
                    if not was_idle:
                        connection.connect()
                        connection.sock.settimeout(TIMEOUT)
                    connection.request("GET", target, headers=headers)
                    return connection, connection.getresponse()
            except AnswerError:
                connection.close()
                if not was_idle:
                    raise


class _SocketBody:
    """The body of an answer, which is read from its socket; `idle` gets the connection when all of it was read."""

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        answer: http.client.HTTPResponse,
        nbytes: int,
        idle: list[http.client.HTTPConnection],
    ) -> None:
        self._connection, self._answer, self._left, self._idle = connection, answer, nbytes, idle
        self.places = not answer.will_close  # else the socket is the answer's own, and cannot be cut from here
        self._memory: memoryview | None = None
        self._aborted = False

    def read(self, memory: memoryview | None = None) -> memoryview:
        if not self._left:
            return memoryview(b"")
        if memory is None:
            memory = self._memory = self._memory or np.empty(min(PIECE, self._left), np.uint8).data
        part = memory[: self._left]
        with _named_errors():
            count = self._answer.readinto(part)
        if not count:
            raise AnswerError(f"the connection was closed {self._left} bytes before the end of the body")
        self._left -= count
        return part[:count]

    def abort(self) -> None:
        self._aborted = True
        with contextlib.suppress(OSError):  # it has ended already
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._left or self._aborted or self._answer.will_close:
            self._connection.close()
        elif self._connection not in self._idle:
            self._idle.append(self._connection)


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Raises AnswerError for what ends a connection."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise AnswerError(f"HTTP error: connection: {type(error).__name__}: {error}") from error


def _close(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()
