"""The authorization cache: contents, limits, eviction and keys that end during a load."""

import pytest
from asgiref.sync import async_to_sync
from django.utils import timezone

from catalog import cache
from catalog.audit import SYSTEM
from catalog.models import Revision
from servers.models import Server
from servers.registration import actions as server_actions
from sessions_app.agents import api_keys
from sessions_app.dispatch import authorization as authorizations
from sessions_app.dispatch.authorization import Caller
from sessions_app.models import ApiKey, Event
from sessions_app.sessions.loading import SessionLoads, write_loads
from tests.support.agent_client import make_agent_client
from tests.support.factories import ingest_tools, make_program, tool_object
from toolcrib.lib.errors import Invalid, NotFound

pytestmark = pytest.mark.django_db


@pytest.fixture
def agent():
    for slug in ("raw", "other"):
        ingest_tools(
            make_program("raw_calls", slug=slug), *map(tool_object, ("say", "later", "seen"))
        )
    cache.clear()
    authorizations.clear()
    yield make_agent_client("scout", mode="deferred")
    authorizations.clear()


def load(agent, session):
    digest = ApiKey.objects.get(agent=agent.agent).sha256
    return authorizations._load(Caller(digest, session.id), session.id)


def test_an_entry_knows_what_the_session_was_shown(agent):
    session = agent.open()
    session.load("mcp:raw")
    entry = load(agent, session)
    approved = entry.scope.tools["raw__say"].approved
    assert entry.shown_definition("raw__say") == approved.pk
    assert entry.shown_definition("other__say") is None
    assert (entry.is_loaded("raw__say"), entry.is_loaded("other__say")) == (True, False)


def test_an_entry_after_a_load_is_the_one_that_a_new_load_from_the_database_gives(agent):
    session = agent.open()
    before = load(agent, session)
    loads = SessionLoads(before)
    loads.load("mcp:raw", ["say"])
    loads.load("mcp:other", None)
    after = before.after(loads)
    write_loads(loads)
    again = load(agent, session)
    for name in ("row", "loaded_bits", "older_definitions", "tokens_loaded", "loads_version"):
        assert getattr(after, name) == getattr(again, name), name
    assert after.row != before.row


def test_an_older_definition_that_a_session_loaded_is_cached(agent):
    server = make_program("raw_calls", slug="third")
    server_actions.change_settings(server, {"trust": "auto"}, actor=SYSTEM)
    ingest_tools(server, tool_object("say", description="Old words"))
    session = agent.open()
    session.load("mcp:third")
    ingest_tools(server, tool_object("say", description="New words"))
    cache.clear()
    entry = load(agent, session)
    shown = entry.shown_definition("third__say")
    assert shown == entry.older_definitions["third__say"]
    assert shown not in cache.current().definitions
    assert entry.size_bytes == authorizations.BYTES_PER_NAME


def test_loading_updates_the_last_use_of_the_key(agent):
    session = agent.open()
    ApiKey.objects.update(last_used_at=None)
    load(agent, session)
    used = ApiKey.objects.get(agent=agent.agent).last_used_at
    assert (timezone.now() - used).total_seconds() < 60


@pytest.mark.parametrize("session_id", ["unknown", "", "a\0b", "a/b", "é" * 50])
def test_unknown_sessions_are_not_cached(agent, session_id):
    digest = ApiKey.objects.get(agent=agent.agent).sha256
    with pytest.raises(NotFound):
        authorizations._load(Caller(digest, session_id), session_id)
    assert not authorizations._entries


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
        monkeypatch.setattr(authorizations, "MAX_ENTRIES", 2)
    else:
        monkeypatch.setattr(authorizations, "MAX_BYTES", 6 * authorizations.BYTES_PER_NAME)
    for session in sessions:
        load(agent, session)
    assert [session_id for _, session_id in authorizations._entries] == [
        session.id for session in sessions[2:]
    ]
    assert authorizations._total_bytes == 6 * authorizations.BYTES_PER_NAME
    authorizations.clear()
    assert (authorizations._entries, authorizations._total_bytes) == ({}, 0)


