"""Every write to agents: who they are, which groups they have, how far they may go.

An agent has a list of groups in its own order, or all groups and those to come; never both.
Keys are minted in `sessions_app.keys`.
"""

import math
from collections.abc import Sequence
from typing import Any

from django.db import IntegrityError, transaction

from catalog import audit, preferences
from catalog.audit import Actor
from catalog.models import Group, Revision
from catalog.tools.actions import UNKEEPABLE
from sessions_app.agents import api_keys
from sessions_app.models import Agent, AgentGroup, KeyScope, Mode, Strategy
from toolcrib.lib.errors import Conflict, Invalid, NotFound

MOST = 1_000_000_000
NUMBER = range(1, MOST + 1)
LISTED = 20  # names in an error
SETTINGS: dict[str, Any] = {
    "name": str,
    "description": str,
    "catalog_header": str,
    "strategy": Strategy,
    "mode": Mode,
    "tool_threshold": NUMBER,
    "threshold_tokens": NUMBER,
    "threshold_percent": float,
    "catalog_budget": NUMBER,
    "budget": NUMBER,  # or None
    "calls_in_flight": NUMBER,
    "calls_per_minute": NUMBER,
    "searches_per_minute": NUMBER,
    "max_sessions": NUMBER,
}
TEXTS = {"description": 2_000, "catalog_header": 4_000}
# What shapes the documents an agent is given.
SEEN = {"catalog_header", "strategy", "mode", "catalog_budget"} | {
    "tool_threshold",
    "threshold_tokens",
    "threshold_percent",
}
ACTS = ("add", "remove", "up", "down")


def find_agent(name: str) -> Agent:
    agent = Agent.objects.filter(name=name).first() if name.isprintable() else None
    if agent is None:
        raise NotFound("There is no agent of this name.", hint="The list of agents has them all.")
    return agent


# --- The agent itself ---------------------------------------------------------------------------


@transaction.atomic
def create(
    name: str,
    *,
    groups: Sequence[str] = (),
    all_groups: bool = False,
    actor: Actor,
    **settings: object,
) -> Agent:
    """Make an agent. Without groups it sees no tool, which is legal."""
    checked = {key: checked_setting(key, value) for key, value in settings.items()}
    agent = Agent(name=checked_setting("name", name), **preferences.agent_defaults() | checked)
    _save(agent)
    _give(agent, groups, all_groups=all_groups)
    audit.record(actor, "agent.add", agent, after={**checked, **_groups(agent)})
    return agent


@transaction.atomic
def create_with_key(
    name: str,
    *,
    groups: Sequence[str] = (),
    all_groups: bool = False,
    actor: Actor,
    **settings: object,
) -> tuple[Agent, str]:
    """Make an agent and its first key, whose text is returned here and never again."""
    agent = create(name, groups=groups, all_groups=all_groups, actor=actor, **settings)
    return agent, api_keys.create_key(agent.name, KeyScope.AGENT, agent=agent, actor=actor)[1]


@transaction.atomic
def change(agent: Agent, *, actor: Actor, **settings: object) -> Agent:
    """Change settings. Open sessions keep the catalog they were given; limits hold at once."""
    agent = _locked(agent)
    before: dict[str, object] = {}
    after: dict[str, object] = {}
    for key, value in settings.items():
        value = checked_setting(key, value)
        if getattr(agent, key) != value:
            before[key], after[key] = getattr(agent, key), value
            setattr(agent, key, value)
    if after:
        _save(agent, list(after))
        audit.record(actor, "agent.edit", agent, before=before, after=after)
        if SEEN & after.keys():
            Revision.bump()
    return agent


def disable(agent: Agent, *, actor: Actor) -> Agent:
    """Refuse the agent's keys from the next request on."""
    return set_enabled(agent, False, actor=actor)


def enable(agent: Agent, *, actor: Actor) -> Agent:
    return set_enabled(agent, True, actor=actor)


@transaction.atomic
def set_enabled(agent: Agent, enabled: bool, *, actor: Actor) -> Agent:
    agent = _locked(agent)
    if agent.enabled != enabled:
        agent.enabled = enabled
        agent.save(update_fields=["enabled"])
        audit.record(actor, "agent.enable" if enabled else "agent.disable", agent)
    return agent


@transaction.atomic
def delete(agent: Agent, *, actor: Actor) -> None:
    """Remove an agent with its keys, its sessions and their calls. The audit log stays."""
    agent = _locked(agent)
    before = {"keys": agent.keys.count(), "sessions": agent.sessions.count(), **_groups(agent)}
    audit.record(actor, "agent.delete", agent, before=before)
    agent.delete()


# --- Its groups ---------------------------------------------------------------------------------


@transaction.atomic
def set_groups(
    agent: Agent, groups: Sequence[str] = (), *, all_groups: bool = False, actor: Actor
) -> Agent:
    """Give exactly these groups, in this order; or all, including those to come."""
    agent = _locked(agent)
    before = _groups(agent)
    _give(agent, groups, all_groups=all_groups)
    after = _groups(agent)
    if after != before:
        audit.record(actor, "agent.groups", agent, before=before, after=after)
        Revision.bump()
    return agent


