"""What the errors of obstore mean: whether the same request may succeed later, and a `StoreError` with a hint."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from ..._core.text import seconds_text
from ...errors import StoreError
from .bucket import FetchFailure
from .conditions import AnswerError

CREDENTIALS_HINT = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run where the instance has a role"
)
INTERMEDIARY = "Something between here and the store answers in its place: look at the proxy and the endpoint"
# what obstore has no class or attribute for stands in the first line of a `GenericError`
_CUT = re.compile(r"body|connection|incomplete|timed? ?out|reset|closed", re.IGNORECASE)
_STATUS = re.compile(r"status code: (\d{3})")
_NO_ANSWER = "HTTP error"
_THROTTLED = (429, 503)
_OTHER_BYTES = re.compile(r"non-partial|answered with|Requested \d")
"""What the text of an error about bytes that were not asked for has in it."""
_NO_CREDENTIALS = re.compile(
    r"169\.254\.|latest/(api/token|meta-data)|metadata\.google|[Cc]redential|AccessKey|SecretAccess|MissingAccount"
)
_CREDENTIAL_HINTS = {
    "s3": CREDENTIALS_HINT,
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or pass use_azure_cli=True",
}
_RENEW = "The credentials have expired: renew them (aws sso login, a new role session, a new SAS token), and try again"
_WRONG_KEY = "The store does not take these credentials: look at the keys, the session token and the endpoint"
_CLOCK = "Set the clock of this machine"
_REGION = "Set the bucket's region: AWS_REGION, or the option region"
_ABORTED = (
    "The upload was aborted while its parts were being sent, by another program or the bucket's rule for incomplete "
    "multipart uploads: save again, and look at the days of that rule if it happens once more"
)
_CHANGED = "Bytes changed or were lost on their way: look at the network and the proxy, and save again"
_SLOW = "The store, or the network, was too slow or too busy: try again later"
_FULL = "The store is full, or a quota is reached: free space there, or raise the quota"
_RULES = "The rules of the bucket forbid it: look at its retention, object lock and holds"
_ACCOUNT = "Look at the account and the billing of the store"
_KMS = "Look at the encryption key of the bucket, and whether these credentials may use it"
_ADVICE: Mapping[str, str] = {
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"), _RENEW),
    **dict.fromkeys(("InvalidToken", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidSecurity"), _WRONG_KEY),
    **dict.fromkeys(("SignatureDoesNotMatch", "InvalidAuthenticationInfo", "NoAuthenticationInformation"), _WRONG_KEY),
    "AuthenticationFailed": f"{_WRONG_KEY}; an account key of Azure also needs a clock that is right, a SAS token a "
    "time that has not passed",
    **dict.fromkeys(("RequestTimeTooSkewed", "RequestExpired"), _CLOCK),
    "NoSuchUpload": _ABORTED,
    **dict.fromkeys(("InvalidPart", "InvalidPartOrder", "InvalidBlockList", "EntityTooSmall"), _ABORTED),
    **dict.fromkeys(("AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect", "Redirect"), _REGION),
    **dict.fromkeys(("IllegalLocationConstraintException", "InvalidRegionName"), _REGION),
    **dict.fromkeys(("InvalidObjectState", "BlobArchived"), "It was moved to an archive: restore it there, then load"),
    **dict.fromkeys(("EntityTooLarge", "RequestBodyTooLarge"), "Save with a smaller max_shard_bytes"),
    **dict.fromkeys(("KeyTooLongError", "InvalidURI", "InvalidResourceName"), "Give a shorter or plainer path"),
    **dict.fromkeys(("BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "Md5Mismatch"), _CHANGED),
    **dict.fromkeys(("IncompleteBody", "MissingContentLength"), _CHANGED),
    **dict.fromkeys(("RequestTimeout", "OperationTimedOut", "OperationAborted", "ConditionalRequestConflict"), _SLOW),
    **dict.fromkeys(("SlowDown", "ServiceUnavailable", "ServerBusy", "TooManyRequests", "InternalError"), _SLOW),
    **dict.fromkeys(("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "InsufficientCapacity"), _FULL),
    **dict.fromkeys(("ObjectLocked", "BlobImmutableDueToPolicy", "LeaseIdMissing", "MethodNotAllowed"), _RULES),
    **dict.fromkeys(("RetentionPolicyNotMet", "ObjectUnderActiveHold", "ContainerDisabled"), _RULES),
    **dict.fromkeys(("AccountProblem", "AllAccessDisabled", "NotSignedUp", "AccountIsDisabled"), _ACCOUNT),
    **dict.fromkeys(("AccountDisabled", "UserProjectAccountProblem", "UserProjectMissing"), _ACCOUNT),
    **dict.fromkeys(("InvalidBucketName", "InvalidBucketState", "ContainerBeingDeleted"), "Look at the bucket's name"),
}
"""What to do, by the code of an error; codes as S3, Azure Blob Storage and Google Cloud Storage document them.

