"""System information and health checks of this installation, for people and bug reports.

Contains no secrets, names or URLs: nothing is read from a credential, and environment variables
appear by name only.
"""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from django.conf import settings
from django.contrib.auth.models import User
from django.db import DatabaseError, connection
from django.db.models import Count

from catalog.models import AuditEntry, Group, Revision, Tool, ToolState
from catalog.search.embeddings import store as vector_store
from servers.connections import metrics
from servers.models import Server
from sessions_app.models import Agent, AgentSession, Call
from toolcrib.lib import token_counter
from toolcrib.lib.display import group_digits
from toolcrib.lib.protocols.redis_client import connect, redis_error
from toolcrib.lib.text import plural
from toolcrib.runtime.lifespan import runtime

if TYPE_CHECKING:
    from redis import Redis

PACKAGES = ("Django", "mcp", "celery", "django-ninja", "uvicorn", "redis")
QUEUES = ("sync", "index")


@dataclass(frozen=True)
class Fact:
    label: str
    value: str
    state: str = ""  # ok or failing, for health checks


@dataclass(frozen=True)
class Part:
    title: str
    facts: list[Fact]


def facts() -> list[Part]:
    """Return all facts by part. Runs the health checks."""
    health = [*_database(), *_queue(), *_event_loop(), *_server_capacity(), *_search()]
    return [
        Part("Toolcrib", _installation()),
        Part("Health", health),
        Part("Dependencies", _versions()),
        Part("Record counts", _counts()),
    ]


def report(parts: list[Part]) -> str:
    """Return the facts as plain text, for bug reports."""
    return "\n\n".join(
        "\n".join([f"[{part.title}]", *(f"{fact.label}: {fact.value}" for fact in part.facts)])
        for part in parts
    )


def _installation() -> list[Fact]:
    variables = sorted(settings.FROM_ENVIRONMENT)
    return [
        Fact("Version", settings.VERSION),
        Fact("Deployment mode", "embedded, one process" if settings.EMBEDDED else "production"),
        Fact("Catalog revision", f"{group_digits(Revision.current())}"),
        Fact("Tokenizer", token_counter.estimator()),
        Fact("Environment", ", ".join(variables) or "no variables set"),
    ]


def _versions() -> list[Fact]:
    system = [Fact("Python", platform.python_version()), Fact("System", platform.platform())]
    return system + [Fact(name, _version(name)) for name in PACKAGES]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _database() -> list[Fact]:
    names = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
    name = names.get(connection.vendor, connection.vendor)
    statement = "sqlite_version()" if connection.vendor == "sqlite" else "version()"
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {statement}")
            version_text = str(cursor.fetchone()[0])
    except DatabaseError:
        return [Fact("Database", f"{name}, unavailable", "failing")]
    number = next((word for word in version_text.split() if word[:1].isdigit()), "")
    return [Fact("Database", f"{name} {number}", "ok")]


def redis_client() -> "Redis":
    return connect(settings.REDIS_URL, 0.5, socket_timeout=0.5)


def _queue() -> list[Fact]:
    if settings.EMBEDDED:
        # Only the serving process has a worker; a command or a test has none.
        if runtime.worker is None:
            return [Fact("Queue", "in memory, worker not running", "failing")]
        return [Fact("Queue", "in memory, worker running", "ok")]
    try:
        with redis_client() as client:
            number = client.info("server")["redis_version"]
            pending = {name: client.llen(name) for name in QUEUES}
    except redis_error():
        # The error text may contain the URL with its password.
        return [Fact("Redis", "unavailable", "failing"), Fact("Queue", "unknown", "failing")]
    tasks = ", ".join(f"{group_digits(count)} in {name}" for name, count in pending.items())
    return [Fact("Redis", f"{number}", "ok"), Fact("Queue", f"pending tasks: {tasks}", "ok")]


def _event_loop() -> list[Fact]:
    lag = runtime.loop_monitor.lag()
    if not lag.seconds:
        return [Fact("Event-loop lag", "not measured in this process")]
    text = f"max {lag.longest_ms:,.0f} ms, p99 {lag.p99_ms:,.0f} ms in the last minute"
    return [Fact("Event-loop lag", text, "failing" if lag.is_long else "ok")]


def _server_capacity() -> list[Fact]:
    """Count the servers that delay or reject calls, without naming them."""
    limited = sum(bool(server.sentence) for server in metrics.all_server_metrics())
    if not limited:
        return [Fact("Server capacity", "no server delays or rejects calls", "ok")]
    servers = plural(limited, "server")
    verbs = "delays or rejects" if limited == 1 else "delay or reject"
    text = f"{servers} {verbs} calls; see GET /api/v1/health"
    return [Fact("Server capacity", text, "failing")]


def _search() -> list[Fact]:
    progress = vector_store.progress()
    if progress.state == "unavailable":
        return [Fact("Search", f"keyword only: {progress.reason}")]
    if progress.state == "working":
        total = plural(progress.total, "text")
        text = f"building vectors, {group_digits(progress.embedded)} of {total} done"
        return [Fact("Search", text, "ok")]
    return [Fact("Search", f"keyword and semantic, {plural(progress.total, 'text')}", "ok")]


def _counts() -> list[Fact]:
    states = dict(Tool.objects.values_list("state").annotate(Count("pk")).order_by())
    counts = {
        "Servers": Server.objects.count(),
        "Tools": sum(states.values()) - states.get(ToolState.MISSING, 0),
        "Tools pending review": states.get(ToolState.WAITING, 0),
        "Groups": Group.objects.count(),
        "Agents": Agent.objects.count(),
        "Sessions": AgentSession.objects.count(),
        "Calls": Call.objects.count(),
        "People": User.objects.count(),
        "Audit log entries": AuditEntry.objects.count(),
    }
    return [Fact(label, f"{group_digits(number)}") for label, number in counts.items()]
