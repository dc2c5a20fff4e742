"""Required behaviour of sessions, one test each, through the API."""

import json
import threading

import pytest
from django.db import connection

from catalog import cache
from catalog.approvals import actions as approval_actions
from catalog.audit import SYSTEM
from catalog.groups import actions as group_actions
from catalog.models import Definition, Group, Membership, Tool
from catalog.tools.actions import hold, save_custom_tool
from servers.models import Server
from servers.registration import actions as server_actions
from sessions_app.models import AgentSession, Call, Expansion
from tests.support.agent_client import add_tools, make_agent_client, make_group
from tests.support.factories import ingest_tools, make_program, make_tool, tool_object

OBJECT = {"type": "object"}


def catalog(session):
    return session.get("/catalog?format=text").bytes


# --- Catalog --------------------------------------------------------------------------------------


def test_catalog_byte_stable_across_input_order(db):
    add_tools("alpha", "one", "two", "three")
    first = make_agent_client("first", mode="deferred").open().opened
    Group.objects.all().delete()
    Tool.objects.all().delete()
    Server.objects.all().delete()
    cache.clear()
    add_tools("alpha", "three", "one", "two")
    second = make_agent_client("second", mode="deferred").open().opened
    assert first["catalog"]["text"] == second["catalog"]["text"]
    assert first["tools"] == second["tools"]


def test_catalog_identical_before_and_after_load(session):
    before = catalog(session)
    session.load("mcp:github")
    session.search("message", load=True)
    assert catalog(session) == before
    assert (
        session.get("/catalog?format=openai").bytes == session.get("/catalog?format=openai").bytes
    )


def test_deny_all_session_shows_no_meta_tools(drifter, github):
    session = drifter.open()
    assert session.opened["tools"] == []
    assert session.opened["catalog"]["text"] == ""
    assert session.get("/tools").json == []


# --- Load -----------------------------------------------------------------------------------------


def test_load_idempotent_bytes(session, github):
    first = session.load("mcp:github")
    some = session.load("mcp:github", "get_file", "create_issue")
    tool = Tool.objects.get(public_name="github__get_file")
    names = ["create_issue", "list_issues", "search_code", "merge_pull", "get_file"]
    ingest_tools(
        tool.server,
        *(tool_object(name, description="It is all different now.", inputSchema=OBJECT)
          for name in names),
    )  # fmt: skip
    for changed in Tool.objects.filter(server=tool.server):
        approval_actions.approve(changed, actor=SYSTEM)
    assert session.load("mcp:github").bytes == first.bytes
    assert session.load("mcp:github", "create_issue", "get_file").bytes == some.bytes
    assert "different" in make_agent_client("late").open().load("mcp:github").bytes.decode()


@pytest.mark.django_db(transaction=True)
def test_loader_once_under_concurrency(session):
    answers = []

    def load():
        try:
            answers.append(session.load("mcp:github").bytes)
        finally:
            connection.close()

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert len(set(answers)) == 1
    assert Expansion.objects.count() == 1


def test_failed_load_leaves_no_state_and_retries(scout):
    scout.agent.budget = 60
    scout.agent.save()
    session = scout.open()
    refused = session.load("mcp:github")
    assert (refused.status, refused["error"]["code"]) == (409, "over_budget")
    assert "60" in refused["error"]["message"]
    assert session.state == {}
    assert "loaded" not in session.kinds
    unknown = session.load("mcp:github", "nothing_like_it")
    assert unknown["expanded"] is False
    assert session.state == {}

    scout.agent.budget = None
    scout.agent.save()
    assert session.load("mcp:github")["expanded"] is True
    assert session.state == {"mcp:github": None}


def test_unknown_group_lists_available(session):
    answer = session.load("mcp:jira")
    assert answer["expanded"] is False
    assert "mcp:github, mcp:slack" in answer["error"]["message"]
    assert answer["tool_names"] == []


def test_selective_then_full(session):
    some = session.load("mcp:github", "get_file")
    assert some["tool_names"] == ["github__get_file"]
    assert some["remaining"] == 4
    assert session.state == {"mcp:github": ["github__get_file"]}
    full = session.load("mcp:github")
    assert len(full["tool_names"]) == 5
    assert full["remaining"] == 0
    assert session.state == {"mcp:github": None}


def test_full_then_selective_no_op(session):
    session.load("mcp:github")
    before = session.state
    answer = session.load("mcp:github", "get_file")
    assert answer["tool_names"] == ["github__get_file"]
    assert answer["remaining"] == 0
    assert session.state == before == {"mcp:github": None}


