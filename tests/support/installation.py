"""Run Toolcrib as real processes, with private Redis and PostgreSQL servers.

Everything binds to a free port of 127.0.0.1, uses its own folder and stops with its context
manager.
"""

import itertools
import json as jsonlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psycopg
import redis
from psycopg import sql

from tests.support import parts
from tests.support.migrated import copy_database
from tests.support.waiting import scaled, wait_for

ROOT = Path(__file__).resolve().parent.parent.parent
READY = "Toolcrib is ready: "
# Environment variables of the test run that its processes must not inherit.
EXCLUDED_PREFIXES = (
    "TOOLCRIB_",
    "DATABASE_URL",
    "REDIS_URL",
    "DEBUG",
    "PORT",
    "DJANGO_",
    "PYTEST_",
    "CELERY_",
)


def free_port() -> int:
    """Return a free port that no outgoing connection gets, so it stays free between two starts."""
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(EXCLUDED_PREFIXES)
    }
    folder = str(Path(sys.executable).parent)
    path = f"{folder}{os.pathsep}{inherited.get('PATH', os.defpath)}"
    model = {"TOOLCRIB_EMBEDDINGS": "0", "TOOLCRIB_MODELS": str(ROOT / ".cache" / "models")}
    return {
        **inherited,
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
        "MALLOC_ARENA_MAX": "2",
        **model,
        **extra,
    }


