"""Addresses that answer with JSON: FastAPI checks what they are asked, msgspec writes what they give.

An answer may be a million numbers or thousands of rows. It is made by the dashboard itself, so nothing checks it
again; its types go into the OpenAPI schema all the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.responses import Response

from .run_pages import ReadingRow

__all__ = ["Answers", "Loading", "Problem", "describe", "encoded"]

F = TypeVar("F", bound=Callable[..., Any])


class Problem(msgspec.Struct, frozen=True):
    """Why there is no answer."""

    error: str


class Loading(msgspec.Struct, frozen=True):
    """A large index is still being read: ask again."""

    loading: ReadingRow


_OTHERS: dict[str, tuple[type, str]] = {
    "202": (Loading, "the index is still being read; ask again"),
    "404": (Problem, "no such thing, or it cannot be read"),
    "422": (Problem, "a question without sense"),
}


def encoded(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Data as JSON."""
    return Response(msgspec.json.encode(data), status, headers, "application/json")


class Answers(APIRouter):
    """Addresses under /api/v1."""

    def __init__(self) -> None:
        super().__init__(prefix="/api/v1")
        self.kinds: dict[str, Any] = {}
        """The type of each address's answer."""

    def gives(self, path: str, kind: Any = None) -> Callable[[F], F]:
        """Has the function below answer a path.

        Args:
            kind: of what is given; None is what the function's annotation says.
        """

        def add(function: F) -> F:
            signature = inspect.signature(function, eval_str=True)

            @functools.wraps(function)
            def respond(*args: Any, **kwargs: Any) -> Response:
                given = function(*args, **kwargs)
                return given if isinstance(given, Response) else encoded(given)

            respond.__signature__ = signature.replace(return_annotation=Response)  # pyright: ignore[reportAttributeAccessIssue]
            self.add_api_route(path, respond, methods=["GET"], response_model=None, response_class=Response)
            self.kinds[self.prefix + path] = signature.return_annotation if kind is None else kind
            return function

        return add


def describe(app: FastAPI, routers: Sequence[Answers]) -> None:
    """Has an application's OpenAPI schema tell the types of answers, once somebody asks for it."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = make()
            kinds = {path: kind for router in routers for path, kind in router.kinds.items()}
            others = [kind for kind, _ in _OTHERS.values()]
            found, components = msgspec.json.schema_components(
                [*others, *kinds.values()], ref_template="#/components/schemas/{name}"
            )
            problems = {
                status: _response(text, one) for (status, (_, text)), one in zip(_OTHERS.items(), found, strict=False)
            }
            for path, one in zip(kinds, found[len(others) :], strict=True):
                schema["paths"][path]["get"]["responses"] = {"200": _response("the answer", one), **problems}
            schema["components"] = {"schemas": components}
        return app.openapi_schema or {}

    app.openapi = openapi


def _response(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}
