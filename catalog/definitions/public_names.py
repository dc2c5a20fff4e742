"""Public tool names: valid for every provider, stable and unique. Pure."""

import hashlib
import re
import unicodedata
from collections.abc import Collection, Iterable

MAX_LENGTH = 64
UNSAFE_CHARACTER = re.compile(r"[^a-zA-Z0-9_-]")
META_TOOLS = frozenset(
    {
        "search_tools",
        "load_tools",
        "get_tool_details",
        "call_read_only_tool",
        "deferred_tool_call",
        "check_call",
        "run_script",
        "tool_search",
        "tool_search_regex",
        "call_tool",
    }
)
# Homoglyphs: letters of other scripts that look Latin in common fonts.
HOMOGLYPHS = str.maketrans(
    "аеорсухіјѕһԁԛԝьклмтнвзгпαοерχυιν",
    "aeopcyxijshdqwbklmthb3rnaoepxuiv",
)


def public_name(slug: str, name: str, *, hashed: bool = False) -> str:
    """Join slug and name; append a hash if `hashed` (name taken) or if the name is too long."""
    safe = UNSAFE_CHARACTER.sub("_", name)
    full = f"{slug}__{safe}" if slug else safe
    if len(full) <= MAX_LENGTH and not hashed:
        return full
    suffix = "_" + hashlib.sha256(f"{slug}\0{name}".encode()).hexdigest()[:8]
    return full[: MAX_LENGTH - len(suffix)] + suffix


def public_names(slug: str, names: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """Assign public names, whatever the order: `a_b` keeps its name and `a.b` gets a hash."""
    used = set(taken) | META_TOOLS
    chosen: dict[str, str] = {}
    for name in sorted(set(names), key=lambda name: (bool(UNSAFE_CHARACTER.search(name)), name)):
        full, attempts = public_name(slug, name), 0
        while full in used:
            # The hash is predictable, so a server may occupy the name on purpose: hash again.
            full = public_name(slug, name + "\0" * attempts, hashed=True)
            attempts += 1
        used.add(full)
        chosen[name] = full
    return chosen


def skeleton(name: str) -> str:
    """Normalize a name by its appearance, so that lookalikes compare equal."""
    return unicodedata.normalize("NFKC", name).casefold().translate(HOMOGLYPHS)
