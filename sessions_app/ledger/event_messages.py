"""Events of sessions as messages: their names and bodies in event streams and webhooks.

Every event is `session.<kind>`. Some have a second name that programs look for: a load is also
`tools.loaded`, and what happens to a call is also `call.held`, `call.decided` or `call.finished`,
with the state of the call and without arguments and result.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sessions_app.ledger.event_details import read_object
from sessions_app.models import Event, EventKind

TOOLS_CHANGED = "agent.tools_changed"
CALL_NAMES = {
    EventKind.HELD: "call.held",
    EventKind.DECIDED: "call.decided",
    EventKind.CALLED: "call.finished",
    EventKind.REFUSED: "call.finished",
}
SECOND_NAMES = {**CALL_NAMES, EventKind.LOADED: "tools.loaded"}
NAMES = (*(f"session.{kind}" for kind in EventKind.values), *dict.fromkeys(SECOND_NAMES.values()))


class EventMessage(NamedTuple):
    name: str
    body: dict[str, Any]


def event_body(event: Event) -> dict[str, Any]:
    """Return an event as the API lists it."""
    return {
        "id": event.pk,
        "at": event.at,
        "kind": event.kind,
        "tool_name": event.tool_name,
        "group_id": event.group_id,
        "tokens": event.tokens,
        "details": read_object(event.details),
        "call_id": event.call.call_id if event.call else None,
    }


def messages_of(event: Event) -> Sequence[EventMessage]:
    """Return the messages of an event: one for each of its names.

    The caller has fetched `call`, `session` and the session's agent.
    """
    session = {"session_id": event.session.session_id, "agent": event.session.agent.name}
    messages = [EventMessage(f"session.{event.kind}", {**event_body(event), **session})]
    second = SECOND_NAMES.get(EventKind(event.kind))
    if second is None:
        return messages
    if event.kind not in CALL_NAMES:
        messages.append(EventMessage(second, messages[0].body))
    elif event.call is not None:
        messages.append(EventMessage(second, {**_call_body(event), **session}))
    return messages


def _call_body(event: Event) -> dict[str, Any]:
    call = event.call
    assert call is not None  # noqa: S101 - checked by the caller
    is_finished = event.kind in (EventKind.CALLED, EventKind.REFUSED)
    body: dict[str, Any] = {
        "id": event.pk,
        "at": event.at,
        "call_id": call.call_id,
        "tool_name": call.tool_name,
        "server": call.server_slug or None,
        "state": call.state if is_finished else "held",
    }
    details = read_object(event.details)
    if event.kind == EventKind.DECIDED:
        return {**body, "state": call.state, "decision": details.get("decision", "")}
    if event.kind == EventKind.HELD:
        return {**body, "rule": details.get("rule", ""), "reason": details.get("reason", "")}
    return {
        **body,
        "is_error": call.is_error,
        "error_code": call.error_code or None,
        "tokens": call.tokens,
        "duration_ms": call.duration_ms,
    }
