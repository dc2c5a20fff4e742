"""What is remembered of sessions: enough for any tool of theirs, never more than is of use."""

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
from tests.support.factories import fold, make_program, tool_object

pytestmark = pytest.mark.django_db


@pytest.fixture
def agent():
    for slug in ("raw", "other"):
        fold(make_program("raw_calls", slug=slug), *map(tool_object, ("say", "later", "seen")))
    cache.clear()
    authorization_cache.clear()
    yield make_agent_client("scout", mode="deferred")
    authorization_cache.clear()


def learn(agent, session, tool="raw__say"):
    return authorization_cache.load(ApiKey.objects.get(agent=agent.agent).sha256, session.id, tool)


def test_a_session_that_is_known_knows_all_tools_of_a_server_it_called(agent):
    session = agent.open()
    session.load("mcp:raw")
    ready = learn(agent, session)
    assert ready.knows("raw__later")
    assert not ready.knows("other__say")
    assert learn(agent, session, "other__say") is ready
    assert ready.knows("other__say")
    approved = ready.seen.items["raw__say"].approved
    assert (ready.shown("raw__say"), ready.shown("other__say")) == (approved.pk, None)


def test_an_older_definition_that_a_session_loaded_is_remembered(agent):
    server = make_program("raw_calls", slug="third")
    server_actions.change_settings(server, {"trust": "auto"}, actor=SYSTEM)
    fold(server, tool_object("say", description="Old words"))
    session = agent.open()
    session.load("mcp:third")
    fold(server, tool_object("say", description="New words"))
    cache.clear()
    ready = learn(agent, session, "third__say")
    shown = ready.shown("third__say")
    assert shown == ready.older["third__say"]
    assert shown not in cache.current().definitions
    assert ready.knows("third__say")
    assert ready.held == authorization_cache.BYTES_PER_NAME


def test_learning_notes_that_the_key_was_used(agent):
    session = agent.open()
    ApiKey.objects.update(last_used_at=None)
    learn(agent, session)
    used = ApiKey.objects.get(agent=agent.agent).last_used_at
    assert (timezone.now() - used).total_seconds() < 60


@pytest.mark.parametrize("session_id", ["nobody's", "", "a\0b", "a/b", "é" * 50])
def test_nothing_is_learned_of_what_is_not_there(agent, session_id):
    digest = ApiKey.objects.get(agent=agent.agent).sha256
    assert authorization_cache.load(digest, session_id, "raw__say") is None
    assert not authorization_cache._known


@pytest.mark.parametrize("bound", ["sessions", "bytes"])
def test_the_oldest_are_forgotten_where_it_becomes_too_much(agent, monkeypatch, bound):
    sessions = [agent.open() for _ in range(4)]
    for session in sessions:
        session.load("mcp:raw")
    server = Server.objects.get(slug="raw")
    server_actions.change_settings(server, {"trust": "auto"}, actor=SYSTEM)
    fold(server, *(tool_object(name, description="New") for name in ("say", "later", "seen")))
    cache.clear()
    if bound == "sessions":
        monkeypatch.setattr(authorization_cache, "MAX_ENTRIES", 2)
    else:
        monkeypatch.setattr(
            authorization_cache, "MAX_BYTES", 6 * authorization_cache.BYTES_PER_NAME
        )
    for session in sessions:
        learn(agent, session)
    assert [session_id for _, session_id in authorization_cache._known] == [
        one.id for one in sessions[2:]
    ]
    assert authorization_cache._held == 6 * authorization_cache.BYTES_PER_NAME
    authorization_cache.clear()
    assert (authorization_cache._known, authorization_cache._held) == ({}, 0)


def test_hundreds_of_tools_take_bytes(agent):
    """And each is told from the others, loaded or not."""
    names = [f"tool_{number}" for number in range(300)]
    fold(make_program("raw_calls", slug="wide"), *map(tool_object, names))
    cache.clear()
    session = agent.open()
    assert session.load("mcp:wide", *(f"wide__{name}" for name in names[::3]))
    ready = learn(agent, session, "wide__tool_0")
    shown = [name for name in names if ready.shown(f"wide__{name}") is not None]
    assert shown == names[::3]
    assert (ready.older, ready.held < 50) == ({}, True)


def test_what_is_known_of_an_older_catalog_goes_with_it(agent):
    first, second = agent.open(), agent.open()
    learn(agent, first)
    fold(make_program("raw_calls", slug="third"), tool_object("say"))
    cache.clear()
    learn(agent, second)
    assert [session_id for _, session_id in authorization_cache._known] == [second.id]


@pytest.mark.parametrize("change", ["revoked", "deleted"])
def test_a_key_that_ends_while_it_is_being_looked_up_is_not_remembered(agent, monkeypatch, change):
    """To note its use waits for whoever writes just then, and that may be its revocation."""
    session, found = agent.open(), api_keys.find_key_by_digest

    def then_it_ends(digest):
        key = found(digest)
        if change == "revoked":
            api_keys.revoke(ApiKey.objects.get(pk=key.pk), actor=SYSTEM)
        else:
            ApiKey.objects.filter(pk=key.pk).delete()
        return key

    digest = ApiKey.objects.get(agent=agent.agent).sha256
    monkeypatch.setattr(api_keys, "find_key_by_digest", then_it_ends)
    assert authorization_cache.load(digest, session.id, "raw__say") is None
    assert not authorization_cache._known


def test_a_session_is_not_learned_for_another_agent(agent):
    session, other = agent.open(), make_agent_client("other", mode="deferred")
    assert authorization_cache.load(other.agent.pk, session.id, "raw__say") is None
    assert authorization_cache.load(agent.agent.pk, session.id, "raw__say") is not None


def test_what_is_too_old_to_be_used_is_not_kept_either(agent):
    old, new = agent.open(), agent.open()
    learn(agent, old).until = 0.0
    learn(agent, new)
    assert [session_id for _, session_id in authorization_cache._known] == [new.id]
