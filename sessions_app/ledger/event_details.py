"""Parse the JSON details of events; missing and malformed values count as empty."""

import json
from collections.abc import Mapping


def describe_query(details: Mapping[str, object]) -> str:
    """Return the query of a search, quoted for display."""
    if name := details.get("name"):
        return f"by name “{name}”"
    if pattern := details.get("pattern"):
        return f"by pattern “{pattern}”"
    return f"“{details.get('query') or ''}”"


def read_names(details: Mapping[str, object], key: str) -> list[str]:
    """Return a list of strings; empty if it is missing."""
    value = details.get(key)
    return [str(name) for name in value] if isinstance(value, list) else []


def read_count(details: Mapping[str, object], key: str) -> int:
    value = details.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def read_object(text: str) -> dict[str, object]:
    """Parse a JSON object; return an empty one for anything else."""
    value = read_value(text)
    return value if isinstance(value, dict) else {}


def read_value(text: str) -> object:
    """Parse JSON that may have been truncated; return truncated JSON as text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
