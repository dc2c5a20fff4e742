"""Run Toolcrib: all parts in one process, or only the web process with --web-only."""

import argparse
import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.db import DatabaseError

from sessions_app.dispatch import dispatcher
from toolcrib.accounts import invitations
from toolcrib.runtime import web_workers
from toolcrib.runtime.http_protocol import TimeoutHttpProtocol

CANCEL_MARGIN = 0.5  # seconds before uvicorn closes connections
LOOPBACK = {"127.0.0.1", "::1", "localhost"}


class Command(BaseCommand):
    help = "Start Toolcrib on PORT (default 8000)."
    requires_system_checks = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--web-only",
            action="store_true",
            help="Serve pages and API only; run celery worker, celery beat and listen separately.",
        )
        parser.add_argument("--host", default=settings.BIND)
        parser.add_argument("--port", type=int, default=settings.PORT)
        # A listening socket inherited by one of several web processes.
        parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)

    def handle(self, *args: Any, **options: Any) -> None:
        host, port = options["host"], options["port"]
        self._check_mode(host, web_only=options["web_only"])
        announce = partial(self._announce, public_url(host, port))
        if options["fd"] is not None:
            listener = socket.socket(fileno=options["fd"])
        else:
            listener = self._bind(host, port)
            if settings.WEB_WORKERS > 1:
                sys.exit(web_workers.serve(settings.WEB_WORKERS, listener, announce))
        if settings.EMBEDDED:
            call_command("migrate", verbosity=0, interactive=False)
        server = _AnnouncingServer(
            uvicorn.Config(
                "toolcrib.asgi:application",
                http=TimeoutHttpProtocol,
                # Not "auto", which would continue after a failed startup.
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=settings.DRAIN,
                timeout_keep_alive=30,
                h11_max_incomplete_event_size=64 * 1024,
            ),
            announce,
        )
        # uvicorn raises the signal again when it is done, which would end the process before our
        # own cleanup; this handler makes that harmless.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        server.run(sockets=[listener])
        # A worker thread that waits for a server must not delay the exit: its sync is retried at
        # the next start, and child processes end with this one.
        logging.shutdown()
        os._exit(0 if server.started else 1)

    def _announce(self, base: str) -> None:
        try:
            line = invitations.ready_line(base)
        except DatabaseError:
            line = f"Toolcrib is ready: {base}/ (database unavailable)"
        self.stdout.write(line)
        self.stdout.flush()

    def _check_mode(self, host: str, *, web_only: bool) -> None:
        problem = ""
        if settings.EMBEDDED and web_only:
            problem = "--web-only needs DATABASE_URL and REDIS_URL."
        elif settings.EMBEDDED and settings.WEB_WORKERS > 1:
            problem = (
                "WEB_WORKERS needs DATABASE_URL and REDIS_URL: embedded mode runs one process."
            )
        elif not settings.EMBEDDED and not web_only:
            problem = (
                "With DATABASE_URL and REDIS_URL set, run separate processes: serve --web-only, "
                "celery worker, celery beat and listen."
            )
        elif settings.EMBEDDED and settings.LOOPBACK and host not in LOOPBACK:
            # TOOLCRIB_BIND decides which programs and networks are allowed: do not bypass it.
            problem = f"To serve on {host}, set TOOLCRIB_BIND={host} instead of --host."
        if problem:
            self.stderr.write(problem)
            sys.exit(2)

    def _bind(self, host: str, port: int) -> socket.socket:
        """Bind the port before anything else, or exit with the reason."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=2048)
            # Accepted sockets inherit it; not every event loop sets it for a socket it was passed.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return listener
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                other = port + 1 if port < 65535 else 8000
                problem = (
                    f"Port {port} is in use. Stop the other process, or choose another port with "
                    f"PORT={other}."
                )
            else:
                problem = f"Cannot listen on {host}:{port}: {error.strerror or error}."
            self.stderr.write(problem)
            sys.exit(1)


def public_url(host: str, port: int) -> str:
    """Return the URL under which people reach this installation."""
    if not settings.EMBEDDED:
        return str(settings.PUBLIC_URL)
    name = "localhost" if host in LOOPBACK else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


class _AnnouncingServer(uvicorn.Server):
    """uvicorn server that prints its URL once it accepts connections."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self.announce = announce

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            await asyncio.to_thread(self.announce)

    async def main_loop(self) -> None:
        """Check for a stop signal twice a second; ten times would keep an idle process awake."""
        counter = 0
        while not await self.on_tick(counter):
            counter = (counter + 5) % 10
            await asyncio.sleep(0.5)

    async def shutdown(self, sockets: Any = None) -> None:
        # Cancel calls just before uvicorn closes connections, so that callers get a result.
        asyncio.get_running_loop().call_later(
            settings.DRAIN - CANCEL_MARGIN, dispatcher.cancel_all_calls
        )
        # Otherwise MCP streams would keep their connections open until they are closed by force.
        from toolcrib.asgi import application  # created by uvicorn, after settings are loaded

        await application.mcp.close_streams()
        await super().shutdown(sockets)
