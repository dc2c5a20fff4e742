"""Catalogs in provider formats: system text, tools array and other request fields.

Everything is derived from the session's snapshot, so a definition that changes later does not
change a response.
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
from sessions_app.sessions import surface as session_surface
from sessions_app.sessions.schemas import FormatIn
from sessions_app.sessions.snapshots import Surface, surface_of
from toolcrib.lib.errors import Invalid
from toolcrib.lib.json_codec import canonical_in_pieces, digest, join_members

NATIVE_HEADER = (
    "Most of your tools are not shown until you search for them. Search in words for what you "
    "want to do, then call what was found by its name. The tools are in these groups:"
)
KEPT_META_TOOLS = ("run_script", "check_call")  # what no provider has of its own
DEFAULT_HEADERS = (rendering.DISPATCH_HEADER, rendering.INJECT_HEADER)


def check_format(options: FormatIn) -> None:
    """Reject a combination of options that no provider supports."""
    if options.native:
        native.resolve_search(options.format, options.search)
    if options.toolset and (
        not options.native or options.format != "anthropic" or options.search == "client"
    ):
        raise Invalid(
            "toolset requires Anthropic's native form with a search by Anthropic.",
            hint="Use format=anthropic&native=true&toolset=true.",
            code="no_native_form",
        )


def session_catalog(session: AgentSession, options: FormatIn) -> str:
    """Return a session's catalog in the requested format, as the response body."""
    if options.native:
        return canonical_in_pieces(native_catalog(session.snapshot, options, session.session_id))
    text, tokens, left_out = session_surface.catalog_text(session)
    surface = surface_of(session.snapshot)
    return _format_body(options.format, text, session_surface.tools_array(session), {
        "mode": session.mode,
        "strategy": session.strategy,
        "revision": session.revision,
        "tokens": tokens,
        "left_out": left_out,
        "servers": surface.servers,
    }, groups=surface.groups_json)  # fmt: skip


def preview_catalog(agent: Agent, options: FormatIn) -> str:
    """Return the catalog that a session opened now would receive."""
    snapshot = lifecycle.preview_snapshot(agent)
    if options.native:
        return canonical_in_pieces(native_catalog(snapshot, options))
    surface = surface_of(snapshot)
    return _format_body(options.format, snapshot.text, surface.tools, {
        "revision": scope.scope_of_agent(agent).revision,
        "tokens": snapshot.tokens,
        "left_out": surface.left_out,
    })  # fmt: skip


def _format_body(
    format_: str, text: str, tools: list[ToolObject], details: dict[str, Any], **encoded: str
) -> str:
    """Return the body; `encoded` are further members of the JSON format, as canonical JSON."""
    if format_ == "text":
        return text
    converted = providers.convert_tools(format_, tools)
    if format_ == "json":
        members = {"text": text, "tools": converted, "etag": digest(text)} | details
        texts = {name: canonical_in_pieces(value) for name, value in members.items()}
        return join_members(texts | encoded)
    return canonical_in_pieces({"system": text, "tools": converted})


def native_catalog(
    snapshot: CatalogSnapshot, options: FormatIn, session_id: str = ""
) -> dict[str, Any]:
    """Return the system text, the tools array and other fields of the provider's native form."""
    search = native.resolve_search(options.format, options.search)
    surface = surface_of(snapshot)
    preloaded = set(surface.preloaded)
    tools_by_name = session_surface.all_tools(snapshot)
    offers = [Offer(tool, name in preloaded) for name, tool in tools_by_name.items()]
    if not options.toolset:  # the endpoint lists them itself
        offers += [Offer(tool, True) for tool in surface.tools if tool["name"] in KEPT_META_TOOLS]
    text = _text(surface, offers)
    client_search = rendering.meta_tools("dispatch")[0]
    if options.toolset:
        lists_all = surface.mode == Mode.FULL
        if not settings.PUBLIC_URL.startswith("https://"):
            raise Invalid(
                f"Anthropic's MCP connector needs an https address; this is {settings.PUBLIC_URL}.",
                hint="Set TOOLCRIB_PUBLIC_URL to an https address that Anthropic can reach, or "
                "omit toolset.",
                code="toolset_needs_https",
            )
        url = f"{settings.PUBLIC_URL}/mcp" + (f"/{session_id}" if session_id else "")
        connector = native.anthropic_connector(offers, search, url, lists_all=lists_all)
        return {"system": text if lists_all else snapshot.text} | connector
    if options.format == "anthropic":
        return {"system": text, "tools": native.anthropic_tools(offers, search, client_search)}
    tools = native.responses_tools(offers, surface.groups, search, client_search)
    return {"system": text, "tools": tools}


def _text(surface: Surface, offers: list[Offer]) -> str:
    if all(offer.preloaded for offer in offers):
        return ""
    header = NATIVE_HEADER if surface.header in DEFAULT_HEADERS else surface.header
    return rendering.catalog(surface.groups, header=header, budget=surface.budget).text


def current_tools(session: AgentSession, options: FormatIn) -> list[ToolObject]:
    """Return the current tools array in the requested format."""
    if options.native:
        return list(native_catalog(session.snapshot, options, session.session_id)["tools"])
    format_ = "json" if options.format == "text" else options.format
    return providers.convert_tools(format_, session_surface.tools_array(session))


def search_response(
    surface: Surface, response: dict[str, Any], format_: str, call_id: str
) -> dict[str, Any]:
    """Return the response to a search as the provider's own search would."""
    names = [tool["name"] for tool in response["tools"]]
    if format_ == "anthropic":
        known = {**surface.pins, **surface.deferred}
        return native.tool_references(names, known, response["message"], call_id)
    fields = {"name": "name", "description": "description", "schema": "parameters"}
    fields["input_examples"] = "input_examples"
    tools = [
        {field: tool[name] for name, field in fields.items() if name in tool}
        for tool in response["tools"]
    ]
    offers = [Offer(tool, preloaded=False) for tool in tools]
    return native.tool_search_output(offers, surface.groups, call_id)
