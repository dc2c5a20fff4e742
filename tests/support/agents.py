"""Agent clients over REST against a running installation; reads of the ledger on disk."""

import http.client
import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from tests.support.installation import Api
from tests.support.servers import last_synced_at
from tests.support.upstreams.running import ROOT, stdio_argv
from tests.support.waiting import wait_for

FORMATS = ("text", "json", "anthropic", "openai", "openai-responses", "gemini", "mcp")


@dataclass(frozen=True)
class HttpResponse:
    status: int
    headers: Mapping[str, str]  # by lower-case name
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        error = self.json["error"]
        # In JSON-RPC `code` is a number, and Toolcrib's code is in `data`.
        return str(error["data"]["code"] if "jsonrpc" in self.json else error["code"])


class Agent:
    """API key and base URL of an agent. `at_url` returns the same agent at another process."""

    def __init__(self, url: str, key: str, name: str = "") -> None:
        self.url, self.key, self.name = url, key, name

    def at_url(self, url: str) -> "Agent":
        return Agent(url, self.key, self.name)

    def connect(self, timeout: float = 60) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=timeout)

    def headers(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self.key}",
            "Content-Type": "application/json",
            **(extra or {}),
        }

    def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        data = json.dumps(body).encode() if body is not None else None
        connection = self.connect()
        try:
            connection.request(method, f"/api/v1{path}", data, self.headers(headers))
            response = connection.getresponse()
            lowered = {name.lower(): value for name, value in response.getheaders()}
            return HttpResponse(response.status, lowered, response.read())
        finally:
            connection.close()

    def open(self, **options: Any) -> "Session":
        response = self.send("POST", "/sessions", options)
        assert response.status == 201, response.body
        return Session(self, response.json["id"], response.json)


class Session:
    """One session of an agent."""

    def __init__(self, agent: Agent, session_id: str, opened: Mapping[str, Any]) -> None:
        self.agent, self.id, self.opened = agent, session_id, opened
        self.path = f"/sessions/{session_id}"

    def at_url(self, url: str) -> "Session":
        return Session(self.agent.at_url(url), self.id, self.opened)

    def get(self, path: str = "") -> Any:
        response = self.agent.send("GET", self.path + path)
        assert response.status == 200, response.body
        return response.json

    def post(self, path: str, body: Any) -> HttpResponse:
        return self.agent.send("POST", self.path + path, body)

    def surface(self) -> dict[str, tuple[bytes, str]]:
        """Return the catalog in each format and the tools: bytes and ETag by format."""
        catalogs = {}
        for name in FORMATS:
            response = self.agent.send("GET", f"{self.path}/catalog?format={name}")
            assert response.status == 200, response.body
            catalogs[name] = (response.body, response.headers["etag"])
        response = self.agent.send("GET", f"{self.path}/tools")
        return {**catalogs, "tools": (response.body, "")}

    def load(self, group_id: str, names: list[str] | None = None) -> bytes:
        """Load a group, or tools of it, and return the body of the response."""
        body = (
            {"group_id": group_id} if names is None else {"group_id": group_id, "tool_names": names}
        )
        response = self.post("/load", body)
        assert response.status == 200, response.body
        assert response.json["error"] is None, response.body
        return response.body

    def search(self, **query: Any) -> dict[str, Any]:
        response = self.post("/search", query)
        assert response.status == 200, response.body
        return response.json  # type: ignore[no-any-return]

    def search_names(self, **query: Any) -> list[str]:
        """Search and return the names of the tools."""
        return [tool["name"] for tool in self.search(**query)["tools"]]

    def post_call(
        self,
        tool: str,
        arguments: Any = None,
        *,
        key: str | None = None,
        timeout: float | None = None,
    ) -> HttpResponse:
        """Call a tool and return the response, whatever its status."""
        body: dict[str, Any] = {"tool_name": tool, "arguments": arguments or {}}
        if timeout is not None:
            body["timeout"] = timeout
        headers = {} if key is None else {"Idempotency-Key": key}
        return self.agent.send("POST", f"{self.path}/call", body, headers)

    def call(self, tool: str, arguments: Any = None, **options: Any) -> dict[str, Any]:
        response = self.post_call(tool, arguments, **options)
        assert response.status == 200, response.body
        return response.json  # type: ignore[no-any-return]

    def events(self) -> list[dict[str, Any]]:
        return list(self.get("/events?limit=200")["items"])

    def fork(self) -> Self:
        response = self.post("/fork", None)
        assert response.status == 201, response.body
        return type(self)(self.agent, response.json["id"], response.json)

    def close(self) -> None:
        response = self.post("/close", None)
        assert response.status == 200, response.body


def make_agent(toolcrib: Api, name: str, **settings: Any) -> Agent:
    """Create an agent and a key through the admin API, with all groups unless `groups` is set."""
    fields = {"name": name, **settings}
    if "groups" not in fields:
        fields["all_groups"] = True
    status, body = toolcrib.api("POST", "/agents", fields)
    assert status == 201, body
    status, body = toolcrib.api("POST", f"/agents/{name}/keys", {})
    assert status == 201, body
    return Agent(toolcrib.url, body["key"], name)


def register_stdio(toolcrib: Api, slug: str, module: str, *args: str) -> None:
    """Register a stdio server of tests/support/upstreams and wait for its first sync."""
    command, *rest = stdio_argv(module, *args)
    body = {"name": slug, "slug": slug, "transport": "stdio", "command": command, "args": rest}
    body |= {"cwd": str(ROOT), "confirm_argv": [command, *rest]}
    status, response = toolcrib.api("POST", "/servers", body)
    assert status == 201, response
    wait_for(lambda: last_synced_at(toolcrib, slug), 30, what=f"{slug} is synced")


def update_server(toolcrib: Api, slug: str, **changes: Any) -> None:
    status, body = toolcrib.api("PATCH", f"/servers/{slug}", changes)
    assert status == 200, body


def sync_server(toolcrib: Api, slug: str) -> dict[str, Any]:
    """Sync a server now and return the run."""

    def newest() -> dict[str, Any]:
        run: dict[str, Any] = toolcrib.api("GET", f"/servers/{slug}/sync-runs")[1]["items"][0]
        return run

    before = newest()["id"]
    assert toolcrib.api("POST", f"/servers/{slug}/sync")[0] == 202
    wait_for(
        lambda: newest()["id"] > before and newest()["finished_at"], 30, what=f"{slug} is synced"
    )
    return newest()


def read_ledger(folder: Path, session: Session) -> list[dict[str, Any]]:
    """Return the rows of a session's calls in the SQLite database, oldest first."""
    query = (
        "select c.* from sessions_app_call c join sessions_app_agentsession s "
        "on s.id = c.session_id where s.session_id = ? order by c.id"
    )
    with sqlite3.connect(f"file:{folder / 'toolcrib.sqlite3'}?mode=ro", uri=True) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(query, (session.id,))]
