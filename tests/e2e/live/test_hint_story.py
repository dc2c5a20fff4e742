"""From an unknown server to a tool that a user's own sentence finds, with real parts.

The server is added through the API, a scripted model writes hints over the MCP server for admins,
and an agent searches and calls over REST and over MCP.
"""

import asyncio
import sqlite3
from urllib.parse import quote

import pytest

from tests.support.agents import Agent, make_agent
from tests.support.installation import Installation
from tests.support.mcp_clients import call_meta_tool, connected_client, tool_names
from tests.support.servers import register
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(240)

SENTENCE = "my tooth hurts a lot, who can help me today"
TOOL = "clinic__book_slot"
WRITTEN = ["I have a toothache", "get treated by a dentist soon", "when can a doctor see me?"]


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    """An installation with the embedding model, and the URL of a server nobody has hints for."""
    folder = tmp_path_factory.mktemp("clinic")
    with (
        running_http("clinic") as url,
        Installation(folder, {"TOOLCRIB_EMBEDDINGS": "1"}) as toolcrib,
    ):
        yield toolcrib, url


def explain(toolcrib):
    """Search as the agent on the search page's endpoint; return strategy and reasons by name."""
    status, body = toolcrib.api("GET", f"/search?agent=scout&limit=1&query={quote(SENTENCE)}")
    assert status == 200, body
    return body["answer"]["strategy"], {why["name"]: why for why in body["why"]}


def list_hints(toolcrib, source):
    hints = toolcrib.api("GET", f"/tools/{TOOL}/hints")[1]["items"]
    return [hint for hint in hints if hint["source"] == source]


def write_texts(tool):
    """A scripted model: it knows what is exported of a tool and nothing else."""
    return WRITTEN if "slot" in tool["description"] else [f"I want to {tool['name'][-8:]}"]


async def write_hints(admin):
    """Export and import over MCP until no tools remain, as the server's instructions say."""
    async with connected_client(admin, path="/admin") as client:
        assert tool_names(await client.list_tools()) == ["export_hints", "import_hints"]
        remaining, rounds = 1, 0
        while remaining:
            exported = await call_meta_tool(client, "export_hints", limit=4)
            items = [{"name": row["name"], "hints": write_texts(row)} for row in exported["tools"]]
            stored = await call_meta_tool(client, "import_hints", items=items)
            assert stored["changed"] == len(items)
            remaining, rounds = stored["remaining"], rounds + 1
        return rounds


def use_over_rest(agent):
    """Search and call in a session over REST; return the id of the session."""
    session = agent.open()
    assert session.search_names(query=SENTENCE, limit=1) == [TOOL]
    assert session.call(TOOL, {"provider_id": "p1"})["state"] == "succeeded"
    return session.id


async def use_over_mcp(agent):
    async with connected_client(agent) as client:
        answer = await call_meta_tool(client, "search_tools", query=SENTENCE, limit=1)
        assert [tool["name"] for tool in answer["tools"]] == [TOOL]
        call = {"tool_name": TOOL, "arguments": {"provider_id": "p2"}}
        result = await client.call_tool("deferred_tool_call", call)
        assert not result.is_error, result


def move_to_yesterday(toolcrib, session_id):
    """Move the search and the call of a session back by a day; the installation is stopped."""
    with sqlite3.connect(toolcrib.data_dir / "toolcrib.sqlite3") as database:
        for table, field in (("event", "at"), ("call", "accepted_at")):
            moved = database.execute(
                f"update sessions_app_{table} "  # noqa: S608
                f"set {field} = strftime('%Y-%m-%d %H:%M:%f', {field}, '-1 day') where session_id "
                "= (select id from sessions_app_agentsession where session_id = ?)",
                (session_id,),
            )
            assert moved.rowcount > 0
    database.close()


def test_a_users_sentence_finds_a_tool_after_hints_were_written_and_then_is_one(clinic):
    toolcrib, url = clinic
    register(toolcrib, "clinic", url)
    scout = make_agent(toolcrib, "scout", mode="deferred")
    wait_for(lambda: explain(toolcrib)[0] == "hybrid", 120, what="the tools have vectors")
    assert TOOL not in explain(toolcrib)[1]
    assert TOOL not in scout.open().search_names(query=SENTENCE, limit=1)

    admin = Agent(toolcrib.url, toolcrib.token("admin"))
    assert asyncio.run(write_hints(admin)) == 2, "six tools, at most four at a time"

    assert [hint["text"] for hint in list_hints(toolcrib, "model")] == WRITTEN
    wait_for(lambda: TOOL in explain(toolcrib)[1], 60, what="the hints have vectors")
    assert explain(toolcrib)[1][TOOL]["hint"] == {"text": WRITTEN[0], "source": "model"}

    earlier = use_over_rest(scout)
    asyncio.run(use_over_mcp(scout))
    assert not list_hints(toolcrib, "use")
    toolcrib.stop()
    move_to_yesterday(toolcrib, earlier)
    toolcrib.start()  # hints are learned at a start, and every ten minutes

    (learned,) = wait_for(lambda: list_hints(toolcrib, "use"), 30, what="the query is a hint")
    assert (learned["text"], learned["agent"]) == (SENTENCE, "scout")
    reasons = wait_for(lambda: explain(toolcrib)[1].get(TOOL), 60, what="the new hint has a vector")
    assert reasons["hint"] == {"text": SENTENCE, "source": "use"}
    other = toolcrib.api("GET", f"/search?limit=1&query={quote(SENTENCE)}")[1]
    assert SENTENCE not in str(other["why"]), "it counts for this agent until it is accepted"
