"""Start a filled installation to look at: `make demo`. Never on a folder that holds anything else.

The first start fills the folder by a Toolcrib of its own on another port and says so in a file
there; later ones only serve it.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.db import connection
from django.utils import timezone

from catalog.audit import Actor
from servers.models import Server
from sessions_app.agents import api_keys
from sessions_app.models import Agent, KeyScope
from toolcrib.config import environment as env
from toolcrib.config.installation_keys import make_private_file
from toolcrib.demo import fill, history
from toolcrib.demo.sessions import Door, Refused

ACTOR = Actor.command("demo")
READY = "Toolcrib is ready:"
RELEASED = settings.DATA_DIR / "analytics-released"
FILLING, FILLED = "filling", "filled"


class Command(BaseCommand):
    help = "Start an installation filled with demo servers, agents and their calls."
    requires_system_checks = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--turns",
            type=int,
            default=fill.TURNS,
            help="How often each agent does its work while the demo is filled.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        mark = settings.DATA_DIR / "demo"
        found = mark.read_text().strip() if mark.exists() else ""
        problem = refusal(found)
        if problem:
            self.stderr.write(problem)
            sys.exit(2)
        if found != FILLED:
            if found == FILLING:
                forget_the_half()
            make_private_file(mark)
            mark.write_text(FILLING)
            self._fill(options["turns"])
            mark.write_text(FILLED)
        call_command("serve")

    def _fill(self, turns: int) -> None:
        self.stderr.write(
            f"Filling the demo in {settings.DATA_DIR}, once: servers, agents and their calls ..."
        )
        try:
            with serving() as port:
                key, text = api_keys.create_key("demo", KeyScope.ADMIN, actor=ACTOR)
                done = fill.fill(Door(port, text), RELEASED, turns)
                api_keys.revoke(key, actor=ACTOR)
            history.spread(timezone.now())
        except (Refused, TimeoutError, OSError) as error:
            self.stderr.write(f"The demo could not be filled: {error}")
            self.stderr.write(f"{settings.DATA_DIR / 'toolcrib.log'} may say more. Start it again.")
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)
        self.stderr.write(
            f"{done.servers} servers, {done.agents} agents, {done.sessions} sessions, "
            f"{done.calls} calls."
        )


def refusal(mark: str) -> str:
    """Say why this installation must not become a demo, or nothing."""
    if not settings.EMBEDDED:
        return "The demo runs embedded: unset DATABASE_URL and REDIS_URL, or run make demo."
    if not env.text("TOOLCRIB_DATA"):
        return "The demo needs a folder of its own: run make demo, or set TOOLCRIB_DATA to one."
    used = any(model.objects.exists() for model in (Server, Agent, User))
    if used and not mark:
        return f"{settings.DATA_DIR} holds an installation already. Set TOOLCRIB_DATA to another."
    return ""


def forget_the_half() -> None:
    """Begin anew where filling was interrupted; the mark says that this folder is ours."""
    connection.close()
    database = Path(str(settings.DATABASES["default"]["NAME"]))
    for path in (*database.parent.glob(f"{database.name}*"), RELEASED):
        path.unlink(missing_ok=True)
    make_private_file(database)
    call_command("migrate", verbosity=0, interactive=False)


@contextmanager
def serving() -> Iterator[int]:
    """Serve this folder on a free port while it is filled."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(settings.BASE_DIR / "manage.py"), "serve", "--port", str(port)]
    process = subprocess.Popen(  # noqa: S603 - ourselves
        command,
        env={**os.environ, "TOOLCRIB_BIND": "127.0.0.1", "PORT": str(port)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # its log is in the folder
        text=True,
    )

    def stop(*_: object) -> None:
        process.terminate()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        assert process.stdout is not None  # noqa: S101 - asked for above
        if not process.stdout.readline().startswith(READY):
            raise OSError("it did not start")
        yield port
    finally:
        signal.signal(signal.SIGTERM, before)
        process.terminate()
        process.wait()
