"""Database settings: SQLite in the data directory, or PostgreSQL by URL."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, OperationalError

from toolcrib.lib.errors import storage_problem
from toolcrib.sqlite.checkpoints import AUTOCHECKPOINT_PAGES


def sqlite_database(data_dir: Path) -> dict[str, object]:
    return {
        "ENGINE": "toolcrib.sqlite",
        "NAME": data_dir / "toolcrib.sqlite3",
        "OPTIONS": {
            # Without IMMEDIATE, a transaction that reads and then writes fails under contention
            # whatever the timeout.
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            # Each of a dozen connections has its own cache; the OS caches the file anyway.
            "init_command": (
                "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA foreign_keys=ON; "
                f"PRAGMA cache_size=-500; PRAGMA wal_autocheckpoint={AUTOCHECKPOINT_PAGES};"
            ),
        },
    }


def explain_failure(error: DatabaseError) -> str:
    """Return what is wrong with the database and what to do; empty for other errors."""
    from django.conf import settings

    name = settings.DATABASES["default"]["NAME"]
    if not settings.EMBEDDED:
        is_away = isinstance(error, OperationalError)
        reason = str(error).strip().partition("\n")[0]
        return f"Database unavailable: {reason}. Check DATABASE_URL." if is_away else ""
    problem = storage_problem(error)
    if "damaged" in problem:
        return (
            f"{problem} Move {name} away and restore a backup with: manage.py restore FILE. "
            f"({error})"
        )
    return f"{problem} Check the disk and the permissions of {name}. ({error})" if problem else ""


def make_tables_if_new(command: Sequence[str]) -> None:
    """Migrate an empty embedded database before one of our own commands runs."""
    from django.conf import settings
    from django.core.management import call_command, get_commands
    from django.db import connection

    our_apps = {"catalog", "servers", "sessions_app", "toolcrib"}
    if not settings.EMBEDDED or not command or get_commands().get(command[0]) not in our_apps:
        return
    if not connection.introspection.table_names():
        call_command("migrate", verbosity=0, interactive=False)


def database_from_url(url: str) -> dict[str, object]:
    parts = urlsplit(url)
    if parts.scheme not in {"postgres", "postgresql"} or not parts.path.strip("/"):
        raise ImproperlyConfigured(
            "DATABASE_URL must have the form postgresql://user:password@host:5432/name."
        )
    options: dict[str, object] = dict(parse_qsl(parts.query))
    # A request that waits for the pool is answered 503 after `timeout` seconds. The pool retries
    # with growing pauses until `reconnect_timeout`, and begins anew at the next request.
    options["pool"] = {"min_size": 1, "max_size": 16, "timeout": 4, "reconnect_timeout": 4}
    options.setdefault("connect_timeout", 4)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(parts.path.lstrip("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "OPTIONS": options,
    }
