"""An agent with its key that calls the API through Django's test client."""

import json
from typing import Any

from django.test import Client

from catalog.audit import SYSTEM
from catalog.groups import actions as group_writes
from catalog.models import Group
from sessions_app.agents import api_keys
from sessions_app.models import Agent, AgentGroup
from tests.support.factories import fold, make_server, tool_object


class Answer:
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
    """One agent with its key."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.key = api_keys.create_key(agent.name, "agent", agent=agent, actor=SYSTEM)[1]

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        response = Client().generic(
            method,
            f"/api/v1{path}",
            data,
            content_type="application/json",
            headers={"Authorization": f"Bearer {self.key}", **given},
        )
        return Answer(response)

    def open(self, **body: Any) -> "Session":
        answer = self.send("POST", "/sessions", body)
        assert answer.status == 201, answer.bytes
        return Session(self, answer)


class Session:
    """One open session of an agent."""

    def __init__(self, client: AgentClient, answer: Answer) -> None:
        self.client = client
        self.opened = answer.json
        self.id = self.opened["id"]

    def get(self, what: str, **headers: str) -> Answer:
        return self.client.send("GET", f"/sessions/{self.id}{what}", **headers)

    def post(self, what: str, body: Any = None, **headers: str) -> Answer:
        return self.client.send("POST", f"/sessions/{self.id}{what}", body or {}, **headers)

    def load(self, group_id: str, *names: str, **more: Any) -> Answer:
        chosen = {"tool_names": list(names)} if names else {}
        return self.post("/load", {"group_id": group_id, **chosen, **more})

    def search(self, query: str = "", **more: Any) -> Answer:
        return self.post("/search", {"query": query, **more} if query else more)

    def call(self, tool_name: str, arguments: Any = None, **more: Any) -> Answer:
        headers = {key: more.pop(key) for key in list(more) if key == "Idempotency_Key"}
        return self.post(
            "/call", {"tool_name": tool_name, "arguments": arguments or {}, **more}, **headers
        )

    @property
    def state(self) -> Any:
        return self.get("/state")["expanded_groups"]

    @property
    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.get("/events")["items"]]


def make_agent_client(name: str = "scout", *groups: str, **fields: Any) -> AgentClient:
    """An agent with these groups, or with all of them."""
    agent = Agent.objects.create(name=name, all_groups=not groups, **fields)
    for position, group_id in enumerate(groups):
        group = Group.objects.get(group_id=group_id)
        AgentGroup.objects.create(agent=agent, group=group, position=position)
    return AgentClient(agent)


def add_tools(slug: str, *names: str, **described: str) -> Group:
    """A server with these tools, all of which take a text called `what`."""
    schema = {
        "type": "object",
        "properties": {"what": {"type": "string"}},
        "required": ["what"],
        "additionalProperties": False,
    }
    server = make_server(slug=slug)
    fold(
        server,
        *(
            tool_object(
                name,
                description=described.get(name, f"Do {name} for {slug}."),
                inputSchema=schema,
            )
            for name in names
        ),
    )
    return Group.objects.get(group_id=f"mcp:{slug}")


def regroup(group_id: str, *tools: Any) -> Group:
    group = group_writes.create(group_id, group_id.title(), actor=SYSTEM).group
    group_writes.assign(group, list(tools), actor=SYSTEM)
    return group
