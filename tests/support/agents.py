"""An agent as a program outside would be one: a key, sessions over REST. And the ledger on disk."""

import http.client
import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from tests.support.installation import Api
from tests.support.servers import synced
from tests.support.upstreams.running import ROOT, stdio_argv
from tests.support.waiting import wait_for

FORMATS = ("text", "json", "anthropic", "openai", "openai-responses", "gemini", "mcp")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]  # by lower-case name
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        error = self.json["error"]
        # JSON-RPC has a number of its own there, and ours in what it carries.
        return str(error["data"]["code"] if "jsonrpc" in self.json else error["code"])


class Agent:
    """A key and where to use it. `at` gives the same agent at another process."""

    def __init__(self, url: str, key: str, name: str = "") -> None:
        self.url, self.key, self.name = url, key, name

    def at(self, url: str) -> "Agent":
        return Agent(url, self.key, self.name)

    def connect(self, timeout: float = 60) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=timeout)

    def headers(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self.key}",
            "Content-Type": "application/json",
            **(more or {}),
        }

    def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        data = json.dumps(body).encode() if body is not None else None
        connection = self.connect()
        try:
            connection.request(method, f"/api/v1{path}", data, self.headers(headers))
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, named, response.read())
        finally:
            connection.close()

    def open(self, **wish: Any) -> "Session":
        answer = self.send("POST", "/sessions", wish)
        assert answer.status == 201, answer.body
        return Session(self, answer.json["id"], answer.json)


class Session:
    """One session, as the agent holds it."""

    def __init__(self, agent: Agent, session_id: str, opened: Mapping[str, Any]) -> None:
        self.agent, self.id, self.opened = agent, session_id, opened
        self.path = f"/sessions/{session_id}"

    def at(self, url: str) -> "Session":
        return Session(self.agent.at(url), self.id, self.opened)

    def get(self, path: str = "") -> Any:
        answer = self.agent.send("GET", self.path + path)
        assert answer.status == 200, answer.body
        return answer.json

    def post(self, path: str, body: Any) -> Answer:
        return self.agent.send("POST", self.path + path, body)

    def surface(self) -> dict[str, tuple[bytes, str]]:
        """Everything a model is shown of it, in each format: the bytes and their tag."""
        shown = {}
        for name in FORMATS:
            answer = self.agent.send("GET", f"{self.path}/catalog?format={name}")
            assert answer.status == 200, answer.body
            shown[name] = (answer.body, answer.headers["etag"])
        answer = self.agent.send("GET", f"{self.path}/tools")
        return {**shown, "tools": (answer.body, "")}

    def load(self, group_id: str, names: list[str] | None = None) -> bytes:
        """Load a group, and return the answer's bytes."""
        body = (
            {"group_id": group_id} if names is None else {"group_id": group_id, "tool_names": names}
        )
        answer = self.post("/load", body)
        assert answer.status == 200, answer.body
        assert answer.json["error"] is None, answer.body
        return answer.body

    def search(self, **asked: Any) -> dict[str, Any]:
        answer = self.post("/search", asked)
        assert answer.status == 200, answer.body
        return answer.json  # type: ignore[no-any-return]

    def found(self, **asked: Any) -> list[str]:
        return [tool["name"] for tool in self.search(**asked)["tools"]]

    def ask(
        self,
        tool: str,
        arguments: Any = None,
        *,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Call a tool, and return whatever came."""
        body: dict[str, Any] = {"tool_name": tool, "arguments": arguments or {}}
        if timeout is not None:
            body["timeout"] = timeout
        headers = {} if key is None else {"Idempotency-Key": key}
        return self.agent.send("POST", f"{self.path}/call", body, headers)

    def call(self, tool: str, arguments: Any = None, **how: Any) -> dict[str, Any]:
        answer = self.ask(tool, arguments, **how)
        assert answer.status == 200, answer.body
        return answer.json  # type: ignore[no-any-return]

    def events(self) -> list[dict[str, Any]]:
        return list(self.get("/events?limit=200")["items"])

    def fork(self) -> Self:
        answer = self.post("/fork", None)
        assert answer.status == 201, answer.body
        return type(self)(self.agent, answer.json["id"], answer.json)

    def close(self) -> None:
        answer = self.post("/close", None)
        assert answer.status == 200, answer.body


def make_agent(toolcrib: Api, name: str, **settings: Any) -> Agent:
    """Make an agent with a key by the admin API; it has all groups unless told."""
    wanted = {"name": name, **settings}
    if "groups" not in wanted:
        wanted["all_groups"] = True
    status, body = toolcrib.api("POST", "/agents", wanted)
    assert status == 201, body
    status, body = toolcrib.api("POST", f"/agents/{name}/keys", {})
    assert status == 201, body
    return Agent(toolcrib.url, body["key"], name)


def register_stdio(toolcrib: Api, slug: str, module: str, *args: str) -> None:
    """Register a program of tests/support/upstreams and wait for its first sync."""
    command, *rest = stdio_argv(module, *args)
    body = {"name": slug, "slug": slug, "transport": "stdio", "command": command, "args": rest}
    body |= {"cwd": str(ROOT), "confirm_argv": [command, *rest]}
    status, answer = toolcrib.api("POST", "/servers", body)
    assert status == 201, answer
    wait_for(lambda: synced(toolcrib, slug), 30, what=f"{slug} is synced")


def edit(toolcrib: Api, slug: str, **changes: Any) -> None:
    status, body = toolcrib.api("PATCH", f"/servers/{slug}", changes)
    assert status == 200, body


def sync(toolcrib: Api, slug: str) -> dict[str, Any]:
    """Sync a server now and return the run."""

    def last() -> dict[str, Any]:
        found: dict[str, Any] = toolcrib.api("GET", f"/servers/{slug}/sync-runs")[1]["items"][0]
        return found

    before = last()["id"]
    assert toolcrib.api("POST", f"/servers/{slug}/sync")[0] == 202
    wait_for(lambda: last()["id"] > before and last()["finished_at"], 30, what=f"{slug} is synced")
    return last()


def ledger(folder: Path, session: Session) -> list[dict[str, Any]]:
    """A session's calls as they are on disk, oldest first."""
    query = (
        "select c.* from sessions_app_call c join sessions_app_agentsession s "
        "on s.id = c.session_id where s.session_id = ? order by c.id"
    )
    with sqlite3.connect(f"file:{folder / 'toolcrib.sqlite3'}?mode=ro", uri=True) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(query, (session.id,))]
