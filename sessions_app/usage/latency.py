"""Latency histograms: buckets that grow by the square root of two, and percentiles from them."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

from toolcrib.lib.json_codec import canonical

NO_ANSWER = -1  # a call that no server answered
MAX_BUCKET = 44  # over an hour
STEPS_PER_DOUBLING = 2


def bucket_of(milliseconds: float) -> int:
    """Return the bucket of a latency; bucket n ends at 2 ** (n / 2) milliseconds."""
    if milliseconds <= 1:
        return 0
    return min(math.ceil(STEPS_PER_DOUBLING * math.log2(milliseconds)), MAX_BUCKET)


def upper_bound(bucket: float) -> float:
    """Return the longest latency of a bucket in milliseconds; of a part of one, with a fraction."""
    return float(2 ** (bucket / STEPS_PER_DOUBLING))


def percentile(counts: Mapping[int, int], share: float) -> int | None:
    """Return a percentile in milliseconds, interpolated in its bucket; None without answers.

    The answers of a bucket are taken to be spread evenly on its logarithmic scale, so that a single
    one is in the middle: within a fifth of the exact value.
    """
    total = sum(count for bucket, count in counts.items() if bucket != NO_ANSWER)
    rank, seen = math.ceil(share * total), 0
    for bucket in sorted(counts):
        count = counts[bucket]
        if bucket == NO_ANSWER or not count:
            continue
        if seen + count >= rank:
            part = (rank - seen - 0.5) / count
            return max(1, round(upper_bound(bucket - 1 + part))) if bucket else 1
        seen += count
    return None


def format_latencies(counts: Mapping[int, int]) -> str:
    """Return calls by bucket as JSON, to be stored."""
    return canonical({str(bucket): count for bucket, count in counts.items() if count})


@lru_cache(maxsize=4096)
def parse_latencies(text: str) -> tuple[tuple[int, int], ...]:
    """Return the buckets and calls of stored JSON; few calls make the same few texts."""
    return tuple((int(bucket), count) for bucket, count in json.loads(text).items())


def histogram(milliseconds: Iterable[float]) -> Counter[int]:
    """Count durations by bucket, so that their percentiles are those of the stored hours."""
    return Counter(map(bucket_of, milliseconds))
