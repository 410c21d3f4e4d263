"""S3, Google Cloud Storage and Azure by obstore: requests, retries, and credentials.

obstore itself retries, with growing pauses, after server errors, throttling, refused and cut connections (ten times
within three minutes; option `retry_config`), and aborts uploads that fail. A response whose body breaks off is
requested again here.

Credentials come from options, the environment, `~/.aws`, or the instance. obstore itself reads the environment alone,
so those of profiles are read here, with region and endpoint. The order is that of the AWS tools: options, keys or a web
identity in the environment, the profile, then the container's and the instance's credentials. A profile that signs on,
assumes a role or runs a program needs boto3.
"""

from __future__ import annotations

import configparser
import contextlib
import hashlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from ..._threads import call_in_thread, start_unnamed_thread
from ...errors import StoreError
from ..process import OwnProcess
from .bucket import ObjectListing, RangeResponse, missing_extra
from .conditions import (
    AnswerError,
    Condition,
    can_delete_matching,
    delete_matching,
    find_out,
    is_known,
    no_conditional_writes,
    refuses_conditions,
    takes_conditions,
)
from .obstore_errors import (
    CREDENTIALS_HINT,
    INTERMEDIARY,
    first_line,
    has_advice,
    is_cut,
    judge,
    status_of,
    to_store_error,
)
from .requests_in_flight import MAX_PARTS_IN_FLIGHT, UploadWindow, first_depth
from .store import DirectoryEntry, VersionTag


class LateClient:
    """A client that `get` opens once.

    Args:
        make: opens it.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._lock = make, threading.RLock()
        self._client: Any = None

    def get(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._make()
            return self._client

    def open_soon(self) -> None:
        """Opens it in another thread, which has Python's global lock when this one waits for the network."""
        if self._client is None:
            start_unnamed_thread(self.get)  # start_thread would wait until the client is open


