"""Which session a request to /mcp means, and what its list of tools says."""

import threading
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from catalog.audit import SYSTEM
from sessions_app.agents import api_keys
from sessions_app.dispatch import key_revocation
from sessions_app.mcp import meta_tools
from sessions_app.mcp import meta_tools as mcp_tools
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.mcp.sessions import Client
from sessions_app.models import AgentSession, ApiKey
from tests.support.agent_client import make_agent_client
from tests.support.factories import fold, make_server, tool_object
from toolcrib.lib.errors import Forbidden, Invalid, NotFound

INSPECTOR = Client("inspector", "2.12", "2026-07-28")


def ask(agent, session_id="", strategy=""):
    return mcp_sessions.authenticate(agent.key, session_id, strategy)


def quiet(session, minutes):
    past = timezone.now() - timedelta(minutes=minutes)
    AgentSession.objects.filter(pk=session.pk).update(last_used_at=past)


def test_a_rolling_session_lasts_until_it_was_quiet_for_half_an_hour(scout):
    first, fresh = mcp_sessions.rolling_session(ask(scout), INSPECTOR)
    assert fresh
    assert '"name":"inspector"' in first.metadata
    quiet(first, 29)
    assert mcp_sessions.rolling_session(ask(scout), INSPECTOR) == (first, False)
    quiet(first, 31)
    second, fresh = mcp_sessions.rolling_session(ask(scout), INSPECTOR)
    assert fresh
    assert second != first
    first.refresh_from_db()
    assert first.state == "expired"
    scout.send("POST", f"/sessions/{second.session_id}/close", {})
    assert mcp_sessions.rolling_session(ask(scout), INSPECTOR)[0] not in (first, second)


def test_each_key_rolls_its_own_and_no_list_of_it_grows(github):
    scout = make_agent_client("scout", mode="deferred", strategy="inject")
    first, _ = mcp_sessions.rolling_session(ask(scout), None)
    assert first.strategy == "dispatch"
    scout.key = api_keys.create_key("another", "agent", agent=scout.agent, actor=SYSTEM)[1]
    second, fresh = mcp_sessions.rolling_session(ask(scout), None)
    assert fresh
    assert second != first
    assert mcp_sessions.connection_session(ask(scout), None).strategy == "inject"
    assert (
        mcp_sessions.connection_session(ask(scout, strategy="dispatch"), None).strategy
        == "dispatch"
    )


@pytest.mark.django_db(transaction=True)
def test_requests_at_the_same_moment_open_one_rolling_session():
    scout = make_agent_client("scout", mode="deferred")
    found, barrier = [], threading.Barrier(4)

    def request():
        try:
            asking = ask(scout)
            barrier.wait(10)
            found.append(mcp_sessions.rolling_session(asking, None))
        finally:
            connection.close()

    threads = [threading.Thread(target=request) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4
    assert len({session.pk for session, _ in found}) == 1
    assert sum(fresh for _, fresh in found) == 1


def test_only_an_agents_key_gets_in_and_only_to_its_own_sessions(scout, operator_token):
    session = scout.open()
    asking = ask(scout, session.id)
    assert asking.session.session_id == session.id
    other = make_agent_client("other")
    for wrong in (session.id, "ses_nothing", "\0"):
        with pytest.raises(NotFound, match=r"There is no such session\."):
            ask(other, wrong)
    with pytest.raises(mcp_sessions.NoKey):
        mcp_sessions.authenticate("tcb_nothing", "", "")
    with pytest.raises(Forbidden):
        mcp_sessions.authenticate(operator_token, "", "")
    with pytest.raises(Invalid):
        ask(scout, strategy="both")


def test_keys_that_ended_are_known(scout):
    good = ApiKey.objects.get()
    revoked, expired = (
        api_keys.create_key(name, "agent", agent=scout.agent, actor=SYSTEM)[0] for name in "ab"
    )
    api_keys.revoke(revoked, actor=SYSTEM)
    ApiKey.objects.filter(pk=expired.pk).update(expires_at=timezone.now())
    asked = {good.pk, revoked.pk, expired.pk, 10**6}
    assert key_revocation._is_valid(asked) == {good.pk}
    scout.agent.enabled = False
    scout.agent.save()
    assert key_revocation._is_valid(asked) == set()


def test_a_client_is_kept_with_the_session_it_came_to_first(scout):
    session = AgentSession.objects.get(session_id=scout.open(metadata={"task": 7}).id)
    mcp_sessions.remember(session, None)
    mcp_sessions.remember(session, INSPECTOR)
    mcp_sessions.remember(session, Client("later", "1", "2025-11-25"))
    session.refresh_from_db()
    wanted = '{"client":{"name":"inspector","protocol":"2026-07-28","version":"2.12"},"task":7}'
    assert session.metadata == wanted


def test_a_definition_that_the_protocol_cannot_hold_is_listed_bare(db):
    server = make_server(slug="odd")
    described = {"title": "Odd", "outputSchema": {"type": "array"}, "description": "Lists."}
    fold(server, tool_object("list", **described), tool_object("plain", title="Plain"))
    session = AgentSession.objects.get(session_id=make_agent_client(mode="full").open().id)

    def fits(tool):
        return tool.get("outputSchema", {"type": "object"})["type"] == "object"

    odd, plain = meta_tools.list_tools(session, fixed=True, fits=fits)
    schema = {"type": "object"}
    assert odd == {"name": "odd__list", "description": "Lists.", "inputSchema": schema}
    assert plain["title"] == "Plain"
    whole, _ = meta_tools.list_tools(session, fixed=True, fits=lambda tool: True)
    assert whole["outputSchema"] == {"type": "array"}


def test_what_is_behind_the_search_is_cut_to_what_clients_show(db):
    for number in range(40):
        server = make_server(slug=f"server-{number:02}", name="Ünïcode " * 9)
        fold(server, tool_object("tool"))
    session = AgentSession.objects.get(session_id=make_agent_client(mode="deferred").open().id)
    search = meta_tools.list_tools(session, fixed=True, fits=bool)[0]
    said = search["description"]
    assert 1800 < len(said.encode()) <= mcp_tools.LONGEST_DESCRIPTION
    shown = said.count("- `mcp:server-")
    assert said.endswith(f"- … {40 - shown} more groups\n")
