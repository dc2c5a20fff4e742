"""Run Toolcrib: everything in one process, or with --web-only the web part of production."""

import argparse
import logging
import os
import signal
import sys
from typing import Any

import uvicorn
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand

from toolcrib import people


class Command(BaseCommand):
    help = "Start Toolcrib on PORT (default 8000)."
    requires_system_checks = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--web-only",
            action="store_true",
            help="Serve pages and API only; run celery worker, celery beat and listen beside it.",
        )
        parser.add_argument("--host", default=settings.BIND)
        parser.add_argument("--port", type=int, default=settings.PORT)

    def handle(self, *args: Any, **options: Any) -> None:
        if settings.EMBEDDED and options["web_only"]:
            self.stderr.write("--web-only needs DATABASE_URL and REDIS_URL.")
            sys.exit(2)
        if not settings.EMBEDDED and not options["web_only"]:
            self.stderr.write(
                "With DATABASE_URL and REDIS_URL set, run the parts apart: serve --web-only, "
                "celery worker, celery beat and listen."
            )
            sys.exit(2)
        if settings.EMBEDDED:
            call_command("migrate", verbosity=0, interactive=False)
        server = _Announcing(
            uvicorn.Config(
                "toolcrib.asgi:application",
                host=options["host"],
                port=options["port"],
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=2,
                timeout_keep_alive=30,
                h11_max_incomplete_event_size=64 * 1024,
            ),
            self,
        )
        # uvicorn raises the signal again once it is done, which would end us before our own
        # clean-up; a handler of our own makes that harmless.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        server.run()
        # A worker thread stuck in a server's answer must not keep us: its sync is taken up again
        # at the next start, and children end with us.
        logging.shutdown()
        os._exit(0 if server.started else 1)


class _Announcing(uvicorn.Server):
    """Says where it is, once it can be reached there."""

    def __init__(self, config: uvicorn.Config, command: BaseCommand) -> None:
        super().__init__(config)
        self.command = command

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            host = "localhost" if settings.LOOPBACK else self.config.host
            base = f"http://{host}:{self.config.port}"
            self.command.stdout.write(await people.ready_line(base))
            self.command.stdout.flush()
