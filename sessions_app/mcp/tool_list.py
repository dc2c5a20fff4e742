"""The tool list that MCP clients receive: meta-tools, preloaded tools, loaded tools.

Uses the same functions as the agent API. Database code, called off the event loop.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from catalog import cache, rendering
from catalog.rendering import GroupLine
from sessions_app.ledger import events
from sessions_app.models import AgentSession, EventKind, SessionState
from sessions_app.sessions import loading
from sessions_app.sessions import surface as session_surface

Object = dict[str, Any]
Fits = Callable[[Object], bool]
INSTRUCTIONS = (
    "Where search_tools is listed, there are more tools than the list shows: find one with it, "
    "read schemas with load_tools or get_tool_details, and run it with deferred_tool_call or by "
    "its own name. A call that cannot be made comes back with what is wrong and, where the "
    "arguments are, with the tool's schema."
)
MAX_DESCRIPTION_BYTES = 2_000  # clients truncate longer descriptions
READING = {"readOnlyHint": True, "idempotentHint": True, "openWorldHint": False}
ANNOTATIONS: Mapping[str, Object] = {
    "search_tools": {"title": "Search tools", **READING},
    "load_tools": {"title": "Load tools", **READING},
    "get_tool_details": {"title": "Read a tool's definition", **READING},
    # It can run any tool, so the annotations assume the worst.
    "deferred_tool_call": {
        "title": "Run a tool",
        "readOnlyHint": False,
        "destructiveHint": True,
        "idempotentHint": False,
        "openWorldHint": True,
    },
}
# Of a server's definition, beside its name, description and input schema.
OPTIONAL_FIELDS = ("title", "outputSchema", "annotations", "icons", "_meta")


def list_tools(session: AgentSession, *, fixed: bool, fits: Fits) -> list[Object]:
    """Return the tools of a session; with `fixed`, only those it was opened with.

    `fits` returns whether the client's protocol version can represent a tool.
    """
    surface = session_surface.surface_of(session.snapshot)
    tools = surface.tools if fixed else session_surface.tools_array(session)
    pins = {**({} if fixed else session_surface.pins_of(session)), **surface.pins}
    if loading.current_state(session) == SessionState.OPEN:
        events.record_event(session, EventKind.CATALOG, details={"format": "mcp"})
    return [
        meta_tool(tool, surface.groups)
        if tool["source"] == "builtin"
        else _tool_entry(tool, pins[tool["name"]], fits)
        for tool in tools
    ]


def _tool_entry(tool: Object, pin: session_surface.Pin, fits: Fits) -> Object:
    """Return the list entry of a server's tool or a custom tool, as the session was shown it."""
    definition = cache.cached_definition(pin["definition"]).tool
    optional = {key: definition[key] for key in OPTIONAL_FIELDS if definition.get(key) is not None}
    minimal = {
        "name": tool["name"],
        "description": tool["description"],
        "inputSchema": tool["parameters"],
    }
    variants = {**minimal, **optional}, minimal  # every protocol version has the minimal fields
    return next(filter(fits, variants), {**minimal, "inputSchema": {"type": "object"}})


def meta_tool(tool: Object, groups: Sequence[GroupLine]) -> Object:
    """Return the list entry of a meta-tool; that of the search also lists the groups."""
    description = tool["description"]
    if tool["name"] == "search_tools" and groups:
        head = f"{description} Behind it:\n"
        description = head + rendering.group_lines(
            groups, MAX_DESCRIPTION_BYTES - len(head.encode())
        )
    return {
        "name": tool["name"],
        "title": ANNOTATIONS[tool["name"]]["title"],
        "description": description,
        "inputSchema": tool["parameters"],
        "annotations": ANNOTATIONS[tool["name"]],
    }
