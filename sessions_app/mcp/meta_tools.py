"""What an MCP client's requests do, by the functions of the agent API. Database work.

The list of tools, and the meta-tools that are not calls: search, load, details.
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
LONGEST_DESCRIPTION = 2_000  # bytes; clients cut there
READING = {"readOnlyHint": True, "idempotentHint": True, "openWorldHint": False}
ANNOTATIONS: Mapping[str, Object] = {
    "search_tools": {"title": "Search tools", **READING},
    "load_tools": {"title": "Load tools", **READING},
    "get_tool_details": {"title": "Read a tool's definition", **READING},
    # It runs whatever tool it is told to.
    "deferred_tool_call": {
        "title": "Run a tool",
        "readOnlyHint": False,
        "destructiveHint": True,
        "idempotentHint": False,
        "openWorldHint": True,
    },
}
SHOWN = ("title", "outputSchema", "annotations")  # of a server's definition, besides the usual


@dataclass(frozen=True)
class MetaToolResult:
    """The result for the model, and whether the list of tools grew by it."""

    result: Object
    grew: bool = False


# --- The list -----------------------------------------------------------------------------------


def list_tools(session: AgentSession, *, fixed: bool, fits: Fits) -> list[Object]:
    """The tools of a session; `fixed`: those it opened with, whatever was loaded since.

    `fits` says whether the client's protocol knows all that a server's definition says.
    """
    surface = session_surface.surface_of(session.snapshot)
    tools = surface.tools if fixed else session_surface.tools_array(session)
    pins = {**({} if fixed else session_surface.pins_of(session)), **surface.pins}
    if loading.current_state(session) == SessionState.OPEN:
        events.record_event(session, EventKind.CATALOG, details={"format": "mcp"})
    return [
        meta_tool(tool, surface.groups)
        if tool["source"] == "builtin"
        else _listed(tool, pins[tool["name"]], fits)
        for tool in tools
    ]


def _listed(tool: Object, pin: session_surface.Pin, fits: Fits) -> Object:
    whole = plain_tool(tool, cache.cached_definition(pin["definition"]).tool)
    if fits(whole):
        return whole
    bare = bare_tool(tool)
    return bare if fits(bare) else {**bare, "inputSchema": {"type": "object"}}


# --- The meta-tools -----------------------------------------------------------------------------


def run(session: AgentSession, name: str, arguments: Arguments) -> MetaToolResult:
    """Carry out a meta-tool. What the model can mend is raised as a ToolcribError."""
    injects = session.strategy == Strategy.INJECT
    before = session_surface.pins_of(session).keys() if injects else ()
    try:
        result = _run(session, name, arguments)
    except ValidationError as error:
        return MetaToolResult(_misfit(name, error))
    return MetaToolResult(result, injects and session_surface.pins_of(session).keys() != before)


def _run(session: AgentSession, name: str, arguments: Arguments) -> Object:
    if name in SEARCHES:
        return text_result(canonical(_search(session, name, arguments)))
    if name == "load_tools":
        wanted = LoadIn.model_validate(arguments)
        check_value({"group_id": wanted.group_id, "tool_names": wanted.tool_names}, "")
        loaded = loading.load(session, wanted.group_id, wanted.tool_names).as_json()
        return text_result(canonical(loaded), is_error=loaded["error"] is not None)
    tool = SearchIn.model_validate({"name": arguments.get("name", arguments.get("tool_name", ""))})
    check_value(tool.name, "/name")
    return text_result(canonical(session_search.tool_details(session, tool.name, "full")))


def _search(session: AgentSession, name: str, arguments: Arguments) -> dict[str, Any]:
    given = dict(arguments)
    if name == "tool_search_regex":  # others' name for a search that loads what it finds
        given = {"load": True, **given, "pattern": given.get("pattern") or given.pop("query", "")}
    body = SearchIn.model_validate(given)
    check_value(body.dict(include={"query", "pattern", "name", "server", "server_hint"}), "")
    rate_limits.check_rate(session.agent, "searches", session.agent.searches_per_minute)
    return session_search.search_session(session, session_search.parse_body(body))


def unwrap_dispatcher(name: str, arguments: Arguments) -> tuple[str, object] | Object:
    """Take a call out of the dispatcher: the tool's name and its arguments, or what is wrong."""
    tool = arguments.get("tool_name", arguments.get("name"))
    if not isinstance(tool, str) or not 0 < len(tool) <= 500:
        return invalid_arguments_result(
            name, ["tool_name: the name of a tool, a text"], _schema(name)
        )
    return tool, arguments.get("arguments", arguments.get("args"))


def _misfit(name: str, error: ValidationError) -> Object:
    problems = [
        f"{'.'.join(str(part) for part in found['loc']) or 'arguments'}: {found['msg']}"[:300]
        for found in error.errors(include_url=False, include_input=False)[:20]
    ]
    return invalid_arguments_result(name, problems, _schema(name))


def _schema(name: str) -> object:
    known = "search_tools" if name in SEARCHES else "deferred_tool_call" if name in CALLS else name
    tools = rendering.meta_tools(Strategy.DISPATCH)
    return next(tool["parameters"] for tool in tools if tool["name"] == known)


def meta_tool(tool: Object, groups: Sequence[GroupLine]) -> Object:
    """A meta-tool as it is listed; the search says what is behind it."""
    said = tool["description"]
    if tool["name"] == "search_tools" and groups:
        head = f"{said} Behind it:\n"
        said = head + rendering.group_lines_after(groups, LONGEST_DESCRIPTION - len(head.encode()))
    return {
        "name": tool["name"],
        "title": ANNOTATIONS[tool["name"]]["title"],
        "description": said,
        "inputSchema": tool["parameters"],
        "annotations": ANNOTATIONS[tool["name"]],
    }


def plain_tool(tool: Object, definition: Mapping[str, Any]) -> Object:
    """A tool of a server or of the agent's own, as the session was shown it."""
    more = {key: definition[key] for key in SHOWN if definition.get(key) is not None}
    return {**bare_tool(tool), **more}


def bare_tool(tool: Object) -> Object:
    """A tool with nothing that a protocol version might not know."""
    return {
        "name": tool["name"],
        "description": tool["description"],
        "inputSchema": tool["parameters"],
    }


def text_result(text: str, *, is_error: bool = False) -> Object:
    """A result of one text."""
    return {"content": [{"type": "text", "text": text}], "isError": is_error}


def call_result(answer: str) -> Object:
    """A call's answer, as dispatch gives it: what the server sent, unchanged."""
    told = json.loads(answer)
    result = {"content": told["content"], "isError": told["is_error"]}
    if told["structured_content"] is not None:
        result["structuredContent"] = told["structured_content"]
    return result


def invalid_arguments_result(name: str, problems: Sequence[str], schema: object) -> Object:
    """Arguments that a meta-tool does not take, with what it takes."""
    listed = "\n".join(f"- {problem}" for problem in problems)
    return text_result(
        f"The arguments for {name} do not match its schema:\n{listed}\n\n"
        f"Input schema of {name}:\n{json.dumps(schema, ensure_ascii=False, sort_keys=True)}\n\n"
        "Correct the arguments and call again.",
        is_error=True,
    )
