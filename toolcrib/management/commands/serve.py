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
from typing import Any, NoReturn

import uvicorn
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.db import DatabaseError

from sessions_app.dispatch import dispatcher
from toolcrib.accounts import invitations
from toolcrib.config import installation_keys
from toolcrib.http.http_protocol import TimeoutHttpProtocol, raise_open_files_limit
from toolcrib.runtime import web_workers

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
        raise_open_files_limit()
        if options["fd"] is not None:
            listener = socket.socket(fileno=options["fd"])
        else:
            listener = self._bind(host, port)
            if settings.WEB_WORKERS > 1:
                sys.exit(web_workers.serve(settings.WEB_WORKERS, listener, announce))
        if settings.EMBEDDED:
            self._lock_data_dir()
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
        try:
            server.run(sockets=[listener])
        except OSError as error:  # another process has bound the port too, and listens already
            if error.errno != errno.EADDRINUSE:
                raise
            self._exit_unbound(host, port, error)
        # A worker thread that waits for a server must not delay the exit: its sync is retried at
        # the next start, and child processes end with this one.
        logging.shutdown()
        os._exit(0 if server.started else 1)

    def _lock_data_dir(self) -> None:
        """Lock the data directory, or exit with the pid of the process that has it."""
        try:
            self._lock = installation_keys.lock_data_dir(settings.DATA_DIR)
        except ImproperlyConfigured as error:
            self.stderr.write(str(error))
            sys.exit(1)

    def _announce(self, base: str) -> None:
        from catalog.search.embeddings.store import model_offer  # large imports, not for --help

        try:
            line = invitations.ready_line(base)
        except DatabaseError:
            line = f"Toolcrib is ready: {base}/ (database unavailable)"
        self.stdout.write(line)
        if offer := model_offer():
            self.stdout.write(offer)
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
        """Bind the port before anything else, or exit with the reason.

        uvicorn listens once the application has started: until then connections are refused at
        once, and a client tries again, where it would give up on a request without an answer.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Accepted sockets inherit it; not every event loop sets it for a socket it was passed.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            self._exit_unbound(host, port, error)
        return listener

    def _exit_unbound(self, host: str, port: int, error: OSError) -> NoReturn:
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
        # Otherwise streams would keep their connections open until they are closed by force.
        from toolcrib.asgi import application  # created by uvicorn, after settings are loaded
        from toolcrib.runtime.live_updates import updates

        updates.close()
        await application.mcp.close_streams()
        await super().shutdown(sockets)
