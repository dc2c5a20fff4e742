"""Poll for a condition with a deadline; TEST_TIMEOUT_SCALE stretches every deadline."""

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Deadlines only end tests that hang: a generous one costs nothing where the code works.
SCALE = float(os.environ.get("TEST_TIMEOUT_SCALE", "3"))


def scaled(seconds: float) -> float:
    """Return a deadline of the tests for the machine they run on."""
    return seconds * SCALE


def wait_for(
    check: Callable[[], T], seconds: float = 30, *, what: str = "", every: float = 0.05
) -> T:
    """Return the first true result of `check`; fail with the last one after the deadline."""
    deadline = time.monotonic() + scaled(seconds)
    while True:
        result = check()
        if result:
            return result
        if time.monotonic() > deadline:
            expected = what or getattr(check, "__doc__", "") or "the condition"
            raise AssertionError(
                f"not within {scaled(seconds):g} s: {expected}; last result: {result!r}"
            )
        time.sleep(every)
