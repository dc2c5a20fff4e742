"""Nearest-rank percentiles: the result is always an observed value."""

import math
from collections.abc import Sequence
from typing import TypeVar

N = TypeVar("N", int, float)


def percentile(values: Sequence[N], share: float) -> N | None:
    """Return the smallest value that is not exceeded by at least this share of the values."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(len(values) * share) - 1, 0)]
