"""How wide a schema is at its widest place, and what is too much to be held to one."""

import pytest

from catalog.definitions.schema_cost import MOST, max_comparisons_per_value
from catalog.definitions.validation import MOST_CHECKS, Validator

OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
ROW = {"type": "object", "properties": dict.fromkeys("abcdefghij", OPTIONAL)}


def one_of(count):
    return {"anyOf": [{"const": f"k{number}"} for number in range(count)]}


@pytest.mark.parametrize(
    ("schema", "widest"),
    [
        ({}, 1),
        ({"type": "object", "properties": {str(n): {"type": "string"} for n in range(500)}}, 1),
        ({"type": "array", "items": ROW}, 3),
        ({"items": one_of(50)}, 51),
        ({"prefixItems": [one_of(5), one_of(7)]}, 6 + 8),
        ({"properties": {"a": one_of(3)}, "patternProperties": {"^a": one_of(4)}}, 1 + 16),
        ({"allOf": [{"items": one_of(3)}, {"items": one_of(4)}]}, 4 + 5),
        ({"if": {"const": 1}, "then": {"const": 1}, "else": {"not": {"const": 2}}}, 5),
        ({"$defs": {"a": one_of(9)}, "items": {"$ref": "#/$defs/a"}}, 11),
        ({"$defs": {"a": {"$anchor": "x", **one_of(9)}}, "items": {"$ref": "#x"}}, 11),
        ({"properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}, 2),
        ({"pattern": "^a$"}, 17),
        ({"uniqueItems": True}, 41),
        ({"enum": ["a"] * 50}, 1),
        ({"enum": [1, 2, 3]}, 7),
    ],
)
def test_the_widest_place_is_found(schema, widest):
    assert max_comparisons_per_value(schema) == widest


def test_branches_within_branches_add_up():
    """One value is held to the items of all forty, and each of these has forty."""
    assert (
        max_comparisons_per_value({"anyOf": [{"items": one_of(40)} for _ in range(40)]}) == 40 * 41
    )


def test_what_would_take_long_to_find_out_is_as_wide_as_can_be():
    wide = [{"properties": {f"n{name}": one_of(2) for name in range(300)}} for _ in range(30)]
    assert max_comparisons_per_value({"allOf": wide}) == MOST


@pytest.mark.parametrize(
    ("schema", "value", "can"),
    [
        ({"items": ROW}, [dict.fromkeys("abcdefghij", 1)] * 20_000, True),
        ({"items": {"type": "integer"}}, [1] * (MOST_CHECKS - 2), True),
        ({"items": one_of(1_900)}, ["k1899"] * 400, True),
        ({"items": one_of(1_900)}, ["k1899"] * 20_000, False),
        ({"pattern": "^(a|b)*c$"}, "ab" * 500_000 + "c", True),
        ({"anyOf": [{"pattern": f"^(a|b)*c{n}$"} for n in range(500)]}, "ab" * 125_000, False),
        ({"items": {"enum": [{"a": n} for n in range(3_000)]}}, [{"a": 2_999}] * 2_000, False),
    ],
)
def test_only_what_takes_long_is_too_much(schema, value, can):
    assert Validator(schema).can_check(value) is can
