"""Word-by-word translation of queries in eight languages to English. Pure.

Tools are described in English and the embedding model was trained on it. A query is translated if
the glossary knows enough of its words: stop words are dropped, names and numbers stay. English
queries are never changed: words that also exist in English count for no other language.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from catalog.search.tokenizer import fold

# Each has a column of English, three or two of languages with spaces, then those without.
GLOSSARY_FILES = (("glossary.txt", 3), ("glossary_more.txt", 2))
MIN_KNOWN_SHARE = 1 / 3  # of the words of a query, or of its characters in unspaced scripts
STOP_WORD_MARK = "-"
CONJUNCTIONS = (("and",), ("then",))  # stop words that separate clauses
ENGLISH_MARK = "="
GERMAN = 1  # index of its column
MIN_COMPOUND_PART = 4  # letters of each part of a compound
CHINESE = re.compile("[\u3400-\u9fff]+")
KANA = re.compile("[\u3040-\u30ff]")  # Japanese uses Chinese characters with other meanings
JAPANESE = re.compile("[\u3005\u3040-\u30ff\u3400-\u9fff]+")
KOREAN = re.compile("[\uac00-\ud7a3]+(?: [\uac00-\ud7a3]+)*")  # particles are part of its words
QUOTE = re.compile("['\u2019]")
LETTERS = r"[^\W\d_]+"
BEFORE, AFTER = r"(?<![\w./@\\])", r"(?![\w/@\\]|\.\w)"  # not within a path or an address
# Suffixes that a glossary word may take, by language: of nouns, and of verbs by infinitive ending.
NOUN_SUFFIXES: tuple[tuple[str, ...], ...] = (
    ("s", "es"),
    ("n", "en", "e", "s", "es", "er"),
    ("s", "x", "e", "es"),
    ("s", "es"),
    (),  # Italian plurals replace the last vowel and are listed
)
VERB_SUFFIXES = (
    {"ar": "a e o as an en ame ando ado", "er": "e o es en iendo ido", "ir": "e o es en iendo ido"},
    {"en": "e t st end", "ern": "ere ert", "eln": "le elt"},
    {"er": "e es ez ons ent ant é", "ir": "is it issez", "re": "s ez"},
    {"ar": "a e o am em ando ado", "er": "e o em endo ido", "ir": "e o em indo ido"},
    {"are": "a o i ano ando ato", "ere": "e o i ono endo uto", "ire": "e o i ono endo ito"},
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
    longest: int = 0  # characters of the longest word


@dataclass(frozen=True)
class Glossary:
    spaced: tuple[Language, ...]  # Spanish, German, French, Portuguese, Italian
    chinese: Language
    japanese: Language
    korean: Language
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
    if not query.isascii() and (unspaced := _unspaced_language(query)):
        return _translate_unspaced(query, *unspaced, is_indexed)
    compounds = {word for word in map(str.casefold, unknown) if _split_compound(word)}
    folded = [spelling.casefold() for spelling in spellings]
    if not compounds and all(each.distinctive.isdisjoint(folded) for each in GLOSSARY.spaced):
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


def _unspaced_language(query: str) -> tuple[re.Pattern[str], Language] | None:
    """Return the script and the language of a query that is not split at spaces."""
    if KANA.search(query):
        return JAPANESE, GLOSSARY.japanese
    if KOREAN.search(query):
        return KOREAN, GLOSSARY.korean
    return (CHINESE, GLOSSARY.chinese) if CHINESE.search(query) else None


def _translate_unspaced(
    query: str, script: re.Pattern[str], language: Language, is_indexed: Callable[[str], bool]
) -> Translation | None:
    translation, known, total = Translation(), 0, 0

    def replace(match: re.Match[str]) -> str:
        nonlocal known, total
        total += len(match.group())
        words = []
        for word, meanings in _segment(match.group(), language):
            known += 0 if meanings is None else len(word)
            words.append(
                word if meanings is None else translation.translate_word(word, meanings, is_indexed)
            )
        return f" {' '.join(words)} "

    text = script.sub(replace, query)
    return translation.with_text(text) if known >= MIN_KNOWN_SHARE * total else None


def _segment(text: str, language: Language) -> Iterator[tuple[str, Meanings]]:
    """Split text without spaces by longest match; runs of unknown characters stay together."""
    at = unknown = 0
    while at < len(text):
        for length in range(min(language.longest, len(text) - at), 0, -1):
            meanings = language.english.get(text[at : at + length])
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
    files = []
    for name, spaced_count in GLOSSARY_FILES:
        lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
        cells = [line.split("|") for line in lines if line and not line.startswith("#")]
        files.append(([[cell.split() for cell in row] for row in cells], spaced_count))
    english = {
        word for rows, _ in files for row in rows if row[0] == [ENGLISH_MARK] for word in row[1]
    }
    english.update(word for rows, _ in files for row in rows for word in row[0])
    spaced: list[Language] = []
    unspaced: list[Language] = []
    for rows, spaced_count in files:
        words = [row for row in rows if row[0] != [ENGLISH_MARK]]
        for column in range(1, len(words[0])):
            is_spaced = column <= spaced_count
            suffixes = len(spaced) if is_spaced else None
            language = _read_language(words, column, suffixes)
            (spaced if is_spaced else unspaced).append(language)
    for language in spaced:
        language.distinctive.update(
            word
            for word in language.english
            if not {word, word.removesuffix("s"), word.removesuffix("es")} & english
        )
    phrases = [
        word.replace(" ", "[ -]") for language in spaced for word in language.english if " " in word
    ]
    chinese, japanese, korean = unspaced
    return Glossary(
        tuple(spaced),
        chinese,
        japanese,
        korean,
        re.compile(rf"{BEFORE}(?:{'|'.join([*phrases, LETTERS])}){AFTER}", re.IGNORECASE),
    )


def _read_language(
    rows: Sequence[Sequence[Sequence[str]]], column: int, suffixes: int | None
) -> Language:
    """Read one column of a glossary; listed words take precedence over inflected forms."""
    language, inflected = Language(), Language()
    for row in rows:
        meanings = () if row[0] == [STOP_WORD_MARK] else tuple(row[0])
        for cell in row[column]:
            word = fold(cell).casefold().replace("_", " ")
            language.english.setdefault(word, meanings)
            for form in _inflect(word, suffixes) if meanings and suffixes is not None else ():
                inflected.english.setdefault(form, meanings)
    language.english = inflected.english | language.english
    language.longest = max(map(len, language.english))
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
