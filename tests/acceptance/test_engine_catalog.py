"""Acceptance of the engine: the catalog's token budget, at every size and without a cliff."""

import pytest

from catalog.rendering import DISPATCH_HEADER, GroupLine, catalog
from toolcrib.lib.token_counter import count

GROUPS = [
    GroupLine(
        f"mcp:s{size}", f"Server {size}", "Issues and code",
        tuple(f"s{size}__do_thing_{n}" for n in range(size)),
    )
    for size in (3, 12, 40, 90)
]  # fmt: skip


@pytest.mark.parametrize("budget", [60, 120, 220, *range(100, 2000, 97)])
def test_no_budget_is_exceeded(budget):
    """Feature row 52, defect 14."""
    rendered = catalog(GROUPS, header="Tools.", budget=budget)
    assert count(rendered.text) == rendered.tokens <= budget


def test_a_large_group_shows_its_names_by_first_word_with_counts():
    """Feature row 52: a group of 2,511 tools, at every budget."""
    verbs = ("create", "delete", "describe", "get", "list", "put", "start", "stop", "tag")
    names = tuple(f"aws__{verb}_thing_{n:03}" for verb in verbs for n in range(279))
    line = GroupLine("mcp:aws", "AWS", "Cloud", names)
    for budget in (150, 300, 1000, 2000):
        rendered = catalog([line], header="Tools.", budget=budget)
        assert rendered.tokens <= budget
        assert catalog([line], header="Tools.", budget=budget) == rendered
        shown, _, rest = rendered.text.splitlines()[-1].partition(", … ")
        number, _, words = rest.partition(" more: ")
        counts = [int(part.split("(")[1].rstrip(")")) for part in words.split(", ")]
        assert sum(counts) == int(number) == rendered.left_out["names"]
        assert len(shown.split(", ")) + sum(counts) == len(names) == 2511
        assert "stop* (279)" in words


def test_names_that_are_another_tools_full_name_are_printed_in_full():
    """Defect 18: a call by such a name runs the other tool."""
    lines = [
        GroupLine("mcp:airtable", "Airtable", "", ("airtable__create_record", "airtable__list")),
        GroupLine("own", "Own", "", ("create_record",)),
    ]
    text = catalog(lines, header="Tools.", budget=500).text
    assert "  airtable__create_record, airtable__list\n" in text
    assert "airtable__…" not in text
    assert "airtable__…" in catalog(lines[:1], header="Tools.", budget=500).text


def test_one_group_of_many_tools_shows_as_many_names_as_fit():
    names = tuple(f"big__tool_number_{n}" for n in range(2511))
    line = GroupLine("mcp:big", "Big", "", names)
    rendered = catalog([line], header=DISPATCH_HEADER, budget=2000)
    assert 1900 < rendered.tokens <= 2000
    assert rendered.left_out["names"] < 2511 - 200
    assert f"… {rendered.left_out['names']} more" in rendered.text
    assert catalog([line], header=DISPATCH_HEADER, budget=2000) == rendered
