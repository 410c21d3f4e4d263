"""S3, Google Cloud Storage and Azure by obstore: requests, their errors in our words, and what is asked again.

obstore itself asks again, with growing pauses, after server errors, throttling, refused and cut connections (ten times
within three minutes; option `retry_config`), and aborts uploads that fail. What it gives up on while an answer's body
is under way is asked again here. Credentials come from options, the environment, `~/.aws` (see `profiles`), or the
instance.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ...errors import StoreError
from .aws_profiles import HOW, check_instance, s3_options
from .bucket import Found, Listing, Tag, missing_extra

__all__ = ["ObstoreBucket"]

T = TypeVar("T")

PART = 8 << 20
"""Bytes of one part of an upload."""
MAX_PARTS = 9000
"""Of one upload, below the 10,000 of S3."""
UPLOADS = 8
"""Parts on their way at a time."""
RANGE = 2 << 20
"""Bytes of one ranged request, at least; a longer read is several at a time."""
READS = 16
"""Ranged requests at a time."""
TRIES = 3
PAUSE = 0.2
"""Seconds before the first time that a read is asked again here; then twice as long."""
TIMEOUTS = {"timeout": "120s", "connect_timeout": "10s"}
_ENDPOINTS = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_SCHEMES = {"s3a": "s3", "gcs": "gs", "azure": "az"}
_BETWEEN = "Something between here and the store answers in its place: look at the proxy and the endpoint"
_PAGE = "a web page in its place"
_HTML = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html)\b", re.IGNORECASE)
_CUT = re.compile(r"body|connection|incomplete|timed? ?out|reset|closed", re.IGNORECASE)
_NO_CREDENTIALS = re.compile(
    r"169\.254\.|latest/(api/token|meta-data)|metadata\.google|[Cc]redential|AccessKey|SecretAccess|MissingAccount"
)
_HOW = {
    "s3": HOW,
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or pass use_azure_cli=True",
}


class ObstoreBucket:
    """A bucket or container.

    Args:
        url: of its root.
        options: obstore's for this kind of store (`endpoint`, `region`, `access_key_id`, ...), and `client_options`,
            `retry_config`, `credential_provider`.

    Raises:
        StoreError: obstore is not installed, or does not take an option.
    """

    shared = True

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url, self.options = url, dict(options)
        self.kind = _kind(url)
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise missing_extra(url, "obstore", "s3" if self.kind == "s3" else "object") from error
        self._obstore: Any = obstore
        opened: Any = from_url
        made = s3_options(url, options, os.environ) if self.kind == "s3" else dict(options)
        if self.kind == "s3":
            check_instance(url, made, os.environ)
            # one object at a time needs no request that some services do not know
            made = {"disable_bulk_delete": True, **made}
        client = {**TIMEOUTS, **made.pop("client_options", {})}
        endpoints = [made.get(name) for name in _ENDPOINTS] + [os.environ.get(name) for name in _ENDPOINT_VARIABLES]
        if str(next(filter(None, endpoints), "")).startswith("http://"):  # it was asked for
            client.setdefault("allow_http", True)
        scheme, _, rest = url.partition("://")
        try:
            self._store: Any = opened(f"{_SCHEMES.get(scheme, scheme)}://{rest}", client_options=client, **made)
        except (obstore.exceptions.BaseError, ValueError, TypeError) as error:
            raise StoreError(url, expected="options that obstore takes", found=_first_line(error)) from error
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    # listing -------------------------------------------------------------------------------------------------

    def list(self, prefix: str) -> Listing:
        found = self._ask_again("list", prefix, lambda: self._obstore.list_with_delimiter(self._store, prefix or None))
        if not found["objects"] and not found["common_prefixes"]:
            self._confirm_empty(prefix)
        return Listing([_found(meta) for meta in found["objects"]], list(found["common_prefixes"]))

    def walk(self, prefix: str) -> Iterator[Found]:
        last: str | None = None
        pages: Any = None

        def turn() -> Any:
            nonlocal pages
            pages = pages or iter(self._obstore.list(self._store, prefix or None, offset=last, chunk_size=1000))
            try:
                return next(pages, None)
            except self._obstore.exceptions.BaseError:
                pages = None  # to be asked again from behind the last
                raise

        while page := self._ask_again("list", prefix, turn):
            last = page[-1]["path"]
            yield from map(_found, page)
        if last is None:
            self._confirm_empty(prefix)

    def _confirm_empty(self, prefix: str) -> None:
        """Refuses an empty listing where any name is found: a web page in the place of a listing lists nothing."""
        try:
            self.size(f"{prefix}/.nobody-{secrets.token_hex(8)}".lstrip("/"))
        except FileNotFoundError:
            return
        except StoreError as error:
            if error.found != _PAGE:
                return  # it may be listed, and not be read
            raise StoreError(f"{self.url}/{prefix}", expected="to list it", found=_PAGE, hint=error.hint) from error

    def size(self, key: str) -> int:
        def head() -> Any:
            return self._obstore.get(self._store, key, options={"head": True})

        result = self._ask_again("look at", key, head)
        self._refuse_page(key, result.attributes)
        return result.meta["size"]

    def _refuse_page(self, key: str, attributes: Mapping[str, str], data: bytes = b"") -> None:
        """Refuses a web page, as a proxy or a login page sends it in the place of an object, with a status of success.

        Raises:
            StoreError: it is one.
        """
        if attributes.get("Content-Type", "").startswith("text/html") or _HTML.match(data):
            raise StoreError(
                f"{self.url}/{key}",
                expected="to read it",
                found=_PAGE,
                hint=_BETWEEN,
            )

    # reading -------------------------------------------------------------------------------------------------

    def read(self, key: str, limit: int) -> tuple[bytes, Tag]:
        def get() -> tuple[bytes, Tag]:
            result = self._obstore.get(self._store, key)
            meta = result.meta
            tag = {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}
            if meta["size"] > limit:
                return self._obstore.get_range(self._store, key, start=0, length=limit + 1).to_bytes(), tag
            data = result.bytes().to_bytes()
            self._refuse_page(key, result.attributes, data[:1000])
            return data, tag

        return self._ask_again("read", key, get)

    def read_into(self, key: str, start: int, out: memoryview) -> int:
        step = max(RANGE, -(-len(out) // READS))
        parts = range(0, len(out), step)
        if len(parts) < 2:
            return self._read_range(key, start, out)
        jobs = [self._threads().submit(self._read_range, key, start + at, out[at : at + step]) for at in parts]
        counts = [job.exception() or job.result() for job in jobs]
        filled = 0
        for count, at in zip(counts, parts, strict=True):
            if isinstance(count, BaseException):
                raise count
            if at == filled:
                filled += count
        return filled

    def _read_range(self, key: str, start: int, out: memoryview) -> int:
        def get() -> Any:
            try:
                return memoryview(self._obstore.get_range(self._store, key, start=start, length=len(out)))
            except self._obstore.exceptions.BaseError:
                if self._obstore.head(self._store, key)["size"] > start:
                    raise
                return b""  # a range behind the end is an error of its own

        data = self._ask_again("read", key, get)
        out[: len(data)] = data
        return len(data)

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            self._pool = self._pool or ThreadPoolExecutor(READS, "treeckpt-get")
            return self._pool

    # writing -------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, replace: bool | Tag) -> None:
        mode = replace if isinstance(replace, Mapping) else "overwrite" if replace else "create"
        try:
            self._ask(
                "write",
                key,
                lambda: self._obstore.put(self._store, key, data, mode=mode, use_multipart=False),
            )
        except FileExistsError:
            # a write that was asked again after its answer was lost meets itself
            if self.read(key, len(data))[0] != data:
                raise

    def upload(self, key: str, nbytes: int, blocks: Iterable[bytes]) -> None:
        part, taken = max(PART, -(-nbytes // MAX_PARTS)), 0

        def counted() -> Iterator[bytes]:
            nonlocal taken
            for block in blocks:
                taken += len(block)
                yield block

        def put() -> None:
            self._obstore.put(self._store, key, counted(), chunk_size=part, max_concurrency=UPLOADS)

        try:
            self._ask_again("write", key, put, unless=lambda: taken > 0)
        except (StoreError, FileNotFoundError):
            # the end of an upload that was asked for again, after its answer was lost, finds no upload any more
            if taken < nbytes or not self._is_whole(key, nbytes):
                raise

    def _is_whole(self, key: str, nbytes: int) -> bool:
        with contextlib.suppress(StoreError, FileNotFoundError):
            return self.size(key) == nbytes
        return False

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask("delete", key, lambda: self._obstore.delete(self._store, key))

    def tidy(self, prefix: str) -> None:
        """There are no directories."""

    # errors --------------------------------------------------------------------------------------------------

    def _ask(self, what: str, key: str, call: Callable[[], T]) -> T:
        errors = self._obstore.exceptions
        try:
            return call()
        except (errors.AlreadyExistsError, errors.PreconditionError) as error:
            raise FileExistsError(f"{self.url}/{key}") from error
        except (errors.BaseError, FileNotFoundError, ValueError) as error:
            raise self._told(what, key, error) from error

    def _ask_again(
        self, what: str, key: str, call: Callable[[], T], *, unless: Callable[[], bool] = lambda: False
    ) -> T:
        """For what changes nothing: where the answer broke off while its body came, it is asked for again.

        Args:
            unless: it has changed something.
        """
        for tried in range(1, TRIES + 1):
            try:
                return self._ask(what, key, call)
            except StoreError as error:
                cause = str(error.__cause__).partition("\n")[0]
                if tried == TRIES or unless() or "status code" in cause or not _CUT.search(cause):
                    raise
                time.sleep(PAUSE * 2**tried)
        raise AssertionError("the last try returns or raises")

    def _told(self, what: str, key: str, error: Exception) -> Exception:
        url, text = f"{self.url}/{key}" if key else self.url, _first_line(error)
        if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
            hint = "Make the bucket, or look at its name and the endpoint"
            return StoreError(url, expected=f"a bucket to {what} in", found="no such bucket", hint=hint)
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(url)
        errors = self._obstore.exceptions
        refused = isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError))
        if _NO_CREDENTIALS.search(text.replace(key, "")):
            hint = f"No credentials are found, or not taken. {_HOW.get(self.kind, '')}"
        elif refused or "AccessDenied" in str(error) or "403" in text:
            hint = f"The credentials do not allow to {what} here: look at the policies of the user and of the bucket"
        elif "non-partial" in text:
            hint = _BETWEEN
        elif "redirect" in text.lower() or "301" in text:
            hint = "Set the bucket's region: AWS_REGION, or the option region"
        elif isinstance(error, errors.InvalidPathError):
            hint = "Another program has put this object there; remove it"
        else:
            hint = "Look at the network and the endpoint, and try again"
        return StoreError(url, expected=f"to {what} it", found=text, hint=hint)


def _kind(url: str) -> str:
    scheme = url.partition("://")[0]
    return "s3" if scheme in ("s3", "s3a") else "gs" if scheme in ("gs", "gcs") else "az"


def _first_line(error: Exception) -> str:
    """What obstore says, without the request's whole story; of an answer in XML its code and message."""
    text = str(error).split("\n\nDebug source", 1)[0]
    told = re.findall(r"<(?:Code|Message)>([^<]{1,200})</", text)
    head = text.partition("\n")[0].partition("<?xml")[0].strip().rstrip(":")
    return f"{head}: {', '.join(told)}"[:600] if told else head[:600]


def _found(meta: Mapping[str, Any]) -> Found:
    tag = f"{meta.get('e_tag')} {meta.get('version')}"
    number = int.from_bytes(hashlib.blake2s(tag.encode(), digest_size=7).digest())
    return Found(meta["path"], meta["size"], int(meta["last_modified"].timestamp() * 1000) * 1_000_000, number)