def test_empty_selection(session):
    answer = session.post("/load", {"group_id": "mcp:github", "tool_names": []})
    assert (answer["expanded"], answer["tool_names"], answer["schemas"]) == (True, [], [])
    assert answer["remaining"] == 5
    assert session.state == {"mcp:github": []}


def test_loading_every_tool_by_name_counts_as_the_full_group(session):
    session.load("mcp:slack", "post_message")
    session.load("mcp:slack", "search_code")
    assert session.state == {"mcp:slack": None}


def test_unknown_names_of_a_load_are_listed(session):
    answer = session.load("mcp:github", "get_file", "Get_File", "slack__post_message")
    assert answer["tool_names"] == ["github__get_file"]
    assert answer["unknown"] == ["Get_File", "slack__post_message"]


def test_a_tool_loaded_through_a_second_group_keeps_its_definition_and_position(db):
    server = make_program("raw_calls", slug="north")
    server_actions.change_settings(server, {"trust": "auto"}, actor=SYSTEM)
    ingest_tools(
        server, *(tool_object(name, description="Old words") for name in ("kilo", "lima", "mike"))
    )
    mixed = group_actions.create("mixed", "Mixed", actor=SYSTEM).group
    inside = Tool.objects.filter(name__in=["kilo", "lima"])
    group_actions.assign(mixed, list(inside), actor=SYSTEM)
    session = make_agent_client("scout", mode="deferred").open(strategy="inject")
    session.load("mixed", "north__kilo")
    session.load("mcp:north", "north__lima")
    session.load("mcp:north", "north__mike")
    before = session.get("/tools").json
    ingest_tools(
        server, *(tool_object(name, description="New words") for name in ("kilo", "lima", "mike"))
    )
    assert session.load("mixed", "north__lima")["tool_names"] == ["north__lima"]
    assert session.get("/tools").json == before
    assert [tool["name"] for tool in before][-3:] == ["north__kilo", "north__lima", "north__mike"]
    pins = [json.loads(row.pins)["north__lima"] for row in Expansion.objects.all()]
    assert pins[0]["definition"] == pins[1]["definition"]


# --- Call -----------------------------------------------------------------------------------------


@pytest.fixture
def custom(db):
    """A custom tool in its own group. The agent runs it, so no server is needed."""
    tool = save_custom_tool(
        tool_object(
            "shout",
            description="Shout a word.",
            inputSchema={"type": "object", "properties": {"word": {"type": "string"}}},
        ),
        actor=SYSTEM,
    )
    make_group("own", tool)
    return tool


def test_implicit_load_records_no_expansion(custom, scout):
    Membership.objects.update(preload=False)
    session = scout.open()
    answer = session.call("shout", {"word": "hey"})
    assert (answer["state"], answer["implicit_load"]) == ("client", True)
    assert session.state == {}
    assert "implicit_load" in session.kinds
    assert session.get("/stats")["loaded"] == 0


def test_dispatch_keeps_call_id(custom, scout):
    session = scout.open()
    answer = session.call("shout", {"word": "hey"}, Idempotency_Key="k-1")
    again = session.call("shout", {"word": "hey"}, Idempotency_Key="k-1")
    row = Call.objects.get()
    assert answer["call_id"] == row.call_id
    assert again.bytes == answer.bytes
    assert session.get("/events")["items"][-1]["call_id"] == row.call_id


def test_unknown_tool_lists_valid_names_and_a_hint(session):
    answer = session.call("nothing")
    assert answer.status == 200
    assert answer["is_error"] is True
    assert answer["error"]["code"] == "unknown_tool"
    text = answer["content"][0]["text"]
    assert "github__create_issue" in text
    assert "load_tools" in text


@pytest.mark.parametrize("arguments", [[1], "[1]", 5, True, '"word"', "not json"])
def test_non_object_arguments_rejected(custom, scout, arguments):
    session = scout.open()
    answer = session.post("/call", {"tool_name": "shout", "arguments": arguments})
    assert answer.status == 200
    assert answer["error"]["code"] == "invalid_arguments"
    text = answer["content"][0]["text"]
    assert "object" in text.partition("\n")[0] or "JSON" in text.partition("\n")[0]
    assert "Input schema of shout:\n{" in text
    assert answer["state"] == "refused"


def test_json_string_arguments_accepted(custom, scout):
    answer = scout.open().post("/call", {"tool_name": "shout", "arguments": '{"word": "hey"}'})
    assert answer["state"] == "client"
    assert answer["structured_content"] == {"word": "hey"}


def test_missing_arguments_are_an_empty_object(custom, scout):
    assert scout.open().post("/call", {"tool_name": "shout"})["structured_content"] == {}


