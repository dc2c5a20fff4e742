"""Run Toolcrib: everything in one process, or with --web-only the web part of production."""

import argparse
import asyncio
import errno
import logging
import os
import signal
import socket
import sys
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

GIVE_UP_BEFORE = 0.5  # seconds
LOOPBACK = {"127.0.0.1", "::1", "localhost"}


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
        # A socket that listens already, handed down to one of several web processes.
        parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)

    def handle(self, *args: Any, **options: Any) -> None:
        host, port = options["host"], options["port"]
        self._check_mode(host, web_only=options["web_only"])
        if options["fd"] is not None:
            listener = socket.socket(fileno=options["fd"])
        else:
            listener = self._bind(host, port)
            if settings.WEB_WORKERS > 1:
                base = address(host, port)
                sys.exit(
                    web_workers.serve(settings.WEB_WORKERS, listener, lambda: self._ready(base))
                )
        if settings.EMBEDDED:
            call_command("migrate", verbosity=0, interactive=False)
        server = _Announcing(
            uvicorn.Config(
                "toolcrib.asgi:application",
                http=TimeoutHttpProtocol,
                # Not "auto", which would go on without a runtime that failed to start.
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=settings.DRAIN,
                timeout_keep_alive=30,
                h11_max_incomplete_event_size=64 * 1024,
            ),
            self,
            address(host, port),
        )
        # uvicorn raises the signal again once it is done, which would end us before our own
        # clean-up; a handler of our own makes that harmless.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        server.run(sockets=[listener])
        # A worker thread stuck in a server's answer must not keep us: its sync is taken up again
        # at the next start, and children end with us.
        logging.shutdown()
        os._exit(0 if server.started else 1)

    def _ready(self, base: str) -> None:
        try:
            line = asyncio.run(invitations.ready_line(base))
        except DatabaseError:
            line = f"Toolcrib is ready: {base}/ (the database does not answer yet)"
        self.stdout.write(line)
        self.stdout.flush()

    def _check_mode(self, host: str, *, web_only: bool) -> None:
        problem = ""
        if settings.EMBEDDED and web_only:
            problem = "--web-only needs DATABASE_URL and REDIS_URL."
        elif settings.EMBEDDED and settings.WEB_WORKERS > 1:
            problem = (
                "WEB_WORKERS needs DATABASE_URL and REDIS_URL: embedded, one process does "
                "everything."
            )
        elif not settings.EMBEDDED and not web_only:
            problem = (
                "With DATABASE_URL and REDIS_URL set, run the parts apart: serve --web-only, "
                "celery worker, celery beat and listen."
            )
        elif settings.EMBEDDED and settings.LOOPBACK and host not in LOOPBACK:
            # What may run and be reached follows from the setting, so it must not be bypassed.
            problem = f"To serve on {host}, set TOOLCRIB_BIND={host} instead of --host."
        if problem:
            self.stderr.write(problem)
            sys.exit(2)

    def _bind(self, host: str, port: int) -> socket.socket:
        """Take the port before anything else is done, or say why it cannot be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=2048)
            # Inherited by what is accepted; not every loop does it for a socket it did not make.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return listener
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                problem = f"Port {port} is in use. Stop what uses it, or choose another with PORT="
                problem += f"{port + 1 if port < 65535 else 8000}."
            else:
                problem = f"{host}:{port} cannot be served: {error.strerror or error}."
            self.stderr.write(problem)
            sys.exit(1)


def address(host: str, port: int) -> str:
    """Return the address people use for what is served here."""
    if not settings.EMBEDDED:
        return str(settings.PUBLIC_URL)
    shown = "localhost" if host in LOOPBACK else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


class _Announcing(uvicorn.Server):
    """Says where it is, once it can be reached there."""

    def __init__(self, config: uvicorn.Config, command: BaseCommand, base: str) -> None:
        super().__init__(config)
        self.command = command
        self.base = base

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            try:
                line = await invitations.ready_line(self.base)
            except DatabaseError:
                line = f"Toolcrib is ready: {self.base}/ (the database does not answer yet)"
            self.command.stdout.write(line)
            self.command.stdout.flush()

    async def shutdown(self, sockets: Any = None) -> None:
        # Just before uvicorn cuts them off, so that callers are told what became of their calls.
        asyncio.get_running_loop().call_later(
            settings.DRAIN - GIVE_UP_BEFORE, dispatcher.cancel_all_calls
        )
        # Streams of MCP clients would else hold their connections until they are cut.
        from toolcrib.asgi import application  # made by uvicorn, once settings are in order

        await application.mcp.close_streams()
        await super().shutdown(sockets)
