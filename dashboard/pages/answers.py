"""Routers of the rooms: FastAPI validates the parameters, msgspec encodes the result as JSON, a template as HTML.

A result may hold a million numbers or thousands of rows. The dashboard builds it itself, so FastAPI does not validate
it again; its type is in the OpenAPI schema all the same.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import HTMLResponse, Response

from ..store.index_reader import ReadProgress
from ..store.library import Library, NotFound
from .csv_table import csv_text
from .field_docs import describe_fields
from .render import render

API = "/api/v1"
TABLE = "table.csv"
"""What follows the address of a result in the address of its table."""
CSV = "text/csv"
MAX_FILE_NAME = 150
"""Characters of the name of a file to be saved."""

Answer = Callable[[Request, Any], Response]
"""Makes the response of a result."""
F = TypeVar("F", bound=Callable[..., Any])
Start = Annotated[int, Query(ge=0, le=1 << 53, description="number of the first row")]
Words = Annotated[str, Query(max_length=500, description="words that a path must contain")]


def library_of(request: Request) -> Library:
    """Returns the runs of the application that serves a request."""
    return request.app.state.library


def check_same_site(request: Request, action: str) -> None:
    """Checks that no page of another site starts or cancels work.

    Browsers say in `Sec-Fetch-Site` whose page sends a request; older ones only its `Origin` or `Referer`.

    Raises:
        NotFound: the request is from such a page.
    """
    if not action:
        return
    site, host = request.headers.get("sec-fetch-site"), request.headers.get("host")
    sender = request.headers.get("origin") or request.headers.get("referer")
    same = site in ("none", "same-origin") if site else sender is None or sender.split("/")[2:3] == [host]
    if not same:
        raise NotFound("A page of another site may not start or cancel this.")


def is_api(path: str) -> bool:
    """Whether errors at this path of a request are JSON."""
    return path.startswith("/api/")


class ErrorResponse(msgspec.Struct, frozen=True):
    """Why a request has no result."""

    error: str


class Loading(msgspec.Struct, frozen=True):
    """A large index is still being read; the client requests again later."""

    loading: ReadProgress


_OTHER_RESPONSES: dict[str, tuple[type, str]] = {
    "202": (Loading, "the index is still being read; request again later"),
    "404": (ErrorResponse, "it does not exist, or it cannot be read"),
    "422": (ErrorResponse, "a parameter is not valid"),
}


def file_response(data: bytes, name: str, media_type: str = "application/octet-stream") -> Response:
    """Returns a file to be saved and not shown; characters that a file name had better not have become `_`."""
    plain = re.sub(r"[^A-Za-z0-9._=@+-]+", "_", name)[-MAX_FILE_NAME:].lstrip(".-") or "file"
    return Response(data, media_type=media_type, headers={"Content-Disposition": f'attachment; filename="{plain}"'})


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Encodes data as a JSON response."""
    return Response(msgspec.json.encode(data), status, headers, "application/json")


class PageRouter:
    """The addresses of a room: what a function returns is JSON under /api/v1, and a page if it has a template.

    A function may set `request.state.etag`, the ETag of its answer. `request.state.links` has the addresses of the
    JSON, and of the CSV where there is a table, of what it answers; they are relative to the dashboard's root.
    """

    def __init__(self) -> None:
        self.api = APIRouter(prefix=API)
        self.pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
        self.result_types: dict[str, Any] = {}
        """The type of the result of each address of the API that answers with JSON."""
        self.media_types: dict[str, str] = {}
        """The media type of each other address of the API."""
        self.links: dict[str, dict[str, str]] = {}
        """The addresses of the JSON and of the CSV of each registered path."""

    def get(
        self,
        path: str,
        template: str = "",
        *,
        page: str = "",
        result_type: Any = None,
        table: str = "",
        media_type: str = "",
    ) -> Callable[[F], F]:
        """Registers the decorated function for a path; its argument `request` is required.

        Args:
            template: of the page; without one there is only JSON.
            page: the path of the page, if it is another one.
            result_type: None takes the function's return annotation.
            table: the fields that lead to the rows of the result, which are then also CSV: see `csv_text`.
            media_type: of the responses that the function returns, if they are no JSON.
        """

        def register(function: F) -> F:
            if media_type:
                self.media_types[API + path] = media_type
            else:
                annotation = inspect.signature(function, eval_str=True).return_annotation
                self.result_types[API + path] = result_type or annotation
            links = self.links[path] = {"json": API + path} | ({"csv": f"{API}{path}/{TABLE}"} if table else {})

            def add(router: APIRouter, path: str, answer: Answer, text: str, table: str = "") -> None:
                respond = _responder(function, links, answer, table)
                options: Any = {"methods": ["GET"], "response_model": None, "response_class": Response}
                router.add_api_route(path, respond, description=text, **options)

            text = inspect.getdoc(function) or ""
            add(self.api, path, lambda _, result: json_response(result), text)
            if template:
                add(self.pages, page or path, lambda request, result: render(request, template, result), text)
            if table:
                self.media_types[links["csv"]] = CSV
                text = f"The rows of {path} as CSV, from the first that is asked for to the last of all."
                name = f"{next(part for part in reversed(path.split('/')) if '{' not in part)}.csv"
                add(self.api, f"{path}/{TABLE}", lambda _, text: file_response(text.encode(), name, CSV), text, table)
            return function

        return register


def _responder(
    function: Callable[..., Any], links: Mapping[str, str], answer: Answer, table: str
) -> Callable[..., Response]:
    """Returns the endpoint that answers with the result of a function; with a `table`, with those rows of it as CSV."""

    @functools.wraps(function)
    def respond(request: Request, **parameters: Any) -> Response:
        ids = {name: quote(str(value), safe="") for name, value in request.path_params.items()}
        request.state.links = {kind: link.format(**ids) for kind, link in links.items()}
        build = functools.partial(function, request=request, **parameters)
        result = csv_text(build, table) if table else build()
        response = result if isinstance(result, Response) else answer(request, result)
        if etag := getattr(request.state, "etag", None):
            response.headers["ETag"] = etag
        return response

    signature = inspect.signature(function, eval_str=True).replace(return_annotation=Response)
    respond.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return respond


def describe_responses(app: FastAPI, routers: Sequence[PageRouter]) -> None:
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
            describe_fields(components, [*others, *types.values()])
            problems = {
                status: _response_schema(text, one)
                for (status, (_, text)), one in zip(_OTHER_RESPONSES.items(), found, strict=False)
            }
            for path, one in zip(types, found[len(others) :], strict=True):
                schema["paths"][path]["get"]["responses"] = {"200": _response_schema("the result", one), **problems}
            for path, media_type in ((p, m) for router in routers for p, m in router.media_types.items()):
                file = _response_schema("the file", {"type": "string", "format": "binary"}, media_type)
                schema["paths"][path]["get"]["responses"] = {"200": file, **problems}
            schema["components"] = {"schemas": components}
        return app.openapi_schema or {}

    app.openapi = openapi


def _response_schema(text: str, schema: dict[str, Any], media_type: str = "application/json") -> dict[str, Any]:
    return {"description": text, "content": {media_type: {"schema": schema}}}
