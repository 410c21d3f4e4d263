"""JSON answers: FastAPI validates the parameters, msgspec encodes the result.

A result may hold a million numbers or thousands of rows. The dashboard builds it itself, so FastAPI does not validate
it again; its type is in the OpenAPI schema all the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.responses import Response

from .checkpoints import ReadingRow

__all__ = ["ErrorResponse", "JsonRouter", "Loading", "describe_responses", "json_response"]

F = TypeVar("F", bound=Callable[..., Any])


class ErrorResponse(msgspec.Struct, frozen=True):
    """Why a request has no result."""

    error: str


class Loading(msgspec.Struct, frozen=True):
    """A large index is still being read; the client requests again later."""

    loading: ReadingRow


_OTHER_RESPONSES: dict[str, tuple[type, str]] = {
    "202": (Loading, "the index is still being read; request again later"),
    "404": (ErrorResponse, "it does not exist, or it cannot be read"),
    "422": (ErrorResponse, "a parameter is not valid"),
}


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Encodes data as a JSON response."""
    return Response(msgspec.json.encode(data), status, headers, "application/json")


class JsonRouter(APIRouter):
    """A router of addresses under /api/v1 that answer with JSON."""

    def __init__(self) -> None:
        super().__init__(prefix="/api/v1")
        self.result_types: dict[str, Any] = {}
        """The type of each address's result, by path."""

    def json(self, path: str, result_type: Any = None) -> Callable[[F], F]:
        """Registers the decorated function for a path; what it returns is encoded, unless it is a response already.

        Args:
            result_type: None takes the function's return annotation.
        """

        def register(function: F) -> F:
            signature = inspect.signature(function, eval_str=True)

            @functools.wraps(function)
            def respond(*args: Any, **kwargs: Any) -> Response:
                result = function(*args, **kwargs)
                return result if isinstance(result, Response) else json_response(result)

            respond.__signature__ = signature.replace(return_annotation=Response)  # pyright: ignore[reportAttributeAccessIssue]
            self.add_api_route(path, respond, methods=["GET"], response_model=None, response_class=Response)
            self.result_types[self.prefix + path] = result_type or signature.return_annotation
            return function

        return register


def describe_responses(app: FastAPI, routers: Sequence[JsonRouter]) -> None:
    """Adds the types of all results to the application's OpenAPI schema, which is built on the first request for it."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = build()
            types = {path: kind for router in routers for path, kind in router.result_types.items()}
            others = [kind for kind, _ in _OTHER_RESPONSES.values()]
            found, components = msgspec.json.schema_components(
                [*others, *types.values()], ref_template="#/components/schemas/{name}"
            )
            problems = {
                status: _response_schema(text, one)
                for (status, (_, text)), one in zip(_OTHER_RESPONSES.items(), found, strict=False)
            }
            for path, one in zip(types, found[len(others) :], strict=True):
                schema["paths"][path]["get"]["responses"] = {"200": _response_schema("the result", one), **problems}
            schema["components"] = {"schemas": components}
        return app.openapi_schema or {}

    app.openapi = openapi


def _response_schema(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}
