"""What people add to search and ask of it: hints on tools, golden queries, how those stand.

Part of the catalog's models, in a file of its own; `catalog.models` has every name.
"""

from django.db import models
from django.db.models import Q

LONGEST_QUERY = 500
LONGEST_HINT = 200


class HintKind(models.TextChoices):
    ALIAS = "alias"  # another name people have for the tool
    EXAMPLE = "example"  # a query it should answer


class ToolHint(models.Model):
    """Words an admin lends a tool for search. Agents never read them; they find by them."""

    tool = models.ForeignKey("catalog.Tool", on_delete=models.CASCADE, related_name="hints")
    kind = models.CharField(max_length=7, choices=HintKind.choices)
    text = models.CharField(max_length=LONGEST_HINT)
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.CharField(max_length=200, blank=True)

    class Meta:
        ordering = ["tool", "kind", "text"]
        constraints = [
            models.UniqueConstraint(fields=["tool", "kind", "text"], name="hint_once_per_tool"),
            models.CheckConstraint(condition=Q(kind__in=HintKind.values), name="hint_kind_known"),
        ]

    def __str__(self) -> str:
        return self.text


class GoldenQuery(models.Model):
    """A query with its right answer, run again at every revision.

    The answer is kept by name: a tool that is removed and comes back is still the right one.
    """

    class Origin(models.TextChoices):
        PLAYGROUND = "playground"
        AGENTS = "agents"  # one that agents really asked
        API = "api"

    query = models.CharField(max_length=LONGEST_QUERY, unique=True)
    right = models.JSONField(default=list)  # public names; any of them is right
    origin = models.CharField(max_length=10, choices=Origin.choices)
    marked_by = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["query"]
        constraints = [
            models.CheckConstraint(
                condition=Q(origin__in=["playground", "agents", "api"]), name="golden_origin_known"
            )
        ]

    def __str__(self) -> str:
        return self.query


class GoldenResult(models.Model):
    """How a golden query stands under one strategy: now, and when it last stood well."""

    golden = models.ForeignKey(GoldenQuery, on_delete=models.CASCADE, related_name="results")
    strategy = models.CharField(max_length=10)
    revision = models.PositiveBigIntegerField()
    rank = models.PositiveIntegerField(null=True, blank=True)  # null: not among the first ten
    first = models.CharField(max_length=64, blank=True)  # what stands first now
    good_rank = models.PositiveIntegerField(null=True, blank=True)  # what it must hold
    good_revision = models.PositiveBigIntegerField()
    broke = models.BooleanField(default=False)
    at = models.DateTimeField()

    class Meta:
        ordering = ["golden", "strategy"]
        constraints = [
            models.UniqueConstraint(fields=["golden", "strategy"], name="one_result_per_strategy")
        ]

    def __str__(self) -> str:
        return f"{self.golden_id} {self.strategy} {self.rank}"


class GoldenRun(models.Model):
    """One run of all golden queries. The row is also the lease: unfinished, it holds others off."""

    revision = models.PositiveBigIntegerField(unique=True)
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True, blank=True)
    scores = models.JSONField(default=dict)  # by strategy: queries, first, found, mrr, broke

    class Meta:
        ordering = ["-revision"]

    def __str__(self) -> str:
        return str(self.revision)


class Vector(models.Model):
    """What a text means, as numbers: made once for each text and model, whoever has the text."""

    model = models.CharField(max_length=40)
    text_sha256 = models.CharField(max_length=64)
    data = models.BinaryField(help_text="half-precision floats, of length one together")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["model", "text_sha256"], name="vector_once")]

    def __str__(self) -> str:
        return self.text_sha256[:12]
