"""Schemas shared by every API router: error responses and strict request bodies."""

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar
from urllib.parse import quote

from django.http import HttpResponse
from ninja import Schema
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StrictFloat,
    StrictInt,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema

from toolcrib.lib.errors import InvalidRequest
from toolcrib.lib.openapi.error_codes import CODES
from toolcrib.lib.pagination import MAX_LIMIT


class ErrorDetail(Schema):
    """What went wrong. `code` is for programs, `message` and `hint` for people and models."""

    code: str
    message: str
    hint: str
    details: dict[str, Any] = Field(
        {}, description="Values of the error, such as problems or retry_after"
    )


def _error_body(status: int, codes: tuple[str, ...]) -> type[Schema]:
    code = Field(description="Stable code of the error", json_schema_extra={"enum": list(codes)})
    detail = create_model(
        f"ErrorDetail{status}", __base__=ErrorDetail, code=(Annotated[str, code], ...)
    )
    fields: dict[str, Any] = {"error": (detail, Field(description="The error"))}
    text = f"Error with the status {status}."
    return create_model(f"Error{status}", __base__=Schema, __doc__=text, **fields)


ERROR_BODIES = {status: _error_body(status, codes) for status, codes in CODES.items()}
# What an operation can answer. The document leaves out what its form excludes: 404 without an id in
# the path, 413 without a body, 400 without a body or a pattern.
ERRORS = {status: ERROR_BODIES[status] for status in (400, 401, 403, 404, 413, 422, 503)}
CONFLICTS = {409: ERROR_BODIES[409]}
Limit = Annotated[int, Field(ge=1, le=MAX_LIMIT)]
Cursor = Annotated[str, Field(max_length=500)]


def choices(values: Iterable[str], *, optional: bool = False) -> Any:
    """Return a field with these values, `optional` also empty, in the OpenAPI document.

    The action checks a request; its error names the values.
    """
    enum = [*([""] if optional else []), *map(str, values)]
    return Field(json_schema_extra={"enum": list[Any](enum)})


def bounds(minimum: float, maximum: float) -> Any:
    """Return a field with this range in the OpenAPI document. The action checks it."""
    return Field(json_schema_extra={"minimum": minimum, "maximum": maximum})


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


class Renamed(Strict):
    """A request body some of whose fields have two names; the other one is deprecated."""

    ALIASES: ClassVar[Mapping[str, str]] = {}  # other names that are accepted, and their fields
    NULL_IS_ABSENT: ClassVar[bool] = False

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = super().__get_pydantic_json_schema__(core, handler)
        properties = handler.resolve_ref_schema(schema).setdefault("properties", {})
        for alias, name in cls.ALIASES.items():
            properties[alias] = {**properties[name], "deprecated": True}
            properties[alias].pop("description", None)
        return schema

    @model_validator(mode="before")
    @classmethod
    def accept_aliases_and_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        known, aliases = cls.model_fields, cls.ALIASES
        sent: dict[str, Any] = {}
        keys: dict[str, str] = {}  # by field, as it was sent
        for key, value in body.items():
            name = aliases.get(key, key)
            if value is None and cls.NULL_IS_ABSENT and (key in known or key in aliases):
                continue
            if name in sent and sent[name] != value:
                raise ValueError(f"{keys[name]} and {key} differ; send one of them")
            sent[name], keys[name] = value, key
        return sent


class AgentBody(Renamed):
    """A request body that agents send: null means absent."""

    NULL_IS_ABSENT = True


def parse_digits(value: Any) -> Any:
    """Return a text of digits as the integer that it means."""
    is_digits = isinstance(value, str) and value.isdecimal() and value.isascii()
    return int(value) if is_digits and len(value) < 19 else value


Integer = Annotated[StrictInt, BeforeValidator(parse_digits)]
Number = Annotated[StrictInt | StrictFloat, BeforeValidator(parse_digits)]


def check_parameters(sent: Iterable[str], known: Collection[str]) -> None:
    """Raise InvalidRequest for query parameters that an operation does not have."""
    unknown = [name for name in sent if name not in known]
    if unknown:
        names = ", ".join(sorted(known)) or "none"
        raise InvalidRequest(
            {"loc": ("query", name[:80]), "msg": f"unknown parameter; known are: {names}"}
            for name in unknown
        )