def test_ambiguous_bare_name_rejected_with_candidates(session):
    answer = session.call("search_code", {"what": "x"})
    assert answer["error"]["code"] == "ambiguous_tool"
    text = answer["content"][0]["text"]
    assert "github__search_code, slack__search_code" in text


def test_names_as_the_catalog_prints_them_are_accepted(db):
    names = ("crawl", "map", "scrape", "search", "status")
    add_tools("fire", *(f"fire_{name}" for name in names))
    session = make_agent_client("reader", mode="deferred").open()
    assert (
        "(5 tools, fire__fire_…)\n  crawl, map, scrape, search, status\n"
        in catalog(session).decode()
    )

    for spelling in ("scrape", "fire_scrape", "fire__fire_scrape"):
        assert session.load("mcp:fire", spelling)["tool_names"] == ["fire__fire_scrape"]
        assert session.get(f"/tools/{spelling}")["name"] == "fire__fire_scrape"
        assert session.call(spelling)["tool_name"] == "fire__fire_scrape"

    # A tool added later shares no such words; what was loaded by its short name stays so.
    make_tool(Server.objects.get(slug="fire"), "other")
    assert session.load("mcp:fire", "scrape")["tool_names"] == ["fire__fire_scrape"]
    assert session.load("mcp:fire", "crawl")["unknown"] == ["crawl"]


def test_a_tools_own_name_precedes_a_name_that_is_short_for_another(db):
    add_tools("fire", *(f"fire_{name}" for name in ("crawl", "map", "scrape", "search", "status")))
    add_tools("web", "search")
    session = make_agent_client("reader", mode="deferred").open()

    assert "(5 tools, fire__…)\n  fire_crawl, fire_map, " in catalog(session).decode()
    assert session.get("/tools/search")["name"] == "web__search"


@pytest.mark.parametrize(
    "name",
    ["deferred_tool_call", "call_read_only_tool", "search_tools", "load_tools",
     "get_tool_details", "call_tool", "tool_search", "tool_search_regex"],
)  # fmt: skip
def test_dispatcher_cannot_target_a_meta_tool(session, name):
    answer = session.call(name, {"tool_name": "x"})
    assert answer["is_error"] is True
    assert answer["error"]["code"] == "meta_tool"


def test_out_of_scope_tool_not_available_in_this_session_for_search_details_load_and_call(
    github, slack
):
    session = make_agent_client("narrow", "mcp:github", mode="deferred").open()
    message = "not available in this session"
    assert session.search("post message").json["total_matches"] == 0
    assert message in session.search(name="slack__post_message")["message"]
    assert session.search(pattern="slack.*")["tools"] == []
    details = session.get("/tools/slack__post_message")
    assert details.status == 404
    assert message in details["error"]["message"]
    assert message in session.load("mcp:slack")["error"]["message"]
    assert message in session.load("mcp:github", "slack__post_message")["error"]["message"]
    assert message in session.call("slack__post_message", {"what": "x"})["error"]["message"]
    assert session.post("/preload", {"tool_names": ["slack__post_message"]})["unknown"]
    # An unknown tool gives the same error.
    real = session.call("slack__post_message").json["error"]
    made_up = session.call("slack__post_massage").json["error"]
    assert made_up["message"].replace("massage", "message") == real["message"]


# --- Search ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "expected"), [(0, 1), (-1, 1), (51, 50), (7, 7)])
def test_limit_clamps(db, limit, expected):
    add_tools("many", *(f"tool_{number}" for number in range(60)))
    session = make_agent_client().open()
    answer = session.search(pattern=".*", limit=limit)
    assert len(answer["tools"]) == expected
    assert answer["total_matches"] == 60


@pytest.mark.parametrize("limit", ["abc", "5.0", "-1", "٥", 1.5, True, []])
def test_a_limit_that_is_not_an_integer_is_rejected(session, limit):
    answer = session.search("issue", limit=limit)
    assert answer.status == 422
    assert "limit" in answer.bytes.decode()


@pytest.mark.parametrize(("limit", "expected"), [("1", 1), (None, 2), ("0", 1)])
def test_digits_are_an_integer_and_null_is_absent(session, limit, expected):
    answer = session.search("issue", limit=limit, server=None, detail=None)
    assert answer.status == 200
    assert len(answer["tools"]) == expected


@pytest.mark.parametrize("pattern", ["(", "[z-a]", "(?=x)", r"(a)\1", "x{1000}{1000}", "*"])
def test_invalid_regex_gives_a_structured_error(session, pattern):
    answer = session.search(pattern=pattern)
    assert answer.status == 400
    assert answer["error"]["code"] == "invalid_pattern"
    assert answer["error"]["hint"]


