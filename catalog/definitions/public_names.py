"""Public names of tools: safe for every provider, stable, never two the same. Pure."""

import hashlib
import re
import unicodedata
from collections.abc import Collection, Iterable

LONGEST = 64
UNSAFE = re.compile(r"[^a-zA-Z0-9_-]")
META_TOOLS = frozenset(
    {
        "search_tools",
        "load_tools",
        "get_tool_details",
        "deferred_tool_call",
        "tool_search",
        "tool_search_regex",
        "call_tool",
    }
)
# Letters of other scripts that pass for Latin ones in common fonts.
LOOKALIKES = str.maketrans(
    "аеорсухіјѕһԁԛԝьклмтнвзгпαοерχυιν",
    "aeopcyxijshdqwbklmthb3rnaoepxuiv",
)


def public_name(slug: str, name: str, *, hashed: bool = False) -> str:
    """Join slug and name into a safe name; `hashed` breaks a tie, as does being too long."""
    safe = UNSAFE.sub("_", name)
    full = f"{slug}__{safe}" if slug else safe
    if len(full) <= LONGEST and not hashed:
        return full
    tail = "_" + hashlib.sha256(f"{slug}\0{name}".encode()).hexdigest()[:8]
    return full[: LONGEST - len(tail)] + tail


def public_names(slug: str, names: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """Name tools that are new, whatever order they came in.

    A name that needs no change goes first, so `a_b` keeps its own and `a.b` is told apart.
    """
    used = set(taken) | META_TOOLS
    chosen: dict[str, str] = {}
    for name in sorted(set(names), key=lambda name: (bool(UNSAFE.search(name)), name)):
        full, tries = public_name(slug, name), 0
        while full in used:
            # A hash can be guessed, and the name it makes be taken on purpose: hash again.
            full, tries = public_name(slug, name + "\0" * tries, hashed=True), tries + 1
        used.add(full)
        chosen[name] = full
    return chosen


def skeleton(name: str) -> str:
    """Reduce a name to how it looks, so that lookalikes meet."""
    return unicodedata.normalize("NFKC", name).casefold().translate(LOOKALIKES)
