"""Secrets are recognized by name and by form; ordinary values are not changed."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.secrets import PLANTED
from toolcrib.lib.errors import Invalid
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.payloads import MAX_STORED_BYTES, stored_arguments, stored_copy
from toolcrib.lib.redaction.names import is_secret_name
from toolcrib.lib.redaction.redactor import (
    may_contain_secret,
    redact,
    redact_text,
    set_operator_patterns,
)

FILLING = {"city": "Oslo", "days": 3}
KINDS = [pytest.param(planted, id=planted.kind) for planted in PLANTED]


@pytest.fixture
def patterns():
    yield set_operator_patterns
    set_operator_patterns([])


@pytest.mark.parametrize("planted", KINDS)
def test_a_secret_is_masked_and_its_surroundings_stay(planted):
    copy = stored_arguments({**FILLING, **planted.value})

    assert planted.secret not in copy
    assert "***" in copy
    assert json.loads(copy)["city"] == "Oslo"


@pytest.mark.parametrize("planted", KINDS)
def test_a_secret_is_masked_in_values_of_any_size(planted):
    """Before and after the length that is stored, and in results that are stored in part."""
    for length in (100, MAX_STORED_BYTES - 100, MAX_STORED_BYTES, 70_000, 400_000):
        text = "word " * (length // 5)
        for value in (
            {"a": text, "z": planted.value},
            {"content": [{"type": "text", "text": text + json.dumps(planted.value)}]},
            {"content": [{"type": "text", "text": json.dumps(planted.value) + text}]},
        ):
            copy = stored_copy(value)
            assert planted.secret not in copy
            assert len(copy) < 3 * MAX_STORED_BYTES


@pytest.mark.parametrize("planted", KINDS)
def test_no_cut_leaves_the_start_of_a_secret(planted):
    carrier = json.dumps(planted.value)
    for before in range(0, len(carrier), 5):
        words = "word " * ((MAX_STORED_BYTES - 9 - before) // 5)
        copy = stored_copy({"text": f"{words}{carrier} {'x' * 9_000}"})
        assert planted.secret[:9] not in copy


def test_the_start_of_a_secret_at_the_end_of_a_long_text_is_left_out():
    copy = json.loads(stored_copy({"text": "ghp_" + "a" * 8_000 + " " + "ghp_" + "b" * 80_000}))

    assert "aaa" not in copy["start"]
    assert "bbb" not in copy["start"]


@pytest.mark.parametrize(
    "name",
    [
        *("Password", "userPassword", "PASSWORD_2", "db.password", "new-passwords", "Passphrase"),
        *("APIKey", "apikeys", "X-API-KEY", "x_api_key", "openaiApiKey", "privateKeys", "SSH_KEY"),
        *("clientSecret", "secrets", "refresh_token", "authTokens", "Set-Cookie", "credentials"),
        *("auth", "oauth", "user_pin", "pinCode", "otp_code", "cvv", "ssn", "session-id", "creds"),
        *("PassWord", "pass_word", "dbpwd", "connection_string", "ConnectionString", "dsn"),
        *("recovery_codes", "mfa_code", "verification-code", "seedPhrase", "Passwort"),
    ],
)
def test_names_of_secrets(name):
    assert is_secret_name(name)
    assert may_contain_secret(canonical({name: "x"}).encode())
    assert redact({name: "x", "at": 1}) == {name: "***", "at": 1}


@pytest.mark.parametrize(
    "value",
    [
        {"author": "Ada", "authority": "x", "passenger": "y", "spinner": "z", "secretary": "Bo"},
        {"key": "primary", "keys": ["a"], "tokenizer": "o200k", "compass": "north", "key_id": 7},
        {"max_tokens": 4096, "tokens": 12, "total_tokens": 1.5, "password": None, "token": ""},
        {"show_password": True, "requires_auth": False},
        {"text": "task-force-of-the-north-west-corner meets on 2026-11-18 at 12:00"},
        {"text": "Use basic authentication; the password is required.", "note": "a token of love"},
        {"text": "order 1234567890123, phone 555-12-34567, ticket 4111 1111 1111 1112"},
        {"at": 1763444096123, "digits": 4111111111111112, "url": "https://h:8080/path@2x.png"},
        {"sha": "5a105e8b9d40e1329780d62ea2265d8a", "text": "e-mail: ada@example.org: ok"},
        {"ssn_like": "000-12-3456 and 900-12-3456", "iban": ""},
    ],
)
def test_ordinary_values_are_not_changed(value):
    assert redact(value) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgres://app:p@ss:w@db:5432/x", "postgres://app:***@db:5432/x"),
        ("Server=db;Password=a,b;Database=x", "Server=db;Password=***;Database=x"),
        ('{"password":"a\\"b","user":"u"}', '{"password":"***","user":"u"}'),
        ('x {"secret": [1, {"a": 2}], "b": 3}', 'x {"secret": ***, "b": 3}'),
        ('{"token": null, "password": false}', '{"token": null, "password": false}'),
        ("password: ", "password: "),
        ("run --api-key abc --verbose", "run --api-key *** --verbose"),
        ('{\\"pwd\\":\\"a\\\\\\"b\\",\\"c\\":1}', '{\\"pwd\\":\\"***\\",\\"c\\":1}'),
        ('{"password":"never closed', '{"password":"***'),
        ("the passcode is 4711x", "the passcode is ***"),
        ("ключ password=секрет1 конец", "ключ password=*** конец"),
        ('{"db password 2": "x y", "b": 3}', '{"db password 2": "***", "b": 3}'),
        ("<a><password>x&amp;y</password></a>", "<a><password>***</password></a>"),
        ('<add key="Password" value="x"/><b/>', '<add key="Password" value="***"/><b/>'),
        ("https://0123456789abcdefghij@h/x", "https://***@h/x"),
    ],
)
def test_texts(text, expected):
    assert redact_text(text) == expected


def test_pairs_in_a_list_of_pairs_are_masked():
    headers = [["Accept", "text/html"], ["Authorization", "Digest abc"], ["X-Api-Key", "abc"]]
    masked = [["Accept", "text/html"], ["Authorization", "***"], ["X-Api-Key", "***"]]

    assert redact({"headers": headers}) == {"headers": masked}
    assert may_contain_secret(canonical(headers).encode())
    assert redact({"required": ["password", "name"]}) == {"required": ["password", "name"]}


def test_a_lone_surrogate_survives():
    assert redact_text("\ud800 password=x") == "\ud800 password=***"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=30)
    | st.sampled_from([planted.secret for planted in PLANTED])
    | st.sampled_from(["password=x y", "Bearer abcdefgh1", "--token", "a: b", "pin is 7"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=12) | st.sampled_from(["name", "value", "pin", "a pass"]),
                      inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(JSON)
@example({"name": "pin", "type": "x", "value": "1"})
def test_the_quick_search_finds_everything_that_redaction_changes(value):
    redacted = redact(value)

    assert redacted == value or may_contain_secret(canonical(value).encode())
    assert redact(redacted) == redacted


def test_patterns_of_operators_are_masked_too(patterns):
    patterns([r"\bACME-\d{4}\b", "(?i)project x"])

    assert json.loads(stored_copy({"text": "ACME-1234 for Project X", "ACME-9999": 1})) == {
        "text": "*** for ***",
        "***": 1,
    }
    assert stored_copy({"text": "ACME-12345"}) == '{"text":"ACME-12345"}'


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("(", "is not a valid regular expression"),
        (r"(a)\1", "is not a valid regular expression"),
        ("x*", "matches an empty text"),
        ("a" * 501, "longer than 500 characters"),
        ("(?:a{1000}){1000}", "is not a valid regular expression"),
        ("\ud800", "is not a valid regular expression"),
    ],
)
def test_a_bad_pattern_is_rejected_with_a_sentence(patterns, pattern, sentence):
    with pytest.raises(Invalid, match=sentence):
        patterns([pattern])


def test_the_number_of_patterns_is_limited(patterns):
    with pytest.raises(Invalid, match="the limit is 50"):
        patterns(["a"] * 51)
