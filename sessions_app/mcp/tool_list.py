"""The tool list that MCP clients receive: meta-tools, preloaded tools, loaded tools.

Uses the same functions as the agent API. Database code, called off the event loop.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from catalog import cache, rendering
from catalog.definitions import resource_uris
from catalog.rendering import GroupLine
from sessions_app.ledger import events
from sessions_app.models import Agent, AgentSession, EventKind, Mode, SessionState, Strategy
from sessions_app.sessions import lifecycle, loading
from sessions_app.sessions import surface as session_surface
from sessions_app.sessions.schemas import OpenIn
from sessions_app.sessions.scope import ScopeFilter, scope_of_agent
from sessions_app.sessions.snapshots import Pin, surface_of

Object = dict[str, Any]
Fits = Callable[[Object], bool]
ERRORS = "A rejected call returns what is wrong and, where it helps, the schema."
DISPATCH_INSTRUCTIONS = (
    "You have more tools than the list shows: find one with search_tools, read schemas with "
    "load_tools, run it with call_read_only_tool if it only reads, else deferred_tool_call. "
    f"{ERRORS}"
)
INJECT_INSTRUCTIONS = (
    "You have more tools than the list shows: find one with search_tools and add it with "
    f"load_tools, then call it like any other. {ERRORS}"
)
MAX_DESCRIPTION_BYTES = 2_000  # clients truncate longer descriptions, and instructions
# Clients that defer tools on their own keep those with this mark in the model's list.
ALWAYS_LOAD = {"anthropic/alwaysLoad": True}
READING = {"readOnlyHint": True, "idempotentHint": True, "openWorldHint": False}
# They can run any tool, so the annotations assume the worst.
WRITING = {
    "readOnlyHint": False,
    "destructiveHint": True,
    "idempotentHint": False,
    "openWorldHint": True,
}
ANNOTATIONS: Mapping[str, Object] = {
    "search_tools": {"title": "Search tools", **READING},
    "load_tools": {"title": "Load tools", **READING},
    "get_tool_details": {"title": "Read a tool's definition", **READING},
    "check_call": {"title": "Check a call", **READING},
    "call_read_only_tool": {
        "title": "Run a tool that only reads",
        "readOnlyHint": True,
        "openWorldHint": True,
    },
    "deferred_tool_call": {"title": "Run a tool", **WRITING},
    "run_script": {"title": "Run a script", **WRITING},
}
# Of a server's definition, beside its name, description and input schema.
OPTIONAL_FIELDS = ("title", "outputSchema", "annotations", "icons", "_meta")


def session_instructions(session: AgentSession) -> str:
    """Return what the client of a session reads first."""
    surface = surface_of(session.snapshot)
    return _instructions(surface.groups, surface.mode, session.strategy)


def agent_instructions(agent: Agent, strategy: str, mode: str) -> str:
    """Return the same for a session that is not open yet."""
    scope = scope_of_agent(agent, ScopeFilter(without_custom=not agent.runs_custom_tools))
    decision = lifecycle.decide_mode(agent, scope, OpenIn.model_validate({"mode": mode or None}))
    return _instructions(scope.lines, decision.mode, strategy)


def _instructions(groups: Sequence[GroupLine], mode: str, strategy: str) -> str:
    if mode == Mode.FULL or not groups:
        return ERRORS
    is_dispatch = strategy == Strategy.DISPATCH
    text = DISPATCH_INSTRUCTIONS if is_dispatch else INJECT_INSTRUCTIONS
    head = f"{text}\n\n"
    return head + rendering.group_lines(groups, MAX_DESCRIPTION_BYTES - len(head.encode()))


def list_tools(session: AgentSession, *, fixed: bool, fits: Fits) -> list[Object]:
    """Return the tools of a session; with `fixed`, only those it was opened with.

    `fits` returns whether the client's protocol version can represent a tool.
    """
    surface = surface_of(session.snapshot)
    is_full = session.mode == Mode.FULL
    if is_full and not fixed:
        loading.add_new_tools(session)
    tools = surface.tools if fixed else session_surface.tools_array(session, grown=is_full)
    pins = {**({} if fixed else session_surface.pins_of(session)), **surface.pins}
    if loading.current_state(session) == SessionState.OPEN:
        events.record_event(session, EventKind.CATALOG, details={"format": "mcp"})
    return [
        meta_tool(tool, surface.groups)
        if tool["source"] == "builtin"
        else _tool_entry(tool, pins[tool["name"]], fits)
        for tool in tools
    ]


def _tool_entry(tool: Object, pin: Pin, fits: Fits) -> Object:
    """Return the list entry of a server's tool or a custom tool, as the session was shown it."""
    definition = cache.cached_definition(pin["definition"]).tool
    optional = {key: definition[key] for key in OPTIONAL_FIELDS if definition.get(key) is not None}
    if "_meta" in optional and tool.get("mcpServer"):
        optional["_meta"] = resource_uris.rewrite_meta(tool["mcpServer"], optional["_meta"])
    if (read_only := pin.get("read_only")) is not None:  # the admin's word
        optional["annotations"] = {**optional.get("annotations", {}), "readOnlyHint": read_only}
    minimal = {
        "name": tool["name"],
        "description": rendering.described_with_examples(tool),
        "inputSchema": tool["parameters"],
    }
    variants = {**minimal, **optional}, minimal  # every protocol version has the minimal fields
    return next(filter(fits, variants), {**minimal, "inputSchema": {"type": "object"}})


def meta_tool(tool: Object, groups: Sequence[GroupLine]) -> Object:
    """Return the list entry of a meta-tool; that of the search also names the groups."""
    description = tool["description"]
    if tool["name"] == "search_tools" and groups:
        head = f"{description} Groups: "
        room = MAX_DESCRIPTION_BYTES - len(head.encode())
        description = head + rendering.group_names(groups, room)
    return {
        "name": tool["name"],
        "title": ANNOTATIONS[tool["name"]]["title"],
        "description": description,
        "inputSchema": tool["parameters"],
        "annotations": ANNOTATIONS[tool["name"]],
        "_meta": ALWAYS_LOAD,
    }
