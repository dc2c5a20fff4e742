"""The search playground: the agent's own answer, why each tool is there, and what is hidden."""

import html
import json
import re

import pytest

from catalog.audit import SYSTEM
from catalog.groups import actions as group_writes
from catalog.models import AuditEntry, Revision, Tool
from catalog.search.embeddings import store as vector_store
from catalog.tools import actions as tool_writes
from catalog.tools import hints
from sessions_app.models import AgentSession, Event
from sessions_app.playground import search as playground_search
from sessions_app.playground.search import PlaygroundQuery
from tests.support.agent_client import make_agent_client
from tests.support.factories import fold, tool_object

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def settled():
    """Embeddings are off here; who asks first is told that the model is being loaded."""
    vector_store.model.load()


def text_of(response):
    """A page as people read it."""
    body = response.content.decode().replace("<wbr>", "")
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def tool(name):
    return Tool.objects.get(public_name=name)


# --- The agent's own answer ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        (PlaygroundQuery(query="create issue"), {"query": "create issue"}),
        (PlaygroundQuery(query="code", limit=1), {"query": "code", "limit": 1}),
        (PlaygroundQuery(query="code", server="slack"), {"query": "code", "server": "slack"}),
        (PlaygroundQuery(query="code", strategy="bm25"), {"query": "code", "strategy": "bm25"}),
        (PlaygroundQuery(query="^git.*issue", mode="regex"), {"pattern": "^git.*issue"}),
        (PlaygroundQuery(query="zzzqqq"), {"query": "zzzqqq"}),
    ],
)
def test_the_answer_is_what_a_new_session_of_the_agent_is_given(scout, asked, sent):
    tried = playground_search.run_query(PlaygroundQuery(**{**vars(asked), "agent": "scout"}))

    assert tried.answer == scout.open().search(**sent).json


def test_what_an_agent_has_at_once_is_loaded_in_its_answer(github, slack):
    group_writes.set_preload(github, [tool("github__create_issue")], True, actor=SYSTEM)
    agent = make_agent_client("sorter", mode="deferred")

    told = playground_search.run_query(PlaygroundQuery(query="create issue", agent="sorter")).answer

    assert told == agent.open().search("create issue").json
    assert told["tools"][0]["loaded"]


def test_nothing_is_recorded(scout, admin, page_of):
    page_of(admin, "/search?q=create+issue&agent=scout")

    assert not Event.objects.exists()
    assert not AgentSession.objects.exists()


def test_without_an_agent_it_is_one_with_every_group(github, slack):
    found = playground_search.run_query(PlaygroundQuery(query="search_code"))

    assert {hit.name for hit in found.hits} >= {"github__search_code", "slack__search_code"}
    assert found.tools == 7


def test_an_agent_finds_what_is_in_its_groups_and_nothing_else(github, slack):
    make_agent_client("poster", "mcp:slack")

    found = playground_search.run_query(PlaygroundQuery(query="search code", agent="poster"))

    assert [hit.name for hit in found.hits] == ["slack__search_code"]
    assert found.tools == 2


@pytest.mark.parametrize(
    ("query", "mode", "words"),
    [
        ("x" * 501, "words", "at most 500"),
        ("(?=a)", "regex", "Look-ahead"),
        ("x" * 201, "regex", "at most 200"),
        ("(", "regex", "not a regular expression"),
    ],
)
def test_what_an_agent_would_be_refused_is_refused_with_the_same_reason(
    github, admin, page_of, query, mode, words
):
    shown = page_of(admin, "/search", data={"q": query, "mode": mode})

    assert shown.status_code == 200
    assert words in text_of(shown)
    assert "An agent is answered with status" in text_of(shown)


@pytest.mark.parametrize(
    "query", ["¿?¡!…", "Erstelle ein Ticket", "créer un ticket", "创建问题", "\u202e", "a" * 500]
)
@pytest.mark.parametrize("mode", ["words", "regex"])
def test_any_text_is_answered(github, admin, page_of, query, mode):
    assert page_of(admin, "/search", data={"q": query, "mode": mode}).status_code == 200


def test_odd_addresses_are_read_as_the_default(github, admin, page_of):
    odd = {"q": "issue", "limit": "many", "strategy": "magic", "mode": "x", "agent": ""}

    shown = page_of(admin, "/search", data=odd)

    assert shown.context["asked"] == PlaygroundQuery(query="issue")
    assert page_of(admin, "/search?q=issue&limit=900").context["asked"].limit == 50
    assert "There is no agent of this name" in text_of(page_of(admin, "/search?q=a&agent=nobody"))


