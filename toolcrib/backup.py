"""Write the whole database to one file and read it back, on SQLite and PostgreSQL alike.

The file is gzip of JSON lines: a header, then one row a line. Credentials in it are encrypted as
they are in the database; what decrypts them goes to a second file, or stays where the operator
keeps it. Sign-ins, lockouts, the leases of running syncs and calls in flight are not carried
over; what sessions did is.
"""

import gzip
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any, cast

from axes.models import AccessAttempt, AccessFailureLog, AccessLog
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
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import Model
from django.utils import timezone

from catalog import audit
from catalog.audit import Actor
from catalog.models import Revision
from servers.models import Credential, Server, SyncRun
from servers.registration import credentials
from sessions_app.models import IN_FLIGHT, Call, CallState
from toolcrib.config import environment as env
from toolcrib.lib.errors import Conflict, Invalid

FORMAT = 1
OUR_APPS = ("catalog", "servers", "sessions_app")
BATCH = 500
HEADER = {"format", "version", "key", "migrations", "rows"}
# What Django and the database say of rows that no backup of ours holds.
UNFIT = (
    DatabaseError,
    DeserializationError,
    FieldDoesNotExist,
    ValidationError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
)
Row = dict[str, Any]


@dataclass
class RestoreResult:
    rows: int
    key: str  # fingerprint of the key the backup was made under
    unreadable: int = 0
    servers: list[str] = field(default_factory=list)  # whose credentials cannot be read


def kept_models() -> list[type[Model]]:
    """Every table of ours, and people."""
    ours = (apps.get_app_config(label).get_models(include_auto_created=True) for label in OUR_APPS)
    return [User, *(model for models in ours for model in models if model._meta.managed)]


def forgotten_models() -> list[type[Model]]:
    """What belongs to the moment and to people's ids, and is cleared by a restore."""
    return [
        Session,
        AccessAttempt,
        AccessFailureLog,
        AccessLog,
        User.groups.through,
        User.user_permissions.through,
    ]


# --- Writing ----------------------------------------------------------------------------------


def write(stream: IO[bytes]) -> Row:
    """Write a consistent snapshot to the stream and return its header. Blocks no writer."""
    with _snapshot(), gzip.GzipFile(fileobj=stream, mode="wb", filename="") as packed:
        header = _header()
        packed.write(json.dumps(header, sort_keys=True).encode() + b"\n")
        for model in kept_models():
            rows = model._base_manager.order_by("pk").iterator(chunk_size=BATCH)
            names = [column.name for column in model._meta.concrete_fields]
            lines = cast(IO[str], _Encoded(packed))
            serializers.serialize("jsonl", rows, stream=lines, fields=names, cls=_Exact)
    return header


class _Exact(DjangoJSONEncoder):
    """Keep the microseconds of times, which Django's own encoder drops."""

    def default(self, value: object) -> object:
        return value.isoformat() if isinstance(value, datetime) else super().default(value)


class _Encoded:
    """A text stream over a byte stream that it does not close."""

    def __init__(self, target: gzip.GzipFile) -> None:
        self.target = target

    def write(self, text: str) -> int:
        return self.target.write(text.encode())


@contextmanager
def _snapshot() -> Iterator[None]:
    """Read everything as of one moment, while others go on writing."""
    if connection.vendor == "postgresql":
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield
        return
    # In WAL mode a deferred transaction reads one snapshot and takes no lock; atomic() would
    # begin an immediate one.
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
        "rows": {model._meta.label: model._base_manager.count() for model in kept_models()},
    }


def _migrations() -> list[str]:
    applied = MigrationRecorder(connection).applied_migrations()
    return sorted(f"{app}.{name}" for app, name in applied if app in OUR_APPS)


