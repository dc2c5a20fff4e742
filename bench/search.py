"""Search at 500 to 100,000 tools: rank-bm25 as it is, bm25s, and ours, in one interleaved run.

    python bench/search.py [FOLDER] [--sizes 500 3000 10000 100000] [--queries 40] [--no-endpoint]

FOLDER holds tools.jsonl with real definitions; larger sizes are made from them by perturbation,
and without a folder the tools are made up. Vectors beyond the first thousand tools are
perturbations too: what a product costs does not depend on what it means. Times are processor time
of one thread, so that a busy machine tells the same as a quiet one; wall time is in brackets.
Then: re-indexing after one change, and, on a real installation, POST /sessions/{id}/search by one
and by 32 agents at once, with the longest the event loop stood still.
"""

import argparse
import gc
import os
import random
import sys
import time
import tracemalloc
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
from catalog.search.embeddings.matrix import DetachedMatrix  # noqa: E402
from catalog.search.engine import rank  # noqa: E402
from catalog.search.index import Index, Searchable  # noqa: E402
from catalog.search.tokenizer import tokenize_query  # noqa: E402
from toolcrib.lib.percentile import percentile  # noqa: E402

MODELS = ROOT / ".cache" / "models"
ENCODED = 1_000  # tools whose vectors are really computed
ROUNDS, WARM = 5, 3  # and queries of a round that are thrown away
RAREST = 3  # words of a description that make a query


