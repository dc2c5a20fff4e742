"""Parsing of tool objects: malformed tools are rejected one by one."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.definitions.parsing import MAX_NAME, Rejection, printable_name, read_tools, search_text
from tests.support.factories import DEFINITION_LIMITS, make_remote_tool, tool_object

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)
FIELDS = ["name", "title", "description", "inputSchema", "outputSchema", "annotations", "_meta"]
tool_like = st.dictionaries(st.sampled_from(FIELDS), json_values) | st.builds(
    lambda name, fields: {**tool_object(), **fields, "name": name},
    st.sampled_from(["good", "a", "b"]) | st.text(max_size=3),
    st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=2),
)


def read(*items):
    return read_tools(items, **DEFINITION_LIMITS)


def rejection_of(item):
    """Return the rejection of one item between two valid ones, which must both be kept."""
    tools, rejections = read(tool_object("first"), item, tool_object("last"))
    assert [tool.name for tool in tools] == ["first", "last"]
    (rejection,) = rejections
    return rejection


def nested(depth):
    value: object = "x"
    for _ in range(depth):
        value = [value]
    return value


@given(st.lists(json_values | tool_like, max_size=8), st.integers(0, 8))
def test_a_valid_tool_is_kept_whatever_else_the_list_contains(items, index):
    items.insert(index, tool_object("the good one"))

    tools, rejections = read(*items)

    names = [tool.name for tool in tools]
    assert "the good one" in names
    assert len(tools) + len(rejections) == len(items)
    names += [rejection.name for rejection in rejections if rejection.storable]
    assert len(set(names)) == len(names)


@given(st.lists(tool_like, max_size=6))
def test_the_body_of_a_valid_tool_parses_back_to_the_same_object(items):
    for tool in read(*items)[0]:
        assert json.loads(tool.body) == tool.tool
        assert len(tool.sha256) == 64


@given(json_values)
def test_a_printable_name_is_short_and_has_no_control_characters(value):
    name = printable_name(value)

    assert not any(unicodedata.category(char) in ("Cc", "Cs") for char in name)
    assert name
    assert len(name) <= MAX_NAME * 8 + 1


def test_of_two_tools_with_the_same_name_the_first_is_used():
    """Hostile input 3."""
    tools, rejections = read(
        tool_object("get", description="first"), tool_object("get", description="second")
    )

    assert [tool.tool["description"] for tool in tools] == ["first"]
    assert rejections == [
        Rejection("get", "duplicate name; the first tool with this name is used", storable=False)
    ]


def test_a_malformed_tool_does_not_replace_a_valid_one_with_its_name():
    """Hostile input 3."""
    tools, rejections = read({"name": "get"}, tool_object("get"))

    assert [tool.name for tool in tools] == ["get"]
    assert [rejection.storable for rejection in rejections] == [False]


def test_of_two_malformed_tools_with_the_same_name_one_is_storable():
    """Hostile input 3."""
    _, rejections = read({"name": "get"}, {"name": "get"})

    assert [rejection.storable for rejection in rejections] == [True, False]


@pytest.mark.parametrize("mark", ["\0", "\x07", "\r", "\x1b[2J", "\n", "\x7f", "\x9b", "\ud800"])
def test_a_name_with_control_characters_is_rejected_and_escaped(mark):
    """Hostile input 6."""
    rejection = rejection_of(tool_object(f"get{mark}it"))

    assert rejection.reason == "name contains control characters"
    assert f"⟨U+{ord(mark[0]):04X}⟩" in rejection.name
    assert not rejection.storable


def test_control_characters_in_a_description_are_kept():
    """Hostile input 6: the digest covers the raw text; pages escape it."""
    text = "a\0b\x1b[31mc\rd\x07"

    assert make_remote_tool(description=text).tool["description"] == text
    assert "\0" not in make_remote_tool(description=text).body


@pytest.mark.parametrize(
    ("name", "reason", "printable"),
    [
        (None, "no name", "(no name)"),
        ("", "no name", "(empty)"),
        (7, "no name", "(int)"),
        (["x"], "no name", "(list)"),
        ("x" * 129, "129 characters", "x" * 128 + "…"),
        ("x" * 1_000_000, "1000000 characters", "x" * 128 + "…"),
    ],
)
def test_a_tool_without_a_valid_name_is_rejected(name, reason, printable):
    """Hostile input 7."""
    rejection = rejection_of(tool_object(name))

    assert reason in rejection.reason
    assert rejection.name == printable
    assert not rejection.storable


@pytest.mark.parametrize(
    "name", ["x" * 128, "../../x", "a b", "__proto__", "search_tools", "a\u202eb", "get/{id}"]
)
def test_an_unusual_name_is_kept_unchanged(name):
    """Hostile input 7."""
    assert make_remote_tool(name).name == name


def test_a_description_over_the_limit_is_rejected_and_never_truncated():
    """Hostile input 8."""
    longest = "é" * (16 * 1024)

    assert make_remote_tool(description=longest).tool["description"] == longest
    assert rejection_of(tool_object(description=longest + "x")).reason == (
        "description is over 32 KB"
    )
    assert "over 32 KB" in rejection_of(tool_object(description="x" * 5_000_000)).reason


def test_a_definition_over_the_limit_is_rejected_with_its_size():
    """Hostile inputs 8 and 15: an enum of a million."""
    huge = {"type": "object", "properties": {"a": {"enum": list(range(1_000_000))}}}

    assert rejection_of(tool_object(inputSchema=huge)).reason == (
        "definition is 6727 KB; the limit is 64 KB"
    )


@pytest.mark.parametrize("schema", [None, True, [], "object", {"type": "array"}, {}])
def test_a_tool_without_an_object_schema_is_rejected_but_storable(schema):
    """Hostile input 9."""
    rejection = rejection_of(tool_object("bare", inputSchema=schema))

    assert rejection.reason.startswith("inputSchema must")
    assert rejection.storable


def test_a_tool_without_any_schema_is_rejected():
    """Hostile input 9."""
    assert "missing or null" in rejection_of({"name": "bare"}).reason


@pytest.mark.parametrize("depth", [190, 900, 100_000])
def test_a_tool_nested_too_deep_in_any_field_is_rejected(depth):
    """Hostile input 13."""
    rejection = rejection_of(tool_object(_meta={"deep": nested(depth)}))

    assert rejection.reason == "it is nested deeper than 190 levels"


def test_a_tool_at_the_depth_limit_is_kept():
    assert make_remote_tool(_meta={"deep": nested(188)})


def test_an_output_schema_is_checked():
    """Hostile inputs 9 and 10."""
    bad = {"$ref": "file:///etc/passwd"}

    assert "outputSchema refers to" in rejection_of(tool_object(outputSchema=bad)).reason
    assert make_remote_tool(outputSchema={"type": "array"})


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("description", ["x"], "description is not a string"),
        ("title", 7, "title is not a string"),
        ("annotations", "readOnly", "annotations is not an object"),
        ("_meta", [], "_meta is not an object"),
        ("extra", float("nan"), "it contains a number that JSON cannot represent"),
        ("extra", "\udfff", "it contains invalid Unicode"),
    ],
)
def test_a_field_of_the_wrong_type_rejects_the_tool(field, value, reason):
    """Hostile input 15."""
    assert rejection_of(tool_object(**{field: value})).reason == reason


@pytest.mark.parametrize("item", [None, 7, "tool", [], True, {}])
def test_an_item_that_is_not_a_tool_is_rejected(item):
    assert not rejection_of(item).storable


def test_a_reason_that_quotes_the_server_is_one_printable_line():
    """Hostile input 6."""
    schema = {"type": "object", "properties": {"a": {"type": "\x1b[31m\x9b\0\r\nmore"}}}

    reason = rejection_of(tool_object(inputSchema=schema)).reason

    assert reason.isprintable()


def test_search_text_includes_nested_parameter_names_and_descriptions():
    city = {"type": "string", "description": "Where to look."}
    places = {"type": "array", "items": {"properties": {"street": {"description": "Its name."}}}}
    tool = tool_object(
        "forecast",
        title="Forecast",
        description="Tell the weather.",
        inputSchema={"type": "object", "properties": {"city": city, "places": places}},
    )

    assert search_text(tool).split("\n") == [
        *("forecast", "Forecast", "Tell the weather.", "city", "Where to look."),
        *("places", "street", "Its name."),
    ]
