"""Unmet searches: no results, abandoned, loaded but never called; by agent and group."""

import json
from datetime import timedelta

import pytest
from django.utils import timezone

from sessions_app.agents import actions
from sessions_app.models import AgentSession
from sessions_app.sessions import lifecycle
from sessions_app.usage import searches
from sessions_app.usage.filters import UsageFilter
from tests.sessions_app.playground.test_search import text_of
from tests.support.factories import make_agent, make_call, make_event, make_session
from toolcrib.lib.roles import SYSTEM

pytestmark = pytest.mark.django_db


def read_report(**filters):
    return searches.report(UsageFilter(**filters))


def closed_session(agent=None, **fields):
    return make_session(agent, state="closed", **fields)


def record_search(session, query, *hits, **more):
    return make_event(session, "searched", query=query, total=len(hits), hits=list(hits), **more)


def record_load(session, *names, group="mcp:github", **more):
    details = {"names": list(names), "how": "load", **more}
    return make_event(session, "loaded", group_id=group, **details)


def test_searches_of_an_agent_are_classified(scout):
    session = scout.open()
    session.search("zzzqqq")
    session.search("zzzqqq")
    session.search("create an issue")  # abandoned
    session.search("merge pull")
    session.load("mcp:github", "merge_pull", "get_file")
    lifecycle.close_session(AgentSession.objects.get())

    report = read_report()

    assert [(row.query, row.times, row.agents) for row in report.lost] == [("zzzqqq", 2, ["scout"])]
    assert [(row.query, row.first) for row in report.astray] == [
        ("create an issue", "github__create_issue")
    ]
    assert [(row.name, row.group_id, row.times, row.loads) for row in report.uncalled] == [
        ("github__get_file", "mcp:github", 1, 1),
        ("github__merge_pull", "mcp:github", 1, 1),
    ]
    assert vars(report.agents[0]) == {
        "name": "scout",
        "searches": 4,
        "lost": 2,
        "astray": 1,
        "loads": 2,
        "uncalled": 2,
    }
    group = {row.name: row for row in report.groups}["mcp:github"]
    assert (group.searches, group.astray, group.loads, group.uncalled) == (2, 1, 2, 2)


def test_a_tool_that_was_called_in_its_session_is_not_listed(db):
    session = closed_session()
    record_load(session, "github__get_file", "github__list_issues")
    make_call(session, tool_name="github__get_file")
    other = closed_session()
    record_load(other, "github__get_file")

    told = {row.name: (row.times, row.loads) for row in read_report().uncalled}

    assert told == {"github__get_file": (1, 2), "github__list_issues": (1, 1)}


def test_open_sessions_may_still_use_their_results(db):
    running = make_session()
    record_search(running, "issue", "github__list_issues")
    record_load(make_session(), "github__get_file")

    report = read_report()

    assert (report.astray, report.uncalled) == ([], [])
    record_search(running, "issue again", "github__list_issues")
    assert [row.query for row in read_report().astray] == ["issue"]


def test_resumed_loads_and_test_sessions_are_excluded(db):
    record_load(closed_session(), "github__get_file", how="resume")
    tried = closed_session(
        metadata=json.dumps({searches.TEST_SESSION_KEY: "ada"}, separators=(",", ":"))
    )
    record_load(tried, "github__get_file")
    record_search(tried, "zzz")

    report = read_report()

    assert (report.uncalled, report.lost, report.read) == ([], [], 0)
    assert searches.recent_queries() == []


def test_the_report_is_filtered_by_agent_group_and_time(github):
    ada, bob = make_agent("ada"), make_agent("bob")
    record_search(closed_session(ada), "first", "github__list_issues")
    record_search(closed_session(bob), "second")
    record_search(closed_session(bob, started=timezone.now() - timedelta(days=60)), "long ago")
    record_load(closed_session(bob), "slack__post", group="mcp:slack")

    assert [row.query for row in read_report(agent="bob").lost] == ["second"]
    assert [row.name for row in read_report(agent="ada").agents] == ["ada"]
    assert [row.query for row in read_report(within="90d").lost] == ["long ago", "second"]
    of_github = read_report(group="mcp:github")
    assert [row.query for row in of_github.astray] == ["first"]
    assert (of_github.lost, of_github.uncalled) == ([], [])
    assert [row.name for row in read_report(group="mcp:slack").uncalled] == ["slack__post"]


