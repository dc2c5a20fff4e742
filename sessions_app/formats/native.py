"""Every tool at once, deferred in the provider's own way, which finds and loads them itself. Pure.

Anthropic: `defer_loading` and a tool search tool, or its MCP connector with an `mcp_toolset`.
OpenAI Responses: a namespace for each group, and `tool_search`. What is preloaded is not deferred.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from catalog.definitions.public_names import public_names
from catalog.rendering import GroupLine
from sessions_app.formats.providers import ToolObject, anthropic, openai_responses
from toolcrib.lib.errors import Invalid

MOST_DEFERRED = 10_000  # tools in one request to Anthropic
MOST_REFERENCES = 5
SEARCHES = {"anthropic": ("regex", "bm25", "client"), "openai-responses": ("server", "client")}
CONNECTOR_BETA = "mcp-client-2025-11-20"
SERVER_NAME = "toolcrib"
KEY_PLACE = "${TOOLCRIB_KEY}"  # answers hold no keys: whoever has one puts it there


@dataclass(frozen=True)
class Offer:
    """One tool a session may use."""

    tool: ToolObject
    preloaded: bool

    @property
    def name(self) -> str:
        return str(self.tool["name"])


def chosen_search(format_: str, search: str | None) -> str:
    """Return how tools are to be found, the provider's own way unless said otherwise."""
    ways = SEARCHES.get(format_)
    if ways is None:
        raise Invalid(
            f"The format {format_} has no native form.",
            hint=f"Native forms are of: {', '.join(SEARCHES)}. Leave native out for others.",
            code="no_native_form",
        )
    if search is not None and search not in ways:
        raise Invalid(
            f"The format {format_} knows no search {search!r}.",
            hint=f"It knows: {', '.join(ways)}.",
            code="unknown_search",
        )
    return search or ways[0]


# --- Anthropic ----------------------------------------------------------------------------------


def anthropic_tools(
    offers: Sequence[Offer], search: str, client_search: ToolObject
) -> list[ToolObject]:
    """The search tool, what is preloaded, and everything else deferred."""
    _check_number(offers)
    if all(offer.preloaded for offer in offers):
        return [anthropic(offer.tool) for offer in offers]
    early = [anthropic(offer.tool) for offer in offers if offer.preloaded]
    late = [
        anthropic(offer.tool) | {"defer_loading": True} for offer in offers if not offer.preloaded
    ]
    # Never deferred itself, so that one tool at least is not.
    first = anthropic(client_search) if search == "client" else search_tool(search)
    return [first, *early, *late]


def search_tool(search: str) -> ToolObject:
    return {"type": f"tool_search_tool_{search}_20251119", "name": f"tool_search_tool_{search}"}


def _check_number(offers: Sequence[Offer]) -> None:
    late = sum(not offer.preloaded for offer in offers)
    if late > MOST_DEFERRED:
        raise Invalid(
            f"Anthropic takes at most {MOST_DEFERRED:,} deferred tools; this session has {late:,}.",
            hint="Open the session with fewer groups, or leave native out.",
            code="too_many_tools",
        )


def anthropic_connector(
    offers: Sequence[Offer], search: str, url: str, *, lists_all: bool
) -> dict[str, Any]:
    """What makes Anthropic reach Toolcrib's MCP endpoint itself.

    `lists_all`: the endpoint lists every tool, as it does for sessions in full mode. Then they
    are deferred there, by the default for most and a config for each that differs.
    """
    _check_number(offers)
    early = [offer.name for offer in offers if offer.preloaded]
    late = [offer.name for offer in offers if not offer.preloaded]
    deferred = lists_all and len(late) > 0
    default = deferred and len(late) >= len(early)
    others = (early if default else late) if deferred else []
    toolset = {
        "type": "mcp_toolset",
        "mcp_server_name": SERVER_NAME,
        "default_config": {"enabled": True, "defer_loading": default},
        "configs": {name: {"enabled": True, "defer_loading": not default} for name in others},
    }
    server = {
        "type": "url",
        "url": url,
        "name": SERVER_NAME,
        "authorization_token": KEY_PLACE,
    }
    return {
        "tools": [*([search_tool(search)] if deferred else []), toolset],
        "mcp_servers": [server],
        "betas": [CONNECTOR_BETA],
    }


def tool_references(
    found: Sequence[str], given: Mapping[str, Any], message: str, call_id: str
) -> dict[str, Any]:
    """Answer a search with references, which the provider turns into definitions.

    Only to tools that the session's array holds: others fail the whole request.
    """
    names = [name for name in found if name in given][:MOST_REFERENCES]
    if found and not names:
        message = "What matches was added after this session opened: a new session has it."
    content: list[dict[str, Any]] = [{"type": "tool_reference", "tool_name": one} for one in names]
    result = {"type": "tool_result", "content": content or [{"type": "text", "text": message}]}
    return result | ({"tool_use_id": call_id} if call_id else {})


# --- OpenAI Responses ---------------------------------------------------------------------------


def responses_tools(
    offers: Sequence[Offer], groups: Sequence[GroupLine], search: str, client_search: ToolObject
) -> list[ToolObject]:
    """A namespace for each group; with the client's search only what is preloaded."""
    if search == "client":
        offers = [offer for offer in offers if offer.preloaded]
    made: list[ToolObject] = namespaces(offers, groups)
    if search == "client":
        return [*made, client_tool_search(client_search)]
    return made if all(offer.preloaded for offer in offers) else [*made, {"type": "tool_search"}]


def client_tool_search(tool: ToolObject) -> ToolObject:
    return {
        "type": "tool_search",
        "execution": "client",
        "description": tool["description"],
        "parameters": tool["parameters"],
    }


def namespaces(offers: Sequence[Offer], groups: Sequence[GroupLine]) -> list[ToolObject]:
    """Put each tool under the first group that has it; those without one stand by themselves."""
    safe = public_names("", [line.group_id for line in groups], ())
    left = {offer.name: offer for offer in offers}
    made: list[ToolObject] = []
    for line in groups:
        members = [left.pop(name) for name in line.names if name in left]
        if members:
            about = f"{line.display_name}: {line.description}".removesuffix(": ")
            made.append(
                {
                    "type": "namespace",
                    "name": safe[line.group_id],
                    "description": about,
                    "tools": [_member(offer) for offer in members],
                }
            )
    return made + [_member(offer) for offer in left.values()]


def _member(offer: Offer) -> ToolObject:
    shaped = openai_responses(offer.tool)
    return shaped if offer.preloaded else shaped | {"defer_loading": True}


def tool_search_output(
    offers: Sequence[Offer], groups: Sequence[GroupLine], call_id: str
) -> dict[str, Any]:
    """Answer a search that the model asked its client for, with the tools themselves."""
    return {
        "type": "tool_search_output",
        "call_id": call_id or None,
        "execution": "client",
        "status": "completed",
        "tools": namespaces(offers, groups),
    }
