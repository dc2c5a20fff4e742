"""Prepared queries return the same rows as Django's querysets."""

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


def open_sessions():
    agent = agent_actions.create("scout", actor=SYSTEM)
    parent = lifecycle.open_session(agent, OpenSessionRequest(metadata={"run": "7"})).session
    return agent, parent, lifecycle.fork_session(parent)


def loaded_fields(row):
    """Return the loaded fields of a row and its relations, without another query."""
    own = {name: value for name, value in vars(row).items() if name != "_state"}
    related = {
        name: loaded_fields(other) if other is not None else None
        for name, other in row._state.fields_cache.items()
    }
    return own, related, row._state.adding, row._state.db


def test_rows_and_their_relations_equal_those_of_django():
    agent, parent, child = open_sessions()
    query = PreparedQuery(2, sessions_of)
    for session in (parent, child):  # the second reuses the compiled SQL
        row = query.first(agent.pk, session.session_id)
        assert loaded_fields(row) == loaded_fields(sessions_of(agent, session.session_id).get())
    assert row.parent == parent
    with CaptureQueriesContext(connection) as queries:
        assert row.snapshot.body  # deferred, and read on access
    assert len(queries) == 1


def test_each_execution_is_one_query_and_parameters_are_not_cached():
    agent, parent, child = open_sessions()
    query = PreparedQuery(2, sessions_of)
    assert query.first(agent.pk, "nobody's") is None
    with CaptureQueriesContext(connection) as queries:
        pks = [query.first(agent.pk, row.session_id).pk for row in (parent, child, parent)]
    assert pks == [parent.pk, child.pk, parent.pk]
    assert len(queries) == 3
    assert query.first(agent.pk + 1, parent.session_id) is None


def test_rows_keep_their_order_and_parameters_cannot_inject_sql():
    agent = agent_actions.create("scout", actor=SYSTEM)
    for name in ("b", "a", "c"):
        api_keys.create_key(name, "agent", agent=agent, actor=SYSTEM)
    query = PreparedQuery(1, lambda agent: ApiKey.objects.filter(agent=agent).order_by("name"))
    assert [key.name for key in query.all(agent.pk)] == ["a", "b", "c"]
    by_name = PreparedQuery(1, lambda name: ApiKey.objects.filter(name=name))
    for hostile in ("a' OR '1'='1", "%s", "%(x)s", "a\\", "?"):
        assert by_name.all(hostile) == []
