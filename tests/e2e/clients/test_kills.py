"""Clients of the handshake era go on in their session after a kill in the middle of their calls.

The seven libraries run at the same time, so that one kill is a round of each. KILL_ROUNDS is the
number of rounds.
"""

import os
import signal
import threading
from contextlib import ExitStack

import pytest

from sessions_app.mcp.tool_calls import FIRST_EVENT_SECONDS
from tests.e2e.clients.test_libraries import dispatch, shown
from tests.support.agent_programs import Home, gemini, interrupt
from tests.support.client_programs import ClientProgram, argv_of
from tests.support.client_table import BY_TITLE
from tests.support.mcp_clients import make_unique_agent
from tests.support.scripted_models import scripted_provider, tool_results
from tests.support.waiting import scaled, wait_for

ROUNDS = int(os.environ.get("KILL_ROUNDS", "20"))
LIBRARIES = [
    BY_TITLE[title]
    for title in (
        "TypeScript SDK 1",
        "Python SDK 1",
        "CrewAI",
        "Google ADK",
        "mcp-use",
        "smolagents",
        "AutoGen",
    )
]
pytestmark = [
    pytest.mark.timeout(2_400),
    pytest.mark.on_demand,
    *(pytest.mark.needs_client(client.environment) for client in LIBRARIES),
]
ANSWER = "It is done."


@pytest.fixture
def sessions(toolcrib):
    """A session of each library, opened over REST: its URL is that of the client."""
    opened = {}
    for client in LIBRARIES:
        agent = make_unique_agent(toolcrib, mode="deferred")
        opened[client.title] = agent.open()
    return opened


def make_observer(toolcrib):
    """Create the agent that asks the server again and again what it runs."""
    return make_unique_agent(toolcrib, mode="deferred", calls_per_minute=100_000)


def start(client, session, folder):
    argv = argv_of(client, session.agent, f"/{session.id}")
    return ClientProgram(argv, folder / client.slug)


def begin_wait(program, name, seconds):
    arguments = {"name": "workshop__wait", "arguments": {"name": name, "seconds": seconds}}
    return program.send("call", name="deferred_tool_call", arguments=arguments)


def begun(session):
    return set(session.call("workshop__cancelled")["structured_content"]["begun"])


def wait_until_begun(session, names):
    wait_for(lambda: set(names) <= begun(session), 60, what="every server waits")


def wait_until_resumable(session, names):
    """Wait until the server has all calls, and until their responses can be resumed."""
    wait_until_begun(session, names)
    session.call("workshop__wait", {"seconds": 2 * FIRST_EVENT_SECONDS})


def check_sessions(sessions):
    """Check that each session is open, and that its agent has no other."""
    for title, session in sessions.items():
        assert session.get()["state"] == "open", title
        (only,) = session.agent.send("GET", "/sessions").json["items"]
        assert (only["id"], only["calls"] > ROUNDS) == (session.id, True), title


def test_libraries_go_on_after_toolcrib_is_killed_during_their_calls(toolcrib, sessions, tmp_path):
    observer = make_observer(toolcrib)
    with ExitStack() as stack:
        programs = {
            client.title: stack.enter_context(start(client, sessions[client.title], tmp_path))
            for client in LIBRARIES
        }
        for number in range(ROUNDS):
            names = {title: f"{title} {number}" for title in programs}
            waits = {
                title: begin_wait(program, names[title], 3_600)
                for title, program in programs.items()
            }
            wait_until_resumable(observer.open(), names.values())
            toolcrib.kill()
            toolcrib.start()
            for title, program in programs.items():
                assert "waited" not in shown(program.wait(waits[title])), title
                again = dispatch(program, "weather__get_forecast", city="Oslo")
                assert "sunny" in shown(again), (title, number, again)
    check_sessions(sessions)


def test_libraries_that_are_killed_during_their_calls_go_on(toolcrib, sessions, tmp_path):
    observer = make_observer(toolcrib).open()
    for number in range(ROUNDS):
        with ExitStack() as stack:
            names = []
            for client in LIBRARIES:
                program = stack.enter_context(start(client, sessions[client.title], tmp_path))
                assert "sunny" in shown(dispatch(program, "weather__get_forecast", city="Oslo"))
                names.append(f"{client.title}, killed {number}")
                begin_wait(program, names[-1], 5)
            wait_until_begun(observer, names)
    check_sessions(sessions)


@pytest.mark.needs_client("gemini")
def test_gemini_cli_goes_on_after_toolcrib_is_killed_during_its_calls(toolcrib, tmp_path):
    agent = make_unique_agent(toolcrib, mode="deferred")
    observer = make_observer(toolcrib)
    names = [f"Gemini CLI {number}" for number in range(ROUNDS)]
    turns = [waiting(name, 3_600) for name in names]
    last = [
        ("deferred_tool_call", {"name": "weather__get_forecast", "arguments": {"city": "Oslo"}})
    ]
    started = [threading.Event() for _ in names]  # Toolcrib, after each kill
    before = {number + 1: event.wait for number, event in enumerate(started)}
    with scripted_provider(*turns, last, ANSWER, is_agent=True, before=before) as model:
        home = Home(tmp_path, toolcrib.url, agent.key, model)
        process = home.start(gemini(home))
        try:
            for name, event in zip(names, started, strict=True):
                wait_until_resumable(observer.open(), [name])
                toolcrib.kill()
                toolcrib.start()
                event.set()
            assert process.wait(scaled(120)) == 0
        finally:
            for event in started:
                event.set()
            interrupt(process)
    assert "sunny" in tool_results(model.requests[-1])[-1]
    (only,) = agent.send("GET", "/sessions").json["items"]
    assert (only["state"], only["calls"]) == ("open", ROUNDS + 1)


@pytest.mark.needs_client("gemini")
def test_gemini_cli_that_is_killed_during_its_calls_goes_on(toolcrib, tmp_path):
    session = make_unique_agent(toolcrib, mode="deferred").open()
    observer = make_observer(toolcrib).open()
    for number in range(ROUNDS):
        name = f"Gemini CLI, killed {number}"
        folder = tmp_path / str(number)
        folder.mkdir()
        with scripted_provider(waiting(name, 5), ANSWER, is_agent=True) as model:
            home = Home(folder, toolcrib.url, session.agent.key, model)
            run = gemini(home)
            settings = folder / ".gemini" / "settings.json"
            settings.write_text(settings.read_text().replace("/mcp", f"/mcp/{session.id}"))
            process = home.start(run)
            try:
                wait_until_begun(observer, [name])
            finally:
                interrupt(process, signal.SIGKILL)

    def figures():
        (only,) = session.agent.send("GET", "/sessions").json["items"]
        return only["id"], only["state"], only["calls"]

    every = (session.id, "open", ROUNDS)
    wait_for(lambda: figures() == every, 60, what="every call is recorded")


def waiting(name, seconds):
    arguments = {"name": "workshop__wait", "arguments": {"name": name, "seconds": seconds}}
    return [("deferred_tool_call", arguments)]
