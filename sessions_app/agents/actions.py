"""Agent writes: create, change, disable and delete agents; assign their groups.

An agent has either an ordered list of groups, or all current and future groups; never both.
`sessions_app.agents.api_keys` creates the keys.
"""

from collections.abc import Sequence
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone

from catalog import audit, preferences
from catalog.audit import Actor
from catalog.models import Group, PayloadStorage, Revision
from catalog.tools.actions import UNSTORABLE_CHARACTERS
from sessions_app.agents import api_keys
from sessions_app.ledger import content_erasure
from sessions_app.models import Agent, AgentGroup, KeyScope, Mode, Strategy
from sessions_app.sessions import lifecycle
from toolcrib.lib.errors import Conflict, Invalid, NotFound

POSITIVE_INTEGER = range(1, 1_000_000_001)
NAMES_IN_ERROR = 20
SETTINGS: dict[str, Any] = {
    "name": str,
    "description": str,
    "catalog_header": str,
    "strategy": Strategy,
    "mode": Mode,
    "tool_threshold": POSITIVE_INTEGER,
    "threshold_tokens": POSITIVE_INTEGER,
    "threshold_percent": float,
    "catalog_budget": POSITIVE_INTEGER,
    "budget": POSITIVE_INTEGER,  # or None
    "calls_in_flight": POSITIVE_INTEGER,
    "calls_per_minute": POSITIVE_INTEGER,
    "searches_per_minute": POSITIVE_INTEGER,
    "cost_per_minute": POSITIVE_INTEGER,
    "max_sessions": POSITIVE_INTEGER,
    "payload_storage": PayloadStorage,
    "code_mode": bool,
    "runs_custom_tools": bool,
}
MAX_TEXT_LENGTHS = {"description": 2_000, "catalog_header": 4_000}
# A change to one of these changes the catalog of new sessions.
CATALOG_SETTINGS = {
    "catalog_header",
    "strategy",
    "mode",
    "catalog_budget",
    "tool_threshold",
    "threshold_tokens",
    "threshold_percent",
    "code_mode",
    "runs_custom_tools",
}
GROUP_ACTIONS = ("add", "remove", "up", "down")


@transaction.atomic
def create(
    name: str,
    *,
    groups: Sequence[str] = (),
    all_groups: bool = False,
    actor: Actor,
    **settings: object,
) -> Agent:
    """Create an agent. It may have no groups; then it has no tools."""
    valid = {key: validate_setting(key, value) for key, value in settings.items()}
    agent = Agent(name=validate_setting("name", name), **preferences.agent_defaults() | valid)
    _save(agent)
    _assign_groups(agent, groups, all_groups=all_groups)
    audit.record(actor, "agent.add", agent, after={**valid, **_audit_groups(agent)})
    return agent


@transaction.atomic
def create_with_key(name: str, *, actor: Actor, **options: Any) -> tuple[Agent, str]:
    """Create an agent and its first key. The key's text is returned only here."""
    agent = create(name, actor=actor, **options)
    return agent, api_keys.create_key(agent.name, KeyScope.AGENT, agent=agent, actor=actor)[1]


@transaction.atomic
def change(agent: Agent, *, actor: Actor, **settings: object) -> Agent:
    """Change settings. Open sessions keep their catalog; new limits apply immediately."""
    agent = _lock(agent)
    before: dict[str, object] = {}
    after: dict[str, object] = {}
    for key, value in settings.items():
        value = validate_setting(key, value)
        if getattr(agent, key) != value:
            before[key], after[key] = getattr(agent, key), value
            setattr(agent, key, value)
    if after:
        _save(agent, list(after))
        audit.record(actor, "agent.edit", agent, before=before, after=after)
        if CATALOG_SETTINGS & after.keys():
            Revision.bump()
    return agent


@transaction.atomic
def set_enabled(agent: Agent, enabled: bool, *, actor: Actor) -> Agent:
    """Enable an agent, or disable it: its keys are rejected from the next request on."""
    agent = _lock(agent)
    if agent.enabled != enabled:
        agent.enabled = enabled
        agent.save(update_fields=["enabled"])
        audit.record(actor, "agent.enable" if enabled else "agent.disable", agent)
    return agent


@transaction.atomic
def delete(agent: Agent, *, actor: Actor) -> None:
    """Delete an agent: revoke its keys, end its sessions and erase what they contain.

    The row stays with name and dates, and so do its sessions and calls until their retention ends,
    as evidence of what it did: times, tools, outcomes, sizes and digests, without any content.
    """
    agent = _lock(agent)
    before = {
        "keys": agent.keys.count(),
        "sessions": agent.sessions.count(),
        "calls": agent.calls.count(),
        **_audit_groups(agent),
    }
    audit.record(actor, "agent.delete", agent, before=before)
    now = timezone.now()
    agent.keys.filter(revoked_at=None).update(revoked_at=now)
    for session in agent.sessions.open():
        lifecycle.close_session(session)
    content_erasure.erase_agent(agent)
    agent.group_links.all().delete()
    agent.all_groups, agent.enabled, agent.deleted_at = False, False, now
    agent.save(update_fields=["all_groups", "enabled", "deleted_at"])


# --- Groups -------------------------------------------------------------------------------------


@transaction.atomic
def set_groups(
    agent: Agent, groups: Sequence[str] = (), *, all_groups: bool = False, actor: Actor
) -> Agent:
    """Set the agent's groups in this order, or grant all current and future groups."""
    agent = _lock(agent)
    before = _audit_groups(agent)
    _assign_groups(agent, groups, all_groups=all_groups)
    after = _audit_groups(agent)
    if after != before:
        audit.record(actor, "agent.groups", agent, before=before, after=after)
        Revision.bump()
    return agent


