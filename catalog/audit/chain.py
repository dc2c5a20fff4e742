"""Chain of the audit log, which makes changes by SQL detectable.

Every entry is recorded with a MAC of its fields. After its commit one process at a time gives it a
position and a link, a MAC over the previous link and this entry. The first link continues a digest
of the entries recorded before the chain began. The key is derived from the encryption keys, and the
seal (seal.py) holds length and head: without either, nothing can be changed, added, removed or
moved unnoticed.
"""

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from django.conf import settings
from django.db import DataError, OperationalError, connection, transaction
from django.db.models import Count, Max

from catalog.audit import seal as seals
from catalog.audit import sink
from catalog.audit.log import as_record, record
from catalog.audit.seal import Seal, SealUnreadable
from catalog.audit.signing import audit_keys, content, is_mac, is_signed, mac, sign
from catalog.models import AuditEntry
from toolcrib.lib.roles import SYSTEM
from toolcrib.lib.text import plural

logger = logging.getLogger(__name__)

ADVISORY_LOCK = 0x746F6F6C  # of PostgreSQL; any number that nothing else uses
BATCH = 500
# Reading an entry raises one of these if its columns were filled with values of other types.
UNREADABLE = (ValueError, TypeError, AttributeError, OverflowError, DataError, OperationalError)
LINK_SQL = "UPDATE catalog_auditentry SET position = %s, link = %s WHERE id = %s"
SIGN_SQL = "UPDATE catalog_auditentry SET mac = %s, link = %s WHERE id = %s"


# --- Links --------------------------------------------------------------------------------------


def _link_text(previous: str, position: int, entry: AuditEntry) -> str:
    return f"{previous}\0{position}\0{entry.pk}\0{entry.mac}"


def _first_link(keys: Sequence[bytes]) -> list[str]:
    """Return what the first link continues, by key: a digest of the entries before the chain."""
    digest = hashlib.sha256()
    for entry in _rows(position=0).order_by("id").iterator(BATCH):
        digest.update(f"{entry.pk}\0{content(entry, '')}\0".encode())
    return [mac(key, f"before the chain\0{digest.hexdigest()}") for key in keys]


def _rows(**conditions: object) -> Any:
    # The base manager, since the audit log's own rejects updates.
    return AuditEntry._base_manager.filter(**conditions)


# --- Extending ----------------------------------------------------------------------------------


