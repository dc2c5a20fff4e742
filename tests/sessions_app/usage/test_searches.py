"""What agents could not find: no result, not taken, loaded and never called; who and where."""

import json
from datetime import timedelta

import pytest
from django.utils import timezone

from sessions_app.models import AgentSession
from sessions_app.sessions import lifecycle
from sessions_app.usage import searches
from sessions_app.usage.filters import UsageFilter
from tests.sessions_app.playground.test_search import text_of
from tests.support.factories import make_agent, make_call, make_event, make_session

pytestmark = pytest.mark.django_db


def read(**wanted):
    return searches.report(UsageFilter(**wanted))


def ended(agent=None, **fields):
    return make_session(agent, state="closed", **fields)


def searched(session, query, *hits, **more):
    return make_event(session, "searched", query=query, total=len(hits), hits=list(hits), **more)


def loaded(session, *names, group="mcp:github", **more):
    details = {"names": list(names), "how": "load", **more}
    return make_event(session, "loaded", group_id=group, **details)


def test_real_searches_of_an_agent_are_told_apart(scout):
    session = scout.open()
    session.search("zzzqqq")
    session.search("zzzqqq")
    session.search("create an issue")  # and takes nothing of it
    session.search("merge pull")
    session.load("mcp:github", "merge_pull", "get_file")
    lifecycle.close_session(AgentSession.objects.get())

    told = read()

    assert [(one.query, one.times, one.agents) for one in told.lost] == [("zzzqqq", 2, ["scout"])]
    assert [(one.query, one.first) for one in told.astray] == [
        ("create an issue", "github__create_issue")
    ]
    assert [(one.name, one.group_id, one.times, one.loads) for one in told.uncalled] == [
        ("github__get_file", "mcp:github", 1, 1),
        ("github__merge_pull", "mcp:github", 1, 1),
    ]
    assert vars(told.agents[0]) == {
        "name": "scout",
        "searches": 4,
        "lost": 2,
        "astray": 1,
        "loads": 2,
        "uncalled": 2,
    }
    group = {one.name: one for one in told.groups}["mcp:github"]
    assert (group.searches, group.astray, group.loads, group.uncalled) == (2, 1, 2, 2)


def test_a_tool_that_was_called_in_its_session_is_not_listed(db):
    session = ended()
    loaded(session, "github__get_file", "github__list_issues")
    make_call(session, tool_name="github__get_file")
    other = ended()
    loaded(other, "github__get_file")

    told = {one.name: (one.times, one.loads) for one in read().uncalled}

    assert told == {"github__get_file": (1, 2), "github__list_issues": (1, 1)}


def test_a_session_that_still_runs_may_yet_take_what_it_found(db):
    running = make_session()
    searched(running, "issue", "github__list_issues")
    loaded(make_session(), "github__get_file")

    told = read()

    assert (told.astray, told.uncalled) == ([], [])
    searched(running, "issue again", "github__list_issues")
    assert [one.query for one in read().astray] == ["issue"]


def test_what_was_resumed_or_tried_by_people_is_nobodys_use(db):
    loaded(ended(), "github__get_file", how="resume")
    tried = ended(metadata=json.dumps({searches.TEST: "ada"}, separators=(",", ":")))
    loaded(tried, "github__get_file")
    searched(tried, "zzz")

    told = read()

    assert (told.uncalled, told.lost, told.read) == ([], [], 0)
    assert searches.recent_queries() == []


def test_it_is_narrowed_by_agent_by_group_and_by_time(github):
    ada, bob = make_agent("ada"), make_agent("bob")
    searched(ended(ada), "first", "github__list_issues")
    searched(ended(bob), "second")
    searched(ended(bob, started=timezone.now() - timedelta(days=60)), "long ago")
    loaded(ended(bob), "slack__post", group="mcp:slack")

    assert [one.query for one in read(agent="bob").lost] == ["second"]
    assert [one.name for one in read(agent="ada").agents] == ["ada"]
    assert [one.query for one in read(within="90d").lost] == ["long ago", "second"]
    of_github = read(group="mcp:github")
    assert [one.query for one in of_github.astray] == ["first"]
    assert (of_github.lost, of_github.uncalled) == ([], [])
    assert [one.name for one in read(group="mcp:slack").uncalled] == ["slack__post"]


def test_lately_has_what_found_nothing_first_and_then_the_newest(db):
    now = timezone.now()
    session = make_session()
    for minutes, query, hits in (
        (50, "lost", ()),
        (40, "old", ("a__b",)),
        (20, "new", ("a__c",)),
        (10, "old", ("a__b",)),
    ):
        searched(session, query, *hits, at=now - timedelta(minutes=minutes))

    told = searches.recent_queries()

    assert [(one.query, one.first, one.times) for one in told] == [
        ("lost", "", 1),
        ("old", "a__b", 2),
        ("new", "a__c", 1),
    ]


def test_the_pages_show_it_and_lead_back_to_the_query(scout, admin, page_of):
    session = scout.open()
    session.search("zzz & <b>")
    session.search(pattern="^zz+$")

    page = page_of(admin, "/search/missed").content.decode()
    assert "zzz &amp; &lt;b&gt;" in page
    assert 'href="/search?agent=scout&amp;q=zzz%20%26%20%3Cb%3E"' in page
    assert 'href="/search?mode=regex&amp;agent=scout&amp;q=%5Ezz%2B%24"' in page
    lately = page_of(admin, "/search").content.decode()
    assert 'href="/search?mode=regex&amp;q=%5Ezz%2B%24"' in lately
    assert "No result" in lately


def test_an_installation_where_nobody_searched_says_so(admin, page_of):
    assert "Nothing was searched for in this time." in text_of(page_of(admin, "/search/missed"))


def test_the_api_gives_the_same_report(scout, client, operator_token):
    scout.open().search("zzzqqq")

    def ask(path):
        answer = client.get(f"/api/v1{path}", headers={"Authorization": f"Bearer {operator_token}"})
        return answer.status_code, json.loads(answer.content)

    status, told = ask("/search/missed?within=24h&agent=scout")
    assert status == 200
    assert [(one["query"], one["times"]) for one in told["lost"]] == [("zzzqqq", 1)]
    assert told["agents"][0]["lost"] == 1
    assert ask("/search/missed?within=ever")[0] == 422


def test_the_report_costs_no_more_with_more_to_read(db, django_assert_max_num_queries):
    sessions = [ended() for _ in range(5)]
    for session in sessions:
        for number in range(20):
            searched(session, f"query {number}", "a__b")
        loaded(session, "a__b", "a__c")

    read()
    with django_assert_max_num_queries(5):
        read()
