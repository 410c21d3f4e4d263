"""Routers of the rooms: FastAPI validates the parameters, msgspec encodes the result as JSON, a template as HTML.

A result may hold a million numbers or thousands of rows. The dashboard builds it itself, so FastAPI does not validate
it again; its type is in the OpenAPI schema all the same, with the docstrings of its fields. The rows of a page are also
CSV: all of them, with numbers as they are and not as a page shows them.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import inspect
import io
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Annotated, Any, get_args, get_type_hints
from urllib.parse import quote

import msgspec
from fastapi import FastAPI, Query, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from treeckpt._inspect.outline import Outline

from ..store.index_reader import ReadProgress
from ..store.library import Library, NotFound
from .checkpoints import OpenTree, OwnTree, open_checkpoint, open_tree
from .damage import Damage
from .render import render

MAX_ROWS = 100_000
"""Rows of one table."""
MAX_SECONDS = 40.0
"""Seconds in which all pages of a table are built; a request is given up after `security.TIMEOUT`."""
API = "/api/v1"
TABLE = "table.csv"
"""What follows the address of a result in the address of its table."""
CSV = "text/csv"
MAX_FILE_NAME = 150
"""Characters of the name of a file to be saved."""
Answer = Callable[[Request, Any], Response]
"""Makes the response of a result."""
PLAIN = (bool, float, int, str)
"""The classes of parameters of requests."""
LIMITS = {
    "start": Query(ge=0, le=1 << 53, description="number of the first row"),
    "q": Query(max_length=500, description="words that a path must contain"),
}
"""The limits of those parameters of requests that are the same in all rooms."""


class TableTooLong(Exception):
    """A table has more rows than one file holds, or building it takes too long."""

    def __init__(self, rows: int) -> None:
        super().__init__(f"This table has more than {rows:,} rows, too many for one file. Filter it, or page the JSON.")


def csv_text(build: partial[Any], where: str) -> str:
    """A table as CSV: from the first row that is asked for to the last one of all.

    Fields that hold a mapping become a column for each key; lists become JSON. A text that a spreadsheet would take as
    a formula gets an apostrophe before it. A page with its numbers in columns has all of them at once.

    Args:
        build: builds the page; it takes the first row as `start`, which a `cursor` overrides.
        where: the names of the fields that lead to the list of rows, or to one of the columns; `next` beside a list
            of rows is the first row of the next page.

    Raises:
        TableTooLong: more than MAX_ROWS rows, or more than MAX_SECONDS seconds.
    """
    *outer, name = where.split(".")
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + MAX_SECONDS
    while True:
        holder: Any = build()
        for step in outer:
            holder = getattr(holder, step)
        values = getattr(holder, name, ())
        if values and not isinstance(values[0], msgspec.Struct):
            return _encode(_rows_of_columns(holder, len(values)))
        rows += [_flat(row) for row in values]
        if (start := getattr(holder, "next", None)) is None:
            return _encode(rows)
        if len(rows) >= MAX_ROWS or time.monotonic() > end:
            raise TableTooLong(len(rows))
        build = partial(build, start=start, **({"cursor": ""} if "cursor" in build.keywords else {}))


def _rows_of_columns(page: msgspec.Struct, count: int) -> list[dict[str, Any]]:
    """Returns the rows of a page whose fields are columns of this length, among others."""
    columns = {
        name: values
        for name, values in _flat(page).items()
        if isinstance(values, list) and len(values) == count and not isinstance(values[0], msgspec.Struct)
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _flat(row: msgspec.Struct) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name in row.__struct_fields__:
        value = getattr(row, name)
        if isinstance(value, Mapping):
            cells |= {f"{name}.{key}": one for key, one in value.items()}
        else:
            cells[name] = value
    return cells


def _encode(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([_cell(name) for name in columns])
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    if not isinstance(value, str):
        return msgspec.json.encode(value).decode()
    # The name of a file may have lone surrogates, which UTF-8 does not have.
    value = value.encode("utf-8", "backslashreplace").decode()
    return f"'{value}" if value[:1] in ("=", "+", "-", "@", "\t", "\r") and not value[1:].isdecimal() else value


def describe_fields(components: dict[str, Any], types: Iterable[Any]) -> None:
    """Adds the docstrings of fields to the schemas of structs; without the source there are none.

    Args:
        components: the schemas by the name of their struct, as msgspec makes them.
        types: those that the schemas were made of.
    """
    structs: dict[str, type[msgspec.Struct]] = {}
    for kind in types:
        _collect(kind, structs)
    modules = {base.__module__ for struct in structs.values() for base in struct.__mro__}
    docs = {module: _field_docs(module) for module in modules}
    for name, struct in structs.items():
        properties = components.get(name, {}).get("properties", {})
        for base in reversed(struct.__mro__):
            for field, text in docs[base.__module__].get(base.__name__, {}).items():
                if field in properties:
                    properties[field]["description"] = text


def _collect(kind: Any, structs: dict[str, type[msgspec.Struct]]) -> None:
    """Adds the structs that a type is made of, by name."""
    for part in get_args(kind):
        _collect(part, structs)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__name__ not in structs:
        structs[kind.__name__] = kind
        for part in get_type_hints(kind).values():
            _collect(part, structs)


def _field_docs(module: str) -> dict[str, dict[str, str]]:
    """Returns the docstrings of fields in a module of the package, by class and field."""
    if not module.startswith("treeckpt"):
        return {}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}
    docs: dict[str, dict[str, str]] = {}
    for struct in tree.body:
        if isinstance(struct, ast.ClassDef):
            docs[struct.name] = {
                field.target.id: inspect.cleandoc(text.value.value)
                for field, text in pairwise(struct.body)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if isinstance(text.value.value, str)
            }
    return docs


def library_of(request: Request) -> Library:
    """Returns the runs of the application that serves a request."""
    return request.app.state.services[Library]


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


class NotModified(Exception):
    """The client has the current version of a page."""

    def __init__(self, tag: str) -> None:
        self.tag = tag


def is_polled(request: Request) -> bool:
    """Whether a client has a version of the answer, and waits for what is new; a page that is opened has none."""
    return "if-none-match" in request.headers


def check_version(request: Request, version: str) -> None:
    """Sets the ETag of an answer of this version of the data.

    Raises:
        NotModified: the client has it.
    """
    text = f"{request.app.state.boot} {version} {request.scope['path']} {request.scope['query_string']!r}"
    tag = f'W/"{hashlib.blake2s(text.encode(), digest_size=8).hexdigest()}"'
    if tag in request.headers.get("if-none-match", ""):
        raise NotModified(tag)
    request.state.etag = tag


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
    # A dot at the beginning would hide the file; a command takes a name with a dash there for an option.
    plain = re.sub(r"[^A-Za-z0-9._=@+-]+", "_", name)[-MAX_FILE_NAME:].lstrip(".-") or "file"
    return Response(data, media_type=media_type, headers={"Content-Disposition": f'attachment; filename="{plain}"'})


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Encodes data as a JSON response."""
    return Response(msgspec.json.encode(data), status, headers, "application/json")


