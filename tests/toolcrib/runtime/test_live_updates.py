"""Live updates: what changed while a page was on its way to its reader."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from catalog.models import Tool, ToolState
from sessions_app.models import Call, Event
from tests.support.factories import make_call, make_event, make_server, make_session, make_tool
from toolcrib.runtime import live_updates
from toolcrib.runtime.live_updates import EVERYTHING, PageStream, read_recent_changes

pytestmark = pytest.mark.django_db


def record_event(session, seconds_ago=0):
    event = make_event(session, "searched", query="rain", total=0)
    Event.objects.filter(pk=event.pk).update(at=timezone.now() - timedelta(seconds=seconds_ago))


def test_only_changes_since_the_page_was_asked_for_are_reported():
    old, new = make_session(), make_session()
    record_event(old, seconds_ago=30)
    record_event(new)

    changed = read_recent_changes(10)

    assert {"sessions", f"session:{new.session_id}"} <= changed
    assert f"session:{old.session_id}" not in changed
    assert f"session:{old.session_id}" in read_recent_changes(60)


def test_definitions_and_calls_that_wait_for_a_person_have_their_own_topic():
    updates = live_updates.LiveUpdates()
    tool = make_tool(make_server(slug="weather"), "get_forecast")
    call = make_call(make_session(), tool)
    updates._read()
    assert "approvals" not in updates._read()
    Tool.objects.filter(pk=tool.pk).update(state=ToolState.WAITING)
    assert "approvals" in updates._read()
    assert "approvals" not in updates._read()
    Call.objects.filter(pk=call.pk).update(state="held", accepted_at=timezone.now())
    assert "approvals" in updates._read()
    assert "approvals" in read_recent_changes(10)
    Call.objects.filter(pk=call.pk).update(state="succeeded")
    assert "approvals" in updates._read()


@pytest.mark.parametrize(
    ("address", "part", "topics"),
    [
        ("/", "attention", "servers catalog approvals sessions"),
        ("/", "answer", "servers catalog approvals sessions"),
        ("/", "nav", "servers catalog approvals"),
        ("/approvals", "reviews", "approvals catalog"),
        ("/servers/weather", "server-live", "server:weather"),
        ("/servers/weather", "server-actions", "server:weather"),
    ],
)
def test_the_parts_of_a_page_that_may_change_are_always_live(address, part, topics, client, admin):
    make_server(slug="weather")
    client.force_login(admin)
    page = " ".join(client.get(address).content.decode().split())
    found = re.search(rf'<[^<]*id="{part}"[^<]*data-live="([^"]*)"', page)
    assert found
    assert found[1] == topics


def test_after_many_events_or_a_long_time_everything_counts_as_changed(monkeypatch):
    record_event(make_session())

    assert read_recent_changes(live_updates.MAX_AGE + 1) == {EVERYTHING}
    monkeypatch.setattr(live_updates, "MAX_RECENT", 1)
    assert read_recent_changes(10) == {EVERYTHING}


@pytest.mark.parametrize(
    ("text", "age"), [("1500", 1.5), ("", 0), ("-1", 0), ("²", 0), ("9" * 12, 0)]
)
def test_an_age_is_read_in_milliseconds(text, age):
    assert live_updates._read_age(text) == age


def test_a_stream_is_told_its_own_topics_only():
    stream = PageStream({"servers"})
    stream.notify({"sessions"})
    assert not stream._changed.is_set()
    stream.notify({"servers", "sessions"})
    assert stream._pending == {"servers"}
