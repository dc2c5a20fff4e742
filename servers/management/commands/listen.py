"""Keep a live connection to every server and ask for a sync when one says it changed."""

import asyncio
import signal
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from servers.sync.listener import Listener
from toolcrib import health


class Command(BaseCommand):
    help = "Run the listener of production (embedded, `serve` runs it)."

    def handle(self, *args: Any, **options: Any) -> None:
        if settings.EMBEDDED:
            self.stderr.write("Without DATABASE_URL and REDIS_URL, `serve` listens itself.")
            sys.exit(2)
        asyncio.run(_listen())


async def _listen() -> None:
    loop = asyncio.get_running_loop()
    listening = asyncio.create_task(Listener(on_look=health.touch).run())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, listening.cancel)
    try:
        await listening
    except asyncio.CancelledError:
        return
