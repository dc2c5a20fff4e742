import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import shake_256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.search.engine import search, suggest_names
from catalog.search.index import Index, Searchable
from catalog.search.tokenizer import tokenize_query, words
from toolcrib.lib.errors import Invalid


def tool(name, description="", *, server=None, **given):
    slug, found, own = name.partition("__")
    if not found:
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


def found(index=INDEX, **asked):
    return [hit.name for hit in search(index, **asked).hits]


def refusal(**asked):
    with pytest.raises(Invalid) as raised:
        search(INDEX, **asked)
    return raised.value


def all_words(one):
    fields = (one.original_name, one.server, one.title, one.description, one.parameters)
    return {word for text in (*fields, *one.groups, *one.hints) for word in words(text)}


# Words


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
def test_every_text_of_a_tool_is_searched(query, first):
    assert found(query=query)[0] == first.name


def test_an_exact_name_comes_first_then_names_that_start_with_it_then_the_rest():
    praised = tool("praise__it", "create issue create issue create issue create_issue")
    index = Index([*TOOLS, praised])

    for query in ("create_issue", "github__create_issue", "CREATE_ISSUE", "create issue"):
        assert found(index, query=query)[:2] == [ISSUE.name, COMMENT.name], query
    assert praised.name in found(index, query="create_issue")


def test_the_name_as_written_beats_the_same_name_written_otherwise():
    index = Index([tool("a__create_issue"), tool("a__createIssue"), tool("a__create.issue")])

    assert found(index, query="createIssue")[0] == "a__createIssue"
    assert found(index, query="create.issue")[0] == "a__create.issue"


def test_a_rare_word_counts_for_more_than_a_common_one():
    index = Index([tool("a__one", "open file"), tool("b__two", "open"), tool("z__three", "rare")])

    hits = search(index, query="open something rare").hits

    assert hits[0].name == "z__three"
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_equal_scores_stand_by_name():
    index = Index([tool(f"{slug}__get", "the same") for slug in "cab"])

    assert found(index, query="same") == ["a__get", "b__get", "c__get"]


def test_no_match_is_empty_and_not_arbitrary():
    answer = search(INDEX, query="zebra")

    assert (answer.total, answer.hits) == (0, ())


def test_the_total_is_true_whatever_the_limit_which_is_clamped():
    index = Index([tool(f"s__get_{number}") for number in range(60)])

    for limit, count in [(3, 3), (0, 1), (-1, 1), (51, 50), (10**9, 50)]:
        answer = search(index, query="get", limit=limit)
        assert (answer.total, len(answer.hits)) == (60, count)
        answer = search(index, pattern="get", limit=limit)
        assert (answer.total, len(answer.hits)) == (60, count)


def test_reasons_name_the_words_as_the_query_spells_them():
    (hit,) = search(INDEX, query="Harbour, zebra").hits
    assert hit.reasons == ("“Harbour”",)

    hit = search(INDEX, query="create_issue").hits[0]
    assert hit.reasons == ("name", "“create_issue”")


@pytest.mark.parametrize("strategy", ["", "bm25", "hybrid", "embedding"])
def test_without_vectors_bm25_answers_and_the_answer_says_why(strategy):
    answer = search(INDEX, query="tides", strategy=strategy)

    assert answer.strategy == "bm25"
    assert [hit.name for hit in answer.hits] == [TIDES.name]
    assert ("words only" in answer.note) == (strategy != "bm25")
    assert answer.hits[0].bm25 == 1
    assert answer.hits[0].embedding is None


@given(tools, st.lists(few, min_size=1, max_size=3).map(" ".join), st.randoms())
def test_the_order_tools_came_in_changes_nothing(given, query, random):
    shuffled = list(given)
    random.shuffle(shuffled)

    one, other = Index(given), Index(shuffled)

    assert search(one, query=query) == search(other, query=query)
    assert search(one, pattern=query) == search(other, pattern=query)
    assert suggest_names(one, query) == suggest_names(other, query)


