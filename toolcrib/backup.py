"""Database backup and restore, portable between SQLite and PostgreSQL.

The file is gzipped JSON lines: a header, then one row per line. Credentials and payloads of calls
stay encrypted as in the database; the keys are written to a second file, or stay with the operator.
Both files are encrypted with a passphrase by `backup_encryption`. Sign-ins, lockouts, sync leases,
calls in progress and the answers stored for agents are not restored; the history of sessions is.
"""

import codecs
import gzip
import json
import os
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from django.apps import apps
from django.conf import settings
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.core import serializers
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.core.management.color import no_style
from django.core.serializers.base import DeserializationError
from django.core.serializers.json import DjangoJSONEncoder
from django.core.serializers.python import Deserializer
from django.db import DatabaseError, connection, transaction
from django.db.migrations import operations
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import Model
from django.utils import timezone

from catalog import audit
from catalog.audit import Actor
from catalog.models import Revision
from servers.models import Credential, Server, SyncRun
from servers.registration import credentials
from sessions_app.models import (
    IN_FLIGHT,
    Call,
    CallAnswer,
    CallState,
    DataKey,
    HeldCall,
    ScriptRun,
)
from sessions_app.models.encryption import (
    mark_calls_as_clear,
    payloads_as_stored,
    restore_data_keys,
    rewrap_data_keys,
)
from toolcrib.backup_encryption import decrypted_reader, is_encrypted
from toolcrib.config import environment as env
from toolcrib.lib.errors import Conflict, Invalid

FORMAT = 1
OUR_APPS = ("catalog", "servers", "sessions_app")
BATCH = 500
HEADER_FIELDS = {"format", "version", "key", "migrations", "rows"}
# Errors that Django and the database raise for rows that are not from a valid backup.
INVALID_ROW_ERRORS = (
    DatabaseError,
    DeserializationError,
    FieldDoesNotExist,
    ValidationError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
)
# Whole answers and exact requests are for the calling agent alone. Older backups contain answers.
# Without them a call that waits is expired after a restore.
NOT_BACKED_UP = (CallAnswer, HeldCall)
# A paused script contains whole answers too. Its calls expire after a restore, and it fails.
NOT_BACKED_UP_COLUMNS: dict[type[Model], tuple[str, ...]] = {ScriptRun: ("snapshot", "payload")}
# Of what an older schema lacks, columns and tables get their defaults.
ADDITIVE = (
    operations.AddConstraint,
    operations.AddField,
    operations.AddIndex,
    operations.AlterField,
    operations.AlterModelOptions,
    operations.CreateModel,
    operations.RemoveConstraint,
    operations.RemoveIndex,
    operations.RunSQL,  # run again on the restored rows
)
Row = dict[str, Any]


@dataclass(frozen=True)
class RestoreResult:
    rows: int
    key: str  # fingerprint of the key that encrypted the backup's credentials
    unreadable: int
    servers: list[str]  # with unreadable credentials
    unreadable_data_keys: int  # of stored payloads


def backup_models() -> list[type[Model]]:
    """Return the models of our apps and the users, without what belongs to agents alone."""
    return [model for model in _models() if model not in NOT_BACKED_UP]


def _models() -> list[type[Model]]:
    ours = (apps.get_app_config(label).get_models(include_auto_created=True) for label in OUR_APPS)
    return [User, *(model for models in ours for model in models if model._meta.managed)]


# --- Writing ----------------------------------------------------------------------------------


def write(stream: IO[bytes]) -> Row:
    """Write a consistent snapshot to the stream; return its header. Does not block writers."""
    with (
        payloads_as_stored(),
        _snapshot(),
        gzip.GzipFile(fileobj=stream, mode="wb", filename="") as packed,
    ):
        header = _header()
        packed.write(json.dumps(header, sort_keys=True).encode() + b"\n")
        for model in backup_models():
            rows = model._base_manager.order_by("pk").iterator(chunk_size=BATCH)
            left_out = NOT_BACKED_UP_COLUMNS.get(model, ())
            names = [
                column.name for column in model._meta.concrete_fields if column.name not in left_out
            ]
            lines = codecs.getwriter("utf-8")(packed)
            serializers.serialize(
                "jsonl", rows, stream=lines, fields=names, cls=_MicrosecondEncoder
            )
    return header


