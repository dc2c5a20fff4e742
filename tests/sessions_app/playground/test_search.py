"""Search playground: the agent's own response, explanations and unavailable tools."""

import html
import json
import re

import pytest

from catalog.audit import SYSTEM
from catalog.groups import actions as group_writes
from catalog.hints import actions as hints
from catalog.models import AuditEntry, GoldenQuery, HintSource, Revision, Tool
from catalog.search.embeddings import store as vector_store
from catalog.tools import actions as tool_writes
from sessions_app.models import AgentSession, Event
from sessions_app.playground import search as playground_search
from sessions_app.playground.search import PlaygroundQuery
from tests.support.agent_client import make_agent_client
from tests.support.factories import ingest_tools, tool_object

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def loaded_model():
    """Load the model: embeddings are off here, but the first search reports that it is loading."""
    vector_store.model.load()


def text_of(response):
    """Return the visible text of a page."""
    body = response.content.decode().replace("<wbr>", "")
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def tool(name):
    return Tool.objects.get(public_name=name)


# --- The agent's own response -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "arguments"),
    [
        (PlaygroundQuery(query="create issue"), {"query": "create issue"}),
        (PlaygroundQuery(query="code", limit=1), {"query": "code", "limit": 1}),
        (PlaygroundQuery(query="code", server="slack"), {"query": "code", "server": "slack"}),
        (PlaygroundQuery(query="code", strategy="bm25"), {"query": "code", "strategy": "bm25"}),
        (PlaygroundQuery(query="^git.*issue", mode="regex"), {"pattern": "^git.*issue"}),
        (PlaygroundQuery(query="zzzqqq"), {"query": "zzzqqq"}),
    ],
)
def test_the_response_is_that_of_a_new_session_of_the_agent(scout, params, arguments):
    result = playground_search.run_query(PlaygroundQuery(**{**vars(params), "agent": "scout"}))

    assert result.answer == scout.open().search(**arguments).json


def test_preloaded_tools_are_marked_as_loaded_in_the_response(github, slack):
    group_writes.set_preload(github, [tool("github__create_issue")], True, actor=SYSTEM)
    agent = make_agent_client("sorter", mode="deferred")

    result = playground_search.run_query(PlaygroundQuery(query="create issue", agent="sorter"))

    assert result.answer == agent.open().search("create issue").json
    assert result.answer["tools"][0]["loaded"]


def test_nothing_is_recorded(scout, admin, page_of):
    page_of(admin, "/search?q=create+issue&agent=scout")

    assert not Event.objects.exists()
    assert not AgentSession.objects.exists()


def test_without_an_agent_all_groups_are_searched(github, slack):
    result = playground_search.run_query(PlaygroundQuery(query="search_code"))

    assert {hit["name"] for hit in result.hits} >= {"github__search_code", "slack__search_code"}
    assert result.tool_count == 7


def test_an_agent_finds_only_tools_in_its_groups(github, slack):
    make_agent_client("poster", "mcp:slack")

    result = playground_search.run_query(PlaygroundQuery(query="search code", agent="poster"))

    assert [hit["name"] for hit in result.hits] == ["slack__search_code"]
    assert result.tool_count == 2


@pytest.mark.parametrize(
    ("query", "mode", "message"),
    [
        ("x" * 501, "words", "at most 500"),
        ("(?=a)", "regex", "Look-ahead"),
        ("x" * 201, "regex", "at most 200"),
        ("(", "regex", "not a valid regular expression"),
    ],
)
def test_a_query_rejected_for_agents_is_rejected_with_the_same_message(
    github, admin, page_of, query, mode, message
):
    page = page_of(admin, "/search", data={"q": query, "mode": mode})

    assert page.status_code == 200
    assert message in text_of(page)
    assert "Agents receive HTTP" in text_of(page)


@pytest.mark.parametrize(
    "query", ["¿?¡!…", "Erstelle ein Ticket", "créer un ticket", "创建问题", "\u202e", "a" * 500]
)
@pytest.mark.parametrize("mode", ["words", "regex"])
def test_any_text_is_accepted(github, admin, page_of, query, mode):
    assert page_of(admin, "/search", data={"q": query, "mode": mode}).status_code == 200


def test_invalid_parameters_are_ignored(github, admin, page_of):
    invalid = {"q": "issue", "limit": "many", "strategy": "magic", "mode": "x", "agent": ""}

    page = page_of(admin, "/search", data=invalid)

    assert page.context["params"] == PlaygroundQuery(query="issue")
    assert page_of(admin, "/search?q=issue&limit=900").context["params"].limit == 50
    assert "Agent not found." in text_of(page_of(admin, "/search?q=a&agent=nobody"))


# --- Explanations -------------------------------------------------------------------------------


