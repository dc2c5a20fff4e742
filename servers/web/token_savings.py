"""What the tools of some servers cost an agent: all at once, and through Toolcrib.

Written by the catalog's own renderer, so that the second figure is what a session is given that
has these servers' groups. Reads only.
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
BUDGET = 2_000  # tokens of catalog text, an agent's default


@dataclass(frozen=True)
class TokenSavings:
    """Tokens before an agent's first word. `stubs` are the catalog and the meta-tools."""

    tools: int
    all_tokens: int
    stubs: int
    preloads: int

    @property
    def paid(self) -> int:
        return self.stubs + self.preloads

    @property
    def saves(self) -> bool:
        return self.paid < self.all_tokens

    @property
    def rest(self) -> int:
        return max(self.all_tokens - self.paid, 0)


def token_savings(server_ids: Collection[int]) -> TokenSavings:
    """Weigh the tools of these servers as they stand in the groups that follow them."""
    price = presenters.describe_cost(server_ids)
    following = Group.objects.filter(follows__in=server_ids)
    wanted = set(following.values_list("pk", flat=True))
    groups = [group for group in cache.current().groups if group.pk in wanted]
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
    text = rendering.catalog(lines, header=rendering.DISPATCH_HEADER, budget=BUDGET)
    meta = rendering.meta_tools(STRATEGY) if lines else []
    bare = text.tokens + _tokens(meta)
    paid = text.tokens + _tokens([*meta, *map(_definition, preloaded.values())])
    return TokenSavings(price["tools"], price["tokens"], stubs=bare, preloads=paid - bare)


def _definition(item: CachedTool) -> dict[str, object]:
    schema = item.approved.input_schema if item.approved else {}
    return rendering.tool_object(
        item.name, item.description, schema, source=item.source, server=item.server
    )


def _tokens(tools: list[dict[str, object]]) -> int:
    return count(canonical(tools)) if tools else 0