@given(tools, st.lists(few, min_size=1, max_size=3).map(" ".join))
def test_hits_are_the_tools_that_share_a_word_and_score_above_zero(given, query):
    asked = set(tokenize_query(query))
    matching = {one.name for one in given if asked & all_words(one)}

    answer = search(Index(given), query=query)

    assert {hit.name for hit in answer.hits} == matching
    assert answer.total == len(matching)
    assert all(hit.score > 0 for hit in answer.hits)


@given(tools, st.sampled_from(["a", "b", "zebra"]), few)
def test_a_server_is_chosen_before_counting(given, server, query):
    theirs = {one.name for one in given if one.server == server}
    for asked in ({"query": query}, {"pattern": query}):
        everything = search(Index(given), **asked)
        answer = search(Index(given), server=server, **asked)

        kept = [hit.name for hit in everything.hits if hit.name in theirs]
        assert [hit.name for hit in answer.hits] == kept
        assert answer.total == len(kept)


def test_a_word_that_every_tool_holds_still_scores_above_zero():
    index = Index([tool(f"s__{number}", "alike") for number in range(3_000)])

    assert all(hit.score > 0 for hit in search(index, query="alike").hits)


def test_a_small_index_scores_as_if_nothing_else_existed():
    """Access control comes before ranking: what a scope may not see moves no score of it."""
    scope = Index([ISSUE, LIST])
    score = search(scope, query="issue").hits[0].score

    everyone = search(INDEX, query="issue")

    assert search(Index([LIST, ISSUE]), query="issue").hits[0].score == score
    assert score not in [hit.score for hit in everyone.hits]
    assert search(scope, query="weather").total == 0
    assert suggest_names(scope, "weather__get_forecst") == []


def test_an_empty_index_answers_everything_with_nothing():
    empty = Index([])

    assert search(empty, query="get").total == 0
    assert search(empty, pattern=".*").total == 0
    assert suggest_names(empty, "get") == []


def test_a_tool_without_any_word_does_no_harm():
    index = Index([Searchable("_", "🔥", "", "", "\ud800\x00", "", ("",))])

    assert search(index, query="get").total == 0
    assert found(index, pattern="🔥") == ["_"]


# What is refused


def test_a_blank_query_is_refused():
    for query in ("", " ", "\n\t"):
        assert refusal(query=query).status == 422
    assert "nothing to search for" in refusal().message
    assert refusal(strategy="bm25", pattern="x").status == 422


def test_a_long_query_is_refused_with_the_numbers():
    error = refusal(query="x" * 501)

    assert (error.status, error.code) == (422, "invalid")
    assert "501" in error.message
    assert "500" in error.message
    assert search(INDEX, query="x" * 500).total == 0


def test_an_unknown_strategy_is_refused_with_those_there_are():
    error = refusal(query="x", strategy="magic\ud800")

    assert error.status == 422
    assert "magic" in error.message
    assert all(name in error.hint for name in ("hybrid", "bm25", "embedding", "regex"))


# Hostile input 32: the syntax of full-text engines
@pytest.mark.parametrize(
    "query",
    [
        *["%", "_", "'", '"', "*", "NEAR(", "AND", "hello-world", "a:b", "OR NOT", "a & !b | (c"],
        *["🔥", "\x00", "\ud800", "\ud83d\ude00", "x\x00y", "' OR 1=1 --", "{}", "\u202eabc", "İ"],
    ],
)
def test_any_text_is_text(query):
    answer = search(INDEX, query=query)

    assert answer.total == len(answer.hits)
    assert suggest_names(INDEX, query) == suggest_names(INDEX, query)
    assert all(
        set(tokenize_query(query)) & all_words(one)
        for one in TOOLS
        if one.name in [hit.name for hit in answer.hits]
    )


@given(st.text(st.characters(), max_size=520))
def test_no_text_raises_anything_but_a_refusal(text):
    for asked in ({"query": text}, {"pattern": text}, {"query": text, "strategy": "regex"}):
        with suppress(Invalid):
            assert search(INDEX, **asked).total <= len(INDEX)
    suggest_names(INDEX, text)


