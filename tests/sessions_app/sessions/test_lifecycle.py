"""Opening sessions: choice of the mode, snapshot, filters, session limit and expiry."""

from datetime import timedelta

import pytest
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.groups import actions as group_actions
from catalog.models import CatalogSnapshot, Group, Membership, Tool
from sessions_app.models import AgentSession
from sessions_app.sessions.lifecycle import Thresholds, choose_mode, expire_idle
from tests.support.agent_client import add_tools, make_agent_client
from tests.support.factories import ingest_tools, tool_object


@pytest.mark.parametrize(
    ("requested", "tools", "tokens", "window", "mode", "auto", "reason"),
    [
        ("auto", 14, 100, None, "full", False, "below"),
        ("auto", 15, 100, None, "deferred", True, "count"),
        ("auto", 3, 10_000, None, "full", False, "below"),
        ("auto", 3, 10_001, None, "deferred", True, "tokens"),
        ("auto", 3, 500, 10_000, "full", False, "below"),
        ("auto", 3, 501, 10_000, "deferred", True, "percent"),
        ("auto", 0, 0, 8_000, "full", False, "below"),
        ("deferred", 1, 1, None, "deferred", False, "forced"),
        ("full", 900, 900_000, 1_000, "full", False, "forced"),
    ],
)
def test_the_first_matching_rule_decides_the_mode(
    scout, requested, tools, tokens, window, mode, auto, reason
):
    decision = choose_mode(Thresholds.of(scout.agent), requested, tools, tokens, window)
    assert (decision.mode, decision.auto_deferred, decision.decided_by) == (mode, auto, reason)


def test_fifteen_tools_are_deferred_automatically_and_the_response_says_why(db):
    add_tools("many", *(f"t{number}" for number in range(15)))
    opened = make_agent_client().open().opened
    assert (opened["mode"], opened["auto_deferred"], opened["decided_by"]) == (
        "deferred",
        True,
        "count",
    )
    assert opened["suggested_iteration_multiplier"] == 3


def test_few_tools_are_sent_in_full_without_meta_tools_and_text(github):
    opened = make_agent_client().open().opened
    assert (opened["mode"], opened["decided_by"]) == ("full", "below")
    assert len(opened["tools"]) == 5
    assert {tool["source"] for tool in opened["tools"]} == {"mcp"}
    assert opened["catalog"]["text"] == ""
    assert opened["suggested_iteration_multiplier"] == 1
    assert opened["stats"]["loaded"] == 5


def test_the_context_window_is_a_threshold(github):
    opened = make_agent_client().open(context_window=1000).opened
    assert opened["decided_by"] == "percent"


def test_a_session_keeps_its_mode_when_tools_are_added(github, scout):
    session = make_agent_client("small", "mcp:github").open()
    ingest_tools(github.follows, *(tool_object(f"more_{n}") for n in range(30)))
    assert session.get("")["mode"] == "full"
    assert len(session.get("/tools").json) == 5


def test_the_response_has_the_documented_keys(scout):
    opened = scout.open().opened
    assert {
        "id", "strategy", "mode", "auto_deferred", "decided_by", "catalog", "tools", "stats",
        "suggested_iteration_multiplier",
    } <= set(opened)  # fmt: skip
    assert set(opened["catalog"]) == {"text", "etag", "revision", "tokens", "left_out"}
    assert set(opened["stats"]) == {
        "total_registered", "loaded", "deferred", "deferred_mode", "auto_deferred", "threshold",
        "tokens",
    }  # fmt: skip
    assert set(opened["stats"]["tokens"]) == {
        "all_schemas", "delivered", "given", "saved", "saved_percent", "by",
    }  # fmt: skip
    assert set(opened["stats"]["tokens"]["by"]) == {"catalog", "search", "load", "call"}
    assert opened["id"].startswith("ses_")
    assert len(opened["id"]) == 36


def test_preloaded_tools_are_in_the_initial_tools_array(scout, github):
    group_actions.set_preload(
        github, [Tool.objects.get(public_name="github__get_file")], True, actor=SYSTEM
    )
    opened = scout.open(preload=["post_message", "nothing"]).opened
    assert [tool["name"] for tool in opened["tools"]][5:] == [
        "github__get_file",
        "slack__post_message",
    ]
    assert opened["unknown"] == ["nothing"]
    assert opened["stats"]["loaded"] == 2


