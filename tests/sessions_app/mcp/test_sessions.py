"""The session of a request at /mcp, handshake connections, and the tool list."""

import threading
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.db import connection
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.models import Tool
from catalog.tools.actions import save_custom_tool, set_read_only
from servers.models import Server
from sessions_app.agents import api_keys
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.mcp import tool_list
from sessions_app.mcp.sessions import Client, ConnectionCaller, RollingCaller, UrlCaller
from sessions_app.mcp.streams import NotificationStream, Streams
from sessions_app.models import AgentSession, ApiKey, McpConnection
from sessions_app.sessions import lifecycle
from sessions_app.tasks import tidy
from tests.support.agent_client import add_tools, make_agent_client, make_group
from tests.support.factories import ingest_tools, make_server, tool_object
from tests.support.waiting import scaled
from toolcrib.lib.errors import Invalid

INSPECTOR = Client({"name": "inspector", "version": "2.12"}, "2026-07-28")


@pytest.fixture(autouse=True)
def _no_cached_connections():
    mcp_sessions.clear_caches()
    yield
    mcp_sessions.clear_caches()


def digest_of(agent):
    return api_keys.find_key(agent.key).sha256


def rolling(agent, client=INSPECTOR):
    """Return the rolling session of an agent's key, and whether it is new."""
    known = set(AgentSession.objects.values_list("session_id", flat=True))
    caller = RollingCaller(digest_of(agent), client=client)
    session_id = async_to_sync(caller.find_session)(renew=True)
    return AgentSession.objects.get(session_id=session_id), session_id not in known


def make_connection(agent, strategy=""):
    key = api_keys.find_key(agent.key)
    client = Client({"name": "older", "version": "1"}, "2025-11-25")
    row = mcp_sessions.create_connection(key, client, {"roots": {}}, strategy)
    return ConnectionCaller(key.sha256, connection_id=row.connection_id)


def session_of(caller):
    return AgentSession.objects.get(session_id=async_to_sync(caller.find_session)(renew=True))


def make_idle(session, minutes):
    past = timezone.now() - timedelta(minutes=minutes)
    AgentSession.objects.filter(pk=session.pk).update(last_used_at=past)


def test_a_rolling_session_is_replaced_after_half_an_hour_idle(scout):
    first, is_new = rolling(scout)
    assert is_new
    assert '"name":"inspector"' in first.metadata
    make_idle(first, 29)
    assert rolling(scout) == (first, False)
    make_idle(first, 31)
    second, is_new = rolling(scout)
    assert is_new
    assert second != first
    first.refresh_from_db()
    assert first.state == "expired"
    scout.send("POST", f"/sessions/{second.session_id}/close", {})
    assert rolling(scout)[0] not in (first, second)


def test_a_new_rolling_session_has_another_list_only_if_that_differs(github):
    scout = make_agent_client("scout", mode="deferred")

    def open_next():
        caller = RollingCaller(digest_of(scout), client=INSPECTOR)
        session_id = async_to_sync(caller.find_session)(renew=True)
        make_idle(AgentSession.objects.get(session_id=session_id), 31)
        return bool(caller.changed_lists)

    assert open_next() is True
    assert open_next() is False
    add_tools("calendar", "add_event")  # whose group `search_tools` names
    assert open_next() is True
    assert AgentSession.objects.count() == 3


def test_each_key_has_its_own_rolling_session_with_a_fixed_tool_list(github):
    scout = make_agent_client("scout", mode="deferred", strategy="inject")
    first, _ = rolling(scout, None)
    assert first.strategy == "dispatch"
    scout.key = api_keys.create_key("another", "agent", agent=scout.agent, actor=SYSTEM)[1]
    second, is_new = rolling(scout, None)
    assert is_new
    assert second != first
    assert session_of(make_connection(scout)).strategy == "inject"
    assert session_of(make_connection(scout, "dispatch")).strategy == "dispatch"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", ["rolling", "connection"])
