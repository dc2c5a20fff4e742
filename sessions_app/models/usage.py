"""Models for usage over time: hourly figures that stay when calls and sessions are deleted."""

from django.db import models
from django.db.models import Q


class UsageKind(models.TextChoices):
    """What the figures of a row are about; `key` names one of them."""

    ALL = "all"  # key: empty
    AGENT = "agent"  # key: primary key
    SERVER = "server"  # key: slug
    TOOL = "tool"  # key: public name
    MODEL = "model"  # key: name as the session reports it


class UsageHour(models.Model):
    """Calls of one hour with a latency in one bucket, and tokens of that hour.

    Every counted hour has a row of kind `all`, so the newest one tells how far counting went.
    """

    kind = models.CharField(max_length=6, choices=UsageKind.choices)
    key = models.CharField(max_length=200, blank=True)
    hour = models.DateTimeField()
    latency = models.SmallIntegerField()  # bucket of sessions_app.usage.latency; -1: no answer
    calls = models.PositiveIntegerField(default=0)
    errors = models.PositiveIntegerField(default=0)
    tokens_call = models.PositiveBigIntegerField(default=0)
    # In the row without an answer: what sessions received, and the baseline of those opened.
    sessions = models.PositiveIntegerField(default=0)
    searches = models.PositiveIntegerField(default=0)
    loads = models.PositiveIntegerField(default=0)
    tokens_all = models.PositiveBigIntegerField(default=0)
    tokens_catalog = models.PositiveBigIntegerField(default=0)
    tokens_search = models.PositiveBigIntegerField(default=0)
    tokens_load = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(kind__in=UsageKind.values), name="usage_kind_known"),
            models.UniqueConstraint(
                fields=["kind", "key", "hour", "latency"], name="usage_hour_once"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.key} {self.hour:%Y-%m-%d %H}"
