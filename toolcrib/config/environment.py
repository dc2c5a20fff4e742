"""Typed access to environment variables. Errors name the variable.

Secrets can be read from a file: `NAME_FILE` is used if `NAME` is not set.
"""

import ipaddress
import os
import pwd
import sys
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


def path(name: str) -> Path | None:
    value = text(name)
    return Path(value).expanduser().resolve() if value else None


def user_data_dir() -> Path:
    """Return the folder for data of an installed Toolcrib, as the platform's programs use it."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "Toolcrib"
    return (path("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "toolcrib"


def words(name: str, default: str = "") -> list[str]:
    return [word.strip() for word in text(name, default).split(",") if word.strip()]


def user(name: str) -> str:
    """Return the name of a user of this machine; empty if the variable is not set."""
    value = text(name)
    if value:
        try:
            pwd.getpwnam(value)
        except KeyError as error:
            raise ImproperlyConfigured(f"{name}: there is no user {value!r}.") from error
    return value


def secret_files() -> list[Path]:
    """Return the files that secrets were read from."""
    return [
        Path(path).expanduser().resolve()
        for name, path in os.environ.items()
        if name.endswith("_FILE") and path and name.startswith(("TOOLCRIB_", "DATABASE_", "REDIS_"))
    ]


def networks(name: str) -> list[str]:
    """Return a list of addresses and networks (CIDR)."""
    for word in words(name):
        try:
            ipaddress.ip_network(word, strict=False)
        except ValueError:
            raise ImproperlyConfigured(
                f"{name} must list addresses or networks such as 10.0.0.0/8, not {word!r}."
            ) from None
    return words(name)


def secret(name: str) -> str:
    value = text(name)
    path = text(f"{name}_FILE")
    if value or not path:
        return value
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ImproperlyConfigured(f"{name}_FILE: cannot read {path}: {error.strerror}.") from error
