"""Acceptance of the engine: thresholds, budgets, loads, resume, deletion and the timeline.

Each test is named after the requirement that it walks, as a client sees it over the API.
"""

import json

import jsonschema_rs
import pytest

from catalog.audit import SYSTEM
from catalog.groups import actions as group_actions
from catalog.models import Tool
from catalog.tools.actions import override_description
from servers.models import Server
from servers.registration import actions as server_actions
from sessions_app.review import timeline
from sessions_app.sessions import loading
from tests.support.agent_client import add_tools, make_agent_client
from tests.support.factories import ingest_tools, tool_object
from toolcrib.api import api
from toolcrib.lib.token_counter import count


def events(session, kind="refused"):
    items = session.get("/events?limit=200")["items"]
    return [event for event in items if event["kind"] == kind]


def documented_answer(path, method):
    """Return the schema of an operation's 200, with the components it refers to."""
    document = json.loads(json.dumps(api.get_openapi_schema()))
    content = document["paths"][f"/api/v1{path}"][method]["responses"]["200"]["content"]
    return content["application/json"]["schema"] | {"components": document["components"]}


# --- Thresholds -----------------------------------------------------------------------------------


def test_a_session_has_thresholds_of_its_own(scout):
    """Requirement 2."""
    scout.agent.mode = "auto"
    scout.agent.save()
    assert scout.open().opened["mode"] == "full"
    opened = scout.open(tool_threshold=7).opened
    assert (opened["mode"], opened["decided_by"], opened["stats"]["threshold"]) == (
        "deferred",
        "count",
        7,
    )
    assert scout.open(tool_threshold=8).opened["mode"] == "full"
    tokens = opened["stats"]["tokens"]["all_schemas"]
    assert scout.open(threshold_tokens=1).opened["decided_by"] == "tokens"
    assert scout.open(threshold_tokens=10**6).opened["mode"] == "full"
    window = {"context_window": tokens * 10}
    assert scout.open(**window, threshold_percent=50).opened["mode"] == "full"
    assert scout.open(**window, threshold_percent=0.5).opened["decided_by"] == "percent"
    refused = scout.send("POST", "/sessions", {"threshold_percent": 101})
    assert refused.status == 422


def test_stats_name_every_tool_and_opening_leaves_them_out(session):
    """Requirement 17."""
    stats = session.get("/stats").json
    assert len(stats["tool_names"]) == stats["total_registered"] == 7
    assert "tool_names" not in session.opened["stats"]


# --- Loads ----------------------------------------------------------------------------------------


def test_a_regex_search_answers_as_logicore_does(session):
    """Requirements 44 and 45: what it says is loaded is loaded, and its schema is there."""
    answer = session.post("/search?compat=logicore", {"pattern": "create_.*"}).json
    assert set(answer) == {
        "status", "pattern", "total_matches", "tools", "newly_loaded", "message",
    }  # fmt: skip
    assert (answer["status"], answer["pattern"]) == ("success", "create_.*")
    assert answer["message"] == "Found 1 tool. It is now available for use."
    (tool,) = answer["tools"]
    assert set(tool) == {"name", "description", "loaded", "schema"}
    assert tool["loaded"] is True
    assert session.state == {"mcp:github": ["github__create_issue"]}
    two = session.post("/search?compat=logicore", {"pattern": "search_"}).json
    assert two["message"] == "Found 2 tools. They are now available for use."
    none = session.post("/search?compat=logicore", {"pattern": "xylophone"}).json
    assert (none["status"], none["tools"], none["newly_loaded"]) == ("no_matches", [], 0)
    both = session.post("/search?compat=logicore&format=anthropic", {"pattern": "x"})
    assert both.status == 422


@pytest.mark.parametrize("query", ["", "?compat=logicore", "?format=anthropic"])
def test_a_search_by_an_unknown_name_is_answered_in_a_documented_shape(session, query):
    """Also where the strategy of a search by words is sent along."""
    answer = session.post(f"/search{query}", {"name": "127.0.0.1", "strategy": "embedding"})
    schema = documented_answer("/sessions/{session_id}/search", "post")
    assert jsonschema_rs.validator_for(schema).is_valid(answer.json), answer.json


def test_a_search_that_loads_delivers_the_schemas(session):
    """Defect 6."""
    first = session.search(pattern="create_issue", load=True).json
    again = session.search(pattern="create_issue", load=True).json
    for answer in (first, again):
        assert answer["tools"][0]["schema"]["required"] == ["what"]
        assert "It is loaded." in answer["message"]


