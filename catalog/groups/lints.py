"""Advice on how tools and groups are named and described. Pure.

Advice, never a gate: each lint names its subject and says what to do. Where a rule could be wrong
about a text it stays silent, since a list of false alarms is read by nobody.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

MOST_PRELOADS = 5  # of one server; two or three serve most runs
MOST_TOOLS = 10  # of a group
FEWEST_WORDS = 3
SHOWN = 3  # examples in a sentence


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that open a description and are never its verb.
NO_VERBS = _words(
    """a an the this that these those it its you your we our i he she they there here
    one two three four some any all every each no both
    for from in into on of to with without by at as about between during via using per
    if when whenever while once only note warning important deprecated please
    tool tools utility function helper method endpoint api service server plugin wrapper mcp
    not never and or but also just new other most more
    is are was were be been being has have had can could may might must should shall would will
    """
)
# Endings of nouns and adjectives that no verb of a description has.
NOUN_ENDING = re.compile(
    r".{3,}(?:tion|tions|ssion|ssions|ness|ity|ities|ism|ology|ical|able|ible|ful|ous|ware)"
)
# Verbs and verb-like words of those endings.
VERB_AFTER_ALL = _words(
    """mention question position partition transition condition function auction caption caution
    ration section station portion proportion commission permission provision envision
    enable disable cable table apply reply supply multiply comply rely fly
    """
)
# First words of names that say what a tool does; the words after them are what it does it to.
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
# Words that carry no meaning to search by.
EMPTY = NO_VERBS | _words(
    """up down out off over back then than so do does did given specific specified current
    returns return get gets use used allow allows provide provides
    """
)
WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
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
    """One piece of advice: a stable code, what it is about, and what to do."""

    code: str
    subject: str
    sentence: str


@dataclass(frozen=True)
class GroupFacts:
    """What the advice on a group looks at."""

    group_id: str
    description: str
    tools: int  # that agents get
    preloads: Mapping[str, int]  # by server
    names: Mapping[str, Sequence[str]]  # the servers' own names of tools, by server


# --- Tools --------------------------------------------------------------------------------------


@lru_cache(maxsize=20_000)
def of_tool(name: str, original_name: str, description: str) -> Sequence[Lint]:
    """Advise on one tool: its public name, the server's own name, the text agents read."""
    words = WORD.findall(description)
    if not words:
        text = f"{name} has no description: agents find it by its name alone. Write one for it."
        return [Lint("description_missing", name, text)]
    # Some scripts write without spaces: nothing is said of the length there.
    if len(words) < FEWEST_WORDS and description.isascii():
        text = (
            f"{name} is described in {len(words)} word{'' if len(words) == 1 else 's'}. "
            "Say what it does, to what, and when to use it."
        )
        return [Lint("description_short", name, text)]
    found = []
    if not starts_with_verb(original_name, description):
        text = (
            f"The description of {name} starts with {words[0][:40]!r}. "
            "Start it with a verb that says what the tool does, such as Search, Create or Return."
        )
        found.append(Lint("description_verb", name, text))
    if not content(description) - content(" ".join(name_words(original_name))):
        text = (
            f"The description of {name} has no word that its name lacks. "
            "Add the words people search for: synonyms, what it is used for, what it returns."
        )
        found.append(Lint("synonyms", name, text))
    return found


def starts_with_verb(original_name: str, description: str) -> bool:
    """Whether a description may start with a verb: false only where the first word cannot be one.

    That is an article, pronoun or the like, a word with a noun's ending, a gerund, or the thing in
    the tool's name, as in get_forecast, "Forecast for a city".
    """
    words = [word.lower() for word in WORD.findall(description)]
    adverb = len(words) > 1 and words[0].endswith("ly") and words[0] not in VERB_AFTER_ALL
    first = words[1 if adverb else 0]
    if not first.isascii():
        return True
    if first in NO_VERBS or first.isdigit():
        return False
    if first not in VERB_AFTER_ALL and NOUN_ENDING.fullmatch(first):
        return False
    if first.endswith("ing") and len(first) > 5 and first != "bring":
        return False
    called, *things = name_words(original_name) or [""]
    return not (called in NAME_VERBS and first in things and first not in NAME_VERBS)


def name_words(name: str) -> list[str]:
    """Split an identifier into its words: getUserById, get_user-by.id."""
    return [word.lower() for part in WORD.findall(name) for word in HUMP.split(part) if word]


def content(text: str) -> set[str]:
    """Return the words that carry meaning, without their commonest endings."""
    words = (word.lower() for word in WORD.findall(text))
    return {_stem(word) for word in words if word not in EMPTY and not word.isdigit()}


def _stem(word: str) -> str:
    for ending in ("ies", "es", "s", "ing", "ed"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)] + ("y" if ending == "ies" else "")
            break
    return word.rstrip("e") if len(word) > 3 else word


# --- Groups and servers -------------------------------------------------------------------------


def of_group(facts: GroupFacts) -> list[Lint]:
    name, found = facts.group_id, []
    if not facts.description.strip():
        text = (
            f"{name} has no description. "
            "Say in one line what its tools are for: agents choose by it."
        )
        found.append(Lint("group_description", name, text))
    if facts.tools > MOST_TOOLS:
        text = (
            f"{name} has {facts.tools:,} tools. Agents choose better among at most {MOST_TOOLS}: "
            "split it by task, or hold the tools that nobody needs."
        )
        found.append(Lint("group_size", name, text))
    for server, number in sorted(facts.preloads.items()):
        found += of_preloads(name, server, number)
    for server, names in sorted(facts.names.items()):
        found += of_names(server, names)
    return found


def of_preloads(subject: str, server: str, number: int) -> list[Lint]:
    if number <= MOST_PRELOADS:
        return []
    text = (
        f"{subject} preloads {number:,} tools of {server or 'your own'}, and every session pays "
        "for them. Preload the two or three that most runs use, and leave the others on demand."
    )
    return [Lint("preloads", subject, text)]


def of_names(server: str, names: Sequence[str]) -> list[Lint]:
    """Advise where one server names its tools in several conventions. One word fits each."""
    kinds = {name: convention(name) for name in names}
    counts = Counter(kind for kind in kinds.values() if kind)
    if len(counts) < 2:
        return []
    usual, _ = min(counts.items(), key=lambda item: (-item[1], item[0]))
    odd = sorted(name for name, kind in kinds.items() if kind not in ("", usual))
    shown = ", ".join(name[:64] for name in odd[:SHOWN]) + (", …" if len(odd) > SHOWN else "")
    text = (
        f"{server or 'Custom tools'}: most names are in {usual}, and {len(odd):,} "
        f"{'is' if len(odd) == 1 else 'are'} not ({shown}). Agents guess names by pattern: "
        "ask for one convention, or give the odd ones a description that spells them out."
    )
    return [Lint("names_mixed", server, text)]


@lru_cache(maxsize=50_000)
def convention(name: str) -> str:
    """Name the convention of an identifier; empty for one plain word, which fits all of them."""
    if ONE_WORD.fullmatch(name):
        return ""
    found = (kind for kind, pattern in CONVENTIONS.items() if pattern.fullmatch(name))
    return next(found, "no convention")
