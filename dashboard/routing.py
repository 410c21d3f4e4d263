"""Typed addresses: which function answers which path, and what it may be asked.

A function's parameters are what a request may ask of it: those named in the path, and the query's. msgspec checks them
by their annotations and writes the answers. What a function may be asked is worked out when it is first asked, for a
dashboard starts in a fraction of a second; `schema` describes all of it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["Address", "Routes", "Senseless", "encoded"]

F = TypeVar("F", bound=Callable[..., Any])
_PLACE = re.compile(r" - at `\$\.?(.*)`$")


class Senseless(ValueError):
    """A question whose parts are not of their types, or out of their bounds."""


class Address:
    """One path and the function that answers it.

    Args:
        answer: what is given as JSON; None is what the function's annotation says.
    """

    def __init__(self, path: str, function: Callable[..., Any], answer: Any = None) -> None:
        self.path, self.function, self._answer = path, function, answer

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return get_type_hints(self.function, include_extras=True)

    @property
    def answer(self) -> Any:
        """The type of what is given."""
        return self._answer or self._hints["return"]

    @property
    def in_path(self) -> Sequence[str]:
        """Names of the parameters that are parts of the path."""
        return re.findall(r"{(\w+)}", self.path)

    @cached_property
    def questions(self) -> Mapping[str, type[msgspec.Struct]]:
        """What is asked, by parameter; under no name, the parameters that are questions by themselves."""
        whole: dict[str, type[msgspec.Struct]] = {}
        single: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        for name, parameter in inspect.signature(self.function).parameters.items():
            kind = self._hints[name]
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                whole[name] = kind
            elif kind is not Request:
                single.append((name, kind) if parameter.default is parameter.empty else (name, kind, parameter.default))
        return {"": msgspec.defstruct("Asked", single, kw_only=True), **whole}

    def respond(self, request: Request) -> Response:
        """Answers.

        Raises:
            Senseless: the question is none that it may be asked.
        """
        values = {**request.query_params, **request.path_params}
        asked = {name: _converted(values, kind) for name, kind in self.questions.items()}
        given = self.function(request, **msgspec.structs.asdict(asked.pop("")), **asked)
        return given if isinstance(given, Response) else encoded(given)


def _converted(values: Mapping[str, str], kind: type[msgspec.Struct]) -> msgspec.Struct:
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        place = _PLACE.search(text)
        raise Senseless(f"{place[1]}: {text[: place.start()]}" if place else text) from error


def encoded(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Data as JSON."""
    return Response(msgspec.json.encode(data), status, headers, "application/json")


class Routes:
    """Addresses below a prefix."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self.addresses: list[Address] = []

    def get(self, path: str, *, answer: Any = None) -> Callable[[F], F]:
        """Has the function below answer a path; see `Address`."""

        def add(function: F) -> F:
            self.addresses.append(Address(self._prefix + path, function, answer))
            return function

        return add

    @property
    def routes(self) -> list[Route]:
        """For the application."""
        return [Route(address.path, address.respond, methods=["GET"]) for address in self.addresses]
