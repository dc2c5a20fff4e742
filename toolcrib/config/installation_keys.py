"""Secret and encryption keys: generated in the data directory, or required from the environment."""

import os
import secrets
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

GUESSABLE = ("change", "default", "example", "insecure", "placeholder", "secret")


def make_private_dir(path: Path) -> None:
    """Create the data directory with mode 0700; keep the mode of an existing one."""
    if not path.exists():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_private_file(path: Path) -> None:
    """Create a file with mode 0600, for a library that would create it world-readable."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def local_key(path: Path) -> str:
    """Return the key stored at `path`; generate it on the first start.

    Written to a temporary file and hard-linked into place, so that two processes starting at once
    agree on one key and neither reads a partial one.
    """
    if not path.exists():
        draft = path.with_suffix(f".{os.getpid()}.new")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(48) + "\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    key = path.read_text(encoding="ascii").strip()
    if len(key) < 32:
        raise ImproperlyConfigured(f"{path} contains no key. Restore it from your backup.")
    return key


def split_keys(text: str) -> list[str]:
    """Split a comma-separated list of keys. The first one encrypts."""
    return [key.strip() for key in text.split(",")]


def require_key(name: str, value: str) -> str:
    """Return a key from the environment, or raise ImproperlyConfigured if it is weak."""
    hint = "Generate one with: python -c 'import secrets; print(secrets.token_urlsafe(48))'"
    if not value:
        raise ImproperlyConfigured(f"{name} (or {name}_FILE) is not set. {hint}")
    if len(value) < 32 or any(word in value.lower() for word in GUESSABLE):
        raise ImproperlyConfigured(f"{name} is too short or looks like a default. {hint}")
    return value
