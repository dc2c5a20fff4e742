"""Find the word that was meant where a query holds one that no tool has. Pure.

Two words are one mistake apart (a letter too many, missing, wrong, or two swapped) only if they
meet when each loses at most one letter. So every word is filed under itself less one letter, and
a look costs a few lookups whatever the size of the vocabulary. The files are shared by all
indexes and grow with the vocabulary; what an index does not hold is never offered by it.
"""

import threading
from collections.abc import Callable, Iterator

from catalog.search.bm25 import VOCABULARY

SHORTEST, LONGEST = 5, 24


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
