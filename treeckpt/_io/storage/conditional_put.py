"""Whether an S3-compatible store honours conditional writes, by which one of several saves to one path wins.

Older servers refuse the headers (`NotImplemented`), or take the write and ignore its condition, as do proxies that drop
the headers. A store that ignores them is found out by a write whose condition cannot hold. The answer is known to
the whole process: it costs one request for each bucket and condition.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ...errors import StoreError

Condition = Literal["If-None-Match", "If-Match"]
"""That the object is new, or has a certain version."""
_REFUSED = re.compile(r"NotImplemented|status code: 501")
_NO_VERSION = {"e_tag": '"00000000000000000000000000000000"'}
_HINT = (
    "Update the store, or the proxy before it. Or pass conditional=False to ObjectStore and ObjectRun "
    "(AWS_CONDITIONAL_PUT=disabled on the command line): then the last of two saves to one path at the same moment wins"
)
_answers: dict[tuple[str, str, Condition], str | None] = {}
"""By bucket, endpoint and condition: what is wrong, None if the condition is honoured."""


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
    if found := _answers.get(place):
        raise no_conditional_writes(bucket, condition, found)
    return place in _answers


def find_out(bucket: str, endpoint: str, condition: Condition, put: Callable[[Any], object]) -> None:
    """Writes an object that is there under a condition that does not hold.

    Args:
        put: writes it in the mode of obstore that it is given; raises FileExistsError if the condition does not hold.

    Raises:
        StoreError: the condition is refused or ignored, or the store cannot be reached.
    """
    found: str | None = "one that ignores them: it replaces an object that is there"
    try:
        put("create" if condition == "If-None-Match" else _NO_VERSION)
    except FileExistsError:
        found = None
    except StoreError as error:
        if not refuses_conditions(error):
            raise
        found = f"one that refuses them: {error.found}"
    _answers[bucket, endpoint, condition] = found
    is_known(bucket, endpoint, condition)
