"""What an MCP client's requests do, by the functions of the agent API. Database work.

The list of tools, and the meta-tools that are not calls: search, load, details.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from catalog import cache, rendering
from sessions_app.ledger import events
from sessions_app.ledger.payloads import check
from sessions_app.mcp import tools as mcp_tools
from sessions_app.mcp.tools import Object
from sessions_app.models import AgentSession, EventKind, SessionState, Strategy
from sessions_app.sessions import loading, rate_limits
from sessions_app.sessions import search as session_search
from sessions_app.sessions import surface as session_surface
from sessions_app.sessions.schemas import LoadIn, SearchIn
from toolcrib.lib.json_codec import canonical

Fits = Callable[[Object], bool]
Arguments = Mapping[str, Any]
SEARCHES = ("search_tools", "tool_search", "tool_search_regex")
CALLS = ("deferred_tool_call", "call_tool")


@dataclass(frozen=True)
class Done:
    """The result for the model, and whether the list of tools grew by it."""

    result: Object
    grew: bool = False


# --- The list -----------------------------------------------------------------------------------


def listing(session: AgentSession, *, fixed: bool, fits: Fits) -> list[Object]:
    """The tools of a session; `fixed`: those it opened with, whatever was loaded since.

    `fits` says whether the client's protocol knows all that a server's definition says.
    """
    surface = session_surface.surface_of(session.snapshot)
    tools = surface.tools if fixed else session_surface.tools_array(session)
    pins = {**({} if fixed else session_surface.pins_of(session)), **surface.pins}
    if loading.state_now(session) == SessionState.OPEN:
        events.note(session, EventKind.CATALOG, details={"format": "mcp"})
    return [
        mcp_tools.meta_tool(tool, surface.groups)
        if tool["source"] == "builtin"
        else _listed(tool, pins[tool["name"]], fits)
        for tool in tools
    ]


def _listed(tool: Object, pin: session_surface.Pin, fits: Fits) -> Object:
    whole = mcp_tools.plain_tool(tool, cache.definition(pin["definition"]).tool)
    if fits(whole):
        return whole
    bare = mcp_tools.bare_tool(tool)
    return bare if fits(bare) else {**bare, "inputSchema": {"type": "object"}}


# --- The meta-tools -----------------------------------------------------------------------------


def run(session: AgentSession, name: str, arguments: Arguments) -> Done:
    """Carry out a meta-tool. What the model can mend is raised as a ToolcribError."""
    injects = session.strategy == Strategy.INJECT
    before = session_surface.pins_of(session).keys() if injects else ()
    try:
        result = _run(session, name, arguments)
    except ValidationError as error:
        return Done(_misfit(name, error))
    return Done(result, injects and session_surface.pins_of(session).keys() != before)


def _run(session: AgentSession, name: str, arguments: Arguments) -> Object:
    if name in SEARCHES:
        return mcp_tools.said(canonical(_search(session, name, arguments)))
    if name == "load_tools":
        wanted = LoadIn.model_validate(arguments)
        check({"group_id": wanted.group_id, "tool_names": wanted.tool_names}, "")
        loaded = loading.load(session, wanted.group_id, wanted.tool_names).as_json()
        return mcp_tools.said(canonical(loaded), is_error=loaded["error"] is not None)
    tool = SearchIn.model_validate({"name": arguments.get("name", arguments.get("tool_name", ""))})
    check(tool.name, "/name")
    return mcp_tools.said(canonical(session_search.details(session, tool.name, "full")))


def _search(session: AgentSession, name: str, arguments: Arguments) -> dict[str, Any]:
    given = dict(arguments)
    if name == "tool_search_regex":  # others' name for a search that loads what it finds
        given = {"load": True, **given, "pattern": given.get("pattern") or given.pop("query", "")}
    body = SearchIn.model_validate(given)
    check(body.dict(include={"query", "pattern", "name", "server", "server_hint"}), "")
    rate_limits.check_rate(session.agent, "searches", session.agent.searches_per_minute)
    return session_search.find(session, session_search.query_of(body))


def wanted_call(name: str, arguments: Arguments) -> tuple[str, object] | Object:
    """Take a call out of the dispatcher: the tool's name and its arguments, or what is wrong."""
    tool = arguments.get("tool_name", arguments.get("name"))
    if not isinstance(tool, str) or not 0 < len(tool) <= 500:
        return mcp_tools.misfit(name, ["tool_name: the name of a tool, a text"], _schema(name))
    return tool, arguments.get("arguments", arguments.get("args"))


def _misfit(name: str, error: ValidationError) -> Object:
    problems = [
        f"{'.'.join(str(part) for part in found['loc']) or 'arguments'}: {found['msg']}"[:300]
        for found in error.errors(include_url=False, include_input=False)[:20]
    ]
    return mcp_tools.misfit(name, problems, _schema(name))


def _schema(name: str) -> object:
    known = "search_tools" if name in SEARCHES else "deferred_tool_call" if name in CALLS else name
    tools = rendering.meta_tools(Strategy.DISPATCH)
    return next(tool["parameters"] for tool in tools if tool["name"] == known)
