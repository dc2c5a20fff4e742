"""The event stream of a session over HTTP: events as they happen, and a revoked key."""

import json
import threading

import httpx2
import pytest

from tests.support.agents import make_agent
from tests.support.waiting import wait_for


@pytest.fixture
def stream(demo):
    """Open the stream of a session: its agent, its URL and the lines that arrived."""
    toolcrib, _ = demo
    agent = make_agent(toolcrib, "streamer")
    session = agent.open(groups=["mcp:demo"], mode="deferred")
    url = f"{toolcrib.url}/api/v1/sessions/{session.id}/events/stream"
    lines: list[str] = []
    opened, ended = threading.Event(), threading.Event()

    def read() -> None:
        headers = {"Authorization": f"Bearer {agent.key}"}
        with httpx2.stream("GET", url, headers=headers, timeout=60) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                opened.set()
                lines.append(line)
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    assert opened.wait(30)
    yield toolcrib, agent, session, lines, ended
    toolcrib.api("DELETE", "/agents/streamer")


def test_events_arrive_as_they_happen_until_the_key_is_revoked(stream):
    toolcrib, _agent, session, lines, ended = stream
    session.search(query="add two numbers")
    wait_for(lambda: "event: session.searched" in lines, what="the search in the stream")
    data = next(line for line in lines if line.startswith("data: "))
    assert json.loads(data.removeprefix("data: "))["session_id"] == session.id
    status, _ = toolcrib.api("PATCH", "/agents/streamer", {"enabled": False})
    assert status == 200
    assert ended.wait(30)
