"""Query parsing: tokenization, translation, spelling correction and clause splitting. Pure.

"Book a flight and then mail the ticket to Ann" needs two tools, and neither ranks best for the
whole sentence: each clause is scored as well.
"""

import re
from typing import NamedTuple

from catalog.search import translation
from catalog.search.bm25 import Postings
from catalog.search.spelling import SPELLING
from catalog.search.tokenizer import tokenize, tokenize_query

MAX_CLAUSES = 8
MIN_CLAUSE_TERMS = 2  # a shorter clause is too vague on its own and is merged with its neighbour
CLAUSE_BOUNDARY = re.compile(
    r"(?<=[.!?;])\s+|[,;:\n]\s*|[。！？；，、：]|\s-\s"
    r"|\s(?:and|then|also|as well as|plus|followed by|after that|next|finally|along with"
    r"|und|dann|y|luego|et|puis)\s",
    re.IGNORECASE,
)


def _split_clauses(query: str) -> list[str]:
    """Return the clauses of a query, or an empty list if it is a single clause."""
    clauses: list[str] = []
    pending = ""
    for part in filter(None, (piece.strip() for piece in CLAUSE_BOUNDARY.split(query))):
        clause = f"{pending} {part}" if pending else part
        if len(tokenize_query(clause)) < MIN_CLAUSE_TERMS:
            pending = clause
        else:
            clauses.append(clause)
            pending = ""
    if pending and clauses:
        clauses[-1] += f" {pending}"
    if len(clauses) > MAX_CLAUSES:
        clauses[MAX_CLAUSES - 1 :] = [" ".join(clauses[MAX_CLAUSES - 1 :])]
    return clauses if len(clauses) > 1 else []


class ParsedQuery(NamedTuple):
    text: str
    terms: dict[str, str]  # distinct terms, each with its spelling in the query
    corrections: dict[str, str]  # unknown term: the term it was corrected to
    clauses: tuple[str, ...]
    translated: frozenset[str] = frozenset()  # terms that stand for a word of another language

    @property
    def substituted(self) -> set[str]:
        """The terms that the query does not contain: corrected or translated."""
        return {*self.corrections.values(), *self.translated}

    @property
    def texts(self) -> list[str]:
        """The texts to embed: the whole query, then each clause."""
        return [self.text, *self.clauses]

    def clause_terms(self, clause: str) -> list[str]:
        corrected = (self.corrections.get(term, term) for term in tokenize_query(clause))
        return list(dict.fromkeys(corrected))


def parse_query(query: str, postings: Postings, *, by_clause: bool = True) -> ParsedQuery:
    """Parse a query; terms that no tool contains are translated or spelling-corrected."""
    terms = tokenize_query(query)
    corrections: dict[str, str] = {}
    translated: frozenset[str] = frozenset()
    unknown = postings.unknown(terms)
    if unknown:
        query, terms, translated = _translate(query, terms, unknown, postings)
        for term in postings.unknown(terms):
            corrected = SPELLING.correct(
                term, lambda candidate: len(postings.documents_with(candidate))
            )
            if corrected:
                corrections[term] = corrected
        corrected_terms: dict[str, str] = {}
        for term, spelling in terms.items():
            corrected_terms.setdefault(corrections.get(term, term), spelling)
        terms = corrected_terms
    clauses = tuple(_split_clauses(query)) if by_clause else ()
    return ParsedQuery(query, terms, corrections, clauses, translated)


def _translate(
    query: str, terms: dict[str, str], unknown: list[str], postings: Postings
) -> tuple[str, dict[str, str], frozenset[str]]:
    """Translate a query to English; return its text, its terms and which of them are translated.

    Terms of the original query that tools contain are searched for as well.
    """
    translated_query = translation.translate(
        query,
        terms.values(),
        [terms[term] for term in unknown],
        lambda english: not postings.unknown(tokenize(english)),
    )
    if not translated_query:
        return query, terms, frozenset()
    original = {
        term: spelling
        for term, spelling in terms.items()
        if term not in unknown and spelling not in translated_query.dropped
    }
    spellings = tokenize_query(translated_query.text)
    origin = translated_query.origin
    known = {term: origin.get(english, english) for term, english in spellings.items()}
    translated = frozenset(term for term in spellings if spellings[term] in origin)
    return translated_query.text, known | original, translated
