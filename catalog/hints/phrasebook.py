"""The bundled phrasebook: everyday requests for the tools of well-known MCP servers. Pure.

`# server` starts a server, `name<TAB>start of the description` a tool, and indented lines below it
are its requests. An entry applies to a tool with the same own name whose description is the same,
or is similar by the sentence model: a name alone says little. Another version of a known server is
recognized by the names of its tools together, and its descriptions may differ more.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from catalog.hints.texts import clean_texts
from catalog.search.embeddings.encoder import Vectors
from toolcrib.lib.errors import Invalid

PATH = Path(__file__).resolve().parent.parent / "search" / "phrasebook.txt"
DESCRIPTION_LENGTH = 160  # characters that are compared
MIN_START_LENGTH = 100  # a shorter stored description is a whole one
MIN_SIMILARITY = 0.8  # cosine
# Another version of a server in the phrasebook: this many of its tools, and half of them, have
# names of that server's tools. Then a description need only be about the same.
MIN_COMMON_TOOLS = 4
MIN_COMMON_SHARE = 0.5
MIN_VERSION_SIMILARITY = 0.2

Encode = Callable[[Sequence[str]], Vectors]


@dataclass(frozen=True, slots=True)
class Entry:
    server: str
    name: str
    description: str  # its start, normalized
    lines: str  # a request each: thousands of entries stay in memory, few are asked for them

    @property
    def requests(self) -> tuple[str, ...]:
        return tuple(clean_texts(self.lines.splitlines())[0])


class DescribedTool(NamedTuple):
    name: str  # its own name
    description: str
    server: str = ""


class Phrasebook:
    def __init__(self, entries: Iterable[Entry]) -> None:
        self.by_name: dict[str, list[Entry]] = {}
        for entry in entries:
            self.by_name.setdefault(entry.name, []).append(entry)

    def __len__(self) -> int:
        return sum(map(len, self.by_name.values()))

    def find(self, tools: Sequence[DescribedTool], encode: Encode | None) -> list[tuple[str, ...]]:
        """Return the requests for tools, in their order; all tools of a server belong together.

        Without `encode`, only descriptions that start alike are recognized.
        """
        found: list[tuple[str, ...]] = [()] * len(tools)
        undecided: list[int] = []
        for at, tool in enumerate(tools):
            entries = self.by_name.get(tool.name, ())
            description = _normalize(tool.description) if entries else ""
            if not description:
                continue
            same = next(
                (one for one in entries if _start_alike(one.description, description)), None
            )
            if same is not None:
                found[at] = same.requests
            else:
                undecided.append(at)
        if undecided and encode is not None:
            for at, entry in self._most_similar(tools, undecided, encode):
                found[at] = entry.requests
        return found

    def _most_similar(
        self, tools: Sequence[DescribedTool], undecided: Sequence[int], encode: Encode
    ) -> Iterable[tuple[int, Entry]]:
        entries = {at: self.by_name[tools[at].name] for at in undecided}
        descriptions = {at: _normalize(tools[at].description) for at in undecided}
        texts = dict.fromkeys(descriptions.values())
        texts |= dict.fromkeys(one.description for found in entries.values() for one in found)
        rows = {text: row for row, text in enumerate(texts)}
        vectors = encode(list(texts))
        known_as = self._known_servers(tools)
        for at in undecided:
            own = vectors[rows[descriptions[at]]]
            candidates = [
                (float(own @ vectors[rows[one.description]]), one)
                for one in entries[at]
                if one.description
            ]
            best = max(candidates, key=lambda pair: pair[0], default=None)
            if best is None or best[0] < MIN_SIMILARITY:
                same_server = [
                    pair for pair in candidates if pair[1].server == known_as.get(tools[at].server)
                ]
                best = max(same_server, key=lambda pair: pair[0], default=None)
                if best is None or best[0] < MIN_VERSION_SIMILARITY:
                    continue
            yield at, best[1]

    def _known_servers(self, tools: Sequence[DescribedTool]) -> dict[str, str]:
        """Return the servers that are versions of one in the phrasebook, each with its name there.

        They are recognized by the names of their tools: their own name says nothing.
        """
        sizes = Counter(tool.server for tool in tools)
        common: dict[str, Counter[str]] = {}
        for tool in tools:
            listed = {entry.server for entry in self.by_name.get(tool.name, ())}
            common.setdefault(tool.server, Counter()).update(listed)
        known = {}
        for server, counts in common.items():
            listed_as, count = max(counts.items(), key=lambda pair: pair[1], default=("", 0))
            if server and count >= max(MIN_COMMON_TOOLS, MIN_COMMON_SHARE * sizes[server]):
                known[server] = listed_as
        return known


def parse(text: str) -> Phrasebook:
    """Parse a phrasebook. Raises Invalid with the line that is malformed."""
    entries: list[Entry] = []
    server, lines = "", list[str]()
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("# "):
            server = line[2:].strip()
        elif line.startswith("  "):
            if not entries:
                raise Invalid(f"Line {number} of the phrasebook is a request without a tool.")
            lines.append(line.strip())
            entries[-1] = replace(entries[-1], lines="\n".join(lines))
        elif line.strip():
            name, tab, description = line.partition("\t")
            if not tab or not name:
                raise Invalid(f"Line {number} of the phrasebook has no tab after the tool's name.")
            entries.append(Entry(server, name, _normalize(description), ""))
            lines = []
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
