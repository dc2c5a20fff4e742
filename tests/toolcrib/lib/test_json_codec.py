import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrib.lib.json_codec import (
    canonical,
    canonical_in_pieces,
    digest,
    join_members,
    parse_in_pieces,
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=20,
)


def reordered(value, backwards):
    """Return the same value with its keys in another order at every level."""
    if isinstance(value, dict):
        pairs = sorted(value.items(), reverse=backwards)
        return {key: reordered(inner, backwards) for key, inner in pairs}
    if isinstance(value, list):
        return [reordered(inner, backwards) for inner in value]
    return value


@given(values)
def test_equal_values_have_the_same_text_for_any_key_order(value):
    texts = {canonical(reordered(value, True)), canonical(reordered(value, False))}

    assert texts == {canonical(value)}
    assert json.loads(texts.pop()) == value


def test_the_text_has_sorted_keys_no_spaces_and_no_ascii_escapes():
    assert canonical({"b": [1, "é"], "a": None}) == '{"a":null,"b":[1,"é"]}'


def test_a_nul_is_escaped_so_that_postgresql_can_store_the_text():
    """Hostile input 6."""
    assert canonical("a\0b") == '"a\\u0000b"'


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinities_are_rejected(number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical({"maximum": number})


def test_a_lone_surrogate_has_no_digest():
    with pytest.raises(UnicodeEncodeError):
        digest(canonical("\ud800"))


def test_different_texts_have_different_digests():
    assert digest("a") != digest("b")
    assert digest("a") == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), values, max_size=6))
def test_an_object_joined_from_its_members_is_the_same_text(value):
    assert join_members({name: canonical(inner) for name, inner in value.items()}) == canonical(
        value
    )


@given(values)
def test_the_text_is_the_same_in_pieces_and_parses_to_the_same_value(value):
    text = canonical(value)

    assert canonical_in_pieces(value) == text
    assert parse_in_pieces(text) == json.loads(text)
