import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.search.tokenizer import LONGEST_TEXT, joined, tokenize_query, words


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
def test_an_identifier_gives_its_parts_and_itself(text, expected):
    assert words(text) == expected


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
def test_a_plural_meets_its_singular(one, many):
    assert words(one) == words(many)


@pytest.mark.parametrize("word", ["status", "address", "get", "us", "css", "is"])
def test_a_word_that_only_looks_like_a_plural_stays(word):
    assert words(word) == [word]


@pytest.mark.parametrize(
    "forms", ["create creates creating created", "search searching searched", "install installed"]
)
def test_forms_of_a_word_meet(forms):
    assert len(set(words(forms))) == 1


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
def test_forms_of_the_same_letters_meet(left, right):
    assert words(left) == words(right)


def test_scripts_without_spaces_are_words_of_two():
    assert words("天気予報") == ["天気", "気予", "予報"]
    assert words("天気") == ["天気"]
    assert words("get天気予報2") == ["get", "天気", "気予", "予報", "2"]


def test_vowel_signs_stay_in_their_word():
    assert words("मौसम की जानकारी") == ["मौसम", "की", "जानकारी"]


@pytest.mark.parametrize("text", ["", " ", "%", "_", "'", "🔥🔥", "\x00", "\ud800", "…—!"])
def test_a_text_without_letters_has_no_words(text):
    assert words(text) == []


def test_a_query_leaves_out_fillers_and_repeats_and_keeps_the_spelling():
    assert tokenize_query("Does this list the Issues, and issues?") == {
        "list": "list",
        "issu": "Issues",
    }


def test_a_query_of_fillers_alone_is_still_a_query():
    assert list(tokenize_query("who is it")) == ["who", "is", "it"]


@pytest.mark.parametrize("word", ["get", "all", "not", "new", "up", "out", "off", "no", "find"])
def test_words_that_tools_are_named_by_are_never_fillers(word):
    assert word in tokenize_query(f"the {word} of it")


def test_a_name_is_the_same_however_its_parts_are_joined():
    assert joined("Create issue") == joined("create_issue") == joined("createIssue")
    assert joined("__ %") == ""


def test_only_the_start_of_an_endless_text_is_read():
    text = "word " * LONGEST_TEXT + "never"

    assert "never" not in words(text)
    assert len(words("ﷺ" * LONGEST_TEXT)) <= LONGEST_TEXT


@given(st.text(st.characters(), max_size=200))
def test_any_text_gives_words_that_give_themselves(text):
    for word in words(text):
        assert word == word.casefold()
        assert word.strip()
