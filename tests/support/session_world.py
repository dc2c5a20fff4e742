"""Hypothesis state machine of the catalog: servers change, admins hide tools and edit groups.

Base class of the session state machine in test_session_model.py. Every rule applies one change to
the product and the same change to the model.
"""

import itertools
from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from catalog.audit import SYSTEM
from catalog.groups import actions as group_writes
from catalog.models import Group, Tool
from catalog.tools.actions import hold, release, save_custom_tool
from tests.support.agent_client import AgentClient, make_agent_client
from tests.support.factories import ingest_tools, make_server, tool_object
from tests.support.session_model import World

PROPERTY_SCHEMAS: tuple[dict[str, Any], ...] = ({"type": "integer"}, {"type": "string"}, {})
NORTH, SOUTH = ("kilo", "lima", "mike", "oscar"), ("kilo", "papa", "quebec")
BARE_NAMES = sorted({*NORTH, *SOUTH, "tango"})
LIMITS = dict.fromkeys(
    (
        "calls_per_minute",
        "searches_per_minute",
        "cost_per_minute",
        "calls_in_flight",
        "max_sessions",
    ),
    10**9,
)
event_counts: Counter[str] = Counter()  # over all runs
_numbers = itertools.count(1)


def definition(name: str, version: int) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"n": PROPERTY_SCHEMAS[version % 3]},
        "required": ["n"],
    }
    return tool_object(name, description=f"It is version {version}.", inputSchema=schema)


class CatalogMachine(RuleBasedStateMachine):
    """Two servers, a custom tool, and a group with tools of both servers."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.dropped: dict[str, int] = {}

    def create_world(self, share: float) -> None:
        """Create the world. `share` is the agent's budget as a share of the tokens of all tools."""
        self.number = next(_numbers)
        self.servers = {
            slug: make_server(slug=f"{slug}-{self.number}", trust="auto")
            for slug in ("north", "south")
        }
        self.listed = {"north": dict.fromkeys(NORTH, 0), "south": dict.fromkeys(SOUTH, 0)}
        for slug in self.servers:
            self._sync(slug)
        self.custom = save_custom_tool(definition(f"tango_{self.number}", 0), actor=SYSTEM)
        self._record_tool(self.custom, "tango", 0)
        self.mixed = group_writes.create(f"mixed-{self.number}", "Mixed", actor=SYSTEM).group
        # Two of its tools are also in another group.
        shared = [self._tool("lima"), self._tool("papa")]
        members = [self.custom, *(tool for tool in shared if tool is not None)]
        group_writes.assign(self.mixed, members, actor=SYSTEM)
        self.world.groups[self.mixed.group_id] = [tool.public_name for tool in members]
        self.budget = int(share * sum(self.world.tokens.values()))
        ids = [f"mcp:{server.slug}" for server in self.servers.values()]
        client = make_agent_client(
            f"agent-{self.number}", *ids, self.mixed.group_id, budget=self.budget, **LIMITS
        )
        self.client: AgentClient = client

    def _sync(self, slug: str) -> None:
        """Ingest the current tool list as a sync does, and update the model."""
        server, listed = self.servers[slug], self.listed[slug]
        ingest_tools(
            server,
            *(definition(name, version) for name, version in listed.items()),
            allow_removals=True,
        )
        for name, version in listed.items():
            self._record_tool(Tool.objects.get(server=server, name=name), name, version)
        group = f"mcp:{server.slug}"
        members = Group.objects.get(group_id=group).memberships.order_by("position", "pk")
        self.world.groups[group] = [row.tool.public_name for row in members.select_related("tool")]

    def _record_tool(self, tool: Tool, bare_name: str, version: int) -> None:
        assert tool.approved is not None
        public = tool.public_name
        self.world.bare_names[public], self.world.versions[public] = bare_name, version
        self.world.tokens[public] = tool.approved.tokens
        self.world.missing.discard(public)

    def teardown(self) -> None:
        for server in getattr(self, "servers", {}).values():
            Tool.objects.filter(server=server).delete()
            Group.objects.filter(follows=server).delete()
            server.delete()
        if hasattr(self, "mixed"):
            self.mixed.delete()
            self.custom.delete()

    def _tool(self, name: str, slug: str = "") -> Tool | None:
        """Return a tool of the world by its bare name."""
        if name == "tango":
            return self.custom
        server = self.servers[slug or ("north" if name in NORTH else "south")]
        return Tool.objects.filter(server=server, name=name).first()

    def _tool_names(self, some: list[str], public: bool) -> list[str]:
        """Return the names as an agent may write them: bare or public."""
        if not public:
            return [f"tango_{self.number}" if name == "tango" else name for name in some]
        full = {bare: name for name, bare in self.world.bare_names.items()}
        return [full.get(name, name) for name in some]

    @rule(name=st.sampled_from(BARE_NAMES), slug=st.sampled_from(["north", "south"]))
    def a_definition_changes(self, name: str, slug: str) -> None:
        event_counts["step"] += 1
        if name == "tango":
            version = self.world.versions[self.custom.public_name] + 1
            changed = definition(f"tango_{self.number}", version)
            self.custom = save_custom_tool(changed, actor=SYSTEM, tool=self.custom)
            self.custom.refresh_from_db()
            self._record_tool(self.custom, "tango", version)
        elif name in self.listed[slug]:
            self.listed[slug][name] += 1
            self._sync(slug)

    @rule(name=st.sampled_from(NORTH))
    def a_server_removes_or_restores_a_tool(self, name: str) -> None:
        event_counts["step"] += 1
        listed = self.listed["north"]
        public = f"{self.servers['north'].slug}__{name}"
        if name in listed and len(listed) > 1:
            self.dropped[name] = listed.pop(name)
            self.world.missing.add(public)
        elif name not in listed:
            listed[name] = self.dropped.pop(name)
        self._sync("north")

    @rule(name=st.sampled_from(BARE_NAMES))
    def an_admin_hides_or_restores_a_tool(self, name: str) -> None:
        event_counts["step"] += 1
        tool = self._tool(name)
        if tool is None or tool.public_name in self.world.missing:
            return
        if tool.public_name in self.world.hidden:
            release(tool, actor=SYSTEM)
            self.world.hidden.discard(tool.public_name)
        else:
            hold(tool, "model test", actor=SYSTEM)
            self.world.hidden.add(tool.public_name)
        if name == "tango":
            self.custom.refresh_from_db()

    @rule(name=st.sampled_from(BARE_NAMES), slug=st.sampled_from(["north", "south"]))
    def an_admin_edits_a_group(self, name: str, slug: str) -> None:
        event_counts["step"] += 1
        tool = self._tool(name, slug)
        members = self.world.groups[self.mixed.group_id]
        if tool is None or name == "tango":
            return
        if tool.public_name in members:
            group_writes.remove(self.mixed, [tool], actor=SYSTEM)
            members.remove(tool.public_name)
        else:
            group_writes.assign(self.mixed, [tool], actor=SYSTEM)
            members.append(tool.public_name)
