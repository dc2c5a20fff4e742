"""Models of search: hints on tools, golden queries with their results, text embeddings."""

from django.db import models
from django.db.models import Q

MAX_QUERY_LENGTH = 500
MAX_HINT_LENGTH = 200
# Of hints that no person wrote: the length of each, and the number a tool, over all sources.
MAX_AUTOMATIC_HINT_LENGTH = 80
MAX_AUTOMATIC_HINTS = 8


class HintKind(models.TextChoices):
    ALIAS = "alias"  # another name for the tool
    EXAMPLE = "example"  # a query that should find the tool


class HintSource(models.TextChoices):
    """Who wrote a hint. The order is the priority: of automatic hints, the last are left out."""

    ADMIN = "admin"
    USE = "use"  # a query of an agent that led to successful calls
    MODEL = "model"  # written by a language model from the tool's definition
    BUNDLED = "bundled"  # from the phrasebook that Toolcrib contains


class HintQuerySet(models.QuerySet["ToolHint"]):
    def active(self) -> "HintQuerySet":
        return self.filter(is_removed=False)

    def for_all_agents(self) -> "HintQuerySet":
        return self.active().filter(agent=None)

    def pending(self) -> "HintQuerySet":
        """Return hints from use that search applies to one agent only."""
        return self.active().exclude(agent=None)


class ToolHint(models.Model):
    """A search alias or example query of a tool. Indexed for search, never shown to agents."""

    tool = models.ForeignKey("catalog.Tool", on_delete=models.CASCADE, related_name="hints")
    kind = models.CharField(max_length=7, choices=HintKind.choices)
    text = models.CharField(max_length=MAX_HINT_LENGTH)
    source = models.CharField(max_length=7, choices=HintSource.choices, default=HintSource.ADMIN)
    # The only agent whose searches it affects; null: all agents.
    agent = models.ForeignKey(
        "sessions_app.Agent", null=True, blank=True, on_delete=models.CASCADE, related_name="+"
    )
    # An automatic hint that a person removed stays as a row, so that it is not added again.
    is_removed = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.CharField(max_length=200, blank=True)

    objects = HintQuerySet.as_manager()

    class Meta:
        ordering = ["tool", "kind", "text"]
        constraints = [
            models.UniqueConstraint(
                fields=["tool", "kind", "text"],
                condition=Q(agent=None),
                name="hint_once_per_tool",
            ),
            models.UniqueConstraint(
                fields=["tool", "kind", "text", "agent"],
                condition=Q(agent__isnull=False),
                name="hint_once_per_agent",
            ),
            models.CheckConstraint(condition=Q(kind__in=HintKind.values), name="hint_kind_known"),
            models.CheckConstraint(
                condition=Q(source__in=HintSource.values), name="hint_source_known"
            ),
            models.CheckConstraint(
                condition=Q(agent=None) | Q(source=HintSource.USE), name="hint_of_agent_from_use"
            ),
        ]

    def __str__(self) -> str:
        return self.text


class GoldenQuery(models.Model):
    """A query with its expected tools, by name, so that they may be removed and added again."""

    class Origin(models.TextChoices):
        PLAYGROUND = "playground"
        AGENTS = "agents"  # taken from agents' searches
        API = "api"
        HINT = "hint"  # a search hint of the tool

    query = models.CharField(max_length=MAX_QUERY_LENGTH, unique=True)
    right = models.JSONField(default=list)  # public names; any of them is accepted
    origin = models.CharField(max_length=10, choices=Origin.choices)
    marked_by = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["query"]
        constraints = [
            models.CheckConstraint(
                condition=Q(origin__in=["playground", "agents", "api", "hint"]),
                name="golden_origin_known",
            )
        ]

    def __str__(self) -> str:
        return self.query


class GoldenResult(models.Model):
    """Rank of a golden query's expected tool under one strategy, with the baseline rank."""

    golden = models.ForeignKey(GoldenQuery, on_delete=models.CASCADE, related_name="results")
    strategy = models.CharField(max_length=10)
    revision = models.PositiveBigIntegerField()
    rank = models.PositiveIntegerField(null=True, blank=True)  # null: not in the top ten
    first = models.CharField(max_length=64, blank=True)  # the tool that ranks first
    good_rank = models.PositiveIntegerField(null=True, blank=True)  # a lower rank is a regression
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
    """One evaluation of all golden queries. An unfinished row is the lease that blocks others."""

    revision = models.PositiveBigIntegerField(unique=True)
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True, blank=True)
    scores = models.JSONField(default=dict)  # by strategy: queries, first, found, mrr, broke

    class Meta:
        ordering = ["-revision"]

    def __str__(self) -> str:
        return str(self.revision)


class Vector(models.Model):
    """Embedding of a text: computed once per text and model, shared by all users of the text."""

    model = models.CharField(max_length=40)
    text_sha256 = models.CharField(max_length=64)
    data = models.BinaryField(help_text="half-precision floats, of length one together")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["model", "text_sha256"], name="vector_once")]

    def __str__(self) -> str:
        return self.text_sha256[:12]
