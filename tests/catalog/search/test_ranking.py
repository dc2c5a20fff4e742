"""Ranking rules one by one, without a model: each test fails if its rule is removed."""

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


def names_of(tools, query, **parameters):
    return [
        hit.name for hit in search(Index(tools), query=query, strategy="bm25", **parameters).hits
    ]


FILLING = [tool(f"f__thing{at}", f"Something else {at}.") for at in range(20)]
TRIP = [
    tool("a__flights", "Book a flight with an airline between two airports."),
    tool("a__mail", "Mail a letter."),
    *FILLING,
]
TRIP_QUERY = "book a flight with an airline between two airports, then mail the letter"


def test_another_spelling_of_a_name_ranks_above_a_name_prefix():
    tools = [
        tool("a__create_issue_form", "Create issue create issue create issue."),
        tool("b__CreateIssue", "Something quite long about tickets, boards and their columns."),
        *FILLING,
    ]

    assert names_of(tools, "create issue")[:2] == ["b__CreateIssue", "a__create_issue_form"]


def test_two_letters_are_too_short_for_a_name_prefix():
    tools = [tool("a__runner", "Runs."), tool("b__x", "To ru is not a word."), *FILLING]

    assert names_of(tools, "ru") == ["b__x"]
    assert names_of(tools, "run")[0] == "a__runner"


def test_terms_count_most_in_names_then_descriptions_then_parameters():
    tools = [
        tool("a__one", "Some words.", parameters="invoice"),
        tool("b__two", "Some invoice."),
        tool("c__invoice", "Some words."),
        *FILLING,
    ]

    assert names_of(tools, "about the invoice") == ["c__invoice", "b__two", "a__one"]


@pytest.mark.parametrize(
    "texts",
    [
        {"title": "Walrus"},
        {"parameters": "walrus"},
        {"groups": ("zoo", "All about the walrus")},
        {"hints": ("walrus",)},
        {"phrases": ("walrus",)},
    ],
    ids=str,
)
def test_each_text_field_is_searched(texts):
    assert names_of([tool("a__one", "Does.", **texts), *FILLING], "a walrus") == ["a__one"]


def test_the_name_of_a_server_is_searched():
    assert names_of([tool("walrus__one", "Does."), *FILLING], "a walrus") == ["walrus__one"]


def test_a_short_clause_next_to_a_long_one_is_scored():
    index = Index(TRIP)
    split = search_query.parse_query(TRIP_QUERY, index.postings)
    whole = search_query.parse_query(TRIP_QUERY, index.postings, by_clause=False)
    mail = [one.name for one in index.tools].index("a__mail")

    assert len(split.clauses) == 2
    by_clause = ranking.keyword_scores(index.postings, split).normalized[mail]
    assert by_clause > ranking.keyword_scores(index.postings, whole).normalized[mail] + 0.1


def test_clause_similarity_counts_in_addition_to_query_similarity():
    whole, clause = np.float32([0.5, 0.5, 0]), np.float32([0, 0.5, 0])

    score, _ = ranking.semantic_scores(np.stack([whole, whole, clause], axis=1))
    alone, _ = ranking.semantic_scores(np.stack([whole, clause], axis=1))

    assert score[0] == score[1]
    assert alone[1] > alone[0] > 0


def test_a_misspelled_term_is_corrected_in_its_clause_too():
    postings = Index(TRIP).postings
    parsed = search_query.parse_query("book a fligt to Rome, then mail the leter", postings)

    assert parsed.corrections == {"fligt": "flight", "leter": "letter"}
    assert [
        set(parsed.clause_terms(clause)) & {"flight", "letter"} for clause in parsed.clauses
    ] == [
        {"flight"},
        {"letter"},
    ]


def test_a_term_is_never_corrected_to_a_term_outside_the_index():
    extended = Index([*TRIP, tool("a__crocodile", "A crocodile.")])

    assert search_query.parse_query("crocodle", extended.postings).corrections == {
        "crocodl": "crocodil"
    }
    assert search_query.parse_query("crocodle", Index(TRIP).postings).corrections == {}


def test_a_repeated_term_counts_once():
    tools = [tool("a__walrus", "A walrus."), tool("b__otter", "An otter."), *FILLING]
    once, twice = (
        search(Index(tools), query=f"otter {more}") for more in ("walrus", "walrus walrus")
    )

    assert [hit.score for hit in once.hits] == [hit.score for hit in twice.hits]


def test_a_server_hint_raises_its_tools_without_overriding_the_query():
    tools = [
        tool("shop__list_orders", "List the orders."),
        tool("zoo__list_orders", "List the orders."),
        tool("zoo__zoo_keeper", "A list of the keepers of the zoo."),
        *FILLING,
    ]

    assert names_of(tools, "all orders of the list", server_hint="the zoo")[0] == "zoo__list_orders"
    assert (
        names_of(tools, "all orders of the list", server_hint="the shop")[0] == "shop__list_orders"
    )
    assert names_of(tools, "all orders of the list", server_hint="the zoo")[-1] == "zoo__zoo_keeper"


def test_the_semantic_share_decreases_with_term_coverage():
    meaning, known = np.array([1.0, 0.0]), np.array([True, True])

    def mixed(coverage):
        words = KeywordScores(np.array([0.0, 1.0]), 1.0, coverage)
        return ranking.mix_scores(words, meaning, known).tolist()

    assert mixed(0.0)[0] > mixed(0.0)[1] > 0
    assert mixed(1.0)[1] > mixed(1.0)[0] > 0


def test_background_similarity_is_subtracted():
    near = np.full((400, 1), 0.4, np.float32)
    near[7] = 0.5

    score, _ = ranking.semantic_scores(near)

    assert score[7] == 1
    assert score[8] < 0.2


def test_in_small_catalogs_tools_below_the_average_still_score():
    score, near = ranking.semantic_scores(np.float32([[0.5], [0.4]]))

    assert score[1] > 0
    assert near.tolist() == [True, True]


def test_a_low_similarity_is_not_a_match():
    _, near = ranking.semantic_scores(np.float32([[0.15], [0.25], [np.nan]]))

    assert near.tolist() == [False, True, False]
