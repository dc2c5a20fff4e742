"""Validation and redaction of tool results. Pure.

A result is passed on unchanged or not at all; only the server's own credentials are replaced.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from servers.credential_filter import CredentialFilter
from toolcrib.lib.json_codec import canonical


@dataclass(frozen=True)
class ToolResult:
    """A valid result."""

    content: list[Any]
    structured: Any
    has_structured: bool
    is_error: bool
    serialized: tuple[str, str]  # content and structured, as canonical JSON
    size: int  # bytes of both


class InvalidResult(ValueError):
    """Why a result cannot be passed on, as a verb phrase."""


class InputRequired(InvalidResult):
    """The server asks for input instead of returning a result."""


def parse_result(
    response: Mapping[str, Any], *, max_items: int, credentials: CredentialFilter
) -> ToolResult:
    """Return the result in a response to tools/call, or raise InvalidResult."""
    kind = response.get("resultType", "complete")
    if kind == "input_required":
        raise InputRequired("asks for input, which Toolcrib does not support yet")
    if kind != "complete":
        raise InvalidResult("has an unknown resultType")
    content = response.get("content")
    if not isinstance(content, list):
        raise InvalidResult("has no content list")
    if len(content) > max_items:
        raise InvalidResult(f"has {len(content):,} content items; the maximum is {max_items:,}")
    if not all(isinstance(item, dict) for item in content):
        raise InvalidResult("has a content item that is not an object")
    is_error = response.get("isError", False)
    if not isinstance(is_error, bool):
        raise InvalidResult("has an isError that is not a boolean")
    structured = response.get("structuredContent")
    content_text, content_size = serialize(content)
    text, size = serialize(structured)
    if credentials.occurs_in(content_text):
        content = credentials.redact(content)
        content_text, content_size = serialize(content)
    if credentials.occurs_in(text):
        structured = credentials.redact(structured)
        text, size = serialize(structured)
    return ToolResult(
        content=content,
        structured=structured,
        has_structured="structuredContent" in response,
        is_error=is_error,
        serialized=(content_text, text),
        size=content_size + size,
    )


def serialize(value: object) -> tuple[str, int]:
    """Return a value as canonical JSON and its size in bytes, or raise InvalidResult."""
    try:
        text = canonical(value)
        return text, len(text.encode())
    except UnicodeEncodeError:
        raise InvalidResult("contains a lone surrogate (half a character)") from None
    except RecursionError:
        raise InvalidResult("is nested too deeply") from None
    except (ValueError, TypeError):
        raise InvalidResult("contains a number that JSON cannot represent") from None
