"""Latency histograms: buckets that grow by the square root of two, and percentiles from them."""

import math
from collections.abc import Mapping

NO_ANSWER = -1  # a call that no server answered
MAX_BUCKET = 44  # over an hour
STEPS_PER_DOUBLING = 2


def bucket_of(milliseconds: float) -> int:
    """Return the bucket of a latency; bucket n ends at 2 ** (n / 2) milliseconds."""
    if milliseconds <= 1:
        return 0
    return min(math.ceil(STEPS_PER_DOUBLING * math.log2(milliseconds)), MAX_BUCKET)


def upper_bound(bucket: int) -> float:
    """Return the longest latency of a bucket in milliseconds."""
    return float(2 ** (bucket / STEPS_PER_DOUBLING))


def percentile(counts: Mapping[int, int], share: float) -> int | None:
    """Return a percentile in milliseconds, interpolated in its bucket; None without answers."""
    total = sum(count for bucket, count in counts.items() if bucket != NO_ANSWER)
    rank, seen = share * total, 0
    for bucket in sorted(counts):
        count = counts[bucket]
        if bucket == NO_ANSWER or not count:
            continue
        if seen + count >= rank:
            low = upper_bound(bucket - 1) if bucket else 0.0
            part = (rank - seen) / count
            return max(1, round(low + (upper_bound(bucket) - low) * part))
        seen += count
    return None
