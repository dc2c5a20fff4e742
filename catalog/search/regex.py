"""Regular-expression search with RE2, never `re`. Pure.

RE2 does not backtrack, but a pattern with many states can take a million steps per text. Patterns
are therefore limited in length, in compiled size and in the CPU time of one search.
"""

import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import re2

from toolcrib.lib.errors import Invalid

MAX_PATTERN_LENGTH = 200
MAX_PATTERN_MEMORY = 1 << 20
MAX_PROGRAM_SIZE = 1_000
# A simple pattern takes 6 µs per tool; these limits stop one that takes ten times as long.
SECONDS_PER_SEARCH = 0.25
SECONDS_PER_TOOL = 0.000_06

Texts = tuple[bytes, bytes, bytes]  # public name, own name, description


def match_pattern(
    pattern: str, texts: Sequence[Texts], positions: Iterable[int]
) -> dict[int, tuple[str, ...]]:
    """Return the positions of the texts a pattern matches, each with the matching fields."""
    expression = compile_pattern(pattern)
    deadline = time.thread_time() + SECONDS_PER_SEARCH + SECONDS_PER_TOOL * len(texts)
    matches = {}
    for position in positions:
        found = [expression.search(text) is not None for text in texts[position]]
        if any(found):
            fields = {"name": any(found[:2]), "description": found[2]}
            matches[position] = tuple(name for name in fields if fields[name])
        if time.thread_time() > deadline:
            raise _bad_pattern("The pattern takes too long to match.")
    return matches


def compile_pattern(pattern: str) -> Any:
    """Compile a pattern with RE2, or raise Invalid naming the unsupported part."""
    if not pattern:
        raise Invalid(
            "The pattern is empty.",
            hint="Set `pattern` to a regular expression, for example `create_.*`.",
        )
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise _bad_pattern(
            f"The pattern has {len(pattern)} characters; at most {MAX_PATTERN_LENGTH} are allowed."
        )
    options = re2.Options()
    options.max_mem = MAX_PATTERN_MEMORY
    options.case_sensitive = False
    options.never_capture = True
    options.log_errors = False
    try:
        compiled = re2.compile(pattern.encode(), options)
    except UnicodeEncodeError:
        raise _bad_pattern(
            "The pattern is not valid Unicode: it has an unpaired surrogate."
        ) from None
    except re2.error as error:
        message = error.args[0]
        reason = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
        raise _bad_pattern(_explain(reason, pattern)) from None
    if compiled.programsize > MAX_PROGRAM_SIZE:
        raise _bad_pattern(
            "The pattern repeats too much: compiled, it has"
            f" {compiled.programsize} instructions; at most {MAX_PROGRAM_SIZE} are allowed."
        )
    return compiled


def _explain(reason: str, pattern: str) -> str:
    """Turn an error message of RE2 into a sentence that names the feature."""
    what, _, part = reason.partition(": ")
    if part in ("(?=", "(?!"):
        return f"Look-ahead, {part}…), is not supported."
    if part in ("(?<=", "(?<!"):
        return f"Look-behind, {part}…), is not supported."
    if re.fullmatch(r"\\[1-9k]", part) or (part == "(?P" and "(?P=" in pattern):
        return "Back-references are not supported."
    if what.startswith("pattern too large"):
        return "The pattern repeats too much: compiled, it is too large."
    explanations = {
        "invalid perl operator": f"A group that starts with {part} is not supported.",
        "invalid escape sequence": f"The escape {part} is not supported.",
        "invalid repetition size": f"The repetition {part} is too large: at most 1000 in all.",
        "bad repetition operator": f"A repetition of a repetition, {part}, is not supported.",
    }
    return explanations.get(what, f"The pattern is not a valid regular expression: {reason}.")


def _bad_pattern(message: str) -> Invalid:
    return Invalid(
        message,
        code="invalid_pattern",
        status=400,
        hint="Patterns use RE2 syntax. Simplify the pattern, or search with `query` instead.",
    )
