"""What this installation runs on and how it is, for people and for reports of bugs.

Holds no secret, no name and no address: nothing here is read from a credential, and variables of
the environment appear by name only.
"""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import redis
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
from toolcrib.runtime.lifespan import runtime

PACKAGES = ("Django", "mcp", "celery", "django-ninja", "uvicorn", "redis")
QUEUES = ("sync", "index")
REDIS_PATIENCE = 0.5  # seconds


@dataclass(frozen=True)
class Fact:
    label: str
    value: str
    state: str = ""  # ok, failing: how it is, where it can be well or not


@dataclass(frozen=True)
class Part:
    title: str
    facts: list[Fact]


def facts() -> list[Part]:
    return [
        Part("Toolcrib", _ours()),
        Part("Health", [*_database(), *_queue(), *_loop(), *_turns(), *_search()]),
        Part("Runs on", _versions()),
        Part("Holds", _counts()),
    ]


def report(parts: list[Part]) -> str:
    """Write the facts as text to send to somebody."""
    return "\n\n".join(
        "\n".join([f"[{part.title}]", *(f"{fact.label}: {fact.value}" for fact in part.facts)])
        for part in parts
    )


def _ours() -> list[Fact]:
    given = sorted(settings.FROM_ENVIRONMENT)
    return [
        Fact("Version", settings.VERSION),
        Fact("Way of running", "embedded, one process" if settings.EMBEDDED else "production"),
        Fact("Revision of the catalog", f"{Revision.current():,}"),
        Fact("Tokenizer", token_counter.estimator()),
        Fact("Variables that are set", ", ".join(given) or "none"),
    ]


def _versions() -> list[Fact]:
    known = [Fact("Python", platform.python_version()), Fact("System", platform.platform())]
    return known + [Fact(name, _version(name)) for name in PACKAGES]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _database() -> list[Fact]:
    words = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
    kind = words.get(connection.vendor, connection.vendor)
    statement = "sqlite_version()" if connection.vendor == "sqlite" else "version()"
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {statement}")
            found = str(cursor.fetchone()[0])
    except DatabaseError:
        return [Fact("Database", f"{kind}, does not answer", "failing")]
    number = next((word for word in found.split() if word[:1].isdigit()), "")
    return [Fact("Database", f"{kind} {number}", "ok")]


def _queue() -> list[Fact]:
    if settings.EMBEDDED:
        # Only the process that serves has a worker; a command or a test has none.
        runs = runtime.worker is not None
        said = "runs in this process" if runs else "does not run in this process"
        return [Fact("Queue", f"in memory, the worker {said}", "ok" if runs else "failing")]
    try:
        client = redis.Redis.from_url(
            settings.REDIS_URL,
            socket_connect_timeout=REDIS_PATIENCE,
            socket_timeout=REDIS_PATIENCE,
        )
        with client:
            number = client.info("server")["redis_version"]
            waiting = {name: client.llen(name) for name in QUEUES}
    except redis.RedisError:
        # Its own words may hold the address, with a password.
        return [Fact("Redis", "does not answer", "failing"), Fact("Queue", "unknown", "failing")]
    tasks = ", ".join(f"{many:,} in {name}" for name, many in waiting.items())
    return [Fact("Redis", f"{number}", "ok"), Fact("Queue", f"tasks waiting: {tasks}", "ok")]


def _loop() -> list[Fact]:
    stalls = runtime.pulse.stalls()
    if not stalls.seconds:
        return [Fact("Event loop", "does not run in this process")]
    said = f"late by at most {stalls.longest_ms:,.0f} ms in the last minute"
    said += f", by {stalls.p99_ms:,.0f} ms or less 99 times in 100"
    return [Fact("Event loop", said, "failing" if stalls.is_long else "ok")]


def _turns() -> list[Fact]:
    """Say how many servers hold calls up, without their names."""
    held_up = sum(bool(gauge.sentence) for gauge in metrics.all_server_metrics())
    if not held_up:
        return [Fact("Calls", "no server holds them up", "ok")]
    many = "1 server holds" if held_up == 1 else f"{held_up} servers hold"
    return [Fact("Calls", f"{many} them up; GET /api/v1/health says which", "failing")]


def _search() -> list[Fact]:
    far = vector_store.progress()
    if far.state == "unavailable":
        return [Fact("Search", f"by words only: {far.reason}")]
    if far.state == "working":
        made = f"vectors of {far.embedded:,} of {far.total:,} texts are made"
        return [Fact("Search", made, "ok")]
    return [Fact("Search", f"by words and meaning, {far.total:,} texts", "ok")]


def _counts() -> list[Fact]:
    states = dict(Tool.objects.values_list("state").annotate(Count("pk")).order_by())
    waiting = states.get(ToolState.WAITING, 0)
    counted = {
        "Servers": Server.objects.count(),
        "Tools": sum(states.values()) - states.get(ToolState.MISSING, 0),
        "Tools that wait": waiting,
        "Groups": Group.objects.count(),
        "Agents": Agent.objects.count(),
        "Sessions": AgentSession.objects.count(),
        "Calls": Call.objects.count(),
        "People": User.objects.count(),
        "Entries of the audit log": AuditEntry.objects.count(),
    }
    return [Fact(label, f"{number:,}") for label, number in counted.items()]
