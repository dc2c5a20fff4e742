"""Search: keyword and pattern strategies, ranking rules, validation, and name suggestions."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import shake_256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.search import regex
from catalog.search.engine import search, suggest_names
from catalog.search.index import Index, Searchable
from catalog.search.tokenizer import tokenize, tokenize_query
from toolcrib.lib.errors import Invalid


def tool(name, description="", *, server=None, **given):
    slug, separator, own = name.partition("__")
    if not separator:
        slug, own = "", name
    texts = {"original_name": own, "title": "", "parameters": "", "groups": (), **given}
    return Searchable(
        name=name, server=slug if server is None else server, description=description, **texts
    )


WEATHER = tool("weather__get_forecast", "Return the forecast for a city.", parameters="city days")
TIDES = tool("weather__get_tides", "Return the tides of a harbour.")
ISSUE = tool("github__create_issue", "Create an issue in a repository.", title="New ticket")
COMMENT = tool("github__create_issue_comment", "Comment on an issue.")
LIST = tool("github__list_issues", "List issues of a repository.", groups=("triage", "Bug desk"))
NOTE = tool("note", "Write something down.")
TOOLS = [WEATHER, TIDES, ISSUE, COMMENT, LIST, NOTE]
INDEX = Index(TOOLS)
# Hexadecimal digits as a and b: text that never repeats.
TO_AB = str.maketrans("0123456789abcdef", "ab" * 8)

few = st.sampled_from(
    ["get", "list", "issue", "issues", "file", "readFile", "the", "é", "天気予報"]
)
texts = st.lists(few, max_size=5).map(" ".join)
names = st.tuples(st.sampled_from(["a", "b"]), few, few).map(lambda n: f"{n[0]}__{n[1]}_{n[2]}")
tools = st.lists(st.builds(tool, names, texts), max_size=8, unique_by=lambda one: one.name)


def names_of(index=INDEX, **parameters):
    return [hit.name for hit in search(index, **parameters).hits]


def rejection(**parameters):
    with pytest.raises(Invalid) as raised:
        search(INDEX, **parameters)
    return raised.value


def all_terms(one):
    fields = (one.original_name, one.server, one.title, one.description, one.parameters)
    return {
        word for text in (*fields, *one.groups, *one.hints, *one.phrases) for word in tokenize(text)
    }


# --- Keywords -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("forecast", WEATHER),
        ("what will the weather be in my city", WEATHER),
        ("harbor or harbour tides", TIDES),
        ("new ticket", ISSUE),
        ("days", WEATHER),
        ("triage", LIST),
        ("bug desk", LIST),
        ("comments", COMMENT),
        ("createIssue", ISSUE),
        ("github create-issue", ISSUE),
    ],
)
def test_every_field_of_a_tool_is_searched(query, first):
    assert names_of(query=query)[0] == first.name


def test_an_exact_name_ranks_first_then_names_with_this_prefix_then_the_rest():
    praised = tool("praise__it", "create issue create issue create issue create_issue")
    index = Index([*TOOLS, praised])

    for query in ("create_issue", "github__create_issue", "CREATE_ISSUE", "create issue"):
        assert names_of(index, query=query)[:2] == [ISSUE.name, COMMENT.name], query
    assert praised.name in names_of(index, query="create_issue")


def test_an_exact_spelling_ranks_above_another_spelling_of_the_name():
    index = Index([tool("a__create_issue"), tool("a__createIssue"), tool("a__create.issue")])

    assert names_of(index, query="createIssue")[0] == "a__createIssue"
    assert names_of(index, query="create.issue")[0] == "a__create.issue"


def test_a_rare_term_counts_more_than_a_common_one():
    index = Index([tool("a__one", "open file"), tool("b__two", "open"), tool("z__three", "rare")])

    hits = search(index, query="open something rare").hits

    assert hits[0].name == "z__three"
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_equal_scores_are_ordered_by_name():
    index = Index([tool(f"{slug}__get", "the same") for slug in "cab"])

    assert names_of(index, query="same") == ["a__get", "b__get", "c__get"]


def test_no_match_returns_no_hits():
    result = search(INDEX, query="zebra")

    assert (result.total, result.hits) == (0, ())


def test_the_total_does_not_depend_on_the_limit_which_is_clamped():
    index = Index([tool(f"s__get_{number}") for number in range(60)])

    for limit, count in [(3, 3), (0, 1), (-1, 1), (51, 50), (10**9, 50)]:
        result = search(index, query="get", limit=limit)
        assert (result.total, len(result.hits)) == (60, count)
        result = search(index, pattern="get", limit=limit)
        assert (result.total, len(result.hits)) == (60, count)


def test_reasons_are_the_terms_as_spelled_in_the_query():
    (hit,) = search(INDEX, query="Harbour, zebra").hits
    assert hit.reasons == ("“Harbour”",)

    hit = search(INDEX, query="create_issue").hits[0]
    assert hit.reasons == ("name", "“create_issue”")


@pytest.mark.parametrize("strategy", ["", "bm25", "hybrid", "embedding"])
def test_without_vectors_search_falls_back_to_bm25_with_a_note(strategy):
    result = search(INDEX, query="tides", strategy=strategy)

    assert result.strategy == "bm25"
    assert [hit.name for hit in result.hits] == [TIDES.name]
    assert ("keywords only" in result.note) == (strategy != "bm25")
    assert result.hits[0].bm25 == 1
    assert result.hits[0].embedding is None


@given(tools, st.lists(few, min_size=1, max_size=3).map(" ".join), st.randoms())
def test_the_input_order_of_tools_has_no_effect(given, query, random):
    shuffled = list(given)
    random.shuffle(shuffled)

    one, other = Index(given), Index(shuffled)

    assert search(one, query=query) == search(other, query=query)
    assert search(one, pattern=query) == search(other, pattern=query)
    assert suggest_names(one, query) == suggest_names(other, query)


@given(tools, st.lists(few, min_size=1, max_size=3).map(" ".join))
def test_hits_are_the_tools_that_share_a_term_with_a_positive_score(given, query):
    terms = set(tokenize_query(query))
    matching = {one.name for one in given if terms & all_terms(one)}

    result = search(Index(given), query=query)

    assert {hit.name for hit in result.hits} == matching
    assert result.total == len(matching)
    assert all(hit.score > 0 for hit in result.hits)


@given(tools, st.sampled_from(["a", "b", "zebra"]), few)
def test_the_server_filter_applies_before_counting(given, server, query):
    theirs = {one.name for one in given if one.server == server}
    for parameters in ({"query": query}, {"pattern": query}):
        everything = search(Index(given), **parameters)
        result = search(Index(given), server=server, **parameters)

        expected = [hit.name for hit in everything.hits if hit.name in theirs]
        assert [hit.name for hit in result.hits] == expected
        assert result.total == len(expected)


def test_a_term_of_every_tool_still_has_a_positive_score():
    index = Index([tool(f"s__{number}", "alike") for number in range(3_000)])

    assert all(hit.score > 0 for hit in search(index, query="alike").hits)


def test_scores_do_not_depend_on_tools_outside_the_index():
    """Access control comes before ranking: hidden tools do not affect any score."""
    scope = Index([ISSUE, LIST])
    score = search(scope, query="issue").hits[0].score

    all_tools = search(INDEX, query="issue")

    assert search(Index([LIST, ISSUE]), query="issue").hits[0].score == score
    assert score not in [hit.score for hit in all_tools.hits]
    assert search(scope, query="weather").total == 0
    assert suggest_names(scope, "weather__get_forecst") == []


def test_an_empty_index_has_no_results():
    empty = Index([])

    assert search(empty, query="get").total == 0
    assert search(empty, pattern=".*").total == 0
    assert suggest_names(empty, "get") == []


def test_a_tool_without_terms_is_searchable_by_pattern():
    index = Index([Searchable("_", "🔥", "", "", "\ud800\x00", "", ("",))])

    assert search(index, query="get").total == 0
    assert names_of(index, pattern="🔥") == ["_"]


# --- Validation ---------------------------------------------------------------------------------


def test_a_blank_query_is_rejected():
    for query in ("", " ", "\n\t"):
        assert rejection(query=query).status == 422
    assert rejection().message == "The query is empty."
    assert rejection(strategy="bm25", pattern="x").status == 422


def test_a_long_query_is_rejected_with_both_lengths():
    error = rejection(query="x" * 501)

    assert (error.status, error.code) == (422, "invalid")
    assert "501" in error.message
    assert "500" in error.message
    assert search(INDEX, query="x" * 500).total == 0


def test_an_unknown_strategy_is_rejected_with_the_list_of_strategies():
    error = rejection(query="x", strategy="magic\ud800")

    assert error.status == 422
    assert "magic" in error.message
    assert all(name in error.hint for name in ("hybrid", "bm25", "embedding", "regex"))


# Hostile input 32: query syntax of full-text engines
@pytest.mark.parametrize(
    "query",
    [
        *["%", "_", "'", '"', "*", "NEAR(", "AND", "hello-world", "a:b", "OR NOT", "a & !b | (c"],
        *["🔥", "\x00", "\ud800", "\ud83d\ude00", "x\x00y", "' OR 1=1 --", "{}", "\u202eabc", "İ"],
    ],
)
def test_query_syntax_has_no_special_meaning(query):
    result = search(INDEX, query=query)

    assert result.total == len(result.hits)
    assert suggest_names(INDEX, query) == suggest_names(INDEX, query)
    assert all(
        set(tokenize_query(query)) & all_terms(one)
        for one in TOOLS
        if one.name in [hit.name for hit in result.hits]
    )


@given(st.text(st.characters(), max_size=520))
def test_any_text_is_searched_or_rejected_as_invalid(text):
    for parameters in ({"query": text}, {"pattern": text}, {"query": text, "strategy": "regex"}):
        with suppress(Invalid):
            assert search(INDEX, **parameters).total <= len(INDEX)
    suggest_names(INDEX, text)


@given(st.text(st.characters(), max_size=30), st.text(st.characters(), max_size=200))
def test_tools_may_contain_any_text(name, description):
    index = Index([tool(name, description, groups=(description,))])

    assert search(index, query="zebra1234").total in (0, 1)
    assert search(index, pattern="^").total == 1


# --- Patterns -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("github__", [ISSUE, COMMENT, LIST]),
        ("^create_", [ISSUE, COMMENT]),
        ("^github__.*issues$", [LIST]),
        ("HARBOUR", [TIDES]),
        ("forecast|tides", [WEATHER, TIDES]),
        ("(?-i:Create)", [ISSUE]),
        ("zebra", []),
    ],
)
def test_a_pattern_matches_names_and_descriptions_case_insensitively(pattern, expected):
    result = search(INDEX, pattern=pattern)

    assert result.strategy == "regex"
    assert [hit.name for hit in result.hits] == [one.name for one in expected]
    assert result.total == len(expected)
    assert all(hit.score is None for hit in result.hits)


def test_a_pattern_that_equals_a_name_ranks_that_tool_first():
    index = Index([tool("a__b", "see z__note"), tool("z__note"), tool("b__note_all")])

    for pattern in ("note", "z__note", "^note$", "Z__NOTE"):
        assert names_of(index, pattern=pattern)[0] == "z__note"
    assert names_of(index, pattern="note") == ["z__note", "a__b", "b__note_all"]


def test_regex_uses_the_query_as_its_pattern():
    assert names_of(query="^create_", strategy="regex") == [ISSUE.name, COMMENT.name]
    assert names_of(query="zebra", pattern="tides", strategy="regex") == [TIDES.name]
    assert names_of(query="zebra", pattern="tides") == [TIDES.name]
    assert rejection(strategy="regex").status == 422


def test_reasons_of_a_pattern_are_the_matching_fields():
    assert search(INDEX, pattern="tides").hits[0].reasons == ("name", "description")
    assert search(INDEX, pattern="harbour").hits[0].reasons == ("description",)
    assert search(INDEX, pattern="^get_tides").hits[0].reasons == ("name",)


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("(?=x)", "Look-ahead"),
        ("(?!x)", "Look-ahead"),
        ("(?<=x)y", "Look-behind"),
        ("(?<!x)y", "Look-behind"),
        (r"(a)\1", "Back-references"),
        (r"(?P<n>a)(?P=n)", "Back-references"),
        (r"\k<n>", "Back-references"),
        ("(?>a)", "(?>"),
        (r"a\Z", r"\Z"),
        ("x{1000}{1000}", "{1000}{1000}"),
        ("x{1001}", "{1001}"),
        ("(x{100}){100}", "too large"),
        (r"\w{1000}", "repeats too much"),
        (r"(\pL{1,50}\s?){1,19}!", "repeats too much"),
        ("a++", "++"),
        ("(a", "missing )"),
        ("[a", "missing ]"),
        ("*", "*"),
        ("\\", "trailing"),
        ("\ud800", "Unicode"),
        ("a" * 201, "201 characters; at most 200"),
        ("(a+)+$" * 1_700, "10200 characters"),
    ],
)
def test_an_unsupported_pattern_is_rejected_with_the_reason(pattern, named):
    """Hostile input 31: patterns rejected before the search."""
    error = rejection(pattern=pattern)

    assert (error.status, error.code) == (400, "invalid_pattern")
    assert named in error.message
    assert "RE2" in error.hint


def test_a_pattern_of_200_characters_is_accepted():
    assert search(INDEX, pattern="a" * 200).total == 0


@pytest.fixture(scope="module")
def large():
    """A catalog of worst-case descriptions: long texts that almost match, or never repeat."""
    bait = [
        lambda at: "a" * 2_000 + "!",
        lambda at: "ab" * 1_000 + "!",
        lambda at: shake_256(bytes([at % 256, at // 256])).hexdigest(1_000).translate(TO_AB) + "a",
        lambda at: "create an issue in the repository and label it " * 42,
    ]
    return Index([tool(f"s__t{at:05}", bait[at % 4](at)) for at in range(4_000)])


@pytest.mark.parametrize(
    ("pattern", "total"),
    [
        ("(a+)+$", 1_000),
        ("(a|aa)+$", 1_000),
        ("(.*a){20}$", 1_000),
        ("(a|a?)+$", 4_000),
        ("([a-z]+)*[0-9]", 4_000),
        (r"^(\w+\s?)*$", 4_000),
        ("(x+x+)+y", 0),
        (r"^(?:[\s\S]*)*\x00", 0),
        (".*.*.*.*.*=", 0),
        ("(?:a?){30}a{30}z", 0),
        ("(((a*)*)*)*z", 0),
        (r"(\w+)+@", 0),
    ],
)
def test_patterns_with_catastrophic_backtracking_finish(large, pattern, total, monkeypatch):
    """Hostile input 31. The test timeout stops an engine that backtracks."""
    monkeypatch.setattr(regex, "SECONDS_PER_SEARCH", 3_600)  # also on a slow machine
    assert search(large, pattern=pattern).total == total


@pytest.mark.parametrize("pattern", ["[ab]*a[ab]{200}z", "(.*a.{40}){3}zq", "(?:[ab]{1,15}a){25}z"])
def test_a_pattern_that_is_slow_without_backtracking_is_rejected(large, pattern, monkeypatch):
    monkeypatch.setattr(regex, "SECONDS_PER_SEARCH", 0.05)  # also on a fast machine
    monkeypatch.setattr(regex, "SECONDS_PER_TOOL", 0)
    with pytest.raises(Invalid) as raised:
        search(large, pattern=pattern)

    assert (raised.value.status, raised.value.code) == (400, "invalid_pattern")
    assert "too long to match" in raised.value.message


def test_only_the_start_of_a_long_description_is_searched():
    index = Index([tool("s__t", "x" * 100_000 + "needle")])

    assert search(index, pattern="needle").total == 0
    assert search(index, query="needle").total == 0


def test_patterns_are_never_compiled_with_re():
    """`re` supports look-ahead: with it, this would match."""
    assert re.search("(?=tides)", TIDES.description)
    assert rejection(pattern="(?=tides)").code == "invalid_pattern"


# --- Similar names ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("github__create_isue", ISSUE),
        ("create_issue", ISSUE),
        ("githb__list_issues", LIST),
        ("Weather_Get_Forecast", WEATHER),
        ("notes", NOTE),
    ],
)
def test_a_misspelled_name_suggests_the_correct_one(text, first):
    assert suggest_names(INDEX, text)[0] == first.name


def test_dissimilar_text_suggests_nothing():
    for text in ("", "zebra", "%", "x" * 10_000, "\ud800"):
        assert suggest_names(INDEX, text) == []


def test_suggestions_respect_the_limit():
    assert len(suggest_names(INDEX, "github__create_issue", limit=2)) == 2
    assert suggest_names(INDEX, "github__create_issue", limit=0) == []


def test_an_index_is_thread_safe():
    index = Index(TOOLS)

    def ask(_):
        return (
            names_of(index, query="issue"),
            names_of(index, pattern="s$"),
            suggest_names(index, "notes"),
        )

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(ask, range(200)))
    finally:
        sys.setswitchinterval(before)

    assert all(result == ask(0) for result in results)