def test_concurrent_requests_open_one_session(kind):
    scout = make_agent_client("scout", mode="deferred")
    caller = make_connection(scout) if kind == "connection" else RollingCaller(digest_of(scout))
    results, barrier = [], threading.Barrier(4)

    def request():
        try:
            barrier.wait(scaled(10))
            results.append(async_to_sync(caller.find_session)(renew=True))
        finally:
            connection.close()

    threads = [threading.Thread(target=request) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(30))
    assert len(results) == 4
    assert set(results) == {AgentSession.objects.get().session_id}


def test_a_connection_is_found_only_by_its_own_key(scout):
    caller = make_connection(scout)
    found = async_to_sync(mcp_sessions.find_connection)
    assert found(caller.digest, caller.connection_id).protocol_version == "2025-11-25"
    other = api_keys.create_key("other", "agent", agent=scout.agent, actor=SYSTEM)[0]
    for digest, connection_id in (
        (other.sha256, caller.connection_id),
        (caller.digest, "0" * 32),
        (caller.digest, "\0"),
    ):
        with pytest.raises(mcp_sessions.UnknownConnection):
            found(digest, connection_id)


def test_a_connection_whose_session_ended_is_unknown(scout):
    caller = make_connection(scout)
    lifecycle.close_session(session_of(caller))
    with pytest.raises(mcp_sessions.UnknownConnection):
        async_to_sync(caller.find_session)(renew=True)


def test_at_the_limit_the_longest_idle_connections_are_closed(scout, settings):
    settings.MAX_CONNECTIONS = 2
    first, second = make_connection(scout), make_connection(scout)
    sessions = [session_of(caller) for caller in (first, second)]
    with pytest.raises(mcp_sessions.TooManyConnections):
        make_connection(scout)
    make_idle(sessions[0], 31)
    make_connection(scout)
    states = [AgentSession.objects.get(pk=session.pk).state for session in sessions]
    assert states == ["closed", "open"]
    assert McpConnection.objects.count() == 2


def test_connections_of_a_revoked_key_are_closed(scout):
    kept = make_connection(scout)
    session_of(kept)
    scout.key = api_keys.create_key("other", "agent", agent=scout.agent, actor=SYSTEM)[1]
    session = session_of(make_connection(scout))
    api_keys.revoke(api_keys.find_key(scout.key), actor=SYSTEM)
    tidy()
    session.refresh_from_db()
    assert session.state == "closed"
    assert McpConnection.objects.get().connection_id == kept.connection_id


def test_ended_and_unused_connections_are_deleted(scout):
    ended, unused, used, new = (make_connection(scout) for _ in range(4))
    lifecycle.close_session(session_of(ended))
    session_of(used)
    old = timezone.now() - timedelta(days=2)
    ids = [unused.connection_id, used.connection_id]
    McpConnection.objects.filter(connection_id__in=ids).update(created_at=old)
    tidy()
    left = set(McpConnection.objects.values_list("connection_id", flat=True))
    assert left == {used.connection_id, new.connection_id}


def test_a_cancellation_waits_in_the_row_for_the_process_of_the_call(scout):
    first, second = make_connection(scout), make_connection(scout)
    for request_id in (7, "a"):
        mcp_sessions.add_cancellation(first.connection_id, request_id)
    mcp_sessions.add_cancellation(second.connection_id, 8)
    for number in range(mcp_sessions.MAX_CANCELLED + 5):
        mcp_sessions.add_cancellation("nothing", number)
    taken = mcp_sessions.take_cancellations([first.connection_id, "nothing"])
    assert taken == [(first.connection_id, 7), (first.connection_id, "a")]
    assert mcp_sessions.take_cancellations([first.connection_id]) == []
    assert mcp_sessions.take_cancellations([second.connection_id]) == [(second.connection_id, 8)]


def test_revoked_expired_and_disabled_keys_are_invalid(scout):
    good = ApiKey.objects.get()
    revoked, expired = (
        api_keys.create_key(name, "agent", agent=scout.agent, actor=SYSTEM)[0] for name in "ab"
    )
    api_keys.revoke(revoked, actor=SYSTEM)
    ApiKey.objects.filter(pk=expired.pk).update(expires_at=timezone.now())
    keys = {good.pk, revoked.pk, expired.pk, 10**6}
    assert api_keys.valid_keys(keys) == {good.pk}
    scout.agent.enabled = False
    scout.agent.save()
    assert api_keys.valid_keys(keys) == set()


