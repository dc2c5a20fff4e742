"""Checks of untrusted JSON Schemas: limits, references, patterns, dialects, header marks."""

import resource
import time
from contextlib import suppress

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.definitions.json_schema import (
    COUNTS,
    LISTS_OF_SCHEMAS,
    MAPS_OF_SCHEMAS,
    SCHEMAS,
    InvalidSchema,
    check_input_schema,
    unenforceable_patterns,
)

QUICK = 5.0  # seconds; generous, since the machine is shared


def with_property(**schema):
    return {"type": "object", "properties": {"a": schema}}


def chain(length, *, fan=1, end=None):
    """Build definitions that each refer to the next one, `fan` times."""
    steps = {
        f"d{number}": {"allOf": [{"$ref": f"#/$defs/d{number + 1}"}] * fan}
        for number in range(length)
    }
    return {
        "type": "object",
        "$ref": "#/$defs/d0",
        "$defs": {**steps, f"d{length}": end or {"type": "object"}},
    }


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def rejection(schema):
    """Return the reason a schema is rejected, and check that the check was quick."""
    began = time.perf_counter()
    with pytest.raises(InvalidSchema) as caught:
        check_input_schema(schema)
    assert time.perf_counter() - began < QUICK
    return str(caught.value)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (None, "missing or null"),
        (True, "true or false"),
        ([], "a list"),
        ("object", "a string"),
        (7, "a number"),
        ({}, '"type": "object"'),
        ({"type": "array"}, '"type": "object"'),
        ({"type": ["object", "null"]}, '"type": "object"'),
    ],
)
def test_an_input_schema_that_is_not_an_object_is_rejected_with_the_reason(schema, reason):
    """Hostile input 9."""
    assert reason in rejection(schema)


@pytest.mark.parametrize(
    "ref",
    [
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        "other.json",
        "other.json#/a",
        "#/missing",
        "#missing",
        "#/properties/a/~9",
        "#/allOf/" + "9" * 5000,
        "#/%ff%00",
        "",
        7,
        None,
        ["#"],
    ],
)
def test_a_remote_reference_is_rejected_and_never_fetched(ref):
    """Hostile input 10."""
    assert "never fetched" in rejection(with_property(**{"$ref": ref}) | {"allOf": [{}]})


def test_a_reference_that_an_id_makes_remote_is_rejected_and_never_fetched():
    """Hostile input 10: `#/…` of another document."""
    schema = with_property(**{"$id": "http://127.0.0.1:9/x", "$ref": "#/properties/a"})

    assert "not valid" in rejection(schema)


@pytest.mark.parametrize(
    "ref",
    ["#", "#/$defs/x", "#/$defs/a~1b", "#/$defs/c%20d", "#/prefixItems/0", "#spot"],
)
def test_local_references_are_accepted(ref):
    check_input_schema(
        {
            "type": "object",
            "properties": {"p": {"$ref": ref}},
            "prefixItems": [{}],
            "$defs": {"x": {}, "a/b": {}, "c d": {}, "anchored": {"$anchor": "spot"}},
        }
    )


@pytest.mark.parametrize(
    "bomb",
    [
        chain(24, fan=2),
        chain(12, fan=4),
        chain(24, fan=2, end={"$ref": "#/$defs/d0"}),
        chain(24, fan=2) | {"properties": {"$defs": chain(3)["$defs"]["d3"]}},
    ],
)
def test_a_reference_bomb_is_rejected_quickly(bomb):
    """Hostile input 11."""
    assert "over 10000 subschemas" in rejection(bomb)


@pytest.mark.parametrize("length", [500, 600, 990])
def test_a_long_chain_of_references_is_rejected_quickly(length):
    """Hostile input 11."""
    assert "references" in rejection(chain(length))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "$ref": "#"},
        {"type": "object", "allOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {
            "type": "object",
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        },
        {"type": "object", "properties": {"child": {"$ref": "#"}}},
        {"type": "object", "$dynamicAnchor": "node", "properties": {"a": {"$dynamicRef": "#node"}}},
    ],
)
def test_a_recursive_schema_is_accepted_and_usable(schema):
    """Hostile input 12."""
    check_input_schema(schema)

    assert jsonschema_rs.validator_for(schema).is_valid({})


@pytest.mark.parametrize("depth", [33, 5_000, 100_000])
def test_a_schema_nested_too_deep_is_rejected(depth):
    """Hostile input 13."""
    assert "deeper than 64" in rejection(nested(depth))


def test_a_schema_at_the_depth_limit_is_accepted():
    check_input_schema(nested(31))


def test_a_schema_with_too_many_subschemas_is_rejected():
    schema = {"type": "object", "properties": {f"p{number}": {} for number in range(2_000)}}

    assert "2001 subschemas" in rejection(schema)


@pytest.mark.parametrize(
    "pattern", ["(?<=a)b", r"(a)\1", "(?=x)y", "x{1000}{1000}", "(?!a)" + "b" * 1000]
)
def test_a_pattern_that_re2_cannot_compile_is_accepted_and_reported_as_unenforced(pattern):
    """Hostile input 14."""
    schema = with_property(type="string", pattern=pattern)
    check_input_schema(schema)

    assert unenforceable_patterns(schema) == [pattern]


def test_an_unenforced_pattern_in_property_names_is_reported():
    """Hostile input 14."""
    schema = {"type": "object", "patternProperties": {"(?=a)": {"items": {"pattern": r"\1(b)"}}}}

    assert set(unenforceable_patterns(schema)) == {"(?=a)", r"\1(b)"}


