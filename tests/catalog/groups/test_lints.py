"""Advice: right where it speaks, silent where it could be wrong."""

import ast

import pytest

from catalog.groups import lints
from catalog.groups.lints import GroupFacts
from tests.support.installation import ROOT

GOOD = GroupFacts("research", "Find things out.", 3, {"weather": 2}, {"weather": ["get_it", "go"]})


def codes(original_name, description, name="weather__x"):
    return [lint.code for lint in lints.of_tool(name, original_name, description)]


# --- Tools --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("original_name", "description"),
    [
        ("get_forecast", "Return the weather of the coming days for a city."),
        ("get-sum", "Returns the sum of two numbers"),
        ("search_files", "Recursively search for files and directories matching a pattern."),
        ("apply_template", "Apply a structured layout to a slide."),
        ("echo", "Echoes back the input string"),
        ("git_branch", "List Git branches"),
        ("enable_user", "Enable an account that was locked."),
        ("position_window", "Position a window on the screen."),
        ("fetch_book", "Bring a volume from the shelf."),
        ("bing_search", "使用必应搜索指定的关键词，并返回搜索结果列表"),
        ("buscar", "Ändert den Titel einer Seite"),
        ("filter_list", "Filter entries of a table by words."),
    ],
)
def test_a_good_description_gets_no_advice(original_name, description):
    assert codes(original_name, description) == []


def test_the_demo_servers_own_tools_get_one_hint_at_most_and_a_right_one():
    tree = ast.parse((ROOT / "servers" / "demo.py").read_text())
    tools = {
        node.name: ast.get_docstring(node)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }

    found = [(name, code) for name, text in tools.items() for code in codes(name, text or "", name)]

    assert len(tools) == 24
    assert found == [("add_numbers", "synonyms")]  # "Add up numbers.": neither sum nor total


@pytest.mark.parametrize("text", ["", "  \n", "—", "..."])
def test_no_description_is_said_and_nothing_else(text):
    [lint] = lints.of_tool("weather__x", "get_x", text)

    assert (lint.code, lint.subject) == ("description_missing", "weather__x")
    assert "Write one" in lint.sentence


@pytest.mark.parametrize("text", ["Search", "Switches branches", "# Title"])
def test_a_word_or_two_are_too_short(text):
    assert codes("get_x", text) == ["description_short"]


@pytest.mark.parametrize(
    ("original_name", "text", "word"),
    [
        ("x", "A tool that does everything.", "A"),
        ("x", "This tool provides comments on style.", "This"),
        ("x", "Tool for reading pages of a book.", "Tool"),
        ("x", "Information about the users of a town.", "Information"),
        ("x", "Searching pages of the wiki quickly.", "Searching"),
        ("get_forecast", "Forecast for a city and a day.", "Forecast"),
        ("getUserProfile", "User data by its number.", "User"),
        ("x", "2 things are done by it.", "2"),
        ("x", "Once a task is done, approve it.", "Once"),
    ],
)
def test_a_description_that_starts_with_no_verb_is_told_which_word_it_starts_with(
    original_name, text, word
):
    [lint] = lints.of_tool("weather__x", original_name, text)

    assert lint.code == "description_verb"
    assert repr(word) in lint.sentence
    assert "Start it with a verb" in lint.sentence


@pytest.mark.parametrize(
    ("original_name", "text"),
    [
        ("get_earning_dates", "Get earning dates."),
        ("get_github_trending_repositories", "Get trending repositories on github"),
        ("getStoryWithComments", "Get a story with its comments"),
        ("list-files", "List the file."),
        ("createIssue", "Creates an issue."),
    ],
)
def test_a_description_of_the_names_words_alone_wants_words_people_search_for(original_name, text):
    assert codes(original_name, text) == ["synonyms"]


def test_names_split_into_their_words():
    assert lints.name_words("getHTTPUser_by-id.v2") == ["get", "http", "user", "by", "id", "v2"]


# --- Groups and servers -------------------------------------------------------------------------


def of(**changes):
    return lints.of_group(GroupFacts(**{**vars(GOOD), **changes}))


def test_a_good_group_gets_no_advice():
    assert of() == []


def test_a_group_without_a_description_is_asked_for_one():
    [lint] = of(description=" ")

    assert (lint.code, lint.subject) == ("group_description", "research")
    assert "Say in one line" in lint.sentence


def test_a_group_past_ten_tools_is_asked_to_split():
    assert of(tools=10) == []
    [lint] = of(tools=11)

    assert lint.code == "group_size"
    assert "11 tools" in lint.sentence
    assert "split it by task" in lint.sentence


def test_more_than_five_preloads_of_one_server_are_too_many():
    assert of(preloads={"weather": 5, "git": 5}) == []
    [lint] = of(preloads={"weather": 6, "git": 5})

    assert lint.code == "preloads"
    assert "6 tools of weather" in lint.sentence
    assert "leave the others on demand" in lint.sentence


def test_one_server_with_names_in_several_conventions_is_named_with_the_odd_ones():
    [lint] = of(names={"weather": ["get_it", "get_that", "getThis", "go", "read-it"], "b": ["x"]})

    assert (lint.code, lint.subject) == ("names_mixed", "weather")
    assert "most names are in snake_case, and 2 are not (getThis, read-it)" in lint.sentence
    assert "ask for one convention" in lint.sentence


def test_servers_may_differ_from_each_other():
    assert of(names={"a": ["get_it", "go"], "b": ["get-it"], "c": ["getIt"], "d": ["echo"]}) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("get_it", "snake_case"),
        ("get-it", "kebab-case"),
        ("getIt", "camelCase"),
        ("GetIt", "PascalCase"),
        ("get.it", "dot.case"),
        ("echo", ""),
        ("v2", ""),
        ("Get_it-now", "no convention"),
    ],
)
def test_a_names_convention_is_seen(name, kind):
    assert lints.convention(name) == kind


def test_every_sentence_is_one_and_says_what_to_do():
    found = [
        *of(
            description="",
            tools=99,
            preloads={"": 9},
            names={"": ["a_b", "aB"], "x": ["a-b", "a.b"]},
        ),
        *lints.of_tool("x", "x", ""),
        *lints.of_tool("x", "x", "Word"),
        *lints.of_tool("x", "get_x", "The get x thing."),
        *lints.of_tool("x", "get_dates", "Get the dates."),
    ]

    assert len(found) == 9
    for lint in found:
        assert lint.sentence.endswith(".")
        assert lint.sentence[0].isalpha()
