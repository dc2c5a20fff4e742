"""Models of the catalog revision and of catalog snapshots."""

from django.db import connection, models, transaction
from django.db.models import F, Q

from catalog.revision_stream import announce


class Revision(models.Model):
    """A single row with a number that every change visible to agents increments."""

    number = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(id=1), name="revision_is_one_row")]

    def __str__(self) -> str:
        return str(self.number)

    @classmethod
    def current(cls) -> int:
        # Raw SQL: runs on every request, and the ORM takes twenty times as long as the query.
        with connection.cursor() as cursor:
            cursor.execute("SELECT number FROM catalog_revision WHERE id = 1")
            row = cursor.fetchone()
        return int(row[0]) if row else 0

    @classmethod
    def bump(cls) -> None:
        """Increment the number and notify every process. Call in the transaction of the change."""
        if not cls.objects.filter(id=1).update(number=F("number") + 1):
            cls.objects.create(id=1, number=1)
        transaction.on_commit(announce)


class CatalogSnapshot(models.Model):
    """The catalog a session received when it opened. Content-addressed and immutable."""

    sha256 = models.CharField(max_length=64, unique=True)
    text = models.TextField()  # for the system prompt
    body = models.TextField()  # canonical JSON: groups, the tools array, omissions, pins
    tokens = models.PositiveIntegerField()  # of the text
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.sha256[:12]
