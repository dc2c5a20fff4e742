"""Show what a tool answered as text that a page can print. Pure.

Data of images and sounds is never drawn, only named with its type and size: it is a stranger's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from toolcrib.lib.text import is_hidden


@dataclass(frozen=True)
class ContentPart:
    """One part of an answer: what it is, and its text where it has one."""

    label: str
    text: str = ""


def parts_of(content: object) -> list[ContentPart]:
    """Describe each item of a tool's content, in order."""
    items = content if isinstance(content, list) else [content]
    return [_part(item) for item in items]


def kept_parts(copy: str) -> list[ContentPart]:
    """Describe the copy of an answer that the ledger kept, which may have been cut."""
    try:
        kept = json.loads(copy)
    except (ValueError, RecursionError):
        return [ContentPart("answer, cut", copy)]
    if not isinstance(kept, dict):
        return parts_of(kept)
    if kept.get("cut") is True and isinstance(kept.get("start"), str):
        whole = kept.get("bytes")
        of = f" of {size(whole)}" if isinstance(whole, int) else ""
        return [
            ContentPart(
                f"answer, cut to the first {size(len(kept['start'].encode()))}{of}", kept["start"]
            )
        ]
    content = kept.get("content")
    shown = parts_of(content) if isinstance(content, list) else []
    rest = {key: value for key, value in kept.items() if key != "content" or not shown}
    structured = rest.pop("structured_content", None) or rest.pop("structuredContent", None)
    if structured is not None:
        shown.append(ContentPart("structured content", pretty_json(structured)))
    return shown or [ContentPart("answer", pretty_json(kept))]


def payload(text: str) -> ContentPart:
    """Describe arguments that the ledger kept."""
    try:
        kept = json.loads(text)
    except (ValueError, RecursionError):
        return ContentPart("Arguments, cut", text)
    if isinstance(kept, dict) and kept.get("cut") is True and isinstance(kept.get("start"), str):
        return ContentPart("Arguments, cut", kept["start"])
    return ContentPart("Arguments", pretty_json(kept))


def _part(item: object) -> ContentPart:
    if not isinstance(item, Mapping):
        return ContentPart("unknown part", pretty_json(item))
    kind = str(item.get("type") or "")
    if kind == "text":
        return ContentPart("text", str(item.get("text") or ""))
    if kind in ("image", "audio"):
        return ContentPart(f"{kind}, {_type(item)}, {_data_size(item.get('data'))}")
    if kind == "resource_link":
        name = item.get("title") or item.get("name") or "without a name"
        return ContentPart(f"link to a resource, {name}", str(item.get("uri") or ""))
    held = item.get("resource")
    if kind == "resource" and isinstance(held, Mapping):
        where = f"resource {held.get('uri') or 'without an address'}"
        if "blob" in held:
            return ContentPart(f"{where}, {_type(held)}, {_data_size(held['blob'])}")
        return ContentPart(where, str(held.get("text") or ""))
    return ContentPart(f"part of the type {kind or 'unknown'}", pretty_json(item))


def _type(item: Mapping[str, object]) -> str:
    return str(item.get("mimeType") or item.get("mime_type") or "of unknown type")


def _data_size(data: object) -> str:
    if not isinstance(data, str):
        return "of unknown size"
    return size(max(len(data) * 3 // 4 - data[-2:].count("="), 0))


def size(amount: int) -> str:
    """Write a number of bytes as 310 B, 12 KB or 3.4 MB."""
    if amount < 1024:
        return f"{amount} B"
    if amount < 1024 * 1024:
        return f"{amount / 1024:.0f} KB"
    return f"{amount / 1024 / 1024:.1f} MB"


def pretty_json(value: object) -> str:
    """Write JSON for people: indented, with characters that hide or reorder text escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return "".join(
        json.dumps(char)[1:-1] if char != "\n" and is_hidden(char) else char for char in text
    )