# --- Why ----------------------------------------------------------------------------------------


def test_the_words_that_matched_are_marked_in_the_name_and_in_the_text(github, admin, page_of):
    shown = page_of(admin, "/search?q=create+issues").content.decode()

    assert "github__<mark>create</mark>_<mark>issue</mark></a>" in shown
    assert "<mark>Create</mark> an <mark>issue</mark> in a repository." in shown


def test_what_a_pattern_matched_is_marked():
    assert playground_search.highlight_pattern("create_issue", "ISS..") == [
        (False, "create_"),
        (True, "issue"),
    ]
    assert playground_search.highlight_pattern("aXbX", "x") == [
        (False, "a"),
        (True, "X"),
        (False, "b"),
        (True, "X"),
    ]
    assert playground_search.highlight_pattern("ab", "x*") == [(False, "ab")]


def test_markup_in_a_description_and_in_a_query_stays_text(github, admin, page_of):
    fold(
        github.follows,
        tool_object("danger", description="Search <script>alert(1)</script> & <b>issues</b>."),
    )

    shown = page_of(admin, "/search", data={"q": 'script "><img src=x>'}).content.decode()

    assert "&lt;<mark>script</mark>&gt;" in shown
    assert "<script>alert" not in shown
    assert "<img" not in shown


def test_each_result_has_its_rank_its_cost_and_its_reasons(github, admin, page_of):
    first = playground_search.run_query(PlaygroundQuery(query="create issue")).hits[0]
    shown = text_of(page_of(admin, "/search?q=create+issue"))

    assert (first.rank, first.name) == (1, "github__create_issue")
    assert first.tokens == tool("github__create_issue").approved.tokens
    assert f"≈{first.tokens} tokens" in shown
    assert "ms to search" in shown
    assert '"status": "success"' in shown


# --- What is hidden -----------------------------------------------------------------------------


def why(query, agent=""):
    return {
        one.name: one.why
        for one in playground_search.run_query(PlaygroundQuery(query=query, agent=agent)).hidden
    }


def test_a_tool_of_other_groups_is_named_with_where_it_is(github, slack):
    make_agent_client("poster", "mcp:slack")

    assert why("create an issue", "poster")["github__create_issue"] == (
        "It is not in poster’s groups. It is in mcp:github."
    )
    assert why("create_issue", "poster")["github__create_issue"].startswith("It is not in poster’s")


def test_a_tool_in_no_group_is_named_as_nobodys(github, slack):
    group_writes.delete(github, actor=SYSTEM)

    assert why("create_issue") == {
        "github__create_issue": "It is in no group, so no agent gets it."
    }


def test_held_missing_waiting_and_disabled_are_told_apart(github, slack):
    tool_writes.hold(tool("github__get_file"), "Too slow", actor=SYSTEM)
    assert why("get_file") == {
        "github__get_file": "github__get_file is held by an admin: Too slow."
    }

    server = github.follows
    fold(server, tool_object("list_issues"), allow_removals=True)
    assert "no longer offered by github" in why("merge_pull")["github__merge_pull"]

    server.trust = "strict"
    server.save()
    fold(server, tool_object("list_issues"), tool_object("brand_new"), allow_removals=True)
    assert "before someone approves it" in why("brand_new")["github__brand_new"]

    slack.follows.enabled = False
    slack.follows.save()
    Revision.bump()
    assert "is disabled" in why("post_message")["slack__post_message"]


def test_what_the_agent_has_is_never_called_hidden(scout):
    assert why("create_issue", "scout") == {}
    assert why("zzzqqq", "scout") == {}


def test_no_hit_shows_near_names_and_ways_out(github, slack, admin, page_of):
    make_agent_client("poster", "mcp:slack")

    shown = page_of(admin, "/search?q=pst_mesage&mode=&agent=poster&server=slack")

    tried = shown.context["tried"]
    assert "slack__post_message" in [*tried.near, *(hit.name for hit in tried.hits)]
    assert "pst_mesage" in text_of(shown)


# --- The page -----------------------------------------------------------------------------------


def test_the_page_begins_with_examples_of_the_persons_own_tools(github, slack, admin, page_of):
    assert playground_search.examples() == [
        "create an issue in a repository",
        "do post_message for slack",
    ]
    hints.add(tool("github__get_file"), "example", "read a file", actor=SYSTEM)

    shown = page_of(admin, "/search")

    assert playground_search.examples()[0] == "read a file"
    assert 'href="?q=read+a+file"' in shown.content.decode()


