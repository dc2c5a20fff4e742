"""Lint rules: true positives, and no warning where a rule could be wrong."""

import ast

import pytest

from catalog.groups import lints
from tests.support.installation import ROOT

GOOD = {
    "group_id": "research",
    "description": "Find things out.",
    "preloads": {"weather": 2},
    "names": {"weather": ["get_it", "go"]},
}


def codes(original_name, description, name="weather__x"):
    return [lint.code for lint in lints.lint_tool(name, original_name, description)]


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
def test_a_good_description_has_no_warnings(original_name, description):
    assert codes(original_name, description) == []


def test_the_demo_servers_tools_have_one_correct_warning():
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
def test_a_missing_description_is_the_only_warning(text):
    [lint] = lints.lint_tool("weather__x", "get_x", text)

    assert (lint.code, lint.subject) == ("description_missing", "weather__x")
    assert "Add a description" in lint.sentence


@pytest.mark.parametrize("text", ["Search", "Switches branches", "# Title"])
def test_one_or_two_words_are_too_short(text):
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
def test_a_description_without_a_leading_verb_is_reported_with_its_first_word(
    original_name, text, word
):
    [lint] = lints.lint_tool("weather__x", original_name, text)

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
def test_a_description_that_repeats_the_name_needs_search_terms(original_name, text):
    assert codes(original_name, text) == ["synonyms"]


def test_names_are_split_into_words():
    assert lints.name_words("getHTTPUser_by-id.v2") == ["get", "http", "user", "by", "id", "v2"]


# --- Groups and servers -------------------------------------------------------------------------


def lint_changed(**changes):
    return lints.lint_group(**GOOD | changes)


def test_a_good_group_has_no_warnings():
    assert lint_changed() == []


def test_a_group_without_a_description_is_reported():
    [lint] = lint_changed(description=" ")

    assert (lint.code, lint.subject) == ("group_description", "research")
    assert "Describe its purpose in one line" in lint.sentence


def test_a_group_with_more_than_ten_tools_is_reported():
    assert lint_changed(names={"weather": ["go"] * 10}) == []
    [lint] = lint_changed(names={"weather": ["go"] * 11})

    assert lint.code == "group_size"
    assert "11 tools" in lint.sentence
    assert "split the group by task" in lint.sentence


def test_more_than_five_preloads_of_one_server_are_reported():
    assert lint_changed(preloads={"weather": 5, "git": 5}) == []
    [lint] = lint_changed(preloads={"weather": 6, "git": 5})

    assert lint.code == "preloads"
    assert "6 tools of weather" in lint.sentence
    assert "set the others to on demand" in lint.sentence


def test_mixed_naming_conventions_are_reported_with_examples():
    [lint] = lint_changed(
        names={"weather": ["get_it", "get_that", "getThis", "go", "read-it"], "b": ["x"]}
    )

    assert (lint.code, lint.subject) == ("names_mixed", "weather")
    assert "most names use snake_case, 2 do not (getThis, read-it)" in lint.sentence
    assert "use one convention" in lint.sentence


def test_servers_may_use_different_conventions():
    assert (
        lint_changed(names={"a": ["get_it", "go"], "b": ["get-it"], "c": ["getIt"], "d": ["echo"]})
        == []
    )


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
def test_naming_conventions_are_recognized(name, kind):
    assert lints.naming_convention(name) == kind


def test_every_sentence_starts_with_a_letter_and_ends_with_a_full_stop():
    found = [
        *lint_changed(
            description="",
            preloads={"": 9},
            names={"": ["a_b", "aB"], "x": ["a-b", "a.b"], "y": ["go"] * 99},
        ),
        *lints.lint_tool("x", "x", ""),
        *lints.lint_tool("x", "x", "Word"),
        *lints.lint_tool("x", "get_x", "The get x thing."),
        *lints.lint_tool("x", "get_dates", "Get the dates."),
    ]

    assert len(found) == 9
    for lint in found:
        assert lint.sentence.endswith(".")
        assert lint.sentence[0].isalpha()
