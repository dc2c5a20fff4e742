"""Keep a live connection to every server and ask for a sync when one says it changed."""

import asyncio
import signal
from typing import Any

from django.core.management.base import BaseCommand

from servers.listening import Listener


class Command(BaseCommand):
    help = "Run the listener of production (embedded, `serve` runs it)."

    def handle(self, *args: Any, **options: Any) -> None:
        asyncio.run(_listen())


async def _listen() -> None:
    loop = asyncio.get_running_loop()
    listening = asyncio.create_task(Listener().run())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, listening.cancel)
    await asyncio.gather(listening, return_exceptions=True)
