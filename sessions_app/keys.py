"""Mint, find and revoke bearer tokens. Only a digest is kept."""

import hashlib
import secrets
from datetime import datetime, timedelta

from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from catalog import audit
from catalog.audit import Actor
from catalog.people import Role, role_of
from sessions_app.models import ApiKey, Scope
from toolcrib.errors import Invalid

PREFIX = "tcb_"
TOUCH_EVERY = timedelta(minutes=1)


@transaction.atomic
def mint(
    name: str,
    scope: str,
    *,
    actor: Actor,
    user: User | None = None,
    expires_at: datetime | None = None,
) -> tuple[ApiKey, str]:
    """Make a key; its text is returned here and never again."""
    name = name.strip()
    if not 0 < len(name) <= 120 or not name.isprintable():
        raise Invalid("A token's name has 1 to 120 printable characters.")
    if scope not in Scope.values:
        raise Invalid(f"A scope is one of: {', '.join(Scope.values)}.")
    text = PREFIX + secrets.token_urlsafe(32)
    key = ApiKey.objects.create(
        name=name,
        prefix=text[:10],
        sha256=_digest(text),
        scope=scope,
        user=user,
        expires_at=expires_at,
    )
    audit.record(actor, "token.add", key, after={"scope": scope})
    return key, text


def find(text: str) -> ApiKey | None:
    """Return the key a request carries, if it is good now."""
    if not text.startswith(PREFIX) or len(text) > 100:
        return None
    key = ApiKey.objects.select_related("user").filter(sha256=_digest(text)).first()
    now = timezone.now()
    if key is None or key.revoked_at or (key.expires_at and key.expires_at <= now):
        return None
    if key.user and role_of(key.user) < needed_role(key.scope):
        return None
    if key.last_used_at is None or now - key.last_used_at > TOUCH_EVERY:
        ApiKey.objects.filter(pk=key.pk).update(last_used_at=now)
    return key


@transaction.atomic
def revoke(key: ApiKey, *, actor: Actor) -> None:
    if not key.revoked_at:
        key.revoked_at = timezone.now()
        key.save(update_fields=["revoked_at"])
        audit.record(actor, "token.revoke", key)


def needed_role(scope: str) -> Role:
    return Role.ADMIN if scope == Scope.ADMIN else Role.OPERATOR


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
