"""Client libraries and frameworks do what their rows in docs/clients.md say.

Each runs as a program of its own environment (outside/), which a test tells what to list and call.
"""

import json
import re

import pytest

from tests.support import client_table
from tests.support.client_programs import ClientProgram, argv_of
from tests.support.client_table import CLIENTS
from tests.support.mcp_clients import make_unique_agent
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(300)
META = {
    "search_tools",
    "load_tools",
    "get_tool_details",
    "call_read_only_tool",
    "deferred_tool_call",
}
PNG = "iVBORw0KGgo"
FAILURE = "This tool always answers with an error."


def marked(client):
    marks = [pytest.mark.needs_client(client.environment)]
    if client.on_demand:
        marks.append(pytest.mark.on_demand)
    return pytest.param(client, id=client.slug, marks=marks)


def dispatch(program, tool, **arguments):
    return program.call("deferred_tool_call", name=tool, arguments=arguments)


def shown(answer):
    return json.dumps(answer.get("result", answer))


def is_marked_as_error(answer):
    flag = r'"(?:isError|is_error|is_failure)": true|"status": "error"|"error": "'
    return "failure" in answer or re.search(flag, shown(answer)) is not None


def is_image(answer):
    text = shown(answer)
    if isinstance(answer.get("result"), str):
        return False  # the image as text
    return PNG in text or re.search(r'"type": "\w*Image\w*"', text) is not None


def is_cancelled_at_the_server(program, agent, name):
    """Cancel a call at the client, and tell whether its server learns of it."""
    arguments = {"name": name, "seconds": 3_600}
    values = {"name": "workshop__wait", "arguments": arguments}
    number = program.send("call", name="deferred_tool_call", arguments=values)
    observer = agent.open()

    def waits(kind):
        return observer.call("workshop__cancelled")["structured_content"][kind]

    wait_for(lambda: name in waits("begun"), 30, what="the server waits")
    program.cancel(number)
    try:
        wait_for(lambda: name in waits("given_up"), 5)
    except AssertionError:
        return False
    finally:
        observer.close()
    return True


@pytest.mark.parametrize("client", [marked(each) for each in CLIENTS if each.program])
def test_a_client_does_what_its_row_says(toolcrib, client, tmp_path):
    agent = make_unique_agent(toolcrib, mode="deferred")
    observer = make_unique_agent(toolcrib, mode="deferred")
    seen = {}
    with ClientProgram(argv_of(client, agent), tmp_path) as program:
        seen["connect"] = True
        seen["list"] = set(program.ask("list")["tools"]) >= META - {"load_tools"}
        found = program.call("search_tools", query="weather forecast")
        seen["search"] = "weather__get_forecast" in shown(found)
        loaded = program.call("load_tools", group_id="mcp:weather", tool_names=["get_forecast"])
        seen["load"] = "schemas" in shown(loaded)
        seen["dispatch"] = "sunny" in shown(dispatch(program, "weather__get_forecast", city="Oslo"))
        seen["structured"] = "given" in shown(dispatch(program, "workshop__echo", town="Oslo"))
        seen["image"] = is_image(dispatch(program, "fixtures__test_image_content"))
        failed = dispatch(program, "fixtures__test_error_handling")
        assert FAILURE in json.dumps(failed)
        seen["error"] = is_marked_as_error(failed)
        seen["progress"] = dispatch(program, "fixtures__test_tool_with_progress")["steps"] == 3
        protocol = client_table.read_protocol(toolcrib, agent.name)
        toolcrib.kill()
        toolcrib.start()
        first = dispatch(program, "weather__get_forecast", city="Bergen")
        seen["restart"] = "Bergen" in shown(first) and "sunny" in shown(first)
        name = f"wait of {client.slug}"
        if "restart" not in client.limits:
            assert "sunny" in shown(dispatch(program, "weather__get_forecast", city="Voss"))
            seen["cancel"] = is_cancelled_at_the_server(program, observer, name)
    if "restart" in client.limits:  # its connection is lost
        with ClientProgram(argv_of(client, agent), tmp_path / "again") as program:
            seen["cancel"] = is_cancelled_at_the_server(program, observer, name)
    assert {cell for cell in client_table.CELLS if not seen[cell]} == client.limits.keys()
    client_table.record(client, protocol)