_GIVEN = ("access_key_id", "aws_access_key_id", "credential_provider", "skip_signature", "aws_skip_signature")
"""Options by which credentials are given: then neither a profile nor an instance is asked for them."""
_PLAIN = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
"""The settings of a profile that are keys."""
_BEFORE = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
"""Variables whose credentials go before those of a profile."""
_AFTER = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
"""Variables of a container, whose credentials come after those of a profile."""
_BY_BOTO3 = ("sso_session", "sso_start_url", "role_arn", "credential_process", "credential_source", "login_session")
"""Settings of a profile that signs on, assumes a role or runs a program."""
_ENDPOINTS = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def s3_options(url: str, options: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """Returns the options together with the credentials, region and endpoint of the profile.

    Raises:
        StoreError: the profile that AWS_PROFILE names does not exist, or needs boto3.
    """
    merged = dict(options)
    name = env.get("AWS_PROFILE", "default")
    profile = _profile(name, env)
    if not any(key in options for key in _GIVEN) and not any(key in env for key in _BEFORE):
        if not profile and "AWS_PROFILE" in env:
            raise StoreError(url, expected=f"the profile {name} of AWS_PROFILE", found="no such profile in ~/.aws")
        if "aws_access_key_id" in profile:
            merged.update({key.removeprefix("aws_"): profile[key] for key in _PLAIN if key in profile})
        elif any(key in profile for key in _BY_BOTO3):
            merged["credential_provider"] = _boto3_provider(url, name)
    for option, given, variables in (
        ("region", ("region", "aws_region"), ("AWS_REGION", "AWS_DEFAULT_REGION")),
        ("endpoint_url", _ENDPOINTS, _ENDPOINT_VARIABLES),
    ):
        if option in profile and not any(key in options for key in given) and not any(v in env for v in variables):
            merged[option] = profile[option]
    return merged


def check_instance(url: str, options: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """Raises StoreError if there are no credentials; obstore would ask for those of an instance for a minute."""
    if any(name in options for name in _GIVEN) or any(name in env for name in (*_BEFORE, *_AFTER)):
        return
    place = urlsplit(options.get("metadata_endpoint") or env.get("AWS_METADATA_ENDPOINT") or "http://169.254.169.254")
    try:
        socket.create_connection((place.hostname or "", place.port or 80), timeout=1).close()
    except OSError as error:
        raise StoreError(
            url,
            expected="credentials",
            found="none in the options, the environment or ~/.aws, and no instance that gives them",
            hint=CREDENTIALS_HINT,
        ) from error


def _profile(name: str, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of a profile in both files; those in credentials override those in config."""
    home = os.path.join(env.get("HOME", os.path.expanduser("~")), ".aws")
    settings: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        # as botocore reads them: a secret may contain %, and a section may stand twice
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(env.get(variable, os.path.join(home, file)), encoding="utf-8")
        except (configparser.Error, OSError, UnicodeError):
            continue
        if parser.has_section(section):
            settings.update(parser.items(section))
    return settings


def _boto3_provider(url: str, name: str) -> Any:
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise StoreError(
            url,
            expected=f"plain keys in the profile {name}, or boto3 to sign on with it",
            found="a profile without keys, and no boto3",
            hint="pip install boto3, or export the keys: aws configure export-credentials --format env",
        ) from error
    return Boto3CredentialProvider(boto3.Session(profile_name=name))


T = TypeVar("T")

PART, LARGE_PART = 8 << 20, 64 << 20
"""Bytes of one part of an upload: at least, and at most where that makes no more than `MAX_PARTS`."""
PARTS, MAX_PARTS = 512, 9000
"""Parts up to which an upload has parts of `PART` bytes; and parts of any upload, at most, as S3 takes 10,000."""
PIECE = 256 << 10
"""Bytes of a response that are handed over at a time, at least: they stay in the cache of a processor."""
RETRIES = 10
"""Retries of obstore itself, unless the option `retry_config` says another number."""
UPLOAD_RETRIES = 100
"""Retries of obstore for a part of an upload, within three minutes: of many in flight some are refused many times."""
UPLOAD_PAUSES = {"base": 4, "max_backoff": timedelta(seconds=4)}
"""Between tries of a part: the next pause is drawn up to `base` times the last one. By 2, which is obstore's own, they
stay at 0.1 seconds, and many parts in flight keep a store busy with requests that it refuses."""
TRIES = 3
"""Tries of any other request here, each of which obstore repeats too."""
DELETE_TRIES = 5
"""Tries of a deletion on condition, which obstore does not repeat."""
PAUSE = 0.4
"""Seconds before the first retry here; each pause is twice as long as the one before."""
LISTING = 30.0
"""Seconds of a listing of direct children after which it is looked at page by page: whether its pages come again."""
PAGE_SECONDS = 240.0
"""Seconds for a part of a listing: longer than obstore repeats a request."""
SIGNED_FOR = timedelta(minutes=5)
"""How long a presigned URL is taken; each request has its own."""
TIMEOUTS = {"timeout": "120s", "connect_timeout": "10s"}
_UNSIGNED = ("unsigned_payload", "aws_unsigned_payload", "AWS_UNSIGNED_PAYLOAD")
_SCHEMES = {"s3a": "s3", "gcs": "gs", "azure": "az"}
_WEB_PAGE = "a web page in its place"
_HTML = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html)\b", re.IGNORECASE)


@lru_cache(maxsize=1)
def _first_user() -> OwnProcess:
    """Returns the process that has used obstore first, of this one and those that it was forked from."""
    return OwnProcess()


class ObstoreBucket:
    """A bucket or container.

    Args:
        url: the URL of its root.
        options: those of obstore for this kind of store (`endpoint`, `region`, `access_key_id`, ...),
            `client_options`, `retry_config`, `credential_provider`, and `conditional`: False writes without conditions.

    Raises:
        StoreError: obstore is not installed, or refuses an option.
    """

    shared = atomic = True

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
        self.conditional, merged = takes_conditions(url, options)
        if self.kind == "s3":
            merged = s3_options(url, merged, os.environ)
            check_instance(url, merged, os.environ)
            # objects are deleted one at a time, and some services do not support bulk delete
            merged.setdefault("disable_bulk_delete", True)
            merged.setdefault("conditional_put", "etag")  # before AWS_CONDITIONAL_PUT, which is looked at above
        asked = merged.pop("client_options", {})
        client = {**TIMEOUTS, **asked}
        endpoints = [merged.get(name) for name in _ENDPOINTS] + [os.environ.get(name) for name in _ENDPOINT_VARIABLES]
        self._endpoint = str(next(filter(None, endpoints), ""))
        is_plain = self._endpoint.startswith("http://")  # the user named it
        # Google Cloud Storage compares generations, and knows no If-Match of a deletion
        self._deletes_versions = self.kind != "gs" and self.conditional and can_delete_matching(merged, asked)
        self.depth = first_depth()
        if self.kind == "s3" and not is_plain and not any(name in merged or name in os.environ for name in _UNSIGNED):
            # TLS protects the bytes of a request; their SHA-256 takes more time than all else in an upload
            merged["unsigned_payload"] = True
        if is_plain:
            client.setdefault("allow_http", True)
        scheme, _, rest = url.partition("://")
        retries = merged.get("retry_config") or {}
        self.tries = retries.get("max_retries", RETRIES) + 1
        try:
            root = f"{_SCHEMES.get(scheme, scheme)}://{rest}"
            self._store: Any = opened(root, client_options=client, **merged)
        except BaseException as error:  # an option of the HTTP client in the wrong place ends in a panic of Rust
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            hint = "Options of the HTTP client, such as allow_http, go into client_options={...}"
            raise StoreError(url, expected="options that obstore takes", found=first_line(error), hint=hint) from error

        def with_retries(**config: Any) -> LateClient:
            return LateClient(lambda: opened(root, client_options=client, **{**merged, "retry_config": config}))

        # what fails is repeated by the caller, who must know when the store throttles
        self._once = with_retries(**{**retries, "max_retries": 0})
        # obstore repeats the parts of uploads and does not say when the store throttles
        self._uploads = with_retries(**{"max_retries": UPLOAD_RETRIES, "backoff": UPLOAD_PAUSES, **retries})
        self._window = UploadWindow()
        self._looks: dict[str, Future[None]] = {}
        """Checks of prefixes that were sent before the listings that need them."""

    # listing -------------------------------------------------------------------------------------------------

    def prepare(self, prefix: str) -> None:
        self._uploads.open_soon()
        self._looks[prefix] = call_in_thread(partial(self._check_empty_listing, prefix), "treeckpt-look")

    def list(self, prefix: str) -> ObjectListing:
        look = self._looks.pop(prefix, None)
        begin, seconds = time.monotonic(), LISTING
        begin_children = partial(self._obstore.list_with_delimiter_async, self._store, prefix or None)
        children = partial(self._obstore.list_with_delimiter, self._store, prefix or None)
        try:
            listing = self._retry("list", prefix, lambda: _within(seconds, begin_children, children))
        except TimeoutError:
            for _ in self.walk(prefix):  # raises where it never ends
                pass
            seconds = max(PAGE_SECONDS, 2 * (time.monotonic() - begin))  # as obstore collects all pages itself
            listing = self._retry("list", prefix, lambda: self._page(prefix, begin_children, children, seconds))
        self._window.expect(time.monotonic() - begin)
        if not listing["objects"] and not listing["common_prefixes"]:
            look.result() if look is not None else self._check_empty_listing(prefix)
        files = {meta["path"]: _entry(meta) for meta in listing["objects"]}
        return ObjectListing(files, list(listing["common_prefixes"]))

    def walk(self, prefix: str) -> Iterator[tuple[str, DirectoryEntry]]:
        last: str | None = None
        pages: Any = None
        seen = set[str]()

        def next_page() -> Any:
            nonlocal pages
            pages = pages or self._obstore.list(self._store, prefix or None, offset=last, chunk_size=1000)
            try:
                return self._page(prefix, lambda: anext(pages, None), lambda: next(pages, None))
            except self._obstore.exceptions.BaseError:
                pages = None  # the retry continues behind the last object
                raise

        while page := self._retry("list", prefix, next_page):
            for meta in page:
                last = key = str(meta["path"])
                if key in seen:
                    raise self._endless(prefix, f"{key} for the second time")
                seen.add(key)
                yield key, _entry(meta)
        if last is None:
            self._check_empty_listing(prefix)

    def _page(self, prefix: str, begin: Callable[[], Awaitable[T]], call: Callable[[], T], seconds: float = 0.0) -> T:
        """Waits for a part of a listing, `PAGE_SECONDS` unless told; raises StoreError if it does not come."""
        seconds = seconds or PAGE_SECONDS
        try:
            return _within(seconds, begin, call)
        except TimeoutError:
            raise self._endless(prefix, f"nothing more within {seconds:.0f} s") from None

    def _endless(self, prefix: str, found: str) -> StoreError:
        expected = "a listing that ends, with each object once"
        hint = f"Its pages come again: the store, or a proxy, does not honour continuation tokens. {INTERMEDIARY}"
        return StoreError(f"{self.url}/{prefix}", expected=expected, found=found, hint=hint)

    def _check_empty_listing(self, prefix: str) -> None:
        """Raises StoreError for an empty listing that is in truth a web page: then any name is found."""
        try:
            self.size(f"{prefix}/.nobody-{secrets.token_hex(8)}".lstrip("/"))
        except FileNotFoundError:
            return
        except StoreError as error:
            if error.found != _WEB_PAGE:
                return  # the credentials may allow to list and not to read
            raise StoreError(f"{self.url}/{prefix}", expected="to list it", found=_WEB_PAGE, hint=error.hint) from error

    def size(self, key: str) -> int:
        def head() -> Any:
            return self._obstore.get(self._store, key, options={"head": True})

        result = self._retry("look at", key, head)
        self._check_not_web_page(key, result.attributes)
        return result.meta["size"]

    def _check_not_web_page(self, key: str, attributes: Mapping[str, str], data: bytes = b"") -> None:
        """Raises StoreError for a web page, which proxies and login pages send with a status of success."""
        if attributes.get("Content-Type", "").startswith("text/html") or _HTML.match(data):
            raise StoreError(f"{self.url}/{key}", expected="to read it", found=_WEB_PAGE, hint=INTERMEDIARY)

    # reading -------------------------------------------------------------------------------------------------

    def read(self, key: str, limit: int) -> tuple[bytes, VersionTag]:
        def get() -> tuple[bytes, VersionTag]:
            result = self._obstore.get(self._store, key)
            meta = result.meta
            tag = {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}
            if meta["size"] > limit:
                return self._obstore.get_range(self._store, key, start=0, length=limit + 1).to_bytes(), tag
            data = result.bytes().to_bytes()
            self._check_not_web_page(key, result.attributes, data[:1000])
            return data, tag

        self._once.open_soon()  # data is often fetched after the index
        return self._retry("read", key, get)

    def fetch(self, key: str, start: int, nbytes: int) -> RangeResponse:
        with self._wrapped_errors("read", key):
            try:
                result = self._obstore.get(self._once.get(), key, options={"range": (start, start + nbytes)})
            except self._obstore.exceptions.BaseError as error:
                if status_of(error) != 416 or (size := self._obstore.head(self._once.get(), key)["size"]) > start:
                    raise
                return RangeResponse(size, ())  # the range is behind the end of the object
        return RangeResponse(result.meta["size"], self._pieces(key, result))

    def _pieces(self, key: str, result: Any) -> Iterator[Any]:
        """Yields a body as it arrives: to collect it takes memory, and a copy, of all its bytes."""
        with self._wrapped_errors("read", key):
            yield from result.stream(min_chunk_size=PIECE)

    judge = staticmethod(judge)

    # writing -------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, replace: bool | VersionTag) -> None:
        if replace is not True and not self.conditional:
            self._check_present(key, replace)
            replace = True
        mode = replace if isinstance(replace, Mapping) else "overwrite" if replace else "create"
        try:
            self._put(self._store, key, data, mode)
        except FileExistsError:
            # a retried write whose first response was lost finds its own object
            if self.read(key, len(data))[0] != data:
                raise
        except StoreError as error:
            temporary = judge(error).temporary
            if temporary and self._holds(key, data):  # the last response was lost
                return
            # a request without a condition is repeated by obstore, a later answer so does not stand for all
            error.unanswered = temporary and (replace is True or status_of(error.__cause__) is None)
            if replace is True or not refuses_conditions(error):
                raise
            condition: Condition = "If-Match" if isinstance(replace, Mapping) else "If-None-Match"
            found = f"one that refuses them: {error.found}"
            raise no_conditional_writes(self.url, condition, found) from error

    def _put(self, store: Any, key: str, data: bytes, mode: Any) -> None:
        self._retry(
            "write",
            key,
            lambda: self._obstore.put(store, key, data, mode=mode, use_multipart=False),
            # a write whose answer broke off may have been carried out: `put` looks what is there
            cut=False,
        )

    def _holds(self, key: str, data: bytes) -> bool:
        """Whether an object is there with this content."""
        with contextlib.suppress(StoreError, FileNotFoundError):
            return self.read(key, len(data))[0] == data
        return False

    def _check_present(self, key: str, replace: Literal[False] | VersionTag) -> None:
        """Raises FileExistsError unless the object is what a write is to replace; it may change afterwards."""
        present: VersionTag = {}
        with contextlib.suppress(FileNotFoundError):
            present = self._retry("look at", key, lambda: self._obstore.head(self._store, key))
        if present.get("e_tag") != (replace or {}).get("e_tag"):
            raise FileExistsError(f"{self.url}/{key}")

    def check_condition(self, key: str, data: bytes, condition: Condition) -> None:
        if self.kind != "s3" or not self.conditional or is_known(self.url, self._endpoint, condition):
            return

        def put(mode: Any) -> None:
            try:
                # without the retries of obstore, which would repeat the 501 of a store that refuses conditions
                self._put(self._once.get(), key, data, mode)
            except StoreError as error:
                if refuses_conditions(error) or not judge(error).temporary:
                    raise
                self._put(self._store, key, data, mode)

        find_out(self.url, self._endpoint, condition, put)

    def upload(self, key: str, nbytes: int, blocks: Iterable[memoryview]) -> None:
        part, taken = part_nbytes(nbytes), 0

        def counted() -> Iterator[memoryview]:
            nonlocal taken
            for block in blocks:
                taken += len(block)
                yield block
                # `UploadWindow` takes a part for sent once nothing refers to its memory any more
                del block

        def put() -> None:
            # closed: an error that is kept would keep the part that is not complete
            with contextlib.closing(self._window.stream(counted(), part)) as parts:
                self._obstore.put(self._uploads.get(), key, parts, chunk_size=part, max_concurrency=MAX_PARTS_IN_FLIGHT)

        try:
            # the blocks come once, so an upload that has taken one is not begun again
            self._retry("write", key, put, unless=lambda: taken > 0)
        except (StoreError, FileNotFoundError):
            # a retried end of an upload whose first response was lost finds no upload
            size = None
            with contextlib.suppress(StoreError, FileNotFoundError):
                size = self.size(key) if taken >= nbytes else None
            if size != nbytes:
                raise

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._retry("delete", key, lambda: self._obstore.delete(self._store, key))

    def delete_version(self, key: str, tag: VersionTag) -> None:
        version = tag.get("e_tag")
        if not self._deletes_versions or not version or not self._delete_version(key, version):
            self.delete(key)

    def _delete_version(self, key: str, version: str) -> bool:
        """Deletes an object on condition of its version; returns whether the store knows that condition."""
        try:
            url = self._obstore.sign(self._store, "DELETE", key, SIGNED_FOR)
        except Exception:  # credentials that sign no URL
            return False
        for tried in range(1, DELETE_TRIES + 1):
            try:
                with self._wrapped_errors("delete", key):
                    return delete_matching(url, version)
            except FileExistsError as error:
                # behind a first try whose answer was lost, it is this deletion that the object is gone by
                if tried == 1 or self._is_there(key):
                    raise FileExistsError(f"{self.url}/{key}") from error
                return True  # by a request whose answer was lost
            except StoreError as error:
                # 409: another request changes the object at this moment
                if tried == DELETE_TRIES or not (judge(error).temporary or status_of(error.__cause__) == 409):
                    raise
                time.sleep(PAUSE * 2 ** (tried - 1))
        raise AssertionError("the last try returns or raises")

    def _is_there(self, key: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self.size(key)
            return True
        return False

    def tidy(self, prefix: str) -> None:
        """Does nothing: there are no directories."""

    # errors --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _wrapped_errors(self, what: str, key: str) -> Iterator[None]:
        errors = self._obstore.exceptions
        self._check_process()
        try:
            yield
        except (errors.AlreadyExistsError, errors.PreconditionError) as error:
            if has_advice(error):
                raise to_store_error(what, self.url, key, self.kind, error) from error
            raise FileExistsError(f"{self.url}/{key}") from error
        except (errors.BaseError, AnswerError, FileNotFoundError, ValueError) as error:
            raise to_store_error(what, self.url, key, self.kind, error) from error

    def _check_process(self) -> None:
        """Raises StoreError in a fork of a process that has used obstore: its threads are not there, and calls hang."""
        first = _first_user()
        if not first.is_this:
            raise StoreError(
                self.url,
                expected="a process that was not forked after it had used an object store",
                found=f"a fork of process {first.pid}",
                hint="Start such processes with spawn or forkserver: multiprocessing.get_context('spawn'), "
                "DataLoader(..., multiprocessing_context='spawn')",
            )

    def _retry(
        self,
        what: str,
        key: str,
        call: Callable[[], T],
        *,
        cut: bool = True,
        unless: Callable[[], bool] = lambda: False,
    ) -> T:
        """Makes a request, again where the store asks for that.

        Args:
            cut: repeats it too if the body of its response breaks off: it may then have been carried out.
            unless: whether it cannot be repeated any more.
        """
        for tried in range(1, TRIES + 1):
            try:
                with self._wrapped_errors(what, key):
                    return call()
            except StoreError as error:
                if tried == TRIES or unless() or not (error.refused_once or (cut and is_cut(error))):
                    raise
                time.sleep(PAUSE * 2 ** (tried - 1))
        raise AssertionError("the last try returns or raises")


def _within(seconds: float, begin: Callable[[], Awaitable[T]], call: Callable[[], T]) -> T:
    """Waits for a call of obstore in a thread; raises TimeoutError, and cancels the call, after so many seconds.

    Args:
        begin: begins the call.
        call: the same call, not asynchronous: it goes through all pages of a listing without a look at a signal or a
            clock. It is made only where no thread can be started and the thread of the caller runs an event loop, as
            that of a notebook does: it cannot run a second one.
    """
    import asyncio  # takes 20 ms

    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []

    async def wait() -> T:
        running.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await asyncio.wait_for(begin(), seconds)

    def run() -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(wait())
        return call()

    done = call_in_thread(run, "treeckpt-list")
    try:
        return done.result()
    except BaseException:  # an interrupt must not leave the thread, for which the end of the process waits
        for loop, task in running:
            if task is not None and not done.done():
                with contextlib.suppress(RuntimeError):  # it has ended
                    loop.call_soon_threadsafe(task.cancel)
        raise


def part_nbytes(nbytes: int) -> int:
    """Returns the bytes of each part but the last of an upload.

    A short rest, as of data of whole parts behind a header, is spread over the parts: of 64 that are in flight at a
    time a 65th would wait for the first.
    """
    part = max(PART, min(-(-nbytes // PARTS), LARGE_PART), -(-nbytes // MAX_PARTS))
    whole, rest = divmod(nbytes, part)
    return -(-nbytes // whole) if whole and part == PART and rest < PART // 8 else part


def _kind(url: str) -> str:
    scheme = url.partition("://")[0]
    return "s3" if scheme in ("s3", "s3a") else "gs" if scheme in ("gs", "gcs") else "az"


def _entry(meta: Mapping[str, Any]) -> DirectoryEntry:
    tag = f"{meta.get('e_tag')} {meta.get('version')}"
    number = int.from_bytes(hashlib.blake2s(tag.encode(), digest_size=7).digest())
    return DirectoryEntry(meta["size"], int(meta["last_modified"].timestamp() * 1000) * 1_000_000, number)