def test_a_group_that_is_not_deferred_is_fully_preloaded(scout, slack):
    group_actions.edit(slack, deferred=False, actor=SYSTEM)
    names = [tool["name"] for tool in scout.open().opened["tools"]][5:]
    assert names == ["slack__post_message", "slack__search_code"]


def test_a_session_can_be_restricted_by_groups_servers_and_without_mcp(scout):
    assert "slack" not in scout.open(groups=["mcp:github"]).opened["catalog"]["text"]
    assert "github" not in scout.open(servers=["slack"]).opened["catalog"]["text"]
    bare = scout.open(without_mcp=True)
    assert bare.opened["tools"] == []
    assert bare.search("issue")["total_matches"] == 0
    assert bare.call("github__get_file", {"what": "x"})["error"]["code"] == "unknown_tool"


def test_inaccessible_and_unknown_groups_and_servers_give_the_same_error(github, slack):
    narrow = make_agent_client("narrow", "mcp:github")
    hidden = narrow.send("POST", "/sessions", {"groups": ["mcp:slack"]})
    made_up = narrow.send("POST", "/sessions", {"groups": ["mcp:nowhere"]})
    assert hidden.status == made_up.status == 422
    assert hidden.bytes.replace(b"slack", b"nowhere") == made_up.bytes
    hidden = narrow.send("POST", "/sessions", {"servers": ["slack"]})
    made_up = narrow.send("POST", "/sessions", {"servers": ["nowhere"]})
    assert hidden.bytes.replace(b"slack", b"nowhere") == made_up.bytes


def test_the_catalog_has_the_agents_order_of_groups(github, slack):
    text = make_agent_client("a", "mcp:slack", "mcp:github", mode="deferred").open().opened
    assert text["catalog"]["text"].index("slack") < text["catalog"]["text"].index("github")


def test_a_custom_header_replaces_the_default(scout):
    assert scout.open(header="My tools:").opened["catalog"]["text"].startswith("My tools:\n\n- ")
    scout.agent.catalog_header = "The agent's own."
    scout.agent.save()
    assert scout.open().opened["catalog"]["text"].startswith("The agent's own.\n\n- ")


def test_sessions_with_the_same_catalog_share_one_snapshot(scout):
    for _ in range(3):
        scout.open()
    assert CatalogSnapshot.objects.count() == 1


def test_the_catalog_has_an_etag_and_supports_conditional_requests(session, scout):
    first = session.get("/catalog?format=text")
    assert first.status == 200
    again = session.get("/catalog?format=text", If_None_Match=first.headers["ETag"])
    assert (again.status, again.bytes) == (304, b"")
    catalog = scout.send("GET", "/catalog")
    assert scout.send("GET", "/catalog", If_None_Match=catalog.headers["ETag"]).status == 304
    assert catalog["text"] == session.opened["catalog"]["text"]


# --- Inject -------------------------------------------------------------------------------------


def test_inject_appends_loaded_tools_in_load_order_and_returns_no_schemas(scout):
    session = scout.open(strategy="inject")
    fixed = session.get("/tools").json
    assert "deferred_tool_call" not in [tool["name"] for tool in fixed]
    assert session.load("mcp:slack", "post_message")["schemas"] is None
    session.load("mcp:github", "merge_pull")
    session.load("mcp:github", "create_issue")
    names = [tool["name"] for tool in session.get("/tools").json][len(fixed) :]
    assert names == ["slack__post_message", "github__merge_pull", "github__create_issue"]
    assert session.get("/tools").json[: len(fixed)] == fixed


def test_the_inject_catalog_omits_loaded_tools(scout):
    session = scout.open(strategy="inject")
    session.load("mcp:slack")
    session.load("mcp:github", "merge_pull")
    text = session.get("/catalog?format=text").bytes.decode()
    assert "mcp:slack" not in text
    assert "(4 remaining tools, github__…)" in text
    assert "merge_pull" not in text


def test_an_inject_session_resumes_with_its_tools_in_the_array(scout):
    session = scout.open(strategy="inject")
    session.load("mcp:slack", "post_message")
    resumed = scout.open(strategy="inject", resume=session.get("/state").json)
    assert resumed.opened["tools"][-1]["name"] == "slack__post_message"


