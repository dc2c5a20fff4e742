"""Search latency at 500 to 100,000 tools: rank-bm25, bm25s and ours, in interleaved rounds.

    python bench/search.py [FOLDER] [--sizes 500 3000 10000 100000] [--queries 40] [--hints 3]
        [--no-endpoint]

FOLDER contains tools.jsonl with real definitions; larger sizes are generated from them by
perturbation, and without a folder all tools are generated. Vectors beyond the first thousand tools
are perturbations too: the cost of a dot product does not depend on its values. Times are CPU time
of one thread, so that load on the machine does not change them; wall time is in parentheses. Then:
reindexing after one change, and, on a real installation, POST /sessions/{id}/search by one and by
32 concurrent agents, with the longest stall of the event loop.
"""

import argparse
import gc
import os
import random
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from statistics import median

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"  # read by numpy
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rank_bm25 import BM25Okapi  # noqa: E402

from bench import fleet, search_endpoint  # noqa: E402
from catalog.definitions.parsing import parameter_texts  # noqa: E402
from catalog.search import index as search_index  # noqa: E402
from catalog.search.bm25 import VOCABULARY  # noqa: E402
from catalog.search.embeddings import encoder as meaning  # noqa: E402
from catalog.search.embeddings.matrix import DetachedMatrix, Matrix  # noqa: E402
from catalog.search.engine import rank  # noqa: E402
from catalog.search.index import Index, Searchable  # noqa: E402
from catalog.search.tokenizer import tokenize_query  # noqa: E402
from toolcrib.lib.figures import percentile  # noqa: E402

MODELS = ROOT / ".cache" / "models"
ENCODED = 1_000  # tools with computed vectors
ROUNDS, WARM_UP = 5, 3  # rounds, and discarded queries per round
MIN_WORDS = 3  # of a tool's text, to generate a query from it


def generate_tools(servers, size, seed=6):
    """Return `size` tools: all of the servers, then repeated with one word changed."""
    base = [(slug, tool) for slug, tools in servers.items() for tool in tools]
    chance, result = random.Random(seed), []  # noqa: S311 - generated tools
    vocabulary = sorted(
        {word for _, tool in base for word in (tool.get("description") or "").split()}
    )
    for at in range(size):
        slug, tool = base[at % len(base)]
        text, turn = (tool.get("description") or "").split(), at // len(base)
        if turn and text:
            text[chance.randrange(len(text))] = chance.choice(vocabulary)
        own = tool["name"] + (f"_{turn}" if turn else "")
        result.append(
            Searchable(
                name=f"{slug}__{own}__{at}",
                original_name=own,
                server=slug,
                title="",
                description=" ".join(text),
                parameters="\n".join(parameter_texts(tool.get("inputSchema"), depth=3)),
                groups=(),
            )
        )
    return result


def generate_queries(tools, count, seed=7):
    """Return short queries as agents write them: some words of a tool's text."""
    chance, queries = random.Random(seed), []  # noqa: S311 - generated queries
    while len(queries) < count:
        tool = chance.choice(tools)
        words = list(tokenize_query(f"{tool.original_name} {tool.description}").values())
        if len(words) >= MIN_WORDS:
            queries.append(" ".join(chance.sample(words, min(len(words), chance.randint(3, 8)))))
    return queries


def make_vectors(tools, encoder):
    vectors = DetachedMatrix(encoder, {tool.key: tool.passage for tool in tools[:ENCODED]})
    known = vectors.products(
        vectors.rows([tool.key for tool in tools[:ENCODED]]),
        np.eye(meaning.WIDTH, dtype=np.float32),
    )
    noise = np.random.default_rng(8)
    rest = tools[ENCODED:]
    for start in range(0, len(rest), 1_000):
        some = rest[start : start + 1_000]
        near = known[noise.integers(0, len(known), len(some))]
        near = near + noise.normal(0, 0.02, near.shape).astype(np.float32)
        near /= np.linalg.norm(near, axis=1, keepdims=True)
        vectors.add(dict(zip([tool.key for tool in some], near, strict=True)))
    return vectors


def add_hints(tools, count, seed=9):
    """Return the tools with hints: sentences of words that occur in descriptions."""
    chance = random.Random(seed)  # noqa: S311 - generated hints
    words = sorted({word for tool in tools for word in tool.description.split() if word.isalpha()})
    return [
        replace(tool, phrases=tuple(" ".join(chance.choices(words, k=7)) for _ in range(count)))
        for tool in tools
    ]


def add_hint_vectors(vectors, tools):
    """Return a matrix with the vectors of the tools and perturbed ones for their hints."""
    both, noise = Matrix(), np.random.default_rng(10)
    both.reason, both.encode = "", vectors.encode
    keys = [tool.key for tool in tools]
    known = vectors.products(vectors.rows(keys), np.eye(meaning.WIDTH, dtype=np.float32))
    both.add(dict(zip(keys, known, strict=True)))
    near = known + noise.normal(0, 0.05, known.shape).astype(np.float32)
    near /= np.linalg.norm(near, axis=1, keepdims=True)
    both.add(dict(zip((tool.phrase_key for tool in tools), near, strict=True)))
    return both


def clear_index_caches():
    search_index.index_tool.cache_clear()
    search_index._key.cache_clear()
    search_index._phrase_key.cache_clear()


