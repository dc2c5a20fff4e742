"""Admin API of servers: tools of a server, export."""

import json
from typing import Any

import pytest

from catalog import cache
from catalog.audit import SYSTEM
from catalog.models import AuditEntry, Tool, ToolState
from servers.mcp_json.parser import parse_mcp_json
from servers.models import CredentialKind, Server
from servers.registration.actions import set_credentials
from servers.secret import Secret
from sessions_app.agents import api_keys
from tests.support.agent_client import make_agent_client
from tests.support.asgi_requests import send_api
from tests.support.factories import ingest_tools, make_server, tool_object


@pytest.fixture
def api(db: None) -> Any:
    """Send a request as an admin; return status and body."""
    key = api_keys.create_key("tests", "admin", actor=SYSTEM)[1]

    def send(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}"}
        response = send_api(method, f"/api/v1{path}", data, headers)
        return response.status_code, json.loads(response.content or b"null")

    return send


def test_the_tools_of_a_server_are_removed_until_its_next_sync(api):
    server = make_server(slug="github")
    listed = [tool_object("create_issue"), tool_object("list_issues")]
    ingest_tools(server, *listed)
    session = make_agent_client("scout", "mcp:github").open()
    assert len(session.get("/stats")["tool_names"]) == 2

    assert api("DELETE", "/servers/github/tools") == (200, {"removed": 2})
    cache.clear()
    assert session.get("/stats")["tool_names"] == []
    assert set(Tool.objects.values_list("state", flat=True)) == {ToolState.MISSING}
    entry = AuditEntry.objects.get(verb="server.remove_tools")
    assert (entry.target_label, entry.after) == (str(server), {"tools": 2})
    assert api("DELETE", "/servers/github/tools") == (200, {"removed": 0})

    ingest_tools(server, *listed)
    cache.clear()
    assert len(session.get("/stats")["tool_names"]) == 2
    assert server.tools.get(name="create_issue").memberships.count() == 1


def test_removed_tools_need_no_second_sync(api):
    """A list that lacked most tools was held back; the removal decides it."""
    server = make_server(slug="github")
    ingest_tools(server, tool_object("create_issue"))
    Server.objects.update(removals_held=True)
    assert api("DELETE", "/servers/github/tools") == (200, {"removed": 1})
    assert not Server.objects.get().removals_held
    assert api("DELETE", "/servers/nowhere/tools")[0] == 404


@pytest.mark.parametrize(
    ("shape", "key", "reference"),
    [
        ("claude", "mcpServers", "${WEB_X_KEY}"),
        ("vscode", "servers", "${input:WEB_X_KEY}"),
        ("cursor", "mcpServers", "${env:WEB_X_KEY}"),
    ],
)
def test_servers_are_exported_in_the_format_of_each_client(api, shape, key, reference):
    server = make_server(slug="web", url="https://x.example/mcp")
    values = {"X-Key": Secret("quagga-secret-1")}
    set_credentials(server, CredentialKind.HEADER, values, actor=SYSTEM)
    status, exported = api("GET", f"/servers/export?shape={shape}")
    assert (status, exported[key]["web"]["headers"]) == (200, {"X-Key": reference})
    check = parse_mcp_json(json.dumps(exported), variables={}, allow_http=True)
    assert (check.shape, check.problems) == (shape, ())
    assert (check.drafts[0].url, check.drafts[0].missing) == (server.url, ("WEB_X_KEY",))


def test_an_unknown_shape_is_rejected(api):
    assert api("GET", "/servers/export?shape=zed")[0] == 422


@pytest.mark.parametrize("where", ["server", "connection", "test"])
def test_an_unknown_transport_is_named_in_the_error(api, where):
    make_server(slug="web")
    connection = {"transport": "zzz", "url": "https://x.example/mcp"}
    method, path, body = {
        "server": ("POST", "/servers", {"name": "Web", **connection}),
        "connection": ("PATCH", "/servers/web", {"connection": connection}),
        "test": ("POST", "/servers/test", {"name": "Web", **connection}),
    }[where]
    status, answer = api(method, path, body)
    assert status == 422
    (problem,) = answer["error"]["details"]["problems"]
    assert problem["at"].endswith("transport")
    assert problem["problem"] == "Input should be 'stdio', 'http' or 'sse'"
