"""Hints from use: which queries become hints, of which tool, for whom."""

from datetime import timedelta

import pytest
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.hints import actions as hints
from catalog.models import Revision, Tool, ToolHint
from sessions_app.models import AgentSession, Event
from sessions_app.sessions import used_queries
from tests.support.agent_client import add_tools, make_agent_client
from tests.support.factories import make_agent, make_call, make_event, make_session

pytestmark = pytest.mark.django_db

TODAY = timezone.now().replace(hour=12)
YESTERDAY = TODAY - timedelta(days=1)


@pytest.fixture(autouse=True)
def _from_the_start(monkeypatch):
    monkeypatch.setattr(used_queries, "_last_event", 0)


@pytest.fixture
def scout(db):
    add_tools("github", "create_issue", "list_issues")
    return make_agent("scout")


def tool(name):
    return Tool.objects.get(name=name)


def search(session, query, *names, at, **details):
    make_event(session, "searched", at=at, query=query, hits=list(names), total=1, **details)


def use(agent, query, name="create_issue", at=TODAY, *, session=None, hits=None, **call):
    """A session that searches, finds a tool and calls it."""
    session = session or make_session(agent, started=at)
    found = hits if hits is not None else [f"github__{name}"]
    search(session, query, *found, at=at)
    make_call(session, tool(name), at=at + timedelta(seconds=5), **call)
    return session


def learned():
    used_queries._last_event = 0
    used_queries.learn()
    rows = ToolHint.objects.active().filter(source="use")
    return sorted(rows.values_list("tool__name", "text", "agent__name"))


def test_two_successful_sessions_on_two_days_make_a_hint_for_their_agent(scout):
    use(scout, "Something is  broken", at=YESTERDAY)
    use(scout, "something is broken", at=TODAY)
    before = Revision.current()

    assert learned() == [("create_issue", "something is broken", "scout")]
    assert Revision.current() == before + 1
    assert learned() == [("create_issue", "something is broken", "scout")]
    assert Revision.current() == before + 1


def test_it_takes_two_days_two_sessions_one_agent_and_success(scout):
    use(scout, "one day", at=TODAY)
    use(scout, "one day", at=TODAY)
    session = use(scout, "one session", at=YESTERDAY)
    use(scout, "one session", at=TODAY, session=session)
    use(scout, "two agents", at=YESTERDAY)
    use(make_agent("other"), "two agents", at=TODAY)
    use(scout, "one failed", at=YESTERDAY, state="failed", is_error=True)
    use(scout, "one failed", at=TODAY)
    use(scout, "an error result", at=YESTERDAY, is_error=True)
    use(scout, "an error result", at=TODAY)
    use(scout, "a person tried", at=YESTERDAY, path="try")
    use(scout, "a person tried", at=TODAY)
    use(scout, "not found", at=YESTERDAY, hits=[])
    use(scout, "not found", at=TODAY, hits=[])

    assert learned() == []


def test_the_last_search_that_found_the_tool_led_to_it(scout):
    for day in (YESTERDAY, TODAY):
        session = make_session(scout, started=day)
        search(session, "first try", "github__create_issue", at=day)
        search(session, "it broke", "github__create_issue", at=day + timedelta(seconds=1))
        search(session, "elsewhere", "github__list_issues", at=day + timedelta(seconds=2))
        make_call(session, tool("create_issue"), at=day + timedelta(seconds=3))
        search(session, "too late", "github__create_issue", at=day + timedelta(seconds=4))

    assert learned() == [("create_issue", "it broke", "scout")]


def test_of_several_queries_the_one_that_ranked_the_tool_best_counts(scout):
    names = ["github__list_issues", "github__create_issue"]
    for day in (YESTERDAY, TODAY):
        session = make_session(scout, started=day)
        parts = [{"query": "a list", "hits": names}, {"query": "it broke", "hits": names[::-1]}]
        search(session, "a list; it broke", *names, at=day, queries=parts)
        make_call(session, tool("create_issue"), at=day + timedelta(seconds=3))

    assert learned() == [("create_issue", "it broke", "scout")]


@pytest.mark.parametrize(
    "query",
    ["log in with ***", "x" * 81, "reads \u202ebackwards", "create issue", "github__create_issue"],
)
def test_masked_long_and_hidden_texts_and_names_are_not_used(scout, query):
    use(scout, query, at=YESTERDAY)
    use(scout, query, at=TODAY)

    assert learned() == []


@pytest.mark.parametrize(
    "query",
    [
        f"with ghp_{'k3Jd' * 9}",
        "password=correct-horse-9",
        "the password: correct-horse-9",
        "Authorization: Bearer abcdef0123456789abcdef",
        f"api_key {'9f8e7d6c' * 4}",
        "as ann with password hunter2",
        "my password is swordfish",
        "at https://ann:s3cretpass@git.example.org/repo",
    ],
)
@pytest.mark.parametrize("several", [False, True])  # one query, or a list of queries
def test_a_query_with_a_token_or_password_never_becomes_a_hint(query, several):
    add_tools("github", "create_issue")
    client = make_agent_client("scout", mode="deferred")
    for text in (f"create issue {query}", "an issue is open"):
        for days in (1, 0):
            session = client.open()
            answer = session.search(queries=[text]) if several else session.search(text)
            assert answer["tools"][0]["name"] == "github__create_issue"
            row = AgentSession.objects.get(session_id=session.id)
            at = Event.objects.get(session=row, kind="searched").at - timedelta(days=days)
            Event.objects.filter(session=row).update(at=at)
            make_call(row, tool("create_issue"), at=at)

    assert learned() == [("create_issue", "an issue is open", "scout")]


def test_a_query_about_passwords_and_tokens_becomes_a_hint(scout):
    queries = ["someone forgot a password", "count the tokens of report 2026-11-18"]
    for query in queries:
        use(scout, query, at=YESTERDAY)
        use(scout, query, at=TODAY)

    assert [text for _, text, _ in learned()] == sorted(queries)


def test_a_tool_has_at_most_two_the_most_frequent_first(scout):
    for number, days in ((1, 2), (2, 4), (3, 3)):
        for day in range(days):
            use(scout, f"query {number}", at=TODAY - timedelta(days=day))

    assert [text for _, text, _ in learned()] == ["query 2", "query 3"]


def test_a_hint_that_a_person_removed_or_wrote_is_not_learned(scout):
    hints.add(tool("create_issue"), "example", "Tell the devs", actor=SYSTEM)
    for day in (YESTERDAY, TODAY):
        use(scout, "tell the devs", at=day)
        use(scout, "it broke", at=day)
    assert learned() == [("create_issue", "it broke", "scout")]

    hints.remove(ToolHint.objects.get(source="use"), actor=SYSTEM)

    assert learned() == []


def test_searches_older_than_a_month_do_not_count(scout):
    use(scout, "it broke", at=TODAY - timedelta(days=40))
    use(scout, "it broke", at=TODAY)

    assert learned() == []


def test_without_new_events_nothing_is_read(scout, django_assert_num_queries):
    use(scout, "it broke", at=TODAY)
    used_queries.learn()

    with django_assert_num_queries(1):
        assert used_queries.learn() == 0
