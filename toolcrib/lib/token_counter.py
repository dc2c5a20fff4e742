"""Token counting with one tokenizer for the whole product.

`estimator()` names it: o200k if rs-bpe is installed, otherwise characters / 4, labelled as an
estimate.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

from toolcrib.lib.json_codec import canonical

EXACT_CHARACTERS, SAMPLES = 100_000, 10


@lru_cache(maxsize=1)
def _counter() -> tuple[str, Callable[[str], int]]:
    try:
        from rs_bpe.bpe import openai  # optional: 48 MB, and not every platform has a wheel
    except ImportError:
        return "characters/4 (estimate)", lambda text: (len(text) + 3) // 4
    return "o200k", openai.o200k_base().count


def estimator() -> str:
    """Return the tokenizer's name, for display beside token counts."""
    return _counter()[0]


def count(text: str) -> int:
    """Return the number of tokens in a text; of a long one, an estimate from samples.

    Counting a megabyte takes 30 ms, during which no other thread runs.
    """
    if len(text) > EXACT_CHARACTERS:
        size, step = EXACT_CHARACTERS // SAMPLES, len(text) // SAMPLES
        samples = [text[number * step : number * step + size] for number in range(SAMPLES)]
        return round(sum(map(_counter()[1], samples)) * len(text) / EXACT_CHARACTERS)
    # Cache schemas, which many sessions receive. Counting a short text is as fast as a lookup.
    return _count_cached(text) if len(text) >= 1_000 else _counter()[1](text)


@lru_cache(maxsize=128)
def _count_cached(text: str) -> int:
    return _counter()[1](text)


def count_definition(tool: Mapping[str, object]) -> int:
    """Count the tokens of what a model reads: name, description and input schema."""
    return count(
        canonical(
            {
                "name": tool.get("name"),
                "description": tool.get("description") or "",
                "parameters": tool.get("inputSchema"),
            }
        )
    )
