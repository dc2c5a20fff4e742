"""Third-party MCP servers with their documented commands."""

import asyncio
import json

import httpx2
import mcp_types as types
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from catalog.definitions import resource_uris
from tests.support import parts
from tests.support.agents import make_agent
from tests.support.installation import Installation
from tests.support.waiting import scaled, wait_for

pytestmark = [
    pytest.mark.needs_npm,
    pytest.mark.needs_pyservers,
]

NOTIFICATIONS = (types.ResourceUpdatedNotification, types.ResourceListChangedNotification)


def real_servers(folder):
    packages = parts.NPM / "node_modules" / "@modelcontextprotocol"
    python = parts.PYSERVERS / "bin"

    def node(name, *args):
        return {"command": "node", "args": [str(packages / name / "dist" / "index.js"), *args]}

    return {
        "everything": node("server-everything"),
        "filesystem": node("server-filesystem", str(folder)),
        "memory": {
            **node("server-memory"),
            "env": {"MEMORY_FILE_PATH": str(folder / "memory.jsonl")},
        },
        "time": {"command": str(python / "mcp-server-time")},
        "git": {"command": str(python / "mcp-server-git")},
    }


def test_five_real_servers_are_imported_synced_and_kept_connected(tmp_path):
    (tmp_path / "files").mkdir()
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": real_servers(tmp_path / "files")}))
    with Installation(tmp_path / "data") as toolcrib:
        done = toolcrib.command("import_servers", str(file), "--allow-stdio", "--wait", "--json")

        assert done.returncode == 0, done.stdout + done.stderr
        rows = {row["slug"]: row for row in json.loads(done.stdout)["servers"]}
        counts = {slug: row["tools"] for slug, row in rows.items()}
        assert set(counts) == {"everything", "filesystem", "memory", "time", "git"}
        assert all(count >= 2 for count in counts.values()), counts
        assert "get_current_time" in toolcrib.tool_names("time")
        assert "git_status" in toolcrib.tool_names("git")

        def all_connected():
            servers = toolcrib.api("GET", "/servers")[1]["items"]
            return {server["state"] for server in servers} == {"connected"}

        wait_for(all_connected, 30)
        _, tool = toolcrib.api("GET", "/tools/filesystem__read_text_file")
        assert tool["definition"]["inputSchema"]["properties"]["path"]
        assert tool["tokens"] > 20


async def describe(client):
    """Return what a client sees: tools, prompts, resources and templates, by name or URI."""
    tools = (await client.list_tools()).tools
    prompts = (await client.list_prompts()).prompts
    resources = (await client.list_resources()).resources
    templates = (await client.list_resource_templates()).resource_templates
    return {
        "tools": {tool.name: (tool.description, tool.input_schema) for tool in tools},
        "prompts": {
            prompt.name: (prompt.description, [each.name for each in prompt.arguments or ()])
            for prompt in prompts
        },
        "resources": {str(resource.uri): resource.mime_type for resource in resources},
        "templates": {each.uri_template: each.mime_type for each in templates},
    }


async def accept(context, params):
    return types.ElicitResult(action="accept", content={})


def use_directly_and_behind(tmp_path, use):
    """Return what `use` returns for server-everything itself, and for it behind Toolcrib.

    It gets what a client connects to, and what the names of tools begin with.
    """
    command = real_servers(tmp_path)["everything"]
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"everything": command}}))

    async def behind(agent):
        headers = {"Authorization": f"Bearer {agent.key}"}
        async with httpx2.AsyncClient(headers=headers, timeout=60, trust_env=False) as http:
            transport = streamable_http_client(f"{agent.url}/mcp", http_client=http)
            return await use(transport, "everything__")

    parameters = StdioServerParameters(command=command["command"], args=command["args"])
    direct = asyncio.run(use(parameters, ""))
    with Installation(tmp_path / "data") as toolcrib:
        done = toolcrib.command("import_servers", str(file), "--allow-stdio", "--wait", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        agent = make_agent(toolcrib, "everything", mode="full")
        return direct, asyncio.run(behind(agent))


def test_server_everything_is_the_same_behind_toolcrib_and_direct(tmp_path):
    """For the same client, which has elicitation and, as nothing of it is built, no sampling."""
    long_call = {"duration": 1, "steps": 2}

    async def use(target, prefix):
        progress = []

        async def on_progress(done, total, message):
            progress.append((done, total))

        async with Client(target, elicitation_callback=accept, cache=None) as client:
            seen = await describe(client)
            first = next(iter(seen["resources"]))
            read = (await client.read_resource(first)).contents[0]
            name = f"{prefix}trigger-long-running-operation"
            called = await client.call_tool(name, long_call, progress_callback=on_progress)
            return seen, read.mime_type, called.content[0].text, progress

    (seen, *expected), (through, *received) = use_directly_and_behind(tmp_path, use)
    assert received == expected
    for kind in ("tools", "prompts"):
        own = {f"everything__{name}": value for name, value in seen[kind].items()}
        assert own.keys() - through[kind].keys() == set()
        assert through[kind] == own
    assert through["resources"] == {
        resource_uris.public_uri("everything", uri): mime for uri, mime in seen["resources"].items()
    }
    assert len(through["templates"]) == len(seen["templates"]) > 0


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:resources/subscribe is removed")
def test_server_everything_notifies_behind_toolcrib_as_directly(tmp_path):
    """Updates of a subscribed resource, and a list of resources that grew; logging is not built."""
    a_file = {"name": "note.gz", "data": "data:text/plain,hello", "outputType": "resourceLink"}

    async def use(target, prefix):
        received = asyncio.Queue()

        async def note(message):
            if isinstance(message, NOTIFICATIONS):
                await received.put(message)

        async def until(kind):
            while not isinstance(message := await received.get(), kind):
                pass
            return message

        async with (
            asyncio.timeout(scaled(120)),
            Client(target, mode="legacy", message_handler=note, cache=None) as client,
        ):
            uri = str((await client.list_resources()).resources[0].uri)
            await client.subscribe_resource(uri)
            await client.call_tool(f"{prefix}toggle-subscriber-updates", {})
            updated = await until(types.ResourceUpdatedNotification)
            before = {str(each.uri) for each in (await client.list_resources()).resources}
            called = await client.call_tool(f"{prefix}gzip-file-as-resource", a_file)
            await until(types.ResourceListChangedNotification)
            after = {str(each.uri) for each in (await client.list_resources()).resources}
            link = str(called.content[0].uri)
            read = (await client.read_resource(link)).contents[0]
            return uri, str(updated.params.uri), after - before, link, read.mime_type

    expected, through = use_directly_and_behind(tmp_path, use)
    uri, updated, added, link, mime = expected
    assert (updated, added) == (uri, {link})

    def public(uri):
        return resource_uris.public_uri("everything", uri)

    assert through == (public(uri), public(updated), {public(link)}, public(link), mime)
