"""Form fields of a tool trial: scalar arguments; others are available as JSON only."""

from sessions_app.playground import try_tool
from sessions_app.playground.try_tool import Field


def test_scalar_arguments_have_fields_and_others_do_not():
    schema = {
        "properties": {
            "city": {"type": "string", "description": "Where"},
            "days": {"type": "integer"},
            "height": {"type": "number"},
            "deep": {"type": "boolean"},
            "unit": {"type": "string", "enum": ["°C", "°F", None]},
            "where": {"type": "object"},
            "tags": {"type": "array"},
            "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "odd": True,
        },
        "required": ["city", "tags"],
    }
    assert try_tool.form_fields(schema) == [
        Field("city", "text", "Where", True),
        Field("days", "integer", "", False),
        Field("height", "number", "", False),
        Field("deep", "choice", "", False, ("true", "false")),
        Field("unit", "choice", "", False, ('"\\u00b0C"', '"\\u00b0F"', "null")),
    ]


def test_malformed_schemas_have_no_fields_instead_of_an_error():
    assert try_tool.form_fields({}) == []
    assert try_tool.form_fields({"properties": [], "required": 3}) == []
    names = {"\ud800": {"type": "string"}, "a\nb": {"type": "string"}}
    assert try_tool.form_fields({"properties": names}) == []
    many = {f"p{number}": {"type": "string"} for number in range(500)}
    assert len(try_tool.form_fields({"properties": many})) == try_tool.MAX_FIELDS