def test_the_first_client_of_a_session_is_recorded(scout):
    session = AgentSession.objects.get(session_id=scout.open(metadata={"task": 7}).id)
    other = make_agent_client("other")
    for agent, client in (
        (other, Client({"name": "stranger"}, "2025-11-25")),
        (scout, None),
        (scout, Client({"version": 3}, "2025-11-25")),
        (scout, INSPECTOR),
        (scout, Client({"name": "later"}, "2025-11-25")),
    ):
        mcp_sessions.clear_caches()
        caller = UrlCaller(digest_of(agent), session.session_id, client=client)
        async_to_sync(caller.find_session)(renew=False)
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

    odd, plain = tool_list.list_tools(session, fixed=True, fits=fits)
    schema = {"type": "object"}
    assert odd == {"name": "odd__list", "description": "Lists.", "inputSchema": schema}
    assert plain["title"] == "Plain"
    full, _ = tool_list.list_tools(session, fixed=True, fits=lambda tool: True)
    assert full["outputSchema"] == {"type": "array"}


def test_icons_and_meta_of_a_definition_are_listed(db):
    extras = {"icons": [{"src": "data:image/png;base64,AA=="}], "_meta": {"example.org/x": 1}}
    ingest_tools(make_server(slug="odd"), tool_object("list", **extras))
    session = AgentSession.objects.get(session_id=make_agent_client(mode="full").open().id)
    (tool,) = tool_list.list_tools(session, fixed=True, fits=bool)
    assert {name: tool[name] for name in extras} == extras


def make_many_groups():
    for number in range(200):
        server = make_server(slug=f"server-{number:03}", name="Ünïcode " * 9)
        ingest_tools(server, tool_object("tool"))
    client = make_agent_client(mode="deferred")
    return client, AgentSession.objects.get(session_id=client.open().id)


def test_group_lines_and_group_names_are_truncated_to_what_clients_show(db):
    client, session = make_many_groups()
    description = tool_list.list_tools(session, fixed=True, fits=bool)[0]["description"]
    instructions = tool_list.session_instructions(session)
    assert instructions == tool_list.agent_instructions(client.agent, "dispatch", "")
    for text in (description, instructions):
        assert 1800 < len(text.encode()) <= tool_list.MAX_DESCRIPTION_BYTES
    lines = instructions.count("- `mcp:server-")
    assert lines
    assert instructions.endswith(f"- … {200 - lines} more groups\n")
    names = description.count("mcp:server-")
    assert names > lines
    assert description.endswith(f", … {200 - names} more")
    assert "Ünïcode" not in description


def test_the_url_chooses_the_mode_within_the_agents_setting(github):
    free, bound = make_agent_client("free"), make_agent_client("bound", mode="deferred")
    for mode in ("full", "deferred"):
        caller = RollingCaller(digest_of(free), mode=mode)
        session = AgentSession.objects.get(session_id=mcp_sessions._rolling_session(caller)[0])
        assert (session.mode, session.decided_by) == (mode, "forced")
    with pytest.raises(Invalid, match="cannot choose full"):
        mcp_sessions._rolling_session(RollingCaller(digest_of(bound), mode="full"))
    with pytest.raises(Invalid, match="mode must be one of"):
        mcp_sessions._rolling_session(RollingCaller(digest_of(free), mode="some"))


def test_clients_and_named_conversations_have_their_own_rolling_sessions(scout):
    def session_for(client, name=""):
        caller = RollingCaller(
            digest_of(scout), client=Client({"name": client}, "2026-07-28"), name=name
        )
        return mcp_sessions._rolling_session(caller)[0]

    first = session_for("claude-code")
    found = {first, session_for("copilot"), session_for("claude-code", "review")}
    assert len(found) == 3
    assert session_for("claude-code") == first


