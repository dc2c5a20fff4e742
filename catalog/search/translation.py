"""Everyday words of Spanish, German, French and Chinese, and what they are in English. Pure.

Tools are described in English and the model has read English, so a query in another language
would find little. Where enough of its words are known here it is read word by word: what holds
the sentence together falls away, names and numbers stay. An English query is never touched:
words that English has too do not count towards another language.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from catalog.search.tokenizer import fold

TABLE = Path(__file__).with_name("glossary.txt")
ENOUGH = 1 / 3  # of a query's words, or of its characters where no spaces are written
FILLER = "-"
JOINING = (("and",), ("then",))  # fillers that part a query into clauses
ENGLISH_TOO = "="
GERMAN = 1  # of the columns
SHORTEST_PART = 4  # letters of a word within another
CHINESE = re.compile("[\u3400-\u9fff]+")
KANA = re.compile("[\u3040-\u30ff]")  # Japanese: other words in the same characters
QUOTE = re.compile("['\u2019]")
LETTERS = r"[^\W\d_]+"
BEFORE, AFTER = r"(?<![\w./@\\])", r"(?![\w/@\\]|\.\w)"  # no part of a path or an address
# What a word of the table may end in instead, by language: more of it, or other forms of a verb.
NOUNS = (("s", "es"), ("n", "en", "e", "s", "es", "er"), ("s", "x", "e", "es"))
VERBS = (
    {"ar": "a e o as an en ame ando ado", "er": "e o es en iendo ido", "ir": "e o es en iendo ido"},
    {"en": "e t st end", "ern": "ere ert", "eln": "le elt"},
    {"er": "e es ez ons ent ant é", "ir": "is it issez", "re": "s ez"},
)
LINKS = ("", "s", "n", "en", "es")

Meant = tuple[str, ...] | None


@dataclass(frozen=True)
class Reading:
    """A query read in English, bit by bit."""

    text: str = ""
    origin: dict[str, str] = field(default_factory=dict)  # of each English word: what stood there
    dropped: set[str] = field(default_factory=set)  # what only held the sentence together

    def word(self, spelled: str, meant: tuple[str, ...], held: Callable[[str], bool]) -> str:
        """Note what a word means and return it."""
        chosen = next(filter(held, meant), meant[0] if meant else "")
        if not chosen or meant in JOINING:
            self.dropped.add(spelled)
        else:
            self.origin.update(dict.fromkeys(chosen.split(), spelled))
        return chosen

    def whole(self, text: str) -> "Reading | None":
        text = " ".join(QUOTE.sub(" ", text).split())
        return Reading(text, self.origin, self.dropped) if self.origin else None


@dataclass
class Language:
    """English words by word; no words for one that only holds a sentence together."""

    english: dict[str, tuple[str, ...]] = field(default_factory=dict)
    telling: set[str] = field(default_factory=set)  # those that no English text holds


@dataclass(frozen=True)
class Glossary:
    spaced: tuple[Language, ...]
    telling: frozenset[str]  # of any of them
    chinese: Language
    longest: int  # Chinese word, in characters
    word: re.Pattern[str]


def english(
    query: str,
    spelled: Collection[str],
    strange: Collection[str],
    held: Callable[[str], bool],
) -> Reading | None:
    """Read a query in English; nothing where it is English already, or of words unknown here.

    `spelled` are its words, `strange` those of them that no tool holds: without one there is
    nothing to read. Of several English words for one, the first is taken that some tool holds.
    """
    if not strange:
        return None
    book = BOOK
    if not query.isascii() and CHINESE.search(query) and not KANA.search(query):
        return _from_chinese(query, book, held)
    compounds = {word for word in map(str.casefold, strange) if _compound(word, book)}
    if not compounds and book.telling.isdisjoint(map(str.casefold, spelled)):
        return None  # nearly always, so nothing above costs much
    text = fold(query)
    words = book.word.findall(text.casefold())
    told = [_told(words, language) for language in book.spaced]
    told[GERMAN] += len(compounds)
    most = max(told)
    if not most or most < ENOUGH * len(words):
        return None
    language, reading = book.spaced[told.index(most)], Reading()

    def read(match: re.Match[str]) -> str:
        word = match.group().casefold().replace("-", " ")
        found = language.english.get(word)
        if found is None and word in compounds:
            found = _compound(word, book)
        return match.group() if found is None else reading.word(match.group(), found, held)

    return reading.whole(book.word.sub(read, text))


def _told(words: Sequence[str], language: Language) -> int:
    """How many words are of a language and not English; none if all of them are fillers."""
    telling = [word for word in words if word in language.telling]
    meant = {language.english[word] for word in telling}
    return len(telling) if meant.difference(JOINING, ((),)) else 0


def _compound(word: str, book: Glossary) -> Meant:
    """Read a word made of two, as German writes them, maybe with a letter or two between."""
    language = book.spaced[GERMAN]
    if not word.isalpha():
        return None
    for at in range(len(word) - SHORTEST_PART, SHORTEST_PART - 1, -1):
        last = language.english.get(word[at:])
        for link in LINKS if last else ():
            head = word[: at - len(link)]
            first = language.english.get(head) if word[:at].endswith(link) else None
            if first and last and {head, word[at:]} & language.telling:
                return (f"{first[0]} {last[0]}",)
    return None


def _from_chinese(query: str, book: Glossary, held: Callable[[str], bool]) -> Reading | None:
    reading, known, total = Reading(), 0, 0

    def read(match: re.Match[str]) -> str:
        nonlocal known, total
        total += len(match.group())
        texts = []
        for word, found in _segments(match.group(), book):
            known += 0 if found is None else len(word)
            texts.append(word if found is None else reading.word(word, found, held))
        return f" {' '.join(texts)} "

    text = CHINESE.sub(read, query)
    return reading.whole(text) if known >= ENOUGH * total else None


def _segments(run: str, book: Glossary) -> Iterator[tuple[str, Meant]]:
    """Take the longest known word from the start, again and again; what is unknown stays whole."""
    at = unknown = 0
    while at < len(run):
        for length in range(min(book.longest, len(run) - at), 0, -1):
            found = book.chinese.english.get(run[at : at + length])
            if found is not None:
                if unknown < at:
                    yield run[unknown:at], None
                yield run[at : at + length], found
                at = unknown = at + length
                break
        else:
            at += 1
    if unknown < at:
        yield run[unknown:], None


def _glossary() -> Glossary:
    """Read the table."""
    rows = [
        [cell.split() for cell in line.split("|")]
        for line in TABLE.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    english_too = {word for row in rows if row[0] == [ENGLISH_TOO] for word in row[1]}
    english_too.update(word for row in rows for word in row[0])
    rows = [row for row in rows if row[0] != [ENGLISH_TOO]]
    made = [_language(rows, column) for column in range(1, 5)]
    for language in made:
        language.telling.update(
            word
            for word in language.english
            if not {word, word.removesuffix("s"), word.removesuffix("es")} & english_too
        )
    phrases = [
        word.replace(" ", "[ -]")
        for language in made[:3]
        for word in language.english
        if " " in word
    ]
    return Glossary(
        (made[0], made[1], made[2]),
        frozenset().union(*(language.telling for language in made[:3])),
        made[3],
        max(map(len, made[3].english)),
        re.compile(rf"{BEFORE}(?:{'|'.join([*phrases, LETTERS])}){AFTER}", re.IGNORECASE),
    )


def _language(rows: Sequence[Sequence[Sequence[str]]], column: int) -> Language:
    """One column of the table; a word itself goes before what is only a form of another."""
    language, forms = Language(), Language()
    for row in rows:
        meant = () if row[0] == [FILLER] else tuple(row[0])
        for cell in row[column]:
            word = fold(cell).casefold().replace("_", " ")
            language.english.setdefault(word, meant)
            for form in _forms(word, column - 1) if meant and column < 4 else ():
                forms.english.setdefault(form, meant)
    language.english = forms.english | language.english
    return language


def _forms(word: str, language: int) -> Iterator[str]:
    """Other forms of a word: good enough to be looked up, whether or not anybody says them."""
    for ending in NOUNS[language]:
        yield word + ending
    for infinitive, endings in VERBS[language].items():
        stem = word.removesuffix(infinitive)
        if stem != word and len(stem) >= SHORTEST_PART - 1:
            yield from (stem + fold(ending) for ending in endings.split())


BOOK = _glossary()  # at once: a dozen milliseconds that no search should wait for
