"""Find the word that was meant where a query holds one that no tool has. Pure.

Two words are one mistake apart (a letter too many, missing, wrong, or two swapped) only if they
meet when each loses at most one letter. So every word is filed under itself less one letter, and
a look costs a few lookups whatever the size of the vocabulary. The files are shared by all
indexes and grow with the vocabulary; what an index does not hold is never offered by it.
"""

import difflib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from catalog.search.bm25 import VOCABULARY
from catalog.search.tokenizer import LONGEST_NAME
from catalog.search.weights import SIMILAR_NAME

SHORTEST, LONGEST = 5, 24
MOST_COMPARED = 50  # comparing letter by letter is slow: only those that share the most


class Spelling:
    """Words filed under what is left of them when a letter is dropped."""

    def __init__(self) -> None:
        self._filed: dict[int, int | list[int]] = {}
        self._read = 0
        self._lock = threading.Lock()

    def meant(self, word: str, holders: Callable[[str], int]) -> str:
        """Return the likeliest word one mistake away that something holds, or nothing."""
        if not SHORTEST <= len(word) <= LONGEST or not word.isalpha():
            return ""
        self.learn()
        near = {VOCABULARY.words[number] for number in self._near(word)}
        likely = [
            (-count, one)
            for one in near
            if one.isalpha() and (count := holders(one)) and _one_apart(word, one)
        ]
        return min(likely)[1] if likely else ""

    def _near(self, word: str) -> Iterator[int]:
        for key in _less_one(word):
            filed = self._filed.get(hash(key), [])
            yield from [filed] if isinstance(filed, int) else filed

    def learn(self) -> None:
        """File what the vocabulary has gained; cheap where it gained nothing."""
        if self._read == len(VOCABULARY.words):
            return
        with self._lock:
            for number in range(self._read, len(VOCABULARY.words)):
                word = VOCABULARY.words[number]
                if SHORTEST - 1 <= len(word) <= LONGEST + 1:
                    for key in map(hash, _less_one(word)):
                        self._file(key, number)
                self._read = number + 1

    def _file(self, key: int, number: int) -> None:
        held = self._filed.get(key)
        if held is None:
            self._filed[key] = number  # a bare number: most keys have one word
        elif isinstance(held, int):
            self._filed[key] = [held, number]
        else:
            held.append(number)


SPELLING = Spelling()


def _less_one(word: str) -> set[str]:
    return {word, *(word[:at] + word[at + 1 :] for at in range(len(word)))}


def _one_apart(left: str, right: str) -> bool:
    """Whether one mistake makes one word of the other."""
    if len(left) > len(right):
        left, right = right, left
    same = 0
    while same < len(left) and left[same] == right[same]:
        same += 1
    rest, other = left[same:], right[same:]
    if len(left) < len(right):
        return len(right) - len(left) == 1 and rest == other[1:]
    swapped = other[1::-1] + other[2:]
    return rest[1:] == other[1:] or rest == swapped


# --- Similar names --------------------------------------------------------------------------------


class NameIndex:
    """NameIndex by three letters in a row, each with another name it goes by."""

    def __init__(self, names: Sequence[tuple[str, str]]) -> None:
        self._names = names
        self._holding: dict[str, list[int]] = {}
        for at, (name, _) in enumerate(names):
            for trigram in _trigrams(name):
                self._holding.setdefault(trigram, []).append(at)

    def near(self, text: str, limit: int) -> list[str]:
        """The nearest first; none if none is near."""
        text = text[:LONGEST_NAME].casefold()
        shared: Counter[int] = Counter()
        for trigram in _trigrams(text):
            shared.update(self._holding.get(trigram, ()))
        likely = sorted(shared, key=lambda at: (-shared[at], at))[:MOST_COMPARED]
        compared = difflib.SequenceMatcher(b=text)  # which it works through once
        near = []
        for at in likely:
            nearness = max(_likeness(compared, name) for name in self._names[at])
            if nearness >= SIMILAR_NAME:
                near.append((-nearness, self._names[at][0]))
        return [name for _, name in sorted(near)[: max(0, limit)]]


def _trigrams(name: str) -> set[str]:
    padded = f" {name.casefold()} "
    return {padded[at : at + 3] for at in range(len(padded) - 2)}


def _likeness(compared: "difflib.SequenceMatcher[str]", name: str) -> float:
    """How near a name is, or 0 where a glance tells that it is not."""
    compared.set_seq1(name[:LONGEST_NAME].casefold())
    glances = compared.real_quick_ratio, compared.quick_ratio  # never less than the true one
    return compared.ratio() if all(glance() >= SIMILAR_NAME for glance in glances) else 0.0