def test_an_installation_without_tools_says_what_to_do(admin, page_of):
    assert "There is nothing to find yet" in text_of(page_of(admin, "/search"))


def test_every_choice_is_in_the_address_and_comes_back_chosen(scout, admin, page_of):
    shown = page_of(
        admin, "/search?q=issue&mode=regex&agent=scout&strategy=bm25&server=github&limit=5"
    )
    body = shown.content.decode()

    for chosen in (
        'value="issue"',
        'value="regex" checked',
        'value="scout" selected',
        'value="bm25" selected',
        'value="github" selected',
        'value="5" selected',
    ):
        assert chosen in body
    assert '<form class="ask" id="ask" method="get"' in body


def test_while_typing_only_the_results_are_sent_and_the_count_is_announced(github, admin, page_of):
    part = page_of(admin, "/search?q=issue&agent=&limit=", headers={"HX-Request": "true"})

    assert "<html" not in part.content.decode()
    assert part["HX-Replace-Url"] == "/search?q=issue"
    found = part.context["tried"].total
    assert json.loads(part["HX-Trigger"]) == {"announce": f"{found} tools found"}


def test_an_operator_searches_and_marks_nothing(github, operator, page_of, client):
    shown = page_of(operator, "/search?q=issue&agent=").content.decode()

    assert "github__" in shown
    assert "Mark as right" not in shown
    for path in ("/search/mark", "/search/load", "/search/golden/run"):
        assert client.post(path).status_code == 403


def test_the_api_answers_as_the_page_does(scout, client, operator_token):
    def ask(path):
        answer = client.get(f"/api/v1{path}", headers={"Authorization": f"Bearer {operator_token}"})
        return answer.status_code, json.loads(answer.content)

    status, told = ask("/search?query=create+issue&agent=scout")
    assert status == 200
    assert told["answer"] == scout.open().search("create issue").json
    assert told["why"][0]["name"] == "github__create_issue"
    assert ask("/search?pattern=(")[1]["error"]["code"] == "invalid_pattern"
    assert ask("/search?query=a&agent=nobody")[0] == 404
    assert ask("/search")[0] == 422


# --- Test sessions ------------------------------------------------------------------------------


def test_a_tool_is_loaded_into_a_session_that_is_there_to_be_looked_at(
    github, admin, page_of, client
):
    agent = make_agent_client("sorter", mode="deferred").agent
    page_of(admin, "/search")

    shown = client.post(
        "/search/load", {"agent": "sorter", "tool": "github__create_issue"}, follow=True
    )

    session = AgentSession.objects.get()
    assert shown.redirect_chain[0][0] == f"/sessions/{session.session_id}"
    assert (session.agent, session.state) == (agent, "closed")
    assert json.loads(session.metadata) == {"tried_by": "ada@example.org"}
    assert [event.kind for event in session.events.all()] == ["opened", "loaded", "closed"]
    entry = AuditEntry.objects.get(verb="agent.test")
    assert entry.actor_label == "ada@example.org"


def test_a_test_session_holds_what_the_agent_may_have_and_nothing_else(
    github, slack, admin, page_of, client
):
    make_agent_client("poster", "mcp:slack")
    page_of(admin, "/search")

    told = client.post(
        "/search/load",
        {"agent": "poster", "tool": "github__create_issue", "address": "q=issue&agent=poster"},
        follow=True,
    )

    assert told.redirect_chain[0][0] == "/search?q=issue&agent=poster"
    assert "poster does not get" in text_of(told)
    assert not AgentSession.objects.exists()


def test_the_page_costs_no_more_with_more_tools(
    github, admin, page_of, client, django_assert_max_num_queries
):
    page_of(admin, "/search?q=issue")
    with django_assert_max_num_queries(24):
        client.get("/search?q=issue")
    fold(github.follows, *(tool_object(f"issue_{at}") for at in range(200)))
    client.get("/search?q=issue")
    with django_assert_max_num_queries(24):
        client.get("/search?q=issue&limit=50")


def test_a_hint_finds_a_tool_that_its_own_words_do_not(github):
    assert not playground_search.run_query(PlaygroundQuery(query="wombat", strategy="bm25")).hits

    hints.add(tool("github__get_file"), "alias", "wombat", actor=SYSTEM)

    found = playground_search.run_query(PlaygroundQuery(query="wombat", strategy="bm25"))
    assert found.hits[0].name == "github__get_file"