# --- Limit and expiry -----------------------------------------------------------------------------


def test_at_the_limit_the_longest_idle_session_expires(scout):
    scout.agent.max_sessions = 2
    scout.agent.save()
    first, second = scout.open(), scout.open()
    rejected = scout.send("POST", "/sessions", {})
    assert rejected.status == 429
    assert rejected.headers["Retry-After"]
    assert "2" in rejected["error"]["message"]
    AgentSession.objects.filter(session_id=first.id).update(
        last_used_at=timezone.now() - timedelta(minutes=31)
    )
    scout.open()
    assert first.get("")["state"] == "expired"
    assert second.get("")["state"] == "open"


def test_an_idle_session_expires_after_a_day_with_a_hint_to_resume(session):
    session.load("mcp:slack")
    AgentSession.objects.update(last_used_at=timezone.now() - timedelta(hours=25))
    answer = session.load("mcp:github")
    assert (answer.status, answer["error"]["code"]) == (409, "session_expired")
    assert "resume" in answer["error"]["hint"]
    assert expire_idle() == 1
    assert session.get("")["state"] == "expired"
    assert session.state == {"mcp:slack": None}
    assert expire_idle() == 0


def test_a_closed_session_is_read_only(session):
    assert session.post("/close")["state"] == "closed"
    assert session.post("/close")["state"] == "closed"
    for what, body in (
        ("/load", {"group_id": "mcp:github"}),
        ("/search", {"query": "issue"}),
        ("/call", {"tool_name": "github__get_file"}),
        ("/preload", {"tool_names": ["get_file"]}),
        ("/fork", {}),
    ):
        answer = session.post(what, body)
        assert (answer.status, answer["error"]["code"]) == (409, "session_closed"), what
    for what in ("", "/state", "/stats", "/events", "/catalog", "/tools"):
        assert session.get(what).status == 200, what
    assert session.kinds == ["opened", "closed"]


def test_a_renamed_group_can_be_loaded_by_its_old_and_new_id(session, github):
    group_actions.edit(github, group_id="mcp:code", actor=SYSTEM)
    assert session.load("mcp:github", "get_file")["expanded"] is True
    assert session.load("mcp:code", "get_file")["expanded"] is True


def test_a_revoked_group_is_unavailable_in_open_sessions(github, slack):
    narrow = make_agent_client("narrow", "mcp:github", "mcp:slack", mode="deferred")
    session = narrow.open()
    text = session.get("/catalog?format=text").bytes
    narrow.agent.group_links.filter(group=slack).delete()
    assert "not available in this session" in session.load("mcp:slack")["error"]["message"]
    assert session.search("post message")["total_matches"] == 0
    assert session.get("/catalog?format=text").bytes == text


def test_custom_tools_are_preloaded_unless_an_admin_disables_it(db):
    from catalog.tools.actions import save_custom_tool
    from tests.support.agent_client import make_group

    make_group("own", save_custom_tool(tool_object("shout"), actor=SYSTEM))
    agent = make_agent_client(mode="deferred")
    assert agent.open().opened["tools"][-1]["name"] == "shout"
    group_actions.set_preload(Group.objects.get(), [Tool.objects.get()], False, actor=SYSTEM)
    assert Membership.objects.get().preload is False
    assert len(agent.open().opened["tools"]) == 5


def test_metadata_has_a_size_limit(db):
    client = make_agent_client("scout")
    assert client.open(metadata={"note": "é" * 8_000}).opened["metadata"]["note"] == "é" * 8_000
    answer = client.send("POST", "/sessions", {"metadata": {"note": "é" * 9_000}})
    assert (answer.status, answer["error"]["code"]) == (422, "invalid")
    assert answer["error"]["message"] == "metadata has more than 16 KB."


@pytest.mark.parametrize("action", ["fork", "close"])
def test_actions_without_fields_reject_fields(db, action):
    session = make_agent_client("scout").open()
    path = f"/sessions/{session.id}/{action}"
    refused = session.client.send("POST", path, {"mode": "full"})
    assert (refused.status, refused["error"]["details"]["problems"][0]["at"]) == (422, "mode")
    assert session.get("")["state"] == "open"
    for body in (None, {}):
        assert session.client.send("POST", path, body).status in (200, 201, 409)
