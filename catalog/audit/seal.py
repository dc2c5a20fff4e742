"""The seal of the audit chain: its length and head, stored outside the database with a MAC.

Without it, entries could be cut off at the end of the chain unnoticed. A file in the data folder of
an embedded installation, or at TOOLCRIB_AUDIT_SEAL; otherwise a key in Redis.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from django.conf import settings

from catalog.audit.signing import audit_keys, is_mac, mac
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.protocols.redis_client import connect, redis_error

if TYPE_CHECKING:
    from redis import Redis

REDIS_KEY = "toolcrib:audit-seal:{NAME}"  # of the database: several may share one Redis


class SealUnreadable(ToolcribError):
    code = "audit_seal"
    status = 503


@dataclass(frozen=True)
class Seal:
    count: int  # positions used
    head: str  # the link at that position
    delivered: int = 0  # position of the last entry written to the sink


def read() -> Seal | None:
    """Return the seal, or None if there is none. Raises SealUnreadable if it is not genuine."""
    text = _load()
    if text is None:
        return None
    try:
        body = json.loads(text)
        found = body.pop("mac")
        seal = Seal(**body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _not_genuine() from error
    if not isinstance(found, str) or not is_mac(found, _content(seal), audit_keys()):
        raise _not_genuine()
    return seal


def write(seal: Seal, keys: Sequence[str] | None = None) -> None:
    body = asdict(seal) | {"mac": mac(audit_keys(keys)[0], _content(seal))}
    _store(canonical(body))


def _content(seal: Seal) -> str:
    return "seal\0" + canonical(asdict(seal))


def _not_genuine() -> SealUnreadable:
    return SealUnreadable(
        "The seal of the audit log was changed, or was made with another encryption key.",
        hint="Restore TOOLCRIB_ENCRYPTION_KEYS, or start a new chain with "
        "manage.py verify_audit --restart.",
    )


def _load() -> str | None:
    try:
        if settings.AUDIT_SEAL:
            return Path(settings.AUDIT_SEAL).read_text(encoding="utf-8")
        found = _redis().get(_redis_key())
        return bytes(found).decode() if found is not None else None  # type: ignore[arg-type]
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, redis_error()) as error:
        raise SealUnreadable(f"The seal of the audit log cannot be read: {error}.") from error


def _store(text: str) -> None:
    try:
        if not settings.AUDIT_SEAL:
            _redis().set(_redis_key(), text)
            return
        path = Path(settings.AUDIT_SEAL)
        draft = path.with_name(path.name + ".new")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except (OSError, redis_error()) as error:
        raise SealUnreadable(f"The seal of the audit log cannot be written: {error}.") from error


@lru_cache(maxsize=1)
def _redis() -> "Redis":
    return connect(settings.REDIS_URL, 1, socket_timeout=2)


def _redis_key() -> str:
    return REDIS_KEY.format_map(settings.DATABASES["default"])