@transaction.atomic
def reorder_groups(agent: Agent, act: str, group_id: str, *, actor: Actor) -> Agent:
    """Add one group at the end, remove one, or move one up or down."""
    agent = _locked(agent)
    if act not in ACTS:
        raise Invalid(f"A group is one of: {', '.join(ACTS)}.", hint="Choose what to do with it.")
    if agent.all_groups:
        raise Conflict(f"{agent} has all groups.", hint="Let it have chosen groups first.")
    ids = group_ids(agent)
    if act == "add":
        return set_groups(agent, [*ids, group_id], actor=actor)
    if group_id not in ids:
        raise NotFound(f"{agent} does not have this group.", hint="It may have been removed.")
    place = ids.index(group_id)
    ids.pop(place)
    if act != "remove":
        ids.insert(max(place - 1, 0) if act == "up" else place + 1, group_id)
    return set_groups(agent, ids, actor=actor)


def group_ids(agent: Agent) -> list[str]:
    """Return the ids of the groups that were chosen for an agent, in its order."""
    return list(agent.group_links.values_list("group__group_id", flat=True))


def _give(agent: Agent, wanted: Sequence[str], *, all_groups: bool) -> None:
    if all_groups and wanted:
        raise Invalid("An agent has chosen groups or all of them, not both.", hint="Give one.")
    ids = list(dict.fromkeys(wanted))
    found = Group.objects.in_bulk([one for one in ids if one.isprintable()], field_name="group_id")
    unknown = [one for one in ids if one not in found]
    if unknown:
        known = list(Group.objects.values_list("group_id", flat=True))
        raise NotFound(
            f"There is no group called {_listed(unknown)}.",
            hint=f"These exist: {_listed(known)}." if known else "There are no groups yet.",
            details={"unknown": unknown[:LISTED]},
        )
    agent.group_links.all().delete()
    AgentGroup.objects.bulk_create(
        AgentGroup(agent=agent, group=found[one], position=place) for place, one in enumerate(ids)
    )
    if agent.all_groups != all_groups:
        agent.all_groups = all_groups
        agent.save(update_fields=["all_groups"])


def _groups(agent: Agent) -> dict[str, object]:
    return {"groups": "all" if agent.all_groups else group_ids(agent)}


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(one[:80] for one in names[:LISTED])
    return f"{shown} and {len(names) - LISTED} more" if len(names) > LISTED else shown


# --- Rules --------------------------------------------------------------------------------------


def checked_setting(key: str, value: Any) -> Any:
    """Return the value as it is kept, or say what this setting takes."""
    rule = SETTINGS.get(key)
    if rule is None:
        raise Invalid(f"{key} is not a setting of an agent.", hint=f"Known: {', '.join(SETTINGS)}.")
    if key == "budget" and value is None:
        return None
    if isinstance(rule, range):
        if not isinstance(value, int) or isinstance(value, bool) or value not in rule:
            raise Invalid(
                f"{key} is a whole number from {rule.start} to {rule.stop - 1:,}.",
                hint="Leave it out for no budget." if key == "budget" else "",
            )
        return value
    if rule is float:
        return _checked_percent(key, value)
    if rule is str:
        return _checked_name(value) if key == "name" else _checked_text(key, value)
    if value not in rule.values:
        raise Invalid(f"{key} is one of: {', '.join(rule.values)}.")
    return str(value)


def _checked_percent(key: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 < value <= 100:
        raise Invalid(f"{key} is a number over 0 and at most 100.")
    return float(value)


def _checked_name(value: Any) -> str:
    name = value.strip() if isinstance(value, str) else ""
    if not 0 < len(name) <= 80 or not name.isprintable():
        raise Invalid("An agent's name has 1 to 80 printable characters.", hint="Such as scout.")
    if "/" in name or name in (".", ".."):
        raise Invalid(
            "An agent's name is part of an address, so it has no / and more than dots.",
            hint="Use - in its place.",
        )
    return name


def _checked_text(key: str, value: Any) -> str:
    most = TEXTS[key]
    if not isinstance(value, str) or len(value) > most:
        raise Invalid(f"{key} is a text of at most {most:,} characters.")
    if UNKEEPABLE.search(value):
        raise Invalid("A text cannot hold NUL or broken Unicode characters.", hint="Remove them.")
    return value.replace("\r\n", "\n").strip()


def _save(agent: Agent, fields: Sequence[str] | None = None) -> None:
    try:
        with transaction.atomic():
            agent.save(update_fields=fields)
    except IntegrityError as error:
        raise Conflict(
            f"There is an agent called {agent.name} already.",
            hint="Choose another name, or change that agent.",
            code="name_taken",
        ) from error


def _locked(agent: Agent) -> Agent:
    found = Agent.objects.select_for_update().filter(pk=agent.pk).first()
    if found is None:
        raise NotFound(f"{agent.name} is gone.", hint="Somebody deleted it meanwhile.")
    return found
