"""`/mcp/admin`: an admin's own agent writes search hints over MCP."""

import asyncio
import json

import pytest

from catalog.audit import SYSTEM
from catalog.models import AuditEntry, ToolHint
from sessions_app.agents import api_keys
from sessions_app.ledger import writer as ledger_writer
from sessions_app.mcp.endpoint import Endpoint
from tests.support.asgi_requests import bearer_headers, exchange, make_scope
from tests.support.factories import make_agent, make_server, make_tool
from tests.support.waiting import scaled

pytestmark = pytest.mark.django_db(transaction=True)

MODERN, LEGACY = "2026-07-28", "2025-11-25"
ACCEPT = {"accept": "application/json, text/event-stream"}


def send(key, method="", params=None, era=LEGACY, http_method="POST"):
    """Send one message to a running endpoint, as it is served."""
    params = dict(params or {})
    headers = {**ACCEPT, "mcp-protocol-version": era}
    if era == MODERN:
        params["_meta"] = {
            "io.modelcontextprotocol/protocolVersion": MODERN,
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        headers |= {"mcp-method": method}
        if "name" in params:
            headers["mcp-name"] = params["name"]
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    data = json.dumps(message).encode()

    async def inside():
        endpoint = Endpoint()
        scope = make_scope(http_method, "/mcp/admin", bearer_headers(key, data, headers))
        async with (
            asyncio.timeout(scaled(30)),
            ledger_writer.run_writer(),
            endpoint.run(),
        ):
            return await exchange(endpoint, scope, data)

    return asyncio.run(inside())


def call(key, name, arguments=None, era=LEGACY):
    response = send(key, "tools/call", {"name": name, "arguments": arguments or {}}, era)
    assert response.status == 200, response.body
    result = response.json["result"]
    return json.loads(result["content"][0]["text"]), result["isError"]


@pytest.fixture
def key(db):
    return api_keys.create_key("helper", "admin", actor=SYSTEM)[1]


@pytest.fixture
def forecast(db):
    server = make_server(slug="weather", trust="auto")
    return make_tool(server, "get_forecast", description="Forecast of a city.")


@pytest.mark.parametrize("era", [MODERN, LEGACY])
def test_two_tools_are_listed(key, era):
    tools = send(key, "tools/list", {}, era).json["result"]["tools"]

    assert [tool["name"] for tool in tools] == ["export_hints", "import_hints"]
    assert tools[0]["annotations"]["readOnlyHint"] is True


@pytest.mark.parametrize("era", [MODERN, LEGACY])
def test_hints_are_written_with_the_two_tools(key, forecast, era):
    exported, _ = call(key, "export_hints", {"limit": 1}, era)
    assert "three" in exported["prompt"]
    assert [tool["name"] for tool in exported["tools"]] == ["weather__get_forecast"]
    assert exported["remaining"] == 0

    items = [{"name": "weather__get_forecast", "hints": ["will it rain"]}]
    stored, is_error = call(key, "import_hints", {"items": items}, era)

    assert (stored["changed"], stored["remaining"], is_error) == (1, 0, False)
    assert ToolHint.objects.get().source == "model"
    assert AuditEntry.objects.get(verb="tool.hint.import").actor_label == "helper"
    assert call(key, "export_hints", {}, era)[0]["tools"] == []
    assert len(call(key, "export_hints", {"all": True}, era)[0]["tools"]) == 1


def test_exports_continue_after_the_last_tool(key):
    server = make_server(slug="weather", trust="auto")
    for name in ("a", "b", "c"):
        make_tool(server, name, description="Does it.")

    first, _ = call(key, "export_hints", {"limit": 2})
    rest, _ = call(key, "export_hints", {"limit": 2, "after": first["tools"][-1]["name"]})

    assert [tool["name"] for tool in first["tools"]] == ["weather__a", "weather__b"]
    assert first["remaining"] == 1
    assert [tool["name"] for tool in rest["tools"]] == ["weather__c"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("export_hints", {"limit": 0.5}),
        ("export_hints", {"server": 5}),
        ("import_hints", {}),
        ("import_hints", {"items": [5]}),
        ("import_hints", {"items": [{"name": "a"}]}),
        ("delete_everything", {}),
    ],
)
def test_wrong_arguments_are_a_result_that_says_so(key, forecast, name, arguments):
    body, is_error = call(key, name, arguments)

    assert is_error
    assert body["error"]["message"]
    assert not ToolHint.objects.exists()


def test_only_a_key_of_scope_admin_is_accepted(key):
    agent_key = api_keys.create_key("k", "agent", actor=SYSTEM, agent=make_agent())[1]
    operator_key = api_keys.create_key("o", "operator", actor=SYSTEM)[1]

    assert send("tcb_unknown", "tools/list").status == 401
    assert send(agent_key, "tools/list").status == 403
    assert send(operator_key, "tools/list").status == 403
    assert send(key, http_method="GET").status == 405
