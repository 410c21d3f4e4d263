"""The modules of treeckpt that a call passes on one rank, in the order of their first call."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import treeckpt

ROOT = os.path.dirname(treeckpt.__file__) + os.sep


def passed_modules(call: Callable[[], Any]) -> dict[str, set[str]]:
    """Returns the functions that ran in each module, such as `_io/comm/comm`, of all threads that the call starts."""
    passed: dict[str, set[str]] = {}

    def hook(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(ROOT):
            module = str(Path(path[len(ROOT) :]).with_suffix("")).removesuffix("/__init__")
            passed.setdefault(module, set()).add(frame.f_code.co_qualname)

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return passed