@contextmanager
def _exclusive() -> Iterator[None]:
    """Hold the lease of the chain: one process of all extends it. It ends with the process."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s)", [ADVISORY_LOCK])
            try:
                yield
            finally:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [ADVISORY_LOCK])
        return
    descriptor = os.open(settings.DATA_DIR / "audit.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def extend(*, always: bool = False) -> int:
    """Chain all committed entries, seal the chain and deliver the entries; return how many.

    Without new entries only with `always`: a process may have died before it sealed or delivered.
    """
    if not always and not _rows(position=None).exists():
        return 0
    with _exclusive():
        seal = seals.read()
        if seal is None:
            seal = _new_seal()
        seal, chained = _chain_new(seal)
        seals.write(seal)
        if sink.is_enabled():
            seals.write(replace(seal, delivered=_deliver(seal)))
    return chained


def _new_seal() -> Seal:
    """Return the seal of a new chain, or of the existing one if its seal was lost."""
    last = _rows(position__gt=0).order_by("-position").first()
    if last is None:
        return Seal(0, _first_link(audit_keys())[0])
    logger.warning("The seal of the audit log was missing; made a new one at entry %s", last.pk)
    record(SYSTEM, "audit.reseal", last, after={"position": last.position})
    return Seal(last.position, last.link, last.position)


def _chain_new(seal: Seal) -> tuple[Seal, int]:
    """Give each new entry its position and link, after the sealed and stored ones.

    After a cut, the chain goes on behind the sealed head, so that the gap stays visible.
    """
    keys, chained = audit_keys(), 0
    with transaction.atomic(), connection.cursor() as cursor:
        last = _rows(position__gt=seal.count).order_by("-position").first()
        position, link = (last.position, last.link) if last else (seal.count, seal.head)
        for entry in list(_rows(position=None).order_by("id")):
            if not is_signed(entry, keys):
                continue  # not recorded by Toolcrib: verification reports it
            link = mac(keys[0], _link_text(link, position + 1, entry))
            position, chained = position + 1, chained + 1
            cursor.execute(LINK_SQL, [position, link, entry.pk])
    return replace(seal, count=position, head=link), chained


def _deliver(seal: Seal) -> int:
    """Write the entries that the sink does not have; return the position of the last one."""
    rows = _rows(position__gt=seal.delivered).order_by("position").iterator(BATCH)
    return sink.deliver(map(as_record, rows), seal.delivered)


def restart(keys: Sequence[str] | None = None) -> int:
    """Start a new chain: existing entries count as recorded before it. Return their number."""
    with _exclusive(), transaction.atomic():
        new = [row.pk for row in _rows(position=None) if is_signed(row, audit_keys(keys))]
        count: int = _rows().exclude(pk__in=new).update(position=0, link="")
        seals.write(Seal(0, _first_link(audit_keys(keys))[0]), keys)
    return count


def adopt(keys: Sequence[str]) -> None:
    """Seal the chain that a restored backup contains; start a new one if the keys do not fit.

    New entries of this process are signed again, since the backup may have brought other keys.
    """
    for entry in _rows(position=None):
        if is_signed(entry, audit_keys()):
            _rows(pk=entry.pk).update(mac=sign(entry, keys))
    last = _rows(position__gt=0).order_by("-position").first()
    if last is None or not is_signed(last, audit_keys(keys)):
        restart(keys)
        return
    with _exclusive():
        seals.write(Seal(last.position, last.link, last.position), keys)


def sign_again() -> int:
    """Sign and link every entry again with the first key; return how many.

    After a rotation of the keys, before the old one is removed. In one transaction.
    """
    with _exclusive(), transaction.atomic(), connection.cursor() as cursor:
        seal, key = seals.read(), audit_keys()[0]
        link = _first_link([key])[0]
        position = 0
        order = _rows().exclude(position=0).order_by("position", "id")
        ids = [*order.exclude(position=None).values_list("id", flat=True)]
        ids += order.filter(position=None).values_list("id", flat=True)
        for start in range(0, len(ids), BATCH):
            rows = _rows().in_bulk(ids[start : start + BATCH])
            for entry in (rows[pk] for pk in ids[start : start + BATCH]):
                entry.mac = sign(entry)
                if entry.position is not None:
                    position = entry.position
                    link = entry.link = mac(key, _link_text(link, position, entry))
                cursor.execute(SIGN_SQL, [entry.mac, entry.link, entry.pk])
        if seal is not None:
            seals.write(replace(seal, count=position, head=link))
    return len(ids)


# --- Verification -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verification:
    """Result of a verification; `problem` is empty if the chain holds."""

    verified: int  # chained entries up to the first bad one
    last: AuditEntry | None  # the last verified entry
    pending: int  # recorded, not chained yet
    unchained: int  # recorded before the chain began
    problem: str = ""
    entry: int | None = None  # id of the first bad entry, if it exists
    partial: bool = False  # only the newest entries were verified

    @property
    def holds(self) -> bool:
        return not self.problem

    @property
    def summary(self) -> str:
        """Return one or two sentences for people."""
        if self.last is not None:
            start = "The newest" if self.partial else "All"
            text = f"{start} {plural(self.verified, 'chained entry', 'chained entries')} verified"
            if self.problem:
                text = f"The chain holds up to entry {self.last.pk}"
        else:
            text = "No entry is verified" if self.problem else "No entry is chained yet"
        text += f". {self.problem}" if self.problem else "."
        if self.pending and not self.problem:
            text += f" {plural(self.pending, 'entry', 'entries')} to be chained."
        return text


def _find_unreadable() -> int | None:
    """Return the id of the first entry with a value that does not fit its column, if any."""
    for pk in _rows().order_by("id").values_list("id", flat=True):
        try:
            entry = _rows().get(pk=pk)
            content(entry, "")
            [int(entry.position or 0), entry.mac.encode(), entry.link.encode()]
        except UNREADABLE:
            return int(pk)
    return None


class _Bad(Exception):
    def __init__(self, problem: str, entry: int | None = None) -> None:
        super().__init__(problem)
        self.problem, self.entry = problem, entry


def verify(newest: int | None = None) -> Verification:
    """Verify the chain, or its newest entries only, and find the first bad entry."""
    walk = _Walk()
    problem, bad = "", None
    try:
        walk.run(newest)
    except _Bad as found:
        problem, bad = found.problem, found.entry
    except SealUnreadable as error:
        problem = error.sentence
    except UNREADABLE:
        bad = _find_unreadable()
        if bad is None:
            raise
        problem = f"Entry {bad} contains values that Toolcrib does not write."
    return Verification(
        verified=walk.verified,
        last=walk.last,
        pending=_rows(position=None).count(),
        unchained=_rows(position=0).count(),
        problem=problem,
        entry=bad,
        partial=walk.start > 0,
    )


class _Walk:
    """One pass over the chain from its start, or from the newest entries on."""

    def __init__(self) -> None:
        self.keys = audit_keys()
        self.start = self.verified = 0
        self.last: AuditEntry | None = None

    def run(self, newest: int | None) -> None:
        seal = seals.read()  # first, since the chain grows meanwhile
        highest = _rows().aggregate(highest=Max("position"))["highest"] or 0
        self.start = max(highest - newest, 0) if newest else 0
        previous, position = self._links_at_start(), self.start
        rows = _rows(position__gt=self.start).order_by("position", "id")
        for entry in rows.iterator(BATCH):
            position += 1
            self._check(entry, position, previous)
            previous = [entry.link]
            self.verified, self.last = self.verified + 1, entry
            if seal and position == seal.count and entry.link != seal.head:
                raise _Bad(f"Entry {entry.pk} is not the one that was sealed.", entry.pk)
        self._check_end(seal, position)
        self._check_new()

    def _links_at_start(self) -> list[str]:
        if not self.start:
            return _first_link(self.keys)
        return list(_rows(position=self.start).values_list("link", flat=True))

    def _check(self, entry: AuditEntry, position: int, previous: list[str]) -> None:
        if not is_signed(entry, self.keys):
            raise _Bad(f"Entry {entry.pk} was changed after it was recorded.", entry.pk)
        if entry.position != position:
            where = f"after entry {self.last.pk}" if self.last else "at the start"
            count = (entry.position or 0) - position
            if count > 0:
                missing = plural(count, "entry is", "entries are")
                raise _Bad(f"{missing} missing {where}, before entry {entry.pk}.", entry.pk)
        texts = [_link_text(link, position, entry) for link in previous]
        if not any(is_mac(entry.link, text, self.keys) for text in texts):
            if position == 1:
                raise _Bad(
                    "Entries from before the chain were changed, added or removed, or entry "
                    f"{entry.pk} is not the first.",
                    entry.pk,
                )
            raise _Bad(
                f"Entry {entry.pk} does not follow the entry before it: entries were moved, added "
                "or removed here.",
                entry.pk,
            )

    def _check_end(self, seal: Seal | None, position: int) -> None:
        if seal is None and position:
            raise _Bad("The seal is missing, so a removed end of the log cannot be excluded.")
        if seal is None:
            return
        if position < seal.count:
            where = f"after entry {self.last.pk}" if self.last else "from the start"
            missing = plural(seal.count - position, "entry is", "entries are")
            raise _Bad(f"{missing} missing at the end, {where}.")
        if not seal.count and seal.head not in _first_link(self.keys):
            raise _Bad("Entries from before the chain were changed, added or removed.")

    def _check_new(self) -> None:
        misplaced = _rows(position__lt=0).order_by("id").first()
        if misplaced is not None:
            raise _Bad(f"Entry {misplaced.pk} was not recorded by Toolcrib.", misplaced.pk)
        for entry in _rows(position=None).order_by("id").iterator(BATCH):
            if not is_signed(entry, self.keys):
                raise _Bad(f"Entry {entry.pk} was not recorded by Toolcrib.", entry.pk)
        copies = _rows().exclude(mac="").values("mac").order_by("mac")
        copied = copies.annotate(rows=Count("id"), newest=Max("id")).filter(rows__gt=1).first()
        if copied is not None:
            raise _Bad(f"Entry {copied['newest']} is a copy of another entry.", copied["newest"])
