"""Elicitation: the user of the calling client decides about a call that a rule holds.

Only for rules whose approver is the caller, and for clients that declare elicitation; otherwise the
call stays held for an operator. A client that opens URLs only gets that of the approvals page. From
2026 on the question is the result of the call, which the client repeats with the answer; before, it
is a request on the stream of the call's response. Its id names the call, so that every process can
take the answer. Database code, off the event loop.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from django.conf import settings
from django.urls import reverse

from catalog.audit import Actor
from sessions_app.agents import api_keys
from sessions_app.held_calls import actions, answers
from sessions_app.models import Approver, Call, CallState
from toolcrib.lib.errors import Conflict, NotFound

FORM, URL = "form", "url"  # modes of elicitation
INPUT = "decision"  # name of the question in the result of a call
METHOD = "elicitation/create"
REQUEST_PREFIX = "toolcrib-decision-"  # then the call id
WAIT_SECONDS = 300.0  # for an answer on an open stream
SCHEMA = {
    "type": "object",
    "properties": {
        "decision": {
            "type": "string",
            "title": "Decision",
            "enum": ["allow", "deny"],
            "description": "Whether the agent may make this call, once",
        }
    },
    "required": ["decision"],
}


def mode_of(capabilities: object) -> str:
    """Return how a client can ask its user: by a form, at a URL, or not at all (empty)."""
    declared = capabilities.get("elicitation") if isinstance(capabilities, Mapping) else None
    if not isinstance(declared, Mapping):
        return ""
    if not declared or FORM in declared:
        return FORM
    return URL if URL in declared else ""


def find_question(key_digest: str, call_id: str, mode: str) -> dict[str, Any] | None:
    """Return the parameters of the question about a held call; None if an operator decides."""
    call = _find_call(key_digest, call_id)
    if call is None:
        return None
    arguments = call.arguments if len(call.arguments) <= 1000 else call.arguments[:1000] + "…"
    message = f"Allow {call.tool_name} with {arguments}? {call.hold.reason}".strip()
    if mode == URL:
        # Versions before 2026 require an id, later ones have none.
        url = settings.PUBLIC_URL + reverse("held-calls")
        return {"mode": URL, "message": message, "url": url, "elicitationId": call_id}
    return {"mode": FORM, "message": message, "requestedSchema": SCHEMA}


def is_opened(mode: str, answer: object) -> bool:
    """Return whether the user opens the page that was asked for; the decision is made there."""
    return mode == URL and isinstance(answer, Mapping) and answer.get("action") == "accept"


def take_answer(key_digest: str, call_id: str, answer: object, mode: str) -> bool:
    """Decide as the user answered; return False if the call stays held."""
    call = _find_call(key_digest, call_id)
    if call is None or not isinstance(answer, Mapping) or mode == URL:
        return False
    content = answer.get("content")
    decision = content.get("decision") if isinstance(content, Mapping) else None
    actor = Actor("agent", f"user of {call.agent.name}'s client" if call.agent else "client")
    with suppress(Conflict):  # an operator was faster
        if answer.get("action") == "accept" and decision == "allow":
            actions.allow(call_id, actor=actor)
        elif answer.get("action") == "decline" or decision == "deny":
            actions.deny(call_id, actor=actor)
        else:
            return False
    return True


def answered_call(message: Mapping[str, Any]) -> str:
    """Return the id of the call that a client's JSON-RPC response is about, or an empty text."""
    request_id = message.get("id")
    if not isinstance(request_id, str) or not request_id.startswith(REQUEST_PREFIX):
        return ""
    return request_id.removeprefix(REQUEST_PREFIX)


def _find_call(key_digest: str, call_id: str) -> Call | None:
    key = api_keys.require_agent_key(key_digest)
    assert key.agent is not None  # noqa: S101 - ensured by require_agent_key
    with suppress(NotFound):
        call = answers.find_own_call(key.agent, call_id)
        hold = getattr(call, "hold", None)
        if call.state == CallState.HELD and hold and hold.approver == Approver.CALLER:
            return call
    return None
