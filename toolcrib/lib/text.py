"""Plurals, CSV cells, and detection, escaping and removal of hidden Unicode characters.

Text from servers and agents may contain control, bidirectional and zero-width characters. Pages,
logs, errors and lint warnings all use `is_hidden`.
"""

import unicodedata
from collections.abc import Iterator

from toolcrib.lib.display import group_digits

HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"})
# Letters, marks and symbols by category, but rendered as nothing or as a blank.
_BLANK_GLYPHS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | {
    chr(code) for code in (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
}
FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r", "\n")  # spreadsheets may evaluate these


def plural(count: int, noun: str, plural_noun: str = "") -> str:
    """Return a count with its noun: 1 tool, 1,214 tools. `plural_noun` is for irregular plurals."""
    return f"{group_digits(count)} {noun if count == 1 else plural_noun or noun + 's'}"


def escape_formula(cell: str) -> str:
    """Quote a CSV cell that a spreadsheet would evaluate as a formula."""
    return f"'{cell}" if cell.startswith(FORMULA_PREFIXES) else cell


def is_hidden(char: str) -> bool:
    """Return whether a character is invisible, reorders text or controls a terminal."""
    if " " <= char <= "~":
        return False
    return unicodedata.category(char) in HIDDEN_CATEGORIES or char in _BLANK_GLYPHS


def hidden_characters(text: str) -> set[str]:
    """Return the hidden characters of a text, except those of emoji, line breaks and tabs."""
    return {char for _, char in _hidden_positions(text)}


def remove_hidden(text: str) -> str:
    """Remove hidden characters, except those of emoji, line breaks and tabs.

    Control characters and separators become spaces, so that words stay apart.
    """
    parts, end = [], 0
    for index, char in _hidden_positions(text):
        space = " " if unicodedata.category(char) in ("Cc", "Zl", "Zp") else ""
        parts += [text[end:index], space]
        end = index + 1
    return "".join([*parts, text[end:]]) if parts else text


def _hidden_positions(text: str) -> Iterator[tuple[int, str]]:
    if text.isascii() and text.isprintable():
        return
    suspects = {char for char in set(text) if char not in "\n\r\t" and is_hidden(char)}
    if not suspects:
        return
    for index, char in enumerate(text):
        if char in suspects and not _joins(text, index):
            yield index, char


def _joins(text: str, index: int) -> bool:
    """Return whether a character selects or joins emoji, or joins letters as some scripts need."""
    char, before, after = text[index], text[index - 1 : index], text[index + 1 : index + 2]
    if char == "\ufe0f":
        return _category(before) == "So" or after == "\u20e3"
    if char == "\u200d" and (before == "\ufe0f" or _category(before) in ("So", "Sk")):
        return _category(after) == "So"
    if char in "\u200c\u200d":
        return {_category(before), _category(after)} <= {"Lo", "Mn", "Mc"}
    return False


def _category(char: str) -> str:
    return unicodedata.category(char) if char else ""


def escape_hidden(text: str, keep: str = "") -> str:
    """Escape hidden characters as ⟨U+202E⟩, except those in `keep`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_code_point(c) if c not in keep and is_hidden(c) else c for c in text)


def escape_ambiguous(text: str) -> str:
    """Escape every character that could be mistaken for another, for text a person confirms.

    Besides hidden characters: blanks other than the space, and the opening bracket of the escape
    itself, with which a text could imitate an escape.
    """
    return "".join(
        _code_point(c) if is_hidden(c) or is_odd_space(c) or c == "⟨" else c for c in text
    )


def is_odd_space(char: str) -> bool:
    return char != " " and unicodedata.category(char) == "Zs"


def _code_point(char: str) -> str:
    return f"⟨U+{ord(char):04X}⟩"
