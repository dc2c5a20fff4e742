"""The catalog's nouns: definitions, tools, groups, the revision, preferences, the audit log."""

import json
from typing import Any, Self

from django.db import connection, models, transaction
from django.db.models import F, Q

from catalog.revision_stream import announce
from catalog.search_models import GoldenQuery as GoldenQuery
from catalog.search_models import GoldenResult as GoldenResult
from catalog.search_models import GoldenRun as GoldenRun
from catalog.search_models import HintKind as HintKind
from catalog.search_models import ToolHint as ToolHint

JsonSchema = dict[str, object]


class Definition(models.Model):
    """A tool object exactly as its server sent it, addressed by its content. Never changed."""

    sha256 = models.CharField(max_length=64, unique=True)
    name = models.CharField(max_length=128)
    body = models.TextField()  # canonical JSON; text, since jsonb would refuse \u0000 and reorder
    tokens = models.PositiveIntegerField()
    search_text = models.TextField()
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.name} {self.sha256[:8]}"

    @property
    def tool(self) -> dict[str, Any]:
        """The tool object: name, description, inputSchema, …"""
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed

    @property
    def title(self) -> str:
        return str(self.tool.get("title") or "")

    @property
    def description(self) -> str:
        return str(self.tool.get("description") or "")

    @property
    def input_schema(self) -> JsonSchema:
        schema: JsonSchema = self.tool["inputSchema"]
        return schema

    @property
    def annotations(self) -> dict[str, Any]:
        found = self.tool.get("annotations")
        return found if isinstance(found, dict) else {}


class ToolState(models.TextChoices):
    AVAILABLE = "available"
    WAITING = "waiting"
    HELD = "held"
    MISSING = "missing"
    REJECTED = "rejected"


class CallPolicy(models.TextChoices):
    ALLOW = "allow"
    DENY = "deny"


class ToolQuerySet(models.QuerySet["Tool"]):
    def current(self) -> Self:
        """Leave out what the server no longer offers."""
        return self.exclude(state=ToolState.MISSING)

    def servable(self) -> Self:
        """What an agent may be shown: an approved definition that an enabled server offers."""
        return self.filter(
            Q(server=None) | Q(server__enabled=True),
            approved__isnull=False,
            state__in=[ToolState.AVAILABLE, ToolState.WAITING],
        )

    def unservable(self) -> Self:
        """All others, said without a subquery, which SQLite would run for every row."""
        return self.filter(
            Q(approved=None)
            | ~Q(state__in=[ToolState.AVAILABLE, ToolState.WAITING])
            | Q(server__enabled=False)
        )

    def waiting(self) -> Self:
        return self.filter(state=ToolState.WAITING)

    def with_definitions(self) -> Self:
        return self.select_related("server", "approved", "latest")