def tools_of(servers, size, seed=6):
    """As many tools as asked for: each as it is, and then again with a word changed."""
    base = [(slug, tool) for slug, tools in servers.items() for tool in tools]
    chance, made = random.Random(seed), []  # noqa: S311 - made-up tools
    vocabulary = sorted(
        {word for _, tool in base for word in (tool.get("description") or "").split()}
    )
    for at in range(size):
        slug, tool = base[at % len(base)]
        text, turn = (tool.get("description") or "").split(), at // len(base)
        if turn and text:
            text[chance.randrange(len(text))] = chance.choice(vocabulary)
        own = tool["name"] + (f"_{turn}" if turn else "")
        made.append(
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
    return made


def queries_of(tools, count, seed=7):
    """Short capability phrases, as agents write them: some words of a tool's own text."""
    chance, made = random.Random(seed), []  # noqa: S311 - made-up queries
    while len(made) < count:
        tool = chance.choice(tools)
        known = list(tokenize_query(f"{tool.original_name} {tool.description}").values())
        if len(known) >= RAREST:
            made.append(" ".join(chance.sample(known, min(len(known), chance.randint(3, 8)))))
    return made


def with_vectors(tools, encoder):
    apart = DetachedMatrix(encoder, {tool.key: tool.passage for tool in tools[:ENCODED]})
    known = apart.products(
        apart.rows([tool.key for tool in tools[:ENCODED]]), np.eye(meaning.WIDTH, dtype=np.float32)
    )
    noise = np.random.default_rng(8)
    rest = tools[ENCODED:]
    for start in range(0, len(rest), 1_000):
        some = rest[start : start + 1_000]
        near = known[noise.integers(0, len(known), len(some))]
        near = near + noise.normal(0, 0.02, near.shape).astype(np.float32)
        near /= np.linalg.norm(near, axis=1, keepdims=True)
        apart.matrix.add(dict(zip([tool.key for tool in some], near, strict=True)))
    return apart


def forget_prepared():
    search_index.index_tool.cache_clear()
    search_index._key.cache_clear()


def measured(build):
    """What building takes: seconds of the processor, and megabytes that stay."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = build()  # a traced run is slow: this one is for memory, another for time
    used = (tracemalloc.get_traced_memory()[0] - before) / 2**20
    tracemalloc.stop()
    del kept
    forget_prepared()
    started = time.process_time()
    made = build()
    return made, time.process_time() - started, used


def documents_of(tools):
    """What our lists count of each tool, every word as often as there: the same text for all."""
    known = VOCABULARY.terms
    for tool in tools:
        made = search_index.index_tool(tool).document
        counted = zip(made.terms.tolist(), made.counts.tolist(), strict=True)
        yield [known[number] for number, times in counted for _ in range(times)]


def library(tools):
    return BM25Okapi(list(documents_of(tools)))


def compared(tools):
    import bm25s

    retriever = bm25s.BM25()
    retriever.index(list(documents_of(tools)), show_progress=False)
    return retriever


def ask_library(made, query):
    scores = made.get_scores(list(tokenize_query(query)))
    return np.argsort(scores)[::-1][:10]


def ask_compared(made, query):
    return made.retrieve([list(tokenize_query(query))], k=10, show_progress=False, n_threads=0)


def one_size(size, servers, encoder, count):
    tools = tools_of(servers, size)
    asked = queries_of(tools, count)
    contenders = {}
    for name, build, ask in (
        ("rank-bm25", lambda: library(tools), ask_library),
        ("bm25s", lambda: compared(tools), ask_compared),
    ):
        contenders[name] = (*measured(build), ask)
    apart = with_vectors(tools, encoder)
    index, took, used = measured(lambda: Index(tools, apart))
    for strategy in ("bm25", "embedding", "hybrid"):
        contenders[strategy] = (
            index, took, used, lambda made, query, how=strategy: rank(
                made, query, how, explain=False
            ),
        )  # fmt: skip
    spent = {name: ([], []) for name in contenders}
    for _ in range(ROUNDS):  # one contender after another: each with its own data at hand
        for name, (made, _, _, ask) in contenders.items():
            for query in asked[:WARM] + asked:
                wall, cpu = time.perf_counter(), time.process_time()
                ask(made, query)
                spent[name][0].append(time.process_time() - cpu)
                spent[name][1].append(time.perf_counter() - wall)
    medians = {}
    for name, (_, took, used, _) in contenders.items():
        cpu, wall = (_after_warming(times, len(asked)) for times in spent[name])
        medians[name] = median(cpu)
        print(
            f"{size:>7,}  {name:<10}{milliseconds(cpu, 0.5):9.3f}{milliseconds(cpu, 0.95):9.3f}"
            f"   ({milliseconds(wall, 0.5):.2f}, {milliseconds(wall, 0.95):.2f})"
            f"{took:9.2f}{used:9.1f}{medians['rank-bm25'] / medians[name]:10.0f}×"
        )
    return reindexed(size, tools, apart)


def milliseconds(seconds, share):
    return 1000 * (percentile(seconds, share) or 0.0)


def _after_warming(times, asked):
    """Leave out the first few of each round."""
    return [spent for at, spent in enumerate(times) if at % (WARM + asked) >= WARM]


def reindexed(size, tools, apart):
    """After one change: how long until the new index stands, and how many texts were encoded."""
    one = tools[size // 2]
    changed = Searchable(**{**vars(one), "description": f"{one.description} Changed."})
    before = search_index.index_tool.cache_info().misses
    started = time.process_time()
    after = Index([*tools[: size // 2], changed, *tools[size // 2 + 1 :]], apart)
    missing = apart.matrix.missing(after.keys)
    took = time.process_time() - started
    counted = search_index.index_tool.cache_info().misses - before
    return f"{size:>7,}  {took:8.3f} s  {counted} tool counted, {len(missing)} text to encode"


def main():
    options = argparse.ArgumentParser()
    options.add_argument("folder", nargs="?", type=Path)
    options.add_argument("--sizes", nargs="+", type=int, default=[500, 3_000, 10_000, 100_000])
    options.add_argument("--queries", type=int, default=40)
    options.add_argument("--no-endpoint", action="store_true")
    options.add_argument("--agents", type=int, default=32)
    options.add_argument("--endpoint-tools", type=int, default=10_000)
    chosen = options.parse_args()
    servers = fleet.read_folder(chosen.folder) if chosen.folder else fleet.generate_servers(33, 600)
    encoder = meaning.load(MODELS)
    print("  tools  ranker     p50 ms   p95 ms   (wall p50, p95)  build s       MB  rank-bm25 ÷")
    rows = [one_size(size, servers, encoder, chosen.queries) for size in chosen.sizes]
    print("\nRe-indexed after one change, lists and all:")
    print("\n".join(rows))
    if not chosen.no_endpoint:
        search_endpoint.run(tools_of(servers, chosen.endpoint_tools), chosen.agents, encoder)


if __name__ == "__main__":
    main()
