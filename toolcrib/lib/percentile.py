"""Percentiles by the nearest rank: always a value that was observed."""

import math
from collections.abc import Sequence
from typing import TypeVar

N = TypeVar("N", int, float)


def percentile(values: Sequence[N], share: float) -> N | None:
    """Return the smallest value that at least this share of the values does not exceed."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(len(values) * share) - 1, 0)]