class LateEndpoint:
    """A route of FastAPI that is made with the first request to its address, or for the schema.

    FastAPI takes 0.2 s to read the parameters of all addresses, of which the first page needs one.
    """

    def __init__(self, make: Callable[[], APIRoute]) -> None:
        self._make = make

    @cached_property
    def route(self) -> APIRoute:
        """The route itself."""
        return self._make()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        scope["route"] = self.route
        await self.route.handle(scope, receive, send)


class PageRouter:
    """The addresses of a room: what a function returns is JSON under /api/v1, and a page if it has a template.

    A function says by its arguments what it needs. The type of an argument that is a class stands for what the
    application has of that class (`app.state.services`), for the request, or for the checkpoint of the address:
    `OpenTree`, its `Outline` and its `Damage`, or `OwnTree` where another program's checkpoint has no such page.
    Arguments of other types are parameters of requests, but for those by keyword alone.

    A function may set `request.state.etag`, the ETag of its answer. `request.state.links` has the addresses of the
    JSON, and of the CSV where there is a table, of what it answers; they are relative to the dashboard's root.

    Args:
        limits: of the parameters of requests, by name.
    """

    def __init__(self, **limits: Any) -> None:
        self.api: list[Route] = []
        self.pages: list[Route] = []
        self.result_types: dict[str, Any] = {}
        """The type of the result of each address of the API that answers with JSON."""
        self.media_types: dict[str, str] = {}
        """The media type of each other address of the API."""
        self.links: dict[str, dict[str, str]] = {}
        """The addresses of the JSON and of the CSV of each registered path."""
        self._limits = LIMITS | limits

    def get(
        self,
        path: str,
        function: Callable[..., Any],
        template: str = "",
        *,
        page: str = "",
        result_type: Any = None,
        table: str = "",
        media_type: str = "",
        **limits: Any,
    ) -> None:
        """Registers a function for a path. The first paragraph of its docstring is the text of the address.

        Args:
            template: of the page; without one there is only JSON.
            page: the path of the page, if it is another one.
            result_type: None takes the function's return annotation.
            table: the fields that lead to the rows of the result, which are then also CSV: see `csv_text`.
            media_type: of the responses that the function returns, if they are no JSON.
            limits: of parameters of requests that are others here than in the other addresses of the room.
        """
        if media_type:
            self.media_types[API + path] = media_type
        else:
            annotation = inspect.signature(function, eval_str=True).return_annotation
            self.result_types[API + path] = result_type or annotation
        links = self.links[path] = {"json": API + path} | ({"csv": f"{API}{path}/{TABLE}"} if table else {})
        add = partial(self._add, function, links, **limits)
        add(self.api, API + path, lambda _, result: json_response(result))
        if template:
            add(self.pages, page or path, lambda request, result: render(request, template, result))
        if table:
            self.media_types[links["csv"]] = CSV
            name = f"{next(part for part in reversed(path.split('/')) if '{' not in part)}.csv"
            text = f"The rows of {path} as CSV, from the first that is asked for to the last of all."
            take = partial(file_response, name=name, media_type=CSV)
            add(self.api, links["csv"], lambda _, rows: take(rows.encode()), table=table, text=text)

    def show(self, path: str, function: Callable[..., Response]) -> None:
        """Registers a function that returns the response of a page, of which there is no JSON at this path."""
        self._add(function, {}, self.pages, path, lambda _, result: result)

    def _add(
        self,
        function: Callable[..., Any],
        links: Mapping[str, str],
        routes: list[Route],
        path: str,
        answer: Answer,
        **options: Any,
    ) -> None:
        routes.append(Route(path, LateEndpoint(partial(self._route, function, links, path, answer, **options))))

    def _route(
        self,
        function: Callable[..., Any],
        links: Mapping[str, str],
        path: str,
        answer: Answer,
        *,
        table: str = "",
        text: str = "",
        **limits: Any,
    ) -> APIRoute:
        """Returns a route that answers with the result of a function; with a `table`, with those rows of it as CSV."""
        needs = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind != p.KEYWORD_ONLY]
        given = {p.name: p.annotation for p in needs if isinstance(p.annotation, type) and p.annotation not in PLAIN}
        limits = self._limits | limits
        names = {p.name for p in needs}
        asked = [_keyword(name, str) for name in re.findall(r"{(\w+)}", path) if name not in names]
        asked += [p for p in needs if p.name not in given]

        def build(request: Request, **parameters: Any) -> Any:
            services = _services(request, given, parameters)
            return function(**services, **{name: value for name, value in parameters.items() if name in names})

        def respond(request: Request, **parameters: Any) -> Response:
            ids = {name: quote(str(value), safe="") for name, value in request.path_params.items()}
            request.state.links = {kind: link.format(**ids) for kind, link in links.items()}
            whole = partial(build, request=request, **parameters)
            result = csv_text(whole, table) if table else whole()
            response = result if isinstance(result, Response) else answer(request, result)
            if etag := getattr(request.state, "etag", None):
                response.headers["ETag"] = etag
            return response

        parameters = [_keyword("request", Request)]
        for p in asked:
            limited = Annotated[p.annotation, limits[p.name]] if p.name in limits else p.annotation
            parameters.append(_keyword(p.name, limited, p.default))
        # FastAPI takes the parameters of an address from the signature.
        respond.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        respond.__name__ = function.__name__
        text = text or (inspect.getdoc(function) or "").partition("\n\n")[0]
        return APIRoute(path, respond, methods=["GET"], description=text, response_model=None, response_class=Response)


