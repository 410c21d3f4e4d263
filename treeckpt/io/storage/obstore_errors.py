"""What the errors of obstore mean: whether the same request may succeed later, and a `StoreError` with a hint."""

from __future__ import annotations

import re

from ...errors import StoreError
from .aws_profiles import HOW
from .bucket import FetchFailure
from .presigned_reads import AnswerError

INTERMEDIARY = "Something between here and the store answers in its place: look at the proxy and the endpoint"
# what obstore has no class or attribute for stands in the first line of a `GenericError`
_CUT = re.compile(r"body|connection|incomplete|timed? ?out|reset|closed", re.IGNORECASE)
_STATUS = re.compile(r"status code: (\d{3})")
_NO_ANSWER = "HTTP error"
_THROTTLED = (429, 503)
_OTHER_BYTES = re.compile(r"non-partial|answered with|Requested \d")
"""Of errors about bytes that were not asked for."""
_NO_CREDENTIALS = re.compile(
    r"169\.254\.|latest/(api/token|meta-data)|metadata\.google|[Cc]redential|AccessKey|SecretAccess|MissingAccount"
)
_CREDENTIAL_HINTS = {
    "s3": HOW,
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or pass use_azure_cli=True",
}


def status_of(error: BaseException | None) -> int | None:
    """Returns the HTTP status of an error of obstore; None where there was no answer."""
    found = _STATUS.search(str(error).partition("\n")[0])
    return int(found[1]) if found else None


def first_line(error: BaseException) -> str:
    """Returns the first line of an error of obstore; of a response in XML its code and message."""
    text = str(error).split("\n\nDebug source", 1)[0]
    messages = re.findall(r"<(?:Code|Message)>([^<]{1,200})</", text)
    head = text.partition("\n")[0].partition("<?xml")[0].strip().rstrip(":")
    return f"{head}: {', '.join(messages)}"[:600] if messages else head[:600]


def is_cut(error: StoreError) -> bool:
    """Whether the answer to a request broke off."""
    cause = error.__cause__
    return isinstance(cause, Exception) and status_of(cause) is None and _CUT.search(first_line(cause)) is not None


def judge(error: Exception) -> FetchFailure:
    """Returns what may be done about an error that `to_store_error` has made."""
    from obstore.exceptions import GenericError

    cause = error.__cause__
    if not isinstance(cause, (GenericError, AnswerError)):
        return FetchFailure(throttled=False, temporary=False)
    if (status := status_of(cause)) is not None:
        return FetchFailure(status in _THROTTLED, status in (408, 429) or status >= 500)
    text = first_line(cause)
    broken = _NO_ANSWER in text or _CUT.search(text) is not None
    return FetchFailure(throttled=False, temporary=broken and not _NO_CREDENTIALS.search(text))


def to_store_error(what: str, bucket: str, key: str, kind: str, error: Exception) -> Exception:
    """Returns an error of obstore as ours.

    Args:
        what: was to be done.
        bucket: its URL.
        key: of the object; empty for the bucket.
        kind: of the store: s3, gs or az.
    """
    from obstore.exceptions import InvalidPathError, PermissionDeniedError, UnauthenticatedError

    url, text = f"{bucket}/{key}" if key else bucket, first_line(error)
    if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
        hint = "Make the bucket, or look at its name and the endpoint"
        return StoreError(url, expected=f"a bucket to {what} in", found="no such bucket", hint=hint)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(url)
    refused = isinstance(error, (PermissionDeniedError, UnauthenticatedError))
    if _NO_CREDENTIALS.search(text.replace(key, "")):
        hint = f"No credentials are found, or not taken. {_CREDENTIAL_HINTS.get(kind, '')}"
    elif refused or "AccessDenied" in str(error) or status_of(error) == 403:
        hint = f"The credentials do not allow to {what} here: look at the policies of the user and of the bucket"
    elif _OTHER_BYTES.search(text):
        hint = INTERMEDIARY
    elif "redirect" in text.lower() or status_of(error) == 301:
        hint = "Set the bucket's region: AWS_REGION, or the option region"
    elif isinstance(error, InvalidPathError):
        hint = "Another program has put this object there; remove it"
    else:
        hint = "Look at the network and the endpoint, and try again"
    return StoreError(url, expected=f"to {what} it", found=text, hint=hint)
