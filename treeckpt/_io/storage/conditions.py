"""Writes and deletions of an object store on condition of the object's version, by which one of several saves to a path
wins.

Older S3-compatible servers refuse the headers (`NotImplemented`), or take a write and ignore its condition, as do
proxies that drop the headers. A store that ignores them is found out by a write whose condition cannot hold. The answer
is known to the whole process: it costs one request for each bucket and condition.

obstore knows no condition of a deletion: an object of S3 or Azure is deleted by a presigned URL.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import Request, getproxies, urlopen

from ...errors import StoreError

Condition = Literal["If-None-Match", "If-Match"]
"""The condition of a write: that the object is new, or has a certain version."""
_REFUSED = re.compile(r"NotImplemented|status code: 501")
_NO_VERSION = {"e_tag": '"00000000000000000000000000000000"'}
"""A version that no object has."""
_HINT = (
    "Update the store, or the proxy before it. Or pass conditional=False to ObjectStore and ObjectRun "
    "(AWS_CONDITIONAL_PUT=disabled on the command line): then the last of two saves to one path at the same moment wins"
)
_answers: dict[tuple[str, str, Condition], str | None] = {}
"""What is wrong, None if the condition is honoured, by bucket, endpoint and condition."""


def takes_conditions(url: str, options: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Returns whether conditional writes are to be used, and the other options.

    Raises:
        StoreError: the option `conditional` is neither True nor False.
    """
    rest = dict(options)
    disabled = rest.get("conditional_put", rest.get("aws_conditional_put", os.environ.get("AWS_CONDITIONAL_PUT")))
    conditional = rest.pop("conditional", disabled != "disabled")
    if not isinstance(conditional, bool):
        raise StoreError(url, expected="conditional=True or conditional=False", found=f"{conditional!r:.80}")
    return conditional, rest


def refuses_conditions(error: Exception) -> bool:
    """Whether an error of a conditional write says that the store has none."""
    return _REFUSED.search(str(error)) is not None


def no_conditional_writes(url: str, condition: str, found: str) -> StoreError:
    """Returns the error for a store without conditional writes."""
    return StoreError(url, expected=f"a store with conditional writes ({condition})", found=found, hint=_HINT)


def is_known(bucket: str, endpoint: str, condition: Condition) -> bool:
    """Whether the store's answer is known, raising StoreError if it does not honour the condition."""
    place = bucket, endpoint, condition
    if fault := _answers.get(place):
        raise no_conditional_writes(bucket, condition, fault)
    return place in _answers


def find_out(bucket: str, endpoint: str, condition: Condition, put: Callable[[Any], object]) -> None:
    """Writes an object that is there under a condition that does not hold.

    Args:
        put: writes it in the mode of obstore that it is given; raises FileExistsError if the condition does not hold.

    Raises:
        StoreError: the condition is refused or ignored, or the store cannot be reached.
    """
    fault: str | None = "one that ignores them: it replaces an object that is there"
    try:
        put("create" if condition == "If-None-Match" else _NO_VERSION)
    except FileExistsError:
        fault = None
    except StoreError as error:
        if not refuses_conditions(error):
            raise
        fault = f"one that refuses them: {error.found}"
    _answers[bucket, endpoint, condition] = fault
    is_known(bucket, endpoint, condition)


TIMEOUT = 120.0
"""Seconds without a byte, after which a request has failed."""
CONDITION_FAILED = 412
"""The status of an answer to a request whose condition does not hold."""
ANSWER_LIMIT = 64 << 10
"""Bytes of an answer that are read, at most."""
_OTHER_DELETIONS = re.compile(r"REQUEST_PAYER|S3_EXPRESS|PROXY_.*|DEFAULT_HEADERS")
"""Options and variables by which obstore sends deletions that a presigned URL does not stand for."""
_PLAIN_CLIENT = {"allow_http", "timeout", "connect_timeout", "user_agent"}
"""Options of the HTTP client that a deletion can go without."""
_NO_CONDITION = (400, 403, 405, 501)
"""Answers of stores that know no condition for a deletion, or take no presigned URL."""


def can_delete_matching(options: Mapping[str, Any], client_options: Mapping[str, Any]) -> bool:
    """Whether a presigned URL stands for a deletion by obstore with these options, and can be reached without it."""
    given = [name.upper().removeprefix("AWS_") for name in (*options, *(n for n in os.environ if n[:4] == "AWS_"))]
    asked = any(map(_OTHER_DELETIONS.fullmatch, given)) or not set(client_options) <= _PLAIN_CLIENT
    # obstore sends requests through ALL_PROXY, and urllib does not
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
            text += f": {error.read(ANSWER_LIMIT).decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
            return False  # obstore may know the certificate
        raise AnswerError(f"HTTP error: connection: {error}") from error
    if status == CONDITION_FAILED:
        raise FileExistsError(url)
    # 202 is the answer of Azure; by 404 the object is gone already
    if status in (200, 202, 204, 404):
        return True
    if status in _NO_CONDITION:
        return False
    raise AnswerError(f"status code: {status} {text}")


class AnswerError(Exception):
    """A request failed; the text is that of obstore's errors, so that the same may be done about both."""
