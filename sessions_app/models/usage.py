"""Models for usage over time: figures by hour and day that stay when sessions are deleted."""

from django.db import models
from django.db.models import Q


class UsageKind(models.TextChoices):
    """What the figures of a row are about; `key` names one of them."""

    ALL = "all"  # key: empty
    AGENT = "agent"  # key: primary key
    SERVER = "server"  # key: slug
    TOOL = "tool"  # key: public name
    MODEL = "model"  # key: name as the session reports it


class UsageSums(models.Model):
    """What is summed. `key` names the agent, server, tool or model of a kind."""

    kind = models.CharField(max_length=6, choices=UsageKind.choices)
    key = models.CharField(max_length=200, blank=True)
    calls = models.PositiveIntegerField(default=0)
    errors = models.PositiveIntegerField(default=0)
    tokens_call = models.PositiveBigIntegerField(default=0)
    # What sessions received, and the baseline of those opened.
    sessions = models.PositiveIntegerField(default=0)
    searches = models.PositiveIntegerField(default=0)
    loads = models.PositiveIntegerField(default=0)
    tokens_all = models.PositiveBigIntegerField(default=0)
    tokens_catalog = models.PositiveBigIntegerField(default=0)
    tokens_search = models.PositiveBigIntegerField(default=0)
    tokens_load = models.PositiveBigIntegerField(default=0)

    class Meta:
        abstract = True


class UsageHour(UsageSums):
    """Calls of one hour with a latency in one bucket, and in the row without an answer the rest.

    Every counted hour has a row of kind `all`, so the newest one tells how far counting went.
    """

    hour = models.DateTimeField()
    latency = models.SmallIntegerField()  # bucket of sessions_app.usage.latency; -1: no answer

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(kind__in=UsageKind.values), name="usage_kind_known"),
            models.UniqueConstraint(
                fields=["kind", "key", "hour", "latency"], name="usage_hour_once"
            ),
        ]
        indexes = [models.Index(fields=["kind", "hour"], name="usage_by_hour")]

    def __str__(self) -> str:
        return f"{self.kind} {self.key} {self.hour:%Y-%m-%d %H}"


class UsageDay(UsageSums):
    """The hours of one day in UTC as one row, once all of them are counted.

    Hours have a row for each latency and are nearly as many as calls; a chart of three months reads
    days. Every day with counted hours has a row of kind `all`.
    """

    day = models.DateField()
    latencies = models.TextField(default="{}")  # JSON: calls by bucket, as in UsageHour.latency

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(kind__in=UsageKind.values), name="usage_day_kind_known"
            ),
            models.UniqueConstraint(fields=["kind", "key", "day"], name="usage_day_once"),
        ]
        indexes = [models.Index(fields=["kind", "day", "key"], name="usage_by_day")]

    def __str__(self) -> str:
        return f"{self.kind} {self.key} {self.day}"