def test_a_large_group_asks_before_it_loads_whole(scout):
    description = "word " * 700
    add_tools("wide", *(f"t{n}" for n in range(40)), **{f"t{n}": description for n in range(40)})
    session = scout.open()
    asked = session.load("mcp:wide").json
    assert (asked["expanded"], asked["error"]["code"]) == (False, "confirm_load")
    assert len(asked["error"]["largest"]) == loading.LARGEST_NAMES
    assert asked["error"]["rest"] == 20
    assert session.state == {}
    assert session.load("mcp:wide", "t1").json["expanded"] is True
    confirmed = session.load("mcp:wide", confirm=True).json
    assert len(confirmed["tool_names"]) == 40
    assert session.load("mcp:wide").json["schemas"] == confirmed["schemas"]


def test_ambiguous_names_come_with_their_candidates(scout, session):
    """Defect 19."""
    candidates = {"search_code": ["github__search_code", "slack__search_code"]}
    answer = session.post("/preload", {"tool_names": ["search_code", "nothing"]}).json
    assert (answer["unknown"], answer["ambiguous"]) == (["search_code", "nothing"], candidates)
    opened = scout.open(preload=["search_code"]).opened
    assert (opened["unknown"], opened["ambiguous"]) == (["search_code"], candidates)


# --- Budget ---------------------------------------------------------------------------------------


def test_one_budget_counts_every_way_a_definition_is_given(scout):
    """Defect 8."""
    tokens = Tool.objects.get(public_name="github__create_issue").approved.tokens
    scout.agent.budget = tokens
    scout.agent.save()
    session = scout.open()
    path = "/tools/github__create_issue"
    assert session.get(path).status == 200
    assert session.get(path).status == 200, "what was given once is free"
    assert session.load("mcp:github", "create_issue").status == 200
    others = [
        session.get("/tools/github__get_file"),
        session.search("get file", detail="full", limit=1),
        session.search(name="github__get_file"),
        session.load("mcp:github", "get_file"),
        session.post("/preload", {"tool_names": ["github__get_file"]}),
        scout.send("POST", "/sessions", {"preload": ["github__get_file", "github__merge_pull"]}),
    ]
    assert [(answer.status, answer["error"]["code"]) for answer in others] == [
        (409, "over_budget")
    ] * 6
    assert session.state == {"mcp:github": ["github__create_issue"]}
    requests = [event["details"]["request"] for event in events(session)]
    assert requests == ["details", "search", "search", "load", "preload"]


# --- Pins -----------------------------------------------------------------------------------------


def test_details_stay_as_they_were_shown(scout, github):
    """Defect 17."""
    session = scout.open()
    before = session.get("/tools/github__get_file").bytes
    full = session.search(name="github__list_issues", load=False).json["tools"][0]["schema"]
    github.follows.trust = "auto"
    github.follows.save()
    changed = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    names = ("create_issue", "list_issues", "search_code", "merge_pull", "get_file")
    ingest_tools(github.follows, *(tool_object(name, inputSchema=changed) for name in names))
    assert session.get("/tools/github__get_file").bytes == before
    again = session.search(name="github__list_issues", load=False).json["tools"][0]["schema"]
    assert again == full
    call = session.call("github__get_file", {"what": "x"}).json
    assert (call["error"]["code"], call["implicit_load"]) == ("definition_changed", False)


def test_a_deleted_group_keeps_what_a_session_loaded(scout):
    """Defect 16."""
    tool = Tool.objects.get(public_name="github__get_file")
    group = group_actions.create("ops", "Ops", actor=SYSTEM).group
    group_actions.assign(group, [tool], actor=SYSTEM)
    session, other = scout.open(), scout.open()
    before = session.load("ops").bytes
    group_actions.delete(group, actor=SYSTEM)
    assert session.load("ops").bytes == before
    refused = other.load("ops").json
    assert refused["error"]["code"] == "group_deleted"


def test_a_load_is_counted_as_it_was_answered(scout):
    """Feature row 51: the tokens of a load are those of the whole response."""
    session = scout.open()
    answer = session.load("mcp:github").bytes.decode()
    (event,) = events(session, "loaded")
    assert event["tokens"] == count(answer)
    assert session.get("/stats")["tokens"]["by"]["load"] == count(answer)


