"""Public URIs of resources: `crib://<server>/<percent-encoded URI>`. Pure.

A `ui://` URI keeps its scheme, since hosts of MCP Apps accept no other.
"""

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

SCHEME, UI_SCHEME = "crib://", "ui://"
PUBLIC_URI = re.compile(r"(?:crib|ui)://(?P<server>[a-z0-9-]+)/(?P<uri>[^/]+)", re.DOTALL)
WEB = ("http://", "https://")  # clients fetch these themselves
EXPRESSION = re.compile(r"(\{[^{}]*\})")
URI_CHARACTERS = ":/?#[]@!$&'()*+,;=%~"


def public_uri(server: str, uri: str) -> str:
    scheme = UI_SCHEME if uri.startswith(UI_SCHEME) else SCHEME
    return f"{scheme}{server}/{quote(uri, safe='')}"


def public_template(server: str, template: str) -> str:
    """Encode a URI template, except its expressions."""
    scheme = UI_SCHEME if template.startswith(UI_SCHEME) else SCHEME
    parts = EXPRESSION.split(template)
    encoded = (part if index % 2 else quote(part, safe="") for index, part in enumerate(parts))
    return f"{scheme}{server}/{''.join(encoded)}"


def split_uri(uri: str) -> tuple[str, str] | None:
    """Return server and original URI of a public one; None for any other text.

    Clients encode the values they put into a template once, so they are encoded again here.
    """
    match = PUBLIC_URI.fullmatch(uri)
    if match is None:
        return None
    original = quote(unquote(match["uri"]), safe=URI_CHARACTERS)
    return (match["server"], original) if ":" in original else None


def view_uri(body: str) -> str:
    """Return the URI of the view (MCP Apps) of a tool's definition; empty if it has none."""
    meta = json.loads(body).get("_meta") if "esourceUri" in body else None
    if not isinstance(meta, Mapping):
        return ""
    ui = meta.get("ui")
    uri = ui.get("resourceUri") if isinstance(ui, Mapping) else meta.get("ui/resourceUri")
    return uri if isinstance(uri, str) else ""


def rewrite_content(server: str, content: list[Any]) -> list[Any]:
    """Return content blocks whose links and embedded resources have public URIs."""
    return [rewrite_block(server, block) for block in content]


def rewrite_block(server: str, block: Any) -> Any:
    if not isinstance(block, Mapping):
        return block
    if block.get("type") == "resource_link":
        return _rewrite_member(server, block, "uri")
    if block.get("type") == "resource" and isinstance(block.get("resource"), Mapping):
        return {**block, "resource": _rewrite_member(server, block["resource"], "uri")}
    return block


def rewrite_meta(server: str, meta: Any) -> Any:
    """Return a `_meta` whose view (of MCP Apps) has a public URI."""
    if not isinstance(meta, Mapping):
        return meta
    meta = _rewrite_member(server, meta, "ui/resourceUri")  # its older name
    if isinstance(meta.get("ui"), Mapping):
        meta = {**meta, "ui": _rewrite_member(server, meta["ui"], "resourceUri")}
    return meta


def rewrite_messages(server: str, messages: list[Any]) -> list[Any]:
    """Rewrite the messages of a prompt."""
    return [
        {**message, "content": rewrite_block(server, message.get("content"))}
        if isinstance(message, Mapping)
        else message
        for message in messages
    ]


def rewrite_contents(server: str, contents: list[Any]) -> list[Any]:
    """Rewrite what was read of a resource."""
    return [
        _rewrite_member(server, item, "uri") if isinstance(item, Mapping) else item
        for item in contents
    ]


def _rewrite_member(server: str, value: Mapping[str, Any], name: str) -> dict[str, Any]:
    uri = value.get(name)
    if not isinstance(uri, str) or uri.lower().startswith(WEB):
        return dict(value)
    return {**value, name: public_uri(server, uri)}
