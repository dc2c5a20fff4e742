"""WAL checkpoints in the background, so that no commit waits for one.

By default SQLite checkpoints within the commit that makes the WAL long: one call in a hundred
waited for the disk, and later writes on a quiet day stayed in the WAL, not yet safe from a power
failure.
"""

from django.db.backends.base.base import BaseDatabaseWrapper

INTERVAL = 0.5  # seconds
# WAL pages after which a commit checkpoints itself, for example where only commands run.
AUTOCHECKPOINT_PAGES = 10_000
ATTEMPTS = 3  # since others write meanwhile; SQLite restarts the WAL once all of it is copied


def checkpoint(database: BaseDatabaseWrapper) -> bool:
    """Run a passive checkpoint, which never waits; return whether it copied the whole WAL."""
    with database.cursor() as cursor:
        for _ in range(ATTEMPTS):
            cursor.execute("PRAGMA wal_checkpoint(PASSIVE)")
            _, wal_pages, copied_pages = cursor.fetchone()
            if copied_pages == wal_pages:
                return True
    return False