class _MicrosecondEncoder(DjangoJSONEncoder):
    """Keep the microseconds of timestamps, which Django's encoder truncates."""

    def default(self, value: object) -> object:
        return value.isoformat() if isinstance(value, datetime) else super().default(value)


@contextmanager
def _snapshot() -> Iterator[None]:
    """Read from one database snapshot while others continue to write."""
    if connection.vendor == "postgresql":
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield
        return
    # In WAL mode a deferred transaction reads one snapshot without a lock; atomic() would start an
    # immediate one.
    with connection.cursor() as cursor:
        cursor.execute("BEGIN DEFERRED")
        try:
            yield
        finally:
            cursor.execute("ROLLBACK")


def _header() -> Row:
    return {
        "format": FORMAT,
        "version": settings.VERSION,
        "made_at": timezone.now().isoformat(),
        "key": credentials.key_fingerprint(),
        "migrations": _migrations(),
        "rows": {model._meta.label: model._base_manager.count() for model in backup_models()},
    }


def _migrations() -> list[str]:
    applied = MigrationRecorder(connection).applied_migrations()
    return sorted(f"{app}.{name}" for app, name in applied if app in OUR_APPS)


@contextmanager
def private_file(path: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """Write a file atomically with mode 0600."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if force:
            draft.replace(path)
        else:
            os.link(draft, path)
    except FileExistsError as error:
        raise file_exists(path) from error
    except OSError as error:
        raise Invalid(f"Cannot write {path}: {error.strerror}.") from error
    finally:
        with suppress(OSError):
            draft.unlink()


def file_exists(path: Path) -> Conflict:
    return Conflict(f"{path} already exists.", hint="Choose another name, or add --force.")


# --- Keys -------------------------------------------------------------------------------------


def keys_are_files() -> bool:
    """Return whether the keys are files in the data directory, not environment variables."""
    variables = ("TOOLCRIB_SECRET_KEY", "TOOLCRIB_ENCRYPTION_KEYS")
    return settings.EMBEDDED and not any(env.secret(name) for name in variables)


def key_document() -> bytes:
    """Return the content of FILE.key."""
    names = {"secret.key": settings.SECRET_KEY, "encryption.key": settings.ENCRYPTION_KEYS[0]}
    body = {"format": FORMAT, "key": credentials.key_fingerprint(), "files": names}
    return json.dumps(body, indent=2).encode() + b"\n"


def read_keys(path: Path, fingerprint: str, passphrase: str = "") -> dict[str, str]:
    """Return the key files in a FILE.key after checking that they belong to the backup."""
    if not keys_are_files():
        raise Invalid(
            "The keys of this installation are set in the environment.",
            hint=f"Set TOOLCRIB_ENCRYPTION_KEYS to the encryption.key in {path}, then restore "
            "without --key.",
        )
    try:
        with path.open("rb") as file:
            plain = is_encrypted(file) and decrypted_reader(file, passphrase)
            body = json.loads((plain or file).read())
        files = {name: str(body["files"][name]) for name in ("secret.key", "encryption.key")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Invalid(f"{path} is not a key file of a backup.") from error
    if credentials.key_fingerprint(files["encryption.key"]) != fingerprint:
        raise Conflict(
            f"{path} contains another key; the backup needs key {fingerprint}.",
            hint="Use the .key file that was written with this backup.",
        )
    return files


def install_keys(files: dict[str, str]) -> list[str]:
    """Write the keys to the data directory and rename existing ones to .old; return their names."""
    replaced = []
    for name, text in files.items():
        path = settings.DATA_DIR / name
        if path.exists():
            if path.read_text(encoding="ascii").strip() == text:
                continue
            path.replace(path.with_name(name + ".old"))
            replaced.append(name)
        with private_file(path, force=True) as file:
            file.write(text.encode("ascii") + b"\n")
    return replaced


# --- Reading ----------------------------------------------------------------------------------


def read_header(stream: IO[bytes]) -> tuple[Row, Iterator[Row]]:
    """Return a backup's header and rows. Raises if it cannot be restored by this version."""
    lines = _lines(_verified(stream))
    header = next(lines, {})
    if header.get("format") != FORMAT or not set(header) >= HEADER_FIELDS:
        raise Invalid("Not a Toolcrib backup, or a backup in a newer format.")
    theirs, ours = header["migrations"], _migrations()
    if theirs != ours and not _can_upgrade(theirs, ours):
        age = "newer" if set(theirs) - set(ours) else "older"
        raise Conflict(
            f"The backup is from Toolcrib {header['version']}, whose database schema is {age} than "
            f"that of version {settings.VERSION}.",
            hint="Restore it with that version, then upgrade.",
        )
    return header, lines


def _can_upgrade(theirs: list[str], ours: list[str]) -> bool:
    """Return whether the backup lacks only migrations that add something with a default."""
    missing = set(ours) - set(theirs)
    known = MigrationLoader(connection).disk_migrations
    steps = [step for name in missing for step in known[app_and_name(name)].operations]
    return set(theirs) < set(ours) and all(isinstance(step, ADDITIVE) for step in steps)


def app_and_name(migration: str) -> tuple[str, str]:
    app, _, name = migration.partition(".")
    return app, name


def seekable(stream: IO[bytes]) -> IO[bytes]:
    """Return the stream, or a temporary copy of one that cannot be read twice."""
    if stream.seekable():
        return stream
    copy = tempfile.TemporaryFile()  # noqa: SIM115 (closed when garbage-collected)
    shutil.copyfileobj(stream, copy)
    copy.seek(0)
    return copy


def _verified(stream: IO[bytes]) -> IO[bytes]:
    """Verify the checksum at the end of a backup before any row is restored."""
    stream = seekable(stream)
    start = stream.tell()
    try:
        with gzip.GzipFile(fileobj=stream, mode="rb") as packed:
            while packed.read(1 << 20):
                pass
    except (OSError, EOFError, zlib.error) as error:
        raise Invalid(
            "The backup is corrupt or truncated; nothing was changed.", hint="Use another copy."
        ) from error
    stream.seek(start)
    return stream


def _lines(stream: IO[bytes]) -> Iterator[Row]:
    with gzip.GzipFile(fileobj=stream, mode="rb") as packed:
        for line in packed:
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise Invalid("Not a Toolcrib backup; nothing was changed.")
            yield row


def restore(header: Row, rows: Iterator[Row], *, replace: bool, keys: list[str]) -> RestoreResult:
    """Restore the database from a backup in one transaction."""
    models = {model._meta.label: model for model in _models()}
    revision = Revision.current()
    try:
        with transaction.atomic():
            _clear_tables(list(models.values()), replace=replace)
            counts = _insert(rows, models)
            if counts != {label: number for label, number in header["rows"].items() if number}:
                raise Invalid("The backup is truncated; nothing was changed.")
            _fill_in(header["migrations"])
            _reset_sequences(list(models.values()))
            _reset_running_work()
            _raise_revision(revision)
            unreadable = _unreadable_credentials(keys)
            data_keys = rewrap_data_keys(keys)
            if DataKey._meta.label not in counts:  # an older backup: its calls were in clear
                mark_calls_as_clear()
    except INVALID_ROW_ERRORS as error:
        raise Invalid("The backup contains inconsistent rows; nothing was changed.") from error
    return RestoreResult(
        counts.total(), header["key"], unreadable.total(), sorted(unreadable), data_keys
    )


def _fill_in(migrations: list[str]) -> None:
    """Run the statements of migrations that the backup lacks: they derive rows from others."""
    known = MigrationLoader(connection).disk_migrations
    with connection.cursor() as cursor:
        for name in _migrations():
            if name in migrations:
                continue
            for step in known[app_and_name(name)].operations:
                if isinstance(step, operations.RunSQL):
                    cursor.execute(str(step.sql))


def _clear_tables(models: list[type[Model]], *, replace: bool) -> None:
    # The data keys stay: this process may have encrypted something with them already.
    models = [model for model in models if model is not DataKey]
    used = [model for model in models if model is not Revision and model._base_manager.exists()]
    if used and not replace:
        names = ", ".join(str(model._meta.verbose_name_plural) for model in used[:4])
        raise Conflict(
            f"This installation already contains data ({names}).",
            hint="Back it up, then add --replace to overwrite it.",
        )
    # A restore also clears what is not backed up.
    memberships = (User.groups.through, User.user_permissions.through)
    cleared: tuple[type[Model], ...] = (Session, *NOT_BACKED_UP, *memberships)
    for model in (*cleared, *models):
        model._base_manager.all()._raw_delete(connection.alias)


def _insert(rows: Iterator[Row], models: dict[str, type[Model]]) -> Counter[str]:
    known = {label.lower(): model for label, model in models.items()}
    counts: Counter[str] = Counter()
    for label, same_model in groupby(rows, key=itemgetter("model")):
        if label not in known:
            raise Invalid(f"The backup contains an unknown model: {label}.")
        model = known[label]
        fields = list(model._meta.concrete_fields)
        size = min(connection.ops.bulk_batch_size(fields, range(BATCH)), BATCH)
        if model in NOT_BACKED_UP:
            counts[model._meta.label] += sum(1 for _ in same_model)
            continue
        while batch := [each.object for each in Deserializer(islice(same_model, size))]:
            counts[model._meta.label] += len(batch)
            if model is DataKey:
                restore_data_keys(batch)
                continue
            # raw, as in loaddata: bulk_create would set every auto_now field to the current time.
            model._base_manager._insert(  # type: ignore[attr-defined]
                batch, fields=fields, using=connection.alias, raw=True
            )
    return counts


def _reset_sequences(models: list[type[Model]]) -> None:
    with connection.cursor() as cursor:
        for statement in connection.ops.sequence_reset_sql(no_style(), models):
            cursor.execute(statement)


def _reset_running_work() -> None:
    """End syncs and calls that ran at the time of the backup; make each server due for a sync."""
    now = timezone.now()
    Server.objects.update(sync_lease_until=None, sync_holder="", sync_sent_at=None, sync_due_at=now)
    SyncRun.objects.filter(outcome=SyncRun.Outcome.RUNNING).update(
        outcome=SyncRun.Outcome.FAILED,
        code="interrupted",
        error="The backup was created while this sync was running.",
        finished_at=now,
    )
    Call.objects.filter(state__in=IN_FLIGHT).update(
        state=CallState.UNKNOWN,
        finished_at=now,
        note="The backup was created while this call was running.",
    )


def _raise_revision(before: int) -> None:
    """Set a revision above both numbers, so that every process reloads."""
    number = max(before, Revision.current())
    row, _ = Revision.objects.update_or_create(id=1, defaults={"number": number})
    Revision.bump()
    audit.record(Actor.command("restore"), "installation.restore", row)


def _unreadable_credentials(keys: list[str]) -> Counter[str]:
    """Count the credentials that none of the keys decrypts, by server."""
    rows = Credential.objects.exclude(ciphertext="").select_related("server")
    return Counter(
        row.server.slug
        for row in rows.iterator(chunk_size=BATCH)
        if not credentials.is_readable(row.ciphertext, keys)
    )
