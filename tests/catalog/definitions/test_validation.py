"""Validation with hostile schemas and values, and the cache of compiled schemas."""

import pytest

from catalog.cache import CachedDefinition
from catalog.definitions.validation import MAX_PROBLEMS, Validator, Validators

BRANCHES = {"anyOf": [{"const": f"x{at}"} for at in range(1900)]}
EVIL = {"type": "object", "properties": {"a": {"type": "array", "items": BRANCHES}}}


@pytest.mark.timeout(20)
def test_only_the_first_error_is_reported_for_a_large_value_and_schema():
    """Collecting all 114 million errors would take hundreds of gigabytes."""
    problems = Validator(EVIL).problems({"a": ["y"] * 60_000})
    assert len(problems) == 1
    assert problems[0].startswith("a.0: ")
    assert len(problems[0]) < 500


def test_all_errors_of_a_small_value_are_reported_up_to_the_limit():
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in "abcdefghijklmno"},
        "required": ["z"],
    }
    value = dict.fromkeys("abcdefghijklmno", "no")
    assert len(Validator(schema).problems(value)) == MAX_PROBLEMS
    assert len(Validator(schema).problems({"a": "no", "b": "no"})) == 3


@pytest.mark.timeout(20)
def test_a_pattern_prone_to_backtracking_takes_linear_time():
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    problems = Validator(schema).problems({"a": "a" * 200_000 + "!"})
    assert len(problems) == 1


def test_compiled_schemas_are_cached_and_evicted():
    first, second = (CachedDefinition(0, sha256, '{"inputSchema":{}}', 0) for sha256 in "12")
    cache = Validators(max_size=1)
    assert not cache.has(first, "input")
    assert cache.get(first, "input") is cache.get(first, "input")
    assert cache.has(first, "input")
    assert not cache.has(first, "output")
    assert cache.get(second, "output") is None  # it has no output schema
    assert cache.has(second, "output")
    assert not cache.has(first, "input")
