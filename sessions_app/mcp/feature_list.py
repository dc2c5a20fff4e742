"""Lists of prompts, resources and templates as MCP clients receive them, and what is offered."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from catalog.cache import CachedFeature
from catalog.definitions.features import KEYS
from catalog.models import FeatureKind
from servers.spec import UI_EXTENSION
from sessions_app.models import Agent, AgentSession
from sessions_app.sessions.scope import SessionScope, scope_of_agent, scope_of_session
from toolcrib.lib.json_codec import canonical, digest

Object = dict[str, Any]


@dataclass(frozen=True)
class Versions:
    """Digests of what a client sees in its lists of prompts and of resources."""

    prompts: str
    resources: str


@dataclass(frozen=True)
class Listener:
    """A client that waits for changes of its lists: an agent's, or those of a session in a URL."""

    agent: Agent
    session_id: str = ""


_versions: WeakKeyDictionary[SessionScope, Versions] = WeakKeyDictionary()


def versions_of(scope: SessionScope) -> Versions:
    if scope not in _versions:
        listed = {kind: [list_features(scope, kind)] for kind in FeatureKind.values}
        resources = listed[FeatureKind.RESOURCE] + listed[FeatureKind.TEMPLATE]
        prompts = listed[FeatureKind.PROMPT]
        _versions[scope] = Versions(digest(canonical(prompts)), digest(canonical(resources)))
    return _versions[scope]


def read_versions(listeners: Iterable[Listener]) -> dict[Listener, Versions]:
    """Return the versions of the lists that clients see."""
    return {
        listener: versions_of(scope)
        for listener in set(listeners)
        if (scope := _scope_of(listener)) is not None
    }


def _scope_of(listener: Listener) -> SessionScope | None:
    if not listener.session_id:
        return scope_of_agent(listener.agent)
    sessions = AgentSession.objects.with_catalog().filter(agent=listener.agent)
    session = sessions.filter(session_id=listener.session_id).first()
    return scope_of_session(session) if session is not None else None


def list_features(scope: SessionScope, kind: str) -> list[Object]:
    """Return the entries of one kind, as their servers sent them, with public names and URIs."""
    return [entry(feature) for feature in scope.features(kind)]


def entry(feature: CachedFeature) -> Object:
    return {**feature.item, KEYS[FeatureKind(feature.kind)]: feature.name}


def capabilities(scope: SessionScope) -> Object:
    """Return the capabilities of the server that a client of this scope sees."""
    offered, changes = scope.client_capabilities, {"listChanged": True}
    declared: Object = {"tools": changes}
    if "prompts" in offered:
        declared["prompts"] = changes
    if "resources" in offered:
        declared["resources"] = {"subscribe": "subscribe" in offered, **changes}
    if "completions" in offered:
        declared["completions"] = {}
    if scope.views:
        declared["extensions"] = {UI_EXTENSION: {}}
    return declared
