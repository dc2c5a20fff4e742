"""Tokenizer: identifiers, stemming, Unicode forms and stop words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.search.tokenizer import MAX_TEXT_LENGTH, normalize_name, tokenize, tokenize_query


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("create_issue", ["creat", "issu", "createissu"]),
        ("create-issue", ["creat", "issu", "createissu"]),
        ("createIssue", ["creat", "issu", "createissu"]),
        ("files.read", ["file", "read", "filesread"]),
        ("github__get_me", ["github", "get", "me", "githubgetm"]),
        ("HTTPServer", ["http", "server", "httpserver"]),
        ("oauth2", ["oauth", "2", "oauth2"]),
        ("S3", ["s", "3", "s3"]),
        ("read", ["read"]),
    ],
)
def test_an_identifier_yields_its_parts_and_its_joined_form(text, expected):
    assert tokenize(text) == expected


@pytest.mark.parametrize(
    ("one", "many"),
    [
        ("issue", "issues"),
        ("repository", "repositories"),
        ("branch", "branches"),
        ("address", "addresses"),
        ("box", "boxes"),
        ("file", "files"),
    ],
)
def test_a_plural_matches_its_singular(one, many):
    assert tokenize(one) == tokenize(many)


@pytest.mark.parametrize("word", ["status", "address", "get", "us", "css", "is"])
def test_a_word_that_only_looks_like_a_plural_is_unchanged(word):
    assert tokenize(word) == [word]


@pytest.mark.parametrize(
    "forms", ["create creates creating created", "search searching searched", "install installed"]
)
def test_inflected_forms_share_a_stem(forms):
    assert len(set(tokenize(forms))) == 1


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("Café", "cafe"),
        ("ＷＥＡＴＨＥＲ", "weather"),
        ("ﬁle", "file"),
        ("Straße", "STRASSE"),
        ("Ελλάδα", "ελλαδα"),
        ("cafe\u0301", "café"),
    ],
)
def test_unicode_forms_of_the_same_letters_match(left, right):
    assert tokenize(left) == tokenize(right)


def test_scripts_without_spaces_are_split_into_bigrams():
    assert tokenize("天気予報") == ["天気", "気予", "予報"]
    assert tokenize("天気") == ["天気"]
    assert tokenize("get天気予報2") == ["get", "天気", "気予", "予報", "2"]


def test_combining_vowel_signs_stay_in_their_word():
    assert tokenize("मौसम की जानकारी") == ["मौसम", "की", "जानकारी"]


@pytest.mark.parametrize("text", ["", " ", "%", "_", "'", "🔥🔥", "\x00", "\ud800", "…—!"])
def test_a_text_without_letters_has_no_terms(text):
    assert tokenize(text) == []


def test_a_query_drops_stop_words_and_repeats_and_keeps_the_spelling():
    assert tokenize_query("Does this list the Issues, and issues?") == {
        "list": "list",
        "issu": "Issues",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("what's the user's e-mail", ["what", "the", "user", "e", "mail", "email"]),
        ("I don\u2019t, can't, they\u2019re", ["i", "do", "can", "they"]),
        ("ANN'S", ["ann"]),
        ("l'eau 'name' rock'n'roll 5's", ["l", "eau", "name", "rock", "n", "roll", "5", "s"]),
    ],
)
def test_the_letters_after_an_apostrophe_are_no_words(text, expected):
    assert tokenize(text) == expected


def test_a_query_of_stop_words_alone_keeps_them():
    assert list(tokenize_query("who is it")) == ["who", "is", "it"]


@pytest.mark.parametrize("word", ["get", "all", "not", "new", "up", "out", "off", "no", "find"])
def test_words_that_occur_in_tool_names_are_not_stop_words(word):
    assert word in tokenize_query(f"the {word} of it")


def test_a_normalized_name_does_not_depend_on_separators_or_case():
    assert (
        normalize_name("Create issue")
        == normalize_name("create_issue")
        == normalize_name("createIssue")
    )
    assert normalize_name("__ %") == ""


def test_only_the_start_of_a_long_text_is_read():
    text = "word " * MAX_TEXT_LENGTH + "never"

    assert "never" not in tokenize(text)
    assert len(tokenize("ﷺ" * MAX_TEXT_LENGTH)) <= MAX_TEXT_LENGTH


@given(st.text(st.characters(), max_size=200))
def test_any_text_yields_casefolded_non_empty_terms(text):
    for word in tokenize(text):
        assert word == word.casefold()
        assert word.strip()
