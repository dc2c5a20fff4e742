"""Operator API: held calls, decisions about them, and grants."""

from datetime import datetime
from typing import Annotated, Any, Literal

from django.http import HttpRequest
from ninja import Query, Router, Schema, Status
from pydantic import Field, model_validator

from sessions_app.held_calls import actions
from sessions_app.held_calls.queries import STATES, call_body, grant_body, record_read
from sessions_app.models import Approver, Call, CallState, Grant
from sessions_app.sessions import lifecycle
from toolcrib.lib.api_schemas import (
    CONFLICTS,
    ERRORS,
    Cursor,
    Integer,
    Limit,
    Number,
    Strict,
    choices,
)
from toolcrib.lib.errors import Invalid, ToolcribError
from toolcrib.lib.pagination import cut_page, parse_id
from toolcrib.lib.payloads import check_value
from toolcrib.lib.roles import key_actor

router = Router(tags=["calls"])
MAX_GRANT_SECONDS = 365 * 86_400


class HeldCallOut(Schema):
    call_id: str
    state: Annotated[str, choices(CallState)]
    tool_name: str
    server: str
    agent: str
    session_id: str
    arguments: Any = Field(description="As the ledger stores them: masked, and cut if long")
    rule: str = Field(description="The name of the rule that held the call")
    reason: str
    approver: Annotated[str, choices(Approver)]
    held_at: datetime
    expires_at: datetime
    decided_at: datetime | None
    decided_by: str
    comment: str


class HeldCallPage(Schema):
    items: list[HeldCallOut]
    next_cursor: str | None


class GrantIn(Strict):
    """Which later calls of the session pass the rule that held this one."""

    tools: list[str] = Field([], max_length=actions.MAX_PATTERNS, description="Globs on names")
    count: Integer | None = Field(None, ge=1, le=1_000_000, description="Number of calls")
    expires_in: Number | None = Field(None, gt=0, le=MAX_GRANT_SECONDS, description="Seconds")


class DecisionIn(Strict):
    decision: Literal["allow", "deny"]
    scope: Literal["once", "session"] = "once"
    comment: str = Field("", max_length=actions.MAX_COMMENT, description="Told to the agent")
    grant: GrantIn | None = Field(None, description="With the scope session")

    @model_validator(mode="after")
    def check_scope(self) -> "DecisionIn":
        if self.decision == "deny" and self.scope == "session":
            raise ValueError("a call is denied once; make a rule to deny more")
        if self.grant is not None and self.scope != "session":
            raise ValueError("a grant needs the scope session")
        return self


class DecisionsIn(DecisionIn):
    call_ids: list[str] = Field(min_length=1, max_length=actions.MAX_BULK)


class DecidedOut(Schema):
    call_id: str
    state: Annotated[str, choices(CallState)] | None = None
    error: dict[str, Any] | None = None


class DecisionsOut(Schema):
    items: list[DecidedOut]


class GrantOut(Schema):
    id: str
    session_id: str
    rule: str
    tools: list[str]
    count: int | None
    used: int
    expires_at: datetime | None
    created_at: datetime
    created_by: str


class GrantPage(Schema):
    items: list[GrantOut]
    next_cursor: str | None


class PageIn(Strict):
    limit: Limit = 50
    cursor: Cursor = ""


class ListIn(PageIn):
    state: Annotated[str, choices(CallState, optional=True)] = ""


@router.get("/calls", response={200: HeldCallPage, **ERRORS})
def list_held_calls(request: HttpRequest, options: Query[ListIn]) -> dict[str, Any]:
    """List the calls that a rule has held, newest first."""
    if options.state and options.state not in CallState.values:
        raise Invalid(f"state must be one of: {', '.join(STATES)}.")
    rows = Call.objects.select_related("hold", "session", "agent").filter(hold__isnull=False)
    if options.state:
        rows = rows.filter(state=options.state)
    if options.cursor:
        rows = rows.filter(pk__lt=parse_id(options.cursor))
    page, cursor = cut_page(rows.order_by("-pk"), options.limit, lambda row: str(row.pk))
    record_read(page, key_actor(request))
    return {"items": [call_body(call) for call in page], "next_cursor": cursor}


@router.post("/calls/{call_id}/decision", response={200: HeldCallOut, **ERRORS, **CONFLICTS})
def decide_call(request: HttpRequest, call_id: str, body: DecisionIn) -> dict[str, Any]:
    """Allow a held call, once or for its session, or deny it."""
    return call_body(actions.find_call(_decide(request, call_id, body).call_id))


@router.post("/calls/decisions", response={200: DecisionsOut, **ERRORS})
def decide_calls(request: HttpRequest, body: DecisionsIn) -> dict[str, Any]:
    """Decide about several held calls. Each succeeds or fails on its own."""
    items: list[dict[str, Any]] = []
    for call_id in dict.fromkeys(body.call_ids):
        try:
            call = _decide(request, call_id, body)
            items.append({"call_id": call_id, "state": call.state})
        except ToolcribError as error:
            items.append({"call_id": call_id, **error.as_json()})
    return {"items": items}


def _decide(request: HttpRequest, call_id: str, body: DecisionIn) -> Call:
    check_value([body.comment, body.grant.tools if body.grant else []], "")
    actor = key_actor(request)
    if body.decision == "deny":
        return actions.deny(call_id, actor=actor, comment=body.comment)
    grant = None
    if body.scope == "session":
        terms = body.grant
        grant = actions.GrantTerms(*((terms.tools, terms.count, terms.expires_in) if terms else ()))
    return actions.allow(call_id, actor=actor, comment=body.comment, grant=grant)


@router.get("/sessions/{session_id}/grants", response={200: GrantPage, **ERRORS})
def list_grants(request: HttpRequest, session_id: str, options: Query[PageIn]) -> dict[str, Any]:
    """List the grants of a session, oldest first."""
    session = lifecycle.find_session(None, session_id)
    rows = Grant.objects.select_related("session").filter(session=session).order_by("pk")
    if options.cursor:
        rows = rows.filter(pk__gt=parse_id(options.cursor))
    page, cursor = cut_page(rows, options.limit, lambda row: str(row.pk))
    return {"items": [grant_body(grant) for grant in page], "next_cursor": cursor}


@router.delete("/grants/{grant_id}", response={204: None, **ERRORS})
def delete_grant(request: HttpRequest, grant_id: str) -> Status[None]:
    """End a grant: later calls are held again."""
    actions.delete_grant(grant_id, actor=key_actor(request))
    return Status(204, None)