def test_matched_words_are_highlighted_in_the_name_and_the_description(github, admin, page_of):
    shown = page_of(admin, "/search?q=create+issues").content.decode()

    assert "github__<mark>create</mark>_<mark>issue</mark></a>" in shown
    assert "<mark>Create</mark> an <mark>issue</mark> in a repository." in shown


def test_matches_of_a_pattern_are_highlighted():
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


def test_markup_in_a_description_and_in_a_query_is_escaped(github, admin, page_of):
    ingest_tools(
        github.follows,
        tool_object("danger", description="Search <script>alert(1)</script> & <b>issues</b>."),
    )

    shown = page_of(admin, "/search", data={"q": 'script "><img src=x>'}).content.decode()

    assert "&lt;<mark>script</mark>&gt;" in shown
    assert "<script>alert" not in shown
    assert "<img" not in shown


def test_each_result_has_its_rank_cost_and_reasons(github, admin, page_of):
    first = playground_search.run_query(PlaygroundQuery(query="create issue")).hits[0]
    shown = text_of(page_of(admin, "/search?q=create+issue"))

    assert (first["rank"], first["name"]) == (1, "github__create_issue")
    assert first["tokens"] == tool("github__create_issue").approved.tokens
    assert f"≈{first['tokens']} tokens" in shown
    assert "Search time:" in shown
    assert '"status": "success"' in shown


# --- Unavailable tools --------------------------------------------------------------------------


def reasons(query, agent=""):
    result = playground_search.run_query(PlaygroundQuery(query=query, agent=agent))
    return result.hidden


def test_a_tool_of_other_groups_is_listed_with_its_groups(github, slack):
    make_agent_client("poster", "mcp:slack")

    assert reasons("create an issue", "poster")["github__create_issue"] == (
        "Not in the groups of poster. Member of mcp:github."
    )
    assert reasons("create_issue", "poster")["github__create_issue"].startswith(
        "Not in the groups of poster."
    )


def test_a_tool_in_no_group_is_listed_as_unavailable(github, slack):
    group_writes.delete(github, actor=SYSTEM)

    assert reasons("create_issue") == {
        "github__create_issue": "Not in any group, so not available to agents."
    }


def test_hidden_missing_pending_and_disabled_tools_have_different_reasons(github, slack):
    tool_writes.hold(tool("github__get_file"), "Too slow", actor=SYSTEM)
    assert reasons("get_file") == {
        "github__get_file": "github__get_file is hidden by an admin: Too slow."
    }

    server = github.follows
    ingest_tools(server, tool_object("list_issues"), allow_removals=True)
    assert "no longer offered by github" in reasons("merge_pull")["github__merge_pull"]

    server.trust = "strict"
    server.save()
    ingest_tools(server, tool_object("list_issues"), tool_object("brand_new"), allow_removals=True)
    assert "until approved" in reasons("brand_new")["github__brand_new"]

    slack.follows.enabled = False
    slack.follows.save()
    Revision.bump()
    assert "is disabled" in reasons("post_message")["slack__post_message"]


def test_available_tools_are_never_listed_as_unavailable(scout):
    assert reasons("create_issue", "scout") == {}
    assert reasons("zzzqqq", "scout") == {}


def test_no_results_shows_similar_names(github, slack, admin, page_of):
    make_agent_client("poster", "mcp:slack")

    shown = page_of(admin, "/search?q=pst_mesage&mode=&agent=poster&server=slack")

    result = shown.context["result"]
    names = [*result.similar_names, *(hit["name"] for hit in result.hits)]
    assert "slack__post_message" in names
    assert "pst_mesage" in text_of(shown)


# --- The page -----------------------------------------------------------------------------------


def test_the_page_starts_with_example_queries_from_the_installed_tools(
    github, slack, admin, page_of
):
    assert playground_search.example_queries() == [
        "create an issue in a repository",
        "do post_message for slack",
    ]
    hints.add(tool("github__get_file"), "example", "read a file", actor=SYSTEM)

    shown = page_of(admin, "/search")

    assert playground_search.example_queries()[0] == "read a file"
    assert 'href="?q=read+a+file"' in shown.content.decode()


def test_without_tools_the_page_explains_how_to_start(admin, page_of):
    assert "No tools to search yet" in text_of(page_of(admin, "/search"))


def test_every_option_is_in_the_url_and_stays_selected(scout, admin, page_of):
    shown = page_of(
        admin, "/search?q=issue&mode=regex&agent=scout&strategy=bm25&server=github&limit=5"
    )
    body = shown.content.decode()

    for attribute in (
        'value="issue"',
        'value="regex" checked',
        'value="scout" selected',
        'value="bm25" selected',
        'value="github" selected',
        'value="5" selected',
    ):
        assert attribute in body
    assert '<form class="ask" id="ask" method="get"' in body


