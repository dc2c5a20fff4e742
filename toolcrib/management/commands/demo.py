"""Start an installation with demo data: `make demo`. Refuses a directory with other data.

The first start fills the data directory through a temporary Toolcrib process on another port and
records that in a marker file; later starts only serve it.
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
from toolcrib_client import Toolcrib, ToolcribError

ACTOR = Actor.command("demo")
READY = "Toolcrib is ready:"
RELEASED = settings.DATA_DIR / "analytics-released"
FILLING, FILLED = "filling", "filled"


class Command(BaseCommand):
    help = "Start an installation with demo servers, agents and their calls."
    requires_system_checks = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--turns",
            type=int,
            default=fill.TURNS,
            help="How often each agent runs its scripts while the demo data is created.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        marker = settings.DATA_DIR / "demo"
        state = marker.read_text().strip() if marker.exists() else ""
        problem = find_problem(state)
        if problem:
            self.stderr.write(problem)
            sys.exit(2)
        if state != FILLED:
            if state == FILLING:
                delete_partial_data()
            make_private_file(marker)
            marker.write_text(FILLING)
            self._fill(options["turns"])
            marker.write_text(FILLED)
        call_command("serve")

    def _fill(self, turns: int) -> None:
        self.stderr.write(
            f"Creating demo data in {settings.DATA_DIR}: servers, agents and their calls ..."
        )
        try:
            with serving() as port:
                key, text = api_keys.create_key("demo", KeyScope.ADMIN, actor=ACTOR)
                summary = fill.fill(Toolcrib(f"http://127.0.0.1:{port}", text), RELEASED, turns)
                api_keys.revoke(key, actor=ACTOR)
            history.backdate(timezone.now())
        except (ToolcribError, TimeoutError, OSError) as error:
            self.stderr.write(f"Creating the demo data failed: {error}")
            self.stderr.write(
                f"See {settings.DATA_DIR / 'toolcrib.log'}, then start the demo again."
            )
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)
        self.stderr.write(summary)


def find_problem(state: str) -> str:
    """Return why this installation cannot become a demo, or an empty string."""
    if not settings.EMBEDDED:
        return "The demo runs in embedded mode: unset DATABASE_URL and REDIS_URL, or run make demo."
    if not env.text("TOOLCRIB_DATA"):
        return "The demo needs its own data directory: run make demo, or set TOOLCRIB_DATA."
    has_data = any(model.objects.exists() for model in (Server, Agent, User))
    if has_data and not state:
        return f"{settings.DATA_DIR} contains an installation. Set TOOLCRIB_DATA to another one."
    return ""


def delete_partial_data() -> None:
    """Delete the data of an interrupted start. The marker proves that it is demo data."""
    connection.close()
    database = Path(str(settings.DATABASES["default"]["NAME"]))
    for path in (*database.parent.glob(f"{database.name}*"), RELEASED):
        path.unlink(missing_ok=True)
    make_private_file(database)
    call_command("migrate", verbosity=0, interactive=False)


@contextmanager
def serving() -> Iterator[int]:
    """Serve this data directory on a free port while the demo data is created."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "toolcrib", "serve", "--port", str(port)]
    process = subprocess.Popen(  # noqa: S603 - ourselves
        command,
        cwd=settings.BASE_DIR,
        env={**os.environ, "TOOLCRIB_BIND": "127.0.0.1", "PORT": str(port)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # it logs to a file in the data directory
        text=True,
    )

    def stop(*_: object) -> None:
        process.terminate()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        assert process.stdout is not None  # noqa: S101 - stdout=PIPE
        if not process.stdout.readline().startswith(READY):
            raise OSError("the server did not start")
        yield port
    finally:
        signal.signal(signal.SIGTERM, previous)
        process.terminate()
        process.wait()
