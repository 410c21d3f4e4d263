"""Query parameters that several pages take."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request

from ..store.library import Library

__all__ = ["Start", "Words", "library_of"]

Start = Annotated[int, Query(ge=0, le=1 << 53, description="number of the first row")]
Words = Annotated[str, Query(max_length=500, description="words that a path must contain")]


def library_of(request: Request) -> Library:
    """Returns the runs of the application that serves a request."""
    return request.app.state.library
