"""Cost of validating one value, and the limit above which validation is skipped."""

import pytest

from catalog.definitions.schema_cost import MAX_COST, max_comparisons_per_value
from catalog.definitions.validation import MAX_COMPARISONS, Validator

OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
ROW = {"type": "object", "properties": dict.fromkeys("abcdefghij", OPTIONAL)}


def one_of(count):
    return {"anyOf": [{"const": f"k{number}"} for number in range(count)]}


@pytest.mark.parametrize(
    ("schema", "comparisons"),
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
def test_the_maximum_number_of_comparisons_is_computed(schema, comparisons):
    assert max_comparisons_per_value(schema) == comparisons


def test_nested_branches_add_up():
    """Each item is compared with the branches of all forty item schemas."""
    assert (
        max_comparisons_per_value({"anyOf": [{"items": one_of(40)} for _ in range(40)]}) == 40 * 41
    )


def test_a_schema_too_large_to_analyse_has_the_maximum_cost():
    wide = [{"properties": {f"n{name}": one_of(2) for name in range(300)}} for _ in range(30)]
    assert max_comparisons_per_value({"allOf": wide}) == MAX_COST


@pytest.mark.parametrize(
    ("schema", "value", "can"),
    [
        ({"items": ROW}, [dict.fromkeys("abcdefghij", 1)] * 20_000, True),
        ({"items": {"type": "integer"}}, [1] * (MAX_COMPARISONS - 2), True),
        ({"items": one_of(1_900)}, ["k1899"] * 400, True),
        ({"items": one_of(1_900)}, ["k1899"] * 20_000, False),
        ({"pattern": "^(a|b)*c$"}, "ab" * 500_000 + "c", True),
        ({"anyOf": [{"pattern": f"^(a|b)*c{n}$"} for n in range(500)]}, "ab" * 125_000, False),
        ({"items": {"enum": [{"a": n} for n in range(3_000)]}}, [{"a": 2_999}] * 2_000, False),
    ],
)
def test_only_expensive_combinations_are_skipped(schema, value, can):
    assert Validator(schema).can_check(value) is can
