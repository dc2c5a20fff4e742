"""The rules of the ranker one by one, without a model: each fails if its rule is taken away."""

import numpy as np
import pytest

from catalog.search import query as search_query
from catalog.search import ranking
from catalog.search.engine import search
from catalog.search.index import Index, Searchable
from catalog.search.ranking import KeywordScores


def tool(name, description="", **given):
    server, _, own = name.partition("__")
    texts = {"title": "", "parameters": "", "groups": (), **given}
    return Searchable(name=name, original_name=own, server=server, description=description, **texts)


def found(tools, query, **asked):
    return [hit.name for hit in search(Index(tools), query=query, strategy="bm25", **asked).hits]


FILLING = [tool(f"f__thing{at}", f"Something else {at}.") for at in range(20)]
TRIP = [
    tool("a__flights", "Book a flight with an airline between two airports."),
    tool("a__mail", "Mail a letter."),
    *FILLING,
]
TRIP_QUERY = "book a flight with an airline between two airports, then mail the letter"


def test_a_name_written_otherwise_comes_before_one_that_starts_with_it():
    tools = [
        tool("a__create_issue_form", "Create issue create issue create issue."),
        tool("b__CreateIssue", "Something quite long about tickets, boards and their columns."),
        *FILLING,
    ]

    assert found(tools, "create issue")[:2] == ["b__CreateIssue", "a__create_issue_form"]


def test_two_letters_start_too_many_names_to_mean_one():
    tools = [tool("a__runner", "Runs."), tool("b__x", "To ru is not a word."), *FILLING]

    assert found(tools, "ru") == ["b__x"]
    assert found(tools, "run")[0] == "a__runner"


def test_a_word_in_a_name_says_more_than_in_a_description_and_there_more_than_in_a_parameter():
    tools = [
        tool("a__one", "Some words.", parameters="invoice"),
        tool("b__two", "Some invoice."),
        tool("c__invoice", "Some words."),
        *FILLING,
    ]

    assert found(tools, "about the invoice") == ["c__invoice", "b__two", "a__one"]


@pytest.mark.parametrize(
    "texts",
    [
        {"title": "Walrus"},
        {"parameters": "walrus"},
        {"groups": ("zoo", "All about the walrus")},
        {"hints": ("walrus",)},
    ],
    ids=str,
)
def test_each_text_around_a_tool_is_searched(texts):
    assert found([tool("a__one", "Does.", **texts), *FILLING], "a walrus") == ["a__one"]


def test_the_name_of_a_server_is_searched():
    assert found([tool("walrus__one", "Does."), *FILLING], "a walrus") == ["walrus__one"]


def test_a_short_wish_beside_a_long_one_is_heard():
    index = Index(TRIP)
    parted = search_query.parse_query(TRIP_QUERY, index.postings)
    whole = search_query.parse_query(TRIP_QUERY, index.postings, by_clause=False)
    mail = [one.name for one in index.tools].index("a__mail")

    assert len(parted.clauses) == 2
    heard = ranking.keyword_scores(index.postings, parted).fit[mail]
    assert heard > ranking.keyword_scores(index.postings, whole).fit[mail] + 0.1


def test_how_near_a_clause_is_counts_beside_how_near_the_whole_is():
    whole, clause = np.float32([0.5, 0.5, 0]), np.float32([0, 0.5, 0])

    score, _ = ranking.semantic_scores(np.stack([whole, whole, clause], axis=1))
    alone, _ = ranking.semantic_scores(np.stack([whole, clause], axis=1))

    assert score[0] == score[1]
    assert alone[1] > alone[0] > 0


def test_a_mistake_is_mended_in_its_clause_too():
    postings = Index(TRIP).postings
    asked = search_query.parse_query("book a fligt to Rome, then mail the leter", postings)

    assert asked.repaired == {"fligt": "flight", "leter": "letter"}
    assert [set(asked.words(clause)) & {"flight", "letter"} for clause in asked.clauses] == [
        {"flight"},
        {"letter"},
    ]


def test_a_mistake_is_never_mended_to_a_word_that_only_others_hold():
    holding = Index([*TRIP, tool("a__crocodile", "A crocodile.")])

    assert search_query.parse_query("crocodle", holding.postings).repaired == {
        "crocodl": "crocodil"
    }
    assert search_query.parse_query("crocodle", Index(TRIP).postings).repaired == {}


def test_a_word_said_twice_counts_once():
    tools = [tool("a__walrus", "A walrus."), tool("b__otter", "An otter."), *FILLING]
    once, twice = (
        search(Index(tools), query=f"otter {more}") for more in ("walrus", "walrus walrus")
    )

    assert [hit.score for hit in once.hits] == [hit.score for hit in twice.hits]


def test_a_hint_about_the_server_lifts_its_tools_and_does_not_decide():
    tools = [
        tool("shop__list_orders", "List the orders."),
        tool("zoo__list_orders", "List the orders."),
        tool("zoo__zoo_keeper", "A list of the keepers of the zoo."),
        *FILLING,
    ]

    assert found(tools, "all orders of the list", server_hint="the zoo")[0] == "zoo__list_orders"
    assert found(tools, "all orders of the list", server_hint="the shop")[0] == "shop__list_orders"
    assert found(tools, "all orders of the list", server_hint="the zoo")[-1] == "zoo__zoo_keeper"


def test_the_better_the_words_are_covered_the_less_meaning_counts():
    meaning, known = np.array([1.0, 0.0]), np.array([True, True])

    def mixed(coverage):
        words = KeywordScores(np.array([0.0, 1.0]), 1.0, coverage)
        return ranking.mix_scores(words, meaning, known).tolist()

    assert mixed(0.0)[0] > mixed(0.0)[1] > 0
    assert mixed(1.0)[1] > mixed(1.0)[0] > 0


def test_what_all_tools_are_near_to_says_nothing():
    near = np.full((400, 1), 0.4, np.float32)
    near[7] = 0.5

    score, _ = ranking.semantic_scores(near)

    assert score[7] == 1
    assert score[8] < 0.2


def test_of_few_tools_those_under_the_average_still_score():
    score, near = ranking.semantic_scores(np.float32([[0.5], [0.4]]))

    assert score[1] > 0
    assert near.tolist() == [True, True]


def test_far_from_everything_is_no_match():
    _, near = ranking.semantic_scores(np.float32([[0.2], [0.3], [np.nan]]))

    assert near.tolist() == [False, True, False]
