"""The OpenAPI schema of the addresses under /api/v1, from the types of what they are asked and what they give."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import msgspec

from .routing import Address
from .run_pages import ReadingRow

__all__ = ["Loading", "Problem", "schema_of"]

_REFERENCE = "#/components/schemas/{name}"


class Problem(msgspec.Struct, frozen=True):
    """Why there is no answer."""

    error: str


class Loading(msgspec.Struct, frozen=True):
    """A large index is still being read: ask again."""

    loading: ReadingRow


_OTHERS = {
    "202": (Loading, "the index is still being read; ask again"),
    "404": (Problem, "no such thing, or it cannot be read"),
    "422": (Problem, "a question without sense"),
}


def schema_of(addresses: Sequence[Address], *, title: str, version: str) -> dict[str, Any]:
    """The schema as OpenAPI 3.1 has it."""
    fields = [
        [field for kind in address.questions.values() for field in msgspec.structs.fields(kind)]
        for address in addresses
    ]
    answers = [address.answer for address in addresses]
    asked = [field.type for group in fields for field in group]
    others = [kind for kind, _ in _OTHERS.values()]
    schemas, components = msgspec.json.schema_components([*answers, *others, *asked], ref_template=_REFERENCE)
    rest = iter(schemas[len(answers) + len(others) :])
    problems = {
        status: _response(text, schema)
        for (status, (_, text)), schema in zip(_OTHERS.items(), schemas[len(answers) :], strict=False)
    }
    paths: dict[str, Any] = {}
    for address, group, answer in zip(addresses, fields, schemas, strict=False):
        paths[address.path] = {
            "get": {
                "operationId": address.function.__name__,
                "summary": (inspect.getdoc(address.function) or "").partition("\n")[0],
                "parameters": [_parameter(field, next(rest), address) for field in group],
                "responses": {"200": _response("the answer", answer), **problems},
            }
        }
    info = {"title": title, "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _response(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _parameter(field: msgspec.structs.FieldInfo, schema: dict[str, Any], address: Address) -> dict[str, Any]:
    schema = {**schema} if field.required else {**schema, "default": field.default}
    text = schema.pop("description", None)
    found = {
        "name": field.encode_name,
        "in": "path" if field.name in address.in_path else "query",
        "required": field.required,
        "schema": schema,
    }
    return {**found, "description": text} if text else found
