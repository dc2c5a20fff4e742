"""Event stream of a session: server-sent events from the ledger, in the order of their commits.

A stream waits for the topic of its session, as open pages do (live_updates.py), and then reads
the events that it has not sent. So nothing is lost between two reads, and `Last-Event-ID` resumes.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from asgiref.sync import sync_to_async
from django.core.serializers.json import DjangoJSONEncoder
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from ninja import Router

from catalog.models import Revision
from sessions_app.agents import rate_limits
from sessions_app.agents.rate_limits import REQUEST_COST
from sessions_app.dispatch import key_revocation
from sessions_app.ledger.event_messages import TOOLS_CHANGED, messages_of
from sessions_app.models import UNFINISHED, AgentSession, Call, Event, SessionState
from sessions_app.sessions import lifecycle, loading
from sessions_app.sessions.scope import scope_of_session
from toolcrib.lib.api_schemas import ERROR_BODIES, ERRORS
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import Invalid, ToolcribError
from toolcrib.lib.roles import key_actor
from toolcrib.runtime.live_updates import STREAM_HEADERS, Stream

router = Router(tags=["sessions"])

MAX_AGENT_STREAMS = 100
READ_EVENTS = 200  # at once
NAMED_TOOLS = 50  # in a message about changed tools

_open_streams: Counter[int] = Counter()  # by agent


class TooManyStreams(ToolcribError):
    code = "too_many_streams"
    status = 429

    def __init__(self) -> None:
        super().__init__(
            f"This agent has {MAX_AGENT_STREAMS} event streams open.",
            hint="Close a stream; one is enough for a session.",
            details={"retry_after": 30},
        )


class Position:
    """What a stream has sent: the last event, and how many of its messages."""

    def __init__(self, event: int, messages: int | None = None) -> None:
        self.event, self.messages = event, messages  # None: all of them

    @classmethod
    def parse(cls, text: str) -> "Position":
        """Read a Last-Event-ID. Raises Invalid."""
        event, dot, messages = text.partition(".")
        parts = [event, messages] if dot else [event]
        if not all(part.isascii() and part.isdecimal() and len(part) < 19 for part in parts):
            raise Invalid(
                "The Last-Event-ID was not issued by this stream.",
                hint="Send the id of the last event that you received, or none.",
            )
        return cls(int(event), int(messages) if dot else None)


class SessionStream(Stream):
    """The events of one session, for a holder of a key."""

    def __init__(self, session: AgentSession, key: int, position: Position) -> None:
        super().__init__({f"session:{session.session_id}", "catalog"})
        self.key = key  # of key_revocation.Cancellable
        self._agent, self._session = session.agent_id, session.session_id
        self._position = position
        self._tools: dict[str, int | None] = {}

    def end(self, reason: ToolcribError) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[str]:
        _open_streams[self._agent] += 1
        key_revocation.running.add(self)
        try:
            await run_in_db_thread(self._read_tools)
            async for text in self.wakeups(self._read):
                yield text
        finally:
            key_revocation.running.discard(self)
            _open_streams[self._agent] -= 1

    async def _read(self, topics: set[str]) -> str:
        text, is_ended = await run_in_db_thread(self._read_all, "catalog" in topics)
        if is_ended:
            self.close()
        return text

    def _read_all(self, catalog_changed: bool) -> tuple[str, bool]:
        """Return what is new as text, and whether nothing can follow."""
        session = AgentSession.objects.select_related("agent").filter(session_id=self._session)
        found = session.first()
        if found is None:
            return "", True
        is_ended = has_ended(found)  # before the events: an event may be written in between
        parts = [self._read_events(found)]
        if catalog_changed and not is_ended:
            before, self._tools = self._tools, _tools_of(found)
            if before != self._tools:
                parts.append(_format(TOOLS_CHANGED, _describe_change(found, before, self._tools)))
        return "".join(parts), is_ended

    def _read_tools(self) -> None:
        session = AgentSession.objects.select_related("agent").get(session_id=self._session)
        self._tools = _tools_of(session)

    def _read_events(self, session: AgentSession) -> str:
        parts: list[str] = []
        while rows := self._next_events(session):
            for event in rows:
                messages = messages_of(event)
                is_resumed = event.pk == self._position.event
                sent = self._position.messages or 0 if is_resumed else 0
                for number, message in enumerate(messages[sent:], sent + 1):
                    is_last = number == len(messages)
                    event_id = str(event.pk) if is_last else f"{event.pk}.{number}"
                    parts.append(_format(message.name, message.body, event_id))
                self._position = Position(event.pk)
            if len(rows) < READ_EVENTS:
                break
        return "".join(parts)

    def _next_events(self, session: AgentSession) -> list[Event]:
        rows = Event.objects.filter(session=session).select_related("call").order_by("pk")
        is_partly_sent = self._position.messages is not None
        after = {"pk__gte" if is_partly_sent else "pk__gt": self._position.event}
        events = list(rows.filter(**after)[:READ_EVENTS])
        for event in events:
            event.session = session
        return events


def has_ended(session: AgentSession) -> bool:
    """Return whether a session is closed and none of its calls can still end."""
    if loading.current_state(session) == SessionState.OPEN:
        return False
    return not Call.objects.filter(session=session, state__in=UNFINISHED).exists()


def _tools_of(session: AgentSession) -> dict[str, int | None]:
    """Return the tools that the agent can use in this session, with their definitions."""
    offered = scope_of_session(session).offered
    return {tool.name: tool.approved.pk if tool.approved else None for tool in offered}


def _describe_change(
    session: AgentSession, before: dict[str, int | None], after: dict[str, int | None]
) -> dict[str, Any]:
    lists = {
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "changed": sorted(
            name for name in before.keys() & after.keys() if before[name] != after[name]
        ),
    }
    return {
        "session_id": session.session_id,
        "agent": session.agent.name,
        "revision": Revision.objects.values_list("number", flat=True).first() or 0,
        **{name: names[:NAMED_TOOLS] for name, names in lists.items()},
        **{f"{name}_count": len(names) for name, names in lists.items()},
    }


def _format(name: str, body: dict[str, Any], event_id: str = "") -> str:
    data = json.dumps(body, cls=DjangoJSONEncoder, ensure_ascii=False)
    prefix = f"id: {event_id}\n" if event_id else ""
    return f"{prefix}event: {name}\ndata: {data}\n\n"


LAST_EVENT_ID = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "description": "The id of the last event that was received: the stream goes on after it. "
    "Without it, the stream starts with what happens from now on; 0 is the beginning.",
    "schema": {"type": "string", "maxLength": 40},
}
STREAM_RESPONSE = {
    "description": "Server-sent events: `session.<kind>` with the kinds of the session's events, "
    "`tools.loaded`, `call.held`, `call.decided`, `call.finished` and `agent.tools_changed`.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


@router.get(
    "/sessions/{session_id}/events/stream",
    response={200: None, 204: None, **ERRORS, 429: ERROR_BODIES[429]},
    operation_id="stream_session_events",
    openapi_extra={"parameters": [LAST_EVENT_ID], "responses": {200: STREAM_RESPONSE}},
)
async def stream_events(request: HttpRequest, session_id: str) -> HttpResponseBase:
    """Stream the session's events as they are committed, as server-sent events.

    A comment follows after 15 seconds without an event. The stream ends with the session; then the
    answer is 204, which tells clients not to reconnect.
    """
    stream = await sync_to_async(_open_stream)(request, session_id)
    if stream is None:
        return HttpResponse(status=204)
    return StreamingHttpResponse(stream, content_type="text/event-stream", headers=STREAM_HEADERS)


def _open_stream(request: HttpRequest, session_id: str) -> SessionStream | None:
    agent = request.agent  # type: ignore[attr-defined]
    rate_limits.check_cost(agent, REQUEST_COST)
    session = lifecycle.find_session(agent, session_id)
    events = Event.objects.filter(session=session)
    last = events.order_by("pk").values_list("pk", flat=True).last() or 0
    known = request.headers.get("Last-Event-ID", "")
    position = Position.parse(known) if known else Position(last)
    if has_ended(session) and position.event >= last and position.messages is None:
        return None
    if _open_streams[session.agent_id] >= MAX_AGENT_STREAMS:
        raise TooManyStreams
    return SessionStream(session, key_actor(request).id or 0, position)
