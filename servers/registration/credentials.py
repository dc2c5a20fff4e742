"""Encryption of server credentials (Fernet). The key is stored outside the database."""

import hashlib
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from functools import lru_cache

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings

from servers.secret import Secret
from toolcrib.lib.errors import ToolcribError


class UnreadableCredential(ToolcribError):
    code = "credential_unreadable"
    status = 503


@lru_cache(maxsize=4)
def _fernet(keys: tuple[str, ...]) -> MultiFernet:
    # Any string can be a key: its SHA-256 digest has the 32 bytes that Fernet requires.
    return MultiFernet(
        [Fernet(urlsafe_b64encode(hashlib.sha256(key.encode()).digest())) for key in keys]
    )


def keys() -> tuple[str, ...]:
    return tuple(settings.ENCRYPTION_KEYS)


def encrypt(secret: Secret, with_keys: Sequence[str] = ()) -> str:
    """Encrypt with the first key, by default of this installation."""
    fernet = _fernet(tuple(with_keys) or keys())
    return fernet.encrypt(secret.reveal().encode()).decode("ascii")


def decrypt(ciphertext: str) -> Secret:
    try:
        return Secret(_fernet(keys()).decrypt(ciphertext.encode("ascii")).decode())
    except InvalidToken as error:
        raise UnreadableCredential(
            "A stored credential cannot be decrypted with this installation's key.",
            hint="Restore the encryption key from its backup, or enter the credentials again.",
        ) from error


def rotate(ciphertext: str) -> str:
    return _fernet(keys()).rotate(ciphertext.encode("ascii")).decode("ascii")


def is_readable(ciphertext: str, keys: Sequence[str]) -> bool:
    try:
        _fernet(tuple(keys)).decrypt(ciphertext.encode("ascii"))
    except (InvalidToken, UnicodeEncodeError):
        return False
    return True


def key_fingerprint(key: str | None = None) -> str:
    """Return a public identifier of a key, by default of the current one."""
    text = settings.ENCRYPTION_KEYS[0] if key is None else key
    return hashlib.sha256(b"toolcrib key:" + text.encode()).hexdigest()[:12]


def origin_digest(origin: str) -> str:
    return hashlib.sha256(origin.encode()).hexdigest()
