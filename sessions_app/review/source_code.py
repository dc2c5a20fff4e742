"""Source code of scripts as numbered lines of highlighted spans. Pure.

Spans are plain text with a kind, which templates escape and set a class for.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

Spans = list[tuple[str, str]]  # (kind, text); kind is "" or a class of static/css/sessions.css

_WORDS = {
    "python": (
        "and as assert async await break class continue def del elif else except False finally for "
        "from global if import in is lambda None nonlocal not or pass raise return True try while "
        "with yield"
    ),
    "typescript": (
        "any as async await boolean break case catch class const continue default delete do else "
        "export extends false finally for from function if import in instanceof interface let new "
        "null number of return string switch this throw true try type typeof undefined unknown "
        "var void while yield"
    ),
}
KEYWORDS = {language: frozenset(words.split()) for language, words in _WORDS.items()}
# An unfinished string or comment ends with the line, or with the text if it may have several.
PATTERNS = {
    "python": re.compile(
        r"(?P<comment>#[^\n]*)"
        r"|(?P<string>[bBfFrRuU]{0,2}(?:\"\"\"(?s:.)*?(?:\"\"\"|\Z)|'''(?s:.)*?(?:'''|\Z)"
        r"|\"(?:[^\"\\\n]|\\.)*\"?|'(?:[^'\\\n]|\\.)*'?))"
        r"|(?P<number>\b\d[\w.]*)"
        r"|(?P<word>[^\W\d]\w*)"
    ),
    "typescript": re.compile(
        r"(?P<comment>//[^\n]*|/\*(?s:.)*?(?:\*/|\Z))"
        r"|(?P<string>`(?:[^`\\]|\\(?s:.))*(?:`|\Z)|\"(?:[^\"\\\n]|\\.)*\"?|'(?:[^'\\\n]|\\.)*'?)"
        r"|(?P<number>\b\d[\w.]*)"
        r"|(?P<word>[^\W\d]\w*)"
    ),
}


@dataclass(frozen=True)
class SourceLine:
    """One line of a script. `is_failing` marks the line of the error that ended it."""

    number: int
    spans: Spans
    is_failing: bool = False

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.spans)


def highlight(code: str, language: str, failing_line: int | None = None) -> list[SourceLine]:
    """Return the lines of a script with comments, strings, numbers and keywords marked."""
    lines: list[Spans] = [[]]
    for kind, text in _tokens(code.replace("\r\n", "\n"), language):
        for index, part in enumerate(text.split("\n")):
            if index:
                lines.append([])
            if part:
                lines[-1].append((kind, part))
    if len(lines) > 1 and not lines[-1]:  # after the last line break
        lines.pop()
    return [
        SourceLine(number, spans, number == failing_line) for number, spans in enumerate(lines, 1)
    ]


def _tokens(code: str, language: str) -> Iterator[tuple[str, str]]:
    """Yield the whole text in order, as (kind, text)."""
    end, keywords = 0, KEYWORDS.get(language, frozenset())
    for match in PATTERNS.get(language, PATTERNS["python"]).finditer(code):
        kind = str(match.lastgroup)
        if kind == "word":
            if match[0] not in keywords:
                continue
            kind = "keyword"
        if match.start() > end:
            yield "", code[end : match.start()]
        yield kind, match[0]
        end = match.end()
    if end < len(code):
        yield "", code[end:]
