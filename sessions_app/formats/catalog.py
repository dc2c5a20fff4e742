"""What a session or an agent is given in a provider's own format, from the snapshot it has.

The text, the tools array and what else a request to the provider wants. As fixed as the snapshot:
a definition that changes meanwhile does not change an answer.
"""

from typing import Any

from django.conf import settings

from catalog import rendering
from catalog.models import CatalogSnapshot
from sessions_app.formats import native, providers
from sessions_app.formats.native import Offer
from sessions_app.formats.providers import ToolObject
from sessions_app.models import Agent, AgentSession, Mode
from sessions_app.sessions import lifecycle, scope
from sessions_app.sessions import search as session_search
from sessions_app.sessions import surface as session_surface
from sessions_app.sessions.schemas import FormatIn
from sessions_app.sessions.surface import Surface
from toolcrib.lib.errors import Invalid
from toolcrib.lib.json_codec import canonical, digest

NATIVE_HEADER = (
    "Most of your tools are not shown until you search for them. Search in words for what you "
    "want to do, then call what was found by its name. The tools are in these groups:"
)
OURS = (rendering.DISPATCH_HEADER, rendering.INJECT_HEADER)


def check(wanted: FormatIn) -> None:
    """Refuse a wish that no provider has a form for."""
    if wanted.native:
        native.chosen_search(wanted.format, wanted.search)
    if wanted.toolset and (
        not wanted.native or wanted.format != "anthropic" or wanted.search == "client"
    ):
        raise Invalid(
            "A toolset is of Anthropic's native form, and searched by Anthropic.",
            hint="Ask for format=anthropic&native=true&toolset=true.",
            code="no_native_form",
        )


# --- Catalogs -----------------------------------------------------------------------------------


def catalog(session: AgentSession, wanted: FormatIn) -> str:
    """A session's catalog in the form that is wanted: the very bytes."""
    if wanted.native:
        return canonical(given(session.snapshot, wanted, session.session_id))
    text, tokens, left_out = session_surface.catalog_text(session)
    surface = session_surface.surface_of(session.snapshot)
    return _shaped(wanted.format, text, session_surface.tools_array(session), {
        "mode": session.mode,
        "strategy": session.strategy,
        "revision": session.revision,
        "tokens": tokens,
        "left_out": left_out,
        "groups": _groups(surface),
        "servers": _servers(surface),
    })  # fmt: skip


def preview(agent: Agent, wanted: FormatIn) -> str:
    """The catalog of a session that would be opened now."""
    snapshot = lifecycle.preview_snapshot(agent)
    if wanted.native:
        return canonical(given(snapshot, wanted))
    surface = session_surface.surface_of(snapshot)
    return _shaped(wanted.format, snapshot.text, surface.tools, {
        "revision": scope.scope_of_agent(agent).revision,
        "tokens": snapshot.tokens,
        "left_out": surface.left_out,
    })  # fmt: skip


def _shaped(format_: str, text: str, tools: list[ToolObject], facts: dict[str, Any]) -> str:
    if format_ == "text":
        return text
    shaped = providers.tools_in(format_, tools)
    if format_ == "json":
        return canonical({"text": text, "tools": shaped, "etag": digest(text)} | facts)
    return canonical({"system": text, "tools": shaped})


def _groups(surface: Surface) -> list[dict[str, Any]]:
    return [
        {
            "group_id": line.group_id,
            "display_name": line.display_name,
            "description": line.description,
            "tool_names": list(line.names),
        }
        for line in surface.groups
    ]


def _servers(surface: Surface) -> list[str]:
    """The servers whose tools were in scope when the session opened."""
    pinned = {pin["server"] for pin in surface.pins.values()}
    return sorted((pinned | {server for _, _, server in surface.deferred.values()}) - {""})


# --- Native forms -------------------------------------------------------------------------------


def given(snapshot: CatalogSnapshot, wanted: FormatIn, session_id: str = "") -> dict[str, Any]:
    """The system text, the tools array and the rest, as the provider's native form has them."""
    search = native.chosen_search(wanted.format, wanted.search)
    surface = session_surface.surface_of(snapshot)
    offers = _offers(snapshot, surface)
    text = _text(surface, offers)
    ours = rendering.meta_tools("dispatch")[0]
    if wanted.toolset:
        lists_all = surface.mode == Mode.FULL
        url = f"{settings.PUBLIC_URL}/mcp" + (f"/{session_id}" if session_id else "")
        made = native.anthropic_connector(offers, search, url, lists_all=lists_all)
        return {"system": text if lists_all else snapshot.text} | made
    if wanted.format == "anthropic":
        return {"system": text, "tools": native.anthropic_tools(offers, search, ours)}
    tools = native.responses_tools(offers, surface.groups, search, ours)
    # Where namespaces stand in the array, they say what there is.
    return {"system": text if search == "client" else "", "tools": tools}


def _offers(snapshot: CatalogSnapshot, surface: Surface) -> list[Offer]:
    early = set(surface.preloaded)
    return [
        Offer(tool, name in early) for name, tool in session_surface.all_tools(snapshot).items()
    ]


def _text(surface: Surface, offers: list[Offer]) -> str:
    if all(offer.preloaded for offer in offers):
        return ""
    header = NATIVE_HEADER if surface.header in OURS else surface.header
    return rendering.catalog(surface.groups, header=header, budget=surface.budget).text


def tools_now(session: AgentSession, wanted: FormatIn) -> list[ToolObject]:
    """What belongs in the tools array now."""
    if wanted.native:
        tools: list[ToolObject] = given(session.snapshot, wanted, session.session_id)["tools"]
        return tools
    shape = "json" if wanted.format == "text" else wanted.format
    return providers.tools_in(shape, session_surface.tools_array(session))


def found(
    session: AgentSession, asked: session_search.SessionQuery, format_: str, call_id: str
) -> dict[str, Any]:
    """Search, and answer as a provider's own search would have."""
    answer = session_search.search_session(session, asked)
    names = [tool["name"] for tool in answer["tools"]]
    if format_ == "anthropic":
        snapshot = session_surface.surface_of(session.snapshot)
        known = {**snapshot.pins, **snapshot.deferred}
        return native.tool_references(names, known, answer["message"], call_id)
    tools = [
        {"name": tool["name"], "description": tool["description"], "parameters": tool["schema"]}
        for tool in answer["tools"]
    ]
    groups = session_surface.surface_of(session.snapshot).groups
    offers = [Offer(tool, preloaded=False) for tool in tools]
    return native.tool_search_output(offers, groups, call_id)
