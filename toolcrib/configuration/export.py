"""Export of the installation as a configuration: plain values, and as YAML."""

from typing import Any

from catalog.models import ExpectedMember, ExpectedTool, GoldenQuery, Group, Membership, Tool
from catalog.tools import settings as tool_settings
from servers.mcp_json.exporter import export_connections
from servers.models import Server
from servers.registration.actions import SETTING_RULES
from sessions_app.agents.actions import SETTINGS as AGENT_SETTINGS
from sessions_app.models import Agent, Rule
from sessions_app.rules.queries import show_rules
from sessions_app.rules.schemas import MatchIn
from toolcrib.configuration import yaml_text
from toolcrib.configuration.document import VERSION, normalize_match

HEADER = """\
# Configuration of Toolcrib: toolcrib apply FILE --plan shows what it would change.
# Secrets are ${NAME}: set them in the environment of toolcrib apply.
"""


def export_yaml() -> str:
    return HEADER + yaml_text.dump(export_document())


def export_document() -> dict[str, Any]:
    """Return all objects in a fixed order."""
    return {
        "version": VERSION,
        "servers": _servers(),
        "custom_tools": [
            dict(tool.approved.tool)
            for tool in Tool.objects.filter(server=None).select_related("approved")
            if tool.approved
        ],
        "tools": _tools(),
        "groups": [_group(group, members) for group, members in _groups()],
        "agents": _agents(),
        "rules": [
            {
                "name": shown.rule.name,
                "effect": shown.rule.effect,
                "reason": shown.rule.reason,
                "enabled": shown.rule.enabled,
                "approver": shown.rule.approver,
                "match": normalize_match(MatchIn.model_validate(shown.match)),
            }
            for shown in show_rules(Rule.objects.order_by("position", "pk"))
        ],
        "golden_queries": [
            {"query": row.query, "tools": row.right} for row in GoldenQuery.objects.all()
        ],
    }


def _servers() -> list[dict[str, Any]]:
    connections = export_connections()
    settings = [name for name in SETTING_RULES if name not in ("name", "description")]
    return [
        {
            "slug": server.slug,
            "name": server.name,
            "description": server.description,
            **connections[server.slug],
            **{name: getattr(server, name) for name in settings},
            "enabled": server.enabled,
        }
        for server in Server.objects.all()
    ]


def _tools() -> list[dict[str, Any]]:
    rows = {row.tool_name: row.settings for row in ExpectedTool.objects.all()}
    for tool in Tool.objects.with_definitions():
        if changed := tool_settings.read_changed(tool):
            rows[tool.assigned_name or tool.public_name] = changed
    return [{"name": name, **rows[name]} for name in sorted(rows)]


Member = tuple[str, bool | None, bool]  # name, preload, whether its server is mirrored


def _groups() -> list[tuple[Group, list[Member]]]:
    rows: dict[int, list[tuple[int, str, bool | None, int | None]]] = {}
    names = ("tool__assigned_name", "tool__public_name")
    fields = ("group_id", "position", *names, "preload", "tool__server_id")
    for group_id, position, assigned, public, preload, server in Membership.objects.values_list(
        *fields
    ):
        rows.setdefault(group_id, []).append((position, assigned or public, preload, server))
    for expected in ExpectedMember.objects.all():
        row_of = (expected.position, expected.tool_name, expected.preload, None)
        rows.setdefault(expected.group_id, []).append(row_of)
    return [
        (
            group,
            [
                (name, preload, server is not None and server == group.follows_id)
                for _, name, preload, server in sorted(
                    rows.get(group.pk, []), key=lambda row: row[:2]
                )
            ],
        )
        for group in Group.objects.select_related("follows")
    ]


def mirrored_members() -> dict[str, set[str]]:
    """Return the members, by group id, that a group has only because it mirrors their server."""
    return {
        group.group_id: {
            name for name, preload, is_mirrored in members if is_mirrored and preload is None
        }
        for group, members in _groups()
    }


def _group(group: Group, members: list[Member]) -> dict[str, Any]:
    names = [name for name, _, _ in members]
    is_ordered = names != sorted(names)
    return {
        "group_id": group.group_id,
        "display_name": group.display_name,
        "description": group.description,
        "preload_default": group.preload_default,
        "deferred": group.deferred,
        "follows": group.follows.slug if group.follows else None,
        "members": [
            name if preload is None else {"tool": name, "preload": preload}
            for name, preload, is_mirrored in members
            if is_ordered or preload is not None or not is_mirrored
        ],
    }


def _agents() -> list[dict[str, Any]]:
    settings = [name for name in AGENT_SETTINGS if name not in ("name", "description")]
    return [
        {
            "name": agent.name,
            "description": agent.description,
            "groups": "all"
            if agent.all_groups
            else [link.group.group_id for link in agent.group_links.all()],
            **{name: getattr(agent, name) for name in settings},
            "enabled": agent.enabled,
        }
        for agent in Agent.objects.prefetch_related("group_links__group")
    ]
