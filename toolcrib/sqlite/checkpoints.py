"""Move what was written from SQLite's log into the database's file while nobody waits for it.

By itself SQLite does so in the commit that makes the log long: one in a hundred calls waited for
the disk, and what came after it on a quiet day stayed in the log, not yet safe from a power cut.
"""

from django.db.backends.base.base import BaseDatabaseWrapper

EVERY = 0.5  # seconds
# Pages in the log at which a commit does it after all, as where only commands run.
AT_LATEST = 10_000
AGAIN = 3  # times, since more is written meanwhile; the log begins anew once all of it was moved


def move(database: BaseDatabaseWrapper) -> bool:
    """Move what is in the log, waiting for nobody; say whether that was all of it."""
    with database.cursor() as cursor:
        for _ in range(AGAIN):
            cursor.execute("PRAGMA wal_checkpoint(PASSIVE)")
            _, in_log, moved = cursor.fetchone()
            if moved == in_log:
                return True
    return False
