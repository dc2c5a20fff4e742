"""Read what events recorded as JSON: missing and malformed parts count as empty."""

import json
from collections.abc import Mapping


def describe_query(details: Mapping[str, object]) -> str:
    """Quote what a search asked for."""
    if name := details.get("name"):
        return f"for the name “{name}”"
    if pattern := details.get("pattern"):
        return f"by the pattern “{pattern}”"
    return f"“{details.get('query') or ''}”"


def read_names(details: Mapping[str, object], key: str) -> list[str]:
    """Read a list of texts that may be missing."""
    found = details.get(key)
    return [str(one) for one in found] if isinstance(found, list) else []


def read_count(details: Mapping[str, object], key: str) -> int:
    found = details.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def read_object(text: str) -> dict[str, object]:
    """Parse JSON that should be an object; anything else is an empty one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_value(text: str) -> object:
    """Parse JSON that may have been cut; cut text stays text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
