"""Token cost of servers in an agent's initial context: all schemas compared with Toolcrib.

Uses the catalog's own renderer, so the second number is exactly what a session with the groups of
these servers receives. Reads only.
"""

from collections.abc import Collection
from dataclasses import dataclass

from catalog import cache, rendering
from catalog.cache import CachedTool
from catalog.models import Group
from servers.web import presenters
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.token_counter import count

STRATEGY = "dispatch"
CATALOG_BUDGET = 2_000  # tokens of catalog text, an agent's default


@dataclass(frozen=True)
class TokenSavings:
    """Tokens of the initial context. `stub_tokens` are the catalog text and the meta-tools."""

    tools: int
    baseline_tokens: int  # all schemas
    stub_tokens: int
    preload_tokens: int

    @property
    def initial_tokens(self) -> int:
        return self.stub_tokens + self.preload_tokens

    @property
    def saves_tokens(self) -> bool:
        return self.initial_tokens < self.baseline_tokens

    @property
    def saved_tokens(self) -> int:
        return max(self.baseline_tokens - self.initial_tokens, 0)


def compute_savings(server_ids: Collection[int]) -> TokenSavings:
    baseline = presenters.sum_costs(server_ids)
    mirrors = Group.objects.filter(follows__in=server_ids)
    group_pks = set(mirrors.values_list("pk", flat=True))
    groups = [group for group in cache.current().groups if group.pk in group_pks]
    lines = []
    preloaded: dict[str, CachedTool] = {}
    for group in groups:
        offered = [member for member in group.members if member.tool.offered]
        if offered:
            names = tuple(member.tool.name for member in offered)
            lines.append(
                rendering.GroupLine(group.group_id, group.display_name, group.description, names)
            )
        preloaded |= {member.tool.name: member.tool for member in offered if member.preload}
    text = rendering.catalog(lines, header=rendering.DISPATCH_HEADER, budget=CATALOG_BUDGET)
    meta = rendering.meta_tools(STRATEGY) if lines else []
    stubs = text.tokens + _count_tokens(meta)
    initial = text.tokens + _count_tokens([*meta, *map(_render_definition, preloaded.values())])
    return TokenSavings(
        tools=baseline["tools"],
        baseline_tokens=baseline["tokens"],
        stub_tokens=stubs,
        preload_tokens=initial - stubs,
    )


def _render_definition(tool: CachedTool) -> dict[str, object]:
    schema = tool.approved.input_schema if tool.approved else {}
    return rendering.tool_object(
        tool.name, tool.description, schema, source=tool.source, server=tool.server
    )


def _count_tokens(tools: list[dict[str, object]]) -> int:
    return count(canonical(tools)) if tools else 0
