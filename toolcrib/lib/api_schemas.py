"""Schemas shared by every API router: error responses and strict request bodies."""

from typing import Any

from ninja import Schema
from pydantic import ConfigDict


class ErrorBody(Schema):
    error: dict[str, Any]


ERRORS = dict.fromkeys((400, 401, 403, 404, 409, 413, 422, 503), ErrorBody)


class Strict(Schema):
    """A request body that rejects unknown keys."""

    model_config = ConfigDict(extra="forbid")
