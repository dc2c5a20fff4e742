"""`extract` of scripts: bound to a function of the deployment, or not; its answer is validated."""

import pytest

from tests.sessions_app.scripts.conftest import result

HERE = "tests.sessions_app.scripts.test_extraction"
CITY = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'


def first_word(value, schema):
    if schema["type"] == "integer":
        return len(value)
    return {"city": value.split()[0]} if schema["type"] == "object" else value.split()[0]


async def slowly(value, schema):
    return first_word(value, schema)


def broken(value, schema):
    raise ValueError("a secret of the deployment")


def of_another_type(value, schema):
    return {"city": 7}


@pytest.mark.parametrize("function", ["first_word", "slowly"])
@pytest.mark.parametrize(
    ("type_", "wanted"),
    [("str", "Oslo"), ("int", 10), ("'string'", "Oslo"), (CITY, {"city": "Oslo"})],
)
def test_a_bound_function_gets_the_value_and_a_schema(script, settings, function, type_, wanted):
    settings.EXTRACT = f"{HERE}.{function}"
    text = result("Oslo, Norw".replace(",", ""), None)
    code = f"found = await raw.say(result={text!r})\nawait extract(found + 'x', {type_})"
    assert script(code)["result"] == wanted


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("", "await extract('x', str)", "binds no model"),
        ("broken", "await extract('x', str)", "extract failed"),
        ("missing", "await extract('x', str)", "extract failed"),
        ("of_another_type", f"await extract('x', {CITY})", "not of the type"),
        ("first_word", "await extract('x', type='city')", "a value and a type"),
        ("first_word", "await extract('x', {'type': 'nothing'})", "not a valid JSON Schema"),
    ],
)
def test_what_cannot_be_extracted_raises_and_can_be_caught(script, settings, function, code, words):
    settings.EXTRACT = f"{HERE}.{function}" if function else ""
    answer = script(f"try:\n    {code}\nexcept RuntimeError as error:\n    print(error)\n'on'")
    assert answer["result"] == "on"
    assert words in answer["logs"]
    assert "a secret of the deployment" not in str(answer)