def _keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _services(request: Request, given: Mapping[str, type], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what arguments of a class get, by name. The checkpoint of a request is opened once."""
    known: dict[type, Any] = {Request: request}
    kinds = set(given.values())
    if kinds & {OwnTree, OpenTree, Outline, Damage}:
        opener = open_checkpoint if OwnTree in kinds else open_tree
        tree = opener(library_of(request), parameters["checkpoint_id"])
        known |= {OwnTree: tree, OpenTree: tree, Outline: tree.outline}
        known |= {Damage: tree.damage} if Damage in kinds else {}
    return {name: known[kind] if kind in known else request.app.state.services[kind] for name, kind in given.items()}


def describe_responses(app: FastAPI, routers: Sequence[PageRouter]) -> None:
    """Adds all addresses and results to the application's OpenAPI schema, built on the first request for it."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            late = [route.endpoint for router in routers for route in router.api]
            routes = [one.route for one in late if isinstance(one, LateEndpoint)]
            schema = app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=routes)
            types = {path: kind for router in routers for path, kind in router.result_types.items()}
            others = [kind for kind, _ in _OTHER_RESPONSES.values()]
            schemas, components = msgspec.json.schema_components(
                [*others, *types.values()], ref_template="#/components/schemas/{name}"
            )
            describe_fields(components, [*others, *types.values()])
            problems = {
                status: _response_schema(text, one)
                for (status, (_, text)), one in zip(_OTHER_RESPONSES.items(), schemas, strict=False)
            }
            for path, one in zip(types, schemas[len(others) :], strict=True):
                schema["paths"][path]["get"]["responses"] = {"200": _response_schema("the result", one), **problems}
            for path, media_type in ((p, m) for router in routers for p, m in router.media_types.items()):
                file = _response_schema("the file", {"type": "string", "format": "binary"}, media_type)
                schema["paths"][path]["get"]["responses"] = {"200": file, **problems}
            schema["components"] = {"schemas": components}
        return app.openapi_schema or {}

    app.openapi = openapi


def _response_schema(text: str, schema: dict[str, Any], media_type: str = "application/json") -> dict[str, Any]:
    return {"description": text, "content": {media_type: {"schema": schema}}}
