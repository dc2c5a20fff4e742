"""API client of an agent: requests are routed as in toolcrib.asgi, in the test's own thread."""

import json
from typing import Any

from catalog.audit import SYSTEM
from catalog.groups import actions as group_writes
from catalog.models import Group
from sessions_app.agents import api_keys
from sessions_app.models import Agent, AgentGroup
from tests.support.asgi_requests import send_api
from tests.support.factories import ingest_tools, make_server, tool_object


class ApiResponse:
    def __init__(self, response: Any) -> None:
        self.status = response.status_code
        self.bytes = response.content
        self.headers = response.headers

    @property
    def json(self) -> Any:
        return json.loads(self.bytes)

    def __getitem__(self, key: str) -> Any:
        return self.json[key]


class AgentClient:
    """An agent and an API key of it."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.key = api_keys.create_key(agent.name, "agent", agent=agent, actor=SYSTEM)[1]

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> ApiResponse:
        text = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body)
        data = text if isinstance(text, bytes) else text.encode()
        extra = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"Authorization": f"Bearer {self.key}", **extra}
        return ApiResponse(send_api(method, f"/api/v1{path}", data, sent))

    def open(self, **body: Any) -> "Session":
        response = self.send("POST", "/sessions", body)
        assert response.status == 201, response.bytes
        return Session(self, response)


class Session:
    """One open session of an agent."""

    def __init__(self, client: AgentClient, response: ApiResponse) -> None:
        self.client = client
        self.opened = response.json
        self.id = self.opened["id"]

    def get(self, path: str, **headers: str) -> ApiResponse:
        return self.client.send("GET", f"/sessions/{self.id}{path}", **headers)

    def post(self, path: str, body: Any = None, **headers: str) -> ApiResponse:
        return self.client.send("POST", f"/sessions/{self.id}{path}", body or {}, **headers)

    def load(self, group_id: str, *names: str, **fields: Any) -> ApiResponse:
        selection = {"tool_names": list(names)} if names else {}
        return self.post("/load", {"group_id": group_id, **selection, **fields})

    def search(self, query: str = "", **fields: Any) -> ApiResponse:
        return self.post("/search", {"query": query, **fields} if query else fields)

    def call(self, tool_name: str, arguments: Any = None, **fields: Any) -> ApiResponse:
        headers = {key: fields.pop(key) for key in list(fields) if key == "Idempotency_Key"}
        return self.post(
            "/call", {"tool_name": tool_name, "arguments": arguments or {}, **fields}, **headers
        )

    @property
    def state(self) -> Any:
        return self.get("/state")["expanded_groups"]

    @property
    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.get("/events")["items"]]


def make_agent_client(name: str = "scout", *groups: str, **fields: Any) -> AgentClient:
    """Create an agent with these groups, or with all groups, and a key."""
    agent = Agent.objects.create(name=name, all_groups=not groups, **fields)
    for position, group_id in enumerate(groups):
        group = Group.objects.get(group_id=group_id)
        AgentGroup.objects.create(agent=agent, group=group, position=position)
    return AgentClient(agent)


def add_tools(slug: str, *names: str, **descriptions: str) -> Group:
    """Create a server with these tools, which all take a string `what`; return its group."""
    schema = {
        "type": "object",
        "properties": {"what": {"type": "string"}},
        "required": ["what"],
        "additionalProperties": False,
    }
    server = make_server(slug=slug)
    ingest_tools(
        server,
        *(
            tool_object(
                name,
                description=descriptions.get(name, f"Do {name} for {slug}."),
                inputSchema=schema,
            )
            for name in names
        ),
    )
    return Group.objects.get(group_id=f"mcp:{slug}")


def make_group(group_id: str, *tools: Any) -> Group:
    """Create a group with these tools."""
    group = group_writes.create(group_id, group_id.title(), actor=SYSTEM).group
    group_writes.assign(group, list(tools), actor=SYSTEM)
    return group
