"""Encryption at rest of what calls contain: arguments, results and whole answers.

Payloads are encrypted with AES-256-GCM under a data key. The data key is a row of the database,
encrypted with the first of the installation's keys, so a key rotation re-encrypts that row alone.
Each process derives a subkey from the data key and a random salt: random nonces are safe for 2**32
messages of one key, which one installation can exceed and one process cannot.

Encrypted bytes are: version, id of the data key, salt, nonce, ciphertext with its tag. In a text
column they are base64 after `~`, which no JSON starts with.
"""

import hashlib
import hmac
import os
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from django.db import connection, models

from servers.registration import credentials
from servers.secret import Secret
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.redaction.redactor import may_contain_secret

VERSION = b"\x01"
ID_BYTES, SALT_BYTES, NONCE_BYTES = 4, 12, 12
HEADER_BYTES = len(VERSION) + ID_BYTES + SALT_BYTES
MARK = "~"
# What a page shows instead of a payload whose key is lost. JSON, like any other payload.
UNREADABLE = '"This payload cannot be decrypted with the key of this installation."'


class UnreadablePayload(ToolcribError):
    code = "payload_unreadable"
    status = 503

    def __init__(self) -> None:
        super().__init__(
            "A stored payload cannot be decrypted with this installation's key.",
            hint="Restore the encryption key from its backup.",
        )


class DataKey(models.Model):
    """A key that encrypts payloads, itself encrypted with the installation's key."""

    ciphertext = models.TextField()
    # Calls up to this id may have been stored in clear, by a version without encryption.
    clear_calls_up_to = models.PositiveBigIntegerField(default=0)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"data key {self.pk}"


@dataclass(frozen=True)
class _Encryptor:
    """The subkey of this process."""

    header: bytes
    cipher: AESGCM


_keys: dict[bytes, bytes] = {}  # data keys by id
_encryptor: _Encryptor | None = None


def encrypt(data: bytes) -> bytes:
    encryptor = _encryptor or _load()
    nonce = os.urandom(NONCE_BYTES)
    return encryptor.header + nonce + encryptor.cipher.encrypt(nonce, data, None)


def decrypt(data: bytes) -> bytes:
    header, rest = data[:HEADER_BYTES], data[HEADER_BYTES:]
    try:
        return _cipher(header).decrypt(rest[:NONCE_BYTES], rest[NONCE_BYTES:], None)
    except (InvalidTag, ValueError) as error:
        raise UnreadablePayload from error


def encrypt_text(text: str) -> str:
    """Encrypt a text for a text column; one that is empty or encrypted stays as it is."""
    if not text or text.startswith(MARK):
        return text
    return MARK + b64encode(encrypt(text.encode())).decode("ascii")


def decrypt_text(text: str) -> str:
    """Decrypt the text of a column; one that was stored in clear stays as it is."""
    if not text.startswith(MARK):
        return text
    try:
        return decrypt(b64decode(text[len(MARK) :])).decode()
    except (UnreadablePayload, ValueError):
        return UNREADABLE


def ensure_data_key() -> None:
    """Load the data keys, and create one if there is none or none can be decrypted.

    Not inside a transaction: a key that is rolled back must not have encrypted anything.
    """
    try:
        _load()
    except UnreadablePayload:
        key = b64encode(AESGCM.generate_key(256)).decode("ascii")
        row = DataKey(ciphertext=credentials.encrypt(Secret(key)))
        row.clear_calls_up_to = _last_call()
        row.save()
        _load()


def restore_data_keys(rows: list["DataKey"]) -> None:
    """Add the data keys of a backup to those of this installation."""
    for row in rows:
        if not DataKey.objects.filter(ciphertext=row.ciphertext).exists():
            row.pk = None
            row.save(force_insert=True)


