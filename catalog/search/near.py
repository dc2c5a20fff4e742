"""Names that are near one that is unknown: who mistyped a name is told the right one. Pure."""

import difflib
from collections import Counter
from collections.abc import Sequence

from catalog.search.tokenizer import LONGEST_NAME

NEAR = 0.6
MOST_COMPARED = 50  # comparing letter by letter is slow: only those that share the most


class Names:
    """Names by three letters in a row, each with another name it goes by."""

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
            if nearness >= NEAR:
                near.append((-nearness, self._names[at][0]))
        return [name for _, name in sorted(near)[: max(0, limit)]]


def _trigrams(name: str) -> set[str]:
    padded = f" {name.casefold()} "
    return {padded[at : at + 3] for at in range(len(padded) - 2)}


def _likeness(compared: "difflib.SequenceMatcher[str]", name: str) -> float:
    """How near a name is, or 0 where a glance tells that it is not."""
    compared.set_seq1(name[:LONGEST_NAME].casefold())
    glances = compared.real_quick_ratio, compared.quick_ratio  # never less than the true one
    return compared.ratio() if all(glance() >= NEAR for glance in glances) else 0.0
