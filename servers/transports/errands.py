"""What is posted to a server beside everything else, since nobody waits for it.

A server may never take it. So it is given a few seconds, and there are few at a time.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

MAX_CANCELS = 50  # calls given up that a server is being told of
TAKEN_WITHIN = 5.0  # seconds for a server to take what asks for no answer


class Errands:
    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._under_way)

    def send(self, errand: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(errand)
        late = task.get_loop().call_later(TAKEN_WITHIN, task.cancel)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        task.add_done_callback(lambda done: late.cancel())
        # Seen: a courtesy that failed.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def close(self) -> None:
        for task in self._under_way:
            task.cancel()
