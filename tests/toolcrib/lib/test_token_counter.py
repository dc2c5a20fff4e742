import pytest

from tests.support.factories import tool_object
from toolcrib.lib.token_counter import count, count_definition, estimator


def test_the_tokenizer_has_a_name():
    assert estimator() == "o200k"
    assert count("hello world") == 2
    assert count("") == 0


def test_a_definition_costs_only_what_a_model_reads():
    plain = tool_object(description="Search the web.")
    marked = plain | {"annotations": {"readOnlyHint": True}, "_meta": {"x": "y" * 500}}
    wordy = plain | {"description": "Search the web, thoroughly and at length."}

    assert count_definition(plain) == count_definition(marked)
    assert count_definition(wordy) > count_definition(plain)


def test_the_cost_of_a_definition_does_not_depend_on_key_order():
    tool = tool_object(description="Search.")

    assert count_definition(dict(reversed(tool.items()))) == count_definition(tool)


@pytest.mark.timeout(20)
def test_counting_the_longest_text_allowed_takes_no_noticeable_time():
    """Hostile input 8: long repeated text."""
    for piece in ("a", " ", "\n", "a b", "\u202e", "中"):
        count(piece * (32 * 1024 // len(piece.encode())))
