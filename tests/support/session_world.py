"""The world of the session model: servers that change, and admins who hold tools and edit groups.

A hypothesis state machine without sessions; test_session_model.py adds those. Every rule does a
thing to the product and the same to the model.
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
from tests.support.factories import fold, make_server, tool_object
from tests.support.session_model import World

SHAPES: tuple[dict[str, Any], ...] = ({"type": "integer"}, {"type": "string"}, {})
NORTH, SOUTH = ("kilo", "lima", "mike", "oscar"), ("kilo", "papa", "quebec")
BARE = sorted({*NORTH, *SOUTH, "tango"})
LIMITS = dict.fromkeys(
    ("calls_per_minute", "searches_per_minute", "calls_in_flight", "max_sessions"), 10**9
)
seen: Counter[str] = Counter()  # what happened, over all runs
_numbers = itertools.count(1)


def definition(name: str, version: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"n": SHAPES[version % 3]}, "required": ["n"]}
    return tool_object(name, description=f"It is version {version}.", inputSchema=schema)


class Changing(RuleBasedStateMachine):
    """Two servers, a custom tool, and a group that takes from both servers."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.dropped: dict[str, int] = {}

    def begin(self, share: float) -> None:
        """Make the world. `share` is how much of all its tools the agent's budget allows."""
        self.number = next(_numbers)
        self.servers = {
            slug: make_server(slug=f"{slug}-{self.number}", trust="auto")
            for slug in ("north", "south")
        }
        self.listed = {"north": dict.fromkeys(NORTH, 0), "south": dict.fromkeys(SOUTH, 0)}
        for slug in self.servers:
            self._sync(slug)
        self.custom = save_custom_tool(definition(f"tango_{self.number}", 0), actor=SYSTEM)
        self._learn(self.custom, "tango", 0)
        self.mixed = group_writes.create(f"mixed-{self.number}", "Mixed", actor=SYSTEM).group
        # Two of its tools are in another group, too.
        shared = [self._tool("lima"), self._tool("papa")]
        inside = [self.custom, *(tool for tool in shared if tool is not None)]
        group_writes.assign(self.mixed, inside, actor=SYSTEM)
        self.world.groups[self.mixed.group_id] = [tool.public_name for tool in inside]
        self.budget = int(share * sum(self.world.tokens.values()))
        ids = [f"mcp:{server.slug}" for server in self.servers.values()]
        client = make_agent_client(
            f"agent-{self.number}", *ids, self.mixed.group_id, budget=self.budget, **LIMITS
        )
        self.client: AgentClient = client

    def _sync(self, slug: str) -> None:
        """Do what a sync does with the list as it is now, and tell the model."""
        server, listed = self.servers[slug], self.listed[slug]
        fold(
            server,
            *(definition(name, version) for name, version in listed.items()),
            allow_removals=True,
        )
        for name, version in listed.items():
            self._learn(Tool.objects.get(server=server, name=name), name, version)
        group = f"mcp:{server.slug}"
        inside = Group.objects.get(group_id=group).memberships.order_by("position", "pk")
        self.world.groups[group] = [row.tool.public_name for row in inside.select_related("tool")]

    def _learn(self, tool: Tool, own: str, version: int) -> None:
        assert tool.approved is not None
        public = tool.public_name
        self.world.own[public], self.world.version[public] = own, version
        self.world.tokens[public] = tool.approved.tokens
        self.world.gone.discard(public)

    def teardown(self) -> None:
        for server in getattr(self, "servers", {}).values():
            Tool.objects.filter(server=server).delete()
            Group.objects.filter(follows=server).delete()
            server.delete()
        if hasattr(self, "mixed"):
            self.mixed.delete()
            self.custom.delete()

    def _tool(self, name: str, slug: str = "") -> Tool | None:
        """A tool of the world by its bare name."""
        if name == "tango":
            return self.custom
        server = self.servers[slug or ("north" if name in NORTH else "south")]
        return Tool.objects.filter(server=server, name=name).first()

    def _asked(self, some: list[str], public: bool) -> list[str]:
        """Names as an agent might write them: bare, or in full."""
        if not public:
            return [f"tango_{self.number}" if name == "tango" else name for name in some]
        full = {own: name for name, own in self.world.own.items()}
        return [full.get(name, name) for name in some]

    @rule(name=st.sampled_from(BARE), slug=st.sampled_from(["north", "south"]))
    def a_definition_changes(self, name: str, slug: str) -> None:
        seen["step"] += 1
        if name == "tango":
            version = self.world.version[self.custom.public_name] + 1
            changed = definition(f"tango_{self.number}", version)
            self.custom = save_custom_tool(changed, actor=SYSTEM, tool=self.custom)
            self.custom.refresh_from_db()
            self._learn(self.custom, "tango", version)
        elif name in self.listed[slug]:
            self.listed[slug][name] += 1
            self._sync(slug)

    @rule(name=st.sampled_from(NORTH))
    def a_server_drops_a_tool_or_has_it_again(self, name: str) -> None:
        seen["step"] += 1
        listed = self.listed["north"]
        public = f"{self.servers['north'].slug}__{name}"
        if name in listed and len(listed) > 1:
            self.dropped[name] = listed.pop(name)
            self.world.gone.add(public)
        elif name not in listed:
            listed[name] = self.dropped.pop(name)
        self._sync("north")

    @rule(name=st.sampled_from(BARE))
    def an_admin_holds_or_releases_a_tool(self, name: str) -> None:
        seen["step"] += 1
        tool = self._tool(name)
        if tool is None or tool.public_name in self.world.gone:
            return
        if tool.public_name in self.world.held:
            release(tool, actor=SYSTEM)
            self.world.held.discard(tool.public_name)
        else:
            hold(tool, "the model says so", actor=SYSTEM)
            self.world.held.add(tool.public_name)
        if name == "tango":
            self.custom.refresh_from_db()

    @rule(name=st.sampled_from(BARE), slug=st.sampled_from(["north", "south"]))
    def an_admin_edits_a_group(self, name: str, slug: str) -> None:
        seen["step"] += 1
        tool = self._tool(name, slug)
        inside = self.world.groups[self.mixed.group_id]
        if tool is None or name == "tango":
            return
        if tool.public_name in inside:
            group_writes.remove(self.mixed, [tool], actor=SYSTEM)
            inside.remove(tool.public_name)
        else:
            group_writes.assign(self.mixed, [tool], actor=SYSTEM)
            inside.append(tool.public_name)
