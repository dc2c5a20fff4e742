"""Search among the prompts and resources of a session: by the share of the query's terms."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from catalog import rendering
from catalog.cache import CachedFeature
from catalog.models import FeatureKind
from catalog.search.tokenizer import tokenize, tokenize_query
from sessions_app.sessions.scope import SessionScope

MAX_FEATURES = 3
MIN_SHARE = 0.5  # of the terms of a query
SUMMARY_LENGTH = 80
HOW_TO_GET = (
    "features are no tools: a client gets a prompt with prompts/get and reads a resource with "
    "resources/read; if it cannot, name them to the user."
)
WORDS = frozenset(tokenize("prompt resource"))  # of the kinds, which every one of them matches


def search_features(scope: SessionScope, texts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the prompts and resources that match best, as the session may have them."""
    queries = [text for text in (texts.get("query"), *texts.get("queries", ())) if text]
    wanted = set().union(*(tokenize_query(text) for text in queries)) - WORDS
    if not wanted:
        return []
    scored = [
        (len(wanted & _terms(feature)) / len(wanted), feature)
        for server in scope.feature_servers.values()
        for feature in server.features
    ]
    best = sorted(
        ((share, feature) for share, feature in scored if share >= MIN_SHARE),
        key=lambda pair: (-pair[0], pair[1].name),
    )
    return [_render(feature) for _, feature in best[:MAX_FEATURES]]


@lru_cache(maxsize=8_192)
def _terms(feature: CachedFeature) -> set[str]:
    item = feature.item
    texts = (feature.key, *(item.get(name) for name in ("name", "title", "description")))
    return set(tokenize("\n".join(text for text in texts if isinstance(text, str))))


def _render(feature: CachedFeature) -> dict[str, Any]:
    name = "name" if feature.kind == FeatureKind.PROMPT else "uri"
    found = {"kind": feature.kind, name: feature.name}
    description = feature.item.get("description") or feature.item.get("title") or ""
    if description:
        found["description"] = rendering.summary(description, SUMMARY_LENGTH)
    return found
