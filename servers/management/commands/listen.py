"""Run the listener: persistent connections to servers, and a sync when their tools change."""

import asyncio
import signal
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from servers.sync.listener import Listener
from toolcrib.lib.process_identity import touch_heartbeat


class Command(BaseCommand):
    help = "Run the listener in production (in embedded mode `serve` runs it)."

    def handle(self, *args: Any, **options: Any) -> None:
        if settings.EMBEDDED:
            self.stderr.write("Without DATABASE_URL and REDIS_URL, `serve` runs the listener.")
            sys.exit(2)
        asyncio.run(_listen())


async def _listen() -> None:
    loop = asyncio.get_running_loop()
    listening = asyncio.create_task(Listener(on_poll=touch_heartbeat).run())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, listening.cancel)
    try:
        await listening
    except asyncio.CancelledError:
        return
