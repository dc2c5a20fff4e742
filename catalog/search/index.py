"""The search index of one scope: searchable tools, their postings, names and vectors."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from catalog.search import weights
from catalog.search.bm25 import Document, Postings, document
from catalog.search.embeddings import encoder
from catalog.search.spelling import SPELLING, NameIndex
from catalog.search.tokenizer import LONGEST_NAME, LONGEST_TEXT, joined, words

if TYPE_CHECKING:
    from catalog.cache import CachedTool

START = 6  # letters of a name that tell nearly always that none starts so
MOST_PREPARED = 250_000


@dataclass(frozen=True)
class Searchable:
    """One tool as search sees it."""

    name: str
    original_name: str
    server: str
    title: str
    description: str
    parameters: str
    groups: tuple[str, ...]
    hints: tuple[str, ...] = ()  # other names and example queries, written by an admin

    @property
    def passage(self) -> str:
        """The text whose meaning is encoded."""
        return encoder.passage(self.original_name, self.description, self.parameters, self.hints)

    @property
    def key(self) -> str:
        """Where the vector of its passage is kept."""
        return _key(self.original_name, self.description, self.parameters, self.hints)


class VectorSource(Protocol):
    """Where vectors come from. `reason` says why there are none, if there are none."""

    @property
    def reason(self) -> str: ...
    def encode(self, texts: Sequence[str]) -> encoder.Vectors: ...
    def rows(self, keys: Sequence[str]) -> NDArray[np.intp]: ...
    def products(self, rows: NDArray[np.intp], vectors: encoder.Vectors) -> NDArray[np.float32]: ...


@dataclass(frozen=True, eq=False, slots=True)
class IndexedTool:
    """What is worked out for a tool once, however many indexes hold it."""

    document: Document
    names: frozenset[str]  # joined


@lru_cache(maxsize=MOST_PREPARED)
def index_tool(tool: Searchable) -> IndexedTool:
    fields = (
        (tool.original_name, weights.NAME),
        (tool.server, weights.SERVER),
        (tool.title, weights.TITLE),
        (tool.description, weights.DESCRIPTION),
        (tool.parameters, weights.PARAMETERS),
        (" ".join(tool.groups), weights.GROUPS),
        (" ".join(tool.hints), weights.HINTS),
    )
    return IndexedTool(
        document((words(text), weight) for text, weight in fields if text),
        frozenset(joined(name[:LONGEST_NAME]) for name in (tool.name, tool.original_name)),
    )


@lru_cache(maxsize=MOST_PREPARED)
def _key(name: str, description: str, parameters: str, hints: tuple[str, ...]) -> str:
    return encoder.key(encoder.passage(name, description, parameters, hints))


class Index:
    """Everything one scope may see, ready to be searched.

    Immutable but for vectors, which are looked for again while some are still to come. Tools
    stand by name, so the order they came in changes nothing, and a position breaks a tie by name.
    """

    def __init__(self, tools: Sequence[Searchable], meanings: VectorSource | None = None) -> None:
        self.tools = tuple(sorted(tools, key=lambda tool: tool.name))
        self.names = [tool.name for tool in self.tools]
        made = [index_tool(tool) for tool in self.tools]
        self.postings = Postings([one.document for one in made])
        self.keys = [tool.key for tool in self.tools]
        self.meanings = meanings
        self._rows = np.full(len(self.tools), -1, np.intp)
        self._names = sorted((name, at) for at, one in enumerate(made) for name in one.names)
        self._beginnings = {name[:START] for name, _ in self._names}
        SPELLING.learn()

    def __len__(self) -> int:
        return len(self.tools)

    @property
    def waiting(self) -> int:
        """How many tools' vectors are still to come."""
        return int((self.rows < 0).sum())

    @property
    def rows(self) -> NDArray[np.intp]:
        if self.meanings is not None and (self._rows < 0).any():
            self._rows = self.meanings.rows(self.keys)
        return self._rows

    @cached_property
    def servers(self) -> NDArray[np.str_]:
        return np.array([tool.server for tool in self.tools], np.str_)

    def starting_with(self, key: str) -> Iterable[tuple[str, int]]:
        """Yield joined names that start with the key, and whose they are."""
        if len(key) >= START and key[:START] not in self._beginnings:
            return
        for at in range(bisect_left(self._names, (key, -1)), len(self._names)):
            if not self._names[at][0].startswith(key):
                break
            yield self._names[at]

    @cached_property
    def texts(self) -> tuple[tuple[bytes, bytes, bytes], ...]:
        """Each tool's public name, own name and description as RE2 reads them."""
        return tuple(
            (_utf8(tool.name), _utf8(tool.original_name), _utf8(tool.description))
            for tool in self.tools
        )

    @cached_property
    def near(self) -> NameIndex:
        return NameIndex([(tool.name, tool.original_name) for tool in self.tools])


def _utf8(text: str) -> bytes:
    return text[:LONGEST_TEXT].encode(errors="replace")


def make_searchable(item: "CachedTool", groups: Sequence[str]) -> Searchable:
    """A tool as search sees it, with the texts of the groups it is in."""
    title, parameters = item.approved.search_fields if item.approved else ("", "")
    return Searchable(
        name=item.name,
        original_name=item.original_name,
        server=item.server,
        title=title,
        description=item.description,
        parameters=parameters,
        groups=tuple(groups),
        hints=item.hints,
    )