def rewrap_data_keys(keys: Sequence[str]) -> int:
    """Encrypt every data key with keys that come into force; return how many are unreadable."""
    unreadable = 0
    for row in DataKey.objects.all():
        if credentials.is_readable(row.ciphertext, keys):
            continue
        if credentials.is_readable(row.ciphertext, credentials.keys()):
            row.ciphertext = credentials.encrypt(credentials.decrypt(row.ciphertext), keys)
            row.save(update_fields=["ciphertext"])
        else:
            unreadable += 1
    return unreadable


def mark_calls_as_clear() -> None:
    """Let the background task redact and encrypt every call again."""
    DataKey.objects.update(clear_calls_up_to=_last_call())


def rotate_data_keys() -> int:
    """Re-encrypt the data keys with the first of the installation's keys; return how many."""
    rotated = 0
    for row in DataKey.objects.all():
        if credentials.is_readable(row.ciphertext, credentials.keys()):
            row.ciphertext = credentials.rotate(row.ciphertext)
            row.save(update_fields=["ciphertext"])
            rotated += 1
    return rotated


def _load() -> _Encryptor:
    """Read the data keys. The newest one that can be decrypted encrypts."""
    global _encryptor
    newest = b""
    for ciphertext in DataKey.objects.order_by("id").values_list("ciphertext", flat=True):
        if credentials.is_readable(ciphertext, credentials.keys()):
            newest = b64decode(credentials.decrypt(ciphertext).reveal())
            _keys[_key_id(newest)] = newest
    if not newest:
        raise UnreadablePayload
    header = VERSION + _key_id(newest) + os.urandom(SALT_BYTES)
    _encryptor = _Encryptor(header, _cipher(header))
    return _encryptor


def _key_id(key: bytes) -> bytes:
    return hashlib.sha256(b"toolcrib data key:" + key).digest()[:ID_BYTES]


@lru_cache(maxsize=1024)
def _cipher(header: bytes) -> AESGCM:
    """Return the cipher of a data key and a salt."""
    if len(header) != HEADER_BYTES or not header.startswith(VERSION):
        raise UnreadablePayload
    key_id, salt = header[1 : 1 + ID_BYTES], header[1 + ID_BYTES :]
    if key_id not in _keys:
        _load()
    if key_id not in _keys:
        raise UnreadablePayload
    return AESGCM(hmac.digest(_keys[key_id], b"payload:" + salt, "sha256"))


def _last_call() -> int:
    """Return the highest id of a call, without importing the model that uses this module."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT MAX(id) FROM sessions_app_call")
        return int(cursor.fetchone()[0] or 0)


# --- Column -----------------------------------------------------------------------------------

_as_stored: ContextVar[bool] = ContextVar("payloads_as_stored", default=False)


@contextmanager
def payloads_as_stored() -> Iterator[None]:
    """Read encrypted columns without decrypting them, as a backup does."""
    token = _as_stored.set(True)
    try:
        yield
    finally:
        _as_stored.reset(token)


class EncryptedTextField(models.TextField):  # type: ignore[type-arg] # no class at run time
    """A text that is encrypted in the database. It cannot be searched.

    With `only_with_secrets`, a text without anything that looks like a secret is stored in clear.
    """

    def __init__(self, *args: Any, only_with_secrets: bool = False, **kwargs: Any) -> None:
        self.only_with_secrets = only_with_secrets
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        """The column is a text column, so migrations need not know of the encryption."""
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.TextField", args, kwargs

    def from_db_value(self, value: str | None, *_: object) -> str | None:
        return value if value is None or _as_stored.get() else decrypt_text(value)

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        prepared = super().get_db_prep_save(value, connection)
        return self._encrypted(prepared) if isinstance(prepared, str) else prepared

    def value_to_string(self, obj: models.Model) -> str:
        """Return the value for a backup: as it is stored."""
        return self._encrypted(super().value_to_string(obj))

    def _encrypted(self, text: str) -> str:
        if self.only_with_secrets and not may_contain_secret(text.encode()):
            return text
        return encrypt_text(text)