def test_hundreds_of_loaded_tools_take_few_bytes(agent):
    """Each tool is still known as loaded or not loaded."""
    names = [f"tool_{number}" for number in range(300)]
    ingest_tools(make_program("raw_calls", slug="wide"), *map(tool_object, names))
    cache.clear()
    session = agent.open()
    assert session.load("mcp:wide", *(f"wide__{name}" for name in names[::3]))
    entry = load(agent, session)
    assert [name for name in names if entry.is_loaded(f"wide__{name}")] == names[::3]
    assert (entry.older_definitions, entry.size_bytes < 50) == ({}, True)


def test_entries_of_an_older_catalog_are_removed(agent):
    first, second = agent.open(), agent.open()
    load(agent, first)
    ingest_tools(make_program("raw_calls", slug="third"), tool_object("say"))
    cache.clear()
    load(agent, second)
    assert [session_id for _, session_id in authorizations._entries] == [second.id]


@pytest.mark.parametrize("change", ["revoked", "deleted"])
def test_a_key_that_is_revoked_during_the_load_is_rejected(agent, monkeypatch, change):
    """Updating the last use may wait for another writer, which may be the revocation."""
    session, find_key_by_digest = agent.open(), api_keys.find_key_by_digest

    def find_then_end(digest):
        key = find_key_by_digest(digest)
        if change == "revoked" and key is not None:
            api_keys.revoke(ApiKey.objects.get(pk=key.pk), actor=SYSTEM)
        elif key is not None:
            ApiKey.objects.filter(pk=key.pk).delete()
        return key

    monkeypatch.setattr(api_keys, "find_key_by_digest", find_then_end)
    response = session.search("say")
    assert (response.status, response["error"]["code"]) == (401, "unauthorized")
    assert "searched" not in Event.objects.values_list("kind", flat=True)


def test_a_session_is_not_authorized_for_another_agent(agent):
    session, other = agent.open(), make_agent_client("other", mode="deferred")
    with pytest.raises(NotFound):
        load(other, session)


def test_an_operation_whose_authorization_changes_all_the_time_is_told_to_retry(agent):
    session = agent.open()
    digest = ApiKey.objects.get(agent=agent.agent).sha256
    attempts = []

    async def attempt(entry):
        attempts.append(entry)
        raise authorizations.Outdated

    with pytest.raises(authorizations.Busy) as caught:
        async_to_sync(authorizations.run_authorized)(Caller(digest, session.id), attempt)
    assert len(attempts) == authorizations.MAX_ATTEMPTS
    assert (caught.value.status, caught.value.details) == (503, {"retry_after": 1})


def test_an_error_is_reported_only_if_the_authorization_is_current(agent):
    session = agent.open()
    digest = ApiKey.objects.get(agent=agent.agent).sha256
    load(agent, session)
    attempts = []

    async def attempt(entry):
        attempts.append(entry)
        raise Invalid("no")

    with pytest.raises(Invalid):
        async_to_sync(authorizations.run_authorized)(Caller(digest, session.id), attempt)
    assert len(attempts) == 2
    assert attempts[0] is not attempts[1]


def test_expired_entries_are_evicted(agent):
    old, new = agent.open(), agent.open()
    load(agent, old).loaded_at -= authorizations.TTL_SECONDS
    load(agent, new)
    assert [session_id for _, session_id in authorizations._entries] == [new.id]


def test_an_installation_whose_catalog_never_changed_answers_a_search(agent):
    """The revision has no row before the first change; nothing was changed, so nothing is busy."""
    session = agent.open()
    Revision.objects.all().delete()
    cache.clear()
    authorizations.clear()
    assert session.search("anything")["status"] in ("success", "no_matches")
