"""Diffs of definitions: readable, complete, and with bounded cost for any input."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.definitions import diff as definition_diff

BASE = {
    "name": "get_forecast",
    "description": "Return the forecast for a city.",
    "inputSchema": {
        "type": "object",
        "required": ["city"],
        "properties": {
            "city": {"type": "string", "description": "Name of the city."},
            "places": {
                "type": "array",
                "items": {"type": "object", "properties": {"lat": {"type": "number"}}},
            },
        },
    },
    "annotations": {"readOnlyHint": True},
}


def section(title, before, after):
    return {part.title: part for part in definition_diff.compare(before, after)}.get(title)


def side(spans, kind):
    return "".join(text for span, text in spans if span in ("same", kind))


def test_only_the_changed_word_is_marked():
    spans = definition_diff.diff_words("Accepts city names only.", "Accepts city codes only.")

    assert spans == (
        ("same", "Accepts city "),
        ("removed", "names"),
        ("added", "codes"),
        ("same", " only."),
    )


def test_adjacent_changed_words_form_one_span():
    spans = definition_diff.diff_words("Read a file.", "Please delete everything now.")

    assert [kind for kind, _ in spans] == ["removed", "added", "same"]


@given(st.text(max_size=80), st.text(max_size=80))
def test_both_texts_can_be_rebuilt_from_the_spans(before, after):
    spans = definition_diff.diff_words(before, after)

    assert side(spans, "removed") == before
    assert side(spans, "added") == after


@given(st.lists(st.sampled_from("ab \n."), max_size=40), st.lists(st.sampled_from("ab \n.")))
def test_repeated_words_and_spaces_lose_nothing(before, after):
    spans = definition_diff.diff_words("".join(before), "".join(after))

    assert side(spans, "removed") == "".join(before)
    assert side(spans, "added") == "".join(after)


def test_equal_definitions_have_no_sections():
    assert definition_diff.compare(BASE, dict(BASE)) == []


def test_a_new_required_field_is_one_added_line():
    schema = BASE["inputSchema"]
    after = BASE | {
        "inputSchema": {
            **schema,
            "required": ["city", "token"],
            "properties": {**schema["properties"], "token": {"type": "string"}},
        }
    }

    [line] = section("Input schema", BASE, after).lines

    assert (line.kind, line.path) == ("added", "token")
    assert [(fact.name, fact.spans) for fact in line.facts] == [
        ("type", (("added", "string"),)),
        ("required", (("added", "required"),)),
    ]


def test_a_nested_field_is_named_by_its_path():
    after = BASE | {"inputSchema": {**BASE["inputSchema"], "properties": {}}}

    lines = section("Input schema", BASE, after).lines

    removed = [line.path for line in lines if line.kind == "removed"]
    assert removed == ["city", "places", "places[]", "places[].lat"]


def test_a_field_that_stops_being_required_is_a_changed_line():
    after = BASE | {"inputSchema": {**BASE["inputSchema"], "required": []}}

    [line] = section("Input schema", BASE, after).lines

    assert (line.kind, line.path) == ("changed", "city")
    assert line.facts == (definition_diff.Fact("required", (("removed", "required"),)),)


def test_a_changed_annotation_shows_both_values():
    [line] = section("Annotations", BASE, BASE | {"annotations": {}}).lines

    assert line.path == "readOnlyHint"
    assert line.facts[0].spans == (("removed", "true"), ("same", " "), ("added", "not set"))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("outputSchema", {"type": "object", "properties": {"x": {"const": 1}}}),
        ("title", "Forecast"),
        ("_meta", {"anything": [1, 2]}),
        ("icons", [{"src": "https://example.org/i.png"}]),
        ("execution", {"taskSupport": "required"}),
        ("unknown", "text"),
        ("inputSchema", {"type": "object", "anyOf": [{"required": ["a"]}]}),
        ("inputSchema", {"type": "object", "additionalProperties": False}),
        ("inputSchema", {"type": "object", "$defs": {"p": {"type": "string"}}}),
        ("inputSchema", {"type": "object", "required": ["nowhere"]}),
        ("inputSchema", {"type": "object", "properties": {"a": True}}),
    ],
)
def test_every_part_of_a_change_is_included(part, value):
    before = BASE if part != "inputSchema" else BASE | {"inputSchema": {"type": "object"}}

    assert definition_diff.compare(before, before | {part: value})


def test_a_field_with_a_dot_in_its_name_does_not_hide_another():
    def with_default(value):
        inner = {"type": "object", "properties": {"b": {"default": value}}}
        return BASE | {"inputSchema": {"properties": {"a": inner, "a.b": {}, "(root)": {}}}}

    [line] = section("Input schema", with_default("x"), with_default("rm -rf")).lines

    assert line.path == "a.b"


def test_true_and_one_differ():
    before = BASE | {"inputSchema": {"type": "object", "default": 1}}

    assert definition_diff.compare(
        before, BASE | {"inputSchema": {"type": "object", "default": True}}
    )


def test_a_first_definition_is_all_new():
    sections = definition_diff.compare(None, BASE)

    assert section("Description", None, BASE).spans == (("added", BASE["description"]),)
    assert {line.kind for part in sections for line in part.lines} == {"added", "changed"}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["same word", "two words", "random words", "unlike"])
def test_a_hostile_description_is_compared_quickly(kind):
    chance = random.Random(7)  # noqa: S311 - not a secret
    before = {
        "same word": "a " * 16_000,
        "two words": "a b " * 8_000,
        "random words": " ".join(chance.choices("abcdef", k=16_000)),
        "unlike": "x " * 16_000,
    }[kind]
    after = {
        "same word": "a " * 12_000,
        "two words": "b a " * 8_000,
        "random words": " ".join(chance.choices("abcdef", k=16_000)),
        "unlike": "y " * 16_000,
    }[kind]

    spans = definition_diff.diff_words(before, after)

    assert side(spans, "removed") == before
    assert side(spans, "added") == after


def test_a_hostile_schema_is_truncated_with_the_number_of_omitted_lines():
    wide = {"type": "object", "properties": {f"f{number}": {} for number in range(5_000)}}

    part = section("Input schema", BASE, BASE | {"inputSchema": wide})

    assert len(part.lines) == definition_diff.MAX_LINES
    assert part.omitted_lines > 4_000


def test_a_deeply_nested_schema_is_compared():
    deep = {"type": "string"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}

    assert section("Input schema", BASE, BASE | {"inputSchema": deep}).lines
