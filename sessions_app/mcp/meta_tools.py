"""MCP tool list, and the meta-tools that search, load and describe tools.

Uses the same functions as the agent API. Database code, called off the event loop.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from catalog import cache, rendering
from catalog.rendering import GroupLine
from sessions_app.agents import rate_limits
from sessions_app.ledger import events
from sessions_app.ledger.payloads import check_value
from sessions_app.models import AgentSession, EventKind, SessionState, Strategy
from sessions_app.sessions import loading
from sessions_app.sessions import search as session_search
from sessions_app.sessions import surface as session_surface
from sessions_app.sessions.schemas import LoadIn, SearchIn
from toolcrib.lib.json_codec import canonical

Object = dict[str, Any]
Fits = Callable[[Object], bool]
Arguments = Mapping[str, Any]
SEARCHES = ("search_tools", "tool_search", "tool_search_regex")
CALLS = ("deferred_tool_call", "call_tool")
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
OPTIONAL_FIELDS = ("title", "outputSchema", "annotations")  # of a server's definition


@dataclass(frozen=True)
class MetaToolResult:
    """The result for the model, and whether the tool list changed."""

    result: Object
    list_changed: bool = False


# --- The list -----------------------------------------------------------------------------------


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
    full = full_tool(tool, cache.cached_definition(pin["definition"]).tool)
    if fits(full):
        return full
    minimal = minimal_tool(tool)
    return minimal if fits(minimal) else {**minimal, "inputSchema": {"type": "object"}}


# --- The meta-tools -----------------------------------------------------------------------------


def run(session: AgentSession, name: str, arguments: Arguments) -> MetaToolResult:
    """Run a meta-tool. Raises ToolcribError for errors that the model can correct."""
    injects = session.strategy == Strategy.INJECT
    before = session_surface.pins_of(session).keys() if injects else ()
    try:
        result = _run(session, name, arguments)
    except ValidationError as error:
        return MetaToolResult(_validation_error_result(name, error))
    return MetaToolResult(result, injects and session_surface.pins_of(session).keys() != before)


def _run(session: AgentSession, name: str, arguments: Arguments) -> Object:
    if name in SEARCHES:
        return text_result(canonical(_search(session, name, arguments)))
    if name == "load_tools":
        body = LoadIn.model_validate(arguments)
        check_value({"group_id": body.group_id, "tool_names": body.tool_names}, "")
        loaded = loading.load(session, body.group_id, body.tool_names).as_json()
        return text_result(canonical(loaded), is_error=loaded["error"] is not None)
    tool = SearchIn.model_validate({"name": arguments.get("name", arguments.get("tool_name", ""))})
    check_value(tool.name, "/name")
    return text_result(canonical(session_search.tool_details(session, tool.name, "full")))


def _search(session: AgentSession, name: str, arguments: Arguments) -> dict[str, Any]:
    values = dict(arguments)
    if name == "tool_search_regex":  # an alias that other products use; it loads its results
        pattern = values.get("pattern") or values.get("query", "")
        values = {"load": True, **values, "pattern": pattern}
    body = SearchIn.model_validate(values)
    check_value(body.dict(include={"query", "pattern", "name", "server", "server_hint"}), "")
    rate_limits.check_rate(session.agent, "searches", session.agent.searches_per_minute)
    return session_search.search_session(session, session_search.parse_body(body))


def unwrap_dispatcher(name: str, arguments: Arguments) -> tuple[str, object] | Object:
    """Return the tool name and arguments of a dispatcher call, or an error result."""
    tool = arguments.get("tool_name", arguments.get("name"))
    if not isinstance(tool, str) or not 0 < len(tool) <= 500:
        return invalid_arguments_result(
            name, ["tool_name: must be the name of a tool, a string"], _schema(name)
        )
    return tool, arguments.get("arguments", arguments.get("args"))


def _validation_error_result(name: str, error: ValidationError) -> Object:
    problems = [
        f"{'.'.join(str(part) for part in item['loc']) or 'arguments'}: {item['msg']}"[:300]
        for item in error.errors(include_url=False, include_input=False)[:20]
    ]
    return invalid_arguments_result(name, problems, _schema(name))


def _schema(name: str) -> object:
    known = "search_tools" if name in SEARCHES else "deferred_tool_call" if name in CALLS else name
    tools = rendering.meta_tools(Strategy.DISPATCH)
    return next(tool["parameters"] for tool in tools if tool["name"] == known)


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


def full_tool(tool: Object, definition: Mapping[str, Any]) -> Object:
    """Return the list entry of a server's tool or a custom tool, as the session was shown it."""
    optional = {key: definition[key] for key in OPTIONAL_FIELDS if definition.get(key) is not None}
    return {**minimal_tool(tool), **optional}


def minimal_tool(tool: Object) -> Object:
    """Return the list entry of a tool with only the fields that every protocol version has."""
    return {
        "name": tool["name"],
        "description": tool["description"],
        "inputSchema": tool["parameters"],
    }


def text_result(text: str, *, is_error: bool = False) -> Object:
    """Return a result with one text block."""
    return {"content": [{"type": "text", "text": text}], "isError": is_error}


def call_result(body: str) -> Object:
    """Convert the response of a call to an MCP result; the server's content is unchanged."""
    response = json.loads(body)
    result = {"content": response["content"], "isError": response["is_error"]}
    if response["structured_content"] is not None:
        result["structuredContent"] = response["structured_content"]
    return result


def invalid_arguments_result(name: str, problems: Sequence[str], schema: object) -> Object:
    """Return an error result that lists the problems and quotes the meta-tool's schema."""
    lines = "\n".join(f"- {problem}" for problem in problems)
    return text_result(
        f"The arguments for {name} do not match its schema:\n{lines}\n\n"
        f"Input schema of {name}:\n{json.dumps(schema, ensure_ascii=False, sort_keys=True)}\n\n"
        "Correct the arguments and call again.",
        is_error=True,
    )
