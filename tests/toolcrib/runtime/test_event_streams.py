"""Event streams of sessions: names, order, resuming, limits and ends."""

import json
import re

import pytest

from sessions_app.ledger.event_messages import NAMES
from sessions_app.models import AgentSession, Event
from tests.support.agent_client import add_tools, make_agent_client
from toolcrib.runtime import event_streams
from toolcrib.runtime.event_streams import Position, SessionStream
from toolcrib.runtime.live_updates import LiveUpdates


@pytest.fixture
def session(db):
    add_tools("github", "create_issue", "list_issues", "search_code")
    return make_agent_client("scout", mode="deferred").open()


def stream_of(session, position="0"):
    row = AgentSession.objects.select_related("agent").get(session_id=session.id)
    stream = SessionStream(row, key=1, position=Position.parse(position))
    stream._read_tools()
    return stream


def read(stream, catalog_changed=False):
    """Return the messages that a stream sends now, as (id, name, body)."""
    text, _ = stream._read_all(catalog_changed)
    found = re.findall(r"(?:id: (.*)\n)?event: (.*)\ndata: (.*)\n\n", text)
    return [(event_id, name, json.loads(data)) for event_id, name, data in found]


def names(messages):
    return [name for _, name, _ in messages]


def test_every_event_is_sent_once_under_each_of_its_names(session):
    stream = stream_of(session)
    session.load("mcp:github", "create_issue")
    session.call("nothing_of_that_name")
    sent = read(stream)
    assert names(sent) == [
        "session.opened",
        "session.loaded",
        "tools.loaded",
        "session.refused",
        "call.finished",
    ]
    assert set(names(sent)) <= set(NAMES)
    assert read(stream) == []
    events = list(Event.objects.order_by("pk").values_list("pk", flat=True))
    assert [int(event_id.partition(".")[0]) for event_id, _, _ in sent] == [
        events[0], events[1], events[1], events[2], events[2],
    ]  # fmt: skip
    finished = sent[-1][2]
    assert finished["state"] == "refused"
    assert finished["session_id"] == session.id
    assert not {"arguments", "result", "content"} & finished.keys()


def test_the_last_event_id_resumes_after_every_single_message(session):
    session.load("mcp:github", "create_issue")
    session.search("issues")
    sent = read(stream_of(session))
    assert len(sent) == 4
    for number, (event_id, _, _) in enumerate(sent, 1):
        assert read(stream_of(session, event_id)) == sent[number:]


@pytest.mark.parametrize("wrong", ["x", "1.", "-1", "1.x", "9" * 19])
def test_an_unknown_last_event_id_is_rejected(session, wrong):
    response = session.get("/events/stream", Last_Event_ID=wrong)
    assert response.status == 422
    assert "Last-Event-ID" in response["error"]["message"]


def test_changes_of_the_tools_are_named(session):
    stream = stream_of(session)
    read(stream)
    assert read(stream, catalog_changed=True) == []
    add_tools("slack", "post_message")
    (message,) = read(stream, catalog_changed=True)
    assert message[:2] == ("", "agent.tools_changed")
    assert message[2]["added"] == ["slack__post_message"]
    assert message[2]["added_count"] == 1


def test_a_stream_ends_with_its_session_and_is_then_not_reopened(session):
    stream = stream_of(session)
    assert stream._read_all(False)[1] is False
    session.post("/close")
    text, is_ended = stream._read_all(False)
    assert is_ended
    assert "event: session.closed" in text
    last = Event.objects.order_by("pk").last().pk
    assert session.get("/events/stream", Last_Event_ID=str(last)).status == 204
    session_row = AgentSession.objects.get(session_id=session.id)
    session_row.delete()
    assert stream._read_all(False) == ("", True)


def test_an_agent_has_a_limited_number_of_streams(session, monkeypatch):
    agent = AgentSession.objects.get(session_id=session.id).agent_id
    monkeypatch.setitem(event_streams._open_streams, agent, event_streams.MAX_AGENT_STREAMS)
    response = session.get("/events/stream")
    assert response.status == 429
    assert response["error"]["code"] == "too_many_streams"


def test_another_agent_s_session_is_not_found(session):
    stranger = make_agent_client("stranger")
    assert stranger.send("GET", f"/sessions/{session.id}/events/stream").status == 404


def test_an_event_committed_late_with_a_lower_number_is_noticed(session):
    """As PostgreSQL does: another transaction took the number earlier and committed later."""
    row = AgentSession.objects.get(session_id=session.id)
    other = make_agent_client("other").open()
    updates = LiveUpdates()
    updates._read()
    last = Event.objects.order_by("pk").last()
    late = Event(pk=last.pk + 1, session=row, at=last.at, kind="catalog")
    Event.objects.create(
        pk=last.pk + 2,
        session=AgentSession.objects.get(session_id=other.id),
        at=last.at,
        kind="catalog",
    )
    assert f"session:{session.id}" not in updates._read()
    late.save(force_insert=True)
    assert f"session:{session.id}" in updates._read()
    assert f"session:{session.id}" not in updates._read()
