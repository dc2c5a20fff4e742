"""Redaction of a server's credentials in its output, in every encoding."""

import base64
import json
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.credential_filter import CredentialFilter
from servers.secret import Secret

TOKEN = 's3cr3t/t0k+n=äö"7'


def filter_of(*values, **headers):
    secrets = {name.replace("_", "-"): Secret(text) for name, text in headers.items()}
    return CredentialFilter.from_credentials(secrets, [Secret(text) for text in values])


@pytest.mark.parametrize(
    "encoded",
    [
        TOKEN,
        json.dumps(TOKEN),
        json.dumps(TOKEN, ensure_ascii=False),
        quote(TOKEN),
        quote(TOKEN, safe=""),
        quote(TOKEN, safe="").lower(),
        quote_plus(TOKEN),
        base64.b64encode(TOKEN.encode()).decode(),
        base64.urlsafe_b64encode(TOKEN.encode()).decode().rstrip("="),
    ],
)
def test_every_encoding_of_a_credential_is_replaced(encoded):
    redacted = filter_of(TOKEN).redact({"a": [f"<{encoded}>"], encoded: 1})
    assert redacted["a"][0].startswith("<")
    assert "***" in redacted["a"][0]
    for text in (redacted["a"][0], *redacted):
        assert "s3cr3t" not in text
        assert "t0k" not in text
        assert encoded.strip('"') not in text


@given(st.binary(max_size=7), st.binary(max_size=7))
def test_a_credential_inside_encoded_text_is_replaced_at_every_offset(before, after):
    text = base64.b64encode(before + b"api-token-1234567" + after).decode()
    redacted = filter_of("api-token-1234567").redact_text(text)
    assert "***" in redacted
    assert len(redacted) < 4 + (len(before) + len(after) + 6) * 4 / 3 + 6


@pytest.mark.parametrize(
    ("headers", "sent_back"),
    [
        ({"authorization": "Bearer abcdefgh"}, "abcdefgh"),
        (
            {"authorization": "Basic " + base64.b64encode(b"ada:open sesame").decode()},
            "open sesame",
        ),
        ({"cookie": "theme=dark; sid=abcdefgh"}, "abcdefgh"),
        ({"x_pin": "4711"}, "4711"),
    ],
)
def test_the_credential_in_a_header_is_replaced_without_its_scheme(headers, sent_back):
    assert filter_of(**headers).redact({"text": f"it was {sent_back}."}) == {"text": "it was ***."}


def test_short_values_outside_headers_and_unrelated_values_are_unchanged():
    values = {"level": "debug", "n": 12345678, "flag": True, "none": None, "x": 1.5}
    assert filter_of("debug", "True", "1.5").redact(values) == values


def test_a_number_that_is_a_credential_is_replaced():
    assert filter_of("12345678").redact([12345678, 1234]) == ["***", 1234]


def test_the_data_of_images_audio_and_resources_is_unchanged():
    data = base64.b64encode(b"abcdefghijkl").decode()
    items = [
        {"type": "image", "data": data},
        {"type": "audio", "data": data},
        {"type": "resource", "resource": {"uri": "x://y", "blob": data}},
    ]
    assert filter_of("abcdefghijkl").redact(items) == items
    assert filter_of("abcdefghijkl").redact({"type": "text", "data": data})["data"] == "***"


@given(
    st.recursive(
        st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_the_fast_check_finds_everything_that_would_be_replaced(value):
    credentials = filter_of("0000000000", 'a"b\\c\nd¡', x="abcd")
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if credentials.redact(value) != value:
        assert credentials.occurs_in(text)
    planted = [value, {"k": 'xa"b\\c\nd¡y'}]
    assert credentials.occurs_in(json.dumps(planted, ensure_ascii=False))