@given(st.text(st.characters(), max_size=30), st.text(st.characters(), max_size=200))
def test_tools_may_hold_any_text(name, description):
    index = Index([tool(name, description, groups=(description,))])

    assert search(index, query="zebra1234").total in (0, 1)
    assert search(index, pattern="^").total == 1


# Patterns


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
def test_a_pattern_is_searched_for_in_names_and_descriptions_whatever_the_case(pattern, expected):
    answer = search(INDEX, pattern=pattern)

    assert answer.strategy == "regex"
    assert [hit.name for hit in answer.hits] == [one.name for one in expected]
    assert answer.total == len(expected)
    assert all(hit.score is None for hit in answer.hits)


def test_a_pattern_that_is_a_name_finds_that_tool_first():
    index = Index([tool("a__b", "see z__note"), tool("z__note"), tool("b__note_all")])

    for pattern in ("note", "z__note", "^note$", "Z__NOTE"):
        assert found(index, pattern=pattern)[0] == "z__note"
    assert found(index, pattern="note") == ["z__note", "a__b", "b__note_all"]


def test_a_query_given_to_regex_is_its_pattern():
    assert found(query="^create_", strategy="regex") == [ISSUE.name, COMMENT.name]
    assert found(query="zebra", pattern="tides", strategy="regex") == [TIDES.name]
    assert found(query="zebra", pattern="tides") == [TIDES.name]
    assert refusal(strategy="regex").status == 422


def test_reasons_of_a_pattern_are_the_fields_it_matched():
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
def test_a_pattern_that_cannot_be_taken_is_refused_with_the_reason(pattern, named):
    """Hostile input 31, the part that is refused before anything is searched."""
    error = refusal(pattern=pattern)

    assert (error.status, error.code) == (400, "invalid_pattern")
    assert named in error.message
    assert "RE2" in error.hint


def test_a_pattern_of_200_characters_is_taken():
    assert search(INDEX, pattern="a" * 200).total == 0


@pytest.fixture(scope="module")
def large():
    """A catalog whose descriptions are bait: long texts that almost match, or never repeat."""
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
def test_a_pattern_that_would_never_end_by_backtracking_is_answered(large, pattern, total):
    """Hostile input 31. No clock: the time limit of the tests ends an engine that backtracks."""
    assert search(large, pattern=pattern).total == total


@pytest.mark.parametrize("pattern", ["[ab]*a[ab]{200}z", "(.*a.{40}){3}zq", "(?:[ab]{1,15}a){25}z"])
def test_a_pattern_that_is_slow_even_without_backtracking_is_given_up(large, pattern):
    with pytest.raises(Invalid) as raised:
        search(large, pattern=pattern)

    assert (raised.value.status, raised.value.code) == (400, "invalid_pattern")
    assert "too long to match" in raised.value.message


def test_only_the_start_of_an_endless_description_is_searched():
    index = Index([tool("s__t", "x" * 100_000 + "needle")])

    assert search(index, pattern="needle").total == 0
    assert search(index, query="needle").total == 0


def test_regular_expressions_of_python_never_see_a_pattern():
    """`re` knows look-ahead: if it were asked, this would match."""
    assert re.search("(?=tides)", TIDES.description)
    assert refusal(pattern="(?=tides)").code == "invalid_pattern"


# Names that are nearly right


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
def test_a_name_that_is_nearly_right_suggests_the_right_one(text, first):
    assert suggest_names(INDEX, text)[0] == first.name


def test_nothing_near_suggests_nothing():
    for text in ("", "zebra", "%", "x" * 10_000, "\ud800"):
        assert suggest_names(INDEX, text) == []


def test_suggestions_keep_to_their_limit():
    assert len(suggest_names(INDEX, "github__create_issue", limit=2)) == 2
    assert suggest_names(INDEX, "github__create_issue", limit=0) == []


def test_an_index_is_shared_between_threads():
    index = Index(TOOLS)

    def ask(_):
        return (
            found(index, query="issue"),
            found(index, pattern="s$"),
            suggest_names(index, "notes"),
        )

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(200)))
    finally:
        sys.setswitchinterval(before)

    assert all(answer == ask(0) for answer in answers)
