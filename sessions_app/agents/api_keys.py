"""API keys (bearer tokens): create, look up, rotate and revoke. Only a digest is stored.

`find_key` queries the database every time, so a revoked or expired key, or one of a disabled
agent, is rejected by every process from the next request on.
"""

import hashlib
import secrets
from collections.abc import Collection
from datetime import datetime, timedelta

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Max, Q
from django.utils import timezone

from catalog import audit
from catalog.audit import Actor
from sessions_app.models import Agent, ApiKey, KeyScope
from toolcrib.lib.errors import Conflict, Forbidden, Invalid, NotFound, ToolcribError
from toolcrib.lib.protocols.asgi import MAX_KEY_LENGTH
from toolcrib.lib.roles import Role, role_of

PREFIX = "tcb_"
TRIAL_PREFIX = "trial"  # of keys without a text; those of others begin with PREFIX
LAST_USED_RESOLUTION = timedelta(minutes=1)
ROTATION_OVERLAP = timedelta(hours=24)  # the old key stays valid this long after a rotation


@transaction.atomic
def create_key(
    name: str,
    scope: str,
    *,
    actor: Actor,
    user: User | None = None,
    agent: Agent | None = None,
    expires_at: datetime | None = None,
) -> tuple[ApiKey, str]:
    """Create a key. Its text is returned only here."""
    name = name.strip()
    _validate(name, scope, agent, expires_at)
    text = PREFIX + secrets.token_urlsafe(32)
    key = ApiKey.objects.create(
        name=name,
        prefix=text[:10],
        sha256=_digest(text),
        scope=scope,
        user=user,
        agent=agent,
        created_by=actor.label[:200],
        expires_at=expires_at,
    )
    audit.record(actor, _verb(key, "add"), key, after=_audit_values(key))
    return key, text


def create_trial_key(agent: Agent, *, actor: Actor) -> ApiKey:
    """Create a key that no text opens, by which Toolcrib runs a user's script as an agent."""
    return ApiKey.objects.create(
        name="Trial of a script",
        prefix=TRIAL_PREFIX,
        sha256=secrets.token_hex(32),
        scope=KeyScope.AGENT,
        agent=agent,
        created_by=actor.label[:200],
    )


def _validate(name: str, scope: str, agent: Agent | None, expires_at: datetime | None) -> None:
    if not 0 < len(name) <= 120 or not name.isprintable():
        raise Invalid("A key name must have 1 to 120 printable characters.")
    if scope not in KeyScope.values:
        raise Invalid(f"scope must be one of: {', '.join(KeyScope.values)}.")
    if scope == KeyScope.AGENT and agent is None:
        raise Invalid(
            "A key with the scope agent must belong to an agent.",
            hint="`manage.py create_agent` creates an agent with a key.",
        )
    if scope != KeyScope.AGENT and agent is not None:
        raise Invalid("A key that belongs to an agent must have the scope agent.")
    if expires_at is not None and expires_at <= timezone.now():
        raise Invalid("The expiry time is in the past.", hint="Choose a later time.")


class Unauthorized(ToolcribError):
    code = "unauthorized"
    status = 401

    def __init__(self) -> None:
        super().__init__(
            "A valid API key is required.",
            hint="Send `Authorization: Bearer tcb_…`; `manage.py create_agent` creates an agent "
            "with a key, `manage.py create_token` a key for operators and admins.",
        )


def require_agent_key(sha256: str) -> ApiKey:
    """Return the valid key of an agent. Raises Unauthorized or Forbidden."""
    key = find_key_by_digest(sha256)
    if key is None:
        raise Unauthorized
    if key.agent is None:
        raise Forbidden("Only agents can use this endpoint.", hint="Use an agent's key.")
    return key


def find_key(text: str) -> ApiKey | None:
    """Return the key with this text if it is valid, otherwise None."""
    if not text.startswith(PREFIX) or len(text) > MAX_KEY_LENGTH:
        return None
    return find_key_by_digest(_digest(text))


def find_key_by_digest(sha256: str) -> ApiKey | None:
    """Return the key with this digest if it is valid, otherwise None. Records its use."""
    key = ApiKey.objects.select_related("user", "agent").filter(sha256=sha256).first()
    now = timezone.now()
    if key is None or not _is_usable(key, now):
        return None
    if key.last_used_at is None or now - key.last_used_at > LAST_USED_RESOLUTION:
        ApiKey.objects.filter(pk=key.pk).update(last_used_at=now)
    return key


