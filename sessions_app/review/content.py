"""Text rendering of tool results and arguments for pages. Pure.

Images and audio come from servers and are untrusted: they are described by type and size, never
displayed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from toolcrib.lib.text import is_hidden


@dataclass(frozen=True)
class ContentPart:
    """One content item: a label, and its text if it has any."""

    label: str
    text: str = ""


def describe_content(content: object) -> list[ContentPart]:
    """Describe each item of a tool's content, in order."""
    items = content if isinstance(content, list) else [content]
    return [_describe_item(item) for item in items]


def describe_stored_result(text: str) -> list[ContentPart]:
    """Describe a result stored in the ledger, which may be truncated."""
    try:
        result = json.loads(text)
    except (ValueError, RecursionError):
        return [ContentPart("result, truncated", text)]
    if not isinstance(result, dict):
        return describe_content(result)
    if _is_truncated(result):
        total = result.get("bytes")
        of_total = f" of {format_bytes(total)}" if isinstance(total, int) else ""
        start = result["start"]
        label = f"result, truncated to {format_bytes(len(start.encode()))}{of_total}"
        return [ContentPart(label, start)]
    content = result.get("content")
    parts = describe_content(content) if isinstance(content, list) else []
    rest = {key: value for key, value in result.items() if key != "content" or not parts}
    structured = rest.pop("structured_content", None) or rest.pop("structuredContent", None)
    if structured is not None:
        parts.append(ContentPart("structured content", pretty_json(structured)))
    return parts or [ContentPart("result", pretty_json(result))]


def describe_stored_arguments(text: str) -> ContentPart:
    """Describe arguments stored in the ledger, which may be truncated."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return ContentPart("Arguments, truncated", text)
    if isinstance(arguments, dict) and _is_truncated(arguments):
        return ContentPart("Arguments, truncated", arguments["start"])
    return ContentPart("Arguments", pretty_json(arguments))


def _is_truncated(stored: Mapping[str, object]) -> bool:
    return stored.get("cut") is True and isinstance(stored.get("start"), str)


def _describe_item(item: object) -> ContentPart:
    if not isinstance(item, Mapping):
        return ContentPart("unknown content", pretty_json(item))
    kind = str(item.get("type") or "")
    if kind == "text":
        return ContentPart("text", str(item.get("text") or ""))
    if kind in ("image", "audio"):
        return ContentPart(f"{kind}, {_mime_type(item)}, {_data_size(item.get('data'))}")
    if kind == "resource_link":
        name = item.get("title") or item.get("name") or "unnamed"
        return ContentPart(f"resource link, {name}", str(item.get("uri") or ""))
    resource = item.get("resource")
    if kind == "resource" and isinstance(resource, Mapping):
        label = f"resource {resource.get('uri') or 'without URI'}"
        if "blob" in resource:
            size = _data_size(resource["blob"])
            return ContentPart(f"{label}, {_mime_type(resource)}, {size}")
        return ContentPart(label, str(resource.get("text") or ""))
    return ContentPart(f"content of type {kind or 'unknown'}", pretty_json(item))


def _mime_type(item: Mapping[str, object]) -> str:
    return str(item.get("mimeType") or item.get("mime_type") or "unknown type")


def _data_size(data: object) -> str:
    if not isinstance(data, str):
        return "unknown size"
    return format_bytes(max(len(data) * 3 // 4 - data[-2:].count("="), 0))


def format_bytes(amount: int) -> str:
    """Format a number of bytes as 310 B, 12 KB or 3.4 MB."""
    if amount < 1024:
        return f"{amount} B"
    if amount < 1024 * 1024:
        return f"{amount / 1024:.0f} KB"
    return f"{amount / 1024 / 1024:.1f} MB"


def pretty_json(value: object) -> str:
    """Return indented JSON with characters that hide or reorder text escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return "".join(
        json.dumps(char)[1:-1] if char != "\n" and is_hidden(char) else char for char in text
    )