def descendants(pid: int) -> list[int]:
    """Return the pids of all living descendants of a process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                after_name = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if after_name[0] != b"Z":
                    parents[int(entry.name)] = int(after_name[1])
    result: list[int] = []
    generation = [pid]
    while generation:
        generation = [child for child, parent in parents.items() if parent in generation]
        result += generation
    return result


def is_alive(pid: int) -> bool:
    """Return whether a thread of the process is left.

    The main thread of a killed process is a zombie before the other threads have exited, and
    until the last one has, the process keeps its files open and its port in use.
    """
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False
    return any(_thread_state(thread) not in (b"Z", b"X") for thread in threads)


def _thread_state(thread: Path) -> bytes:
    try:
        return (thread / "stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return b"X"


class Process:
    """A child process: its standard output as lines, and all of its output as `log`."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        cwd: Path = ROOT,
        user: str | None = None,
    ) -> None:
        self.argv = list(argv)
        self.lines: list[str] = []
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _close_files)
        self._changed = threading.Condition()
        self._ended = False
        self._popen = subprocess.Popen(
            self.argv,
            env=dict(env),
            cwd=cwd,
            user=user,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        self.pid = self._popen.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for_line(self, prefix: str, seconds: float = 60) -> str:
        """Wait for a line of standard output with this prefix, and return the rest of it."""

        def find_line() -> str | None:
            return next((line for line in self.lines if line.startswith(prefix)), None)

        with self._changed:
            self._changed.wait_for(lambda: find_line() is not None or self._ended, scaled(seconds))
            line = find_line()
        assert line is not None, f"{self.argv} printed no line {prefix!r}:\n{self.log}"
        return line.removeprefix(prefix)

    @property
    def log(self) -> str:
        """The complete output: standard output, then standard error."""
        if not self._stderr.closed:
            # pread: the child writes through the same offset.
            size = os.fstat(self._stderr.fileno()).st_size
            self._log = os.pread(self._stderr.fileno(), size, 0).decode(errors="replace")
        return "\n".join([*self.lines, self._log])

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def children(self) -> list[int]:
        return descendants(self.pid)

    def wait(self, seconds: float = 60) -> int:
        """Wait until the process exits and return the exit code."""
        try:
            code = self._popen.wait(scaled(seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"{self.argv} did not exit in {seconds:g} s:\n{self.log}"
            ) from None
        self._close_files()
        return code

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30) -> float:
        """Send a signal, wait for the exit and return the seconds it took."""
        started = time.monotonic()
        if self.running:
            self._popen.send_signal(number)
        self.wait(seconds)
        return time.monotonic() - started

    def kill(self) -> None:
        if self.running:
            self._popen.kill()
            self._popen.wait()
        self._close_files()

    @property
    def code(self) -> int | None:
        return self._popen.poll()

    def _close_files(self) -> None:
        # A child that outlives the process may keep the pipe open; tests check for such children.
        self._reader.join(scaled(5))
        _ = self.log
        self._stderr.close()
        if self._popen.stdout is not None and not self._reader.is_alive():
            self._popen.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.stop()
        finally:
            self.kill()


class Api:
    """HTTP client for a running Toolcrib: ignores proxies, returns error statuses."""

    url: str
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def token(self, scope: str) -> str:
        raise NotImplementedError

    def get(
        self,
        path: str,
        *,
        method: str = "GET",
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Request a path and return the status and the body."""
        request = urllib.request.Request(  # noqa: S310 - our own server
            self.url + path, method=method, data=data, headers=dict(headers or {})
        )
        try:
            with self.opener.open(request, timeout=scaled(30)) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def api(
        self, method: str, path: str, json: Any = None, token: str | None = None
    ) -> tuple[int, Any]:
        """Call /api/v1 + path, by default with an admin token; `token=''` sends none."""
        headers = {"Content-Type": "application/json"}
        token = self.token("admin") if token is None else token
        if token:
            headers["Authorization"] = f"Bearer {token}"
        data = jsonlib.dumps(json).encode() if json is not None else None
        status, body = self.get(f"/api/v1{path}", method=method, data=data, headers=headers)
        return status, jsonlib.loads(body) if body else None

    def readiness(self) -> dict[str, Any]:
        body: dict[str, Any] = jsonlib.loads(self.get("/readyz")[1])
        return body

    def tool_names(self, slug: str) -> list[str]:
        """Return the original names of a server's tools in the catalog."""
        names: list[str] = []
        cursor = ""
        while True:
            _, page = self.api("GET", f"/tools?server={slug}&limit=100&cursor={cursor}")
            names += [tool["original_name"] for tool in page["items"]]
            cursor = page["next_cursor"]
            if not cursor:
                return names


class Installation(Api):
    """`manage.py serve` on a data folder; `with Installation(folder) as toolcrib: ...`.

    A new folder gets a migrated database, or with `migrated=False` nothing.
    """

    def __init__(
        self,
        data_dir: Path,
        env: Mapping[str, str] | None = None,
        *,
        arguments: Sequence[str] = ("serve",),
        cwd: Path = ROOT,
        migrated: bool = True,
    ) -> None:
        self.data_dir = data_dir
        self.migrated = migrated
        self.arguments = arguments
        self.cwd = cwd
        self.port = free_port()
        self.env = clean_environment(
            {"TOOLCRIB_DATA": str(data_dir), "PORT": str(self.port), **(env or {})}
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.setup_url = ""
        self.ready_line = ""
        self.process: Process | None = None
        self._tokens: dict[str, str] = {}

    def start(self) -> Self:
        """Start the process and wait for its ready line."""
        self._prepare()
        self.process = Process(self._argv(*self.arguments), self.env, cwd=self.cwd)
        self.ready_line = self.process.wait_for_line(READY)
        path = self.ready_line.partition("://")[2].partition("/")[2]
        self.setup_url = f"{self.url}/{path}" if path else ""
        return self

    def _prepare(self) -> None:
        if self.migrated and "DATABASE_URL" not in self.env:
            copy_database(self.data_dir, self.env)

    def _argv(self, *args: str) -> list[str]:
        return [sys.executable, str(ROOT / "manage.py"), *args]

    def command(
        self, *args: str, env: Mapping[str, str] | None = None, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a manage.py command with the same environment."""
        self._prepare()
        return subprocess.run(
            self._argv(*args),
            env={**self.env, **(env or {})},
            cwd=self.cwd,
            capture_output=True,
            text=True,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            timeout=scaled(110),
            check=False,
        )

    def token(self, scope: str) -> str:
        """Return an API key of this scope; created on first use."""
        if scope not in self._tokens:
            options = ("--scope", scope, "--json", "--skip-checks")
            process = self.command("create_token", f"tests {scope}", *options)
            assert process.returncode == 0, process.stderr
            self._tokens[scope] = jsonlib.loads(process.stdout)["key"]
        return self._tokens[scope]

    @property
    def log(self) -> str:
        return self.process.log if self.process else ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def children(self) -> list[int]:
        return descendants(self.pid)

    def stop(self, number: int = signal.SIGTERM) -> float:
        assert self.process is not None
        return self.process.stop(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        if self.process is not None:
            self.process.__exit__()


# --- Services ---------------------------------------------------------------------------------


class RedisServer:
    """A redis-server that can be stopped and restarted on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._databases = itertools.count(1)
        self.process: Process | None = None

    def start(self) -> None:
        binary = parts.redis_server()
        assert binary, "redis-server is not installed"
        options = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "no"}
        options["databases"] = 512
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        self.process = Process([binary, *flags, "--dir", str(self.folder)], clean_environment({}))
        wait_for(self._responds, 20, what="redis-server answers")

    def _responds(self) -> bool:
        assert self.process is not None
        assert self.process.running, self.process.log
        with self.client() as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False

    def create(self) -> str:
        """Return the URL of a database that no other deployment uses, nor its queues."""
        return f"redis://127.0.0.1:{self.port}/{next(self._databases)}"

    def client(self) -> "redis.Redis":
        return redis.Redis.from_url(self.url)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """Run a private Redis."""
    with tempfile.TemporaryDirectory(prefix="toolcrib-redis-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()


@dataclass(frozen=True)
class PostgresServer:
    port: int

    def url(self, database: str) -> str:
        return f"postgresql://toolcrib:unused@127.0.0.1:{self.port}/{database}"

    def create(self, database: str, template: str = "template1") -> str:
        """Create a database and return its URL."""
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
            sql.Identifier(database), sql.Identifier(template)
        )
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement)
        return self.url(database)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Run a private PostgreSQL, as an unprivileged user if the tests run as root."""
    folder_name = parts.postgres_bin()
    assert folder_name, "PostgreSQL is not installed"
    binaries = Path(folder_name)
    user = unprivileged_user() if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="toolcrib-postgres-"))
    try:
        if user:
            shutil.chown(folder, user)
        data = folder / "data"
        server = PostgresServer(free_port())
        environment = clean_environment({"LC_ALL": "C.UTF-8"})
        subprocess.run(
            [
                *(str(binaries / "initdb"), "--pgdata", str(data), "--username", "toolcrib"),
                *("--auth", "trust", "--encoding", "UTF8", "--no-sync"),
            ],
            user=user,
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
        )
        settings = {
            "port": server.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": folder,
            **dict.fromkeys(("fsync", "synchronous_commit", "full_page_writes"), "off"),
        }
        flags = [text for name, value in settings.items() for text in ("-c", f"{name}={value}")]
        postgres = Process(
            [str(binaries / "postgres"), "-D", str(data), *flags],
            environment,
            cwd=folder,
            user=user,
        )
        try:
            wait_for(
                lambda: accepts_connections(server, postgres),
                30,
                what="PostgreSQL accepts connections",
            )
            yield server
        finally:
            try:
                postgres.stop(signal.SIGINT)  # drops open connections, unlike SIGTERM
            finally:
                postgres.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unprivileged_user() -> str:
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def accepts_connections(server: PostgresServer, process: Process) -> bool:
    assert process.running, process.log
    try:
        psycopg.connect(server.url("postgres"), connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True
