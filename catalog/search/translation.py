"""Word-by-word translation of Spanish, German, French and Chinese queries to English. Pure.

Tools are described in English and the embedding model was trained on it. A query is translated if
the glossary knows enough of its words: stop words are dropped, names and numbers stay. English
queries are never changed: words that also exist in English count for no other language.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from catalog.search.tokenizer import fold

GLOSSARY_FILE = Path(__file__).with_name("glossary.txt")
MIN_KNOWN_SHARE = 1 / 3  # of the words of a query, or of its characters in unspaced scripts
STOP_WORD_MARK = "-"
CONJUNCTIONS = (("and",), ("then",))  # stop words that separate clauses
ENGLISH_MARK = "="
GERMAN = 1  # index of its column
MIN_COMPOUND_PART = 4  # letters of each part of a compound
CHINESE = re.compile("[\u3400-\u9fff]+")
KANA = re.compile("[\u3040-\u30ff]")  # Japanese uses Chinese characters with other meanings
QUOTE = re.compile("['\u2019]")
LETTERS = r"[^\W\d_]+"
BEFORE, AFTER = r"(?<![\w./@\\])", r"(?![\w/@\\]|\.\w)"  # not within a path or an address
# Suffixes that a glossary word may take, by language: of nouns, and of verbs by infinitive ending.
NOUN_SUFFIXES = (("s", "es"), ("n", "en", "e", "s", "es", "er"), ("s", "x", "e", "es"))
VERB_SUFFIXES = (
    {"ar": "a e o as an en ame ando ado", "er": "e o es en iendo ido", "ir": "e o es en iendo ido"},
    {"en": "e t st end", "ern": "ere ert", "eln": "le elt"},
    {"er": "e es ez ons ent ant é", "ir": "is it issez", "re": "s ez"},
)
COMPOUND_LINKS = ("", "s", "n", "en", "es")

Meanings = tuple[str, ...] | None


@dataclass(frozen=True)
class Translation:
    text: str = ""
    origin: dict[str, str] = field(default_factory=dict)  # English word: the word it translates
    dropped: set[str] = field(default_factory=set)  # stop words of the original query

    def translate_word(
        self, spelling: str, meanings: tuple[str, ...], is_indexed: Callable[[str], bool]
    ) -> str:
        """Choose a meaning of a word, record it and return it."""
        chosen = next(filter(is_indexed, meanings), meanings[0] if meanings else "")
        if not chosen or meanings in CONJUNCTIONS:
            self.dropped.add(spelling)
        else:
            self.origin.update(dict.fromkeys(chosen.split(), spelling))
        return chosen

    def with_text(self, text: str) -> "Translation | None":
        """Return the translation with its final text, or None if no word was translated."""
        text = " ".join(QUOTE.sub(" ", text).split())
        return Translation(text, self.origin, self.dropped) if self.origin else None


@dataclass
class Language:
    """The meanings of each word in English; a stop word has none."""

    english: dict[str, tuple[str, ...]] = field(default_factory=dict)
    distinctive: set[str] = field(default_factory=set)  # words that do not exist in English


@dataclass(frozen=True)
class Glossary:
    spaced: tuple[Language, ...]
    distinctive: frozenset[str]  # of all spaced languages
    chinese: Language
    longest_chinese: int  # characters of the longest Chinese word
    word: re.Pattern[str]


def translate(
    query: str,
    spellings: Collection[str],
    unknown: Collection[str],
    is_indexed: Callable[[str], bool],
) -> Translation | None:
    """Translate a query to English, or return None if it is English or its words are not known.

    `spellings` are the words of the query and `unknown` those that no tool contains; without
    unknown words nothing is translated. Of several meanings, the first that a tool contains is
    used.
    """
    if not unknown:
        return None
    if not query.isascii() and CHINESE.search(query) and not KANA.search(query):
        return _translate_chinese(query, is_indexed)
    compounds = {word for word in map(str.casefold, unknown) if _split_compound(word)}
    if not compounds and GLOSSARY.distinctive.isdisjoint(map(str.casefold, spellings)):
        return None  # fast path: nearly all queries
    text = fold(query)
    words = GLOSSARY.word.findall(text.casefold())
    counts = [_count_distinctive(words, language) for language in GLOSSARY.spaced]
    counts[GERMAN] += len(compounds)
    highest = max(counts)
    if not highest or highest < MIN_KNOWN_SHARE * len(words):
        return None
    language, translation = GLOSSARY.spaced[counts.index(highest)], Translation()

    def replace(match: re.Match[str]) -> str:
        word = match.group().casefold().replace("-", " ")
        meanings = language.english.get(word)
        if meanings is None and word in compounds:
            meanings = _split_compound(word)
        if meanings is None:
            return match.group()
        return translation.translate_word(match.group(), meanings, is_indexed)

    return translation.with_text(GLOSSARY.word.sub(replace, text))


def _count_distinctive(words: Sequence[str], language: Language) -> int:
    """Count the words that belong to a language and not to English; 0 if all are stop words."""
    distinctive = [word for word in words if word in language.distinctive]
    meanings = {language.english[word] for word in distinctive}
    return len(distinctive) if meanings.difference(CONJUNCTIONS, ((),)) else 0


def _split_compound(word: str) -> Meanings:
    """Translate a German compound of two words, with or without a linking element."""
    language = GLOSSARY.spaced[GERMAN]
    if not word.isalpha():
        return None
    for at in range(len(word) - MIN_COMPOUND_PART, MIN_COMPOUND_PART - 1, -1):
        last = language.english.get(word[at:])
        for link in COMPOUND_LINKS if last else ():
            head = word[: at - len(link)]
            first = language.english.get(head) if word[:at].endswith(link) else None
            if first and last and {head, word[at:]} & language.distinctive:
                return (f"{first[0]} {last[0]}",)
    return None


def _translate_chinese(query: str, is_indexed: Callable[[str], bool]) -> Translation | None:
    translation, known, total = Translation(), 0, 0

    def replace(match: re.Match[str]) -> str:
        nonlocal known, total
        total += len(match.group())
        words = []
        for word, meanings in _segment(match.group()):
            known += 0 if meanings is None else len(word)
            words.append(
                word if meanings is None else translation.translate_word(word, meanings, is_indexed)
            )
        return f" {' '.join(words)} "

    text = CHINESE.sub(replace, query)
    return translation.with_text(text) if known >= MIN_KNOWN_SHARE * total else None


def _segment(text: str) -> Iterator[tuple[str, Meanings]]:
    """Split Chinese text by longest match; runs of unknown characters stay together."""
    at = unknown = 0
    while at < len(text):
        for length in range(min(GLOSSARY.longest_chinese, len(text) - at), 0, -1):
            meanings = GLOSSARY.chinese.english.get(text[at : at + length])
            if meanings is not None:
                if unknown < at:
                    yield text[unknown:at], None
                yield text[at : at + length], meanings
                at = unknown = at + length
                break
        else:
            at += 1
    if unknown < at:
        yield text[unknown:], None


def _read_glossary() -> Glossary:
    rows = [
        [cell.split() for cell in line.split("|")]
        for line in GLOSSARY_FILE.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    english = {word for row in rows if row[0] == [ENGLISH_MARK] for word in row[1]}
    english.update(word for row in rows for word in row[0])
    rows = [row for row in rows if row[0] != [ENGLISH_MARK]]
    languages = [_read_language(rows, column) for column in range(1, 5)]
    for language in languages:
        language.distinctive.update(
            word
            for word in language.english
            if not {word, word.removesuffix("s"), word.removesuffix("es")} & english
        )
    phrases = [
        word.replace(" ", "[ -]")
        for language in languages[:3]
        for word in language.english
        if " " in word
    ]
    return Glossary(
        (languages[0], languages[1], languages[2]),
        frozenset().union(*(language.distinctive for language in languages[:3])),
        languages[3],
        max(map(len, languages[3].english)),
        re.compile(rf"{BEFORE}(?:{'|'.join([*phrases, LETTERS])}){AFTER}", re.IGNORECASE),
    )


def _read_language(rows: Sequence[Sequence[Sequence[str]]], column: int) -> Language:
    """Read one column of the glossary; listed words take precedence over inflected forms."""
    language, inflected = Language(), Language()
    for row in rows:
        meanings = () if row[0] == [STOP_WORD_MARK] else tuple(row[0])
        for cell in row[column]:
            word = fold(cell).casefold().replace("_", " ")
            language.english.setdefault(word, meanings)
            for form in _inflect(word, column - 1) if meanings and column < 4 else ():
                inflected.english.setdefault(form, meanings)
    language.english = inflected.english | language.english
    return language


def _inflect(word: str, language: int) -> Iterator[str]:
    """Yield possible inflected forms of a word. Some do not exist; they do no harm in a lookup."""
    for suffix in NOUN_SUFFIXES[language]:
        yield word + suffix
    for infinitive, suffixes in VERB_SUFFIXES[language].items():
        stem = word.removesuffix(infinitive)
        if stem != word and len(stem) >= MIN_COMPOUND_PART - 1:
            yield from (stem + fold(suffix) for suffix in suffixes.split())


GLOSSARY = _read_glossary()  # at import: takes about 12 ms, which no search should wait for
