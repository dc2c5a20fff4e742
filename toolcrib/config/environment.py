"""Read settings from environment variables; a bad value names its variable.

Secrets may come from a file: `NAME_FILE` is read when `NAME` is not set.
"""

import os
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured


def text(name: str, default: str = "") -> str:
    return os.environ.get(name, default).strip()


def given() -> frozenset[str]:
    """Name the variables of ours that are set, never their values."""
    return frozenset(name for name in os.environ if name.startswith("TOOLCRIB_") and text(name))


def flag(name: str, default: bool = False) -> bool:
    value = text(name)
    if not value:
        return default
    if value.lower() in {"1", "true", "yes", "on"}:
        return True
    if value.lower() in {"0", "false", "no", "off"}:
        return False
    raise ImproperlyConfigured(f"{name} must be 1 or 0, not {value!r}.")


def number(name: str, default: int, *, low: int = 0, high: int = 2**31) -> int:
    value = text(name)
    if not value:
        return default
    if not value.isdecimal() or not low <= int(value) <= high:
        raise ImproperlyConfigured(
            f"{name} must be a whole number from {low} to {high}, not {value!r}."
        )
    return int(value)


def words(name: str, default: str = "") -> list[str]:
    return [word.strip() for word in text(name, default).split(",") if word.strip()]


def secret(name: str) -> str:
    value = text(name)
    path = text(f"{name}_FILE")
    if value or not path:
        return value
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ImproperlyConfigured(
            f"{name}_FILE names {path}, which cannot be read: {error.strerror}."
        ) from error
