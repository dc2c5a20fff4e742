"""The servers of a session, as its agent may see them: nothing about how they are reached."""

from typing import Any

from servers.models import Server, ServerQuerySet
from sessions_app.sessions.scope import SessionScope


def servers_in_scope(scope: SessionScope) -> ServerQuerySet:
    """Return the servers that have tools, prompts or resources for this session, by slug."""
    return Server.objects.filter(slug__in={*scope.servers, *scope.feature_servers})


def describe_server(scope: SessionScope, server: Server) -> dict[str, Any]:
    """Return a server's name, state, groups in canonical order, and number of tools."""
    return {
        "slug": server.slug,
        "name": server.name,
        "description": server.description,
        "groups": [
            group.group_id
            for group in scope.groups
            if (group.server is not None and group.server.slug == server.slug)
            or any(member.tool.server == server.slug for member in group.offered)
        ],
        "tools": sum(tool.server == server.slug for tool in scope.offered),
        "state": server.state,
    }
