"""What a server answered to a call: whether it is a result at all, how large, and what to hide.

Pure. A result passes unchanged or not at all; only the server's own credentials are replaced.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from servers.credential_filter import CredentialFilter
from toolcrib.lib.json_codec import canonical


@dataclass(frozen=True)
class ToolResult:
    """A result that may be passed on."""

    content: list[Any]
    structured: Any
    has_structured: bool
    is_error: bool
    written: tuple[str, str]  # content and structure, as canonical JSON
    size: int  # bytes of these


class InvalidResult(ValueError):
    """Why an answer cannot be passed on, as the end of a sentence."""


class InputRequired(InvalidResult):
    """The server asks something back instead of answering."""


def parse_result(
    answer: Mapping[str, Any], *, max_items: int, credentials: CredentialFilter
) -> ToolResult:
    """Return the result in an answer to tools/call, or raise Unusable."""
    kind = answer.get("resultType", "complete")
    if kind == "input_required":
        raise InputRequired("asks for input, which Toolcrib does not pass on yet")
    if kind != "complete":
        raise InvalidResult("is of a kind that Toolcrib does not know")
    content = answer.get("content")
    if not isinstance(content, list):
        raise InvalidResult("has no list of content")
    if len(content) > max_items:
        raise InvalidResult(f"has {len(content):,} items of content, more than {max_items:,}")
    if not all(isinstance(item, dict) for item in content):
        raise InvalidResult("has an item of content that is not an object")
    is_error = answer.get("isError", False)
    if not isinstance(is_error, bool):
        raise InvalidResult("has an isError that is neither true nor false")
    structured = answer.get("structuredContent")
    (content_text, content_size), (text, size) = serialize(content), serialize(structured)
    if credentials.occurs_in(content_text):
        content = credentials.redact(content)
        content_text, content_size = serialize(content)
    if credentials.occurs_in(text):
        structured = credentials.redact(structured)
        text, size = serialize(structured)
    return ToolResult(
        content=content,
        structured=structured,
        has_structured="structuredContent" in answer,
        is_error=is_error,
        written=(content_text, text),
        size=content_size + size,
    )


def serialize(value: object) -> tuple[str, int]:
    """Return a value as canonical JSON, and its bytes; raise where it has no such form."""
    try:
        text = canonical(value)
        return text, len(text.encode())
    except UnicodeEncodeError:
        raise InvalidResult("holds half a character (a lone surrogate)") from None
    except RecursionError:
        raise InvalidResult("is nested too deep") from None
    except (ValueError, TypeError):
        raise InvalidResult("holds a number that JSON cannot carry") from None
