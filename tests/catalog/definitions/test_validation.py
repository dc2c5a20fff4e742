"""Validation with hostile schemas and values, and the cache of compiled schemas."""

import pytest

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
    cache = Validators(max_size=1)
    assert not cache.has("1", "output")
    cache.get_or_compile("1", "output", {})
    assert cache.has("1", "output")
    assert not cache.has("1", "input")
    cache.get_or_compile("2", "output", {})
    assert not cache.has("1", "output")
