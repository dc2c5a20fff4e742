"""`make demo` with a real process and fewer sessions."""

from collections import Counter
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from tests.support.installation import READY, Installation, Process
from toolcrib.management.commands import demo

# Real processes: one at a time, for machines with two cores.
pytestmark = [pytest.mark.timeout(400)]
AGENTS = {"analyst", "archivist", "handyman", "pilot", "planner", "support-desk"}


@contextmanager
def started(toolcrib):
    """Start the demo. It creates its data first, which takes up to a minute on a busy machine."""
    with Process(toolcrib._argv("demo", "--turns", "1"), toolcrib.env) as process:
        toolcrib.process = process
        toolcrib.ready_line = process.wait_for_line(READY, 300)
        yield toolcrib


def items(toolcrib, path):
    return toolcrib.api("GET", f"{path}?limit=100")[1]["items"]


def events(toolcrib, sessions):
    return [
        event
        for session in sessions
        for event in items(toolcrib, f"/sessions/{session['id']}/events")
    ]


@pytest.fixture(scope="module")
def demo_data(tmp_path_factory):
    """A demo started after an interrupted first start that left an agent."""
    toolcrib = Installation(tmp_path_factory.mktemp("demo") / "data")
    process = toolcrib.command("create_agent", "left-behind", "--json")
    assert process.returncode == 0, process.stderr
    (toolcrib.data_dir / "demo").write_text("filling")
    with started(toolcrib):
        yield toolcrib


def test_the_demo_creates_servers_agents_and_calls_of_all_kinds_through_the_api(demo_data):
    assert "/setup/" in demo_data.ready_line, "no user has a password"
    servers = {server["slug"]: server["tools"] for server in items(demo_data, "/servers")}
    assert servers.pop("crm") == 0, "the demo has a failing server"
    assert set(servers) == {"analytics", "calendar", "notes", "tickets", "toolbox"}
    assert all(count >= 6 for count in servers.values()), servers
    assert {agent["name"] for agent in items(demo_data, "/agents")} == AGENTS
    assert {"daily:support", "daily:figures"} <= {
        row["group_id"] for row in items(demo_data, "/groups")
    }
    assert demo_data.api("GET", "/tools/analytics__compare_periods")[1]["state"] == "waiting"
    sessions = items(demo_data, "/sessions")
    assert {session["agent"] for session in sessions} == AGENTS
    assert {session["mode"] for session in sessions} == {"full", "deferred"}
    assert {session["strategy"] for session in sessions} == {"dispatch", "inject"}
    kinds = Counter(event["kind"] for event in events(demo_data, sessions))
    for kind in ("opened", "searched", "loaded", "implicit_load", "called", "refused", "forked"):
        assert kinds[kind], kinds
    assert kinds["called"] > 30


def test_the_demo_has_no_unintended_failures(demo_data):
    sessions = items(demo_data, "/sessions")
    refused = [event for event in events(demo_data, sessions) if event["kind"] == "refused"]
    assert Counter((event["tool_name"], event["details"]["code"]) for event in refused) == {
        ("", "over_budget"): 1,  # a group that exceeds the analyst's budget
        ("analytics__get_metric", "invalid_arguments"): 1,
        ("calendar__send_mail", "invalid_arguments"): 1,
        ("notes__delete_note", "denied"): 1,
        ("tickets__delete_ticket", "held"): 1,
        ("tickets__set_ticket_state", "invalid_arguments"): 1,
        ("toolbox__send_rocket", "unknown_tool"): 1,
    }
    # A session counts the errors of its calls, not of its loads. Two more tools fail on purpose:
    # a missing note, and a text that is not JSON.
    refused_calls = [event for event in refused if event["tool_name"]]
    assert sum(session["errors"] for session in sessions) == len(refused_calls) + 2
    searches = [event for event in events(demo_data, sessions) if event["kind"] == "searched"]
    assert {event["details"]["total"] > 0 for event in searches} == {True, False}


def test_sessions_are_spread_over_days_in_order(demo_data):
    sessions = items(demo_data, "/sessions")
    begins = [parse_datetime(session["created_at"]) for session in sessions]
    assert begins == sorted(begins, reverse=True), "the newest is first, as the list says"
    assert timedelta(days=7) < begins[0] - begins[-1] < timedelta(days=15)
    assert begins[0] <= timezone.now()
    for session in sessions:
        steps = [
            parse_datetime(event["at"])
            for event in items(demo_data, f"/sessions/{session['id']}/events")
        ]
        assert steps == sorted(steps), "a session's steps keep their order"
        assert steps[0] >= parse_datetime(session["created_at"]) - timedelta(seconds=1)
    created = [parse_datetime(agent["created_at"]) for agent in items(demo_data, "/agents")]
    assert max(created) < begins[-1], "an agent is older than its first session"


def test_a_second_start_creates_no_data(demo_data):
    before = [session["id"] for session in items(demo_data, "/sessions")]
    demo_data.process.stop()
    with started(demo_data):
        assert [session["id"] for session in items(demo_data, "/sessions")] == before
        assert "Creating demo data" not in demo_data.log


def test_the_demo_is_refused_in_an_installation_in_use(tmp_path):
    toolcrib = Installation(tmp_path / "data")
    assert toolcrib.command("create_agent", "scout", "--json").returncode == 0
    done = toolcrib.command("demo")
    assert done.returncode == 2
    assert "contains an installation" in done.stderr
    assert not (toolcrib.data_dir / "demo").exists()


def test_the_demo_is_refused_without_its_own_data_folder(db, monkeypatch):
    assert demo.find_problem("") == ""
    monkeypatch.delenv("TOOLCRIB_DATA")
    assert "run make demo" in demo.find_problem("")
