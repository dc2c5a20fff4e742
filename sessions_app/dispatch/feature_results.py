"""Results that name resources: public URIs instead of the server's own; tokens of other results."""

from typing import Any

from catalog.definitions import resource_uris
from servers.connections.calls import CallOutcome
from servers.spec import PROMPTS_GET, RESOURCES_READ
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.token_counter import count

REWRITES = {
    PROMPTS_GET: resource_uris.rewrite_messages,
    RESOURCES_READ: resource_uris.rewrite_contents,
}


def rewrite_uris(method: str, server: str, outcome: CallOutcome) -> CallOutcome:
    """Return an outcome in which links to resources can be read through Toolcrib."""
    if outcome.serialized is None:
        return outcome
    rewrite = REWRITES.get(method, resource_uris.rewrite_content)
    content = rewrite(server, outcome.content or [])
    meta = resource_uris.rewrite_meta(server, outcome.meta)
    _, structured, _ = outcome.serialized
    texts = canonical(content), structured, canonical(meta)
    size = sum(len(text.encode()) for text in texts)
    return outcome._replace(content=content, meta=meta, serialized=texts, size=size)


def count_tokens(items: list[Any]) -> int:
    """Count the tokens of the texts in messages of a prompt, or in contents of a resource."""
    texts: list[str] = []
    for item in items:
        block = item.get("content") if isinstance(item.get("content"), dict) else item
        inner = block.get("resource") if isinstance(block.get("resource"), dict) else block
        if isinstance(inner.get("text"), str):
            texts.append(inner["text"])
    return count("\n".join(texts))
