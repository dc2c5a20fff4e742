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
    """References that lead from one definition to the next, `fan` at a time."""
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


def refusal(schema):
    """The reason a schema is refused for, in the time any schema may take."""
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
def test_an_input_schema_that_is_not_of_an_object_is_refused_with_the_reason(schema, reason):
    """Hostile input 9."""
    assert reason in refusal(schema)


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
def test_a_reference_out_of_the_schema_is_refused_and_never_fetched(ref):
    """Hostile input 10."""
    assert "never fetched" in refusal(with_property(**{"$ref": ref}) | {"allOf": [{}]})


def test_a_reference_that_an_id_turns_outwards_is_refused_and_never_fetched():
    """Hostile input 10: `#/…` of another document."""
    schema = with_property(**{"$id": "http://127.0.0.1:9/x", "$ref": "#/properties/a"})

    assert "not valid" in refusal(schema)


@pytest.mark.parametrize(
    "ref",
    ["#", "#/$defs/x", "#/$defs/a~1b", "#/$defs/c%20d", "#/prefixItems/0", "#spot"],
)
def test_references_within_the_schema_are_fine(ref):
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
def test_a_reference_bomb_is_refused_at_once(bomb):
    """Hostile input 11."""
    assert "expands to more than 10000" in refusal(bomb)


@pytest.mark.parametrize("length", [500, 600, 990])
def test_a_long_chain_of_references_is_refused_at_once(length):
    """Hostile input 11."""
    assert "references" in refusal(chain(length))


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
def test_a_schema_that_refers_to_itself_is_kept_and_can_be_used(schema):
    """Hostile input 12."""
    check_input_schema(schema)

    assert jsonschema_rs.validator_for(schema).is_valid({})


@pytest.mark.parametrize("depth", [33, 5_000, 100_000])
def test_a_schema_nested_too_deep_is_refused(depth):
    """Hostile input 13."""
    assert "deeper than 64" in refusal(nested(depth))


def test_the_deepest_schema_allowed_passes():
    check_input_schema(nested(31))


def test_a_schema_of_too_many_parts_is_refused():
    schema = {"type": "object", "properties": {f"p{number}": {} for number in range(2_000)}}

    assert "2001 subschemas" in refusal(schema)


@pytest.mark.parametrize(
    "pattern", ["(?<=a)b", r"(a)\1", "(?=x)y", "x{1000}{1000}", "(?!a)" + "b" * 1000]
)
def test_a_pattern_no_linear_engine_runs_is_kept_and_said_to_be_unenforced(pattern):
    """Hostile input 14."""
    schema = with_property(type="string", pattern=pattern)
    check_input_schema(schema)

    assert unenforceable_patterns(schema) == [pattern]


def test_an_unenforced_pattern_is_found_among_property_names_too():
    """Hostile input 14."""
    schema = {"type": "object", "patternProperties": {"(?=a)": {"items": {"pattern": r"\1(b)"}}}}

    assert set(unenforceable_patterns(schema)) == {"(?=a)", r"\1(b)"}


def test_a_pattern_that_takes_for_ever_elsewhere_is_enforced_in_linear_time():
    """Hostile input 14: `^(a+)+$`."""
    schema = with_property(type="string", pattern="^(a+)+$")
    check_input_schema(schema)
    began = time.perf_counter()

    assert unenforceable_patterns(schema) == []
    engine = jsonschema_rs.RegexOptions()
    assert not jsonschema_rs.is_valid(schema, {"a": "a" * 5000 + "!"}, pattern_options=engine)
    assert time.perf_counter() - began < QUICK


def test_a_pattern_of_a_megabyte_is_refused_at_once():
    """Hostile input 14."""
    assert "pattern" in refusal(with_property(type="string", pattern="(a|b)" * 200_000))


def test_patterns_that_cost_seconds_to_compile_are_judged_at_once_and_flagged():
    """Hostile input 14: a definition of 22 KB took 25 s and 2.6 GB where each was compiled."""
    costly = {f"p{at}": {"type": "string", "pattern": rf"\p{{L}}{{150}}{at}"} for at in range(400)}
    schema = {"type": "object", "properties": costly}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    check_input_schema(schema)

    assert len(unenforceable_patterns(schema)) >= 350
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 400_000, f"grew by {grown} KB"


@pytest.mark.parametrize("pattern", ["[", "(?=x)", "(?<=x)y", "x" * 501])
def test_a_pattern_that_cannot_be_run_is_flagged(pattern):
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
def test_rules_that_make_no_sense_are_refused(rule):
    """Hostile input 15."""
    assert refusal(with_property(**rule))


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
def test_an_unknown_dialect_is_refused_in_that_word(dialect):
    """Hostile input 16."""
    assert "unsupported dialect" in refusal({"$schema": dialect, "type": "object"})


def test_an_unknown_dialect_further_down_is_refused_too():
    """Hostile input 16."""
    inner = {"$id": "urn:inner", "$schema": "https://example.org/my-own"}

    assert "unsupported dialect" in refusal(with_property(**inner))


@pytest.mark.parametrize(
    "dialect",
    [
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "http://json-schema.org/draft-07/schema#",
        "http://json-schema.org/draft-06/schema",
    ],
)
def test_dialects_in_use_are_fine(dialect):
    check_input_schema({"$schema": dialect, "type": "object"})


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({"a": {"type": "string", "x-mcp-header": "X\r\nEvil: 1"}}, "not a header name"),
        ({"a": {"type": "string", "x-mcp-header": ""}}, "not a header name"),
        ({"a": {"type": "string", "x-mcp-header": 5}}, "not a header name"),
        ({"a": {"type": "number", "x-mcp-header": "Region"}}, "string, integer or boolean"),
        ({"a": {"x-mcp-header": "Region"}}, "string, integer or boolean"),
        ({"a": {"type": "string", "x-mcp-header": "Authorization"}}, "credentials"),
        ({"a": {"items": {"type": "string", "x-mcp-header": "Region"}}}, "no argument"),
        (
            {
                "a": {"type": "string", "x-mcp-header": "Region"},
                "b": {"type": "string", "x-mcp-header": "REGION"},
            },
            "twice",
        ),
    ],
)
def test_a_header_mark_that_breaks_the_rules_excludes_the_tool(properties, reason):
    """Hostile input 17."""
    assert reason in refusal({"type": "object", "properties": properties})


def test_a_header_mark_within_the_rules_is_fine():
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
def test_whatever_a_server_sends_is_judged_without_a_crash(schema):
    with suppress(InvalidSchema):
        check_input_schema({"type": "object", **schema})
        unenforceable_patterns(schema)
