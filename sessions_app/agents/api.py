"""Admin API for agents and API keys. Only the request that creates a key returns its text."""

from datetime import datetime, timedelta
from typing import Annotated, Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from ninja import Router, Schema, Status
from pydantic import Field, StrictBool

from catalog.models import PayloadStorage
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys
from sessions_app.agents.queries import agents_with_counts, find_agent, key_state
from sessions_app.models import Agent, ApiKey, KeyScope, Mode, Strategy
from toolcrib.lib.api_schemas import (
    CONFLICTS,
    ERRORS,
    Cursor,
    Integer,
    Limit,
    Number,
    Strict,
    bounds,
    choices,
    set_location,
)
from toolcrib.lib.errors import Invalid
from toolcrib.lib.pagination import cut_page, parse_id
from toolcrib.lib.roles import key_actor

router = Router()


class AgentOut(Schema):
    name: str
    description: str
    enabled: bool
    all_groups: bool
    groups: list[str]  # in the agent's order; empty if all_groups is true
    strategy: Annotated[str, choices(Strategy)]
    mode: Annotated[str, choices(Mode)]
    tool_threshold: int
    threshold_tokens: int
    threshold_percent: float
    catalog_budget: int
    catalog_header: str
    budget: int | None
    calls_in_flight: int
    calls_per_minute: int
    searches_per_minute: int
    cost_per_minute: int
    max_sessions: int
    payload_storage: Annotated[str, choices(PayloadStorage)]  # default, nothing, masked, all
    code_mode: bool  # it may run scripts
    runs_custom_tools: bool  # it gets custom tools over MCP too
    created_at: datetime
    last_seen_at: datetime | None
    keys: int  # valid keys
    open_sessions: int


class AgentPage(Schema):
    items: list[AgentOut]
    next_cursor: str | None


