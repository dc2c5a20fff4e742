"""Custom tools that are created with their group, so that agents with all groups have them."""

from typing import Any

from django.db import transaction

from catalog.groups import actions as group_actions
from catalog.groups import expected
from catalog.models import Group, Tool
from catalog.tools import actions as tool_actions
from toolcrib.lib.errors import Invalid
from toolcrib.lib.roles import Actor

DEFAULT_GROUP = "custom:tools"


@transaction.atomic
def create_custom_tool(
    raw: object, *, actor: Actor, group_id: str = DEFAULT_GROUP, preload: bool = True
) -> Tool:
    """Create a custom tool in a group; the default group is created with its first tool.

    Memberships and settings that were expected of it are its own; without a group id it has no
    others.
    """
    tool = tool_actions.save_custom_tool(raw, actor=actor)
    expected.claim([tool])
    if not group_id:
        return tool
    group = Group.objects.filter(group_id=group_id).first()
    if group is None:
        if group_id != DEFAULT_GROUP:
            raise Invalid(f"There is no group {group_id[:80]!r}.", hint="GET /groups lists them.")
        text = "Tools that agents run themselves"
        group = group_actions.create(group_id, "Custom tools", text, actor=actor).group
    group_actions.assign(group, [tool], actor=actor, preload=preload)
    return tool


def split_request(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a request into the definition, and how the tool is given to agents."""
    options = {name: body[name] for name in ("group_id", "preload") if body.get(name) is not None}
    if not isinstance(options.get("preload", True), bool):
        raise Invalid("preload must be true or false.")
    if not isinstance(options.get("group_id", ""), str):
        raise Invalid("group_id must be the id of a group.", hint="GET /groups lists them.")
    definition = {name: body[name] for name in body if name not in ("group_id", "preload")}
    return definition, options
