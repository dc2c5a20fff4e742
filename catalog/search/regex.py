"""Search by pattern: RE2, never `re`. Pure.

RE2 never backtracks, yet a pattern with many states can cost a million steps a text: patterns
are bounded by length, by size once compiled, and by the processor time one search may take.
"""

import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import re2

from toolcrib.lib.errors import Invalid

MAX_PATTERN_LENGTH = 200
PATTERN_MEMORY = 1 << 20
LARGEST_PATTERN = 1_000
# A plain pattern takes 6 µs a tool; these end one that takes ten times as long.
SECONDS_PER_SEARCH = 0.25
SECONDS_PER_TOOL = 0.000_06

Texts = tuple[bytes, bytes, bytes]  # public name, own name, description


def matches(
    pattern: str, texts: Sequence[Texts], among: Iterable[int]
) -> dict[int, tuple[str, ...]]:
    """Return which of the texts a pattern matches, and in which fields."""
    expression = compiled(pattern)
    deadline = time.thread_time() + SECONDS_PER_SEARCH + SECONDS_PER_TOOL * len(texts)
    found = {}
    for position in among:
        fields = _fields(expression, texts[position])
        if fields:
            found[position] = fields
        if time.thread_time() > deadline:
            raise _bad_pattern("The pattern takes too long to match the descriptions here.")
    return found


def _fields(expression: Any, texts: Texts) -> tuple[str, ...]:
    name, original_name, description = (expression.search(text) is not None for text in texts)
    return (
        *(["name"] if name or original_name else []),
        *(["description"] if description else []),
    )


def compiled(pattern: str) -> Any:
    """Compile with RE2, or say which part of the pattern it cannot take."""
    if not pattern:
        raise Invalid(
            "There is no pattern to search for.",
            hint="Give `pattern` a regular expression, for example `create_.*`.",
        )
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise _bad_pattern(
            f"The pattern has {len(pattern)} characters; at most {MAX_PATTERN_LENGTH} are allowed."
        )
    options = re2.Options()
    options.max_mem = PATTERN_MEMORY
    options.case_sensitive = False
    options.never_capture = True
    options.log_errors = False
    try:
        compiled = re2.compile(pattern.encode(), options)
    except UnicodeEncodeError:
        raise _bad_pattern("The pattern is not valid Unicode: it holds half a character.") from None
    except re2.error as error:
        said = error.args[0]
        reason = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
        raise _bad_pattern(_explain(reason, pattern)) from None
    if compiled.programsize > LARGEST_PATTERN:
        raise _bad_pattern(
            "The pattern repeats too much: written out it has"
            f" {compiled.programsize} steps, and at most {LARGEST_PATTERN} are allowed."
        )
    return compiled


def _explain(reason: str, pattern: str) -> str:
    """Turn what RE2 said into a sentence that names the feature."""
    what, _, part = reason.partition(": ")
    if part in ("(?=", "(?!"):
        return f"Look-ahead, {part}…), is not supported."
    if part in ("(?<=", "(?<!"):
        return f"Look-behind, {part}…), is not supported."
    if re.fullmatch(r"\\[1-9k]", part) or (part == "(?P" and "(?P=" in pattern):
        return "Back-references are not supported."
    if what == "invalid perl operator":
        return f"A group that starts with {part} is not supported."
    if what == "invalid escape sequence":
        return f"The escape {part} is not supported."
    if what == "invalid repetition size":
        return f"The repetition {part} is too large: at most 1000 in all."
    if what == "bad repetition operator":
        return f"A repetition of a repetition, {part}, is not supported."
    if what.startswith("pattern too large"):
        return "The pattern repeats too much: written out it is too large."
    return f"The pattern is not a regular expression: {reason}."


def _bad_pattern(message: str) -> Invalid:
    return Invalid(
        message,
        code="invalid_pattern",
        status=400,
        hint="Patterns are RE2: simplify it, or search with the words of a query instead.",
    )