class Tool(models.Model):
    """One callable of a server, or a custom one that agents run themselves (no server)."""

    server = models.ForeignKey(
        "servers.Server", null=True, blank=True, on_delete=models.CASCADE, related_name="tools"
    )
    name = models.CharField(max_length=128)  # the server's own, and what it receives
    public_name = models.CharField(max_length=64, unique=True)
    approved = models.ForeignKey(
        Definition, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    latest = models.ForeignKey(
        Definition, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    # The newest definition an admin looked at and declined: it waits no more.
    kept_against = models.ForeignKey(
        Definition, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    state = models.CharField(max_length=10, choices=ToolState.choices, default=ToolState.AVAILABLE)
    held_reason = models.TextField(blank=True)
    held_at = models.DateTimeField(null=True, blank=True)
    rejected_reason = models.TextField(blank=True)
    missing_since = models.DateTimeField(null=True, blank=True)
    description_override = models.TextField(blank=True)
    input_examples = models.JSONField(default=list, blank=True)
    call_policy = models.CharField(
        max_length=5, choices=CallPolicy.choices, default=CallPolicy.ALLOW
    )
    findings = models.JSONField(default=list, blank=True)  # advice on `latest`: [{code, text}]
    created_at = models.DateTimeField(auto_now_add=True)
    changed_at = models.DateTimeField(null=True, blank=True)

    objects = ToolQuerySet.as_manager()

    class Meta:
        ordering = ["public_name"]
        constraints = [
            models.UniqueConstraint(fields=["server", "name"], name="tool_name_unique_per_server"),
            models.UniqueConstraint(
                fields=["name"], condition=Q(server=None), name="custom_tool_name_unique"
            ),
            models.CheckConstraint(
                condition=Q(state__in=ToolState.values), name="tool_state_known"
            ),
            models.CheckConstraint(
                condition=~Q(state=ToolState.AVAILABLE) | Q(approved__isnull=False),
                name="available_tool_is_approved",
            ),
        ]
        indexes = [models.Index(fields=["server", "state"], name="tool_by_server_state")]

    def __str__(self) -> str:
        return self.public_name

    @property
    def source(self) -> str:
        return "mcp" if self.server_id else "custom"

    @property
    def definition(self) -> Definition | None:
        """What agents are given; before the first approval, what waits for it."""
        return self.approved or self.latest

    @property
    def description(self) -> str:
        """The text agents read: the admin's own where there is one."""
        if self.description_override:
            return self.description_override
        return self.definition.description if self.definition else ""

    def settled_state(self) -> ToolState:
        """Derive the state from the facts. The one place that decides it."""
        if self.held_at:
            return ToolState.HELD
        if self.missing_since:
            return ToolState.MISSING
        if self.rejected_reason:
            return ToolState.REJECTED
        if self.approved_id is None or self.latest_id not in (
            self.approved_id,
            self.kept_against_id,
        ):
            return ToolState.WAITING
        return ToolState.AVAILABLE


class DefinitionChange(models.Model):
    """One change of one tool's definition, with what was decided about it."""

    class Outcome(models.TextChoices):
        APPROVED = "approved"
        WAITING = "waiting"
        KEPT_OLD = "kept_old"
        WITHDRAWN = "withdrawn"
        SUPERSEDED = "superseded"

    tool = models.ForeignKey(Tool, on_delete=models.CASCADE, related_name="changes")
    before = models.ForeignKey(Definition, null=True, on_delete=models.PROTECT, related_name="+")
    after = models.ForeignKey(Definition, on_delete=models.PROTECT, related_name="+")
    at = models.DateTimeField()
    outcome = models.CharField(max_length=10, choices=Outcome.choices)
    decided_by = models.CharField(max_length=200, blank=True)
    decided_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-at", "-id"]
        indexes = [models.Index(fields=["tool", "-at"], name="change_by_tool")]

    def __str__(self) -> str:
        return f"{self.tool_id} {self.outcome}"


class Group(models.Model):
    """A named set of tools given to agents together."""

    group_id = models.CharField(max_length=80, unique=True)
    display_name = models.CharField(max_length=120)
    description = models.TextField(blank=True)
    position = models.PositiveIntegerField(default=0)
    preload_default = models.BooleanField(default=False)
    deferred = models.BooleanField(default=True)
    follows = models.OneToOneField(
        "servers.Server", null=True, blank=True, on_delete=models.SET_NULL, related_name="group"
    )
    tools = models.ManyToManyField(Tool, through="Membership", related_name="groups")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["position", "group_id"]

    def __str__(self) -> str:
        return self.group_id


class Membership(models.Model):
    group = models.ForeignKey(Group, on_delete=models.CASCADE, related_name="memberships")
    tool = models.ForeignKey(Tool, on_delete=models.CASCADE, related_name="memberships")
    position = models.PositiveIntegerField(default=0)
    preload = models.BooleanField(null=True, blank=True)  # null: the group's default

    class Meta:
        ordering = ["position", "tool__name"]
        constraints = [
            models.UniqueConstraint(fields=["group", "tool"], name="tool_once_per_group")
        ]

    def __str__(self) -> str:
        return f"{self.group_id}/{self.tool_id}"


class Revision(models.Model):
    """One row with one number, raised in the transaction of every change an agent could see."""

    number = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(id=1), name="revision_is_one_row")]

    def __str__(self) -> str:
        return str(self.number)

    @classmethod
    def current(cls) -> int:
        # By hand: asked at every request, and building the query costs twenty times the query.
        with connection.cursor() as cursor:
            cursor.execute("SELECT number FROM catalog_revision WHERE id = 1")
            row = cursor.fetchone()
        return int(row[0]) if row else 0

    @classmethod
    def bump(cls) -> None:
        """Raise the number and tell every process; call inside the transaction of the change."""
        if not cls.objects.filter(id=1).update(number=F("number") + 1):
            cls.objects.create(id=1, number=1)
        transaction.on_commit(announce)


class CatalogSnapshot(models.Model):
    """What a session was given when it opened, addressed by its content. Never changed."""

    sha256 = models.CharField(max_length=64, unique=True)
    text = models.TextField()  # for the system prompt
    body = models.TextField()  # canonical JSON: groups, the tools array, what was left out, pins
    tokens = models.PositiveIntegerField()  # of the text
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.sha256[:12]


class Preference(models.Model):
    """One choice an admin made for the whole installation; `catalog.preferences` knows them all."""

    name = models.CharField(max_length=60, unique=True)
    value = models.TextField()  # JSON

    def __str__(self) -> str:
        return self.name


class AuditQuerySet(models.QuerySet["AuditEntry"]):
    def update(self, **kwargs: Any) -> int:
        raise TypeError("The audit log is append-only.")

    def delete(self) -> tuple[int, dict[str, int]]:
        raise TypeError("The audit log is append-only.")


class AuditEntry(models.Model):
    """Who changed what, when. Append-only; the actor stays readable after it is gone."""

    at = models.DateTimeField(auto_now_add=True)
    actor_kind = models.CharField(max_length=10)  # user, token, system, command
    actor_id = models.BigIntegerField(null=True, blank=True)
    actor_label = models.CharField(max_length=200)
    verb = models.CharField(max_length=60)
    target_kind = models.CharField(max_length=40)
    target_id = models.BigIntegerField(null=True, blank=True)
    target_label = models.CharField(max_length=200)
    before = models.JSONField(default=dict)
    after = models.JSONField(default=dict)

    objects = AuditQuerySet.as_manager()

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["target_kind", "target_id"], name="audit_by_target")]

    def __str__(self) -> str:
        return f"{self.actor_label} {self.verb} {self.target_label}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        if self.pk:
            raise TypeError("The audit log is append-only.")
        super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        raise TypeError("The audit log is append-only.")


class Vector(models.Model):
    """What a text means, as numbers: made once for each text and model, whoever has the text."""

    model = models.CharField(max_length=40)
    text_sha256 = models.CharField(max_length=64)
    data = models.BinaryField(help_text="half-precision floats, of length one together")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["model", "text_sha256"], name="vector_once")]

    def __str__(self) -> str:
        return self.text_sha256[:12]
