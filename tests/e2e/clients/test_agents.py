"""Agent programs do what their rows in docs/clients.md say, with a scripted model.

Each is configured by its snippet. Between two turns of the model Toolcrib is killed and started.
"""

import json

import pytest

from tests.e2e.clients.test_libraries import FAILURE, PNG, marked
from tests.support import client_table
from tests.support.agent_programs import AGENTS, Home, interrupt
from tests.support.client_table import CLIENTS
from tests.support.mcp_clients import make_unique_agent
from tests.support.scripted_models import scripted_provider, tool_results
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(400)
ANSWER = "It is done."
META = ("search_tools", "load_tools", "get_tool_details", "call_read_only_tool")
PROGRAMS = [client for client in CLIENTS if not client.program]


def dispatch(tool, **arguments):
    return [("deferred_tool_call", {"name": tool, "arguments": arguments})]


TURNS = {
    "search": [("search_tools", {"query": "weather forecast"})],
    "load": [("load_tools", {"group_id": "mcp:weather", "tool_names": ["get_forecast"]})],
    "dispatch": dispatch("weather__get_forecast", city="Oslo"),
    "structured": dispatch("workshop__echo", town="Oslo"),
    "image": dispatch("fixtures__test_image_content"),
    "error": dispatch("fixtures__test_error_handling"),
    "progress": dispatch("fixtures__test_tool_with_progress"),
    "restart": dispatch("weather__get_forecast", city="Bergen"),
    "again": dispatch("weather__get_forecast", city="Bodø"),
}
EXPECTED = {
    "search": "weather__get_forecast",
    "load": "schemas",
    "dispatch": "sunny",
    "structured": "given",
    "error": FAILURE,
    "progress": "This is a simple text response for testing.",
    "restart": "Bergen",
    "again": "Bod",  # some write the rest as an escape
}


@pytest.mark.parametrize("client", [marked(each) for each in PROGRAMS])
def test_an_agent_program_does_what_its_row_says(toolcrib, client, tmp_path):
    agent = make_unique_agent(toolcrib, mode="deferred")

    def last_used():
        (session,) = toolcrib.api("GET", f"/sessions?agent={agent.name}")[1]["items"]
        return session["last_used_at"]

    def restart():
        before = last_used()
        toolcrib.kill()
        toolcrib.start()
        if client.reconnects:
            wait_for(lambda: last_used() != before, 60, what="the program connects again")

    turns = list(TURNS)
    before = {turns.index("restart"): restart}
    with scripted_provider(*TURNS.values(), ANSWER, is_agent=True, before=before) as model:
        home = Home(tmp_path, toolcrib.url, agent.key, model)
        output = home.run(AGENTS[client.title](home))
        assert ANSWER in output
    last = model.requests[-1]
    results = dict(zip(TURNS, tool_results(last), strict=True))
    seen = {cell: text in results[cell] for cell, text in EXPECTED.items()}
    seen["connect"] = bool(results)
    shown = json.dumps([request.get("tools") for request in model.requests])
    seen["list"] = all(name in shown for name in META)
    seen["image"] = PNG in json.dumps(last)
    seen["cancel"] = is_cancelled_at_the_server(toolcrib, client, tmp_path / "cancel")
    assert seen["again"] or "restart" in client.limits
    assert {cell for cell in client_table.CELLS if not seen[cell]} == client.limits.keys()
    client_table.record(client, client_table.read_protocol(toolcrib, agent.name))


def is_cancelled_at_the_server(toolcrib, client, folder):
    """Interrupt a program during a call, and tell whether the server learns of it."""
    folder.mkdir()
    agent, name = make_unique_agent(toolcrib, mode="deferred"), f"wait of {client.slug}"
    observer = make_unique_agent(toolcrib, mode="deferred", calls_per_minute=100_000).open()

    def waits(kind):
        return observer.call("workshop__cancelled")["structured_content"][kind]

    waiting = dispatch("workshop__wait", name=name, seconds=3_600)
    with scripted_provider(waiting, ANSWER, is_agent=True) as model:
        home = Home(folder, toolcrib.url, agent.key, model)
        process = home.start(AGENTS[client.title](home))
        try:
            wait_for(lambda: name in waits("begun"), 60, what="the server waits")
        finally:
            interrupt(process)
        try:
            wait_for(lambda: name in waits("given_up"), 5)
        except AssertionError:
            return False
        return True
