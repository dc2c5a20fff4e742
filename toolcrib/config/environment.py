"""Typed access to environment variables. Errors name the variable.

Secrets can be read from a file: `NAME_FILE` is used if `NAME` is not set.
"""

import os
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured


def text(name: str, default: str = "") -> str:
    return os.environ.get(name, default).strip()


def set_variables() -> frozenset[str]:
    """Return the names of the TOOLCRIB_ variables that are set, never their values."""
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
            f"{name} must be an integer from {low} to {high}, not {value!r}."
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
        raise ImproperlyConfigured(f"{name}_FILE: cannot read {path}: {error.strerror}.") from error
