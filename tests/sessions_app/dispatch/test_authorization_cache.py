"""The authorization cache: contents, limits, eviction and keys that end during a load."""

import pytest
from django.utils import timezone

from catalog import cache
from catalog.audit import SYSTEM
from servers.models import Server
from servers.registration import actions as server_actions
from sessions_app.agents import api_keys
from sessions_app.dispatch import authorization_cache
from sessions_app.models import ApiKey
from tests.support.agent_client import make_agent_client
from tests.support.factories import ingest_tools, make_program, tool_object

pytestmark = pytest.mark.django_db


@pytest.fixture
def agent():
    for slug in ("raw", "other"):
        ingest_tools(
            make_program("raw_calls", slug=slug), *map(tool_object, ("say", "later", "seen"))
        )
    cache.clear()
    authorization_cache.clear()
    yield make_agent_client("scout", mode="deferred")
    authorization_cache.clear()


def load(agent, session, tool="raw__say"):
    return authorization_cache.load(ApiKey.objects.get(agent=agent.agent).sha256, session.id, tool)


def test_an_entry_can_plan_all_tools_of_the_servers_it_was_loaded_for(agent):
    session = agent.open()
    session.load("mcp:raw")
    authorization = load(agent, session)
    assert authorization.can_plan("raw__later")
    assert not authorization.can_plan("other__say")
    assert load(agent, session, "other__say") is authorization
    assert authorization.can_plan("other__say")
    approved = authorization.scope.tools["raw__say"].approved
    assert (
        authorization.shown_definition("raw__say"),
        authorization.shown_definition("other__say"),
    ) == (approved.pk, None)


def test_an_older_definition_that_a_session_loaded_is_cached(agent):
    server = make_program("raw_calls", slug="third")
    server_actions.change_settings(server, {"trust": "auto"}, actor=SYSTEM)
    ingest_tools(server, tool_object("say", description="Old words"))
    session = agent.open()
    session.load("mcp:third")
    ingest_tools(server, tool_object("say", description="New words"))
    cache.clear()
    authorization = load(agent, session, "third__say")
    shown = authorization.shown_definition("third__say")
    assert shown == authorization.older_definitions["third__say"]
    assert shown not in cache.current().definitions
    assert authorization.can_plan("third__say")
    assert authorization.size_bytes == authorization_cache.BYTES_PER_NAME


def test_loading_updates_the_last_use_of_the_key(agent):
    session = agent.open()
    ApiKey.objects.update(last_used_at=None)
    load(agent, session)
    used = ApiKey.objects.get(agent=agent.agent).last_used_at
    assert (timezone.now() - used).total_seconds() < 60


@pytest.mark.parametrize("session_id", ["unknown", "", "a\0b", "a/b", "é" * 50])
def test_unknown_sessions_are_not_cached(agent, session_id):
    digest = ApiKey.objects.get(agent=agent.agent).sha256
    assert authorization_cache.load(digest, session_id, "raw__say") is None
    assert not authorization_cache._entries


@pytest.mark.parametrize("bound", ["sessions", "bytes"])
def test_the_oldest_entries_are_evicted_above_the_limits(agent, monkeypatch, bound):
    sessions = [agent.open() for _ in range(4)]
    for session in sessions:
        session.load("mcp:raw")
    server = Server.objects.get(slug="raw")
    server_actions.change_settings(server, {"trust": "auto"}, actor=SYSTEM)
    ingest_tools(
        server, *(tool_object(name, description="New") for name in ("say", "later", "seen"))
    )
    cache.clear()
    if bound == "sessions":
        monkeypatch.setattr(authorization_cache, "MAX_ENTRIES", 2)
    else:
        monkeypatch.setattr(
            authorization_cache, "MAX_BYTES", 6 * authorization_cache.BYTES_PER_NAME
        )
    for session in sessions:
        load(agent, session)
    assert [session_id for _, session_id in authorization_cache._entries] == [
        session.id for session in sessions[2:]
    ]
    assert authorization_cache._total_bytes == 6 * authorization_cache.BYTES_PER_NAME
    authorization_cache.clear()
    assert (authorization_cache._entries, authorization_cache._total_bytes) == ({}, 0)


def test_hundreds_of_loaded_tools_take_few_bytes(agent):
    """Each tool is still known as loaded or not loaded."""
    names = [f"tool_{number}" for number in range(300)]
    ingest_tools(make_program("raw_calls", slug="wide"), *map(tool_object, names))
    cache.clear()
    session = agent.open()
    assert session.load("mcp:wide", *(f"wide__{name}" for name in names[::3]))
    authorization = load(agent, session, "wide__tool_0")
    shown = [name for name in names if authorization.shown_definition(f"wide__{name}") is not None]
    assert shown == names[::3]
    assert (authorization.older_definitions, authorization.size_bytes < 50) == ({}, True)


def test_entries_of_an_older_catalog_are_removed(agent):
    first, second = agent.open(), agent.open()
    load(agent, first)
    ingest_tools(make_program("raw_calls", slug="third"), tool_object("say"))
    cache.clear()
    load(agent, second)
    assert [session_id for _, session_id in authorization_cache._entries] == [second.id]


@pytest.mark.parametrize("change", ["revoked", "deleted"])
def test_a_key_that_is_revoked_during_the_lookup_is_not_cached(agent, monkeypatch, change):
    """Updating the last use may wait for another writer, which may be the revocation."""
    session, find_key_by_digest = agent.open(), api_keys.find_key_by_digest

    def find_then_end(digest):
        key = find_key_by_digest(digest)
        if change == "revoked":
            api_keys.revoke(ApiKey.objects.get(pk=key.pk), actor=SYSTEM)
        else:
            ApiKey.objects.filter(pk=key.pk).delete()
        return key

    digest = ApiKey.objects.get(agent=agent.agent).sha256
    monkeypatch.setattr(api_keys, "find_key_by_digest", find_then_end)
    assert authorization_cache.load(digest, session.id, "raw__say") is None
    assert not authorization_cache._entries


def test_a_session_is_not_cached_for_another_agent(agent):
    session, other = agent.open(), make_agent_client("other", mode="deferred")
    assert authorization_cache.load(other.agent.pk, session.id, "raw__say") is None
    assert authorization_cache.load(agent.agent.pk, session.id, "raw__say") is not None


def test_expired_entries_are_evicted(agent):
    old, new = agent.open(), agent.open()
    load(agent, old).valid_until = 0.0
    load(agent, new)
    assert [session_id for _, session_id in authorization_cache._entries] == [new.id]
