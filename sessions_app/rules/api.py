"""Admin API of rules: list, edit, order, and test against recorded calls."""

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema, Status
from pydantic import Field

from sessions_app.models import Approver, Rule, RuleEffect
from sessions_app.rules import actions, presets
from sessions_app.rules.agent_rules import compile_rule
from sessions_app.rules.queries import find_rule, show_rule, show_rules
from sessions_app.rules.replay import replay
from sessions_app.rules.schemas import MatchIn, RuleEdit, RuleIn
from sessions_app.rules.validation import InvalidRule, check_match
from toolcrib.lib.api_schemas import (
    CONFLICTS,
    ERRORS,
    AgentBody,
    Cursor,
    Integer,
    Limit,
    choices,
    set_location,
)
from toolcrib.lib.errors import NotFound
from toolcrib.lib.pagination import cut_list, cut_page, parse_id
from toolcrib.lib.roles import key_actor

router = Router(tags=["rules"])
presets_router = Router(tags=["rules"])


class RuleOut(Schema):
    name: str
    effect: Annotated[str, choices(RuleEffect)] = Field(description="allow, hold or deny")
    reason: str
    enabled: bool
    position: int = Field(description="From 0; the first rule that matches decides")
    match: dict[str, Any] = Field(description="Only the parts that are set")
    approver: Annotated[str, choices(Approver)]
    created_at: datetime
    updated_at: datetime


class RulePage(Schema):
    items: list[RuleOut]
    next_cursor: str | None


class RuleOrderIn(AgentBody):
    names: list[str] = Field(description="All rules, in their new order", max_length=1000)


class PresetOut(Schema):
    """A rule by template, as the page of rules offers it."""

    key: str
    title: str
    name: str = Field(description="The name that its rule gets; {server} stands for the slug")
    effect: Annotated[str, choices(RuleEffect)] = Field(description="allow, hold or deny")
    reason: str
    match: dict[str, Any]
    needs_server: bool = Field(description="Whether a rule of it is about one server")
    is_used: bool = Field(description="Whether there is a rule of this name")


class PresetPage(Schema):
    items: list[PresetOut]
    next_cursor: str | None


class PresetIn(AgentBody):
    server: str = Field("", max_length=32, description="Slug, where the preset needs a server")


class TestIn(AgentBody):
    """A rule that need not be stored, or the name of one that is."""

    __test__ = False  # not a test class of pytest

    name: str | None = None
    effect: Annotated[str, choices(RuleEffect)] = "hold"
    match: MatchIn | None = None
    days: Integer = Field(7, ge=1, le=90)


class TestedCall(Schema):
    call_id: str
    tool_name: str
    agent: str | None
    session_id: str | None
    accepted_at: datetime
    effect: Annotated[str, choices(RuleEffect)]


class TestOut(Schema):
    examined: int = Field(description="Recorded calls of these days, at most the newest 20,000")
    matched: int
    held: int
    denied: int
    undecidable: int = Field(description="Arguments not stored or masked, or the tool deleted")
    calls: list[TestedCall] = Field(description="The newest 100 that it would hold or deny")


@router.get("", response={200: RulePage, **ERRORS})
def list_rules(request: HttpRequest, limit: Limit = 50, cursor: Cursor = "") -> dict[str, Any]:
    """List the rules in the order in which they are asked."""
    rules = Rule.objects.filter(position__gt=parse_id(cursor)) if cursor else Rule.objects.all()
    items, next_cursor = cut_page(rules, limit, lambda rule: str(rule.position))
    return {"items": [shown.body for shown in show_rules(items)], "next_cursor": next_cursor}


@router.post("", response={201: RuleOut, **ERRORS, **CONFLICTS})
def create_rule(
    request: HttpRequest, response: HttpResponse, body: RuleIn
) -> Status[dict[str, Any]]:
    """Create a rule. It is in effect from the next call on."""
    return _created(response, actions.create(body, actor=key_actor(request)))


def _created(response: HttpResponse, rule: Rule) -> Status[dict[str, Any]]:
    set_location(response, "rules", rule.name)
    return Status(201, show_rule(find_rule(rule.name)).body)


@router.post("/order", response={200: RulePage, **ERRORS})
def order_rules(request: HttpRequest, body: RuleOrderIn) -> dict[str, Any]:
    """Set the order of all rules."""
    actions.reorder(body.names, actor=key_actor(request))
    return {"items": [shown.body for shown in show_rules(Rule.objects.all())], "next_cursor": None}


@router.post("/test", response={200: TestOut, **ERRORS})
def test_rule(request: HttpRequest, body: TestIn) -> Any:
    """Count the recorded calls that a rule would have held or denied, if it alone decided."""
    if (body.name is None) == (body.match is None):
        raise InvalidRule([("match", "send either a match or the name of a rule")])
    if body.match is None:
        try:
            rule = find_rule(body.name or "")
        except NotFound as error:
            raise InvalidRule([("name", "there is no such rule")]) from error
    else:
        if body.effect not in ("allow", "hold", "deny"):
            raise InvalidRule([("effect", "the effect is allow, hold or deny")])
        rule = Rule(name="test", effect=body.effect, match=check_match(body.match))
    return replay(compile_rule(rule), body.days)


@router.get("/{name}", response={200: RuleOut, **ERRORS})
def get_rule(request: HttpRequest, name: str) -> dict[str, Any]:
    """Get a rule."""
    return show_rule(find_rule(name)).body


@router.patch("/{name}", response={200: RuleOut, **ERRORS, **CONFLICTS})
def edit_rule(request: HttpRequest, name: str, body: RuleEdit) -> dict[str, Any]:
    """Change the fields in the request. `match` replaces the whole match."""
    rule = actions.edit(find_rule(name), body, actor=key_actor(request))
    return show_rule(find_rule(rule.name)).body


@router.delete("/{name}", response={204: None, **ERRORS})
def delete_rule(request: HttpRequest, name: str) -> Status[None]:
    """Delete a rule. Later calls are not matched by it."""
    actions.delete(find_rule(name), actor=key_actor(request))
    return Status(204, None)


@presets_router.get("", response={200: PresetPage, **ERRORS})
def list_rule_presets(
    request: HttpRequest, limit: Limit = 50, cursor: Cursor = ""
) -> dict[str, Any]:
    """List the rules that can be created by template."""
    names = set(Rule.objects.values_list("name", flat=True))
    items = [
        vars(preset) | {"is_used": preset.name in names} for preset in presets.PRESETS.values()
    ]
    page, next_cursor = cut_list(items, limit, cursor)
    return {"items": page, "next_cursor": next_cursor}


@presets_router.post("/{key}/create", response={201: RuleOut, **ERRORS, **CONFLICTS})
def create_preset_rule(
    request: HttpRequest, response: HttpResponse, key: str, body: PresetIn
) -> Status[dict[str, Any]]:
    """Create the rule of a preset. It is in effect from the next call on."""
    preset = presets.find_preset(key)
    if preset.needs_server != bool(body.server):
        text = "send the slug of a server" if preset.needs_server else "this preset has no server"
        raise InvalidRule([("server", text)])
    return _created(response, actions.create(preset.rule(body.server), actor=key_actor(request)))
