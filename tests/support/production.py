"""Run the commands of docker-compose.yml as processes, with a real PostgreSQL and Redis."""

import json
import os
import re
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.installation import (
    READY,
    ROOT,
    Api,
    Process,
    clean_environment,
    free_port,
)
from tests.support.waiting import scaled

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
REQUIRED_VARIABLES = (
    "TOOLCRIB_SECRET_KEY",
    "TOOLCRIB_ENCRYPTION_KEYS",
    "POSTGRES_PASSWORD",
    "REDIS_PASSWORD",
)
REFERENCE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Interpolate ${NAME}, ${NAME:-default} and ${NAME:?message} as Compose does."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if variables.get(name):
            return variables[name]
        if kind == "?":
            raise KeyError(f"{name} {rest}")
        return rest or ""

    return REFERENCE.sub(value, text)


def make_secrets() -> dict[str, str]:
    return {name: secrets.token_urlsafe(48) for name in REQUIRED_VARIABLES}


class Production(Api):
    """A deployment on one database and one Redis, with any number of processes per service."""

    def __init__(
        self, database_url: str, redis_url: str, folder: Path, env: Mapping[str, str] | None = None
    ) -> None:
        variables = make_secrets()
        environment = SERVICES["web"]["environment"]
        variables_set = {
            name: interpolate(str(text), variables) for name, text in environment.items()
        }
        self.folder = folder
        self.env = clean_environment(
            {
                **variables_set,
                "DATABASE_URL": database_url,
                "REDIS_URL": redis_url,
                "TOOLCRIB_DATA": str(folder / "data"),
                # The upstream servers of the tests run on this machine.
                "TOOLCRIB_ALLOWED_NETWORKS": "127.0.0.0/8",
                "TOOLCRIB_ALLOW_PLAIN_HTTP": "1",
                **(env or {}),
            }
        )
        self.processes: dict[str, Process] = {}
        self.urls: list[str] = []
        self._tokens: dict[str, str] = {}

    def run(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            env={**self.env, **env},
            cwd=ROOT,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=scaled(110),
            check=False,
        )

    def command(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("python", "manage.py", *args, **env)

    def start_all(self, *services: str) -> list[Process]:
        """Start one process per service and wait until the web processes are ready."""
        started = [self._start(service) for service in services]
        for service, process in zip(services, started, strict=True):
            if service == "web":
                process.wait_for_line(READY)
        return started

    def start(self, service: str) -> Process:
        return self.start_all(service)[0]

    def _start(self, service: str) -> Process:
        """Start another process of a service with its command in the compose file."""
        name = f"{service}-{len(self.processes)}"
        env = {**self.env, "TOOLCRIB_HEARTBEAT": str(self.folder / name)}
        if service == "web":
            port = free_port()
            env["PORT"] = str(port)
            self.urls.append(f"http://localhost:{port}")
            self.url = self.urls[0]
        process = self.processes[name] = Process(SERVICES[service]["command"], env)
        return process

    def health_error(self, service: str, process: Process) -> str:
        """Run the compose file's health check for a process; return its output, '' if healthy."""
        name = next(name for name, other in self.processes.items() if other is process)
        check = SERVICES[service]["healthcheck"]["test"]
        assert check[0] == "CMD"
        port = self.url.rpartition(":")[2]
        result = self.run(*check[1:], TOOLCRIB_HEARTBEAT=str(self.folder / name), PORT=port)
        return "" if result.returncode == 0 else result.stdout + result.stderr

    def web_process(self, number: int) -> Api:
        """Return a client for one of several web processes."""
        client = Api()
        client.url = self.urls[number]
        return client

    def token(self, scope: str) -> str:
        if scope not in self._tokens:
            options = ("--scope", scope, "--json", "--skip-checks")
            process = self.command("create_token", f"tests {scope}", *options)
            assert process.returncode == 0, process.stderr
            self._tokens[scope] = json.loads(process.stdout)["key"]
        return self._tokens[scope]

    @property
    def log(self) -> str:
        return "\n".join(f"--- {name}\n{process.log}" for name, process in self.processes.items())

    def stop(self) -> None:
        for process in self.processes.values():
            if process.running:
                os.kill(process.pid, 15)
        for process in self.processes.values():
            process.__exit__()
