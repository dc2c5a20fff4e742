"""Answers of calls for the agent that made them: how a call stands, or its result, once.

An answer is kept until it has arrived. The process that sends it is recorded: if that process
dies, or the connection breaks, the answer can be fetched again.
"""

from dataclasses import replace
from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from catalog import audit
from sessions_app.held_calls.ending import audit_details
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger.calls import THIS_PROCESS, CallResponse
from sessions_app.models import (
    ENDED_RUNS,
    UNFINISHED,
    Agent,
    AgentSession,
    Call,
    HeldCall,
    SessionState,
)
from sessions_app.models.encryption import decrypt_text
from toolcrib.lib.errors import NotFound
from toolcrib.lib.process_identity import is_dead
from toolcrib.lib.roles import SYSTEM, Actor

SENDING_SECONDS = 10.0  # after which an answer that has not arrived can be fetched again


def find_own_call(agent: Agent, call_id: str) -> Call:
    """Return a call of this agent. Raises NotFound, also for another agent's call."""
    rows = Call.objects.select_related("hold", "session", "answer").filter(agent=agent.pk)
    call = None if "\0" in call_id else rows.filter(call_id=call_id).first()
    if call is None:
        raise NotFound("Call not found.", hint="Check the call_id.", code="unknown_call")
    return call


def read_answer(agent: Agent, call_id: str) -> CallResponse:
    """Return how a call stands, or its result."""
    call = find_own_call(agent, call_id)
    if call.session and call.session.state == SessionState.OPEN:  # the session is in use
        rows = AgentSession.objects.filter(pk=call.session.pk, state=SessionState.OPEN)
        rows.update(last_used_at=timezone.now())
    return respond(call)


def respond(call: Call, *, has_check_call: bool = True) -> CallResponse:
    """Return the response to a call; the answer of one that was held is marked as being sent."""
    if call.state in UNFINISHED:
        return call_ledger.waiting_response(call, has_check_call=has_check_call)
    hold: HeldCall | None = getattr(call, "hold", None)
    if hold is None or hold.fetched_at is not None:
        stored = getattr(call, "answer", None)
        if stored is not None:
            return CallResponse.from_json(stored.body)
        return call_ledger.ended_response(call)
    until = timezone.now() + timedelta(seconds=SENDING_SECONDS)
    HeldCall.objects.filter(pk=hold.pk).update(sender=THIS_PROCESS, sending_until=until)
    if hold.answer:
        response = CallResponse.from_json(decrypt_text(hold.answer))
    else:
        response = call_ledger.ended_response(call)
    # A script's call is fetched by the script alone, when it continues, unless it has ended.
    is_awaited = call.run is not None and call.run.state not in ENDED_RUNS
    return response if is_awaited else replace(response, held_call=hold.pk)


def is_being_fetched(hold: HeldCall) -> bool:
    """Return whether a live process has just sent the answer."""
    if hold.sending_until is None or hold.sending_until <= timezone.now():
        return False
    return not is_dead(hold.sender)


@transaction.atomic
def confirm_arrival(held_call: int) -> None:
    """Delete an answer that the agent has received, and record that in the audit log."""
    rows = HeldCall.objects.filter(pk=held_call, fetched_at=None)
    if rows.update(fetched_at=timezone.now(), answer="", request=""):
        call = Call.objects.select_related("hold", "agent", "session").get(hold=held_call)
        actor = Actor("agent", call.agent.name, call.agent.pk) if call.agent else SYSTEM
        audit.record(actor, "call.fetch", call, after=audit_details(call) | {"state": call.state})
