"""What a search answers: its size, several queries at once, and how to ask."""

import json

import pytest

from sessions_app.models import Event
from sessions_app.sessions.search import MAX_DEFAULT_TOKENS
from tests.support.agent_client import add_tools, make_agent_client
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.token_counter import count

pytestmark = pytest.mark.django_db

LONG = (
    "Create an issue, a label, a milestone or a comment in a repository of an organisation that "
    "the signed-in account may write to, with title, body, assignees and everything else"
)


@pytest.fixture
def many(db):
    """Sixty tools of one server whose names and descriptions are long."""
    names = [f"create_an_issue_with_every_detail_number_{at}" for at in range(60)]
    add_tools("github-enterprise", *names, **dict.fromkeys(names, LONG))
    return make_agent_client(mode="deferred").open()


def test_a_hit_is_as_small_as_a_model_needs(session):
    [hit, *_] = session.search("create issue")["tools"]

    assert hit == {
        "name": "github__create_issue",
        "description": "Create an issue in a repository.",
        "group_id": "mcp:github",
    }
    session.load("mcp:github", "create_issue")
    assert session.search("create issue")["tools"][0]["loaded"] is True


def test_explain_adds_scores_source_server_and_tokens(session):
    [hit, *_] = session.search("create issue", explain=True)["tools"]

    assert (hit["server"], hit["source"], hit["loaded"]) == ("github", "mcp", False)
    assert hit["tokens"] > 0
    assert hit["score"] > 0


def test_without_a_limit_there_are_five_hits_and_ten_names(many):
    answer = many.search("create issue").json

    assert len(answer["tools"]) == 5
    assert 1 <= len(answer["more"]) <= 10
    assert answer["total_matches"] == 60
    names = [tool["name"] for tool in answer["tools"]] + answer["more"]
    assert len(set(names)) == len(names)
    wide = many.search("create issue", limit=15).json
    assert [tool["name"] for tool in wide["tools"]][: len(names)] == names
    assert "more" not in wide


@pytest.mark.parametrize(
    "body",
    [
        {"query": "create issue"},
        {"queries": ["create issue", "create label", "create milestone", "create comment"]},
        {"query": "the printer on my floor is on fire again and nobody answers the phone"},
    ],
)
def test_a_default_response_costs_at_most_300_tokens(many, body):
    answer = many.post("/search", body).json

    assert len(answer["tools"]) in (0, 5)
    assert count(canonical(answer)) <= MAX_DEFAULT_TOKENS == 300
    assert all(tool["description"] for tool in answer["tools"])


def test_short_texts_are_not_shortened(db):
    add_tools("notes", *(f"note_{at}" for at in range(20)))

    answer = make_agent_client(mode="deferred").open().search("note").json

    assert len(answer["more"]) == 10
    assert answer["tools"][0]["description"].endswith(" for notes.")


@pytest.mark.parametrize("fields", [{"pattern": ".*"}, {"query": ".*", "strategy": "regex"}])
def test_a_pattern_has_ten_hits_and_no_more_names(many, fields):
    answer = many.post("/search", fields).json

    assert len(answer["tools"]) == 10
    assert "more" not in answer


def test_several_queries_give_the_best_of_each_first(session):
    answer = session.search(queries=["post message", "create issue", "merge pull"]).json

    assert [tool["name"] for tool in answer["tools"]][:3] == [
        "slack__post_message",
        "github__create_issue",
        "github__merge_pull",
    ]
    names = [tool["name"] for tool in answer["tools"]]
    assert len(names) == len(set(names))


def test_the_total_of_several_queries_counts_each_tool_once(session):
    assert session.search(queries=["issue", "create issue"], strategy="bm25")["total_matches"] == 2


def test_a_query_and_queries_are_searched_together_and_recorded_with_their_hits(session):
    session.search("post message", queries=["create issue", "post message"])

    details = json.loads(Event.objects.get(kind="searched").details)
    assert details["query"] == "post message; create issue"
    assert [row["query"] for row in details["queries"]] == ["post message", "create issue"]
    assert details["queries"][1]["hits"][0] == "github__create_issue"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"queries": ["a", "b", "c", "d", "e"]}, 422),
        ({"query": "a", "queries": ["b", "c", "d", "e"]}, 422),
        ({"queries": []}, 422),
        ({"queries": ["issue", " "]}, 422),
        ({"queries": ["issue", "x" * 501]}, 422),
        ({"queries": ["issue", 5]}, 422),
        ({"queries": ["issue", "code"], "strategy": "regex"}, 422),
        ({"queries": ["issue\0", "code"]}, 422),
    ],
)
def test_invalid_queries_are_rejected_and_not_recorded(session, body, status):
    assert session.post("/search", body).status == status
    assert "searched" not in session.kinds


def test_a_search_that_loads_delivers_the_schemas(session):
    answer = session.search("create issue", load=True, limit=1).json

    assert answer["newly_loaded"] == 1
    assert answer["tools"][0]["schema"]["required"] == ["what"]


def test_only_hits_are_loaded_not_the_names_after_them(many):
    assert many.search("create issue", load=True)["newly_loaded"] == 5


# --- How to ask -----------------------------------------------------------------------------------


def test_where_few_words_occur_the_answer_says_how_to_ask(session):
    sentence = "my colleague needs to know today that some issue with the coffee machine remains"

    message = session.search(sentence, strategy="bm25")["message"]

    assert "verb, object and product" in message
    assert '"list issues github"' in message or '"create issue github"' in message


@pytest.mark.parametrize("query", ["create issue github", "create_issue", "issue"])
def test_a_query_in_the_words_of_tools_gets_no_advice(session, query):
    assert "verb, object" not in session.search(query)["message"]


def test_the_meta_tool_says_how_to_ask(session):
    [search, *_] = session.opened["tools"]

    assert "verb, object and product" in search["description"]
    assert search["parameters"]["properties"]["queries"]["maxItems"] == 4
