"""Lint rules for names and descriptions of tools and groups. Pure.

Lints are warnings and block nothing. Each names its subject and recommends a change. A rule that
could be wrong about a text reports nothing: users ignore a list with false positives.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from toolcrib.lib.text import plural

MAX_PRELOADS_PER_SERVER = 5  # two or three are enough for most sessions
MAX_TOOLS_PER_GROUP = 10
MIN_DESCRIPTION_WORDS = 3
MAX_EXAMPLES = 3  # per sentence


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# First words of descriptions that are never verbs.
NON_VERBS = _words(
    """a an the this that these those it its you your we our i he she they there here
    one two three four some any all every each no both
    for from in into on of to with without by at as about between during via using per
    if when whenever while once only note warning important deprecated please
    tool tools utility function helper method endpoint api service server plugin wrapper mcp
    not never and or but also just new other most more
    is are was were be been being has have had can could may might must should shall would will
    """
)
# Suffixes of nouns and adjectives that verbs do not have.
NOUN_SUFFIX = re.compile(
    r".{3,}(?:tion|tions|ssion|ssions|ness|ity|ities|ism|ology|ical|able|ible|ful|ous|ware)"
)
# Verbs and verb-like words with one of these suffixes.
VERB_EXCEPTIONS = _words(
    """mention question position partition transition condition function auction caption caution
    ration section station portion proportion commission permission provision envision
    enable disable cable table apply reply supply multiply comply rely fly
    """
)
# Verbs that start tool names; the words after them are the object.
NAME_VERBS = _words(
    """add analyze append apply approve archive assign calculate call cancel change check clear
    clone close compare compute connect convert copy count create decode delete deploy describe
    detect disable download edit enable encode execute export extract fetch filter find format
    generate get import insert install invoke list load lookup make merge modify move open parse
    pause post predict publish pull push put query read record remove rename render replace reset
    resolve restart resume retrieve review run save scan schedule search select send set share show
    solve sort split start stop store submit subscribe summarize sync test toggle transfer translate
    trigger update upload validate verify view watch write
    """
)
# Words that are useless as search terms.
STOP_WORDS = NON_VERBS | _words(
    """up down out off over back then than so do does did given specific specified current
    returns return get gets use used allow allows provide provides
    """
)
WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
CASE_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
CONVENTIONS = {
    "snake_case": re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)+"),
    "kebab-case": re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)+"),
    "camelCase": re.compile(r"[a-z][a-z0-9]*(?:[A-Z][a-z0-9]*)+"),
    "PascalCase": re.compile(r"(?:[A-Z][a-z0-9]+){2,}"),
    "dot.case": re.compile(r"[a-z0-9]+(?:\.[a-z0-9]+)+"),
}
ONE_WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class Lint:
    """One warning: a stable code, its subject, and a sentence with the recommended change."""

    code: str
    subject: str
    sentence: str


@lru_cache(maxsize=20_000)
def lint_tool(name: str, original_name: str, description: str) -> Sequence[Lint]:
    words = WORD.findall(description)
    if not words:
        text = f"{name} has no description: agents can find it only by name. Add a description."
        return [Lint("description_missing", name, text)]
    # Words cannot be counted in scripts without spaces.
    if len(words) < MIN_DESCRIPTION_WORDS and description.isascii():
        text = (
            f"The description of {name} has {plural(len(words), 'word')}. "
            "Describe what the tool does, what it acts on, and when to use it."
        )
        return [Lint("description_short", name, text)]
    warnings = []
    if not starts_with_verb(original_name, description):
        text = (
            f"The description of {name} starts with {words[0][:40]!r}. "
            "Start it with a verb, such as Search, Create or Return."
        )
        warnings.append(Lint("description_verb", name, text))
    if not content_words(description) - content_words(" ".join(name_words(original_name))):
        text = (
            f"The description of {name} only repeats words of its name. "
            "Add search terms: synonyms, use cases, and what it returns."
        )
        warnings.append(Lint("synonyms", name, text))
    return warnings


def starts_with_verb(original_name: str, description: str) -> bool:
    """Return False only if the first word of a description cannot be a verb.

    Such words are articles and pronouns, words with a noun suffix, gerunds, and the object in the
    tool's name, as in get_forecast, "Forecast for a city".
    """
    words = [word.lower() for word in WORD.findall(description)]
    adverb = len(words) > 1 and words[0].endswith("ly") and words[0] not in VERB_EXCEPTIONS
    first = words[1 if adverb else 0]
    if not first.isascii():
        return True
    if first in NON_VERBS or first.isdigit():
        return False
    if first not in VERB_EXCEPTIONS and NOUN_SUFFIX.fullmatch(first):
        return False
    if first.endswith("ing") and len(first) > 5 and first != "bring":
        return False
    verb, *objects = name_words(original_name) or [""]
    return not (verb in NAME_VERBS and first in objects and first not in NAME_VERBS)


def name_words(name: str) -> list[str]:
    """Split an identifier into its words: getUserById, get_user-by.id."""
    return [
        word.lower() for part in WORD.findall(name) for word in CASE_BOUNDARY.split(part) if word
    ]


def content_words(text: str) -> set[str]:
    words = (word.lower() for word in WORD.findall(text))
    return {_stem(word) for word in words if word not in STOP_WORDS and not word.isdigit()}


def _stem(word: str) -> str:
    for suffix in ("ies", "es", "s", "ing", "ed"):
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            word = word[: -len(suffix)] + ("y" if suffix == "ies" else "")
            break
    return word.rstrip("e") if len(word) > 3 else word


def lint_group(
    group_id: str,
    description: str,
    preloads: Mapping[str, int],
    names: Mapping[str, Sequence[str]],
) -> list[Lint]:
    """Lint a group by its preloads and the original names of its available tools, by server."""
    warnings = []
    if not description.strip():
        text = (
            f"{group_id} has no description. "
            "Describe its purpose in one line: agents choose groups by it."
        )
        warnings.append(Lint("group_description", group_id, text))
    tools = sum(map(len, names.values()))
    if tools > MAX_TOOLS_PER_GROUP:
        text = (
            f"{group_id} has {tools:,} tools. "
            f"Agents choose better among at most {MAX_TOOLS_PER_GROUP}: "
            "split the group by task, or hide unused tools."
        )
        warnings.append(Lint("group_size", group_id, text))
    for server, count in sorted(preloads.items()):
        if count > MAX_PRELOADS_PER_SERVER:
            text = (
                f"{group_id} preloads {count:,} tools of {server or 'your own'} in every session. "
                "Preload the two or three most used, and set the others to on demand."
            )
            warnings.append(Lint("preloads", group_id, text))
    for server, original_names in sorted(names.items()):
        warnings += lint_names(server, original_names)
    return warnings


def lint_names(server: str, names: Sequence[str]) -> list[Lint]:
    """Lint the names of one server for mixed conventions. A single word fits all of them."""
    kinds = {name: naming_convention(name) for name in names}
    counts = Counter(kind for kind in kinds.values() if kind)
    if len(counts) < 2:
        return []
    usual, _ = min(counts.items(), key=lambda item: (-item[1], item[0]))
    odd = sorted(name for name, kind in kinds.items() if kind not in ("", usual))
    examples = ", ".join(name[:64] for name in odd[:MAX_EXAMPLES])
    examples += ", …" if len(odd) > MAX_EXAMPLES else ""
    text = (
        f"{server or 'Custom tools'}: most names use {usual}, {len(odd):,} "
        f"{'does' if len(odd) == 1 else 'do'} not ({examples}). Agents guess names by pattern: "
        "use one convention, or repeat the exact name in the description."
    )
    return [Lint("names_mixed", server, text)]


@lru_cache(maxsize=50_000)
def naming_convention(name: str) -> str:
    """Return the naming convention of an identifier; empty for a single lower-case word."""
    if ONE_WORD.fullmatch(name):
        return ""
    matches = (kind for kind, pattern in CONVENTIONS.items() if pattern.fullmatch(name))
    return next(matches, "no convention")
