"""Deletes an object of S3 or Azure on condition of its version, by a presigned URL: obstore knows no such condition."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, getproxies, urlopen

TIMEOUT = 120.0
"""Seconds without a byte, after which a request has failed."""
CHANGED = 412
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
    if status == CHANGED:
        raise FileExistsError(url)
    if status in (200, 202, 204, 404):
        return True
    if status in _NO_CONDITION:
        return False
    raise AnswerError(f"status code: {status} {text}")


class AnswerError(Exception):
    """A request failed; the text is that of obstore's errors, so that the same may be done about both."""
