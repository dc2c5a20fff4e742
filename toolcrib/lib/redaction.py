"""Mask what stands under a secret's name, wherever values are kept or repeated. Pure."""

import re
from typing import Any

SECRET_NAME = re.compile(
    r"pass(word|wd|phrase)?$|secret|token$|api_?key|authorization|credential|private_?key|cookie",
    re.IGNORECASE,
)


def redact(value: Any) -> Any:
    """Copy a value with what stands under a secret's name masked."""
    if isinstance(value, dict):
        return {
            key: "***" if SECRET_NAME.search(key) and sub not in (None, "") else redact(sub)
            for key, sub in value.items()
        }
    if isinstance(value, list):
        return [redact(item) for item in value]
    return value
