"""The bundled phrasebook: everyday requests for the tools of well-known MCP servers. Pure.

`# server` starts a server, `name<TAB>start of the description` a tool, and indented lines below it
are its requests. An entry applies to a tool with the same own name whose description is the same,
or is similar by the sentence model: a name alone says little.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from catalog.hints.texts import clean_texts
from catalog.search.embeddings.encoder import Vectors
from toolcrib.lib.errors import Invalid

PATH = Path(__file__).resolve().parent.parent / "search" / "phrasebook.txt"
DESCRIPTION_LENGTH = 160  # characters that are compared
MIN_START_LENGTH = 100  # a shorter stored description is a whole one
MIN_SIMILARITY = 0.8  # cosine

Encode = Callable[[Sequence[str]], Vectors]


@dataclass(frozen=True)
class Entry:
    server: str
    name: str
    description: str  # its start, normalized
    requests: tuple[str, ...]


class Phrasebook:
    def __init__(self, entries: Iterable[Entry]) -> None:
        self.by_name: dict[str, list[Entry]] = {}
        for entry in entries:
            self.by_name.setdefault(entry.name, []).append(entry)

    def __len__(self) -> int:
        return sum(map(len, self.by_name.values()))

    def find(
        self, tools: Sequence[tuple[str, str]], encode: Encode | None
    ) -> list[tuple[str, ...]]:
        """Return the requests for tools, each given by its own name and description.

        Without `encode`, only descriptions that start alike are recognized.
        """
        found: list[tuple[str, ...]] = [()] * len(tools)
        undecided: list[tuple[int, str]] = []
        for at, (name, text) in enumerate(tools):
            description = _normalize(text)
            entries = self.by_name.get(name, ()) if description else ()
            same = next(
                (one for one in entries if _start_alike(one.description, description)), None
            )
            if same is not None:
                found[at] = same.requests
            elif entries and encode is not None:
                undecided.append((at, description))
        if undecided and encode is not None:
            for at, entry in self._most_similar(tools, undecided, encode):
                found[at] = entry.requests
        return found

    def _most_similar(
        self, tools: Sequence[tuple[str, str]], undecided: list[tuple[int, str]], encode: Encode
    ) -> Iterable[tuple[int, Entry]]:
        entries = {at: self.by_name[tools[at][0]] for at, _ in undecided}
        texts = dict.fromkeys(text for _, text in undecided)
        texts |= dict.fromkeys(one.description for found in entries.values() for one in found)
        rows = {text: row for row, text in enumerate(texts)}
        vectors = encode(list(texts))
        for at, text in undecided:
            candidates = [entry for entry in entries[at] if entry.description]
            cosines = [
                float(vectors[rows[text]] @ vectors[rows[entry.description]])
                for entry in candidates
            ]
            best = max(range(len(candidates)), key=cosines.__getitem__, default=None)
            if best is not None and cosines[best] >= MIN_SIMILARITY:
                yield at, candidates[best]


def parse(text: str) -> Phrasebook:
    """Parse a phrasebook. Raises Invalid with the line that is malformed."""
    entries: list[Entry] = []
    server, requests = "", list[str]()
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("# "):
            server = line[2:].strip()
        elif line.startswith("  "):
            if not entries:
                raise Invalid(f"Line {number} of the phrasebook is a request without a tool.")
            requests.append(line.strip())
            kept = clean_texts(requests)[0]
            entries[-1] = Entry(server, entries[-1].name, entries[-1].description, tuple(kept))
        elif line.strip():
            name, tab, description = line.partition("\t")
            if not tab or not name:
                raise Invalid(f"Line {number} of the phrasebook has no tab after the tool's name.")
            entries.append(Entry(server, name, _normalize(description), ()))
            requests = []
    return Phrasebook(entry for entry in entries if entry.requests)


@lru_cache(maxsize=1)
def bundled() -> Phrasebook:
    """Return the phrasebook that Toolcrib contains."""
    return parse(PATH.read_text(encoding="utf-8") if PATH.exists() else "")


def _start_alike(stored: str, description: str) -> bool:
    return stored == description or (
        len(stored) >= MIN_START_LENGTH and description.startswith(stored)
    )


def _normalize(description: str) -> str:
    line = " ".join(description.rstrip("…").split()).casefold()
    return line[:DESCRIPTION_LENGTH].rstrip()
