"""Validation under schemas and values made to cost."""

import time

from catalog.definitions.validation import MOST_PROBLEMS, Validator, Validators

BRANCHES = {"anyOf": [{"const": f"x{at}"} for at in range(1900)]}
EVIL = {"type": "object", "properties": {"a": {"type": "array", "items": BRANCHES}}}


def spent(work):
    began = time.process_time()
    return work(), time.process_time() - began


def test_what_fits_none_of_many_branches_many_times_is_told_once_and_soon():
    """All problems of this would be 114 million, in hundreds of gigabytes."""
    problems, seconds = spent(lambda: Validator(EVIL).problems({"a": ["y"] * 60_000}))
    assert len(problems) == 1
    assert problems[0].startswith("a.0: ")
    assert len(problems[0]) < 500
    assert seconds < 2


def test_what_is_small_is_told_with_all_that_is_wrong():
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in "abcdefghijklmno"},
        "required": ["z"],
    }
    value = dict.fromkeys("abcdefghijklmno", "no")
    assert len(Validator(schema).problems(value)) == MOST_PROBLEMS
    assert len(Validator(schema).problems({"a": "no", "b": "no"})) == 3


def test_a_backtracking_pattern_takes_linear_time_on_results_too():
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    problems, seconds = spent(lambda: Validator(schema).problems({"a": "a" * 200_000 + "!"}))
    assert len(problems) == 1
    assert seconds < 1


def test_it_is_known_what_is_compiled_already():
    kept = Validators(most=1)
    assert not kept.has("1", "output")
    kept.of("1", "output", {})
    assert kept.has("1", "output")
    assert not kept.has("1", "input")
    kept.of("2", "output", {})
    assert not kept.has("1", "output")
