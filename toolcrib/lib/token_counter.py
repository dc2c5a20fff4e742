"""Count tokens by a named tokenizer, the same everywhere. Pure.

`ESTIMATOR` says which: o200k where rs-bpe is installed, else a quarter of the characters,
labelled as an estimate.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

from toolcrib.lib.json_codec import canonical


@lru_cache(maxsize=1)
def _counter() -> tuple[str, Callable[[str], int]]:
    try:
        from rs_bpe.bpe import openai  # optional: 48 MB, and no wheel for every platform
    except ImportError:
        return "characters/4 (estimate)", lambda text: (len(text) + 3) // 4
    return "o200k", openai.o200k_base().count


def estimator() -> str:
    return _counter()[0]


def count(text: str) -> int:
    # Many sessions are given the same schemas. Short texts are counted as fast as looked up, and
    # long ones, results of calls, do not come again.
    return _remembered(text) if 1_000 <= len(text) <= 100_000 else _counter()[1](text)


@lru_cache(maxsize=128)
def _remembered(text: str) -> int:
    return _counter()[1](text)


def count_definition(tool: Mapping[str, object]) -> int:
    """Count what a model would read: name, description and input schema."""
    return count(
        canonical(
            {
                "name": tool.get("name"),
                "description": tool.get("description") or "",
                "parameters": tool.get("inputSchema"),
            }
        )
    )