class AgentSettings(Strict):
    description: str | None = None
    groups: list[str] | None = Field(None, max_length=1000)
    all_groups: StrictBool | None = None
    strategy: Annotated[str, choices(Strategy)] | None = None
    mode: Annotated[str, choices(Mode)] | None = None
    tool_threshold: Annotated[Integer, bounds(1, 10**9)] | None = None
    threshold_tokens: Annotated[Integer, bounds(1, 10**9)] | None = None
    threshold_percent: Number | None = None
    catalog_budget: Annotated[Integer, bounds(1, 10**9)] | None = None
    catalog_header: str | None = None
    budget: Annotated[Integer, bounds(1, 10**9)] | None = None  # null: no budget
    calls_in_flight: Annotated[Integer, bounds(1, 10**9)] | None = None
    calls_per_minute: Annotated[Integer, bounds(1, 10**9)] | None = None
    searches_per_minute: Annotated[Integer, bounds(1, 10**9)] | None = None
    cost_per_minute: Annotated[Integer, bounds(1, 10**9)] | None = None
    max_sessions: Annotated[Integer, bounds(1, 10**9)] | None = None
    payload_storage: Annotated[str, choices(PayloadStorage)] | None = None
    code_mode: StrictBool | None = None
    runs_custom_tools: StrictBool | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings in the request. Null means unchanged, except for the budget."""
        sent = self.model_dump(exclude_unset=True, exclude={"groups", "all_groups", "enabled"})
        return {key: value for key, value in sent.items() if value is not None or key == "budget"}


class AgentIn(AgentSettings):
    name: str


class AgentEdit(AgentSettings):
    name: str | None = None
    enabled: StrictBool | None = None


class KeyOut(Schema):
    id: int
    name: str
    prefix: str
    scope: Annotated[str, choices(KeyScope)]
    agent: str | None
    state: Annotated[str, choices(("active", "expired", "revoked"))]  # active, expired, revoked
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class NewKey(KeyOut):
    key: str  # returned only once


class KeyPage(Schema):
    items: list[KeyOut]
    next_cursor: str | None


class KeyIn(Strict):
    name: str | None = None  # default: the agent's name
    days: Integer | None = Field(None, ge=1, le=3650)  # lifetime; default: never expires


def agent_body(agent: Agent) -> dict[str, Any]:
    body = {name: getattr(agent, name) for name in AgentOut.model_fields if hasattr(agent, name)}
    return body | {
        "groups": [link.group.group_id for link in agent.group_links.all()],
        "keys": agent.key_count,  # type: ignore[attr-defined]
        "open_sessions": agent.open_count,  # type: ignore[attr-defined]
    }


def key_body(key: ApiKey) -> dict[str, Any]:
    body = {name: getattr(key, name) for name in KeyOut.model_fields if hasattr(key, name)}
    return body | {
        "agent": key.agent.name if key.agent else None,
        "state": key_state(key, timezone.now()),
    }


@router.get("/agents", response={200: AgentPage, **ERRORS}, tags=["agents"])
def list_agents(request: HttpRequest, limit: Limit = 50, cursor: Cursor = "") -> dict[str, Any]:
    """List agents by name."""
    agents = agents_with_counts().filter(name__gt=cursor)
    items, next_cursor = cut_page(agents, limit, lambda row: row.name)
    return {"items": [agent_body(agent) for agent in items], "next_cursor": next_cursor}


@router.post("/agents", response={201: AgentOut, **ERRORS, **CONFLICTS}, tags=["agents"])
def create_agent(
    request: HttpRequest, response: HttpResponse, body: AgentIn
) -> Status[dict[str, Any]]:
    """Create an agent. `POST /agents/{name}/keys` creates a key for it."""
    agent = agent_actions.create(
        **body.settings(),
        groups=body.groups or (),
        all_groups=bool(body.all_groups),
        actor=key_actor(request),
    )
    set_location(response, "agents", agent.name)
    return Status(201, agent_body(find_agent(agent.name)))


@router.get("/agents/{name}", response={200: AgentOut, **ERRORS}, tags=["agents"])
def get_agent(request: HttpRequest, name: str) -> dict[str, Any]:
    """Get an agent with its settings."""
    return agent_body(find_agent(name))


@router.patch("/agents/{name}", response={200: AgentOut, **ERRORS, **CONFLICTS}, tags=["agents"])
def edit_agent(request: HttpRequest, name: str, body: AgentEdit) -> dict[str, Any]:
    """Update the fields in the request atomically. `groups` replaces the ordered list."""
    actor = key_actor(request)
    with transaction.atomic():
        agent = agent_actions.change(find_agent(name), actor=actor, **body.settings())
        if body.groups is not None or body.all_groups is not None:
            keep = body.groups is None and not body.all_groups
            groups = agent_actions.group_ids(agent) if keep else body.groups or ()
            agent_actions.set_groups(agent, groups, all_groups=bool(body.all_groups), actor=actor)
        if body.enabled is not None:
            agent_actions.set_enabled(agent, body.enabled, actor=actor)
    return agent_body(find_agent(agent.name))


@router.delete("/agents/{name}", response={204: None, **ERRORS}, tags=["agents"])
def delete_agent(request: HttpRequest, name: str) -> Status[None]:
    """Delete an agent: revoke its keys, end its sessions, erase arguments and results.

    Times and outcomes of its calls stay until their retention ends.
    """
    agent_actions.delete(find_agent(name), actor=key_actor(request))
    return Status(204, None)


@router.get("/agents/{name}/keys", response={200: KeyPage, **ERRORS}, tags=["keys"])
def list_agent_keys(
    request: HttpRequest, name: str, limit: Limit = 50, cursor: Cursor = ""
) -> dict[str, Any]:
    """List the keys of an agent, newest first."""
    return _key_page(limit, cursor, agent=find_agent(name))


@router.post("/agents/{name}/keys", response={201: NewKey, **ERRORS}, tags=["keys"])
def create_agent_key(
    request: HttpRequest, response: HttpResponse, name: str, body: KeyIn
) -> Status[dict[str, Any]]:
    """Create a key. Its text is only in this response."""
    agent = find_agent(name)
    expires = timezone.now() + timedelta(days=body.days) if body.days else None
    key, text = api_keys.create_key(
        agent.name if body.name is None else body.name,
        KeyScope.AGENT,
        agent=agent,
        actor=key_actor(request),
        expires_at=expires,
    )
    return _new_key(response, key, text)


@router.get("/keys", response={200: KeyPage, **ERRORS}, tags=["keys"])
def list_keys(
    request: HttpRequest,
    limit: Limit = 50,
    cursor: Cursor = "",
    scope: Annotated[str, choices(KeyScope, optional=True)] = "",
) -> dict[str, Any]:
    """List the keys of agents and users, newest first."""
    if scope and scope not in KeyScope.values:
        raise Invalid(f"scope must be one of: {', '.join(KeyScope.values)}.")
    return _key_page(limit, cursor, **({"scope": scope} if scope else {}))


@router.get("/keys/{key}", response={200: KeyOut, **ERRORS, **CONFLICTS}, tags=["keys"])
def get_key(request: HttpRequest, key: str) -> dict[str, Any]:
    """Get a key by its id or prefix."""
    return key_body(api_keys.find_key_by_reference(key))


@router.post("/keys/{key}/rotate", response={201: NewKey, **ERRORS, **CONFLICTS}, tags=["keys"])
def rotate_key(request: HttpRequest, response: HttpResponse, key: str) -> Status[dict[str, Any]]:
    """Create a replacement key. The old key stays valid for 24 hours."""
    new, text = api_keys.rotate(api_keys.find_key_by_reference(key), actor=key_actor(request))
    return _new_key(response, new, text)


@router.post("/keys/{key}/revoke", response={200: KeyOut, **ERRORS, **CONFLICTS}, tags=["keys"])
def revoke_key(request: HttpRequest, key: str) -> dict[str, Any]:
    """Revoke a key. It is rejected from the next request on."""
    row = api_keys.find_key_by_reference(key)
    api_keys.revoke(row, actor=key_actor(request))
    return key_body(api_keys.find_key_by_reference(str(row.pk)))


def _key_page(limit: int, cursor: str, **filters: Any) -> dict[str, Any]:
    keys = ApiKey.objects.select_related("agent").filter(**filters).order_by("-id")
    if cursor:
        keys = keys.filter(id__lt=parse_id(cursor))
    items, next_cursor = cut_page(keys, limit, lambda row: str(row.pk))
    return {"items": [key_body(key) for key in items], "next_cursor": next_cursor}


def _new_key(response: HttpResponse, key: ApiKey, text: str) -> Status[dict[str, Any]]:
    response["Cache-Control"] = "no-store"
    set_location(response, "keys", key.pk)
    return Status(201, key_body(key) | {"key": text})