def valid_keys(keys: Collection[int]) -> set[int]:
    """Return the ids of those keys that are valid."""
    now = timezone.now()
    rows = ApiKey.objects.select_related("user", "agent").filter(pk__in=keys)
    return {key.pk for key in rows if _is_usable(key, now)}


def _is_usable(key: ApiKey, now: datetime) -> bool:
    """Return whether a key is valid, and its owner may use it."""
    if not is_valid(key, now) or (key.agent and not key.agent.enabled):
        return False
    return not key.user or role_of(key.user) >= required_role(key.scope)


def is_valid(key: ApiKey, now: datetime) -> bool:
    """Return whether a key is neither revoked nor expired. Its owner may still be disabled."""
    return not key.revoked_at and (key.expires_at is None or key.expires_at > now)


def find_key_by_reference(reference: str) -> ApiKey:
    """Return the key with this id or prefix. Raises NotFound, or Conflict if ambiguous."""
    keys = ApiKey.objects.select_related("agent")
    if reference.isdecimal() and len(reference) < 18:
        rows = list(keys.filter(pk=int(reference)))
    else:
        rows = list(keys.filter(prefix=reference)[:3]) if reference.isprintable() else []
    if not rows:
        raise NotFound("Key not found.", hint="Use its id or its prefix (tcb_…).")
    if len(rows) > 1:
        raise Conflict("Several keys have this prefix.", hint="Use the key's id.")
    return rows[0]


@transaction.atomic
def rotate(key: ApiKey, *, actor: Actor) -> tuple[ApiKey, str]:
    """Create a replacement for a key, which stays valid for 24 hours."""
    key = _lock(key)
    now = timezone.now()
    if not is_valid(key, now):
        raise Conflict("This key is revoked or expired.", hint="Create a new key.")
    if key.expires_at and key.expires_at <= now + ROTATION_OVERLAP:
        raise Conflict("This key expires within 24 hours.", hint="Create a second key instead.")
    # The new key gets the same lifetime as the old one.
    expires = now + (key.expires_at - key.created_at) if key.expires_at else None
    new, text = create_key(
        key.name, key.scope, actor=actor, user=key.user, agent=key.agent, expires_at=expires
    )
    before = {"expires_at": _iso(key.expires_at)}
    key.expires_at = now + ROTATION_OVERLAP
    key.save(update_fields=["expires_at"])
    after = {"expires_at": _iso(key.expires_at), "replaced_by": new.prefix}
    audit.record(actor, _verb(key, "rotate"), key, before=before, after=after)
    return new, text


@transaction.atomic
def revoke(key: ApiKey, *, actor: Actor) -> None:
    key = _lock(key)
    if not key.revoked_at:
        key.revoked_at = timezone.now()
        key.save(update_fields=["revoked_at"])
        audit.record(actor, _verb(key, "revoke"), key, before=_audit_values(key))


def required_role(scope: str) -> Role:
    return Role.ADMIN if scope == KeyScope.ADMIN else Role.OPERATOR


def _lock(key: ApiKey) -> ApiKey:
    row = ApiKey.objects.select_for_update().filter(pk=key.pk).first()
    if row is None:
        raise NotFound("Key not found.", hint="Its owner was deleted in the meantime.")
    return row


def _verb(key: ApiKey, action: str) -> str:
    return f"{'key' if key.scope == KeyScope.AGENT else 'token'}.{action}"


def _audit_values(key: ApiKey) -> dict[str, object]:
    values: dict[str, object] = {"scope": str(key.scope)}
    if key.agent:
        values["agent"] = key.agent.name
    if key.expires_at:
        values["expires_at"] = _iso(key.expires_at)
    return values


def _iso(moment: datetime | None) -> str | None:
    return moment.isoformat(timespec="seconds") if moment else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def expiring_keys(now: datetime, within: timedelta) -> list[ApiKey]:
    """Return the keys of agents that expire soon and were not replaced, or are still used."""
    valid = ApiKey.objects.filter(revoked_at=None, agent__enabled=True)
    expiring = valid.filter(expires_at__gt=now, expires_at__lte=now + within)
    newest_valid = dict(
        valid.filter(Q(expires_at=None) | Q(expires_at__gt=now + within))
        .order_by()
        .values_list("agent")
        .annotate(Max("created_at"))
    )
    keys = expiring.select_related("agent").order_by("expires_at")
    return [key for key in keys if not _is_replaced(key, newest_valid.get(key.agent_id))]


def _is_replaced(key: ApiKey, newer: datetime | None) -> bool:
    if newer is None or newer < key.created_at:
        return False
    return key.last_used_at is None or key.last_used_at < newer
