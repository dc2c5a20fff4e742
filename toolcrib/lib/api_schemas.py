"""What every router's schemas share. A leaf."""

from typing import Any

from ninja import Schema
from pydantic import ConfigDict


class ErrorBody(Schema):
    error: dict[str, Any]


ERRORS = dict.fromkeys((400, 401, 403, 404, 409, 413, 422, 503), ErrorBody)


class Strict(Schema):
    """A body in which an unknown key is a mistake, not a wish."""

    model_config = ConfigDict(extra="forbid")