def measure_build(build):
    """Build an index; return it with its CPU seconds and its megabytes."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = build()  # traced, hence slow: the time is measured in a second build
    used = (tracemalloc.get_traced_memory()[0] - before) / 2**20
    tracemalloc.stop()
    del index
    clear_index_caches()
    started = time.process_time()
    index = build()
    return index, time.process_time() - started, used


def documents(tools):
    """Yield the terms of each tool with their counts, so that all rankers index the same text."""
    terms = VOCABULARY.terms
    for tool in tools:
        document = search_index.index_tool(tool).document
        counts = zip(document.terms.tolist(), document.counts.tolist(), strict=True)
        yield [terms[number] for number, count in counts for _ in range(count)]


def build_rank_bm25(tools):
    return BM25Okapi(list(documents(tools)))


def build_bm25s(tools):
    import bm25s

    retriever = bm25s.BM25()
    retriever.index(list(documents(tools)), show_progress=False)
    return retriever


def search_rank_bm25(index, query):
    scores = index.get_scores(list(tokenize_query(query)))
    return np.argsort(scores)[::-1][:10]


def search_bm25s(index, query):
    return index.retrieve([list(tokenize_query(query))], k=10, show_progress=False, n_threads=0)


def measure_size(size, servers, encoder, count, hints):
    tools = generate_tools(servers, size)
    queries = generate_queries(tools, count)
    rankers = {}
    for name, build, search in (
        ("rank-bm25", lambda: build_rank_bm25(tools), search_rank_bm25),
        ("bm25s", lambda: build_bm25s(tools), search_bm25s),
    ):
        rankers[name] = (*measure_build(build), search)
    vectors = make_vectors(tools, encoder)
    hinted = add_hints(tools, hints)
    hinted_vectors = add_hint_vectors(vectors, hinted)
    if hints:
        hinted_build = measure_build(lambda: Index(hinted, hinted_vectors))
    index, seconds, used = measure_build(lambda: Index(tools, vectors))
    for strategy in ("bm25", "embedding", "hybrid"):
        rankers[strategy] = (
            index, seconds, used, lambda index, query, how=strategy: rank(
                index, query, how, explain=False
            ),
        )  # fmt: skip
    if hints:
        rankers["with hints"] = (
            *hinted_build,
            lambda index, query: rank(index, query, "hybrid", explain=False),
        )
    durations = {name: ([], []) for name in rankers}
    for _ in range(ROUNDS):  # one ranker after another: each with its data in the CPU caches
        for name, (index, _, _, search) in rankers.items():
            for query in queries[:WARM_UP] + queries:
                wall, cpu = time.perf_counter(), time.process_time()
                search(index, query)
                durations[name][0].append(time.process_time() - cpu)
                durations[name][1].append(time.perf_counter() - wall)
    medians = {}
    for name, (_, seconds, used, _) in rankers.items():
        cpu, wall = (_without_warm_up(times, len(queries)) for times in durations[name])
        medians[name] = median(cpu)
        print(
            f"{size:>7,}  {name:<10}{milliseconds(cpu, 0.5):9.3f}{milliseconds(cpu, 0.95):9.3f}"
            f"   ({milliseconds(wall, 0.5):.2f}, {milliseconds(wall, 0.95):.2f})"
            f"{seconds:9.2f}{used:9.1f}{medians['rank-bm25'] / medians[name]:10.0f}×"
        )
    if hints:
        without, with_hints = (
            milliseconds(_without_warm_up(durations[name][0], len(queries)), 0.95)
            for name in ("hybrid", "with hints")
        )
        megabytes = rankers["with hints"][2] - rankers["hybrid"][2]
        megabytes += (hinted_vectors._vectors.nbytes - vectors._vectors.nbytes) / 2**20
        print(
            f"{size:>7,}  {hints} hints a tool: hybrid p95 {with_hints:.1f} ms, "
            f"{with_hints / without:.2f} × without; {megabytes:.1f} MB more"
        )
    return measure_reindex(size, tools, vectors)


def milliseconds(seconds, share):
    return 1000 * (percentile(seconds, share) or 0.0)


def _without_warm_up(times, queries):
    """Return the times without the warm-up queries of each round."""
    return [
        duration
        for position, duration in enumerate(times)
        if position % (WARM_UP + queries) >= WARM_UP
    ]


def measure_reindex(size, tools, vectors):
    """Return a line with the time of a new index after one change, and the texts to encode."""
    tool = tools[size // 2]
    changed = Searchable(**{**vars(tool), "description": f"{tool.description} Changed."})
    before = search_index.index_tool.cache_info().misses
    started = time.process_time()
    after = Index([*tools[: size // 2], changed, *tools[size // 2 + 1 :]], vectors)
    missing = vectors.missing(after.keys)
    seconds = time.process_time() - started
    counted = search_index.index_tool.cache_info().misses - before
    return f"{size:>7,}  {seconds:8.3f} s  {counted} tool indexed, {len(missing)} text to encode"


def main():
    options = argparse.ArgumentParser()
    options.add_argument("folder", nargs="?", type=Path)
    options.add_argument("--sizes", nargs="+", type=int, default=[500, 3_000, 10_000, 100_000])
    options.add_argument("--queries", type=int, default=40)
    options.add_argument("--hints", type=int, default=3, help="hints a tool; 0: none")
    options.add_argument("--no-endpoint", action="store_true")
    options.add_argument("--agents", type=int, default=32)
    options.add_argument("--endpoint-tools", type=int, default=10_000)
    arguments = options.parse_args()
    servers = (
        fleet.read_folder(arguments.folder) if arguments.folder else fleet.generate_servers(33, 600)
    )
    encoder = meaning.load(MODELS)
    print("  tools  ranker     p50 ms   p95 ms   (wall p50, p95)  build s       MB  rank-bm25 ÷")
    rows = [
        measure_size(size, servers, encoder, arguments.queries, arguments.hints)
        for size in arguments.sizes
    ]
    print("\nComplete reindex after one change:")
    print("\n".join(rows))
    if not arguments.no_endpoint:
        search_endpoint.run(
            generate_tools(servers, arguments.endpoint_tools), arguments.agents, encoder
        )


if __name__ == "__main__":
    main()
