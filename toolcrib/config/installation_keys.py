"""The data directory and its keys: created at the first start, or keys from the environment."""

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

GUESSABLE = ("change", "default", "example", "insecure", "placeholder", "secret")


class DataDirectoryInUse(ImproperlyConfigured):
    """Another process serves this data directory."""


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Explain what to do if the data directory cannot be written."""
    try:
        yield
    except OSError as error:
        raise ImproperlyConfigured(
            f"Cannot write to the data folder {path}: {error.strerror}. Make it writable for this "
            "user and free space on its disk, or set TOOLCRIB_DATA to another folder."
        ) from error


def make_private_dir(path: Path) -> None:
    """Create the data directory with mode 0700; keep the mode of an existing one."""
    if not path.exists():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_private_file(path: Path) -> None:
    """Create a file with mode 0600, for a library that would create it world-readable."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def lock_data_dir(path: Path) -> int:
    """Lock the data directory until this process ends; return the descriptor that holds the lock.

    Two servers on one directory would count limits, streams and concurrent calls each on their own.
    Raises DataDirectoryInUse.
    """
    with writing_to(path):
        descriptor = os.open(path / "serve.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            return descriptor  # a file system without locks
        pid = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise DataDirectoryInUse(
            f"Another Toolcrib (pid {pid or 'unknown'}) uses the data folder {path}. Stop it, or "
            "set TOOLCRIB_DATA to another folder."
        ) from None
    with writing_to(path):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def local_key(path: Path) -> str:
    """Return the key stored at `path`; generate it on the first start.

    Written to a temporary file and hard-linked into place, so that two processes starting at once
    agree on one key and neither reads a partial one.
    """
    if not path.exists():
        with writing_to(path.parent):
            _write_key(path)
    try:
        key = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ImproperlyConfigured(f"Cannot read {path}: {error.strerror}.") from error
    if len(key) < 32:
        raise ImproperlyConfigured(f"{path} contains no key. Restore it from your backup.")
    return key


def _write_key(path: Path) -> None:
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
