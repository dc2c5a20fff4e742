"""MACs of audit entries, with keys derived from the encryption keys."""

import hmac
import secrets
from collections.abc import Sequence
from datetime import UTC
from functools import lru_cache
from typing import Any

from django.conf import settings

from catalog.models import AuditEntry
from toolcrib.lib.json_codec import canonical

SIGNED_FIELDS = (
    *("actor_kind", "actor_id", "actor_label", "verb"),
    *("target_kind", "target_id", "target_label", "before", "after"),
)


def audit_keys(keys: Sequence[str] | None = None) -> tuple[bytes, ...]:
    """Derive the keys of the chain from the encryption keys; the first one signs."""
    return _derive(tuple(settings.ENCRYPTION_KEYS if keys is None else keys))


@lru_cache(maxsize=4)
def _derive(keys: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(hmac.digest(key.encode(), b"toolcrib audit chain", "sha256") for key in keys)


def mac(key: bytes, text: str) -> str:
    return hmac.digest(key, text.encode(), "sha256").hex()


def is_mac(found: str, text: str, keys: Sequence[bytes]) -> bool:
    """Return whether one of the keys made this MAC."""
    return any(hmac.compare_digest(found.encode(), mac(key, text).encode()) for key in keys)


def sign(entry: AuditEntry, keys: Sequence[str] | None = None) -> str:
    """Return the MAC of a new entry. It starts with a nonce, so that no entry can be copied."""
    nonce = secrets.token_hex(8)
    return f"{nonce}.{mac(audit_keys(keys)[0], content(entry, nonce))}"


def is_signed(entry: AuditEntry, keys: Sequence[bytes]) -> bool:
    nonce, _, found = entry.mac.partition(".")
    return is_mac(found, content(entry, nonce), keys)


def content(entry: AuditEntry, nonce: str) -> str:
    fields = {name: _stored(getattr(entry, name)) for name in SIGNED_FIELDS}
    at = entry.at.astimezone(UTC).isoformat(timespec="microseconds")
    return canonical([nonce, at, fields])


def _stored(value: Any) -> Any:
    """Return a value as every database returns it: PostgreSQL rewrites numbers like 1e20."""
    if isinstance(value, dict):
        return {str(key): _stored(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_stored(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
