"""Questions whose SQL is kept give the rows that Django gives."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from catalog.audit import SYSTEM
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys
from sessions_app.models import AgentSession, ApiKey
from sessions_app.sessions import lifecycle
from sessions_app.sessions.lifecycle import OpenSessionRequest
from toolcrib.lib.prepared_query import PreparedQuery

pytestmark = pytest.mark.django_db


def sessions_of(agent, session_id):
    rows = AgentSession.objects.with_catalog().select_related("parent")
    return rows.filter(agent=agent, session_id=session_id, state="open")


def open_one():
    agent = agent_actions.create("scout", actor=SYSTEM)
    parent = lifecycle.open_session(agent, OpenSessionRequest(metadata={"run": "7"})).session
    return agent, parent, lifecycle.fork_session(parent)


def facts(row):
    """All that is known of a row and its relations without another question."""
    own = {name: value for name, value in vars(row).items() if name != "_state"}
    related = {
        name: facts(other) if other is not None else None
        for name, other in row._state.fields_cache.items()
    }
    return own, related, row._state.adding, row._state.db


def test_rows_and_what_is_joined_to_them_are_as_django_makes_them():
    agent, parent, child = open_one()
    asked = PreparedQuery(2, sessions_of)
    for session in (parent, child):  # the second is asked with the SQL of the first
        told = asked.first(agent.pk, session.session_id)
        assert facts(told) == facts(sessions_of(agent, session.session_id).get())
    assert told.parent == parent
    with CaptureQueriesContext(
        connection,
    ) as later:
        assert told.snapshot.body  # left out, and read when it is asked for
    assert len(later) == 1


def test_each_asking_is_one_question_and_values_are_never_kept():
    agent, parent, child = open_one()
    asked = PreparedQuery(2, sessions_of)
    assert asked.first(agent.pk, "nobody's") is None
    with CaptureQueriesContext(connection) as run:
        found = [asked.first(agent.pk, one.session_id).pk for one in (parent, child, parent)]
    assert found == [parent.pk, child.pk, parent.pk]
    assert len(run) == 3
    assert asked.first(agent.pk + 1, parent.session_id) is None


def test_many_rows_keep_their_order_and_hostile_values_are_only_values():
    agent = agent_actions.create("scout", actor=SYSTEM)
    for name in ("b", "a", "c"):
        api_keys.create_key(name, "agent", agent=agent, actor=SYSTEM)
    asked = PreparedQuery(1, lambda agent: ApiKey.objects.filter(agent=agent).order_by("name"))
    assert [key.name for key in asked.all(agent.pk)] == ["a", "b", "c"]
    by_name = PreparedQuery(1, lambda name: ApiKey.objects.filter(name=name))
    for hostile in ("a' OR '1'='1", "%s", "%(x)s", "a\\", "?"):
        assert by_name.all(hostile) == []
