"""Search index of one scope: searchable tools with their postings, names and vectors."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from catalog.search import weights
from catalog.search.bm25 import Document, Postings, make_document
from catalog.search.embeddings import encoder
from catalog.search.spelling import SPELLING, NameIndex
from catalog.search.tokenizer import MAX_NAME_LENGTH, MAX_TEXT_LENGTH, normalize_name, tokenize

if TYPE_CHECKING:
    from catalog.cache import CachedTool

PREFIX_LENGTH = 6  # characters of the prefix set that rules out most prefix lookups
MAX_INDEXED_TOOLS = 250_000


@dataclass(frozen=True)
class Searchable:
    name: str
    original_name: str
    server: str
    title: str
    description: str
    parameters: str
    groups: tuple[str, ...]
    hints: tuple[str, ...] = ()  # search aliases and example queries by people
    phrases: tuple[str, ...] = ()  # search hints of other sources

    @property
    def passage(self) -> str:
        return encoder.passage(self.original_name, self.description, self.parameters, self.hints)

    @property
    def key(self) -> str:
        return _key(self.original_name, self.description, self.parameters, self.hints)

    @property
    def phrase_passage(self) -> str:
        """The text of the second vector, which can only raise a tool; empty without phrases."""
        return ". ".join(self.phrases).replace(encoder.PART_SEPARATOR, " ")

    @property
    def phrase_key(self) -> str:
        return _phrase_key(self.phrases) if self.phrases else ""


class VectorSource(Protocol):
    """Source of embedding vectors. `reason` says why there are none; empty if there are."""

    @property
    def reason(self) -> str: ...
    def encode(self, texts: Sequence[str]) -> encoder.Vectors: ...
    def rows(self, keys: Sequence[str]) -> NDArray[np.intp]: ...
    def products(self, rows: NDArray[np.intp], vectors: encoder.Vectors) -> NDArray[np.float32]: ...


@dataclass(frozen=True, eq=False, slots=True)
class IndexedTool:
    """The tokenized form of a tool, shared by all indexes that contain it."""

    document: Document
    names: frozenset[str]  # normalized


@lru_cache(maxsize=MAX_INDEXED_TOOLS)
def index_tool(tool: Searchable) -> IndexedTool:
    fields = (
        (tool.original_name, weights.NAME),
        (tool.server, weights.SERVER),
        (tool.title, weights.TITLE),
        (tool.description, weights.DESCRIPTION),
        (tool.parameters, weights.PARAMETERS),
        (" ".join(tool.groups), weights.GROUPS),
        (" ".join(tool.hints), weights.HINTS),
        (" ".join(tool.phrases), weights.PHRASES),
    )
    return IndexedTool(
        make_document((tokenize(text), weight) for text, weight in fields if text),
        frozenset(
            normalize_name(name[:MAX_NAME_LENGTH]) for name in (tool.name, tool.original_name)
        ),
    )


@lru_cache(maxsize=MAX_INDEXED_TOOLS)
def _key(name: str, description: str, parameters: str, hints: tuple[str, ...]) -> str:
    return encoder.key(encoder.passage(name, description, parameters, hints))


@lru_cache(maxsize=MAX_INDEXED_TOOLS)
def _phrase_key(phrases: tuple[str, ...]) -> str:
    return encoder.key(". ".join(phrases).replace(encoder.PART_SEPARATOR, " "))


class Index:
    """The tools one scope may see, ready to be searched.

    Immutable except for vectors, which are looked up again while some are pending. Tools are
    sorted by name, so the input order has no effect and positions break ties by name.
    """

    def __init__(self, tools: Sequence[Searchable], vectors: VectorSource | None = None) -> None:
        self.tools = tuple(sorted(tools, key=lambda tool: tool.name))
        self.names = [tool.name for tool in self.tools]
        indexed = [index_tool(tool) for tool in self.tools]
        self.postings = Postings([tool.document for tool in indexed])
        self.keys = [tool.key for tool in self.tools]
        self.vectors = vectors
        self._rows = np.full(len(self.tools), -1, np.intp)
        # The tools with phrases, by position, and the keys and rows of their second vectors.
        self.phrased = np.array([at for at, tool in enumerate(self.tools) if tool.phrases], np.intp)
        self._phrase_keys = [self.tools[at].phrase_key for at in self.phrased]
        self._phrase_rows = np.full(len(self.phrased), -1, np.intp)
        self._names = sorted((name, at) for at, tool in enumerate(indexed) for name in tool.names)
        self._prefixes = {name[:PREFIX_LENGTH] for name, _ in self._names}
        SPELLING.update()

    def __len__(self) -> int:
        return len(self.tools)

    @property
    def pending_vectors(self) -> int:
        return int((self.rows < 0).sum())

    @property
    def rows(self) -> NDArray[np.intp]:
        """The matrix row of each tool's vector; -1 while it is pending."""
        is_pending = (self._rows < 0).any() or (self._phrase_rows < 0).any()
        if self.vectors is not None and is_pending:
            rows = self.vectors.rows([*self.keys, *self._phrase_keys])
            self._rows, self._phrase_rows = rows[: len(self.keys)], rows[len(self.keys) :]
        return self._rows

    def similarities(self, vectors: encoder.Vectors) -> NDArray[np.float32]:
        """Return the cosine of each tool to each vector; NaN while the tool's is pending.

        Phrases raise the similarity of a tool and never lower it, so that a tool with phrases
        is found by other words no worse than before.
        """
        assert self.vectors is not None  # noqa: S101 - callers check
        rows, count = self.rows, len(self.tools)
        if not len(self.phrased):
            return self.vectors.products(rows, vectors)
        both = self.vectors.products(np.concatenate([rows, self._phrase_rows]), vectors)
        cosines, own = both[:count], both[:count][self.phrased]
        share = weights.PHRASE_VECTOR
        raised = (1 - share) * own + share * np.nan_to_num(both[count:], nan=-1.0)
        cosines[self.phrased] = np.maximum(own, raised)
        return cosines

    @cached_property
    def servers(self) -> NDArray[np.str_]:
        return np.array([tool.server for tool in self.tools], np.str_)

    def names_starting_with(self, prefix: str) -> Iterable[tuple[str, int]]:
        """Yield the normalized names with this prefix, each with the position of its tool."""
        if len(prefix) >= PREFIX_LENGTH and prefix[:PREFIX_LENGTH] not in self._prefixes:
            return
        for at in range(bisect_left(self._names, (prefix, -1)), len(self._names)):
            if not self._names[at][0].startswith(prefix):
                break
            yield self._names[at]

    @cached_property
    def texts(self) -> tuple[tuple[bytes, bytes, bytes], ...]:
        """Public name, original name and description of each tool as UTF-8, for RE2."""
        return tuple(
            (_utf8(tool.name), _utf8(tool.original_name), _utf8(tool.description))
            for tool in self.tools
        )

    @cached_property
    def similar_names(self) -> NameIndex:
        return NameIndex([(tool.name, tool.original_name) for tool in self.tools])


def _utf8(text: str) -> bytes:
    return text[:MAX_TEXT_LENGTH].encode(errors="replace")


def make_searchable(
    tool: "CachedTool", groups: Sequence[str], phrases: tuple[str, ...] | None = None
) -> Searchable:
    """Return the searchable fields of a tool, with the texts of its groups.

    `phrases` replaces those for all agents, for an agent that has some of its own.
    """
    title, _, parameters = tool.approved.search_fields if tool.approved else ("", "", "")
    return Searchable(
        name=tool.name,
        original_name=tool.original_name,
        server=tool.server,
        title=title,
        description=tool.description,
        parameters=parameters,
        groups=tuple(groups),
        hints=tool.hints,
        phrases=tool.phrases if phrases is None else phrases,
    )