@transaction.atomic
def apply_group_action(agent: Agent, action: str, group_id: str, *, actor: Actor) -> Agent:
    """Append a group, remove one, or move one up or down."""
    agent = _lock(agent)
    if action not in GROUP_ACTIONS:
        raise Invalid("Unknown action.", hint=f"Use one of: {', '.join(GROUP_ACTIONS)}.")
    if agent.all_groups:
        raise Conflict(f"{agent} has all groups.", hint="Switch it to selected groups first.")
    ids = group_ids(agent)
    if action == "add":
        return set_groups(agent, [*ids, group_id], actor=actor)
    if group_id not in ids:
        raise NotFound(f"{agent} does not have this group.", hint="It may have been removed.")
    position = ids.index(group_id)
    ids.pop(position)
    if action != "remove":
        ids.insert(max(position - 1, 0) if action == "up" else position + 1, group_id)
    return set_groups(agent, ids, actor=actor)


def group_ids(agent: Agent) -> list[str]:
    """Return the ids of the agent's selected groups, in order."""
    return list(agent.group_links.values_list("group__group_id", flat=True))


def _assign_groups(agent: Agent, requested: Sequence[str], *, all_groups: bool) -> None:
    if all_groups and requested:
        raise Invalid(
            "An agent has either selected groups or all groups, not both.",
            hint="Set only one of the two.",
        )
    ids = list(dict.fromkeys(requested))
    groups = Group.objects.in_bulk(
        [group_id for group_id in ids if group_id.isprintable()], field_name="group_id"
    )
    unknown = [group_id for group_id in ids if group_id not in groups]
    if unknown:
        known = list(Group.objects.values_list("group_id", flat=True))
        raise Invalid(
            f"Unknown group{'s' if len(unknown) > 1 else ''}: {_join_names(unknown)}.",
            hint=f"Existing groups: {_join_names(known)}." if known else "No groups exist yet.",
            code="unknown_group",
            details={"unknown": unknown[:NAMES_IN_ERROR]},
        )
    agent.group_links.all().delete()
    AgentGroup.objects.bulk_create(
        AgentGroup(agent=agent, group=groups[group_id], position=position)
        for position, group_id in enumerate(ids)
    )
    if agent.all_groups != all_groups:
        agent.all_groups = all_groups
        agent.save(update_fields=["all_groups"])


def _audit_groups(agent: Agent) -> dict[str, object]:
    return {"groups": "all" if agent.all_groups else group_ids(agent)}


def _join_names(names: Sequence[str]) -> str:
    text = ", ".join(name[:80] for name in names[:NAMES_IN_ERROR])
    more = len(names) - NAMES_IN_ERROR
    return f"{text} and {more} more" if more > 0 else text


# --- Validation ---------------------------------------------------------------------------------


def validate_setting(key: str, value: Any) -> Any:
    """Return the value as it is stored. Raises Invalid."""
    rule = SETTINGS.get(key)
    if rule is None:
        raise Invalid(
            f"Unknown agent setting: {key}.", hint=f"Known settings: {', '.join(SETTINGS)}."
        )
    if key == "budget" and value is None:
        return None
    if isinstance(rule, range):
        if not isinstance(value, int) or isinstance(value, bool) or value not in rule:
            raise Invalid(
                f"{key} must be an integer from {rule.start} to {rule.stop - 1:,}.",
                hint="Omit it for no budget." if key == "budget" else "",
            )
        return value
    if rule is bool:
        if not isinstance(value, bool):
            raise Invalid(f"{key} must be true or false.")
        return value
    if rule is float:
        return _validate_percent(key, value)
    if rule is str:
        return _validate_name(value) if key == "name" else _validate_text(key, value)
    if value not in rule.values:
        raise Invalid(f"{key} must be one of: {', '.join(rule.values)}.")
    return str(value)


def _validate_percent(key: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 100:
        raise Invalid(f"{key} must be a number greater than 0 and at most 100.")
    return float(value)


def _validate_name(value: Any) -> str:
    name = value.strip() if isinstance(value, str) else ""
    if not 0 < len(name) <= 80 or not name.isprintable():
        raise Invalid(
            "An agent name must have 1 to 80 printable characters.", hint="Example: scout."
        )
    if "/" in name or name in (".", ".."):
        raise Invalid(
            'An agent name is part of a URL: it cannot contain "/" or be "." or "..".',
            hint='Use "-" instead.',
        )
    return name


def _validate_text(key: str, value: Any) -> str:
    max_length = MAX_TEXT_LENGTHS[key]
    if not isinstance(value, str) or len(value) > max_length:
        raise Invalid(f"{key} must be text of at most {max_length:,} characters.")
    if UNSTORABLE_CHARACTERS.search(value):
        raise Invalid("Text cannot contain NUL or invalid Unicode characters.", hint="Remove them.")
    return value.replace("\r\n", "\n").strip()


def _save(agent: Agent, fields: Sequence[str] | None = None) -> None:
    try:
        with transaction.atomic():
            agent.save(update_fields=fields)
    except IntegrityError as error:
        raise Conflict(
            f"An agent named {agent.name} already exists.",
            hint="Choose another name, or edit that agent.",
            code="name_taken",
        ) from error


def _lock(agent: Agent) -> Agent:
    row = Agent.objects.select_for_update().filter(pk=agent.pk).first()
    if row is None:
        raise NotFound(f"{agent.name} no longer exists.", hint="It was deleted in the meantime.")
    return row
