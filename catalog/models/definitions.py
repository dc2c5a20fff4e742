"""Models of tools, their definitions and definition changes."""

import json
from functools import cached_property
from typing import Any, Self

from django.db import models
from django.db.models import Q

JsonSchema = dict[str, object]


class Definition(models.Model):
    """A tool object exactly as its server sent it. Content-addressed and immutable."""

    sha256 = models.CharField(max_length=64, unique=True)
    name = models.CharField(max_length=128)
    # Canonical JSON; as text, since jsonb rejects \u0000 and reorders keys.
    body = models.TextField()
    tokens = models.PositiveIntegerField()
    search_text = models.TextField()
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.name} {self.sha256[:8]}"

    @cached_property
    def tool(self) -> dict[str, Any]:
        """The tool object: name, description, inputSchema, … Shared: do not change it."""
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed

    @property
    def description(self) -> str:
        return str(self.tool.get("description") or "")

    @property
    def input_schema(self) -> JsonSchema:
        schema: JsonSchema = self.tool["inputSchema"]
        return schema

    @property
    def annotations(self) -> dict[str, Any]:
        annotations = self.tool.get("annotations")
        return annotations if isinstance(annotations, dict) else {}


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
        """Exclude tools that the server no longer lists."""
        return self.exclude(state=ToolState.MISSING)

    def servable(self) -> Self:
        """Select tools that agents may get: approved, and listed by an enabled server."""
        return self.filter(
            Q(server=None) | Q(server__enabled=True),
            approved__isnull=False,
            state__in=[ToolState.AVAILABLE, ToolState.WAITING],
        )

    def waiting(self) -> Self:
        return self.filter(state=ToolState.WAITING)

    def with_definitions(self) -> Self:
        return self.select_related("server", "approved", "latest")


class Tool(models.Model):
    """One tool of a server, or a custom tool that agents run themselves (no server)."""

    server = models.ForeignKey(
        "servers.Server", null=True, blank=True, on_delete=models.CASCADE, related_name="tools"
    )
    name = models.CharField(max_length=128)  # the original name, sent to the server
    public_name = models.CharField(max_length=64, unique=True)
    approved = models.ForeignKey(
        Definition, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    latest = models.ForeignKey(
        Definition, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    # The latest definition that was rejected in a review: it is no longer pending.
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
    findings = models.JSONField(default=list, blank=True)  # on `latest`: [{code, text}]
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
        """Return the approved definition or, before the first approval, the pending one."""
        return self.approved or self.latest

    @property
    def description(self) -> str:
        """Return the description agents read: the override if there is one."""
        return self.description_override or (self.definition.description if self.definition else "")

    @property
    def annotations(self) -> dict[str, Any]:
        return self.definition.annotations if self.definition else {}

    @property
    def tokens(self) -> int | None:
        return self.definition.tokens if self.definition else None

    def derive_state(self) -> ToolState:
        """Derive the state from the other fields. No other code decides it."""
        if self.held_at:
            return ToolState.HELD
        if self.missing_since:
            return ToolState.MISSING
        if self.rejected_reason:
            return ToolState.REJECTED
        reviewed = self.latest_id in (self.approved_id, self.kept_against_id)
        return ToolState.AVAILABLE if self.approved_id and reviewed else ToolState.WAITING


class DefinitionChange(models.Model):
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