def test_an_admins_word_replaces_the_claim_in_the_list(db):
    server = make_server()
    ingest_tools(server, tool_object("look", annotations={"readOnlyHint": True, "title": "Look"}))
    set_read_only(Tool.objects.get(), "no", actor=SYSTEM)
    session = AgentSession.objects.get(session_id=make_agent_client(mode="full").open().id)
    (tool,) = tool_list.list_tools(session, fixed=True, fits=bool)
    assert tool["annotations"] == {"readOnlyHint": False, "title": "Look"}


def test_a_session_expires_after_half_an_hour_and_its_client_goes_on_in_a_new_one(scout):
    caller, injecting = make_connection(scout), make_connection(scout, "inject")
    first, other = session_of(caller), session_of(injecting)
    for session in (first, other):
        make_idle(session, 31)
    tidy()
    assert AgentSession.objects.get(pk=first.pk).state == "expired"
    assert AgentSession.objects.get(pk=other.pk).state == "open"  # it would lose its tools
    second = session_of(caller)
    assert (second.state, second != first) == ("open", True)
    assert session_of(caller) == second
    McpConnection.objects.filter(session=second).update(session=first)
    make_idle(first, 60 * 25)
    tidy()
    assert [row.session for row in McpConnection.objects.all()] == [other]


def listed(session, *, fixed):
    tools = tool_list.list_tools(session, fixed=fixed, fits=lambda _: True)
    return [tool["name"] for tool in tools]


def test_the_list_of_an_older_client_in_full_mode_grows(github):
    agent = make_agent_client("all", mode="full", budget=1)
    caller = make_connection(agent)
    session = session_of(caller)
    before = listed(session, fixed=False)
    stream = NotificationStream(caller.connection_id, "", caller)
    streams = Streams()
    streams.notifications[caller.connection_id] = stream
    async_to_sync(streams.compare_lists)()
    assert not stream.changed.is_set()

    server = Server.objects.get(slug="github")
    names = [name.removeprefix("github__") for name in before]
    ingest_tools(server, *(tool_object(name) for name in (*names, "a_new_tool")))
    async_to_sync(streams.compare_lists)()

    assert stream.changed.is_set()
    session = session_of(caller)
    assert listed(session, fixed=False) == [*before, "github__a_new_tool"]
    assert listed(session, fixed=True) == before  # versions from 2026 on forbid changes
    stream.changed.clear()
    async_to_sync(streams.compare_lists)()
    assert not stream.changed.is_set()
    assert session.tokens_loaded == 0  # full mode has no budget


@pytest.mark.parametrize("era", ["rolling", "handshake"])
@pytest.mark.parametrize("runs_custom_tools", [False, True])
def test_custom_tools_are_listed_and_found_for_agents_that_run_them(github, era, runs_custom_tools):
    make_group("own", save_custom_tool(tool_object("shout"), actor=SYSTEM))
    make_group("empty")
    agent = make_agent_client("caller", mode="deferred", runs_custom_tools=runs_custom_tools)
    session = rolling(agent)[0] if era == "rolling" else session_of(make_connection(agent))

    def send(method, path, body=None):
        return agent.send(method, f"/sessions/{session.session_id}{path}", body)

    assert ("shout" in listed(session, fixed=True)) is runs_custom_tools
    for text in (
        tool_list.session_instructions(session),
        tool_list.agent_instructions(agent.agent, "dispatch", ""),
    ):
        assert ("`own`" in text) is runs_custom_tools
        assert "mcp:github" in text
    assert send("POST", "/search", {"pattern": "shout"})["total_matches"] == runs_custom_tools
    called = send("POST", "/call", {"tool_name": "shout", "arguments": {}})
    assert called["state"] == ("client" if runs_custom_tools else "refused")
    assert send("POST", "/load", {"group_id": "own"})["expanded"] is runs_custom_tools
    assert send("POST", "/load", {"group_id": "empty"})["error"] is None
    # Over REST the agent's own program asks, which can run them.
    assert agent.open().call("shout")["state"] == "client"
