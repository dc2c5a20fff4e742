"""Native deferred loading: all tools in one request, the provider searches and loads. No I/O.

Anthropic: `defer_loading` and a tool search tool, or its MCP connector with an `mcp_toolset`.
OpenAI Responses: one namespace per group, and `tool_search`. Preloaded tools are not deferred.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from catalog.definitions.public_names import public_names
from catalog.rendering import GroupLine
from sessions_app.formats.providers import ToolObject, anthropic, openai_responses
from toolcrib.lib.errors import Invalid

MAX_DEFERRED_TOOLS = 10_000  # in one request to Anthropic
MAX_REFERENCES = 5
SEARCHES = {"anthropic": ("regex", "bm25", "client"), "openai-responses": ("server", "client")}
CONNECTOR_BETA = "mcp-client-2025-11-20"
SERVER_NAME = "toolcrib"
MAX_NAMESPACE_DESCRIPTION = 500  # characters, unless the group's own description is longer
NAMESPACE_MARGIN = 40  # characters of it for the words around the names
KEY_PLACEHOLDER = "${TOOLCRIB_KEY}"  # responses contain no keys; the caller inserts its own


@dataclass(frozen=True)
class Offer:
    """A tool that a session can use."""

    tool: ToolObject
    preloaded: bool

    @property
    def name(self) -> str:
        return str(self.tool["name"])


def resolve_search(format_: str, search: str | None) -> str:
    """Return the search to use, by default the provider's own. Raises Invalid."""
    searches = SEARCHES.get(format_)
    if searches is None:
        raise Invalid(
            f"The format {format_} has no native form.",
            hint=f"Formats with a native form: {', '.join(SEARCHES)}. Omit native for others.",
            code="no_native_form",
        )
    if search is not None and search not in searches:
        raise Invalid(
            f"The format {format_} does not support the search {search!r}.",
            hint=f"Supported: {', '.join(searches)}.",
            code="unknown_search",
        )
    return search or searches[0]


def anthropic_tools(
    offers: Sequence[Offer], search: str, client_search: ToolObject
) -> list[ToolObject]:
    """Return the search tool, the preloaded tools, and all other tools as deferred."""
    _check_deferred_count(offers)
    preloaded = [anthropic(offer.tool) for offer in offers if offer.preloaded]
    deferred = [
        anthropic(offer.tool) | {"defer_loading": True} for offer in offers if not offer.preloaded
    ]
    if not deferred:
        return preloaded
    # The search tool is never deferred: Anthropic requires at least one tool that is not.
    first = anthropic(client_search) if search == "client" else search_tool(search)
    return [first, *preloaded, *deferred]


def search_tool(search: str) -> ToolObject:
    return {"type": f"tool_search_tool_{search}_20251119", "name": f"tool_search_tool_{search}"}


def _check_deferred_count(offers: Sequence[Offer]) -> None:
    deferred = sum(not offer.preloaded for offer in offers)
    if deferred > MAX_DEFERRED_TOOLS:
        raise Invalid(
            f"Anthropic accepts at most {MAX_DEFERRED_TOOLS:,} deferred tools; "
            f"this session has {deferred:,}.",
            hint="Open the session with fewer groups, or omit native.",
            code="too_many_tools",
        )


def anthropic_connector(
    offers: Sequence[Offer], search: str, url: str, *, lists_all: bool
) -> dict[str, Any]:
    """Return the request fields that connect Anthropic's MCP connector to Toolcrib's endpoint.

    `lists_all`: the endpoint lists every tool, as it does for sessions in full mode. Then the
    toolset defers them: the default config covers the majority, per-tool configs the others.
    """
    _check_deferred_count(offers)
    preloaded = [offer.name for offer in offers if offer.preloaded]
    late = [offer.name for offer in offers if not offer.preloaded]
    deferred = lists_all and len(late) > 0
    default = deferred and len(late) >= len(preloaded)
    others = (preloaded if default else late) if deferred else []
    toolset = {
        "type": "mcp_toolset",
        "mcp_server_name": SERVER_NAME,
        "default_config": {"enabled": True, "defer_loading": default},
        "configs": {name: {"enabled": True, "defer_loading": not default} for name in others},
    }
    server = {"type": "url", "url": url, "name": SERVER_NAME}
    return {
        "tools": [*([search_tool(search)] if deferred else []), toolset],
        "mcp_servers": [server | {"authorization_token": KEY_PLACEHOLDER}],
        "betas": [CONNECTOR_BETA],
    }


def tool_references(
    matches: Sequence[str], known: Mapping[str, Any], message: str, call_id: str
) -> dict[str, Any]:
    """Return search results as references, which the provider expands to definitions.

    References only tools in the session's tools array: any other fails the whole request.
    """
    names = [name for name in matches if name in known][:MAX_REFERENCES]
    if matches and not names:
        message = "The matches were added after this session opened. Open a new session."
    content = [{"type": "tool_reference", "tool_name": name} for name in names]
    result = {"type": "tool_result", "content": content or [{"type": "text", "text": message}]}
    return result | ({"tool_use_id": call_id} if call_id else {})


def responses_tools(
    offers: Sequence[Offer], groups: Sequence[GroupLine], search: str, client_search: ToolObject
) -> list[ToolObject]:
    """Return one namespace per group; with client search, only the preloaded tools."""
    tool_search = {"type": "tool_search"}
    if search == "client":
        offers = [offer for offer in offers if offer.preloaded]
        fields = {key: client_search[key] for key in ("description", "parameters")}
        return [*namespaces(offers, groups), tool_search | {"execution": "client"} | fields]
    tools = namespaces(offers, groups)
    return tools if all(offer.preloaded for offer in offers) else [*tools, tool_search]


def namespaces(offers: Sequence[Offer], groups: Sequence[GroupLine]) -> list[ToolObject]:
    """Put each tool into the namespace of its first group; tools without a group come last."""
    safe_names = public_names("", [line.group_id for line in groups], ())
    remaining = {offer.name: offer for offer in offers}
    tools: list[ToolObject] = []
    for line in groups:
        members = [remaining.pop(name) for name in line.names if name in remaining]
        if members:
            namespace = {
                "type": "namespace",
                "name": safe_names[line.group_id],
                "description": _describe(line),
                "tools": [_function(offer) for offer in members],
            }
            tools.append(namespace)
    return tools + [_function(offer) for offer in remaining.values()]


def _describe(line: GroupLine) -> str:
    """Say what a namespace holds: a model sees this and no tool until it searches."""
    head = f"{line.display_name}: {line.description}".removesuffix(": ").rstrip(".")
    shown: list[str] = []
    room = MAX_NAMESPACE_DESCRIPTION - len(head)
    for name in line.names:
        room -= len(name) + 2
        if room < NAMESPACE_MARGIN:
            break
        shown.append(name)
    if not shown:
        return head
    more = len(line.names) - len(shown)
    return f"{head}. Tools: {', '.join(shown)}" + (f", … {more} more." if more else ".")


def _function(offer: Offer) -> ToolObject:
    function = openai_responses(offer.tool)
    return function if offer.preloaded else function | {"defer_loading": True}


def tool_search_output(
    offers: Sequence[Offer], groups: Sequence[GroupLine], call_id: str
) -> dict[str, Any]:
    """Return the result of a client-side tool search, with the matching tools."""
    return {
        "type": "tool_search_output",
        "call_id": call_id or None,
        "execution": "client",
        "status": "completed",
        "tools": namespaces(offers, groups),
    }