def test_201_character_pattern_gives_an_error(session):
    assert session.search(pattern="a" * 200).status == 200
    answer = session.search(pattern="a" * 201)
    assert answer.status in (400, 422)
    assert "200" in answer["error"]["message"]


def test_catastrophic_regex_returns_in_time(db):
    add_tools("long", "aaa", aaa="a" * 20_000 + "!")
    session = make_agent_client().open()
    # A backtracking engine would exceed this test's timeout.
    assert session.search(pattern="(a+)+$")["total_matches"] in (0, 1)
    assert session.search(pattern="(a|aa)+b$").status == 200


def test_name_takes_precedence_over_query(session):
    answer = session.search("post message", name="github__get_file")
    assert [tool["name"] for tool in answer["tools"]] == ["github__get_file"]
    assert answer["tools"][0]["schema"]["required"] == ["what"]
    assert answer["newly_loaded"] == 1
    assert session.state == {"mcp:github": ["github__get_file"]}


def test_no_match_empty(session):
    answer = session.search("zebra crossing")
    assert answer["status"] == "no_matches"
    assert answer["tools"] == []
    assert answer["total_matches"] == 0
    assert answer["suggestions"]


# --- Sync, fork, resume ---------------------------------------------------------------------------


def test_sync_removes_stale_and_keeps_custom(session, scout, custom, github):
    server = github.follows
    ingest_tools(server, tool_object("get_file", inputSchema=OBJECT), allow_removals=True)
    names = {tool["name"] for tool in session.search(pattern=".*", limit=50)["tools"]}
    assert "github__get_file" in names
    assert "github__create_issue" not in names
    assert "shout" in names
    removed = session.call("github__create_issue", {"what": "x"})
    assert removed["error"]["code"] == "missing"


def test_fork_isolation(session):
    session.load("mcp:github", "get_file")
    forked = session.post("/fork")
    assert forked.status == 201
    child = type(session)(session.client, forked)
    assert child.state == session.state == {"mcp:github": ["github__get_file"]}
    assert catalog(child) == catalog(session)
    child.load("mcp:slack")
    session.load("mcp:github", "create_issue")
    assert child.state == {"mcp:github": ["github__get_file"], "mcp:slack": None}
    assert session.state == {"mcp:github": ["github__create_issue", "github__get_file"]}
    assert forked["parent"] == session.id
    session.post("/close")
    assert child.load("mcp:github").status == 200


def test_resume_strategy_mismatch_409(scout):
    state = {"strategy": "inject", "expanded_groups": {}}
    answer = scout.send("POST", "/sessions", {"resume": state})
    assert answer.status == 409
    assert answer["error"]["code"] == "strategy_mismatch"
    assert scout.send("POST", "/sessions", {"resume": state, "strategy": "inject"}).status == 201


def test_null_list_and_absent_round_trip(session, scout):
    add_tools("jira", "ticket")
    session.load("mcp:slack")
    session.load("mcp:github", "get_file")
    session.post("/load", {"group_id": "mcp:jira", "tool_names": []})
    exported = session.get("/state").json
    assert exported["expanded_groups"] == {
        "mcp:slack": None,
        "mcp:github": ["github__get_file"],
        "mcp:jira": [],
    }
    resumed = scout.open(resume=exported)
    again = resumed.get("/state").bytes
    assert again == session.get("/state").bytes
    assert list(json.loads(again)["expanded_groups"]) == ["mcp:slack", "mcp:github", "mcp:jira"]
    assert resumed.opened["unknown"] == []


def test_resume_returns_names_that_are_no_longer_available(scout):
    state = {"strategy": "dispatch", "expanded_groups": {"mcp:gone": None, "mcp:slack": ["nope"]}}
    opened = scout.open(resume=state).opened
    assert opened["unknown"] == ["mcp:gone", "nope"]


def test_a_held_tool_is_refused_with_the_reason(session):
    hold(Tool.objects.get(public_name="github__get_file"), "it deletes files", actor=SYSTEM)
    answer = session.call("github__get_file", {"what": "x"})
    assert answer["error"]["code"] == "held"
    assert "it deletes files" in answer["content"][0]["text"]
    assert session.load("mcp:github", "get_file")["error"]["code"] == "held"


def test_definitions_are_shared_and_never_changed(session):
    before = set(Definition.objects.values_list("sha256", "body"))
    session.load("mcp:github")
    assert set(Definition.objects.values_list("sha256", "body")) == before
    assert AgentSession.objects.get().snapshot.text == session.opened["catalog"]["text"]
