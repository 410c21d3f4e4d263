"""The page of the API: every address with its parameters and its result, as the OpenAPI document has them."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request

from ..pages.answers import PageRouter

router = PageRouter()
UNLIMITED = 1 << 53
"""Numbers from here on are no limits that a person wants to know."""
_IDS = {
    "run_id": "id of a run, as /api/v1/runs has it",
    "checkpoint_id": "id of a checkpoint, as a run's list has it",
    "number": "number of the leaf, shard or file",
}
_LIMITS = {"minimum": "from", "maximum": "to", "maxLength": "of length up to"}


class Parameter(msgspec.Struct, frozen=True):
    """A parameter of an address."""

    name: str
    place: str
    """Where it stands: path or query."""
    type: str
    required: bool
    default: str | None
    """The default as JSON; None if it has none."""
    text: str


class Endpoint(msgspec.Struct, frozen=True):
    """An address of the API."""

    path: str
    text: str
    parameters: list[Parameter]
    result: str
    """The name of the schema of its JSON, or its media type."""


class ApiPage(msgspec.Struct, frozen=True):
    """The addresses of the API."""

    endpoints: list[Endpoint]


def get_api(request: Request) -> ApiPage:
    """All addresses of the API."""
    paths: dict[str, Any] = request.app.openapi()["paths"]
    return ApiPage([_endpoint(path, methods["get"]) for path, methods in sorted(paths.items())])


router.get("/api", get_api, "api.html")


def _endpoint(path: str, about: dict[str, Any]) -> Endpoint:
    [(media_type, content)] = about["responses"]["200"]["content"].items()
    result = type_text(content["schema"]) if media_type == "application/json" else media_type
    parameters = [_parameter(one) for one in about.get("parameters", [])]
    return Endpoint(path, about.get("description", ""), parameters, result)


def _parameter(about: dict[str, Any]) -> Parameter:
    schema = about["schema"]
    default = msgspec.json.encode(schema["default"]).decode() if "default" in schema else None
    text = about.get("description") or _IDS.get(about["name"], "")
    return Parameter(about["name"], about["in"], type_text(schema), about.get("required", False), default, text)


def type_text(schema: dict[str, Any]) -> str:
    """Describes a JSON schema in one line: `integer from 0 to 64`, `"npy" or "safetensors"`, `array of integer`."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "enum" in schema:
        return " or ".join(msgspec.json.encode(one).decode() for one in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(type_text(one) for one in schema["anyOf"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"array of {type_text(schema.get('items', {}))}"
    limits = [f"{word} {schema[key]:,}" for key, word in _LIMITS.items() if schema.get(key, UNLIMITED) < UNLIMITED]
    return " ".join([kind, *limits])
