"""Mint, find, rotate and revoke bearer keys. Only a digest is kept.

`find` asks the database each time, so what is revoked, expired or disabled is refused by every
process from the next request on.
"""

import hashlib
import secrets
from datetime import datetime, timedelta

from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from catalog import audit
from catalog.audit import Actor
from sessions_app.models import Agent, ApiKey, KeyScope
from toolcrib.lib.errors import Conflict, Invalid, NotFound
from toolcrib.lib.prepared_query import PreparedQuery
from toolcrib.lib.roles import Role, role_of

PREFIX = "tcb_"
TOUCH_EVERY = timedelta(minutes=1)
OVERLAP = timedelta(hours=24)  # how long a rotated key goes on beside the new one

_by_digest = PreparedQuery(
    1, lambda sha256: ApiKey.objects.select_related("user", "agent").filter(sha256=sha256)
)


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
    """Make a key; its text is returned here and never again."""
    name = name.strip()
    _check(name, scope, agent, expires_at)
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
    audit.record(actor, _verb(key, "add"), key, after=_facts(key))
    return key, text


def _check(name: str, scope: str, agent: Agent | None, expires_at: datetime | None) -> None:
    if not 0 < len(name) <= 120 or not name.isprintable():
        raise Invalid("A token's name has 1 to 120 printable characters.")
    if scope not in KeyScope.values:
        raise Invalid(f"A scope is one of: {', '.join(KeyScope.values)}.")
    if scope == KeyScope.AGENT and agent is None:
        raise Invalid(
            "A key of the scope agent belongs to an agent.",
            hint="`manage.py create_agent` makes one with its key.",
        )
    if scope != KeyScope.AGENT and agent is not None:
        raise Invalid("An agent's key has the scope agent.")
    if expires_at is not None and expires_at <= timezone.now():
        raise Invalid("The key would have expired already.", hint="Choose a later time.")


def find_key(text: str) -> ApiKey | None:
    """Return the key a request carries, if it is good now."""
    if not text.startswith(PREFIX) or len(text) > 100:
        return None
    return find_key_by_digest(_digest(text))


def find_key_by_digest(sha256: str) -> ApiKey | None:
    """Return the key of which only the digest is at hand, if it is good now; note its use."""
    key = _by_digest.first(sha256)
    now = timezone.now()
    if key is None or not is_valid(key, now):
        return None
    if key.user and role_of(key.user) < needed_role(key.scope):
        return None
    if key.agent and not key.agent.enabled:
        return None
    if key.last_used_at is None or now - key.last_used_at > TOUCH_EVERY:
        ApiKey.objects.filter(pk=key.pk).update(last_used_at=now)
    return key


def is_valid(key: ApiKey, now: datetime) -> bool:
    """Say whether a key is neither revoked nor expired. Its owner may still be disabled."""
    return not key.revoked_at and (key.expires_at is None or key.expires_at > now)


def find_key_by_reference(reference: str) -> ApiKey:
    """Return the key of this id or prefix."""
    found = ApiKey.objects.select_related("agent")
    if reference.isdecimal() and len(reference) < 18:
        rows = list(found.filter(pk=int(reference)))
    else:
        rows = list(found.filter(prefix=reference)[:3]) if reference.isprintable() else []
    if not rows:
        raise NotFound("There is no such key.", hint="Name it by its id or its prefix (tcb_……).")
    if len(rows) > 1:
        raise Conflict("More than one key begins so.", hint="Name it by its id.")
    return rows[0]


@transaction.atomic
def rotate(key: ApiKey, *, actor: Actor) -> tuple[ApiKey, str]:
    """Make a key in place of this one, which goes on for 24 hours at most."""
    key = _locked(key)
    now = timezone.now()
    if not is_valid(key, now):
        raise Conflict("This key is revoked or has expired.", hint="Make a new one.")
    if key.expires_at and key.expires_at <= now + OVERLAP:
        raise Conflict("This key ends within 24 hours anyway.", hint="Make a new one beside it.")
    # The new one is to last as long as the old one was meant to.
    expires = now + (key.expires_at - key.created_at) if key.expires_at else None
    new, text = create_key(
        key.name, key.scope, actor=actor, user=key.user, agent=key.agent, expires_at=expires
    )
    before = {"expires_at": _iso(key.expires_at)}
    key.expires_at = now + OVERLAP
    key.save(update_fields=["expires_at"])
    after = {"expires_at": _iso(key.expires_at), "replaced_by": new.prefix}
    audit.record(actor, _verb(key, "rotate"), key, before=before, after=after)
    return new, text


@transaction.atomic
def revoke(key: ApiKey, *, actor: Actor) -> None:
    key = _locked(key)
    if not key.revoked_at:
        key.revoked_at = timezone.now()
        key.save(update_fields=["revoked_at"])
        audit.record(actor, _verb(key, "revoke"), key, before=_facts(key))


def needed_role(scope: str) -> Role:
    return Role.ADMIN if scope == KeyScope.ADMIN else Role.OPERATOR


def _locked(key: ApiKey) -> ApiKey:
    found = ApiKey.objects.select_for_update().filter(pk=key.pk).first()
    if found is None:
        raise NotFound("This key is gone.", hint="Somebody deleted its owner meanwhile.")
    return found


def _verb(key: ApiKey, act: str) -> str:
    return f"{'key' if key.scope == KeyScope.AGENT else 'token'}.{act}"


def _facts(key: ApiKey) -> dict[str, object]:
    facts: dict[str, object] = {"scope": str(key.scope)}
    if key.agent:
        facts["agent"] = key.agent.name
    if key.expires_at:
        facts["expires_at"] = _iso(key.expires_at)
    return facts


def _iso(moment: datetime | None) -> str | None:
    return moment.isoformat(timespec="seconds") if moment else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
