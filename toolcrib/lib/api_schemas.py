"""Schemas shared by every API router: error responses and strict request bodies."""

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar
from urllib.parse import quote

from django.http import HttpResponse
from ninja import Schema
from pydantic import BaseModel, BeforeValidator, ConfigDict, StrictInt, model_validator

from toolcrib.lib.errors import InvalidRequest


class ErrorBody(Schema):
    error: dict[str, Any]


ERRORS = dict.fromkeys((400, 401, 403, 404, 409, 413, 422, 503), ErrorBody)


def set_location(response: HttpResponse, *path: object) -> None:
    """Set the URL of a created resource, from its path below /api/v1."""
    parts = "/".join(quote(str(part), safe=":") for part in path)
    response.headers["Location"] = f"/api/v1/{parts}"


class Strict(BaseModel):
    """A request body that rejects unknown keys."""

    model_config = ConfigDict(extra="forbid")


class NoFields(Strict):
    """The body of an action without fields; it may be absent."""


NO_FIELDS = NoFields()


class AgentBody(Strict):
    """A request body that agents send: null means absent, and some fields have two names."""

    ALIASES: ClassVar[Mapping[str, str]] = {}  # other names that are accepted, and their fields

    @model_validator(mode="before")
    @classmethod
    def accept_aliases_and_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        known, aliases = cls.model_fields, cls.ALIASES
        sent: dict[str, Any] = {}
        for key, value in body.items():
            name = aliases.get(key, key)
            if value is None and (key in known or key in aliases):
                continue
            if name in sent and sent[name] != value:
                raise ValueError(f"{' and '.join(sorted({key, name}))} differ; send one of them")
            sent[name] = value
        return sent


def parse_digits(value: Any) -> Any:
    """Return a text of digits as the integer that it means."""
    is_digits = isinstance(value, str) and value.isdecimal() and value.isascii()
    return int(value) if is_digits and len(value) < 19 else value


Integer = Annotated[StrictInt, BeforeValidator(parse_digits)]


def check_parameters(sent: Iterable[str], known: Collection[str]) -> None:
    """Raise InvalidRequest for query parameters that an operation does not have."""
    unknown = [name for name in sent if name not in known]
    if unknown:
        names = ", ".join(sorted(known)) or "none"
        raise InvalidRequest(
            {"loc": ("query", name[:80]), "msg": f"unknown parameter; known are: {names}"}
            for name in unknown
        )