def test_htmx_gets_only_the_results_and_the_count_is_announced(github, admin, page_of):
    fragment = page_of(admin, "/search?q=issue&agent=&limit=", headers={"HX-Request": "true"})

    assert "<html" not in fragment.content.decode()
    assert fragment["HX-Replace-Url"] == "/search?q=issue"
    total = fragment.context["result"].total
    assert json.loads(fragment["HX-Trigger"]) == {"announce": f"{total} tools found"}


def test_an_operator_searches_but_cannot_set_expected_tools(github, operator, page_of, client):
    shown = page_of(operator, "/search?q=issue&agent=").content.decode()

    assert "github__" in shown
    assert "Set as expected" not in shown
    for path in ("/search/mark", "/search/load", "/search/golden/run"):
        assert client.post(path).status_code == 403


def test_the_api_returns_the_same_result_as_the_page(scout, client, operator_token):
    def get(path):
        headers = {"Authorization": f"Bearer {operator_token}"}
        response = client.get(f"/api/v1{path}", headers=headers)
        return response.status_code, json.loads(response.content)

    status, body = get("/search?query=create+issue&agent=scout")
    assert status == 200
    assert body["answer"] == scout.open().search("create issue").json
    assert body["why"][0]["name"] == "github__create_issue"
    assert get("/search?pattern=(")[1]["error"]["code"] == "invalid_pattern"
    status, body = get("/search?query=a&agent=nobody")
    assert (status, body["error"]["details"]["problems"][0]["at"]) == (422, "query.agent")
    assert get("/search")[0] == 422


# --- Test sessions ------------------------------------------------------------------------------


def test_a_tool_is_loaded_into_a_test_session(github, admin, page_of, client):
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


def test_a_test_session_rejects_tools_that_are_not_available_to_the_agent(
    github, slack, admin, page_of, client
):
    make_agent_client("poster", "mcp:slack")
    page_of(admin, "/search")

    page = client.post(
        "/search/load",
        {"agent": "poster", "tool": "github__create_issue", "address": "q=issue&agent=poster"},
        follow=True,
    )

    assert page.redirect_chain[0][0] == "/search?q=issue&agent=poster"
    assert "is not available to poster." in text_of(page)
    assert not AgentSession.objects.exists()


def test_the_page_takes_a_fixed_number_of_queries(
    github, admin, page_of, client, django_assert_max_num_queries
):
    page_of(admin, "/search?q=issue")
    with django_assert_max_num_queries(24):
        client.get("/search?q=issue")
    ingest_tools(github.follows, *(tool_object(f"issue_{at}") for at in range(200)))
    client.get("/search?q=issue")
    with django_assert_max_num_queries(24):
        client.get("/search?q=issue&limit=50")


def test_a_search_alias_finds_a_tool_that_its_description_does_not(github):
    assert not playground_search.run_query(PlaygroundQuery(query="wombat", strategy="bm25")).hits

    hints.add(tool("github__get_file"), "alias", "wombat", actor=SYSTEM)

    result = playground_search.run_query(PlaygroundQuery(query="wombat", strategy="bm25"))
    assert result.hits[0]["name"] == "github__get_file"


@pytest.mark.parametrize("source", ["model", "bundled"])
def test_the_source_of_the_hint_that_brought_a_hit_is_shown(github, admin, page_of, source):
    file = tool("github__get_file")
    hints.replace({file.pk: ["where is the wombat picture"]}, HintSource(source))

    result = playground_search.run_query(PlaygroundQuery(query="wombat", strategy="bm25"))

    [hit] = result.hits
    assert hit["hint"] == {"text": "where is the wombat picture", "source": source}
    page = text_of(page_of(admin, "/search?q=wombat"))
    assert f"hint ({source}): “where is the wombat picture”" in page
    assert "hint" not in json.dumps(result.answer)


def test_a_hit_by_its_own_words_names_no_hint(github):
    file = tool("github__get_file")
    hints.replace({file.pk: ["get me the file"]}, HintSource.MODEL)

    [hit, *_] = playground_search.run_query(PlaygroundQuery(query="get_file")).hits

    assert (hit["name"], hit["hint"]) == ("github__get_file", None)


def test_a_hint_becomes_a_golden_query_with_one_click(github, admin, page_of, client):
    file = tool("github__get_file")
    hints.replace({file.pk: ["where is the wombat picture"]}, HintSource.MODEL)
    page = page_of(admin, "/tools/github__get_file").content.decode()
    [form] = re.findall(r'action="/search/mark".*?</form>', page, re.DOTALL)
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', form))

    response = client.post("/search/mark", fields, follow=True)

    assert response.redirect_chain[0][0].startswith("/search?q=where+is+the+wombat")
    golden = GoldenQuery.objects.get()
    assert (golden.query, golden.right) == ("where is the wombat picture", ["github__get_file"])
    assert golden.origin == "hint"
