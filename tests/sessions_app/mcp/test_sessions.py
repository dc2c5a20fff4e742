"""Authentication at /mcp, the session of a request, and its tool list."""

import threading
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from catalog.audit import SYSTEM
from sessions_app.agents import api_keys
from sessions_app.dispatch import key_revocation
from sessions_app.mcp import meta_tools
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.mcp.sessions import Client
from sessions_app.models import AgentSession, ApiKey
from tests.support.agent_client import make_agent_client
from tests.support.factories import ingest_tools, make_server, tool_object
from tests.support.waiting import scaled
from toolcrib.lib.errors import Forbidden, Invalid, NotFound

INSPECTOR = Client("inspector", "2.12", "2026-07-28")


def authenticate(agent, session_id="", strategy=""):
    return mcp_sessions.authenticate(agent.key, session_id, strategy)


def make_idle(session, minutes):
    past = timezone.now() - timedelta(minutes=minutes)
    AgentSession.objects.filter(pk=session.pk).update(last_used_at=past)


def test_a_rolling_session_is_replaced_after_half_an_hour_idle(scout):
    first, is_new = mcp_sessions.rolling_session(authenticate(scout), INSPECTOR)
    assert is_new
    assert '"name":"inspector"' in first.metadata
    make_idle(first, 29)
    assert mcp_sessions.rolling_session(authenticate(scout), INSPECTOR) == (first, False)
    make_idle(first, 31)
    second, is_new = mcp_sessions.rolling_session(authenticate(scout), INSPECTOR)
    assert is_new
    assert second != first
    first.refresh_from_db()
    assert first.state == "expired"
    scout.send("POST", f"/sessions/{second.session_id}/close", {})
    assert mcp_sessions.rolling_session(authenticate(scout), INSPECTOR)[0] not in (first, second)


def test_each_key_has_its_own_rolling_session_with_a_fixed_tool_list(github):
    scout = make_agent_client("scout", mode="deferred", strategy="inject")
    first, _ = mcp_sessions.rolling_session(authenticate(scout), None)
    assert first.strategy == "dispatch"
    scout.key = api_keys.create_key("another", "agent", agent=scout.agent, actor=SYSTEM)[1]
    second, is_new = mcp_sessions.rolling_session(authenticate(scout), None)
    assert is_new
    assert second != first
    assert mcp_sessions.open_connection_session(authenticate(scout), None).strategy == "inject"
    assert (
        mcp_sessions.open_connection_session(
            authenticate(scout, strategy="dispatch"), None
        ).strategy
        == "dispatch"
    )


@pytest.mark.django_db(transaction=True)
def test_concurrent_requests_open_one_rolling_session():
    scout = make_agent_client("scout", mode="deferred")
    results, barrier = [], threading.Barrier(4)

    def request():
        try:
            caller = authenticate(scout)
            barrier.wait(scaled(10))
            results.append(mcp_sessions.rolling_session(caller, None))
        finally:
            connection.close()

    threads = [threading.Thread(target=request) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(30))
    assert len(results) == 4
    assert len({session.pk for session, _ in results}) == 1
    assert sum(is_new for _, is_new in results) == 1


def test_only_agent_keys_are_accepted_and_only_for_their_own_sessions(scout, operator_token):
    session = scout.open()
    caller = authenticate(scout, session.id)
    assert caller.session.session_id == session.id
    other = make_agent_client("other")
    for wrong in (session.id, "ses_nothing", "\0"):
        with pytest.raises(NotFound, match=r"Session not found\."):
            authenticate(other, wrong)
    with pytest.raises(mcp_sessions.MissingKey):
        mcp_sessions.authenticate("tcb_nothing", "", "")
    with pytest.raises(Forbidden):
        mcp_sessions.authenticate(operator_token, "", "")
    with pytest.raises(Invalid):
        authenticate(scout, strategy="both")


def test_revoked_expired_and_disabled_keys_are_invalid(scout):
    good = ApiKey.objects.get()
    revoked, expired = (
        api_keys.create_key(name, "agent", agent=scout.agent, actor=SYSTEM)[0] for name in "ab"
    )
    api_keys.revoke(revoked, actor=SYSTEM)
    ApiKey.objects.filter(pk=expired.pk).update(expires_at=timezone.now())
    keys = {good.pk, revoked.pk, expired.pk, 10**6}
    assert key_revocation._valid_keys(keys) == {good.pk}
    scout.agent.enabled = False
    scout.agent.save()
    assert key_revocation._valid_keys(keys) == set()


def test_the_first_client_of_a_session_is_recorded(scout):
    session = AgentSession.objects.get(session_id=scout.open(metadata={"task": 7}).id)
    mcp_sessions.record_client(session, None)
    mcp_sessions.record_client(session, INSPECTOR)
    mcp_sessions.record_client(session, Client("later", "1", "2025-11-25"))
    session.refresh_from_db()
    expected = '{"client":{"name":"inspector","protocol":"2026-07-28","version":"2.12"},"task":7}'
    assert session.metadata == expected


def test_a_definition_that_the_protocol_cannot_represent_is_listed_with_minimal_fields(db):
    server = make_server(slug="odd")
    described = {"title": "Odd", "outputSchema": {"type": "array"}, "description": "Lists."}
    ingest_tools(server, tool_object("list", **described), tool_object("plain", title="Plain"))
    session = AgentSession.objects.get(session_id=make_agent_client(mode="full").open().id)

    def fits(tool):
        return tool.get("outputSchema", {"type": "object"})["type"] == "object"

    odd, plain = meta_tools.list_tools(session, fixed=True, fits=fits)
    schema = {"type": "object"}
    assert odd == {"name": "odd__list", "description": "Lists.", "inputSchema": schema}
    assert plain["title"] == "Plain"
    full, _ = meta_tools.list_tools(session, fixed=True, fits=lambda tool: True)
    assert full["outputSchema"] == {"type": "array"}


def test_the_group_list_of_the_search_is_truncated_to_what_clients_show(db):
    for number in range(40):
        server = make_server(slug=f"server-{number:02}", name="Ünïcode " * 9)
        ingest_tools(server, tool_object("tool"))
    session = AgentSession.objects.get(session_id=make_agent_client(mode="deferred").open().id)
    search = meta_tools.list_tools(session, fixed=True, fits=bool)[0]
    description = search["description"]
    assert 1800 < len(description.encode()) <= meta_tools.MAX_DESCRIPTION_BYTES
    groups = description.count("- `mcp:server-")
    assert description.endswith(f"- … {40 - groups} more groups\n")
