"""Redaction of values whose keys name a secret, before they are stored or returned."""

import re
from typing import Any

SECRET_NAME = re.compile(
    r"pass(word|wd|phrase)?$|secret|token$|api_?key|authorization|credential|private_?key|cookie",
    re.IGNORECASE,
)


def redact(value: Any) -> Any:
    """Return a copy of a value with everything under a secret-like key masked."""
    if isinstance(value, dict):
        return {
            key: "***" if SECRET_NAME.search(key) and sub not in (None, "") else redact(sub)
            for key, sub in value.items()
        }
    if isinstance(value, list):
        return [redact(item) for item in value]
    return value
