"""Source code of scripts: numbered lines whose spans add up to the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sessions_app.review.source_code import highlight

PYTHON = '''# find it
rows = await logs.search(query="error \\"x\\"", limit=10)
note = """two
lines"""
for row in rows: pass'''
TYPESCRIPT = """/* two
lines */ const n = 0x1F; // end
const text = `a ${n}
b`; return 'it\\'s';"""


def spans_of(code, language, kind):
    return [text for line in highlight(code, language) for name, text in line.spans if name == kind]


def test_python_is_highlighted():
    assert spans_of(PYTHON, "python", "comment") == ["# find it"]
    assert spans_of(PYTHON, "python", "string") == ['"error \\"x\\""', '"""two', 'lines"""']
    assert spans_of(PYTHON, "python", "keyword") == ["await", "for", "in", "pass"]
    assert spans_of(PYTHON, "python", "number") == ["10"]


def test_typescript_is_highlighted():
    assert spans_of(TYPESCRIPT, "typescript", "comment") == ["/* two", "lines */", "// end"]
    assert spans_of(TYPESCRIPT, "typescript", "string") == ["`a ${n}", "b`", "'it\\'s'"]
    assert spans_of(TYPESCRIPT, "typescript", "keyword") == ["const", "const", "return"]
    assert spans_of(TYPESCRIPT, "typescript", "number") == ["0x1F"]


def test_lines_are_numbered_and_the_failing_one_is_marked():
    lines = highlight("a = 1\r\n\nb = 2\n", "python", failing_line=3)
    assert [(line.number, line.text, line.is_failing) for line in lines] == [
        (1, "a = 1", False),
        (2, "", False),
        (3, "b = 2", True),
    ]


def test_an_unfinished_string_ends_with_its_line():
    assert spans_of("a = 'open\nreturn 1", "python", "keyword") == ["return"]


@pytest.mark.parametrize("language", ["python", "typescript", "other"])
@given(text=st.text(alphabet="ab\"'`#/*\\\n 1_é", max_size=60))
def test_no_character_is_lost(language, text):
    lines = highlight(text, language)
    assert "\n".join(line.text for line in lines) == text.removesuffix("\n")
