"""Wait for something another process does: poll with a deadline, never a bare sleep."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(
    check: Callable[[], T], seconds: float = 30, *, what: str = "", every: float = 0.05
) -> T:
    """Return the first true answer of `check`, or fail with what it said last."""
    deadline = time.monotonic() + seconds
    while True:
        answer = check()
        if answer:
            return answer
        if time.monotonic() > deadline:
            wanted = what or getattr(check, "__doc__", "") or "what was waited for"
            raise AssertionError(f"not within {seconds:g} s: {wanted}; last answer: {answer!r}")
        time.sleep(every)