def test_recent_queries_list_those_without_results_first_then_the_newest(db):
    now = timezone.now()
    session = make_session()
    for minutes, query, hits in (
        (50, "lost", ()),
        (40, "old", ("a__b",)),
        (20, "new", ("a__c",)),
        (10, "old", ("a__b",)),
    ):
        record_search(session, query, *hits, at=now - timedelta(minutes=minutes))

    queries = searches.recent_queries()

    assert [(row.query, row.first, row.times) for row in queries] == [
        ("lost", "", 1),
        ("old", "a__b", 2),
        ("new", "a__c", 1),
    ]


def test_the_pages_list_failed_queries_with_links_to_test_them(scout, admin, page_of):
    session = scout.open()
    session.search("zzz & <b>")
    session.search(pattern="^zz+$")

    page = page_of(admin, "/search/missed").content.decode()
    assert "zzz &amp; &lt;b&gt;" in page
    assert 'href="/search?agent=scout&amp;q=zzz%20%26%20%3Cb%3E"' in page
    assert 'href="/search?mode=regex&amp;agent=scout&amp;q=%5Ezz%2B%24"' in page
    playground = page_of(admin, "/search").content.decode()
    assert 'href="/search?mode=regex&amp;q=%5Ezz%2B%24"' in playground
    assert "No results" in playground


def test_without_searches_the_page_is_empty(admin, page_of):
    assert "No searches in this time range." in text_of(page_of(admin, "/search/missed"))


def test_the_api_returns_the_same_report(scout, client, operator_token):
    scout.open().search("zzzqqq")

    def get(path):
        headers = {"Authorization": f"Bearer {operator_token}"}
        response = client.get(f"/api/v1{path}", headers=headers)
        return response.status_code, json.loads(response.content)

    status, report = get("/search/missed?within=24h&agent=scout")
    assert status == 200
    assert [(row["query"], row["times"]) for row in report["lost"]] == [("zzzqqq", 1)]
    assert report["agents"][0]["lost"] == 1
    assert get("/search/missed?within=ever")[0] == 422


def test_the_report_of_the_api_has_pages(scout, client, operator_token):
    session = scout.open()
    for query in ("zzza", "zzzb", "zzzc"):
        session.search(query)
    pages, cursor = [], ""
    while cursor is not None:
        pages.append(
            client.get(
                "/api/v1/search/missed",
                {"limit": 2, **({"cursor": cursor} if cursor else {})},
                headers={"Authorization": f"Bearer {operator_token}"},
            ).json()
        )
        cursor = pages[-1]["next_cursor"]

    assert [[row["query"] for row in page["lost"]] for page in pages] == [
        ["zzza", "zzzb"],
        ["zzzc"],
    ]
    assert [len(page["agents"]) for page in pages] == [1, 0]


def test_the_report_takes_a_fixed_number_of_queries(db, django_assert_max_num_queries):
    sessions = [closed_session() for _ in range(5)]
    for session in sessions:
        for number in range(20):
            record_search(session, f"query {number}", "a__b")
        record_load(session, "a__b", "a__c")

    read_report()
    with django_assert_max_num_queries(5):
        read_report()


def test_searches_of_a_deleted_agent_count_without_being_listed():
    agent = make_agent("gone")
    record_search(closed_session(agent), "what it asked")
    actions.delete(agent, actor=SYSTEM)

    report = read_report()

    assert report.read == 1
    assert [(row.name, row.lost) for row in report.agents] == [("gone", 1)]
    assert report.lost == []
    assert searches.failed_searches(UsageFilter()).without_results == []
    assert searches.recent_queries() == []
