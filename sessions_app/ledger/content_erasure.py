"""Erases the content of calls and sessions, and keeps the record that they took place."""

import json
from typing import Any

from django.db.models import QuerySet

from sessions_app.models import Agent, AgentSession, Call, CallAnswer, Event, EventKind, ScriptRun

BATCH = 500
QUERY_FIELDS = ("query", "pattern", "name")


def erase_calls(calls: QuerySet[Call]) -> int:
    """Erase arguments and results. Sizes, digests, times and outcomes stay."""
    return calls.exclude(arguments="", result_copy="").update(arguments="", result_copy="")


def erase_runs(runs: QuerySet[ScriptRun]) -> int:
    """Erase what scripts contained, printed and returned. Times, states and sizes stay."""
    kept = runs.exclude(code="", payload="", error="")
    return kept.update(
        code="", input="null", payload="", result="null", error="", logs="", snapshot=""
    )


def forget_answers_of_runs(runs: QuerySet[ScriptRun]) -> int:
    """Delete the whole answers of scripts; what is stored for people stays."""
    return runs.exclude(payload="").update(payload="", idempotency_key=None)


def erase_agent(agent: Agent) -> None:
    """Erase everything that an agent sent or received."""
    calls = Call.objects.filter(agent=agent)
    CallAnswer.objects.filter(call__in=calls.values("pk")).delete()
    erase_calls(calls)
    erase_runs(ScriptRun.objects.filter(agent=agent))
    calls.exclude(error_message="").update(error_message="")
    AgentSession.objects.filter(agent=agent).update(metadata="{}")
    searches = Event.objects.filter(session__agent=agent, kind=EventKind.SEARCHED)
    batch: list[Event] = []
    for event in searches.only("details").iterator(BATCH):
        event.details = _without_query(event.details)
        batch.append(event)
    Event.objects.bulk_update(batch, ["details"], BATCH)


def _without_query(text: str) -> str:
    details: dict[str, Any] = json.loads(text)
    return json.dumps({key: value for key, value in details.items() if key not in QUERY_FIELDS})