@contextmanager
def private_file(path: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """Write a file for the owner alone that appears whole or not at all."""
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
        raise exists(path) from error
    except OSError as error:
        raise Invalid(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        with suppress(OSError):
            draft.unlink()


def exists(path: Path) -> Conflict:
    return Conflict(f"{path} exists.", hint="Choose another name, or add --force.")


# --- Keys -------------------------------------------------------------------------------------


def keys_are_files() -> bool:
    """Whether this installation made its own keys; else the operator keeps them."""
    variables = ("TOOLCRIB_SECRET_KEY", "TOOLCRIB_ENCRYPTION_KEYS")
    return settings.EMBEDDED and not any(env.secret(name) for name in variables)


def key_document() -> bytes:
    names = {"secret.key": settings.SECRET_KEY, "encryption.key": settings.ENCRYPTION_KEYS[0]}
    body = {"format": FORMAT, "key": credentials.key_fingerprint(), "files": names}
    return json.dumps(body, indent=2).encode() + b"\n"


def read_keys(path: Path, wanted: str) -> dict[str, str]:
    """Return the key files in a FILE.key, checked to be those of the backup."""
    if not keys_are_files():
        raise Invalid(
            "This installation takes its keys from the environment.",
            hint=f"Set TOOLCRIB_ENCRYPTION_KEYS to the encryption.key in {path}, then restore "
            "without --key.",
        )
    try:
        body = json.loads(path.read_bytes())
        files = {name: str(body["files"][name]) for name in ("secret.key", "encryption.key")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Invalid(f"{path} is not the key file of a backup.") from error
    if credentials.key_fingerprint(files["encryption.key"]) != wanted:
        raise Conflict(
            f"{path} holds another key than the backup needs, which is {wanted}.",
            hint="Give the .key file that was written with this backup.",
        )
    return files


def install_keys(files: dict[str, str]) -> list[str]:
    """Put the keys into the data folder, keeping others as .old. Returns the names replaced."""
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
    """Return a backup's header and its rows, or say why it is none that can be read here."""
    lines = _lines(_whole(stream))
    header = next(lines, {})
    if header.get("format") != FORMAT or not set(header) >= HEADER:
        raise Invalid("This is not a backup of Toolcrib, or of a later format.")
    theirs, ours = header["migrations"], _migrations()
    if theirs != ours:
        newer = "newer" if set(theirs) - set(ours) else "older"
        raise Conflict(
            f"The backup is of Toolcrib {header['version']}, whose tables are {newer} than these "
            f"of {settings.VERSION}.",
            hint="Restore it with that version, then update.",
        )
    return header, lines


def _whole(stream: IO[bytes]) -> IO[bytes]:
    """Read a backup to its checksum, which stands at its end, before a row of it is believed."""
    if not stream.seekable():
        copy = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the last use of it)
        shutil.copyfileobj(stream, copy)
        copy.seek(0)
        stream = copy
    start = stream.tell()
    try:
        with gzip.GzipFile(fileobj=stream, mode="rb") as packed:
            while packed.read(1 << 20):
                pass
    except (OSError, EOFError, zlib.error) as error:
        raise Invalid(
            "The backup is damaged or cut short; nothing was changed.", hint="Use another copy."
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
                raise Invalid("This is not a backup of Toolcrib; nothing was changed.")
            yield row


def restore(header: Row, rows: Iterator[Row], *, replace: bool, keys: list[str]) -> RestoreResult:
    """Fill the database from a backup in one transaction: all of it, or nothing."""
    models = {model._meta.label: model for model in kept_models()}
    revision = Revision.current()
    try:
        with transaction.atomic():
            _make_room(list(models.values()), replace=replace)
            counts = _insert(rows, models)
            if counts != {label: number for label, number in header["rows"].items() if number}:
                raise Invalid("The backup is cut short; nothing was changed.")
            _reset_sequences(list(models.values()))
            _forget_the_moment()
            _raise_revision(revision)
            done = RestoreResult(sum(counts.values()), header["key"])
            _check_credentials(done, keys)
    except UNFIT as error:
        raise Invalid(
            "The backup holds rows that do not fit together; nothing was changed."
        ) from error
    return done


def _make_room(models: list[type[Model]], *, replace: bool) -> None:
    used = [model for model in models if model is not Revision and model._base_manager.exists()]
    if used and not replace:
        names = ", ".join(str(model._meta.verbose_name_plural) for model in used[:4])
        raise Conflict(
            f"This installation holds data already ({names}).",
            hint="Back it up, then add --replace to put the backup in its place.",
        )
    for model in [*forgotten_models(), *models]:
        model._base_manager.all()._raw_delete(connection.alias)


def _insert(rows: Iterator[Row], models: dict[str, type[Model]]) -> dict[str, int]:
    known = {label.lower(): label for label in models}
    counts: dict[str, int] = {}
    waiting: list[Model] = []
    for row in rows:
        if row["model"] not in known:
            raise Invalid(f"The backup holds {row['model']}, which is not known here.")
        (found,) = Deserializer([row])
        label = known[row["model"]]
        counts[label] = counts.get(label, 0) + 1
        if waiting and (type(waiting[0]) is not type(found.object) or len(waiting) >= BATCH):
            _insert_batch(waiting)
            waiting = []
        waiting.append(found.object)
    _insert_batch(waiting)
    return counts


def _insert_batch(objects: list[Model]) -> None:
    if not objects:
        return
    model = type(objects[0])
    fields = list(model._meta.concrete_fields)
    size = connection.ops.bulk_batch_size(fields, objects)
    for first in range(0, len(objects), size):
        # raw, as loaddata saves: bulk_create would put today into every auto_now field.
        model._base_manager._insert(  # type: ignore[attr-defined]
            objects[first : first + size], fields=fields, using=connection.alias, raw=True
        )


def _reset_sequences(models: list[type[Model]]) -> None:
    with connection.cursor() as cursor:
        for statement in connection.ops.sequence_reset_sql(no_style(), models):
            cursor.execute(statement)


def _forget_the_moment() -> None:
    """No sync or call of the backup's moment runs any more; each server is due for a sync."""
    now = timezone.now()
    Server.objects.update(sync_lease_until=None, sync_holder="", sync_sent_at=None, sync_due_at=now)
    SyncRun.objects.filter(outcome=SyncRun.Outcome.RUNNING).update(
        outcome=SyncRun.Outcome.FAILED,
        code="interrupted",
        error="The backup was made while this sync ran.",
        finished_at=now,
    )
    Call.objects.filter(state__in=IN_FLIGHT).update(
        state=CallState.UNKNOWN,
        finished_at=now,
        note="The backup was made while this call ran.",
    )


def _raise_revision(before: int) -> None:
    """Go past both numbers, so that every process sees that everything changed."""
    number = max(before, Revision.current())
    row, _ = Revision.objects.update_or_create(id=1, defaults={"number": number})
    Revision.bump()
    audit.record(Actor.command("restore"), "installation.restore", row)


def _check_credentials(done: RestoreResult, keys: list[str]) -> None:
    slugs = set()
    rows = Credential.objects.exclude(ciphertext="").select_related("server")
    for row in rows.iterator(chunk_size=BATCH):
        if not credentials.is_readable(row.ciphertext, keys):
            done.unreadable += 1
            slugs.add(row.server.slug)
    done.servers = sorted(slugs)
