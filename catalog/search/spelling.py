"""Spelling correction of query terms, and suggestions of similar tool names. Pure.

Terms: two words are one edit apart only if they become equal when each loses at most one letter.
Every word is therefore indexed under each of its one-letter deletions, once for all indexes of the
process; an index never suggests a word that it does not contain.

Names: candidates are selected by shared trigrams and ranked by difflib's ratio.
"""

import difflib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from catalog.search.bm25 import VOCABULARY
from catalog.search.tokenizer import MAX_NAME_LENGTH
from catalog.search.weights import SIMILAR_NAME

MIN_WORD_LENGTH, MAX_WORD_LENGTH = 5, 24
MAX_COMPARED_NAMES = 50  # difflib is slow: compare only the names that share the most trigrams


class Spelling:
    """Words of the vocabulary, indexed by their one-letter deletions."""

    def __init__(self) -> None:
        self._by_deletion: dict[int, int | list[int]] = {}
        self._indexed = 0  # words of the vocabulary indexed so far
        self._lock = threading.Lock()

    def correct(self, word: str, count_documents: Callable[[str], int]) -> str:
        """Return the most frequent word one edit away that a document contains, or ""."""
        if not MIN_WORD_LENGTH <= len(word) <= MAX_WORD_LENGTH or not word.isalpha():
            return ""
        self.update()
        candidates = {VOCABULARY.terms[number] for number in self._candidates(word)}
        ranked = [
            (-count, candidate)
            for candidate in candidates
            if candidate.isalpha()
            and (count := count_documents(candidate))
            and _is_one_edit_apart(word, candidate)
        ]
        return min(ranked)[1] if ranked else ""

    def _candidates(self, word: str) -> Iterator[int]:
        for deletion in _deletions(word):
            numbers = self._by_deletion.get(hash(deletion), [])
            yield from [numbers] if isinstance(numbers, int) else numbers

    def update(self) -> None:
        """Index new words of the vocabulary. Cheap if there are none."""
        if self._indexed == len(VOCABULARY.terms):
            return
        with self._lock:
            for number in range(self._indexed, len(VOCABULARY.terms)):
                word = VOCABULARY.terms[number]
                if MIN_WORD_LENGTH - 1 <= len(word) <= MAX_WORD_LENGTH + 1:
                    for key in map(hash, _deletions(word)):
                        self._add(key, number)
                self._indexed = number + 1

    def _add(self, key: int, number: int) -> None:
        numbers = self._by_deletion.get(key)
        if numbers is None:
            self._by_deletion[key] = number  # a bare int saves memory: most keys have one word
        elif isinstance(numbers, int):
            self._by_deletion[key] = [numbers, number]
        else:
            numbers.append(number)


SPELLING = Spelling()


def _deletions(word: str) -> set[str]:
    return {word, *(word[:at] + word[at + 1 :] for at in range(len(word)))}


def _is_one_edit_apart(left: str, right: str) -> bool:
    if len(left) > len(right):
        left, right = right, left
    prefix = 0
    while prefix < len(left) and left[prefix] == right[prefix]:
        prefix += 1
    left_rest, right_rest = left[prefix:], right[prefix:]
    if len(left) < len(right):
        return len(right) - len(left) == 1 and left_rest == right_rest[1:]
    transposed = right_rest[1::-1] + right_rest[2:]
    return left_rest[1:] == right_rest[1:] or left_rest == transposed


class NameIndex:
    """Trigram index of public names, each paired with the tool's original name."""

    def __init__(self, names: Sequence[tuple[str, str]]) -> None:
        self._names = names
        self._by_trigram: dict[str, list[int]] = {}
        for at, (name, _) in enumerate(names):
            for trigram in _trigrams(name):
                self._by_trigram.setdefault(trigram, []).append(at)

    def find_similar(self, text: str, limit: int) -> list[str]:
        """Return the most similar names, best first; none below the similarity threshold."""
        text = text[:MAX_NAME_LENGTH].casefold()
        shared: Counter[int] = Counter()
        for trigram in _trigrams(text):
            shared.update(self._by_trigram.get(trigram, ()))
        candidates = sorted(shared, key=lambda at: (-shared[at], at))[:MAX_COMPARED_NAMES]
        matcher = difflib.SequenceMatcher(b=text)  # difflib caches its analysis of b
        similar = []
        for at in candidates:
            similarity = max(_similarity(matcher, name) for name in self._names[at])
            if similarity >= SIMILAR_NAME:
                similar.append((-similarity, self._names[at][0]))
        return [name for _, name in sorted(similar)[: max(0, limit)]]


def _trigrams(name: str) -> set[str]:
    padded = f" {name.casefold()} "
    return {padded[at : at + 3] for at in range(len(padded) - 2)}


def _similarity(matcher: "difflib.SequenceMatcher[str]", name: str) -> float:
    """Return difflib's ratio, or 0 if a cheap upper bound is below the threshold."""
    matcher.set_seq1(name[:MAX_NAME_LENGTH].casefold())
    upper_bounds = matcher.real_quick_ratio, matcher.quick_ratio
    return matcher.ratio() if all(bound() >= SIMILAR_NAME for bound in upper_bounds) else 0.0