def test_a_deleted_server_keeps_what_a_session_loaded(scout):
    """Defect 16."""
    session, other = scout.open(), scout.open()
    before = session.load("mcp:github").bytes
    server_actions.delete_server(Server.objects.get(slug="github"), actor=SYSTEM)
    assert session.load("mcp:github").bytes == before
    refused = other.load("mcp:github").json
    assert refused["error"]["code"] == "group_deleted"


def test_names_and_summaries_stay_as_a_session_was_shown_them(scout):
    """Defect 17: the other levels of detail are those of the pinned definition too."""
    session, fresh = scout.open(), scout.open()
    session.load("mcp:github")
    tool = Tool.objects.get(public_name="github__get_file")
    path = "/tools/github__get_file?detail=summary"
    before = session.get(path).bytes
    override_description(tool, "Something else.", actor=SYSTEM)
    assert session.get(path).bytes == before
    assert fresh.get(path)["description"] == "Something else."


def test_resume_keeps_the_load_order(scout):
    """Requirement 79."""
    session = scout.open(strategy="inject")
    for group, name in [
        ("github", "merge_pull"),
        ("slack", "post_message"),
        ("github", "get_file"),
    ]:
        session.load(f"mcp:{group}", name)
    names = [tool["name"] for tool in session.get("/tools").json]
    state = session.get("/state").json
    assert state["load_order"] == names[3:]
    resumed = scout.open(strategy="inject", resume=state)
    assert [tool["name"] for tool in resumed.get("/tools").json] == names
    assert resumed.get("/state").json == state
    without = {key: value for key, value in state.items() if key != "load_order"}
    assert scout.open(strategy="inject", resume=without).state == session.state


def test_an_inject_catalog_leaves_out_what_is_in_the_tools_array(scout, slack):
    """Defect 15."""
    group_actions.edit(slack, deferred=False, actor=SYSTEM)
    opened = scout.open(strategy="inject", preload=["github__get_file"]).opened
    assert "mcp:slack" not in opened["catalog"]["text"]
    assert "4 remaining tools" in opened["catalog"]["text"]
    assert "get_file" not in opened["catalog"]["text"]


# --- Timeline -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "code", "sentence"),
    [
        ("/load", {"group_id": "mcp:nope"}, "unknown_group", "load of mcp:nope rejected"),
        (
            "/load",
            {"group_id": "mcp:github", "tool_names": ["nope"]},
            "unknown_tool",
            "load of mcp:github rejected",
        ),
        ("/search", {"pattern": "("}, "invalid_pattern", "search by pattern “(” rejected"),
    ],
)
def test_refused_loads_and_searches_are_on_the_timeline(session, path, body, code, sentence):
    """Defect 11."""
    session.post(path, body)
    (event,) = events(session)
    assert event["details"]["code"] == code
    shown = timeline.TimelineEvent(
        event["id"], "refused", event["at"], event["at"],
        group_id=event["group_id"], details=event["details"],
    )  # fmt: skip
    text = "".join(part for _, part in timeline.describe_event(shown))
    assert text == f"{sentence}: {code.replace('_', ' ')}"


def test_a_new_session_was_used_when_it_was_created(scout):
    """Defect 20."""
    scout.open().post("/fork")
    for item in scout.send("GET", "/sessions")["items"]:
        assert item["created_at"] <= item["last_used_at"]


def test_the_agent_of_a_budget_may_open_without_requests(db):
    """Preloads of groups count, but only a session's own request for more is refused."""
    group = add_tools("big", "one", "two")
    group_actions.edit(group, deferred=False, actor=SYSTEM)
    client = make_agent_client("poor", mode="deferred", budget=1)
    assert client.open().opened["stats"]["loaded"] == 2


# --- Small answers --------------------------------------------------------------------------------


def test_a_session_is_small_unless_its_parts_are_asked_for(scout):
    """Judgement 5.7: neither the catalog nor the tools are in each answer about a session."""
    session = scout.open()
    opened = session.opened
    small = session.get("").json
    assert small == {name: opened[name] for name in opened if name not in ("catalog", "tools")}
    both = session.get("?include=catalog,tools").json
    assert both == opened
    assert set(session.get("?include=tools").json) - set(small) == {"tools"}
    assert session.get("?include=everything").status == 422
    assert set(session.post("/close").json) == set(small)