def test_a_pattern_prone_to_backtracking_is_enforced_in_linear_time():
    """Hostile input 14: `^(a+)+$`."""
    schema = with_property(type="string", pattern="^(a+)+$")
    check_input_schema(schema)
    began = time.perf_counter()

    assert unenforceable_patterns(schema) == []
    engine = jsonschema_rs.RegexOptions()
    assert not jsonschema_rs.is_valid(schema, {"a": "a" * 5000 + "!"}, pattern_options=engine)
    assert time.perf_counter() - began < QUICK


def test_a_pattern_of_one_megabyte_is_rejected_quickly():
    """Hostile input 14."""
    assert "pattern" in rejection(with_property(type="string", pattern="(a|b)" * 200_000))


def test_patterns_that_take_seconds_to_compile_are_skipped_and_reported():
    """Hostile input 14: compiling all patterns of 22 KB took 25 s and 2.6 GB."""
    costly = {f"p{at}": {"type": "string", "pattern": rf"\p{{L}}{{150}}{at}"} for at in range(400)}
    schema = {"type": "object", "properties": costly}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    check_input_schema(schema)

    assert len(unenforceable_patterns(schema)) >= 350
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 400_000, f"grew by {grown} KB"


@pytest.mark.parametrize("pattern", ["[", "(?=x)", "(?<=x)y", "x" * 501])
def test_an_invalid_or_long_pattern_is_reported(pattern):
    schema = with_property(type="string", pattern=pattern)
    check_input_schema(schema)
    assert unenforceable_patterns(schema) == [pattern]


@pytest.mark.parametrize(
    "rule",
    [
        {"minLength": 1e308},
        {"maxItems": 10**400},
        {"minProperties": -1},
        {"multipleOf": 0},
        {"maximum": float("nan")},
        {"maximum": "7"},
        {"enum": {}},
        {"type": "objekt"},
        {"required": "a"},
        {"pattern": 7},
        {"properties": []},
        {"title": "\ud800"},
    ],
)
def test_invalid_keyword_values_are_rejected(rule):
    """Hostile input 15."""
    assert rejection(with_property(**rule))


@pytest.mark.parametrize(
    "dialect",
    [
        "http://json-schema.org/draft-04/schema#",
        "https://example.org/my-own",
        "javascript:alert(1)",
        "",
        4,
        None,
    ],
)
def test_an_unsupported_dialect_is_rejected(dialect):
    """Hostile input 16."""
    assert "unsupported dialect" in rejection({"$schema": dialect, "type": "object"})


def test_an_unsupported_dialect_in_a_subschema_is_rejected():
    """Hostile input 16."""
    inner = {"$id": "urn:inner", "$schema": "https://example.org/my-own"}

    assert "unsupported dialect" in rejection(with_property(**inner))


@pytest.mark.parametrize(
    "dialect",
    [
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "http://json-schema.org/draft-07/schema#",
        "http://json-schema.org/draft-06/schema",
    ],
)
def test_supported_dialects_are_accepted(dialect):
    check_input_schema({"$schema": dialect, "type": "object"})


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({"a": {"type": "string", "x-mcp-header": "X\r\nEvil: 1"}}, "not a valid header name"),
        ({"a": {"type": "string", "x-mcp-header": ""}}, "not a valid header name"),
        ({"a": {"type": "string", "x-mcp-header": 5}}, "not a valid header name"),
        ({"a": {"type": "number", "x-mcp-header": "Region"}}, "string, integer or boolean"),
        ({"a": {"x-mcp-header": "Region"}}, "string, integer or boolean"),
        ({"a": {"type": "string", "x-mcp-header": "Authorization"}}, "a credential header"),
        (
            {"a": {"items": {"type": "string", "x-mcp-header": "Region"}}},
            "only allowed on arguments",
        ),
        (
            {
                "a": {"type": "string", "x-mcp-header": "Region"},
                "b": {"type": "string", "x-mcp-header": "REGION"},
            },
            "twice",
        ),
    ],
)
def test_an_invalid_header_mark_is_rejected(properties, reason):
    """Hostile input 17."""
    assert reason in rejection({"type": "object", "properties": properties})


def test_a_valid_header_mark_is_accepted():
    inner = with_property(type="boolean", **{"x-mcp-header": "Dry-Run"})

    check_input_schema({"type": "object", "properties": {"options": inner}})


words = st.text(max_size=4) | st.sampled_from(["#", "#/$defs/a", "#/allOf/0", "http://e/x", "a"])
plain = st.none() | st.booleans() | st.integers() | st.floats() | words
keywords = st.sampled_from(
    [
        *MAPS_OF_SCHEMAS,
        *LISTS_OF_SCHEMAS,
        *SCHEMAS,
        *COUNTS,
        *("$ref", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor", "$id", "$schema"),
        *("type", "enum", "const", "pattern", "multipleOf", "required", "x-mcp-header", "a"),
    ]
)
schema_like = st.recursive(
    plain | st.just({"type": "object"}),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(keywords | words, inner, max_size=4)
    ),
    max_leaves=25,
)


@given(st.dictionaries(keywords, schema_like, max_size=6))
def test_no_schema_crashes_the_check(schema):
    with suppress(InvalidSchema):
        check_input_schema({"type": "object", **schema})
        unenforceable_patterns(schema)
