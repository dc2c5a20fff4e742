"""Waiting for the end of calls and scripts, in whichever process they are executed.

One check finds what has ended of all that is waited for in this process. It is made after commits,
or twice a second where commits cannot be noticed (Executor), and at once for this process's own.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from sessions_app.ledger import writer as ledger_writer
from sessions_app.models import UNFINISHED, Call


class EndWatch:
    """Wakes those that wait for the end of something. `find_ended` returns which ids ended."""

    def __init__(self, find_ended: Callable[[list[str]], list[str]]) -> None:
        self._find_ended = find_ended
        self._waiting: dict[str, set[asyncio.Event]] = {}

    async def wait(self, call_id: str, seconds: float) -> None:
        """Wait until a call has ended, at most `seconds`."""
        ended = asyncio.Event()
        self._waiting.setdefault(call_id, set()).add(ended)
        try:
            await self.check()  # it may have ended before
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await ended.wait()
        finally:
            self._waiting[call_id].discard(ended)
            if not self._waiting[call_id]:
                del self._waiting[call_id]

    def notify(self, call_id: str) -> None:
        for ended in self._waiting.get(call_id, ()):
            ended.set()

    async def check(self) -> None:
        """Wake those whose call has ended."""
        if self._waiting:
            find, waiting = self._find_ended, list(self._waiting)
            for call_id in await ledger_writer.run_off_loop(find, waiting):
                self.notify(call_id)


def _ended(call_ids: list[str]) -> list[str]:
    rows = Call.objects.filter(call_id__in=call_ids).exclude(state__in=UNFINISHED)
    return list(rows.values_list("call_id", flat=True))


watch = EndWatch(_ended)
