"""Catalog text: one line per group, names below, within a budget, deterministic."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog import rendering
from catalog.rendering import GroupLine, catalog, group_lines, shorten_search_response
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.token_counter import count

HEAD = "Tools:"


def line(group_id="mcp:github", *names, description="", display="GitHub"):
    return GroupLine(group_id, display, description, names or ("github__a", "github__b"))


def test_a_shared_prefix_is_printed_once():
    text = catalog([line(description="Issues, code search")], header=HEAD, budget=2000).text
    assert text == (
        "Tools:\n\n- `mcp:github` — GitHub: Issues, code search (2 tools, github__…)\n  a, b\n"
    )


def test_a_group_without_a_shared_prefix_prints_full_names():
    text = catalog([line("own", "github__a", "shout", display="Own")], header=HEAD, budget=2000)
    assert text.text.endswith("- `own` — Own (2 tools)\n  github__a, shout\n")


def firecrawl(*names, description=""):
    names = names or ("agent", "agent_status", "crawl", "scrape", "search")
    full = tuple(f"fire__fire_crawl-{name}" for name in names)
    return GroupLine("mcp:fire", "fire", description, full)


def test_words_that_all_names_begin_with_are_printed_once():
    text = catalog([firecrawl()], header=HEAD, budget=2000).text
    assert text == (
        "Tools:\n\n- `mcp:fire` (5 tools, fire__fire_crawl-…)\n"
        "  agent, agent_status, crawl, scrape, search\n"
    )
    assert firecrawl().by_short_name["scrape"] == "fire__fire_crawl-scrape"


@pytest.mark.parametrize(
    "group",
    [
        firecrawl("a", "b"),  # few names: the words may say what they do
        GroupLine("g", "g", "", tuple(f"s__{n}" for n in ("a_", "a_b", "a_c", "a_d", "a_e"))),
        GroupLine("g", "g", "", tuple(f"a_{n}" for n in range(9))),  # of several servers
        GroupLine("g", "g", "", ()),
    ],
)
def test_words_stay_in_names_where_they_are_no_prefix_of_a_servers_names(group):
    assert group.prefix == group.server_prefix
    assert group.by_short_name == {}


@pytest.mark.parametrize(
    ("other", "printed"),
    [
        ("scrape", "fire__…)"),  # the full name of another tool
        ("web__scrape", "fire__…)"),  # its bare name
        ("web__scrapes", "fire__fire_crawl-…)"),
    ],
)
def test_names_are_not_shortened_to_the_name_of_another_tool(other, printed):
    groups = [firecrawl(), GroupLine("other", "Other", "", (other,))]
    assert f"(5 tools, {printed}" in catalog(groups, header=HEAD, budget=2000).text


def test_a_name_that_the_id_says_already_is_not_printed():
    described = firecrawl(description="Crawls the web")
    text = catalog([described], header=HEAD, budget=2000).text
    assert "- `mcp:fire` — Crawls the web (5 tools, " in text
    renamed = replace(described, display_name="Fire")
    assert group_lines([renamed], 2000).startswith("- `mcp:fire` — Fire: Crawls the web (5 tools, ")


def test_without_groups_there_is_no_text_and_no_header():
    assert catalog([], header=HEAD, budget=2000) == rendering.Catalog("", 0, None)
    assert catalog([GroupLine("empty", "Empty", "", ())], header=HEAD, budget=2000).text == ""


def test_hostile_text_stays_on_its_line():
    hostile = "Nice\n- `mcp:evil` — Evil\u202e (1 tools)\n  x\x00" + "y" * 500
    text = catalog([line(description=hostile)], header=HEAD, budget=2000).text
    assert len(text.splitlines()) == 4
    assert "\u202e" not in text
    assert "\x00" not in text


def fleet(groups=33, tools=600):
    each = tools // groups
    return [
        GroupLine(
            f"mcp:server-{number:02}",
            f"Server {number}",
            "Read and change the records, files and people of one department",
            tuple(f"server-{number:02}__do_thing_{at:02}" for at in range(each + number % 5)),
        )
        for number in range(groups)
    ]


def test_600_tools_in_33_groups_fit_the_default_budget_with_omissions_reported():
    lines = fleet()
    result = catalog(lines, header=rendering.DISPATCH_HEADER, budget=2000)
    assert count(result.text) == result.tokens <= 2000
    assert all(f"`{group.group_id}`" in result.text for group in lines)
    included = sum(name.partition("__")[2] in result.text for name in lines[0].names)
    assert result.left_out["names"] > 0
    assert set(result.left_out["groups"]) <= {group.group_id for group in lines}
    assert included <= len(lines[0].names)


def test_the_largest_groups_are_shortened_first():
    small = line("small", *(f"s__{n}" for n in range(8)), display="S")
    large = line("large", *(f"l__name_{n}" for n in range(40)), display="L")
    full = catalog([small, large], header=HEAD, budget=10_000)
    result = catalog([small, large], header=HEAD, budget=full.tokens - 20)
    assert result.left_out["groups"] == ["large"]
    assert 0 < result.left_out["names"] < 35, "as many names as fit are left"
    assert "name_4, name_5, " in result.text
    assert f", … {result.left_out['names']} more" in result.text
    assert "0, 1, 2, 3, 4, 5, 6, 7\n" in result.text


def test_only_group_lines_remain_if_names_do_not_fit():
    result = catalog(fleet(), header=HEAD, budget=1100)
    assert "do_thing" not in result.text
    assert result.left_out["names"] == sum(len(group.names) for group in fleet())


def test_group_lines_are_dropped_last_and_counted():
    result = catalog(fleet(), header=HEAD, budget=200)
    assert result.left_out["lines"] > 0
    assert f"{result.left_out['lines']} more groups" in result.text


def test_nothing_is_omitted_if_everything_fits():
    assert catalog([line()], header=HEAD, budget=2000).left_out is None


def test_names_cost_at_most_7_tokens_per_tool():
    lines = fleet()
    with_names = catalog(lines, header=HEAD, budget=10**6).tokens
    without = catalog(lines, header=HEAD, budget=1100).tokens
    assert (with_names - without) / sum(len(group.names) for group in lines) <= 7


def test_the_meta_tools_stay_under_700_tokens():
    from toolcrib.lib.json_codec import canonical

    tools = rendering.meta_tools("dispatch")
    assert count(canonical(tools)) < 700
    assert [tool["name"] for tool in tools] == [
        "search_tools",
        "load_tools",
        "get_tool_details",
        "call_read_only_tool",
        "deferred_tool_call",
    ]
    for dispatcher in tools[3:]:
        assert next(iter(dispatcher["parameters"]["properties"])) == "name"
    assert [tool["name"] for tool in rendering.meta_tools("inject")] == [
        "search_tools",
        "load_tools",
        "get_tool_details",
    ]


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(10, 600))
def test_rendering_is_deterministic_and_counts_are_correct(sizes, budget):
    lines = [
        GroupLine(f"g{at}", f"G{at}", "text", tuple(f"x__{n}" for n in range(size)))
        for at, size in enumerate(sizes)
    ]
    first, second = (catalog(lines, header=HEAD, budget=budget) for _ in range(2))
    assert first == second
    for group in lines:
        if group.names and first.left_out is None:
            assert f"({len(group.names)} tool" in first.text


def test_remaining_groups_exclude_loaded_tools_and_fully_loaded_groups():
    lines = [line("one", "o__a", "o__b"), line("two", "t__a")]
    remaining = rendering.remaining_groups(lines, {"o__a", "t__a"})
    assert [(group.group_id, group.names, group.remaining) for group in remaining] == [
        ("one", ("o__b",), True)
    ]
    assert "1 remaining tool, o__…" in catalog(remaining, header=HEAD, budget=999).text


def test_a_summary_is_the_first_sentence_truncated_to_150_characters():
    assert rendering.summary("Create a file. It overwrites.") == "Create a file."
    assert len(rendering.summary("word " * 100)) <= 150
    assert rendering.summary("word " * 100).endswith("…")
    assert rendering.summary("one\ntwo") == "one two"


def test_names_that_cannot_fit_are_not_counted(monkeypatch):
    counted = []

    def record(text):
        counted.append(len(text))
        return count(text)

    monkeypatch.setattr(rendering, "count", record)
    result = catalog(fleet(groups=3, tools=30_000), header=HEAD, budget=500)
    assert result.left_out["names"] > 29_000
    assert max(counted) < 5_000


names = st.text("ab_-", min_size=1, max_size=3)


@given(
    st.lists(st.lists(names, min_size=1, max_size=40, unique=True), min_size=1, max_size=6),
    st.integers(0, 300),
)
def test_the_least_cost_of_names_changes_no_result(groups, budget):
    lines = [GroupLine(str(at), "G", "Some words", tuple(group)) for at, group in enumerate(groups)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "_least_cost", lambda draft: 0)  # count everything at once
        expected = catalog(lines, header=HEAD, budget=budget)
    assert catalog(lines, header=HEAD, budget=budget) == expected


def test_a_description_that_lists_names_is_left_out_beside_the_names():
    names = ("crm__add_note", "crm__find-customer", "crm__list_notes")
    said = "Tools: add note, find customer, and 1 more"
    line = GroupLine("mcp:crm", "CRM", said, names)
    assert "Tools:" not in catalog([line], header="H", budget=500).text
    assert said in group_lines([line], 500)
    for other in (f"{said}.", "Tools: add note, find orders", "Customers and notes"):
        kept = catalog([replace(line, description=other)], header="H", budget=500).text
        assert other in kept


def test_what_a_search_found_beside_tools_is_shortened_with_it():
    def response(features):
        return {
            "tools": [{"name": f"t{at}", "description": "Does a thing."} for at in range(5)],
            "more": [f"another_long_name_of_a_tool_{at}" for at in range(10)],
            "features": [
                {"kind": "resource", "uri": f"crib://x/{at}" * 9} for at in range(features)
            ],
            "features_message": "How to get them.",
        }

    shortened = response(3)
    shorten_search_response(shortened, 200)
    assert len(shortened["features"]) == 1
    assert 0 < len(shortened["more"]) < 10
    assert count(canonical(shortened)) <= 200
    tiny = response(1)
    shorten_search_response(tiny, 70)
    assert tiny["more"] == []
    assert not {"features", "features_message"} & tiny.keys()