Not here are those that mean what obstore says: that there is no such object, that a condition does not hold, and that
the credentials do not allow it."""
_AGAIN = frozenset({"RequestTimeout", "OperationAborted", "IncompleteBody"})
"""Codes of requests that were not carried out and may be sent again, with statuses for which obstore does not do so."""


def code_of(error: BaseException | None) -> str:
    """Returns the code in the XML of an error's response; empty where there is none, as after a HEAD."""
    match = re.search(r"<Code>([\w.]{1,80})</Code>", str(error).split("\n\nDebug source", 1)[0])
    return match[1] if match else ""


def has_advice(error: BaseException) -> bool:
    """Whether the code of an error says more than the class that obstore gives it."""
    return code_of(error) in _ADVICE


def asks_again(error: BaseException | None) -> bool:
    """Whether the store has not carried a request out, and takes the same once more."""
    return code_of(error) in _AGAIN


def _advice(error: BaseException) -> str:
    """Returns what to do about the code of an error; empty for a code that is not known."""
    code, text = code_of(error), str(error)
    if code.startswith("KMS."):
        return _KMS
    advice = _ADVICE.get(code, "")
    match = re.search(r"<ServerTime>([^<]{8,40})</ServerTime>", text) if advice == _CLOCK else None
    if match is not None and (there := _moment(match[1])) is not None:
        ahead = time.time() - there.timestamp()
        advice += f": it is {seconds_text(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} that of the store"
    return advice


def _moment(text: str) -> datetime | None:
    """Returns a time of S3, in one of its forms."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            moment = parse(text)
        except ValueError:
            continue
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return None


def status_of(error: BaseException | None) -> int | None:
    """Returns the HTTP status of an error of obstore; None where there was no answer."""
    match = _STATUS.search(str(error).partition("\n")[0])
    return int(match[1]) if match else None


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
    if cause is None or not (isinstance(cause, (GenericError, AnswerError)) or asks_again(cause)):
        return FetchFailure(throttled=False, temporary=False)
    if (status := status_of(cause)) is not None:
        return FetchFailure(status in _THROTTLED, status in (408, 429) or status >= 500 or asks_again(cause))
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
    # this is a 404 too: taken for a missing object it would pass for an empty run
    if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
        hint = "Make the bucket, or look at its name and the endpoint"
        return StoreError(url, expected=f"a bucket to {what} in", found="no such bucket", hint=hint)
    advice = _advice(error)
    # a 404 whose code has advice, as NoSuchUpload, tells of no missing object
    if isinstance(error, FileNotFoundError) and not advice:
        return FileNotFoundError(url)
    refused = isinstance(error, (PermissionDeniedError, UnauthenticatedError))
    if advice:
        hint = advice
    # the text has the key in it, which may contain such a word itself
    elif _NO_CREDENTIALS.search(text.replace(key, "")):
        hint = f"No credentials are found, or not taken. {_CREDENTIAL_HINTS.get(kind, '')}"
    elif refused or code_of(error) == "AccessDenied" or status_of(error) == 403:
        hint = f"The credentials do not allow to {what} here: look at the policies of the user and of the bucket"
    elif _OTHER_BYTES.search(text):
        hint = INTERMEDIARY
    elif "redirect" in text.lower() or status_of(error) == 301:
        hint = _REGION
    elif isinstance(error, InvalidPathError):
        hint = "Another program has put this object there; remove it"
    else:
        hint = "Look at the network and the endpoint, and try again"
    failed = StoreError(url, expected=f"to {what} it", found=text, hint=hint)
    failed.refused_once = asks_again(error)
    return failed
