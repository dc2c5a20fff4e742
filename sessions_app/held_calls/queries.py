"""Queries on held calls for pages and the API of operators."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from django.db.models import QuerySet

from catalog import audit
from sessions_app.ledger.event_details import read_value
from sessions_app.models import Call, CallState, Grant, HeldCall, SessionRead
from sessions_app.models.encryption import decrypt_text
from sessions_app.review.script_runs import highlighted
from sessions_app.review.source_code import SourceLine
from sessions_app.rules.evaluation import effective_annotations
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.redaction.redactor import redact
from toolcrib.lib.roles import Actor

STATES = (
    CallState.HELD,
    CallState.APPROVED,
    CallState.DENIED,
    CallState.EXPIRED,
)
CALLS_PER_PAGE = 50
STORY_LENGTH = 12
RECENT_DECISIONS = 10


def held_count() -> int:
    """Return the number of calls that wait for a person."""
    return Call.objects.held().count()


def held_calls() -> "QuerySet[Call]":
    """Return the calls that wait for a person, oldest first."""
    rows = Call.objects.select_related("hold", "session", "agent", "tool__approved", "run")
    return rows.held().filter(hold__isnull=False).order_by("pk")


def decided_calls() -> Sequence[Call]:
    """Return the calls that were decided last."""
    rows = Call.objects.select_related("hold", "session", "agent")
    decided = rows.filter(hold__decided_at__isnull=False).order_by("-hold__decided_at")
    return list(decided[:RECENT_DECISIONS])


@dataclass(frozen=True)
class HeldGroup:
    """Identical calls of an agent: same tool, arguments and rule. They can be decided together."""

    calls: Sequence[Call]

    @property
    def first(self) -> Call:
        return self.calls[0]

    @property
    def hold(self) -> HeldCall:
        return self.first.hold

    @property
    def arguments(self) -> object:
        """The whole arguments, masked, also if the ledger stores nothing or less."""
        if not self.hold.request:
            return read_value(self.first.arguments)
        try:
            return redact(json.loads(decrypt_text(self.hold.request))["arguments"])
        except ToolcribError as error:
            return error.message

    @property
    def annotations(self) -> Mapping[str, Any]:
        tool = self.first.tool
        return tool.approved.annotations if tool and tool.approved else {}

    @property
    def destructive(self) -> bool:
        """Return whether the tool may be destructive; MCP's default is that it may."""
        return effective_annotations(self.annotations)["destructiveHint"]

    @cached_property
    def script(self) -> list[SourceLine]:
        """The lines of the script that waits for this call; none if no script made it."""
        run = self.first.run
        return [] if run is None else highlighted(run)

    @cached_property
    def reads(self) -> list[str]:
        """The servers whose results the session was given."""
        rows = SessionRead.objects.filter(session=self.first.session_id)
        return list(rows.order_by("server_slug").values_list("server_slug", flat=True))

    @cached_property
    def story(self) -> list[Call]:
        """The calls that the session made before, newest last."""
        rows = Call.objects.filter(session=self.first.session_id, pk__lt=self.first.pk)
        return list(rows.order_by("-pk")[:STORY_LENGTH])[::-1]


def group_identical(calls: Iterable[Call]) -> list[HeldGroup]:
    """Group calls of one agent with the same tool and arguments under the same rule."""
    groups: dict[tuple[object, ...], list[Call]] = {}
    for call in calls:
        key = call.agent_id, call.hold.digest, call.hold.rule_pk
        groups.setdefault(key, []).append(call)
    return [HeldGroup(group) for group in groups.values()]


def record_read(calls: Iterable[Call], actor: Actor) -> None:
    """Record in the audit log that somebody reads the arguments of calls."""
    sessions = [call.session for call in calls if call.session is not None and call.arguments]
    audit.record_read(actor, "session.read", *sessions)


def call_body(call: Call) -> dict[str, Any]:
    """Return a held call for operators: arguments as the ledger stores them, no answer."""
    hold = call.hold
    return {
        "call_id": call.call_id,
        "state": call.state,
        "tool_name": call.tool_name,
        "server": call.server_slug,
        "agent": call.agent.name if call.agent else "",
        "session_id": call.session.session_id if call.session else "",
        "arguments": json.loads(call.arguments) if call.arguments else None,
        "rule": hold.rule_name,
        "reason": hold.reason,
        "approver": hold.approver,
        "held_at": hold.held_at,
        "expires_at": hold.expires_at,
        "decided_at": hold.decided_at,
        "decided_by": hold.decided_by,
        "comment": hold.comment,
    }


def grant_body(grant: Grant) -> dict[str, Any]:
    return {
        "id": grant.grant_id,
        "session_id": grant.session.session_id,
        "rule": grant.rule_name,
        "tools": grant.tools,
        "count": grant.count,
        "used": grant.used,
        "expires_at": grant.expires_at,
        "created_at": grant.created_at,
        "created_by": grant.created_by,
    }
