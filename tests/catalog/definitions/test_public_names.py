"""Public names: valid, unique and stable."""

import re
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from catalog.definitions.public_names import META_TOOLS, public_name, public_names, skeleton

SAFE = re.compile(r"[a-zA-Z0-9_-]{1,64}")
slugs = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=128)
# Names that are likely to collide once unsafe characters are replaced.
close = st.text(st.sampled_from("ab._-é "), min_size=1, max_size=4)


@given(slugs, st.lists(texts | close, max_size=30))
def test_public_names_are_valid_for_every_provider_and_unique(slug, names):
    chosen = public_names(slug, names, ())

    assert set(chosen) == set(names)
    assert all(SAFE.fullmatch(public) for public in chosen.values())
    assert len(set(chosen.values())) == len(chosen)


@given(slugs, st.lists(texts | close, unique=True, max_size=30), st.randoms())
def test_public_names_do_not_depend_on_the_order_of_the_list(slug, names, random):
    shuffled = list(names)
    random.shuffle(shuffled)

    assert public_names(slug, shuffled, ()) == public_names(slug, names, ())


@given(slugs, st.lists(close, min_size=1, max_size=10), st.lists(close, max_size=10))
def test_a_taken_name_is_never_assigned_again(slug, old, new):
    taken = set(public_names(slug, old, ()).values())

    assert taken.isdisjoint(public_names(slug, new, taken).values())


def test_a_name_that_equals_the_hashed_name_of_another_is_hashed_too():
    """A server can compute the hash suffix and offer a tool with exactly that name."""
    guessed = public_names("s", ["x.y", "x_y"], ())["x.y"].removeprefix("s__")

    chosen = public_names("s", ["x.y", "x_y", guessed], ())

    assert len(set(chosen.values())) == 3
    assert chosen["x_y"] == "s__x_y"


def test_unsafe_characters_are_replaced_and_safe_names_are_unchanged():
    """Hostile input 7: `../../x`, `a b`, `__proto__`."""
    chosen = public_names("files", ["../../x", "a b", "__proto__", "read"], ())

    assert chosen == {
        "../../x": "files________x",
        "a b": "files__a_b",
        "__proto__": "files____proto__",
        "read": "files__read",
    }


def test_a_long_name_is_truncated_with_a_distinguishing_hash():
    """Hostile input 7."""
    one, other = (public_name("server", "x" * 127 + end) for end in "ab")

    assert len(one) == len(other) == 64
    assert one != other
    assert one.startswith("server__xxx")


def test_names_of_built_in_tools_are_never_assigned():
    """Hostile input 7."""
    assert META_TOOLS.isdisjoint(public_names("", META_TOOLS, ()).values())


def test_names_that_differ_by_case_are_two_tools():
    """Hostile input 3."""
    assert public_names("s", ["get", "GET"], ()) == {"get": "s__get", "GET": "s__GET"}


def test_lookalikes_share_a_skeleton_and_different_words_do_not():
    """Hostile input 4: Cyrillic, fullwidth, mixed script."""
    alike = ["paypal_send", "pаypal_send", "ｐａｙｐａｌ＿ｓｅｎｄ", "PayPal_Send", "рaypal_sеnd"]

    assert all(skeleton(one) == skeleton(other) for one, other in combinations(alike, 2))
    assert skeleton("paypal_send") != skeleton("paypal_spend")
